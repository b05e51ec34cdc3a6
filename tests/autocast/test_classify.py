"""The first pass of autocast by itself: of what kind a value is, by what it is made of."""

import jax
import jax.numpy as jnp
import pytest
from against_float32 import normal

from optax_lossscale._autocast.classify import Kind, classify
from optax_lossscale._programs.flat import flat

W = normal(0, 4, 4)
GAIN = normal(1, 4)
X = normal(2, 3, 4)


def kind_of(fun):
    """Of the result of a function of a matrix, a gain and an input that is no parameter."""
    program = jax.make_jaxpr(fun, axis_env=[("devices", 2)])(W, GAIN, X)
    kinds = classify(program, (Kind.PARAMETER, Kind.PARAMETER, Kind.FLOAT32))
    return kinds[flat(program).outs[0]]


def centred(h):
    return h - jnp.mean(h, -1, keepdims=True)


@pytest.mark.parametrize(
    ("kind", "fun"),
    [
        (Kind.PARAMETER, lambda w, g, x: (w * 2).T + g),
        (Kind.PARAMETER, lambda w, g, x: w[jnp.array([0, 2])] * 45.0),
        (Kind.PRODUCT, lambda w, g, x: (x @ w).T),
        (Kind.SUM, lambda w, g, x: jnp.where(x > 0, x @ w, 0.0)),
        (Kind.SUM, lambda w, g, x: jnp.where(x > 0, x @ w, g)),
        (Kind.SUM, lambda w, g, x: x @ w + 1),
        (Kind.PRODUCT, lambda w, g, x: jax.lax.psum(x @ w, "devices")),
        (Kind.SUM, lambda w, g, x: x @ w + g),
        (Kind.SUM, lambda w, g, x: x @ w + x @ (w * 2)),
        (Kind.SUM, lambda w, g, x: x @ w + jnp.tanh(x @ w)),
        (Kind.NEAR, lambda w, g, x: x @ w * 3),
        (Kind.NEAR, lambda w, g, x: x @ w * 0.01 / 8),
        (Kind.FLOAT32, lambda w, g, x: x @ w * 200),
        (Kind.FLOAT32, lambda w, g, x: x @ w / 0.01),
        (Kind.SUM, lambda w, g, x: jnp.minimum(x @ w + 200, 6)),
        (Kind.NEAR, lambda w, g, x: jax.nn.sigmoid(x @ w)),
        (Kind.NEAR, lambda w, g, x: jnp.tanh(jnp.tanh(x @ w) * g)),
        (Kind.NEAR, lambda w, g, x: centred(x @ w)),
        (Kind.NEAR, lambda w, g, x: centred(x @ w) * g),
        (Kind.NEAR, lambda w, g, x: x @ w * g),
        (Kind.NEAR, lambda w, g, x: x @ w * (x > 0)),
        (Kind.SUM, lambda w, g, x: x @ w * g + x @ w * g),
        (Kind.NEAR, lambda w, g, x: x @ w / (jnp.linalg.norm(x @ w) + 1e-6)),
        # What is computed from a mean or a norm is none.
        (Kind.FLOAT32, lambda w, g, x: x @ w - jnp.exp(jnp.mean(x @ w))),
        (Kind.FLOAT32, lambda w, g, x: x @ w - (jnp.mean(x @ w) + jnp.exp(x @ w))),
        (
            Kind.FLOAT32,
            lambda w, g, x: x @ w * (jax.lax.rsqrt(jnp.mean((x @ w) ** 2)) * 1e6),
        ),
        (Kind.FLOAT32, lambda w, g, x: x @ w / jnp.linalg.norm(x @ w * 1e-7)),
        # A standard deviation or a mean may be 0 where numbers are large.
        (Kind.FLOAT32, lambda w, g, x: x @ w / (jnp.std(x @ w) + 1e-7)),
        (Kind.NEAR, lambda w, g, x: centred(x @ w) / (jnp.std(x @ w) + 1e-7)),
        (
            Kind.NEAR,
            lambda w, g, x: jax.nn.standardize(x @ w, axis=(0, 1)) * g,
        ),
        (
            Kind.FLOAT32,
            lambda w, g, x: x @ w * jax.lax.rsqrt(jnp.mean(x @ w) ** 2 + 1e-12),
        ),
        # By a norm of fewer numbers, it may have any size.
        (
            Kind.FLOAT32,
            lambda w, g, x: x @ w * jax.lax.rsqrt(jnp.mean((x @ w)[:2] ** 2)),
        ),
        (
            Kind.FLOAT32,
            lambda w, g, x: jnp.take(
                x @ w, jnp.array([9]), 0, mode="fill", fill_value=-1e9
            ),
        ),
        # Other numbers that `jnp.take` fills gaps with are NaN by default.
        (Kind.PRODUCT, lambda w, g, x: jnp.take(x @ w, jnp.array([9]), 0)),
        (Kind.PARAMETER, lambda w, g, x: jnp.take(w, jnp.array([9]), 0)),
        (Kind.FLOAT32, lambda w, g, x: jnp.exp(x @ w)),
        (Kind.FLOAT32, lambda w, g, x: jnp.sum(x @ w)),
        (Kind.FLOAT32, lambda w, g, x: (x @ w) * (x @ w)),
        (Kind.FLOAT32, lambda w, g, x: (x @ w) / g),
        (Kind.FLOAT32, lambda w, g, x: x @ w + x),
        (Kind.FLOAT32, lambda w, g, x: jax.lax.erf_inv(x @ w)),
    ],
)
def test_a_kind_is_that_of_what_a_value_is_made_of(kind, fun):
    assert kind_of(fun) == kind
    assert kind_of(jax.jit(fun)) == kind
