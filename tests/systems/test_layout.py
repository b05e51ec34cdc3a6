"""The package stands on floors, and no module imports from a floor above its own."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "optax_lossscale"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"

# Each floor has its folders and files; the package itself, `__init__.py`, lies on top
# of them all.
FLOORS = {
    "_arrays": 1,
    "_programs": 2,
    "_scales": 2,
    "skips": 2,
    "_autocast": 3,
    "_step": 3,
    "_diagnosis": 4,
    "plot": 4,
    "demo": 5,
    "testing": 5,
}
TOP = max(FLOORS.values())
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def imported(source):
    """The parts of the package that a module imports from; "" for the package itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports inside the package are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "optax_lossscale":
                part = rest.partition(".")[0]
                yield part if part in FLOORS else ""


def upwards(part, source):
    """The imports of a module in `part` that go up a floor."""
    return [
        other for other in imported(source) if FLOORS.get(other, TOP) > FLOORS[part]
    ]


@pytest.mark.parametrize(
    "path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_no_module_imports_from_a_floor_above_its_own(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert upwards(part, path.read_text()) == []


def test_contributing_has_each_part_on_its_floor():
    rows = re.findall(r"^\| (\d): [^|]*\|([^|]+)\|$", CONTRIBUTING.read_text(), re.M)
    parts = r"`(\w+)(?:\.py|/)`"
    listed = {
        part: int(floor) for floor, row in rows for part in re.findall(parts, row)
    }
    assert listed == FLOORS
    assert {path.relative_to(PACKAGE).parts[0] for path in MODULES} == {
        path.name
        for part in FLOORS
        for path in (PACKAGE / part, PACKAGE / f"{part}.py")
        if path.exists()
    }


def test_each_file_says_in_its_first_line_what_it_is_about():
    first_lines = [path.read_text().partition("\n")[0] for path in MODULES]
    assert all(re.fullmatch(r'"""[^"]+(""")?', line) for line in first_lines)
    assert len(set(first_lines)) == len(first_lines)


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("_arrays", "from optax_lossscale._step.get_loss_scale import resolve"),
        ("_programs", "from optax_lossscale._autocast.narrow import narrow"),
        ("_scales", "from optax_lossscale import _step"),
        ("skips", "import optax_lossscale._step.gradient"),
        (
            "_step",
            "def f():\n    from optax_lossscale._diagnosis.report import Diagnosis",
        ),
        ("_diagnosis", "from optax_lossscale import testing"),
        ("_diagnosis", "import optax_lossscale as ols"),
    ],
)
def test_an_import_that_goes_up_a_floor_is_seen(part, line):
    assert len(upwards(part, line)) == 1


def test_imports_that_stay_on_a_floor_or_go_down_are_allowed():
    source = (
        "import jax\n"
        "from optax_lossscale import skips\n"
        "import optax_lossscale._arrays.finite"
    )
    assert upwards("_scales", source) == []
    assert (
        upwards(
            "demo", "import optax_lossscale as ols\nfrom optax_lossscale import plot"
        )
        == []
    )
