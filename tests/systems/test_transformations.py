"""Under JAX's transformations, debuggers and compilers."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export
from jax.experimental import checkify
from steps import each_branch

import optax_lossscale as ols

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.25, 0.5])}
LS = ols.DynamicLossScale(initial_scale=1024, growth_interval=3)
TX = ols.with_loss_scale(optax.adamw(1e-2), LS)
STATE = TX.init(PARAMS)
X = jnp.array([[1.0, 2.0], [0.5, -1.0]])
OVERFLOW = jnp.full((2, 2), jnp.inf)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def train_step(params, state, x, tx=TX):
    _, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x)
    return tx.apply_gradients(grads, state, params)


def test_a_step_leaks_no_tracer():
    with jax.checking_leaks():
        params, state = PARAMS, STATE
        for x in (X, OVERFLOW):
            params, state = jax.jit(train_step)(params, state, x)
    assert state.skipped_steps == 1


def test_debug_nans_stops_at_an_overflow_unless_it_is_off_around_the_step():
    with jax.debug_nans(True):
        _, state = jax.jit(train_step)(PARAMS, STATE, X)
        assert state.should_apply
        gradient = ols.value_and_scaled_grad(loss_fn, STATE)
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(gradient(PARAMS, OVERFLOW))
        with jax.debug_nans(False):
            _, state = jax.jit(train_step)(PARAMS, STATE, OVERFLOW)
    assert not state.should_apply


def test_checkify_errors_of_the_model_come_through():
    def checked_loss(params, x):
        checkify.check(jnp.all(x < 1e20), "inputs are too large: {}", x.max())
        return loss_fn(params, x)

    step = lambda state, x: TX.minimize(checked_loss, state, PARAMS, x)
    checked = jax.jit(checkify.checkify(step))
    error, _ = checked(STATE, X)
    error.throw()
    error, (_, _, state) = checked(STATE, OVERFLOW)
    with pytest.raises(checkify.JaxRuntimeError, match="too large"):
        error.throw()
    assert not state.should_apply


@each_branch
def test_one_exported_program_serves_every_platform(branch):
    tx = ols.with_loss_scale(optax.adamw(1e-2), LS, branch=branch)
    # jax.export cannot serialize a loss scale, a class of its own: so leaves cross.
    leaves, treedef = jax.tree.flatten((PARAMS, tx.init(PARAMS)))

    @jax.jit
    def step(leaves, x):
        return jax.tree.leaves(train_step(*jax.tree.unflatten(treedef, leaves), x, tx))

    exported = export.export(step, platforms=["cpu", "cuda", "tpu"])(leaves, X)
    again = export.deserialize(exported.serialize())
    for x in (X, OVERFLOW):
        chex.assert_trees_all_equal(again.call(leaves, x), step(leaves, x))


def test_a_step_compiled_ahead_of_time_takes_its_own_results():
    abstract = jax.eval_shape(lambda: (PARAMS, TX.init(PARAMS)))
    compiled = jax.jit(train_step).lower(*abstract, X).compile()
    params, state = compiled(PARAMS, STATE, X)
    _, state = compiled(params, state, OVERFLOW)
    assert state.skipped_steps == 1


def test_dtypes_are_the_same_in_x64_mode():
    with jax.enable_x64(True):
        state = TX.init(PARAMS)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, STATE)
        params, state = jax.jit(train_step)(PARAMS, state, X)
        chex.assert_trees_all_equal_shapes_and_dtypes((params, state), (PARAMS, STATE))


@pytest.mark.parametrize("loss_scale", ["dynamic", "headroom", 8])
def test_strict_promotion_of_dtypes(loss_scale):
    tx = ols.with_loss_scale(optax.sgd(1e-2), loss_scale)
    with jax.numpy_dtype_promotion("strict"):
        params, state = PARAMS, tx.init(PARAMS)
        for x in (X, OVERFLOW):
            params, state = train_step(params, state, x, tx)
        assert 2 ** ols.metrics(state)["log2_loss_scale"] == state.loss_scale()
