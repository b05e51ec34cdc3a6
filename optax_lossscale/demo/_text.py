"""Reads the text that the demo trains on: the source of Python's standard library."""

import pathlib
import sysconfig

import numpy as np

from optax_lossscale.demo._model import CONTEXT

BATCH = 16


def read():
    """Reads the standard library's top-level modules into one array of bytes; uint8."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return np.frombuffer(text, np.uint8)


def batches(text, steps, seed):
    """Draws random excerpts of the text; int32, shape (steps, BATCH, CONTEXT + 1).

    An excerpt has CONTEXT bytes of input and one more that follows them. The same seed
    draws the same excerpts.
    """
    rng = np.random.default_rng(seed)
    n_starts = len(text) - CONTEXT
    starts = rng.integers(n_starts, size=(steps, BATCH, 1))
    offsets = np.arange(CONTEXT + 1)
    excerpts = text[starts + offsets]
    return excerpts.astype(np.int32)
