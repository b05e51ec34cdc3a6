"""`cached_by_program`: a cache for the results of functions of a program.

JAX shares the jaxpr of a jitted function between all of its calls. If a function calls
another twice, which calls a third twice, and so on, a program of few jaxprs makes
exponentially many calls. A cached function computes its result once for each jaxpr, and
not for each call. It does not help where a flat program copies the inner one for each
call: `flat` does so for short programs, `all_flat` for all.
"""

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Result = TypeVar("Result")


def cached_by_program(function: Callable[..., Result]) -> Callable[..., Result]:
    """Caches the results of a function of a program and other hashable arguments.

    The function has to be pure. One that calls `users_line` is not quite: its lines
    depend on the current directory and the imported frameworks, and stay as at the
    first call. A result is freed with its program. It may refer to parts of the
    program, but not to the program itself, which would then never be freed.
    """
    results: weakref.WeakKeyDictionary[Any, dict[Hashable, Result]] = (
        weakref.WeakKeyDictionary()
    )

    @functools.wraps(function)
    def cached(program: Any, *args: Hashable) -> Result:
        of_program = results.setdefault(program, {})
        if args not in of_program:
            of_program[args] = function(program, *args)
        return of_program[args]

    return cached
