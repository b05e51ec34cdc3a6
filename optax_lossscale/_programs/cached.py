"""`cached_by_program`: computes a function of a program once per jaxpr, not per call.

JAX traces a jitted function once and shares its jaxpr between all calls. If `f` calls
`g` twice, `g` calls `h` twice, and so on, then ten jaxprs stand for a thousand calls,
and a function that visited every call would take exponential time. Put this cache on a
function that looks into inner programs: the function then visits each jaxpr once.

The cache cannot help once calls are inlined, because each call then has equations of
its own. `flat` inlines short programs, and `all_flat` inlines all of them.
"""

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import TypeVar

from optax_lossscale._programs.versions import AnyJaxpr

Result = TypeVar("Result")


def cached_by_program(function: Callable[..., Result]) -> Callable[..., Result]:
    """Caches the results of a function of a program and other hashable arguments.

    The function must be pure, with one exception: it may call `users_line`, whose
    result depends on the current directory and on the imported frameworks. The cache
    keeps the lines of the first call.

    A result is freed together with its program. It may refer to parts of the program
    but not to the program itself, because the cache would then keep the program alive
    forever.
    """
    results_by_program: weakref.WeakKeyDictionary[AnyJaxpr, dict[Hashable, Result]] = (
        weakref.WeakKeyDictionary()
    )

    @functools.wraps(function)
    def cached(program: AnyJaxpr, *args: Hashable) -> Result:
        results = results_by_program.setdefault(program, {})
        if args not in results:
            results[args] = function(program, *args)
        return results[args]

    return cached
