"""The documents' code runs: every python block of docs/, whole or continuing the one before."""

import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def programs(path):
    """The blocks of a document, each that is `continued` joined to the one before it."""
    found = []
    text = (ROOT / path).read_text()
    for info, code in re.findall(r"^```python(.*?)\n(.*?)^```", text, re.S | re.M):
        if "continued" in info:
            found[-1] += code
        else:
            found.append(code)
    return found


FRAMEWORKS = programs("docs/frameworks.md")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the frameworks', not ours
@pytest.mark.parametrize("program", FRAMEWORKS, ids=["nnx", "linen", "equinox", "haiku"])
def test_training_with_a_framework(program):
    assert "assert losses[-1] < losses[0]" in program
    if "nnx.as_pure" in program and not hasattr(importlib.import_module("flax.nnx"), "as_pure"):
        program = program.replace("nnx.as_pure", "nnx.pure")
    exec(program, {})
