"""The documents' code runs, and the API reference has every public name, with an example."""

import importlib
import inspect
import json
import pathlib
import re

import pytest

import optax_lossscale as ols
from optax_lossscale import plot

ROOT = pathlib.Path(__file__).parents[2]


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
@pytest.mark.parametrize(
    "program", FRAMEWORKS, ids=["nnx", "trainer", "linen", "equinox", "haiku", "taps"]
)
def test_each_frameworks_program_runs(program):
    assert "\nassert " in program
    if "nnx.as_pure" in program and not hasattr(importlib.import_module("flax.nnx"), "as_pure"):
        program = program.replace("nnx.as_pure", "nnx.pure")
    exec(program, {})


SEVERAL_LOSSES = programs("docs/several_losses.md")


@pytest.mark.parametrize("program", SEVERAL_LOSSES, ids=["two", "shared", "apex", "alternating"])
def test_with_several_losses(program):
    assert "\nassert " in program
    exec(program, {})


NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_all_seven_notebooks_are_found():
    assert len(NOTEBOOKS) == 7


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_keep_clean_outputs_and_are_in_the_documentation(name):
    """That they run is shown by `.ci/run`, which executes them."""
    notebook = json.loads((ROOT / "notebooks" / name).read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(cell["execution_count"] for cell in cells)
    assert {output["output_type"] for output in outputs} <= {
        "display_data",
        "execute_result",
        "stream",
    }
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert f"../notebooks/{name.removesuffix('.ipynb')}\n" in (ROOT / "docs/index.md").read_text()


def public(module):
    """The public things of a module under their full names, and those of its public modules."""
    functions = {
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    }
    names = getattr(module, "__all__", [name for name in functions if not name.startswith("_")])
    for name in sorted(names):
        value = getattr(module, name)
        yield f"{module.__name__}.{name}", value
        if inspect.ismodule(value):
            yield from public(value)


PUBLIC = dict([*public(ols), *public(plot)])
REFERENCE = "".join(path.read_text() for path in (ROOT / "docs").glob("api*.md"))
DOCUMENTED = re.findall(r"^\.\. auto\w+:: ([\w.]+)", REFERENCE, re.M)
# What has its example with the function that returns it, raises it or takes it.
RESULTS = {
    f"optax_lossscale.{name}"
    for name in (
        "Explanation",
        "InitialScale",
        "LossScaleError",
        "LossScaleState",
        "LossScaledTransformation",
        "MasterWeightsState",
        "Probe",
        "Summary",
        "Suspect",
        "UnderflowReport",
        "plot.underflow",
    )
}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_api_reference_once(name):
    assert DOCUMENTED.count(name) == 1


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - RESULTS))
def test_every_public_name_has_a_docstring_with_an_example(name):
    documented = inspect.getdoc(PUBLIC[name])
    assert documented
    assert inspect.ismodule(PUBLIC[name]) or re.search("^ *>>> .*import", documented, re.M)
