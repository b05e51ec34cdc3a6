"""The text that the demo trains on: the source of Python's standard library."""

import pathlib
import sysconfig

import numpy as np

from optax_lossscale.demo._model import CONTEXT

BATCH = 16


def read():
    """The source of the standard library's top-level modules, one uint8 array."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return np.frombuffer(text, np.uint8)


def batches(text, steps, seed):
    """Random excerpts of the text; int32, shape (steps, BATCH, CONTEXT + 1).

    The same seed gives the same excerpts.
    """
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(text) - CONTEXT, (steps, BATCH, 1))
    excerpts = text[starts + np.arange(CONTEXT + 1)]
    return excerpts.astype(np.int32)
