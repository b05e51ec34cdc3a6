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


def centered(h):
    return h - jnp.mean(h, -1, keepdims=True)


def variance(h):
    return jnp.mean(centered(h) ** 2, -1, keepdims=True)


@pytest.mark.parametrize(
    ("kind", "fun"),
    [
        (Kind.PARAMETER, lambda w, g, x: (w * 2).T + g),
        (Kind.LARGE, lambda w, g, x: w[jnp.array([0, 2])] * 45.0),
        (Kind.NARROWED, lambda w, g, x: (x @ w).T),
        (Kind.SUM, lambda w, g, x: jnp.where(x > 0, x @ w, 0.0)),
        (Kind.SUM, lambda w, g, x: jnp.where(x > 0, x @ w, g)),
        (Kind.SUM, lambda w, g, x: x @ w + 1),
        (Kind.NARROWED, lambda w, g, x: jax.lax.psum(x @ w, "devices")),
        (Kind.SUM, lambda w, g, x: x @ w + g),
        (Kind.SUM, lambda w, g, x: x @ w + x @ (w * 2)),
        (Kind.SUM, lambda w, g, x: x @ w + jnp.tanh(x @ w)),
        (Kind.NEAR, lambda w, g, x: x @ w * 3),
        (Kind.NEAR, lambda w, g, x: x @ w * 0.01 / 8),
        (Kind.FLOAT32, lambda w, g, x: x @ w * 200),
        (Kind.FLOAT32, lambda w, g, x: x @ w / 0.01),
        (Kind.SUM, lambda w, g, x: jnp.minimum(x @ w + 200, 6)),
        (Kind.SUM, lambda w, g, x: jnp.clip(x @ w, 0, 6)),
        (Kind.SUM, lambda w, g, x: jnp.clip(x @ w, 0.0, 6.0)),
        (Kind.FLOAT32, lambda w, g, x: jnp.clip(x @ w, 0, 1000)),
        (Kind.NEAR, lambda w, g, x: jax.nn.sigmoid(x @ w)),
        (Kind.NEAR, lambda w, g, x: jnp.tanh(jnp.tanh(x @ w) * g)),
        (Kind.NEAR, lambda w, g, x: centered(x @ w)),
        (Kind.NEAR, lambda w, g, x: centered(x @ w) * g),
        (Kind.NEAR, lambda w, g, x: x @ w * g),
        (Kind.NEAR, lambda w, g, x: x @ w * (x > 0)),
        (Kind.SUM, lambda w, g, x: x @ w * g + x @ w * g),
        (
            Kind.FLOAT32,
            lambda w, g, x: jnp.take(
                x @ w, jnp.array([9]), 0, mode="fill", fill_value=-1e9
            ),
        ),
        # Other numbers that `jnp.take` fills gaps with are NaN by default.
        (Kind.NARROWED, lambda w, g, x: jnp.take(x @ w, jnp.array([9]), 0)),
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


NORMALIZED = [
    centered,
    lambda h: h / (jnp.linalg.norm(h) + 1e-6),
    lambda h: h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6),
    lambda h: centered(h) / (jnp.std(h) + 1e-7),
    lambda h: centered(h) * jax.lax.rsqrt(variance(h) + 1e-12),
    lambda h: jax.nn.standardize(h, axis=(0, 1)),
    lambda h: centered(centered(h)),
    lambda h: h / jnp.where((norm := jnp.linalg.norm(h)) > 0, norm, 1.0),
    lambda h: (h - jnp.zeros(4)) / jnp.maximum(jnp.linalg.norm(h), 1e-12),
    # Over devices, and over the examples of a `vmap` as well as over their numbers
    lambda h: h - jax.lax.pmean(h.mean(0), "devices"),
    lambda h: h - h.mean(0).mean(0),
]
# A divisor that may be 0 where numbers are large, or a subtrahend larger than these
OTHERS = [
    lambda h: h - jnp.sum(h),
    lambda h: h - jnp.sum(h) / 1e-6,
    lambda h: h - jnp.sum(h) / W[0, 0],
    lambda h: h - jnp.mean(h**2),
    lambda h: h - jnp.exp(jnp.mean(h)),
    lambda h: h - (jnp.mean(h) + jnp.exp(h)),
    lambda h: h / jnp.mean(h),
    lambda h: h * jax.lax.rsqrt(jnp.mean(h) ** 2 + 1e-12),
    lambda h: h * jax.lax.rsqrt(jnp.mean(h**3) + 1e-12),
    lambda h: h * (jax.lax.rsqrt(jnp.mean(h**2)) * 1e6),
    lambda h: h * jax.lax.rsqrt(jnp.mean(h**2) / 1e12),
    lambda h: h * jax.lax.rsqrt(jnp.mean(h[:2] ** 2)),
    lambda h: h * jax.lax.rsqrt(jnp.where(h > 0, jnp.mean(h**2), 0.0) + 1e-12),
    lambda h: h / jnp.where(h > 0, jnp.linalg.norm(h), 1e-9),
    lambda h: h / (jnp.linalg.norm(h) - 1.0),
    lambda h: h / (2.0 / jnp.linalg.norm(h)),
    lambda h: ((0.0 - h) - jnp.mean(h)) / jnp.std(h),
    lambda h: (h - 1.0) / jnp.linalg.norm(h),
    lambda h: h / (jnp.linalg.norm(h) + -1.0),
    lambda h: h / jnp.linalg.norm(h * 1e-7),
    lambda h: h / jnp.linalg.norm(h * 0.004 * 0.004 * 0.004),
    lambda h: h / (jnp.linalg.norm(h) * 0.004 * 0.004),
    lambda h: h / (jnp.linalg.norm(X @ (W * 2)) + 1e-6),
    lambda h: h * jax.lax.rsqrt(jnp.mean((X @ (W * 2)) ** 2) + 1e-12),
    lambda h: h / (jnp.std(h) + 1e-7),
    lambda h: (centered(h) + 1) * jax.lax.rsqrt(variance(h) + 1e-12),
    lambda h: jax.nn.sigmoid(centered(h)) * jax.lax.rsqrt(variance(h) + 1e-12),
]


@pytest.mark.parametrize(
    ("kind", "fun"),
    [(Kind.NEAR, fun) for fun in NORMALIZED] + [(Kind.FLOAT32, fun) for fun in OTHERS],
)
def test_a_value_is_normalized_only_by_its_own_mean_and_norm(kind, fun):
    assert kind_of(lambda w, g, x: fun(x @ w)) == kind
    assert kind_of(lambda w, g, x: fun(x @ w) * g) == kind


def test_what_is_multiplied_by_a_literal_of_several_factors_may_have_any_size():
    """In 16 bits, 200 * 200 times a value would be beyond the range of float16."""
    assert kind_of(lambda w, g, x: g * 200.0) == Kind.LARGE
    assert kind_of(lambda w, g, x: x @ w * (g * 200.0 * 200.0)) == Kind.FLOAT32
