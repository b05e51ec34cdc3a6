"""No module imports from a floor above its own, and claims about versions agree."""

import ast
import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "optax_lossscale"
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
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def imported_floors(path):
    """The floors that a module imports from; the package itself is the top."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "optax_lossscale":
                yield FLOORS.get(rest.partition(".")[0], max(FLOORS.values()))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_module_imports_from_a_floor_above_its_own(path):
    own = FLOORS[path.relative_to(PACKAGE).parts[0].removesuffix(".py")]
    assert max(imported_floors(path), default=0) <= own


def test_the_oldest_versions_that_are_tried_are_the_lower_bounds():
    oldest = (ROOT / ".ci/oldest.txt").read_text().splitlines()
    assert {r.replace(">=", "==") for r in PROJECT["dependencies"]} <= set(oldest)


def test_the_pythons_that_are_claimed_are_those_that_are_tried():
    claimed = re.findall(r":: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    workflows = [path.read_text() for path in (ROOT / ".github/workflows").iterdir()]
    [matrix] = set(re.findall(r"python: \[(.*)\]", "".join(workflows)))
    assert claimed == re.findall(r"[\d.]+", matrix)
    assert PROJECT["requires-python"] == f">={claimed[0]}"
