"""The benchmarks run, and count bytes rightly; their page has what they print."""

import argparse
import math
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import (
    _accelerators,
    _autocast,
    _compiled,
    _gpu,
    _gpu_steps,
    _hlo,
    _measure,
    _step,
    _targets,
    _ways,
)

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ROOT / "docs" / "benchmarks"
SECTIONS = {"accelerators": _accelerators, "autocast": _autocast}


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def rows(printed):
    """Of all tables, by their first cells."""
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: others for first, *others in cells}


# Sections


@pytest.mark.slow
def test_a_step_is_measured_here():
    found = rows(run("step", "--quick", "--only", *list(_step.TABLES)[:2]))
    assert set(_ways.ways(_accelerators.ADAMW)) < set(found)
    assert found["no loss scaling"][0] == "1.00 (1.00 to 1.00)"
    assert all(
        float(row[1]) > 0 for row in found.values() if row[1] not in ("ms", "---:")
    )


def report(section, folder):
    options = argparse.Namespace(section=section, out=folder, report=True, quick=False)
    SECTIONS[section].main(options)


def test_programs_come_back_from_their_file_as_tables(tmp_path, capsys):
    cost = _compiled.Costs(100, 1000, 10, 5)
    of = lambda way, target: _compiled.Case(_autocast.WHOLE_STEP, way, target)
    found = {of(way, "T4"): cost for way in _autocast.WAYS}
    found[of(_autocast.AUTOCAST, "T4")] = cost._replace(memory=50, moved=800)
    ring = _autocast.BETWEEN_DEVICES[0]
    for way, summed in ((_autocast.BY_HAND, 5), (_autocast.AUTOCAST, 20)):
        case = _compiled.Case(ring, way, "H100")
        found[case] = cost._replace(summed=summed)
    _compiled.write(tmp_path / "autocast.csv", found)
    assert _compiled.read(tmp_path / "autocast.csv") == found
    report("autocast", tmp_path)
    printed = rows(capsys.readouterr().out)
    assert printed["autocast"] == ["0.50 / 0.80"]
    assert printed[ring] == ["1.00", "2.00"]
    assert printed["LSTM"] == ["", ""]


def test_what_loss_scaling_adds_is_over_the_plain_step(tmp_path, capsys):
    params, _ = _accelerators.arguments(_accelerators.OPTIMIZER_STEP, False)
    size = sum(4 * p.size for p in params)
    of = lambda way: _compiled.Case(_accelerators.OPTIMIZER_STEP, way, "v5e")
    plain = _compiled.Costs(0, 7 * size, 0, 0)
    found = dict.fromkeys(map(of, _accelerators.WAYS), plain)
    found[of("JMP")] = _compiled.Costs(size // 2, 14 * size, 0, 0)
    _compiled.write(tmp_path / "accelerators.csv", found)
    report("accelerators", tmp_path)
    printed = rows(capsys.readouterr().out)
    assert printed["update"] == ["1.00 / 0%"]
    assert printed["JMP"] == ["2.00 / 50%"]


@pytest.mark.parametrize("csv", sorted(PAGES.glob("*.csv")), ids=lambda csv: csv.name)
def test_a_table_on_the_page_is_the_one_that_is_printed(csv, capsys):
    report(csv.stem, csv.parent)
    page = (PAGES / "findings.md").read_text()
    tables = [t for t in capsys.readouterr().out.strip().split("\n\n") if "|" in t]
    shown = [t for t in tables if t.splitlines()[0] in page]
    assert shown
    assert all(table in page for table in shown)


@pytest.mark.slow
def test_a_report_of_a_gpu_is_printed_without_one():
    printed = run("gpu", "--quick", "--only", _gpu_steps.LEARNER)
    assert "**This was a CPU" in printed
    found = rows(printed)
    for way in _gpu_steps.WAYS:
        first, last = map(float, found[f"{_gpu_steps.LEARNER}, {way}"][5].split(", "))
        assert last < first / 2
        assert found[f"{_gpu_steps.LEARNER}, {way}"][6].startswith("0 of ")


MEASURED = {"ms": [0.5, 1.0, 2.0], "peak": 2**20, "peak_of_compiling": 0}
MEASURED |= {"planned": 2**20, "compile_s": 1.0, "loss": [2.0, math.nan]}
MEASURED |= {"skipped": 3, "steps": 9}


def test_a_report_of_a_gpu_compares_with_float32_where_there_is_something_to_compare():
    float32, _, autocast = _gpu_steps.WAYS
    page = _gpu.report(
        {"platform": "gpu", "device": "a card"},
        {
            ("Mamba", float32): MEASURED,
            ("Mamba", autocast): MEASURED | {"peak": 2**19, "peak_of_compiling": 2**19},
            ("LSTM", float32): {"failed": "out of memory"},
            ("LSTM", autocast): MEASURED | {"ms": [0.1, 0.2, 0.3]},
        },
    )
    assert "This was a CPU" not in page
    found = rows(page)
    assert found["Mamba, float32"][0] == "1.00"
    assert found["Mamba, autocast"][0] == "1.00 (1.00)"
    assert found["Mamba, autocast"][2] == "≤ 0.5 (0.50)"
    assert found["LSTM, float32"] == ["out of memory", *[""] * 6]
    assert found["LSTM, autocast"][0] == "0.20"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(60, "KeyError: 'no model'"), (0.1, "took longer than 0.1 s"), (0, "not run")],
)
def test_what_fails_is_said_in_a_line(seconds, said):
    found = _gpu.call("tiny", "no model", "float32", seconds=seconds)
    assert found["failed"].startswith(said)
    error = RuntimeError("RESOURCE_EXHAUSTED: 9 bytes.\nMore")
    assert _gpu_steps.reason(error) == "out of memory"


@pytest.mark.parametrize(
    "file", [".github/ISSUE_TEMPLATE/gpu_report.yml", "docs/benchmarks/gpus.md"]
)
def test_where_reports_of_gpus_go_the_command_is_named(file):
    lines = (ROOT / file).read_text().splitlines()
    assert "python -m benchmarks gpu > report.md" in [line.strip() for line in lines]


WITHOUT_EXTRAS = """
import runpy, sys
sys.modules["flax"] = sys.modules["jmp"] = None
import benchmarks._gpu
sys.argv = ["benchmarks", "step"]
runpy.run_module("benchmarks", run_name="__main__")
"""


@pytest.mark.slow
def test_without_the_extras_the_gpu_is_measured_and_what_else_is_missing_is_named():
    command = [sys.executable, "-c", WITHOUT_EXTRAS]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = "python -m benchmarks step needs jmp: pip install '.[benchmarks]'"
    assert result.stderr.splitlines()[-1] == said


# What they are built of


def test_times_are_compared_within_a_round():
    clock = iter(range(10**6)).__next__
    slow = lambda: [clock() for _ in range(2)] and None
    found = _measure.alternate({"base": lambda: None, "slow": slow}, 3, clock=clock)
    assert found["base"] == (1, 1, (1, 1))
    assert found["slow"] == (3, 3, (3, 3))


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
    jitted = jax.jit(function, donate_argnums=(0,) if case == "in place" else ())
    program = _hlo.of(jitted.lower(jnp.ones(1024)).compile())
    assert expected <= program.bytes_moved <= expected + 64  # of indices and scalars


SCHEDULE = """
%sliced (p0: f32[1024], p1: f32[8]) -> f32[8] {
  %p0 = f32[1024]{0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  %s = f32[8]{0} slice(%p0), slice={[0:8]}
  ROOT %sum = f32[8]{0} add(%s, %p1)
}

%body (p: (f32[8])) -> (f32[8]) {
  %p = (f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=0
  %y = f32[8]{0} all-reduce(%x), to_apply=%add
  ROOT %t = (f32[8]{0}) tuple(%y)
}

ENTRY %main (a: f32[1024], b: f32[8]) -> f32[8] {
  %a = f32[1024]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %chip = f32[8]{0:T(256)S(1)} copy(%b)
  %start = ((f32[1024]{0}, f32[8]{0}), f32[8]{0}) fusion-start(%a, %b), calls=%sliced
  %done = f32[8]{0} fusion-done(%start)
  %t = (f32[8]{0}) tuple(%done)
  %w = (f32[8]{0}) while(%t), body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %r = f32[8]{0} get-tuple-element(%w), index=0
}
"""


def test_a_schedule_is_read_as_it_runs():
    program = _hlo.Program(SCHEDULE)
    moved = [(o.opcode, o.read, o.written) for o in program.operations]
    assert moved == [
        ("copy", 32, 0),  # onto the chip of a TPU
        ("fusion", 32 + 32, 32),  # asynchronous, of a slice and a whole
        *[("all-reduce", 32, 32)] * 3,  # in a loop
    ]
    assert sum(o.nbytes for o in program.collectives) == 96
    assert not program.copies


@pytest.mark.parametrize(
    ("name", "described", "major"),
    [("H100", "H100", 9), ("V100", "V100", 7), ("T4", "T4", 7)],
)
def test_a_gpu_is_described_to_the_compiler(name, described, major):
    text = _targets.TARGETS[name].one["target_config"]
    assert f"cuda_compute_capability {{ major: {major}" in text
    assert described in text.splitlines()[-1]
