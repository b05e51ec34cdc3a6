"""`python -m optax_lossscale.demo`, as it is called."""

import pathlib
import subprocess
import sys

import pytest

from optax_lossscale import demo


@pytest.fixture
def small_model(monkeypatch, tmp_path):
    """Compiles sooner, and draws elsewhere."""
    monkeypatch.setattr(demo, "WIDTH", 16)
    monkeypatch.setattr(demo, "BLOCKS", 1)
    monkeypatch.setattr(demo, "STEPS", 12)
    monkeypatch.chdir(tmp_path)


def png_size(path):
    """Width and height, from the PNG's header."""
    header = pathlib.Path(path).read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def rows(output):
    lines = [line for line in output.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: row for name, *row in cells[2:]}


@pytest.mark.slow
def test_it_shows_what_the_readme_claims(tmp_path):
    command = [sys.executable, "-m", "optax_lossscale.demo"]
    done = subprocess.run(command, capture_output=True, check=True, cwd=tmp_path)
    table = rows(done.stdout.decode())
    assert list(table) == list(demo.RUNS)
    float32, unscaled, scaled = (float(row[0]) for row in table.values())
    assert abs(scaled / float32 - 1) < 0.005
    assert unscaled / float32 > 1.1
    assert int(table["float16, dynamic scale"][1]) > 0
    assert png_size(tmp_path / "loss_scaling.png") > (800, 600)


@pytest.mark.slow
def test_undivided_the_model_needs_no_loss_scale(monkeypatch):
    """A claim of docs/do_i_need_this.md."""
    monkeypatch.setattr(demo, "MICRO_BATCHES", 1)
    names = ("float32", "float16, no loss scale")
    float32, float16 = (demo.train(*demo.RUNS[name])["loss"] for name in names)
    assert abs(float16[-40:].mean() / float32[-40:].mean() - 1) < 0.005


def test_a_few_steps_of_a_small_model_make_a_table_and_a_picture(small_model, capsys):
    demo.main()
    captured = capsys.readouterr()
    assert list(rows(captured.out)) == list(demo.RUNS)
    assert not captured.err
    assert png_size("loss_scaling.png") > (800, 600)


def test_without_matplotlib_it_names_the_extra_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as stopped:
        demo.main()
    assert "pip install 'optax_lossscale[demo]'" in stopped.value.code
    assert "\n" not in stopped.value.code
