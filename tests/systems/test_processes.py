"""Several processes: examples/distributed.py, as it is started by hand."""

import contextlib
import importlib.util
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "distributed.py"


def test_the_examples_step_depends_on_the_loss_scale_in_nothing():
    spec = importlib.util.spec_from_file_location("distributed", SCRIPT)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    mesh = jax.make_mesh((2,), ("data",))
    tx, train_step = example.optimizer_and_step(mesh, ols.DynamicLossScale())
    params, state = jax.device_put(example.initial(tx), NamedSharding(mesh, P()))
    ranks = [example.batch(0, rank, None) for rank in range(2)]
    x, y = (
        jax.device_put(np.concatenate(parts), NamedSharding(mesh, P("data")))
        for parts in zip(*ranks, strict=True)
    )
    ols.testing.assert_scale_invariant(train_step, params, state, x, y)


def start(*arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # for all of them to be stopped as one
    )


def finish(process, seconds=180):
    try:
        return process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def ends(out):
    """What each process said at the end: `(parameters, scale, skipped)`, in order."""
    pattern = r"process (\d+): parameters (\w+), scale (\S+), skipped (\d+)"
    return [found[1:] for found in sorted(re.findall(pattern, out))]


def follow(run, pattern):
    """Reads what the run prints up to a line that matches."""
    for line in run.stdout:
        if re.match(pattern, line):
            return
    pytest.fail(f"ended early: {run.stderr.read()[-2000:]}")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_all_processes_skip_when_one_overflows(processes):
    run = start("--processes", processes, "--steps", 12, "--overflow", 6, processes - 1)
    out, err = finish(run)
    assert run.returncode == 0, err
    assert re.findall(r"step (\d+): .* skipped", out) == ["6"], out
    assert len(ends(out)) == processes, out
    assert len(set(ends(out))) == 1, out
    assert ends(out)[0][1:] == ("16384", "1"), out


@pytest.mark.slow
def test_processes_with_another_configuration_do_not_start():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    rank = lambda i, interval: start(
        *("--processes", 2, "--coordinator", address, "--rank", i),
        *("--growth-interval", interval, "--steps", 3),
    )
    runs = [rank(0, 10), rank(1, 11)]
    ended = [finish(run) for run in runs]
    assert all(run.returncode != 0 for run in runs)
    assert not any("step 0" in out for out, _ in ended)
    assert any('"growth_interval": 11' in err for _, err in ended)


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_the_run_resumes_as_if_undisturbed(
    tmp_path,
):
    undisturbed, err = finish(start("--processes", 2, "--steps", 100))
    assert ends(undisturbed), err

    checkpoint = ("--checkpoint", tmp_path)
    run = start("--processes", 2, "--steps", 100, *checkpoint, "--heartbeat", 10)
    follow(run, r"step 1\d:")
    command = ["pgrep", "-P", str(run.pid)]
    children = subprocess.run(command, capture_output=True, text=True, check=True)
    os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    finish(run, 60)
    assert run.returncode != 0

    run = start("--processes", 2, "--steps", 100, *checkpoint)
    out, err = finish(run)
    assert run.returncode == 0, err
    assert int(re.search(r"step (\d+):", out)[1]) > 0
    assert ends(out) == ends(undisturbed)
