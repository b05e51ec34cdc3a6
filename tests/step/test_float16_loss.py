"""A float16 loss keeps the loss scale down, and whoever computes one is told."""

import linecache
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

W = jnp.array([1.0, -2.0, 0.5])
TX = ols.with_loss_scale(optax.sgd(0.1))
STATE = TX.init(W)


def loss_in(dtype):
    return lambda w: jnp.mean((w.astype(jnp.float16) * 0.25).astype(dtype) ** 2)


half_loss = loss_in(jnp.float16)


def gradient():
    ols.value_and_scaled_grad(half_loss, STATE)(W)  # here


def with_aux():
    loss_fn = lambda w: (half_loss(w), "aux")
    ols.value_and_scaled_grad(loss_fn, STATE, has_aux=True)(W)  # here


def compiled():
    jax.jit(lambda w: ols.value_and_scaled_grad(half_loss, STATE)(w))(W)  # here


def minimize():
    TX.minimize(half_loss, STATE, W)  # here


def scale_gradient():
    ols.scale_gradient(half_loss(W), STATE)  # here


def fixed_and_too_large():
    ols.value_and_scaled_grad(half_loss, 65520)(W)  # here


def traced_number():
    step = lambda w, scale: ols.value_and_scaled_grad(half_loss, scale)(w)  # here
    jax.jit(step)(W, jnp.float32(8))


PROGRAMS = [gradient, with_aux, compiled, minimize, scale_gradient]
PROGRAMS += [fixed_and_too_large, traced_number]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_it_is_warned_of_at_the_line_that_differentiates_it(program):
    with pytest.warns(UserWarning, match=r"the loss is float16.*in float32") as w:
        program()
    [warning] = w
    assert "# here" in linecache.getline(warning.filename, warning.lineno)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loss_with_float32s_range_is_fine(dtype):
    ols.value_and_scaled_grad(loss_in(dtype), STATE)(W)
    ols.scale_gradient(loss_in(dtype)(W), STATE)


@pytest.mark.parametrize(
    "loss_scale", [None, 65519, ols.DynamicLossScale(max_scale=2.0**15)], ids=str
)
def test_it_is_fine_where_the_loss_scale_stays_within_float16(loss_scale):
    _, grads = ols.value_and_scaled_grad(half_loss, loss_scale)(W)
    assert jnp.isfinite(grads).all()


def test_what_the_warning_says_is_so():
    small = W * 2.0**-10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, grads = ols.value_and_scaled_grad(half_loss, 65520)(small)
    assert not jnp.isfinite(grads).any()
    _, grads = ols.value_and_scaled_grad(loss_in(jnp.float32), 65520)(small)
    assert jnp.isfinite(grads).all()
