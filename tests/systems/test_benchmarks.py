"""The benchmarks run, and their pages say what they found."""

import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import (
    _accelerators,
    _autocast,
    _hlo,
    _policies,
    _report,
    _sections,
    _skips,
    _tables,
)

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ROOT / "docs" / "benchmarks"


def test_the_page_is_what_the_results_make():
    found = json.loads((PAGES / "results.json").read_text())
    assert list(found) == ["machine", *_sections.SECTIONS]
    assert _report.page(found) == (PAGES / "README.md").read_text()


@pytest.mark.parametrize("module", [_accelerators, _autocast, _policies])
def test_a_page_is_what_its_csv_makes(module):
    name = module.__name__.partition("._")[2]
    found = _tables.read(PAGES / f"{name}.csv")
    assert module.page(found) == (PAGES / f"{name}.md").read_text()


def test_the_tables_of_skips_are_those_of_its_csv():
    page = (PAGES / "skips.md").read_text()
    assert _skips.with_tables(page, _tables.read(PAGES / "skips.csv")) == page


def test_tables_come_back_from_csv_as_they_were(tmp_path):
    tables = {"a, b": {"row": {"x": "1", "y": 'a "quoted" cell'}}, "c": {"": {"x": ""}}}
    _tables.write(tmp_path / "tables.csv", tables)
    assert _tables.read(tmp_path / "tables.csv") == tables


def test_the_pages_name_the_same_version():
    named = {
        name: set(re.findall(r"optax_lossscale (\d+\.\d+\.\d+)", (PAGES / name).read_text()))
        for name in ("README.md", "accelerators.md", "autocast.md", "policies.md", "skips.md")
    }
    [version] = set.union(*named.values())
    assert named == {name: {version} for name in named}


MOVED = {  # bytes; x has 4096, the others have 32
    "a whole array": (jnp.exp, 4096 + 4096),
    "a slice": (lambda x: jnp.exp(x[:8]), 32 + 32),
    "rows": (lambda x: jnp.exp(x[jnp.arange(8) ** 2]), 32 + 32),
    "slices and the whole": (lambda x: jnp.exp(x + x[:1] + x[5:6]), 4096 + 4096),
    "in place": (lambda x: x.at[8:16].set(2.0), 32),
}


@pytest.mark.parametrize("case", MOVED)
def test_of_what_a_kernel_takes_slices_of_only_these_count_as_moved(case):
    function, expected = MOVED[case]
    compiled = jax.jit(function, donate_argnames="x" if case == "in place" else ())
    program = _hlo.Program(compiled.lower(jnp.ones(1024)).compile())
    assert expected <= program.bytes_moved <= expected + 64  # of indices and scalars


@pytest.mark.slow
def test_every_section_runs_and_is_on_the_page(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "--quick", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = json.loads((tmp_path / "results.json").read_text())
    assert all(found[name] for name in _sections.SECTIONS)
    assert (tmp_path / "README.md").read_text() == _report.page(found)
