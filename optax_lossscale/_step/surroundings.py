"""What Optax put around a transformation, which only the callers of its `init` tell.

Where Optax changes its own names, nothing is found, and so nothing refused.
"""

import inspect
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType

import optax

_CHAIN = optax.chain(optax.identity()).init.__code__  # pyrefly: ignore[missing-attribute]
_NAMED_CHAIN = optax.named_chain(("", optax.identity())).init.__code__  # pyrefly: ignore[missing-attribute]


def refuse_multi_steps() -> None:
    """Raises inside the `init` of an `optax.MultiSteps`.

    It would sum scaled gradients and clear the sums by multiplying them by 0, which leaves NaN
    of infinity: from the first overflow on, every window would be skipped.
    """
    if any(_callers(optax.MultiSteps.init.__code__)):
        raise ValueError(
            "optax.MultiSteps around with_loss_scale would sum scaled gradients, and keep the NaN "
            "of the first overflow in its sums for good. Accumulate inside, where gradients are "
            "unscaled and a bad micro-batch is left out alone: "
            "with_loss_scale(optax.MultiSteps(inner, k))"
        )


def is_followed_in_a_chain() -> bool:
    """Whether a chain is making its state, and has come to a member that is not its last."""
    # The members of `optax.chain` are called by a generator expression inside its `init`.
    for expression in filter(inspect.iscode, _CHAIN.co_consts):
        for frame in _callers(expression):
            members = frame.f_back.f_locals.get("init_fns", ()) if frame.f_back else ()
            if frame.f_locals.get("fn") in members[:-1]:
                return True
    for frame in _callers(_NAMED_CHAIN):
        members = [tx for _, tx in frame.f_locals.get("transforms", ())]
        if frame.f_locals.get("tx") in members[:-1]:
            return True
    return False


def _callers(code: CodeType) -> Iterator[FrameType]:
    """The frames of the running calls of a function, the innermost first."""
    frames = traceback.walk_stack(inspect.currentframe())
    return (frame for frame, _ in frames if frame.f_code is code)
