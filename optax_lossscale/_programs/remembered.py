"""What is said of a program, found out once, however many places hold or call it.

JAX shares the jaxpr of a jitted function between its calls. So a program may hold far
fewer programs than it runs: if a function calls another twice, which calls another
twice, and so on.
"""

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def remembered(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """A pure function of a program and other arguments, whose results live as long as the program.

    A result may hold what is in the program, but not the program itself, which would
    then stay.
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
