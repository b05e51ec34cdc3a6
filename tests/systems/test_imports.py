"""What is imported when, and that a first use inside of `jit` is like any other."""

import inspect
import subprocess
import sys

import pytest

import optax_lossscale as ols


def run(script, *arguments):
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    subprocess.run(command, check=True, timeout=600)


def test_what_reads_programs_or_draws_is_imported_when_it_is_used():
    run("""
import sys
import optax_lossscale as ols
ours = {name.split(".")[1] for name in sys.modules if name.startswith("optax_lossscale.")}
assert not ours & {"_programs", "_autocast", "_diagnosis", "testing", "plot"}, ours
assert callable(ols.autocast)
assert "optax_lossscale._programs.operations" in sys.modules
assert callable(ols.dtype_report) and callable(ols.testing.assert_computes_in)
""")


def test_without_matplotlib_all_else_works_and_plot_names_the_extra():
    run("""
import sys
sys.modules["matplotlib"] = None
import optax_lossscale as ols
ols.with_loss_scale
try:
    ols.plot
except ImportError as error:
    assert "pip install 'optax_lossscale[plot]'" in str(error)
else:
    raise AssertionError
""")


# A process that has imported JAX and this package forks for each use: so each is the
# first there.
FIRST_USE = """
import os, sys
import jax, jax.numpy as jnp, optax
import optax_lossscale as ols

inner = optax.sgd(0.1)

def loss_fn(w, x):
    return jnp.mean((x @ w) ** 2)

def traces_and_compilations(use):
    traces, compiled = [], []
    @jax.jit
    def step(w, x):
        traces.append(0)
        eval(use, globals(), {"w": w, "x": x})
        return w * 2
    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    step(w, x)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "compile" in event else None)
    step(w, x)
    return len(traces), compiled

for use in sys.argv[1:]:
    child = os.fork()
    if not child:
        result = traces_and_compilations(use)
        print(use, *result) if result != (1, []) else None
        sys.stdout.flush()
        os._exit(result != (1, []))
    assert os.waitpid(child, 0)[1] == 0, use
"""


def public_names():
    yield from (f"ols.{name}" for name in ols.__all__)
    yield from (f"ols.skips.{name}" for name in ols.skips.__all__)
    yield from (f"ols.testing.{name}" for name in ols.testing.__all__)
    yield "ols.plot.loss_scale"


@pytest.mark.slow
def test_what_is_first_used_inside_of_jit_is_traced_and_compiled_once():
    tx = "ols.with_loss_scale(inner)"
    calls = [
        "ols.autocast(loss_fn)(w, x)",
        "ols.scale_gradient(loss_fn(w, x), 8)",
        f"{tx}.minimize(loss_fn, {tx}.init(w), w, x)",
    ]
    run(FIRST_USE, *calls, *public_names())


def test_every_public_name_is_there_and_documented():
    assert {*ols.__all__, "plot"} <= set(dir(ols))
    for name in public_names():
        value = eval(name)
        assert inspect.ismodule(value) or isinstance(value, str) or value.__doc__
    with pytest.raises(
        AttributeError, match="'optax_lossscale' has no attribute 'plt'"
    ):
        ols.plt  # noqa: B018
