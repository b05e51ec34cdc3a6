"""`remembered`: a cache for pure functions of a program.

JAX shares the jaxpr of a jitted function between all of its calls. If a function calls
another twice, which calls a third twice, and so on, a program of few jaxprs makes
exponentially many calls. A function that is remembered computes its result once for
each jaxpr, and not for each call. Only the result of `all_flat` has the equations of
each call, as it is to be run.
"""

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def remembered(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Caches the results of a pure function of a program and other hashable arguments.

    A result is forgotten with its program. It may refer to parts of the program, but
    not to the program itself, which would then never be freed.
    """
    answers: weakref.WeakKeyDictionary[Any, dict[Hashable, Answer]] = (
        weakref.WeakKeyDictionary()
    )

    @functools.wraps(function)
    def ask(program: Any, *args: Hashable) -> Answer:
        of_program = answers.setdefault(program, {})
        if args not in of_program:
            of_program[args] = function(program, *args)
        return of_program[args]

    return ask
