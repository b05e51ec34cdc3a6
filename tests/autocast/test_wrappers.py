"""What is rounded does not depend on how a function is wrapped, nor on what is returned beside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_float32 import equations, normal
from jax import lax
from pairs import product, quick

import optax_lossscale as ols

X, Y = normal(0, 4, 8), normal(1, 4, 1)


def with_derivative_jvp(fun):
    """The same with its own derivative, by `custom_jvp`."""
    wrapped = jax.custom_jvp(fun)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
    return wrapped


def with_derivative_vjp(fun):
    """The same with its own derivative, by `custom_vjp`."""
    wrapped = jax.custom_vjp(fun)
    wrapped.defvjp(
        lambda *args: jax.vjp(fun, *args), lambda pull, cotangent: pull(cotangent)
    )
    return wrapped


def in_scan(fun):
    """By a scan of one round, to which the layer's parameters are given."""

    def of(p, x):
        stacked = jax.tree.map(lambda leaf: leaf[None], p)
        return lax.scan(lambda _, p: (0, fun(p, x)), 0, stacked)[1][0]

    return of


def in_map(fun):
    """Row by row."""
    return lambda p, x: lax.map(lambda row: fun(p, row[None])[0], x)


def in_fori_loop(fun):
    """By a loop of one round, which begins with other numbers."""

    def of(p, x):
        start = jnp.zeros_like(fun(p, x))
        return lax.fori_loop(0, 1, lambda _, __: fun(p, x), start)

    return of


def in_while_loop(fun):
    """By a loop over a count, which carries the input too."""

    def of(p, x):
        start = 0, x, jnp.zeros_like(fun(p, x))
        step = lambda state: (state[0] + 1, state[1], fun(p, state[1]))
        return lax.while_loop(lambda state: state[0] < 1, step, start)[2]

    return of


def on_one_device(fun):
    """By a `shard_map` over a mesh of one device."""

    def of(p, x):
        mesh = jax.make_mesh(
            (1,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,)
        )
        specs = jax.P(), jax.P("devices")
        return jax.shard_map(
            fun, mesh=mesh, in_specs=specs, out_specs=jax.P("devices")
        )(p, x)

    return of


WRAPPERS = {
    "jit": jax.jit,
    "jit in jit": lambda fun: jax.jit(lambda p, x: jax.jit(fun)(p, x)),
    "vmap": lambda fun: jax.vmap(lambda p, x: fun(p, x[None])[0], (None, 0)),
    "checkpoint": jax.checkpoint,
    "checkpoint in jit": lambda fun: jax.jit(jax.checkpoint(fun)),
    "scan": in_scan,
    "map": in_map,
    "cond": lambda fun: (
        lambda p, x: lax.cond(x[0, 0] < 9, fun, lambda p, x: 2 * fun(p, x), p, x)
    ),
    "switch": lambda fun: (
        lambda p, x: lax.switch(jnp.int32(x[0, 0] < 9), [fun, fun], p, x)
    ),
    "fori_loop": in_fori_loop,
    "while_loop": in_while_loop,
    "custom_jvp": with_derivative_jvp,
    "custom_vjp": with_derivative_vjp,
    "shard_map": on_one_device,
    "checkpoint in cond": lambda fun: (
        lambda p, x: lax.cond(x[0, 0] < 9, jax.checkpoint(fun), fun, p, x)
    ),
    "cond in scan": lambda fun: in_scan(
        lambda p, x: lax.cond(x[0, 0] < 9, fun, fun, p, x)
    ),
}


def dense(p, x):
    return x @ p["w"] + p["b"]


LAYERS = {
    "dense": dense,
    "its sum with its input": lambda p, x: x + dense(p, x),
    "a residual block": lambda p, x: x + jnp.tanh(dense(p, jnp.tanh(x))) @ p["w"],
    "two sums": lambda p, x: dense(p, x) + dense(p, jnp.sin(x)),
    "with relu": lambda p, x: jax.nn.relu(dense(p, x)),
    "with gelu": lambda p, x: jax.nn.gelu(dense(p, x)),
    "clipped": lambda p, x: jnp.clip(x @ p["w"], 0.1, 0.9),
    "scaled": lambda p, x: 3 * dense(p, x) - 1,
    "normalized": lambda p, x: jax.nn.standardize(dense(p, x)),
    "two layers": lambda p, x: dense(p, jnp.tanh(dense(p, x))),
}


def parameters(bias):
    return {
        "first": {"w": normal(2, 8, 8) / 3, "b": normal(3, 8)},
        "second": {"w": normal(4, 8, 8) / 3, "b": normal(5, 8)},
        "head": {"w": normal(6, 8, 1) / 3, "b": normal(7, 1) + bias},
    }


def loss_of(wrap, layer=dense):
    """The loss of a regression of two layers and a head, and what it predicts."""

    def loss(p, x, y):
        h = wrap(layer)(p["first"], x)
        h = wrap(layer)(p["second"], jnp.sin(h))
        predictions = wrap(dense)(p["head"], h)
        return jnp.mean((predictions - y) ** 2), predictions, h

    return loss


def run(fun, *args):
    """What a function gives under autocast."""
    return jax.tree.map(np.asarray, jax.jit(ols.autocast(fun))(*args))


@functools.cache
def unwrapped(layer, bias):
    return run(loss_of(lambda fun: fun, LAYERS[layer]), parameters(bias), X, Y + bias)


@product(wrap=WRAPPERS, layer=[*LAYERS])
def test_the_loss_is_the_same_however_a_layer_is_wrapped(wrap, layer):
    bias = 3000.0
    actual = run(loss_of(wrap, LAYERS[layer]), parameters(bias), X, Y + bias)
    for x, y in zip(actual, unwrapped(layer, bias), strict=True):
        # A stream is rounded to float16 as it is carried, but not out of a `cond`.
        atol = 1e-3 if layer == "its sum with its input" else 2e-5
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=atol)


BESIDE = {
    "nothing": lambda h, predictions: (),
    "predictions": lambda h, predictions: predictions,
    "hidden numbers": lambda h, predictions: h,
    "both": lambda h, predictions: (h, predictions),
    "their means": lambda h, predictions: (h.mean(), (predictions**2).mean()),
    "a sum": lambda h, predictions: predictions + h[:, :1],
    "more layers": lambda h, predictions: predictions @ predictions.T + h @ h.T,
}


@product(
    returned=BESIDE,
    wrap={"plain": lambda fun: fun, "checkpoint": jax.checkpoint},
    layer={
        name: name
        for name in ("dense", "its sum with its input", "normalized", "with gelu")
    },
)
def test_the_loss_is_the_same_whatever_is_returned_beside_it(returned, wrap, layer):
    def loss(p, x, y):
        value, predictions, h = loss_of(wrap, LAYERS[layer])(p, x, y)
        return value, returned(h, predictions)

    bias = 3000.0
    value, _ = run(loss, parameters(bias), X, Y + bias)
    np.testing.assert_allclose(value, unwrapped(layer, bias)[0], rtol=1e-5)


@quick("bias", {"3000": 3000.0, "200000": 2e5}, "3000")
def test_a_sum_at_the_end_keeps_its_digits_and_range(bias):
    p = {"w": normal(6, 8, 8) / 3, "b": normal(7, 8) + bias}
    for wrap in WRAPPERS.values():
        actual = ols.autocast(wrap(dense))(p, X)
        np.testing.assert_array_equal(
            actual, ols.autocast(lambda p, x: 1.0 * dense(p, x))(p, X)
        )


def in_layers(fun):
    """A scan over layers."""
    return lambda p, x: lax.scan(lambda x, p: (fun(p, x), None), x, p)[0]


def one_by_one(fun):
    """The same without a scan."""

    def of(p, x):
        for n in range(3):
            x = fun(jax.tree.map(lambda leaf: leaf[n], p), x)  # noqa: B023
        return x

    return of


@product(bias={"goes on": 0, "ends": 3000}, layer=[*LAYERS])
def test_a_scan_over_layers_gives_what_they_give_one_by_one(layer, bias):
    """The last sum, too, which no product depends on, is not rounded."""
    p = {
        "w": normal(2, 3, 8, 8) / 5,
        "b": normal(3, 3, 8) + np.array([[0], [0], [bias]]),
    }
    p = jax.tree.map(np.float32, p)
    head = normal(4, 8, 8) / 3

    def fun(p, x, around):
        h = around(LAYERS[layer])(p, x @ head)
        return h if bias else h @ head

    actual = run(functools.partial(fun, around=in_layers), p, X)
    expected = run(functools.partial(fun, around=one_by_one), p, X)
    # But for a stream, which without a scan is rounded as it is carried, and in the
    # last sum.
    is_stream = layer in ("its sum with its input", "a residual block")
    np.testing.assert_allclose(
        actual, expected, rtol=2e-6, atol=0.02 if is_stream else 2e-5
    )


def in_cond(fun):
    """By a condition on the parameters: one on the stream would be a reader of it."""
    return lambda p, x: lax.cond(p["b"][0] < 9, fun, fun, p, x)


REMATERIALIZED = ("checkpoint", "remat", "remat2")
HOLDERS = {
    "checkpoint": (REMATERIALIZED, jax.checkpoint),
    "cond": (("cond",), in_cond),
    "shard_map": (("shard_map",), WRAPPERS["shard_map"]),
    "custom_jvp": (("custom_jvp_call",), with_derivative_jvp),
    "custom_vjp": (("custom_vjp_call",), with_derivative_vjp),
}


@pytest.mark.parametrize(("names", "wrap"), HOLDERS.values(), ids=HOLDERS)
def test_a_residual_stream_goes_from_layer_to_layer_in_16_bits(names, wrap):
    block = wrap(LAYERS["its sum with its input"])

    def loss(p, x):
        x = x @ p["w"]
        for _ in range(3):
            x = block(p, x)
        return jnp.sum(x @ p["w"])

    p = {"w": normal(2, 8, 8) / 3, "b": normal(3, 8)}
    held = equations(jax.make_jaxpr(ols.autocast(loss))(p, X).jaxpr)
    blocks = [
        eqn for eqn in held if eqn.primitive.name in names and "dot_general" in str(eqn)
    ]
    dtypes = [v.aval.dtype for eqn in blocks for v in eqn.outvars]
    assert dtypes == [jnp.float16] * 3
