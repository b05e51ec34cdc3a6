"""The benchmarks run, and their pages say what they found."""

import json
import math
import os
import pathlib
import re
import runpy
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks import (
    _accelerators,
    _alone,
    _autocast,
    _gpu,
    _gpu_report,
    _gpu_steps,
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


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "accelerators.md",
        "autocast.md",
        "policies.md",
        "skips.md",
    ],
)
def test_a_page_names_the_version_that_it_was_measured_with(page):
    """Or the one after which it was; no page is older than the last but one."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)[:2]
    version = r"optax_lossscale (?:between )?(\d+\.\d+\.\d+)"
    [named] = set(re.findall(version, (PAGES / page).read_text()))
    assert named in newest


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


FAILURES = {
    "raises": (math.sqrt, -1.0, "ValueError"),
    "dies": (os._exit, 3, "exit code 3"),
    "does not end": (time.sleep, 600.0, "longer than 1 s"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_what_fails_in_a_process_of_its_own_is_said_in_a_line(case):
    function, argument, said = FAILURES[case]
    seconds = 1 if case == "does not end" else 60
    with pytest.raises(_alone.CallError, match=said) as caught:
        _alone.call(function, argument, seconds=seconds)
    assert "\n" not in str(caught.value)


def test_what_returns_in_a_process_of_its_own_returns():
    assert _alone.call(math.sqrt, 4.0, seconds=60) == 2.0


def in_this_process(function, *args, seconds):
    try:
        return function(*args)
    except Exception as error:
        raise _alone.CallError(_alone.reason(error)) from None


def too_large(cast):
    raise RuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nMore"
    )


def rows(report):
    """Of all tables, by their first cells."""
    lines = [line for line in report.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: others for first, *others in cells}


@pytest.mark.slow
def test_the_report_of_a_gpu_has_a_row_for_all_that_is_measured_and_all_that_fails(
    monkeypatch, capsys
):
    models = dict.fromkeys(_gpu_steps.FULL, too_large) | {
        "LSTM": _gpu_steps.TINY["LSTM"]
    }
    monkeypatch.setitem(_gpu_steps.SIZES, "tiny", models)
    monkeypatch.setattr(_gpu_steps, "ROUND_S", 0.0)
    monkeypatch.setattr(_alone, "call", in_this_process)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu", "--quick"])
    runpy.run_module("benchmarks", run_name="__main__")
    report, progress = capsys.readouterr()
    assert "**This was a CPU" in report
    found = rows(report)
    for way in _gpu_steps.WAYS:
        for model in _gpu_steps.FULL:
            first, *others = found[f"{model}, {way}"]
            if model == "LSTM":
                assert float(first.split()[0]) > 0
                assert others[-1].startswith("0 of ")
            else:
                assert [first, *others] == ["out of memory", *[""] * 6]
        means = [float(cell) for cell in found[way][:6]]
        assert means[0] > means[-1]
    assert len(progress.splitlines()) == 1 + 5 * len(_gpu_steps.WAYS)


def costs(ms=1.0, peak=2**20, peak_of_compiling=False):
    return _gpu_steps.Costs(
        ms, (0.5, 2.0), peak, peak_of_compiling, 2**20, 1.0, 1.0, 0, 9
    )


def test_the_report_of_a_gpu_compares_with_float32_where_there_is_something_to_compare():
    float32, by_hand, autocast = _gpu_steps.WAYS
    found = {
        (model, way): costs() for model in _gpu_steps.FULL for way in _gpu_steps.WAYS
    }
    found["Mamba", autocast] = costs(0.5, 2**19, True)
    found["LSTM", float32] = _alone.CallError("took longer than 9 s")
    learned = {float32: [2.0, 1.0], by_hand: [2.0, 1.5], autocast: [2.0, math.nan]}
    for way, losses in learned.items():
        found[_gpu_report.LEARNING, way] = _gpu_steps.Losses(losses, 3, 128.0)
    page = _gpu_report.page({"platform": "gpu", "device": "a card"}, found)
    table = rows(page)
    assert page.startswith("## optax_lossscale on a card\n")
    assert "CPU" not in page
    assert table["Mamba, autocast"][0] == "0.50 (0.50)"
    assert table["Mamba, autocast"][2] == "≤ 0.5 (0.50)"
    assert table["LSTM, float32"][0] == "took longer than 9 s"
    assert table["LSTM, autocast"][0] == "1.00"
    assert [table[way][-3] for way in _gpu_steps.WAYS] == ["", "0.5000", "inf"]


def test_when_the_ten_minutes_are_over_the_rest_is_not_run():
    found = _gpu.measure("full", deadline=time.monotonic())
    assert {str(result) for result in found.values()} == {
        "not run, as the ten minutes were over"
    }


WITHOUT_EXTRAS = """
import runpy, sys
for name in ("flax", "jmp", "matplotlib", "tqdm"):
    sys.modules[name] = None
import benchmarks._gpu
for argument in ("--help", "here"):
    sys.argv = ["benchmarks", argument]
    try:
        runpy.run_module("benchmarks", run_name="__main__")
    except SystemExit as error:
        print(error)
"""


@pytest.mark.slow
def test_without_the_extras_the_gpu_is_reported_and_what_else_is_missing_is_named():
    command = [sys.executable, "-c", WITHOUT_EXTRAS]
    result = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    )
    said = "python -m benchmarks here needs tqdm: pip install '.[benchmarks]'"
    assert "python -m benchmarks gpu " in result.stdout
    assert result.stdout.splitlines()[-1] == said


@pytest.mark.parametrize(
    "file", [".github/ISSUE_TEMPLATE/gpu_report.yml", "docs/benchmarks/gpus.md"]
)
def test_where_reports_of_gpus_go_the_command_is_named(file):
    lines = (ROOT / file).read_text().splitlines()
    assert "python -m benchmarks gpu > report.md" in [line.strip() for line in lines]


@pytest.mark.slow
def test_the_report_of_a_gpu_is_what_its_command_prints():
    command = [sys.executable, "-m", "benchmarks", "gpu", "--quick"]
    result = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    )
    found = rows(result.stdout)
    assert all(
        " of " in found[f"{m}, {w}"][-1]
        for m in _gpu_steps.FULL
        for w in _gpu_steps.WAYS
    )
    assert all(float(found[way][0]) > 0 for way in _gpu_steps.WAYS)
