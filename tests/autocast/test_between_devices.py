"""What autocast sends from device to device: in 16 bits, but for the sums of gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_float32 import assert_as_in_float32, equations, normal
from jax import P, lax
from jax.sharding import AxisType

import optax_lossscale as ols
from benchmarks import _between_devices
from benchmarks._models import by_hand, left

W, X = normal(0, 32, 32, scale=0.2), normal(1, 32, 32)
F16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
SUMS = {
    "psum",
    "psum_invariant",
    "reduce_scatter",
    "unreduced_psum",
    "unreduced_reduce_scatter",
}
SENT = {"all_gather", "all_to_all", "ppermute", "reshard", "sharding_constraint"}


def mesh(*shape, axis_type=AxisType.Auto):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


LOSSES = {
    name: functools.partial(of, mesh=mesh(4))
    for name, of in _between_devices.LOSSES.items()
}
CONSTRAINED = LOSSES["weights under a sharding constraint"]
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
mapped = _between_devices.mapped


def bytes_sent(fun, *args):
    """How many bytes a compiled program sends to other devices, but for sums."""
    text = jax.jit(fun).lower(*args).compile().as_text()
    names = "all-gather|all-to-all|collective-permute"
    found = re.findall(rf" = (\(?[^=\n]*?) (?:{names})(?:-start)?\(", text)
    arrays = re.findall(r"(f16|f32)\[([\d,]*)\]", " ".join(found))
    numbers = lambda shape: int(np.prod([int(n) for n in shape.split(",") if n]))
    return sum({"f16": 2, "f32": 4}[dtype] * numbers(shape) for dtype, shape in arrays)


def dtypes(jaxpr, names):
    """Those of the operands of operations, by name."""
    return {
        (e.primitive.name, v.aval.dtype)
        for e in equations(jaxpr)
        for v in e.invars
        if e.primitive.name in names and v.aval.ndim  # losses are summed, too
    }


@each_loss
def test_as_many_bytes_are_sent_as_by_hand(loss):
    for of in (lambda f: f, functools.partial(jax.grad, argnums=(0, 1))):
        sent = bytes_sent(of(ols.autocast(loss(left))), W, X)
        assert sent <= 1.02 * bytes_sent(of(loss(by_hand)), W, X)
        assert loss is CONSTRAINED or 0 < sent < bytes_sent(of(loss(left)), W, X)


@each_loss
def test_gradients_are_summed_in_float32(loss):
    jaxpr = jax.make_jaxpr(jax.grad(ols.autocast(loss(left))))(W, X).jaxpr
    assert {dtype for _, dtype in dtypes(jaxpr, SUMS)} <= {F32}
    assert F16 in {dtype for _, dtype in dtypes(jaxpr, SENT)}


@each_loss
def test_value_and_gradient_are_those_of_float32(loss):
    assert_as_in_float32(loss(left), W, X)


def weight_of_some(w, x):
    """On the devices of one axis of two: gathered there, and the same along the other."""
    w = lax.all_gather(w, "model", tiled=True).T
    return jnp.mean((x @ w) ** 2)


def test_sums_over_two_axes_are_not_rounded_between():
    f = mapped(weight_of_some, mesh(2, 2), P("model"))
    assert_as_in_float32(f, W, X)
    jaxpr = jax.make_jaxpr(jax.grad(ols.autocast(f)))(W, X).jaxpr
    assert {dtype for _, dtype in dtypes(jaxpr, SUMS)} == {F32}
    assert bytes_sent(ols.autocast(f), W, X) == 2 * W.size


def test_under_scan_vmap_and_remat():
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ lax.all_gather(w, "data", tiled=True)), None

    def of_each(ws, x):
        return jnp.mean(lax.scan(layer, x, ws)[0] ** 2)

    f = mapped(of_each, mesh(4), P(None, "data"))
    several = lambda ws, xs: jnp.mean(jax.vmap(f, (None, 0))(ws, xs))
    ws, xs = np.stack([W, W.T]), np.stack([X, X.T])
    assert_as_in_float32(f, ws, X)
    assert_as_in_float32(several, ws, xs)
    grad = lambda f: jax.grad(f, (0, 1))
    sent = bytes_sent(grad(ols.autocast(f)), ws, X)
    assert sent <= bytes_sent(grad(f), ws, X) / 2


def test_derivatives_forward():
    f = ols.autocast(_between_devices.gathered_weight(left, mesh(4)))
    _, along = jax.jit(lambda w, x: jax.jvp(f, (w, x), (w, x)))(W, X)
    assert along.dtype == F32
    np.testing.assert_allclose(along, 4 * f(W, X), rtol=2e-3)  # of the fourth degree


def test_what_is_read_in_float32_too_is_sent_in_float32():
    def of_each(w, x):
        w = lax.all_gather(w, "data", tiled=True)
        return jnp.mean((x @ w) ** 2) + jnp.sum(jnp.exp(w))

    f = mapped(of_each, mesh(4), P("data"))
    assert bytes_sent(ols.autocast(f), W, X) == 4 * W.size


def test_resharded():
    m = mesh(4, axis_type=AxisType.Explicit)
    loss = lambda w, x: jnp.mean((x @ jax.sharding.reshard(w, P())) ** 2)
    with jax.set_mesh(m):
        w, x = (jax.device_put(a, P("data")) for a in (W, X))
        jaxpr = jax.make_jaxpr(jax.grad(ols.autocast(loss)))(w, x).jaxpr
        assert ("reshard", F16) in dtypes(jaxpr, SENT)
        assert bytes_sent(ols.autocast(loss), w, x) == 2 * W.size
