"""The text that the demo trains on: a file, or the source of Python's standard library."""

import pathlib
import sysconfig
from collections.abc import Iterator

import numpy as np

from optax_lossscale.demo._model import CONTEXT

BATCH = 16


def read(path: str | None) -> np.ndarray:
    """The bytes of a file, or of the standard library's top-level modules."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py")) if path is None else [pathlib.Path(path)]
    text = b"".join(file.read_bytes() for file in files)
    if len(text) <= CONTEXT:
        raise ValueError(
            f"{path or library} holds {len(text)} bytes; the demo needs at least "
            f"{CONTEXT + 1}"
        )
    return np.frombuffer(text, np.uint8)


def batches(text: np.ndarray, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Random excerpts: int32, shape (BATCH, CONTEXT + 1), the same for the same seed."""
    rng = np.random.default_rng(seed)
    offsets = np.arange(CONTEXT + 1)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - CONTEXT, BATCH)
        excerpts = text[starts[:, None] + offsets]
        yield excerpts.astype(np.int32)
