"""What is rounded does not depend on how a function is wrapped, nor on what is returned beside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_float32 import equations, normal
from jax import lax
from pairs import product
from wrappers import WRAPPERS

import optax_lossscale as ols

X, Y = normal(0, 4, 8), normal(1, 4, 1)
BIAS = 3000.0


def dense(p, x):
    return x @ p["w"] + p["b"]


LAYERS = {
    "dense": dense,
    "its sum with its input": lambda p, x: x + dense(p, x),
    "two sums": lambda p, x: dense(p, x) + dense(p, jnp.sin(x)),
    "with gelu": lambda p, x: jax.nn.gelu(dense(p, x)),
    "normalized": lambda p, x: jax.nn.standardize(dense(p, x)),
    "two layers": lambda p, x: dense(p, jnp.tanh(dense(p, x))),
}
PARAMS = {
    "first": {"w": normal(2, 8, 8) / 3, "b": normal(3, 8)},
    "second": {"w": normal(4, 8, 8) / 3, "b": normal(5, 8)},
    "head": {"w": normal(6, 8, 1) / 3, "b": normal(7, 1) + BIAS},
}


def loss_of(wrap, layer):
    """The loss of a regression of two layers and a head, and what it predicts."""

    def loss(p, x, y):
        h = wrap(layer)(p["first"], x)
        h = wrap(layer)(p["second"], jnp.sin(h))
        predictions = dense(p["head"], h)
        return jnp.mean((predictions - y) ** 2), predictions, h

    return loss


def run(fun, *args):
    """What a function gives under autocast."""
    return jax.tree.map(np.asarray, jax.jit(ols.autocast(fun))(*args))


@functools.cache
def unwrapped(layer):
    return run(loss_of(lambda fun: fun, LAYERS[layer]), PARAMS, X, Y + BIAS)


@product(wrap=WRAPPERS, layer=[*LAYERS])
def test_the_loss_is_the_same_however_a_layer_is_wrapped(wrap, layer):
    actual = run(loss_of(wrap, LAYERS[layer]), PARAMS, X, Y + BIAS)
    for x, y in zip(actual, unwrapped(layer), strict=True):
        # A stream is rounded to float16 as it is carried, but not out of a `cond`.
        atol = 1e-3 if layer == "its sum with its input" else 2e-5
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=atol)


BESIDE = {
    "nothing": lambda h, predictions: (),
    "both": lambda h, predictions: (h, predictions),
    "their means": lambda h, predictions: (h.mean(), (predictions**2).mean()),
    "a sum": lambda h, predictions: predictions + h[:, :1],
    "more layers": lambda h, predictions: predictions @ predictions.T + h @ h.T,
}


@product(returned=BESIDE, layer=["dense", "its sum with its input", "normalized"])
def test_the_loss_is_the_same_whatever_is_returned_beside_it(returned, layer):
    def loss(p, x, y):
        value, predictions, h = loss_of(jax.checkpoint, LAYERS[layer])(p, x, y)
        return value, returned(h, predictions)

    value, _ = run(loss, PARAMS, X, Y + BIAS)
    np.testing.assert_allclose(value, unwrapped(layer)[0], rtol=1e-5)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_sum_at_the_end_keeps_its_digits_and_range(wrap):
    p = {"w": normal(6, 8, 8) / 3, "b": normal(7, 8) + 2e5}
    alone = run(lambda p, x: 1.0 * dense(p, x), p, X)
    np.testing.assert_array_equal(run(wrap(dense), p, X), alone)


@product(end={"goes on": 0, "ends": 3000}, layer=[*LAYERS])
def test_a_scan_over_layers_gives_what_they_give_one_by_one(layer, end):
    """The last sum, too, which no product depends on, is not rounded."""
    bias = normal(3, 3, 8) + np.float32([[0], [0], [end]])
    p = {"w": normal(2, 3, 8, 8) / 5, "b": bias}
    fun, head = LAYERS[layer], normal(4, 8, 8) / 3

    def scanned(p, x):
        return lax.scan(lambda x, p: (fun(p, x), None), x, p)[0]

    def one_by_one(p, x):
        for n in range(3):
            x = fun({"w": p["w"][n], "b": p["b"][n]}, x)
        return x

    def results(layers):
        ending = (lambda h: h) if end else (lambda h: h @ head)
        return run(lambda p, x: ending(layers(p, x @ head)), p, X)

    # But for a stream, which without a scan is rounded as it is carried, and in the
    # last sum.
    atol = 0.02 if layer == "its sum with its input" else 2e-5
    np.testing.assert_allclose(
        results(scanned), results(one_by_one), rtol=2e-6, atol=atol
    )


HOLDERS = {
    "checkpoint": ("checkpoint", "remat", "remat2"),
    "cond": ("cond",),
    "shard_map": ("shard_map",),
    "custom_jvp": ("custom_jvp_call",),
    "custom_vjp": ("custom_vjp_call",),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_residual_stream_goes_from_layer_to_layer_in_16_bits(holder):
    block = WRAPPERS[holder](LAYERS["its sum with its input"])

    def loss(p, x):
        x = x @ p["w"]
        for _ in range(3):
            x = block(p, x)
        return jnp.sum(x @ p["w"])

    held = equations(jax.make_jaxpr(ols.autocast(loss))(PARAMS["first"], X).jaxpr)
    is_block = lambda eqn: (
        eqn.primitive.name in HOLDERS[holder] and "dot_general" in str(eqn)
    )
    dtypes = [v.aval.dtype for eqn in held if is_block(eqn) for v in eqn.outvars]
    assert dtypes == [jnp.float16] * 3
