"""The benchmarks run, and count bytes rightly; their page has what they print."""

import argparse
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import (
    _accelerators,
    _autocast,
    _gpu,
    _gpu_steps,
    _hlo,
    _measure,
    _step,
    _ways,
)

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ROOT / "docs" / "benchmarks"


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


@pytest.mark.slow
def test_a_step_is_measured_here():
    found = rows(run("step", "--quick", "--only", *list(_step.TABLES)[:2]))
    assert set(_ways.ways(_accelerators.ADAMW)) < set(found)
    assert found["no loss scaling"][0] == "1.00 (1.00 to 1.00)"


@pytest.mark.parametrize("csv", sorted(PAGES.glob("*.csv")), ids=lambda csv: csv.name)
def test_a_table_on_the_page_is_the_one_that_is_printed(csv, capsys):
    section = {"accelerators": _accelerators, "autocast": _autocast}[csv.stem]
    options = {"section": csv.stem, "out": csv.parent, "report": True, "quick": False}
    section.main(argparse.Namespace(**options))
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


@pytest.mark.parametrize(
    ("seconds", "said"), [(60, "KeyError: 'no model'"), (0.1, "took longer than 0.1 s")]
)
def test_a_model_that_fails_is_a_row_that_says_so(seconds, said):
    row = _gpu.call("tiny", "no model", "float32", seconds=seconds)
    report = _gpu.report(
        {"platform": "gpu", "device": "a card"}, {("x", "float32"): row}
    )
    assert rows(report)["x, float32"][0].startswith(said)


def test_times_are_compared_within_a_round():
    clock = iter(range(10**6)).__next__
    slow = lambda: [clock() for _ in range(2)] and None
    found = _measure.alternate({"base": lambda: None, "slow": slow}, 3, clock=clock)
    assert found["base"] == (1, 1, (1, 1))
    assert found["slow"] == (3, 3, (3, 3))


MOVED = {  # bytes; x has 4096, the others have 32
    "a whole array": (jnp.exp, 4096 + 4096),
    "a slice": (lambda x: jnp.exp(x[:8]), 32 + 32),
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
