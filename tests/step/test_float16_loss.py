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
with_aux = lambda w: (half_loss(w), "aux")


def line(warning):
    """The line of source that a warning points to."""
    return linecache.getline(warning.filename, warning.lineno)


def value_and_grad():
    ols.value_and_scaled_grad(half_loss, STATE)(W)  # here


def value_and_grad_with_aux():
    ols.value_and_scaled_grad(with_aux, STATE, has_aux=True)(W)  # here


def value_and_grad_compiled():
    jax.jit(lambda w: ols.value_and_scaled_grad(half_loss, STATE)(w))(W)  # here


def value_and_grad_mapped():
    jax.vmap(ols.value_and_scaled_grad(half_loss, STATE))(jnp.ones((2, 3)))  # here


def grad():
    ols.value_and_scaled_grad(half_loss, STATE)(W)[1]  # here


def minimize():
    TX.minimize(half_loss, STATE, W)  # here


def scale_gradient():
    def loss_fn(w):
        return ols.scale_gradient(half_loss(w), STATE)  # here

    jax.jit(jax.value_and_grad(loss_fn))(W)


def a_fixed_scale_that_is_too_large():
    ols.value_and_scaled_grad(half_loss, 65520)(W)  # here


def a_number_that_is_traced():
    step = lambda w, scale: ols.value_and_scaled_grad(half_loss, scale)(w)  # here
    jax.jit(step)(W, jnp.float32(8))


WARN = [
    value_and_grad,
    value_and_grad_with_aux,
    value_and_grad_compiled,
    value_and_grad_mapped,
    grad,
    minimize,
    scale_gradient,
    a_fixed_scale_that_is_too_large,
    a_number_that_is_traced,
]


@pytest.mark.parametrize("program", WARN, ids=[program.__name__ for program in WARN])
def test_it_is_warned_of_at_the_line_that_differentiates_it(program):
    with pytest.warns(UserWarning, match=r"the loss is float16.*in float32") as w:
        program()
    assert len(w) == 1
    assert "# here" in line(w[0])


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"]
)
def test_a_loss_with_float32s_range_is_fine(dtype):
    ols.value_and_scaled_grad(loss_in(dtype), STATE)(W)
    ols.scale_gradient(loss_in(dtype)(W), STATE)


@pytest.mark.parametrize(
    "loss_scale",
    [
        None,
        1,
        65519,
        jnp.float32(128),
        ols.DynamicLossScale(max_scale=2.0**15),
    ],
    ids=["none", "one", "fixed", "array", "dynamic"],
)
def test_it_is_fine_where_the_loss_scale_stays_within_float16(loss_scale):
    _, grads = ols.value_and_scaled_grad(half_loss, loss_scale)(W)
    assert jnp.isfinite(grads).all()
    ols.scale_gradient(half_loss(W), loss_scale)


def test_what_the_warning_says_is_so():
    for scale, is_finite in ((65519, True), (65520, False)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            half = ols.value_and_scaled_grad(half_loss, scale)(W * 2.0**-10)[1]
        assert (jnp.isfinite(half) == is_finite).all()
        assert jnp.isfinite(
            ols.value_and_scaled_grad(loss_in(jnp.float32), scale)(W * 2.0**-10)[1]
        ).all()


def test_diagnose_does_not_warn_and_what_is_traced_afterwards_does():
    loss_fn = jax.jit(lambda p, x: ols.scale_gradient(jnp.sum(p * x), 2.0**16))
    inputs = jnp.ones(3, jnp.float16), jnp.ones(3, jnp.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ols.diagnose(loss_fn, *inputs)
    with pytest.warns(UserWarning, match="the loss is float16"):
        loss_fn(*inputs)
