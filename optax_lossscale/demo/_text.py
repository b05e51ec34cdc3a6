"""The text that the demo trains on: the source of Python's standard library."""

import pathlib
import sysconfig

import numpy as np

from optax_lossscale.demo._model import CONTEXT

BATCH = 16


def read():
    """The bytes of the standard library's top-level modules."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return np.frombuffer(text, np.uint8)


def batches(text, steps, seed):
    """Random excerpts: int32, shape (BATCH, CONTEXT + 1), the same for the same seed."""
    rng = np.random.default_rng(seed)
    offsets = np.arange(CONTEXT + 1)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - CONTEXT, BATCH)
        yield text[starts[:, None] + offsets].astype(np.int32)
