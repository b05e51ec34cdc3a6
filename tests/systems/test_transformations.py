"""Under JAX's transformations, debuggers and compilers."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.experimental import checkify

import optax_lossscale as ols

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.25, 0.5])}
LS = ols.DynamicLossScale(initial_scale=1024, growth_interval=3)
TX = ols.with_loss_scale(optax.adamw(1e-2), LS)
BAD = jax.tree.map(lambda p: p * jnp.inf, PARAMS)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def train_step(params, state, x):
    loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x)
    params, state = TX.apply_gradients(grads, state, params)
    return params, state, loss


X = jnp.array([[1.0, 2.0], [0.5, -1.0]])
OVERFLOW = jnp.full((2, 2), 1e30)


def test_a_step_leaks_no_tracer():
    with jax.checking_leaks():
        params, state = PARAMS, TX.init(PARAMS)
        for x in (X, OVERFLOW):
            params, state, _ = jax.jit(train_step)(params, state, x)
    assert state.skipped_steps == 1


def test_debug_nans_stops_at_an_overflow_and_at_nothing_else():
    """What docs/diagnosis.md says: leave it off, or switch it off around the step."""
    with jax.debug_nans(True):
        _, state, _ = jax.jit(train_step)(PARAMS, TX.init(PARAMS), X)
        assert state.should_apply
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(
                ols.value_and_scaled_grad(loss_fn, state)(PARAMS, OVERFLOW * jnp.inf)[1]
            )
        with jax.debug_nans(False):
            _, state, _ = jax.jit(train_step)(PARAMS, state, OVERFLOW * jnp.inf)
    assert not state.should_apply


def test_checkify_errors_of_the_model_come_through():
    def checked_loss(params, x):
        checkify.check(jnp.all(x < 1e20), "inputs are too large: {}", x.max())
        return loss_fn(params, x)

    def step(params, state, x):
        loss, grads = ols.value_and_scaled_grad(checked_loss, state)(params, x)
        return TX.apply_gradients(grads, state, params), loss

    checked = jax.jit(checkify.checkify(step))
    error, ((_, state), _) = checked(PARAMS, TX.init(PARAMS), X)
    error.throw()
    error, ((_, state), _) = checked(PARAMS, TX.init(PARAMS), OVERFLOW)
    with pytest.raises(checkify.JaxRuntimeError, match="too large"):
        error.throw()
    assert not state.should_apply


def test_checkify_of_floats_stops_at_an_overflow():
    checked = checkify.checkify(train_step, errors=checkify.float_checks)
    error, _ = jax.jit(checked)(PARAMS, TX.init(PARAMS), X)
    error.throw()
    error, _ = jax.jit(checked)(PARAMS, TX.init(PARAMS), OVERFLOW * jnp.inf)
    assert error.get() is not None


def test_an_exported_step_gives_the_same_results():
    state = TX.init(PARAMS)
    # A loss scale is a class of its own, for which jax.export has no serialization; so
    # the leaves cross, and the tree is put together again on the other side.
    leaves, treedef = jax.tree.flatten((PARAMS, state))

    def step(leaves, x):
        params, state = jax.tree.unflatten(treedef, leaves)
        *carry, loss = train_step(params, state, x)
        return jax.tree.leaves(tuple(carry)), loss

    exported = export.export(jax.jit(step), platforms=["cpu", "cuda", "tpu"])(leaves, X)
    again = export.deserialize(exported.serialize())
    for x in (X, OVERFLOW):
        new, loss = again.call(leaves, x)
        expected, expected_loss = jax.jit(step)(leaves, x)
        chex.assert_trees_all_equal((new, loss), (expected, expected_loss))


def test_a_step_compiled_ahead_of_time_takes_its_own_results():
    state = TX.init(PARAMS)
    compiled = jax.jit(train_step).lower(PARAMS, state, X).compile()
    params, state, _ = compiled(PARAMS, state, X)
    params, state, _ = compiled(params, state, OVERFLOW)
    assert state.skipped_steps == 1
    abstract = jax.eval_shape(lambda: (PARAMS, TX.init(PARAMS)))
    jax.jit(train_step).lower(*abstract, X).compile()(params, state, X)


@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_are_the_same_in_x64_mode(x64):
    with jax.enable_x64(x64):
        tx = ols.with_loss_scale(optax.adamw(1e-2), LS)
        params, state = PARAMS, tx.init(PARAMS)
        before = jax.tree.map(lambda x: x.dtype, state)
        for x in (X, OVERFLOW, X):
            _, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x)
            params, state = jax.jit(tx.apply_gradients)(grads, state, params)
        assert jax.tree.map(lambda x: x.dtype, state) == before
        assert state.skipped_steps.dtype == np.int32
        assert state.loss_scale().dtype == np.float32
        assert params["w"].dtype == np.float32


@pytest.mark.parametrize(
    "loss_scale",
    [LS, ols.HeadroomLossScale(), 8],
)
def test_strict_promotion_of_dtypes(loss_scale):
    tx = ols.with_loss_scale(optax.sgd(1e-2), loss_scale)
    with jax.numpy_dtype_promotion("strict"):
        params, state = PARAMS, tx.init(PARAMS)
        for scaled_grads in (PARAMS, BAD):
            params, state = tx.apply_gradients(scaled_grads, state, params)
        _, state = jax.jit(tx.update)(PARAMS, state, params)
        assert 2 ** ols.metrics(state)["log2_loss_scale"] == state.loss_scale()


def test_a_rematerialized_loss_has_the_same_gradients():
    remat = lambda params, x: jax.checkpoint(loss_fn)(params, x)
    chex.assert_trees_all_close(
        ols.value_and_scaled_grad(remat, LS)(PARAMS, X)[1],
        ols.value_and_scaled_grad(loss_fn, LS)(PARAMS, X)[1],
        rtol=1e-6,
    )


def test_scan_is_the_loop():
    xs = jnp.stack([X, OVERFLOW, X, X, X])

    def body(carry, x):
        *carry, loss = train_step(*carry, x)
        return tuple(carry), (loss, carry[1].loss_scale())

    scanned, (_, scales) = jax.jit(functools.partial(jax.lax.scan, body))(
        (PARAMS, TX.init(PARAMS)), xs
    )
    np.testing.assert_array_equal(scales, [1024, 512, 512, 512, 1024])
    looped = (PARAMS, TX.init(PARAMS))
    for x in xs:
        *looped, _ = jax.jit(train_step)(*looped, x)
    chex.assert_trees_all_close(tuple(looped), scanned, rtol=1e-6)
