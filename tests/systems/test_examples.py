"""The programs in `examples/`, in a short form; `test_processes.py` has the distributed one."""

import functools
import importlib.util
import os
import pathlib
import subprocess
import sys

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

ROOT = pathlib.Path(__file__).parents[2]

# the frameworks', not ours
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def load(name, **sizes):
    """A program as a module of its own, with smaller sizes."""
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for size, value in sizes.items():
        assert hasattr(example, size)
        setattr(example, size, value)
    return example


def language_model():
    return load("language_model", BATCH=4, CONTEXT=32, WIDTH=32, BLOCKS=1)


def diffusion():
    return load("diffusion", BATCH=16, WIDTH=32, BLOCKS=1)


def policy_gradient():
    return load("policy_gradient", CARTS=32)


def language_model_step():
    example = language_model()
    graph, params = example.nnx.split(example.LanguageModel(example.nnx.Rngs(0)))
    tx, train_step = example.make_train_step(graph)
    batch = example.batch(example.read_documents(), 0)
    return train_step, params, tx.init(params), batch


def diffusion_step():
    example = diffusion()
    model = example.Mixer(jax.random.key(0))
    tx, train_step = example.make_train_step()
    params = eqx.filter(model, eqx.is_inexact_array)
    average = jax.tree.map(jnp.copy, params)
    return train_step, model, average, tx.init(params), jax.random.key(1)


def policy_gradient_step():
    example = policy_gradient()
    params, carts = example.init(jax.random.key(0)), example.reset(jax.random.key(1))
    tx, train_step = example.make_train_step(100)
    return jax.jit(train_step), (params, tx.init(params), carts), jax.random.key(2)


STEPS = {
    "language_model": language_model_step,
    "diffusion": diffusion_step,
    "policy_gradient": policy_gradient_step,
}
each_program = pytest.mark.parametrize("name", STEPS)


@functools.cache
def step_and_arguments(name):
    """The training step and its first arguments, made once, as it takes seconds to compile."""
    train_step, *args = STEPS[name]()
    return train_step, args


@pytest.mark.slow
@each_program
def test_the_step_is_right_and_every_product_is_in_float16(name):
    train_step, args = step_and_arguments(name)
    ols.testing.assert_scale_invariant(train_step, *args)
    ols.testing.assert_computes_in(train_step, jnp.float16, *args)


def overflowing(args):
    """A copy of the arguments, with a loss scale at which the gradients overflow."""
    copy = jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, args)
    is_scale = lambda x: isinstance(x, ols.LossScale)
    raised = lambda x: x.replace(loss_scale=2.0**30) if is_scale(x) else x
    return jax.tree.map(raised, copy, is_leaf=is_scale)


@pytest.mark.slow
@each_program
def test_a_skipped_step_is_counted(name):
    train_step, args = step_and_arguments(name)
    *_, metrics = train_step(*overflowing(args))
    assert not metrics["should_apply"]
    assert metrics["skipped_steps"] == 1


@pytest.mark.slow
def test_a_skipped_step_leaves_the_average_of_the_diffusion_models_parameters():
    train_step, (model, average, *rest) = step_and_arguments("diffusion")
    elsewhere = jax.tree.map(jnp.ones_like, average)  # so that it would move
    before = jax.tree.map(np.asarray, elsewhere)
    _, after, *_ = train_step(*overflowing([model, elsewhere, *rest]))
    chex.assert_trees_all_equal(after, before)


@pytest.mark.slow
def test_the_language_model_learns_in_float16_as_in_float32(monkeypatch):
    losses = lambda logged: np.array([metrics["loss"] for metrics in logged])
    half = losses(language_model().main(steps=40)[-1])
    monkeypatch.setattr(ols, "autocast", lambda fun: fun)
    single = losses(language_model().main(steps=40)[-1])
    assert half[-10:].mean() < 0.8 * half[0]
    np.testing.assert_allclose(half, single, rtol=2e-3)


@pytest.mark.slow
def test_the_cart_learns_to_balance_its_pole():
    returns, _ = policy_gradient().main(steps=150)
    assert returns[-1] > 1.5 * returns[0]


@pytest.mark.slow
def test_the_language_model_resumes_as_if_it_had_not_stopped(tmp_path):
    example = language_model()
    _, _, before = example.main(steps=2, checkpoint=tmp_path)
    model, state, after = example.main(steps=4, checkpoint=tmp_path)
    undisturbed, undisturbed_state, logged = example.main(steps=4)
    parameters = lambda model: jax.tree.leaves(example.nnx.state(model))
    chex.assert_trees_all_equal(parameters(model), parameters(undisturbed))
    chex.assert_trees_all_equal(state, undisturbed_state)
    chex.assert_trees_all_equal(before + after, logged)


@pytest.mark.slow
@each_program
def test_the_command_in_its_docstring_runs(name):
    script = ROOT / "examples" / f"{name}.py"
    assert f"\n    python examples/{name}.py\n" in script.read_text()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    command = [sys.executable, script, "--steps", "20"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout


def test_every_program_is_in_the_documentation():
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    for path in (ROOT / "examples").glob("*.py"):
        assert any(f"(../examples/{path.name})" in page for page in pages)
