"""What goes wrong in 16 bits if all of a model is cast to them, and goes right under autocast.

Each function here begins with a matrix product, whose result is in 16 bits, and goes on with what
overflows, underflows, or loses its digits there. All of it is float32 code, without a cast.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_float32 import assert_as_in_float32, assert_close, normal
from jax import lax
from pairs import one_in

import optax_lossscale as ols

CASES = {}


def case(*, rows=16, width=32, size=1.0, parameters=(), **options):
    """Registers a loss of activations and parameters.

    The activations are the product of an input and a weight, about `size` large. The weight is a
    permutation, so that float16 holds them exactly: a loss may be as ill-conditioned as it likes.
    The weight and `parameters` are differentiated, as is the input.
    """

    def register(loss):
        fun = lambda p, x: loss(x @ p["w"], p)
        p = {"w": permutation(width), **dict(parameters)}
        CASES[loss.__name__] = fun, p, normal(0, rows, width, scale=size), options
        return loss

    return register


def permutation(n):
    """A matrix that multiplies by 1 or -1 and permutes, so that nothing is rounded."""
    rng = np.random.default_rng(n)
    return np.eye(n, dtype=np.float32)[rng.permutation(n)] * rng.choice(
        [-1.0, 1.0], (n, 1)
    ).astype("f")


def through(y):
    """A number of many, that go through another product first and so are in 16 bits."""
    z = y @ permutation(y.shape[-1])
    signs = np.random.default_rng(7).choice([-1.0, 1.0], y.shape).astype(np.float32)
    return jnp.sum(z * signs) + jnp.sum(z * z) / 2


# --- norms of activations whose squares are above 65504 ---


@case(size=300.0)
def rms_norm(h, p):
    return through(h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6))


@case(size=300.0)
def rms_norm_by_einsum(h, p):
    return through(h * lax.rsqrt(jnp.einsum("nd,nd->n", h, h)[:, None] / 32 + 1e-6))


# --- softmax, masks, losses ---


@case(size=300.0)
def softmax(h, p):
    return through(jax.nn.softmax(h))


@case(size=5.0)
def masked_by_where(h, p):
    h = jnp.where(jnp.tri(16, 32, dtype=bool), h, -1e9)
    return through(jax.nn.softmax(h))


# --- sums of many ---


@case(rows=3200, size=1.0)
def mean_square_of_100_000_numbers(h, p):
    return jnp.mean(h**2)


@case(rows=4096, size=1.0)
def cumulative_sum_by_scan_of_activations(h, p):
    """What is carried begins with an activation, which is in 16 bits."""
    total, _ = lax.scan(lambda c, row: (c + row, None), h[0], jnp.abs(h) + 10)
    return jnp.mean(total) / 1e4


@case(rows=4096, parameters=[("bias", normal(2, 32)), ("scale", normal(3, 32))])
def bias_and_scale_of_many_rows(h, p):
    return jnp.sum(jnp.tanh(h * p["scale"] + p["bias"])) / 100


@case(rows=1)
def activations_broadcast_to_many_rows(h, p):
    return jnp.sum(jnp.tanh(jnp.broadcast_to(h, (32768, 32)) + 1)) / 100


@case(rows=2)
def activations_gathered_many_times(h, p):
    return jnp.sum(jnp.tanh(h[jnp.arange(16384) % 2] + 1)) / 100


@case(rows=1)
def an_activation_used_in_every_round_of_a_scan(h, p):
    def step(c, t):
        return c + jnp.sum(jnp.tanh(h + t)), None

    return lax.scan(step, 0.0, jnp.linspace(0, 1, 4096))[0] / 100


# Its gradient is a sum over rounds in the dtype of the product's operand: a limit.
@case(rows=1, within=0.1)
def an_activation_multiplied_in_every_round_of_a_scan(h, p):
    def step(c, t):
        return jnp.tanh(jnp.abs(h) @ jnp.abs(p["w"])) * t, jnp.sum(c)

    return jnp.sum(lax.scan(step, h, jnp.linspace(0.5, 1, 1024))[1]) / 100


# --- small numbers ---


@case(size=0.0)
def rms_norm_of_zeros(h, p):
    return jnp.sum(h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)) + 1


@case(size=1.0, parameters=[("gamma", jnp.full(32, 1e-6)), ("v", permutation(32))])
def layer_scale(h, p):
    """As ConvNeXt and CaiT begin: what is added by the block is multiplied by 1e-6."""
    return through(h + jax.nn.relu(h @ p["v"]) * p["gamma"])


# --- large numbers ---


@case(size=300.0)
def gated(h, p):
    """Two activations of 300, multiplied: the product is above 65504."""
    return through(jax.nn.silu(h) * jnp.roll(h, 1, 0) / 1e4)


@case(size=12000.0)
def large_products_added(h, p):
    return through((h + h + h + h) / 1e5)


# --- what a product takes and something that needs float32 reads as well ---


@case(size=1.5, parameters=[("critic", permutation(32))])
def action_and_its_log_probability_after_the_critic(h, p):
    action = jnp.tanh(h)
    value = jnp.mean((jax.nn.relu(action @ p["critic"]) @ p["critic"]) ** 2)
    return value - jnp.mean(jnp.log(1 - action**2 + 1e-6))


@case(size=1.0)
def coordinates_and_their_fourier_features(h, p):
    z = 0.001 * jnp.tanh(h) + np.linspace(0, 1, 32, dtype="f")
    return through(z) / 1e2 + jnp.mean(jnp.sin(1000 * z))


# --- what crosses into another function ---


@case(size=300.0)
def large_numbers_into_remat_with_a_product(h, p):
    f = jax.checkpoint(lambda y: jax.nn.relu(y / 1e4) @ p["w"])
    return through(f(h * jnp.roll(h, 1, 0)))


@case(size=300.0)
def large_numbers_into_a_custom_derivative(h, p):
    f = jax.custom_jvp(lambda y, w: (y / 1e4) @ w)
    f.defjvp(lambda xs, ts: jax.jvp(lambda y, w: (y / 1e4) @ w, xs, ts))
    return through(f(h * jnp.roll(h, 1, 0), p["w"]))


EACH = ("each", normal(5, 1000, 8, 8, scale=0.3))


@case(rows=4, width=8, parameters=[EACH])
def moving_average_beside_layers(h, p):
    def layer(carry, w):
        h, average = carry
        h = jnp.tanh(h @ w)
        return (h, 0.999 * average + 0.001 * h), None

    return jnp.mean(lax.scan(layer, (h, h), p["each"])[0][1] ** 2)


PERMUTATIONS = ("each", np.stack([permutation(32)] * 3))


@case(size=300.0, parameters=[PERMUTATIONS])
def large_numbers_into_layers(h, p):
    y = h * jnp.roll(h, 1, 0)
    return through(
        lax.scan(lambda y, w: (y + (y / 1e4) @ w, None), y, p["each"])[0] / 1e4
    )


@one_in(2, "case", CASES)
def test_value_and_gradient_are_those_of_float32(case):
    fun, p, x, options = case
    assert_as_in_float32(fun, p, x, **options)


@pytest.mark.parametrize("unit", [3e4, 1e-8])
def test_a_sum_in_a_unit_of_its_own_is_as_in_float32(unit):
    """Each product is about 1, and their sum, in that unit, is nothing for float16."""

    def fun(p, x):
        y = 2 * (unit * (x @ p["w"])) + 2 * (unit * jnp.tanh(x @ p["v"]))
        return through(jnp.tanh(y / unit)) + jnp.mean((y / unit) ** 2)

    p = {"w": permutation(32), "v": permutation(32)[::-1]}
    assert_as_in_float32(fun, p, normal(0, 16, 32))


@pytest.mark.parametrize(
    "widen", [lambda y: y * 200.0 * 200.0, lambda y: y - jnp.exp(jnp.mean(y))]
)
def test_a_sum_beyond_the_range_of_16_bits_is_finite(widen):
    """Past another product, before which it would be stored in 16 bits if it were in range."""

    def fun(w, x):
        z = widen(16 * x @ w) + x @ w
        return jnp.sum(jnp.log1p(jnp.abs(z + jnp.tanh(z * 1e-7) @ w)))

    w, x = jnp.eye(8), jnp.ones((4, 8))
    assert_close(ols.autocast(fun)(w, x), fun(w, x), 0.01)


def test_steps_whose_size_is_a_parameter_are_not_lost():
    """Half an ulp of the weights in float16 is more than a step."""

    def adapted(p, x):
        inner = lambda w: jnp.mean((x @ w - 1) ** 2)
        w = p["w"]
        for _ in range(8):
            w = w - p["rate"] * jax.grad(inner)(w)
        return 1e3 * (inner(w) - inner(p["w"]))

    p, x = {"w": normal(0, 8, 8), "rate": jnp.float32(1e-3)}, normal(1, 16, 8)
    step = lambda f: jax.jit(jax.value_and_grad(f))(p, x)
    assert_close(step(ols.autocast(adapted)), step(adapted), 0.05)


def test_a_product_over_one_number_stays_in_float32():
    """As an outer product: it sums nothing, and is as long as its result to compute."""
    x, y = normal(0, 8, scale=1000) + 0.123, normal(1, 4)
    loss = lambda x, y: jnp.sum(jnp.sin(x[:, None] @ y[None]))
    step = jax.value_and_grad(ols.autocast(loss), (0, 1))
    exact = jax.value_and_grad(loss, (0, 1))(x, y)
    chex.assert_trees_all_close(step(x, y), exact, rtol=1e-4, atol=1e-3)
    assert jnp.dtype(jnp.float16) not in ols.dtype_report(step, x, y).shares
