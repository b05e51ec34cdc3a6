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


def remembered(of: Callable[..., Answer]) -> Callable[..., Answer]:
    """A pure function of a program and other arguments, whose results live as long as the program.

    A result may hold what is in the program, but not the program itself, which would
    then stay.
    """
    answers: weakref.WeakKeyDictionary[Any, dict[Hashable, Answer]] = (
        weakref.WeakKeyDictionary()
    )

    @functools.wraps(of)
    def ask(program: Any, *how: Hashable) -> Answer:
        known = answers.setdefault(program, {})
        if how not in known:
            known[how] = of(program, *how)
        return known[how]

    return ask
