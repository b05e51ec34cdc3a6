"""`diagnose` compares with float32: small models by others' patterns, healthy and faulty."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback, pallas
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from pairs import one_in, product, quick

import optax_lossscale as ols

F16, F32 = jnp.float16, jnp.float32
BF16 = jnp.bfloat16
CONV = {
    "window_strides": (1, 1),
    "padding": "SAME",
    "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
}


def half(tree):
    return jax.tree.map(lambda x: x.astype(F16), tree)


def normal(*shape, scale=None, seed=0):
    scale = shape[0] ** -0.5 if scale is None else scale
    seed = [seed, *shape]
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, F32)


def crossentropy(logits, labels):
    logits = jax.nn.log_softmax(logits.astype(F32))
    return -jnp.mean(jnp.take_along_axis(logits, labels[..., None], -1))


def square(x, target=0.0):
    return jnp.mean((x.astype(F32) - target) ** 2)


# --- models: each returns its loss function, parameters and batch ---


def perceptron():
    params = {
        "w1": normal(32, 64),
        "b1": jnp.zeros(64),
        "w2": normal(64, 64),
        "w3": normal(64, 1),
    }

    def loss_fn(params, x, y):
        p = half(params)
        x = jax.nn.relu(x.astype(F16) @ p["w1"] + p["b1"])
        return square(jax.nn.relu(x @ p["w2"]) @ p["w3"], y)

    return loss_fn, params, normal(64, 32, scale=1), normal(64, 1, scale=1)


def deep(depth=16):
    params = [normal(32, 32, scale=0.25, seed=i) for i in range(depth)]

    def loss_fn(params, x):
        for w in half(params):
            x = jax.nn.relu(x.astype(F16) @ w)
        return square(x)

    return loss_fn, params, normal(16, 32, scale=1)


def embedding(tokens=4096, rows=2, cast_first=True):
    params = {"embed": normal(rows, 16, scale=1), "out": normal(16, 4)}

    def loss_fn(params, tokens, y):
        table = params["embed"].astype(F16) if cast_first else params["embed"]
        return square(table[tokens].astype(F16) @ params["out"].astype(F16), y + 1)

    tokens = jnp.asarray(np.random.default_rng(0).integers(0, rows, tokens))
    return loss_fn, params, tokens, normal(tokens.size, 4, scale=1)


def attention(size=1.0, norm=True, softmax=F32, mask=-jnp.inf):
    params = {name: normal(32, 32, seed=i) for i, name in enumerate("qkvo")}
    params |= {f"{name}_bias": jnp.zeros(32) for name in "qkv"}

    def loss_fn(params, x):
        p, x = half(params), x.astype(F16)
        q, k, v = (x @ p[name] + p[f"{name}_bias"] for name in "qkv")
        scores = q @ k.mT
        scores = scores / F16(32**0.5) if norm else scores
        scores = jnp.where(np.tri(16, dtype=bool), scores, jnp.asarray(mask, F16))
        return square(jax.nn.softmax(scores.astype(softmax)).astype(F16) @ v @ p["o"])

    return loss_fn, params, normal(4, 16, 32, scale=size)


def convolution():
    params = {"c1": normal(3, 3, 3, 8), "c2": normal(3, 3, 8, 16, scale=0.1)}
    params["out"] = normal(256, 10)

    def loss_fn(params, x, y):
        p, x = half(params), x.astype(F16)
        for name in ("c1", "c2"):
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, p[name], **CONV))
            x = jax.lax.reduce_window(
                x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
            )
        return crossentropy(x.reshape(4, -1) @ p["out"], y)

    return loss_fn, params, normal(4, 16, 16, 3, scale=1), jnp.arange(4)


def normalized(variance=lambda x: x.var(0), dtype=F32, mean=0.0):
    params = {
        "w": normal(16, 32),
        "b": jnp.zeros(32),
        "scale": jnp.ones(32),
        "out": normal(32, 1),
    }

    def loss_fn(params, x):
        x = (x.astype(F16) @ params["w"].astype(F16) + params["b"].astype(F16)).astype(
            dtype
        )
        x = (x - x.mean(0)) * jax.lax.rsqrt(variance(x) + jnp.asarray(1e-5, dtype))
        x = (x * params["scale"].astype(dtype)).astype(F16)
        return square(jax.nn.relu(x) @ params["out"].astype(F16))

    return loss_fn, params, normal(32, 16, scale=1) + mean


def mixture():
    params = {
        "router": normal(16, 4),
        "up": normal(4, 16, 32),
        "down": normal(4, 32, 16),
    }

    def loss_fn(params, x):
        p, x = half(params), x.astype(F16)
        gates, chosen = jax.lax.top_k(jax.nn.softmax((x @ p["router"]).astype(F32)), 2)
        y = jax.nn.gelu(jnp.einsum("bi,eij->bej", x, p["up"]))
        y = jnp.einsum("bej,eji->bei", y, p["down"])
        y = jnp.take_along_axis(y, chosen[..., None], 1) * gates[..., None].astype(F16)
        return square(y.sum(1))

    return loss_fn, params, normal(64, 16, scale=1)


def graph():
    params = {"w": normal(16, 16), "a": normal(16, scale=0.2), "out": normal(16, 3)}
    source, target = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 256)))

    def loss_fn(params, x, y):
        p = half(params)
        x = x.astype(F16) @ p["w"]
        scores = jax.nn.leaky_relu((x @ p["a"])[source] + (x @ p["a"])[target]).astype(
            F32
        )
        weights = jnp.exp(scores - jax.ops.segment_max(scores, target, 64)[target])
        weights /= jax.ops.segment_sum(weights, target, 64)[target] + 1e-9
        x = jax.ops.segment_sum(x[source] * weights[:, None].astype(F16), target, 64)
        return crossentropy(jax.nn.elu(x) @ p["out"], y)

    return loss_fn, params, normal(64, 16, scale=1), jnp.arange(64) % 3


def lstm():
    params = {
        "w": normal(16, 64),
        "u": normal(8, 64),
        "b": jnp.zeros(64),
        "out": normal(16, 1),
    }

    def loss_fn(params, x):
        p = half(params)

        def body(state, x):
            c, y = state
            gates = y @ p["w"] + x @ p["u"] + p["b"]
            i, f, o, g = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            y = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (c, y), y @ p["out"]

        zeros = jnp.zeros((4, 16), F16)
        return square(jax.lax.scan(body, (zeros, zeros), x.astype(F16))[1], 1)

    return loss_fn, params, normal(50, 4, 8, scale=1)


def stack():
    params = {"w": normal(12, 16, 16, scale=0.25), "b": jnp.zeros((12, 16))}

    def loss_fn(params, x):
        body = jax.checkpoint(lambda x, p: (x + jnp.tanh(x @ p["w"] + p["b"]), None))
        return square(jax.lax.scan(body, x.astype(F16), half(params))[0])

    return loss_fn, params, normal(8, 16, scale=1)


def dropout():
    params = {"w": normal(16, 64), "v": normal(64, 1)}

    def loss_fn(params, x, key):
        x = jax.nn.gelu(x.astype(F16) @ params["w"].astype(F16))
        x = jnp.where(jax.random.uniform(key, x.shape, F16) < 0.9, x / F16(0.9), 0)
        return square(x @ params["v"].astype(F16))

    return loss_fn, params, normal(32, 16, scale=1), jax.random.key(0)


def contrastive():
    params = {"a": normal(16, 16), "b": normal(16, 16, seed=1), "temperature": F32(2.6)}

    def loss_fn(params, x, y):
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        u, v = (
            unit((x.astype(F16) @ params[name].astype(F16)).astype(F32)).astype(F16)
            for name, x in (("a", x), ("b", y))
        )
        logits = (u @ v.T).astype(F32) * jnp.exp(params["temperature"])
        return crossentropy(logits, jnp.arange(32))

    x = normal(32, 16, scale=1)
    return loss_fn, params, x, x + 0.3 * normal(32, 16, scale=1, seed=1)


def scan(steps=20_000):
    def loss_fn(params, x):
        w = params["w"].astype(F16)
        add = lambda total, x: (total + (w * x.astype(F16)).astype(F32), None)
        return jax.lax.scan(add, F32(0), x)[0]

    x = np.random.default_rng(0).uniform(0, 1.3e-4, steps)
    return loss_fn, {"w": F32(0.5)}, jnp.asarray(x, F32)


def gate(at=9.0):
    params = {"gate": jnp.full(8, at), "w": normal(8, scale=1)}

    def loss_fn(params, x):
        p = half(params)
        x = jax.nn.sigmoid(p["gate"]) * p["w"] * x.astype(F16)
        return jnp.mean(x.astype(F32).sum(-1) ** 2)

    return loss_fn, params, normal(16, 8, scale=1)


def rotary(dtype=F32):
    params = {"q": normal(16, 16), "k": normal(16, 16, seed=1)}

    def loss_fn(params, x):
        p, x = half(params), x.astype(F16)
        frequencies = jnp.asarray(1e-4 ** (np.arange(8) / 8), dtype)
        angles = jnp.arange(4096).astype(dtype)[:, None] * frequencies
        cos, sin = jnp.cos(angles).astype(F16), jnp.sin(angles).astype(F16)
        turned = lambda x: jnp.concatenate(
            [x[:, :8] * cos - x[:, 8:] * sin, x[:, 8:] * cos + x[:, :8] * sin], -1
        )
        q, k = turned(x @ p["q"]), turned(x @ p["k"])
        return square((q[1:] * k[:-1]).sum(-1))

    return loss_fn, params, normal(4096, 16, scale=1)


HEALTHY = {
    "perceptron": perceptron,
    "deep": deep,
    "embedding": embedding,
    "embedding summed in float32": functools.partial(
        embedding, 32_768, cast_first=False
    ),
    "sparse embedding": functools.partial(embedding, 256, rows=500),
    "attention": attention,
    "attention in float16": functools.partial(attention, softmax=F16),
    "convolution": convolution,
    "normalized": normalized,
    "mixture": mixture,
    "graph": graph,
    "lstm": lstm,
    "stack": stack,
    "dropout": dropout,
    "contrastive": contrastive,
    "gate": functools.partial(gate, 1.0),
    "rotary": rotary,
}


@quick("model", HEALTHY, "perceptron", "embedding", "sparse embedding", "gate")
def test_a_healthy_model_is_accused_of_nothing(model):
    found = ols.diagnose(*model())
    assert found.wrong == ()
    assert max(found.off.values()) < 0.03
    assert found.verdict.startswith(
        ("float16 is fine as it is", "Without a loss scale, float16 loses")
    )
    assert all(a.startswith(("Nothing.", "Wrap the optimizer")) for a in found.advice)
    page = str(found)
    assert page.startswith("Computes in float16")
    assert "The loss differs from float32 by " in page


# The scale that fits and the largest at which no gradient overflows, as found by trying
# one after the other: exponents of two.
SCALES = {
    "perceptron": (13, 15),
    "deep": (17, 19),
    "embedding": (14, 16),
    "sparse embedding": (15, 17),
    "attention": (18, 20),
    "convolution": (12, 14),
    "normalized": (14, 16),
    "mixture": (13, 15),
    "graph": (17, 19),
    "lstm": (15, 17),
    "stack": (13, 15),
    "gate": (12, 14),
    "rotary": (12, 14),
}


@quick("model", {model: model for model in SCALES}, "perceptron", "embedding", "gate")
def test_the_scale_that_fits_is_the_one_that_a_search_finds(model):
    fits = ols.diagnose(*HEALTHY[model]()).initial_scale
    assert (np.log2(fits.scale), np.log2(fits.largest)) == SCALES[model]


NOT_LINEAR = {
    "saturating": lambda g: g / (1 + jnp.abs(g)),
    "normalized": lambda g: g / (jnp.abs(g).max() + F16(1e-3)),
    "squared": lambda g: g * jnp.abs(g) * F16(64),
}


@one_in(3, "rule", [*NOT_LINEAR])
def test_of_a_backward_pass_that_is_not_linear_too_the_scale_is_what_a_search_finds(
    rule,
):
    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, None), lambda _, g: (NOT_LINEAR[rule](g),))
    params, x = normal(8, 8), normal(16, 8, scale=1)

    def loss_fn(w, x):
        return square(identity(x.astype(F16) @ w.astype(F16)))

    def is_finite(exponent):
        grads = jax.grad(lambda w: loss_fn(w, x) * 2.0**exponent)(params)
        return bool(jnp.isfinite(grads).all())

    found = ols.diagnose(loss_fn, params, x)
    largest = max(filter(is_finite, range(-4, 40)))
    assert largest - 4 <= np.log2(found.initial_scale.scale) < largest
    assert [one.how for one in found.wrong] == ["is not linear"]
    assert "changes the gradient" in found.verdict


def checkpointed(w, x):
    return jax.checkpoint(lambda w, x: w * jnp.exp(x))(w, x)


@jax.custom_vjp
def behind_a_barrier(w, x):
    return w * jnp.exp(x)


def pulled_back(residuals, g):
    w, x = residuals
    x, g = lax.optimization_barrier((x, g))
    return g * jnp.exp(x), g * w * jnp.exp(x)


behind_a_barrier.defvjp(lambda w, x: (w * jnp.exp(x), (w, x)), pulled_back)


@pytest.mark.parametrize("layer", [checkpointed, behind_a_barrier])
def test_a_barrier_does_not_mix_forward_and_backward_pass(layer):
    def loss_of(layer):
        def loss_fn(params, x):
            y = layer(params["w"].astype(F16), x + F16(3))
            return jnp.mean(y.astype(jnp.float32)) * 1e-6

        return loss_fn

    params, x = {"w": jnp.ones(256)}, jnp.full(256, 7, F16)
    plain = ols.diagnose(loss_of(lambda w, x: w * jnp.exp(x)), params, x)
    found = ols.diagnose(loss_of(layer), params, x)
    assert found.initial_scale == plain.initial_scale
    assert found.verdict == plain.verdict


@pytest.mark.parametrize("is_joint", [False, True])
def test_of_a_barrier_each_result_is_of_its_own_operand(is_joint):
    def loss_fn(params, x):
        infinite = jnp.exp(20 * lax.stop_gradient(params["a"].astype(F16) * x))
        y = params["b"].astype(F16) * x + F16(40) - F16(40)
        if is_joint:
            infinite, y = lax.optimization_barrier((infinite, y))
        unused = 0 * jnp.sum(jnp.tanh(1 / infinite).astype(jnp.float32))
        y = y - x * F16(0.97)
        return jnp.mean(y.astype(jnp.float32) ** 2) + unused

    params = {"a": jnp.ones(256), "b": jnp.ones(256)}
    found = ols.diagnose(loss_fn, params, jnp.linspace(0.02, 1, 256).astype(F16))
    assert (found.wrong[0].place.primitive, found.wrong[0].how) == ("sub", "cancels")


@pytest.mark.parametrize("is_joint", [False, True])
def test_a_sum_over_devices_of_several_values_is_one_of_each(is_joint):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def over_devices(x, y):
        if is_joint:
            return lax.psum((x, y), "d")
        return lax.psum(x, "d"), lax.psum(y, "d")

    def loss_fn(params, x):
        y = params["w"].astype(F16) * x
        infinite, y = jax.shard_map(
            over_devices, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
        )(jnp.exp(x + F16(20)), y + F16(1000) - F16(1000))
        return jnp.mean(y.astype(jnp.float32)) + 0 * jnp.mean(jnp.tanh(infinite))

    found = ols.diagnose(
        loss_fn, {"w": jnp.ones(64)}, jnp.linspace(0.01, 1, 64).astype(F16)
    )
    assert found.wrong[0].place.primitive == "sub"


def test_where_nothing_overflows_no_overflow_is_named():
    """Of a cotangent that is clipped, so that it does not grow with the loss scale."""
    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))

    def loss_fn(w, x):
        return square(identity((x.astype(F16) @ w.astype(F16)).astype(F32)))

    found = ols.diagnose(loss_fn, normal(8, 8), normal(16, 8, scale=1))
    assert found.initial_scale.largest == 2.0**126
    assert found.overflow is None


@pytest.mark.slow
def test_gradients_that_are_infinite_at_any_scale_are_compared_without_one():
    @jax.custom_vjp
    def identity(x):
        return x

    def backward(x, g):
        large = jnp.exp(jnp.abs(x) * F16(30))
        return (g * large / (1 + large),)

    identity.defvjp(lambda x: (x, x), backward)
    params = {"a": normal(8, 8), "b": normal(8, 8, seed=1)}

    def loss_fn(p, x):
        p = half(p)
        return square(identity(x.astype(F16) @ p["a"]) @ p["b"])

    found = ols.diagnose(loss_fn, params, normal(16, 8, scale=1))
    assert found.initial_scale is None
    assert found.scale == 1
    # and not b, whose gradient is right
    assert [one.name for one in found.wrong] == ["a"]


@pytest.mark.slow
@quick("model", {model: model for model in SCALES}, "perceptron", "gate")
def test_the_share_that_is_lost_is_what_counting_gives(model, monkeypatch):
    loss_fn, params, *batch = HEALTHY[model]()
    found = ols.diagnose(loss_fn, params, *batch)
    grads = jax.jit(jax.grad(loss_fn))(params, *batch)
    monkeypatch.setitem(globals(), "F16", F32)
    loss_fn, *_ = HEALTHY[model]()
    true = jax.grad(loss_fn)(params, *batch)
    lost = size = 0
    leaves = jax.tree.leaves_with_path(grads)
    for (path, x), y in zip(leaves, jax.tree.leaves(true), strict=True):
        # Others float32 does not determine either.
        if jax.tree_util.keystr(path, simple=True, separator="/") not in found.off:
            continue
        is_half = np.array_equal(x, np.asarray(x, np.float16))
        matters = np.abs(y) > np.abs(y).max() * 2.0**-40
        lost += np.sum((np.abs(x) < (2.0**-14 if is_half else 1e-45)) & matters)
        size += np.sum(matters)
    of_all = found.underflow["all"].lost if "all" in found.underflow else 0
    assert of_all == pytest.approx(lost / size if lost / size > 0.01 else 0, abs=0.005)


FAULTY = {
    "embedding of 32k": (
        lambda: embedding(32_768),
        "embed",
        "stagnates",
        "scatter-add",
    ),
    "embedding of 131k": (
        lambda: embedding(131_072),
        "embed",
        "stagnates",
        "scatter-add",
    ),
    "shared over a scan": (scan, "w", "stagnates", "add_any"),
    "saturated gate": (gate, "gate", "saturates", "logistic"),
    "positions in float16": (lambda: rotary(F16), "q", "rounds", "cos"),
}


@quick("model", FAULTY, "embedding of 32k", "saturated gate")
def test_a_wrong_gradient_is_named_with_its_cause_and_its_line(model):
    function, leaf, how, primitive = model
    found = ols.diagnose(*function())
    wrong = {one.name: one for one in found.wrong}
    assert wrong[leaf].how == how
    assert wrong[leaf].place.primitive == primitive
    assert "test_truth.py:" in wrong[leaf].place.source
    assert found.verdict.startswith("float16 gives wrong gradients: that of ")
    assert any(wrong[leaf].place.source in advice for advice in found.advice)
    assert any(line.split()[:1] == [leaf] for line in str(found).splitlines())


@pytest.mark.parametrize("name", ["embedding of 32k", "saturated gate"])
def test_how_far_it_is_off_is_what_a_model_written_in_float32_says(name, monkeypatch):
    model, leaf, *_ = FAULTY[name]
    loss_fn, *inputs = model()
    found = ols.diagnose(loss_fn, *inputs)
    scale = found.initial_scale.scale
    _, grads = jax.jit(ols.value_and_scaled_grad(loss_fn, ols.get(scale)))(*inputs)
    monkeypatch.setitem(globals(), "F16", F32)
    loss_fn, *inputs = model()
    truth = np.asarray(jax.grad(loss_fn)(*inputs)[leaf])
    off = np.linalg.norm(np.asarray(grads[leaf]) / scale - truth) / np.linalg.norm(
        truth
    )
    assert found.off[leaf] == pytest.approx(off, rel=0.02)


def test_a_gradient_off_by_two_percent_is_no_error_and_is_said():
    found = ols.diagnose(*embedding(5000))
    assert found.wrong == ()
    assert 0.005 < found.off["embed"] < 0.03
    assert f"the gradients by at most {found.off['embed']:.1%}" in str(found)


def test_gradients_that_vanish_inside_are_named_whatever_the_scale():
    params = {"a": normal(8, 8), "b": normal(8, 8, seed=1)}

    def loss_fn(params, x):
        p = half(params)
        x = jnp.tanh(x.astype(F16) @ p["a"]) * F16(1e-4)
        x = x * F16(1e-4)
        return square((x.astype(F32) * 1e8).astype(F16) @ p["b"])

    found = ols.diagnose(loss_fn, params, normal(16, 8, scale=1))
    assert {one.how for one in found.wrong} == {"vanishes"}
    line = loss_fn.__code__.co_firstlineno + 3
    assert all(f"test_truth.py:{line} " in one.place.source for one in found.wrong)


@pytest.mark.slow
def test_what_float32_does_not_know_either_is_no_error():
    """A bias before a normalization has no gradient but rounding, nor has one of all keys."""
    found = ols.diagnose(*normalized())
    assert found.wrong == ()
    assert {"w", "scale", "out"} <= found.off.keys()
    assert ols.diagnose(*attention()).wrong == ()


# --- what is not finite ---


def rooted(x):
    return jnp.sqrt(x)


NOT_FINITE = {
    "root": rooted,
    "logarithm": lambda x: x * jnp.log(x),
    "0/0": lambda x: x / jnp.sum(x * 0),
    "0 beside a root": lambda x: jnp.sqrt(x + 1) / (x * 0),
    "power": lambda x: x**0.5,
    "norm": lambda x: jnp.linalg.norm(x * 0),
    "index": lambda x: jnp.take(x, jnp.array([5])),
    "domain": lambda x: jnp.arctanh(x * 2 + 0.5),
    "where": lambda x: jnp.where(x > 0, jnp.log(x * 1), 0),
    "masked whole": lambda x: x * jax.nn.softmax(jnp.where(x > 9, x, -jnp.inf)),
}


@one_in(2, "function", NOT_FINITE)
def test_of_a_nan_in_any_dtype_it_says_what_makes_it_and_where(function):
    def loss_fn(params, x):
        return jnp.sum(function(params["w"].astype(F16) * x).astype(F32))

    found = ols.diagnose(loss_fn, {"w": jnp.array([0.0, 1, 2])}, jnp.ones(3, F16))
    assert "not finite in float32 either" in found.verdict
    line = function.__code__.co_firstlineno + (function is rooted)
    assert f" at tests/diagnosis/test_truth.py:{line} " in found.verdict
    (advice,) = found.advice
    assert advice.startswith("Keep the arguments of roots and logarithms above 0")
    assert "in float32" not in advice


def test_a_mask_is_not_taken_for_what_overflows():
    def loss_fn(params, x):
        x = x.astype(F16) @ params["w"].astype(F16)
        masked = jnp.where(np.tri(4, dtype=bool), jnp.zeros((4, 4)), -1e9).astype(F16)
        return square(jnp.exp(masked) @ (x * x))

    found = ols.diagnose(loss_fn, {"w": jnp.full((4, 4), 100.0)}, jnp.ones((4, 4)))
    line = loss_fn.__code__.co_firstlineno + 3
    assert f"mul at tests/diagnosis/test_truth.py:{line} " in found.verdict
    assert "(in float32, it is " in found.verdict


def test_nans_of_the_batch_are_not_the_models():
    loss_fn = lambda w, x: jnp.sum((w.astype(F16) * x).astype(F32))
    found = ols.diagnose(loss_fn, jnp.ones(3), jnp.full(3, jnp.nan, F16))
    assert "there are NaNs or infinities in args/0" in found.verdict


def test_infinities_of_the_batch_are_named_where_their_row_is_masked():
    def loss_fn(w, x, is_kept):
        losses = ((x.astype(F16) @ w.astype(F16)).astype(F32) ** 2).mean(-1)
        return jnp.sum(jnp.where(is_kept, losses, 0))

    x = normal(8, 8, scale=1.0).at[3, 2].set(jnp.inf)
    found = ols.diagnose(loss_fn, normal(8, 8), x, jnp.arange(8) != 3)
    assert "there are NaNs or infinities in args/0" in found.verdict


@pytest.mark.parametrize("weight", [1e-3, 0.1])
def test_a_sum_that_is_0_in_float32_spoils_what_float32_determines(weight):
    """The gradient of the penalty is 0 where weights are orthogonal, but not in float16."""
    orthogonal = jnp.linalg.qr(normal(16, 16, scale=1.0))[0]

    def loss_fn(w, x):
        task = jnp.mean(jnp.tanh(x @ w) ** 2)
        return weight * task + jnp.sum((w @ w.T - jnp.eye(16)) ** 2)

    found = ols.diagnose(loss_fn, orthogonal, normal(8, 16, scale=1.0))
    line = loss_fn.__code__.co_firstlineno + 2
    assert [one.how for one in found.wrong] == ["cancels"]
    assert f"test_truth.py:{line} " in found.wrong[0].place.source


def test_of_a_loss_that_is_nothing_but_rounding_nothing_is_said():
    def loss_fn(student, teacher, x):
        half = jnp.tanh(x.astype(F16) @ student.astype(F16)).astype(F32)
        return jnp.mean((half - jnp.tanh(x @ teacher)) ** 2)

    w = normal(8, 8)
    found = ols.diagnose(loss_fn, w, w, normal(16, 8, scale=1.0))
    assert found.off == {}
    assert "nothing but rounding error" in found.verdict
    assert "the same dtype" in found.advice[0]
    assert "fine" not in found.verdict


def test_what_only_ends_a_loop_is_not_a_value_of_the_model():
    def root(x):
        def goes_on(state):
            y, last = state
            return jnp.abs(y - last).max() > 1e-4

        def step(state):
            y, _ = state
            return (y + x / y) / 2, y

        return lax.while_loop(goes_on, step, (x, x + 1))[0]

    def loss_fn(w, x):
        positive = jax.nn.softplus(x.astype(F16) @ w.astype(F16)) + 1
        roots = root(lax.stop_gradient(positive))
        return square((positive / roots).astype(F32))

    found = ols.diagnose(loss_fn, normal(8, 8), normal(16, 8, scale=1.0))
    assert not found.wrong


@pytest.mark.slow
def test_a_sum_is_no_more_wrong_than_its_terms():
    def loss_fn(w, x):
        def count(state, row):
            mean, steps = state
            mean = mean * 0.875 + 0.125 * (row.astype(jnp.bfloat16) @ w)
            return (mean, steps + 1), mean

        start = jnp.zeros(4, jnp.bfloat16), jnp.zeros((), jnp.bfloat16)
        (_, steps), means = lax.scan(count, start, x)
        return square(means) + 1e-3 * (steps.astype(F32) - len(x)) ** 2

    w = normal(8, 4, scale=1.0).astype(jnp.bfloat16)
    found = ols.diagnose(loss_fn, w, normal(600, 8, scale=1.0))
    line = loss_fn.__code__.co_firstlineno + 4
    assert found.wrong[0].name == "the loss"
    assert found.wrong[0].how == "stagnates"
    assert f"test_truth.py:{line} " in found.wrong[0].place.source


# --- the line at fault, and no other ---


def divided(total, n):
    return n / total


def compared(total, n):
    return total / n - 1.3


@product(
    loop={"scan": "scan", "while": "while"},
    follows={"divided": divided, "compared": compared},
)
def test_a_sum_that_stagnates_is_named_and_not_what_is_made_of_it(loop, follows):
    n = 600
    dtype = jnp.bfloat16

    def loss_fn(w, x):
        y = jnp.tanh(x.astype(dtype) @ w.astype(dtype)).astype(F32)
        total = jnp.asarray(256, dtype)
        add = lambda total, _=None: (total + jnp.ones_like(total), None)
        if loop == "scan":
            total, _ = lax.scan(add, total, length=n)
        else:
            step = lambda state: (state[0] + 1, add(state[1])[0])
            _, total = lax.while_loop(lambda state: state[0] < n, step, (0, total))
        return follows(total.astype(F32), n) * jnp.sum(y)

    found = ols.diagnose(loss_fn, normal(8, 8), normal(4, 8, scale=1))
    line = loss_fn.__code__.co_firstlineno + 3
    assert {one.how for one in found.wrong} == {"stagnates"}
    assert all(f"test_truth.py:{line} " in one.place.source for one in found.wrong)
    (advice,) = found.advice
    assert advice.startswith("Compute add at ")


@pytest.mark.parametrize(
    "swallows",
    [jnp.log, lambda x: x**-0.5, lambda x: 1 / x, jnp.tanh],
    ids=["a logarithm", "a root", "a division", "a limit"],
)
def test_what_follows_from_an_overflow_is_not_at_fault(swallows):
    def loss_fn(w, x):
        x = (x.astype(F16) * 1000) @ w.astype(F16)
        size = jnp.mean((x * x).astype(F32))
        return swallows(size / 1e6)

    found = ols.diagnose(loss_fn, normal(8, 8), normal(4, 8, scale=1))
    line = loss_fn.__code__.co_firstlineno + 2
    assert {one.how for one in found.wrong} == {"overflows"}
    (advice,) = found.advice
    assert f"Compute mul at tests/diagnosis/test_truth.py:{line} " in advice


def test_a_count_that_stagnates_is_told_of_no_table():
    def loss_fn(w):
        degree = jax.ops.segment_sum(
            jnp.ones(4000, jnp.bfloat16), jnp.zeros(4000, int), 2
        )
        return jnp.sum(w / (degree.astype(F32) + 1))

    (advice,) = ols.diagnose(loss_fn, jnp.ones(2)).advice
    assert advice.startswith("Compute scatter-add at ")
    assert "table" not in advice


def test_products_of_small_steps_are_not_what_a_difference_is_sensitive_to():
    """Of 16-bit weights after a few small steps, less what they were."""

    def loss_fn(w, x):
        moved = w.astype(F16)
        for _ in range(3):
            moved = moved - F16(1e-3) * (x.astype(F16).T @ (x.astype(F16) @ moved))
        return jnp.mean((moved - w).astype(F32) ** 2) * 1e4

    found = ols.diagnose(loss_fn, 1 + normal(8, 4), normal(4, 8, scale=0.5))
    assert found.wrong[0].how == "cancels"
    assert not any("Keep the product" in advice for advice in found.advice)
    assert found.advice[0].startswith("Compute sub at ")


@pytest.mark.parametrize("dtype", [F16, jnp.bfloat16])
def test_gradients_that_are_all_zero_are_told(dtype):
    def loss_fn(w, x):
        return square(jax.nn.relu(-jnp.abs(x.astype(dtype) @ w.astype(dtype))))

    found = ols.diagnose(loss_fn, normal(8, 8), normal(4, 8, scale=1))
    assert found.verdict == "All gradients are 0, in float32 as well."
    assert not found.has_gradients
    assert "Loss scale" not in str(found)


@pytest.mark.parametrize(
    "function", [jnp.arccos, lambda x: 1 - x], ids=["arccos", "1 - x"]
)
def test_rounding_to_zero_is_no_underflow(function):
    def loss_fn(w):
        return jnp.mean(function(w.astype(jnp.bfloat16)).astype(F32))

    found = ols.diagnose(loss_fn, 1 - jnp.linspace(1e-4, 1e-3, 8))
    assert " is fine" not in found.verdict
    assert "vanishes" not in {one.how for one in found.wrong}


@pytest.mark.parametrize("cast", ["by hand", "by autocast"])
def test_products_are_kept_by_the_means_that_work(cast):
    def loss_fn(w, x, operands=F16, **how):
        if cast == "by hand":
            x = x.astype(F16).astype(operands)
            w = w.astype(operands)
        y = jnp.matmul(x, w, **how).astype(F32)
        return square(y - x.astype(F32).sum(-1, keepdims=True))

    w = 1 + normal(8, 1, scale=1e-4)
    x = 10 + normal(64, 8, scale=1)
    if cast == "by hand":
        (advice,) = [a for a in ols.diagnose(loss_fn, w, x).advice if "Keep" in a]
        assert "otherwise, by casting the operands" in advice
        followed = functools.partial(loss_fn, operands=F32)
        assert ols.diagnose(followed, w, x).wrong == ()
    else:
        found = ols.diagnose(ols.autocast(loss_fn), w, x)
        (advice,) = [a for a in found.advice if "Keep" in a]
        assert "under autocast, by precision=jax.lax.Precision.HIGHEST" in advice
        followed = ols.autocast(functools.partial(loss_fn, precision="highest"))
        assert ols.diagnose(followed, w, x).wrong == ()


@pytest.mark.parametrize(
    ("factor", "advised"), [(2.0**20, "smaller values"), (2.0**-30, "larger values")]
)
def test_an_operand_that_autocast_casts_is_kept_where_a_product_reads_it(
    factor, advised
):
    """Its line is in float32 already, and no product."""

    def loss_fn(params, x, precision=None):
        hidden = factor * jnp.tanh(x @ params["w"])
        return jnp.mean(jnp.dot(hidden, params["v"], precision=precision) / factor)

    params = {"w": normal(8, 8), "v": normal(8, 2)}
    x = normal(16, 8)
    advice = ols.diagnose(loss_fn, params, x).advice[0]
    assert re.match(r"Keep the result of \S*test_truth.py:\d+ \(loss_fn\)", advice)
    assert "HIGHEST in the product that reads it" in advice
    assert advised in advice
    followed = ols.diagnose(loss_fn, params, x, precision=lax.Precision.HIGHEST)
    assert not followed.wrong


def test_a_product_of_integers_is_no_product_in_16_bits():
    params = {"w": normal(8, 8)}
    table = jnp.arange(64, dtype=jnp.int8).reshape(8, 8)

    def loss_fn(params, x, codes):
        quantized = lax.dot(codes, table, preferred_element_type=jnp.int32)
        return jnp.mean((x @ params["w"] - quantized.astype(F32)) ** 2)

    codes = jnp.ones((16, 8), jnp.int8)
    report = ols.diagnose(loss_fn, params, normal(16, 8), codes)
    assert report.is_autocast
    assert report.computes_in == (F16,)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_16_bits_beside_products_in_float32_are_no_model_in_16_bits(dtype):
    params = {"w": normal(8, 8, scale=1e3), "v": normal(8, 2)}

    def loss_fn(params, x):
        hidden = 100 * (x @ params["w"])
        loss = jnp.mean(jnp.log1p((hidden @ params["v"]) ** 2))
        return loss, {"mean": jnp.mean(x).astype(dtype)}

    report = ols.diagnose(loss_fn, params, normal(16, 8), has_aux=True)
    assert report.is_autocast
    assert "the loss" in [wrong.name for wrong in report.wrong]


def test_a_rule_for_the_backward_pass_is_no_derivative_inside():
    @jax.custom_vjp
    def gated(x):
        return x * jax.nn.sigmoid(x)

    def backward(x, g):
        e = jnp.exp(x * 6)
        return (g * e / (1 + e),)

    gated.defvjp(lambda x: (gated(x), x), backward)

    def loss_fn(params, x):
        x = gated(x.astype(F16) @ params["w"].astype(F16))
        return square(x @ params["out"].astype(F16))

    params = {"w": normal(8, 8), "out": normal(8, 2)}
    found = ols.diagnose(loss_fn, params, normal(16, 8, scale=3.0))
    # and not `out`, which is right at 1
    assert [one.name for one in found.wrong] == ["w"]
    (advice,) = found.advice
    assert advice.startswith("Compute exp at ")


def batch_normalized(params, x):
    x = x @ params["w"] + params["bias"]
    x = (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5)
    return square(jax.nn.relu(x) @ params["out"])


def test_a_bias_that_a_normalization_takes_out_asks_for_no_scale():
    params = {"w": normal(16, 64), "bias": jnp.zeros(64), "out": normal(64, 4)}
    found = ols.diagnose(
        ols.autocast(batch_normalized), params, normal(32, 16, scale=1)
    )
    assert found.wrong == ()
    assert found.verdict.startswith("float16 is fine as it is")


def test_a_sum_of_constants_before_what_is_wrong_is_no_error():
    """As in a variance, which divides by how many numbers there are, less 0."""

    def loss_fn(w, x):
        x = x @ w
        x = x * lax.rsqrt(x.var(0) + 1e-5)
        return square(jnp.mean(x * x, 0) - jnp.mean(x, 0) ** 2)

    inputs = 1 + 0.01 * normal(8, 8, scale=1), 30 + normal(64, 8, scale=1)
    found = ols.diagnose(ols.autocast(loss_fn), *inputs)
    assert found.wrong == ()
    assert found.off.keys() == {"the loss"}
    assert found.verdict.startswith("The gradients are nothing but rounding error")


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="float32's own sums are off by 1e-4 there, on a CPU",
)
@pytest.mark.parametrize("dtype", [F16, jnp.bfloat16])
@quick("seed", {str(n): n for n in range(3)}, "0")
def test_a_bias_of_a_convolution_that_is_normalized_is_no_error(seed, dtype):
    def loss_fn(params, x):
        x = lax.conv_general_dilated(x, params["w"], **CONV) + params["bias"]
        x = (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5)
        return square(jax.nn.relu(x).mean((1, 2)) @ params["out"] - 1)

    params = {"w": normal(3, 3, 3, 8), "bias": jnp.zeros(8), "out": normal(8, 4)}
    images = jax.random.normal(jax.random.key(seed), (8, 12, 12, 3))
    found = ols.diagnose(ols.autocast(loss_fn, dtype), params, images)
    assert found.wrong == ()
    # Nor does what it lacks, which no scale gives it, say where to begin.
    assert not any("initial_scale" in line for line in found.advice)


def batch_norm(x):
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5)


@quick(
    "pool",
    {
        "largest of centered": lambda x: (x - x.mean(0)).reshape(10, 3, 8).max(1),
        "largest": lambda x: batch_norm(x).reshape(10, 3, 8).max(1),
        "smallest": lambda x: batch_norm(x).reshape(10, 3, 8).min(1),
        "winner": lambda x: jnp.where(
            (h := batch_norm(x).reshape(10, 3, 8)) == h.max(1, keepdims=True), h, 0
        ).sum(1),
    },
    "largest of centered",
    "winner",
)
def test_the_largest_of_what_is_normalized_is_one_of_it(pool):
    """XLA computes it in several kernels, where it must have the same bits."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w": jax.random.normal(keys[0], (4, 8)),
        "o": jax.random.normal(keys[1], (8, 2)),
    }
    x = jax.random.normal(keys[2], (30, 4))
    loss_fn = lambda p, x: jnp.mean((pool(x @ p["w"]) @ p["o"]) ** 2)
    report = ols.diagnose(loss_fn, params, x)
    assert "fine" in report.verdict
    assert max(report.off.values()) < 0.01
    assert report.off.keys() == {"the loss", "w", "o"}


def test_gradients_that_are_nothing_but_rounding_are_called_so():
    params = {"bias": jnp.zeros(64)}
    others = {"w": normal(16, 64), "out": normal(64, 4)}
    loss_fn = lambda params, x: batch_normalized(params | others, x)
    found = ols.diagnose(ols.autocast(loss_fn), params, normal(32, 16, scale=1))
    assert found.off.keys() == {"the loss"}
    assert "the gradients are nothing but rounding error" in str(found)


def test_a_gradient_that_is_wrong_anyway_asks_for_no_scale():
    def loss_fn(params, x):
        x = jnp.tanh(x.astype(F16) @ params["w"].astype(F16) * 30)
        return square(x @ params["out"].astype(F16))

    params = {"w": (jnp.abs(normal(8, 8, scale=1)) + 1) / 30, "out": normal(8, 2)}
    found = ols.diagnose(loss_fn, params, jnp.abs(normal(64, 8, scale=0.4)) + 0.2)
    assert [one.how for one in found.wrong] == ["saturates"]
    (advice,) = found.advice
    assert advice.startswith("Compute tanh at ")


def decayed(x, gate):
    for _ in range(5):
        gate = gate * gate
    return x + gate * x


def scanned(x, gate):
    """The state of a gated recurrence, and the product of all gates."""
    step = lambda c, now: ((now[0] * c[0] + now[1], now[0] * c[1]), None)
    (state, product), _ = lax.scan(
        step, (jnp.zeros(8, F16), jnp.ones(8, F16)), (gate, x)
    )
    return state + product


@pytest.mark.parametrize("recurrence", [decayed, scanned])
def test_products_that_go_to_zero_as_they_must_are_fine(recurrence):
    def loss_fn(w, x):
        x = x.astype(F16)
        return square(recurrence(x, jax.nn.sigmoid(x @ w.astype(F16))))

    found = ols.diagnose(loss_fn, normal(8, 8, scale=0.3), normal(32, 8, scale=1))
    assert found.wrong == ()


def test_an_infinite_number_of_the_batch_is_no_mask():
    def loss_fn(params, x, keep):
        x = jax.nn.relu(x.astype(F16) @ params["w"].astype(F16)) @ params["out"].astype(
            F16
        )
        return jnp.mean(jnp.where(keep, (x.astype(F32) ** 2).mean(-1), 0))

    params = {"w": normal(8, 8), "out": normal(8, 2)}
    x = normal(16, 8, scale=1).at[3, 2].set(jnp.inf)
    found = ols.diagnose(loss_fn, params, x, jnp.arange(16) != 3)
    assert "there are NaNs or infinities in args/0" in found.verdict


# --- in which dtype ---


def test_a_line_that_widens_both_operands_is_named_with_those_that_follow_it():
    def loss_fn(params, x):
        first, *others = [w.astype(F16) for w in params]
        x = jnp.tanh(x.astype(F16) @ first.astype(F32))
        for w in others:
            x = jnp.tanh(x @ w)
        return square(x)

    found = ols.diagnose(loss_fn, [normal(8, 8)] * 4, normal(4, 8))
    lines = [loss_fn.__code__.co_firstlineno + n for n in (2, 4)]
    assert found.verdict.startswith("Hardly anything is computed in 16 bits")
    assert all(f"test_truth.py:{line} " in found.advice[0] for line in lines)


def in_one_line(w, wide, x):
    return (x @ w).sum(-1, keepdims=True) + x @ wide


def in_two_lines(w, wide, x):
    y = (x @ w).sum(-1, keepdims=True)
    return y + x @ wide


@pytest.mark.parametrize("function", [in_one_line, in_two_lines])
def test_a_product_that_is_widened_is_named_whatever_is_on_its_line(function):
    def loss_fn(params, x):
        return square(function(*params, x))

    params = normal(16, 16).astype(F16), normal(16, 1600)
    found = ols.diagnose(loss_fn, params, normal(32, 16).astype(F16))
    assert found.verdict.startswith("Hardly anything is computed in 16 bits: 99.0%")
    line = function.__code__.co_firstlineno + (1 if function is in_one_line else 2)
    assert f"test_truth.py:{line} " in found.advice[0]


def test_nobody_is_advised_to_narrow_what_was_cast_as_advised():
    def loss_fn(w, x):
        z = x.astype(F16) @ w.astype(F16)
        wide = z.astype(F32)
        return square(jnp.tanh(wide @ wide.T))

    found = ols.diagnose(loss_fn, normal(8, 8, scale=0.3), normal(24, 8, scale=1.0))
    assert not any("cast both operands" in line for line in found.advice)


@pytest.mark.slow
def test_nobody_is_advised_to_narrow_what_the_advice_was_to_keep():
    def loss_fn(w, x, y):
        z = x @ w
        gram = jnp.matmul(z, z.T, precision="highest") + 1e-3 * jnp.eye(len(x))
        factor = jnp.linalg.cholesky(gram)
        solved = jax.scipy.linalg.cho_solve((factor, True), y)
        return y @ solved + jnp.sum(jnp.log(jnp.diag(factor)))

    batch = normal(24, 8, scale=1.0), normal(24, scale=1.0, seed=3)
    found = ols.diagnose(ols.autocast(loss_fn), normal(8, 16, scale=0.3), *batch)
    assert str(found).startswith("Computes in float32 ")
    assert not any("Wrap the loss function" in line for line in found.advice)


def test_of_a_wrong_loss_there_is_no_advice_to_narrow_its_products():
    def loss_fn(w, x):
        z = jnp.tanh(x @ w.astype(F16)) @ w.astype(F16) * 300
        return square((z.astype(F16) * F16(300)).astype(F32) * 1e-6)

    found = ols.diagnose(loss_fn, normal(8, 8), normal(24, 8, scale=1.0))
    assert [one.how for one in found.wrong][:1] == ["overflows"]
    assert not any("Wrap the loss function" in line for line in found.advice)


def test_operands_that_are_widened_are_named():
    def loss_fn(params, x):
        x = jnp.tanh(x @ params[0].astype(F16))
        for w in params[1:]:
            x = jnp.tanh(x @ w)
        return square(x)

    found = ols.diagnose(loss_fn, [normal(8, 8)] * 4, normal(4, 8).astype(F16))
    assert str(found).startswith("Computes in float32 (")
    assert found.verdict.startswith("Hardly anything is computed in 16 bits")
    assert found.advice[0].startswith("Wrap the loss function in autocast")
    assert "test_truth.py:" in found.advice[0]


def test_what_is_in_another_dtype_is_named():
    def loss_fn(params, x):
        x = jnp.tanh(x.astype(F16) @ params["w"].astype(F16))
        return crossentropy(x.astype(F32) @ params["head"], jnp.zeros(4, int))

    found = ols.diagnose(
        loss_fn, {"w": normal(32, 32), "head": normal(32, 2)}, normal(4, 32)
    )
    first = str(found).splitlines()[0]
    assert first.startswith("Computes in float16 (")
    assert "% of the multiplications) and float32 (" in first
    assert all(advice.startswith("Wrap the optimizer") for advice in found.advice)


def test_a_float16_loss_is_told():
    loss_fn = lambda w, x: jnp.sum(w.astype(F16) * x)
    found = ols.diagnose(loss_fn, jnp.ones(3), jnp.ones(3, F16))
    assert found.loss_dtype == F16
    assert "the loss is float16." in str(found)
    assert found.verdict.startswith("float16 is fine except for the loss")
    assert found.advice[0].startswith("Compute the loss in float32")


def test_bfloat16_is_held_against_float32_too(monkeypatch):
    monkeypatch.setitem(globals(), "F16", jnp.bfloat16)
    found = ols.diagnose(*gate(1.0))
    assert found.verdict == "bfloat16 is fine as it is, without a loss scale."
    assert found.computes_in == (jnp.bfloat16,)
    assert found.wrong == ()
    found = ols.diagnose(*embedding(4096))
    assert found.wrong[0].how == "stagnates"
    assert found.verdict.startswith("bfloat16 gives wrong gradients")


def test_a_kernel_that_is_not_compared_is_told():
    def kernel(x, y):
        y[...] = x[...] * 2

    def loss_fn(w, x):
        y = pallas.pallas_call(kernel, jax.ShapeDtypeStruct((8,), F16), interpret=True)(
            x
        )
        return jnp.sum((y * w.astype(F16)).astype(F32))

    found = ols.diagnose(loss_fn, jnp.ones(8), jnp.ones(8, F16))
    page = " ".join(str(found).split())
    assert "Not compared with float32: pallas_call at tests/" in page
    assert "which runs in 16 bits only." in page


def test_a_solver_that_stays_in_16_bits_is_told():
    def loss_fn(w):
        solve = lambda _, b: b / 2
        x = lax.custom_linear_solve(
            lambda x: 2 * x, w.astype(F16), solve, symmetric=True
        )
        return jnp.sum(x.astype(F32))

    found = ols.diagnose(loss_fn, jnp.ones(8))
    assert re.search(
        r"Not compared with float32: \S+ at tests/\S+ \(loss_fn\), which runs in 16 bits",
        " ".join(str(found).split()),
    )
    assert len(found.not_compared) == 1


@pytest.mark.slow
def test_elements_of_a_batch_may_leave_a_loop_at_different_times():
    def powers(x, w, steps):
        goes_on = lambda carry: carry[0] < steps
        step = lambda carry: (carry[0] + 1, carry[1] @ w)
        return lax.while_loop(goes_on, step, (0, x))[1]

    def loss_fn(w, xs, steps):
        w, xs = half((w, xs))
        return square(
            jax.vmap(powers, (0, None, 0))(xs, lax.stop_gradient(w), steps) @ w
        )

    w = normal(4, 4)
    xs = normal(3, 4, scale=1)
    for steps in map(jnp.asarray, ([1, 5, 3], [5, 0, 3], [0, 0, 0])):
        report = ols.diagnose(loss_fn, w, xs, steps)
        in_float32 = float(loss_fn(w, xs, steps))
        assert report.loss_in_float32 == pytest.approx(in_float32, rel=1e-3)
        assert not report.wrong


def test_a_loss_over_several_devices():
    mesh = jax.make_mesh(
        (jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,)
    )

    def loss_fn(w, x):
        each = lambda w, x: jax.lax.pmean(square(x.astype(F16) @ w.astype(F16)), "d")
        each = jax.shard_map(
            each, mesh=mesh, in_specs=(jax.P(), jax.P("d")), out_specs=jax.P()
        )
        return each(w, x)

    found = ols.diagnose(loss_fn, normal(4, 4), normal(jax.device_count(), 4))
    assert found.wrong == ()
    assert 0 < found.off["."] < 0.01


# --- what is rare ---


def over_no_rounds(params, x):
    _, ys = lax.scan(lambda c, row: (c + row.sum(), row * 2), 0.0, x[:0])
    return square(x @ params["w"]) + jnp.sum(ys)


def in_four_bits(params, x):
    quantized = (x.astype(F16) * 2).astype(jnp.int4)
    return square((x @ params["w"]) * quantized.astype(F32))


@pytest.mark.parametrize("loss_fn", [over_no_rounds, in_four_bits])
def test_what_is_rare_is_run(loss_fn):
    found = ols.diagnose(ols.autocast(loss_fn), {"w": normal(8, 8)}, normal(16, 8))
    assert found.wrong == ()
    assert "w" in found.off


def test_parameters_whose_paths_read_alike_are_told_apart():
    params = {"a/b": normal(8, 8), "a": {"b": normal(8, 8, seed=1)}}
    loss_fn = lambda params, x: square(x @ params["a/b"] @ params["a"]["b"])
    found = ols.diagnose(ols.autocast(loss_fn), params, normal(16, 8))
    assert len(found.off) == 3
    assert all(
        name.startswith("a/b (argument ") for name in found.off if name != "the loss"
    )


# --- what follows from choices ---


def numbered(logits, labels):
    """Class numbers that bfloat16 does not tell apart."""
    classes = jnp.arange(300).astype(jnp.bfloat16)
    is_class = labels[:, None].astype(jnp.bfloat16) == classes
    return -jnp.mean(jnp.sum(is_class * jax.nn.log_softmax(logits), -1))


def causal(scores, positions):
    """A mask of positions that bfloat16 does not tell apart."""
    at = positions.astype(jnp.bfloat16)
    scores += 8 * jnp.eye(len(at), k=1)  # for the token that is to be predicted
    masked = jnp.where(at[:, None] >= at[None], scores, -1e9)
    return jnp.mean(jax.nn.softmax(masked) ** 2) * len(at)


def drawn(seed, *shape):
    return jnp.asarray(np.random.RandomState(seed).randn(*shape), F32)


def ranked(w, x):
    """Numbers so near to each other that they come in another order."""
    y = (x.astype(F16) @ w.astype(F16)).astype(F32)
    return square(jnp.sort(y, 0), jnp.linspace(-1, 1, 64)[:, None]) + jnp.median(y) ** 2


CHOOSING = {
    "class numbers": (numbered, normal(300, scale=1), jnp.arange(257, 265), "eq"),
    "a mask": (causal, normal(400, 400, scale=1), jnp.arange(400), "ge"),
    "an order": (ranked, drawn(0, 8, 4) * F32(0.3), drawn(1, 64, 8), "sort"),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", CHOOSING)
def test_what_float32_gives_by_its_own_choices_is_said(model, monkeypatch):
    loss_fn, params, x, chooses = CHOOSING[model]
    found = ols.diagnose(loss_fn, params, x)
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    monkeypatch.setattr(jnp, "bfloat16", F32)
    monkeypatch.setitem(globals(), "F16", F32)
    true_loss, true_grads = jax.value_and_grad(loss_fn)(params, x)
    off = float(jnp.linalg.norm(grads - true_grads) / jnp.linalg.norm(true_grads))
    assert found.off_by_choices["."] == pytest.approx(off, rel=0.05)
    off = abs(float(loss) / float(true_loss) - 1)
    assert found.off_by_choices.get("the loss", 0.0) == pytest.approx(off, abs=0.05)
    assert "With float32's own choices" in str(found)
    if off > 0.05:  # or else either choice may be as good
        assert found.verdict.startswith("Float32 chooses differently at ")
        assert chooses in [row.primitive for row in found.choices]


def test_choices_that_change_nothing_are_fine():
    matrix = jnp.array([[1.0003, 2.0], [1.0004, -1.0]])  # whose pivot float16 exchanges

    def loss_fn(matrix, x, b):
        product = (x.astype(F16) @ matrix.astype(F16)).astype(F32)
        return jnp.sum(jnp.linalg.solve(product, b) ** 2)

    found = ols.diagnose(loss_fn, matrix, jnp.eye(2), jnp.array([1.0, 5.0]))
    assert found.off_by_choices == {}
    assert found.wrong == ()
    assert "is fine" in found.verdict


def inverted_by_qr(matrix):
    """The inverse, with its columns in the order of the pivots."""
    q, r, _ = jax.scipy.linalg.qr(matrix, pivoting=True)
    return jnp.linalg.solve(r, q.T)


PIVOTING = {
    "inv": lambda x: jnp.linalg.inv(1j * x),
    "qr": functools.partial(lax.map, inverted_by_qr),
}


@pytest.mark.slow
@pytest.mark.parametrize("function", PIVOTING)
def test_errors_count_where_float32_chooses_other_pivots(function):
    def loss_fn(w, x):
        return jnp.sum(jnp.abs(PIVOTING[function](x @ w)) ** 2)

    # Rounding changes which row and which column is the largest.
    w = jnp.array([[1.0205, 1.0035], [1.0225, 1.04]])
    x = jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])
    autocasted = ols.autocast(loss_fn, BF16)
    grads, true_grads = jax.grad(autocasted)(w, x), jax.grad(loss_fn)(w, x)
    off = float(jnp.linalg.norm(grads - true_grads) / jnp.linalg.norm(true_grads))
    assert off > 0.05
    assert ols.diagnose(autocasted, w, x).off["."] == pytest.approx(off, rel=0.01)


def test_other_pivots_than_float32s_are_no_error():
    """In bfloat16, both columns are as long, and in float32, the second is longer."""
    loss_fn = lambda w, x: square(inverted_by_qr(x @ w))
    w = jnp.array([[1.0198, -1.0250], [1.0, 1.0]])
    found = ols.diagnose(ols.autocast(loss_fn, BF16), w, jnp.eye(2))
    assert [choice.origin.primitive for choice in found.choices] == ["qr"]
    assert found.wrong == ()
    assert max(found.off.values()) < 0.01


def test_matrices_without_rows_are_inverted():
    loss_fn = lambda w: square(w.astype(F16)) + jnp.sum(jnp.linalg.inv(w[:0, :0]))
    assert ols.diagnose(loss_fn, jnp.eye(2)).off["."] == 0


# --- what is to be in float32 beside products ---


def accumulated(w, x):
    y = jax.nn.softplus(x.astype(F16) @ w.astype(F16))
    return square(jnp.exp(-jnp.diff(jnp.cumsum(y, 0).astype(F32), axis=0)))


def multiplied(w, x):
    y = jax.nn.sigmoid(x.astype(F16) @ w.astype(F16))
    return -jnp.mean(jnp.log(jnp.cumprod(y[:60], 0).astype(F32) + 1e-30))


def saturated(w, x):
    y = jnp.tanh(x[:, :8].astype(F16) @ w.astype(F16) * F16(1.5))
    return square(jnp.arctanh(y))


@pytest.mark.parametrize(
    ("loss_fn", "how", "line"),
    [
        (accumulated, "cancels", 2),
        (multiplied, "vanishes", 2),
        (saturated, "saturates", 1),
    ],
)
def test_what_is_rounded_after_a_product_is_named(loss_fn, how, line):
    found = ols.diagnose(loss_fn, normal(8, 4), normal(4000, 8, scale=1))
    assert found.wrong[0].how == how
    line += loss_fn.__code__.co_firstlineno
    assert f"test_truth.py:{line} " in found.advice[0]


# --- what is given ---


def test_numbers_of_python_are_parameters():
    loss_fn = lambda p, x: square(jnp.asarray(p["a"]).astype(F16) * x.astype(F16))
    found = ols.diagnose(loss_fn, {"a": 2.0}, normal(16, scale=1))
    assert found.has_gradients
    assert list(found.off) == ["the loss", "a"]


def test_shapes_are_refused():
    x = jax.ShapeDtypeStruct((4, 8), F32)
    with pytest.raises(TypeError, match="give it arrays, not a ShapeDtypeStruct"):
        ols.diagnose(lambda w, x: square(x @ w), normal(8, 8), x)


def test_a_loop_that_only_passes_numbers_on_is_compared():
    def loss_fn(w, x):
        y = jax.nn.sigmoid(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        add = lambda total, row: (total + row, None)
        total, _ = lax.scan(add, jnp.zeros(8, jnp.bfloat16), y)
        return jnp.mean(total).astype(F32)

    found = ols.diagnose(loss_fn, normal(8, 8), normal(20, 8, scale=1))
    assert found.not_compared == ()


def test_a_parameter_may_have_the_name_that_the_loss_has():
    params = {"the loss": normal(8, 8)}
    found = ols.diagnose(lambda p, x: square(x @ p["the loss"]), params, normal(16, 8))
    assert sorted(found.off) == ["the loss", "the loss (argument 0)"]


def test_all_callbacks_of_a_line_are_said_not_to_be_compared():
    runs = []

    def same(x):
        runs.append(x.dtype)
        return x

    def loss_fn(w, x):
        y = lax.stop_gradient(x.astype(F16))
        jax.debug.callback(same, y)
        like = jax.ShapeDtypeStruct(y.shape, y.dtype)
        y = jax.pure_callback(lambda x: x, like, y) + io_callback(same, like, y)
        return square((y * w.astype(F16)).astype(F32))

    found = ols.diagnose(loss_fn, normal(8), normal(8, scale=1))
    assert len(found.not_compared) == 2
    assert set(runs) == {np.dtype(F16)}  # and never for float32 as well


# --- what float32 decides by itself ---


def by_branch(w, x):
    """Float32 tells the two apart, and so takes the other branch."""
    h = x.astype(F16) @ w.astype(F16) + F16(64)
    mean = lambda h: jnp.mean(h.astype(F32))
    return lax.cond(h[0].max() > h[1].max(), mean, lambda h: mean(h * h), h)


def by_convergence(w, x):
    """Newton's method, which never converges in 16 bits, with a price for each round."""
    a = w.astype(F16) * x.astype(F16)
    s = lax.stop_gradient(a)
    is_far = lambda c: (jnp.abs(c[0] * c[0] - s) > 1e-3).any() & (c[1] < 60)
    step = lambda c: ((c[0] + s / c[0]) / 2, c[1] + 1)
    _, rounds = lax.while_loop(is_far, step, (s, 0))
    return jnp.mean(a.astype(F32) * rounds)


def by_rounds(w, x):
    """A number of rounds that is computed in 16 bits."""
    total = lax.stop_gradient(x.astype(F16).sum() * F16(1000))
    rounds = jnp.floor(total).astype(jnp.int32) % 50
    half = lambda _, y: y / 2
    return w.astype(F16).astype(F32) * lax.fori_loop(0, rounds, half, F32(1))


DECIDING = {
    "a branch": (by_branch, drawn(0, 8, 8) * 0.01, drawn(1, 32, 8)),
    "convergence": (by_convergence, F32(0.5), jnp.linspace(5, 30, 16)),
    "rounds": (by_rounds, F32(0.9), drawn(3, 64) + 0.03),
}


@quick("model", DECIDING, "a branch", "rounds")
def test_float32_takes_its_own_branches_and_rounds(model, monkeypatch):
    loss_fn, w, x = model
    found = ols.diagnose(loss_fn, w, x)
    monkeypatch.setitem(globals(), "F16", F32)
    off = abs(found.loss / float(loss_fn(w, x)) - 1)
    assert off > 0.05
    assert found.off_by_choices["the loss"] == pytest.approx(off, rel=0.05)
    assert found.verdict.startswith("Float32 chooses differently at ")


def test_what_float32_gives_roughly_is_wrong_if_16_bits_give_nothing():
    """A variance far from 0: float32 is off by 16%, bfloat16 by 3000 times."""

    def loss_fn(p, x, y):
        h = x.astype(BF16) @ p["w"].astype(BF16)
        q = x.astype(BF16) + BF16(500)
        variance = (q * q).mean(-1) - q.mean(-1) ** 2  # here
        return square((h + variance * p["s"].astype(BF16)).astype(F32) - y)

    rng = np.random.RandomState(0)
    x = jnp.asarray(rng.randn(256, 16), F32)
    y = jnp.asarray(rng.randn(256), F32)
    w = jnp.asarray(rng.randn(16) / 4, F32)
    (one,) = ols.diagnose(loss_fn, {"w": w, "s": jnp.zeros(())}, x, y).wrong
    assert one.name == "s"
    assert f":{loss_fn.__code__.co_firstlineno + 3} " in one.place.source


@pytest.mark.slow
def test_random_numbers_are_the_same_in_float32_and_float64():
    """Those of a gamma distribution depend on the dtype, and not on rounding alone."""

    def loss_fn(p, x):
        h = x * p["w"] * jax.random.gamma(jax.random.key(0), 2.0, x.shape)
        v = (h.astype(BF16) + BF16(1000)) * p["s"].astype(BF16) - BF16(1000)  # here
        return square(v.astype(F32)) + square(h)

    params = {"w": normal(8), "s": jnp.ones(())}
    found = ols.diagnose(loss_fn, params, normal(16, 8))
    assert {"s", "w"} <= {*found.off}
    assert f":{loss_fn.__code__.co_firstlineno + 2} " in found.wrong[0].place.source


def test_an_intermediate_value_does_not_hide_what_choices_change():
    def loss_fn(w, x):
        lost = jnp.exp(-18 - x[:, :1] ** 2).astype(F16).astype(F32) * 1e8
        return by_branch(w, x) + 1e-6 * jnp.mean(lost * w[0])

    found = ols.diagnose(loss_fn, drawn(0, 8, 8) * 0.01, drawn(1, 32, 8))
    assert [one.name for one in found.wrong] == ["an intermediate value"]
    assert "are right" not in found.verdict
    page = " ".join(str(found).split())
    assert re.search(
        r"With float32's own choices, such as masks, results differ by up to \S+% \(the loss",
        page,
    )
    assert any("what decides the choices" in advice for advice in found.advice)


ORDERS = {
    "sort": lambda u: jnp.sort(u, 0),
    "top_k": lambda u: lax.top_k(u.T, 4)[0],
    "median": lambda u: jnp.median(u, 0),
}


@quick("order", ORDERS, "sort", "top_k")
def test_what_is_sorted_is_compared_with_what_float32_sorts(order, monkeypatch):
    """And is not taken for right, as numbers come in another order."""

    def loss_fn(w, x):
        u = x.astype(F16) @ w.astype(F16) + F16(3000)
        return square(order(u) - F16(3000), -0.3)

    w, x = normal(8, 8), normal(64, 8, scale=1)
    found = ols.diagnose(loss_fn, w, x)
    assert {one.how for one in found.wrong} == {"cancels"}
    monkeypatch.setitem(globals(), "F16", F32)
    assert found.loss_in_float32 == pytest.approx(float(loss_fn(w, x)), rel=1e-2)


def test_a_cast_to_8_bits_is_named():
    def loss_fn(w, x):
        w = w.astype(jnp.float8_e4m3fn).astype(F16)
        return square(jnp.tanh(x.astype(F16) @ w))

    found = ols.diagnose(loss_fn, normal(16, 16), normal(64, 16, scale=1, seed=4))
    line = f"test_truth.py:{loss_fn.__code__.co_firstlineno + 1} "
    assert all(line in one.place.source for one in found.wrong)
    assert found.wrong


def test_what_is_not_at_its_limit_does_not_saturate():
    """A relaxation whose small steps float16 loses, so that it ends early."""

    def loss_fn(w, x):
        h = x.astype(F16) @ w.astype(F16)
        goes_on = lambda state: (state[1] > 1e-4) & (state[2] < 500)

        def step(state):
            z, _, n = state
            new = z + F16(0.02) * (jnp.tanh(h) - z)
            return new, jnp.abs(new - z).max().astype(F32), n + 1

        z, *_ = lax.while_loop(goes_on, step, (jnp.zeros_like(h), F32(1), 0))
        return square(lax.stop_gradient(z) - h)

    found = ols.diagnose(loss_fn, normal(8, 8), normal(16, 8, scale=1))
    assert "saturates" not in {one.how for one in found.wrong}


def test_an_infinity_that_a_choice_makes_in_float32_is_that_of_16_bits(monkeypatch):
    """Of logits that overflow, `logsumexp` subtracts no maximum, as that is infinite."""

    def loss_fn(w, x):
        h = x.astype(F16) @ w.astype(F16) * 100
        logits = h @ h.T
        return jnp.mean(jax.nn.logsumexp(logits.astype(F32) * 1e-2, -1))

    w, x = normal(8, 8), normal(16, 8, scale=1.0)
    found = ols.diagnose(loss_fn, w, x)
    assert found.wrong[0].how == "overflows"
    line = f"test_truth.py:{loss_fn.__code__.co_firstlineno + 2} "
    assert line in found.wrong[0].place.source
    assert "(in float32, it is " in found.verdict
    monkeypatch.setitem(globals(), "F16", F32)
    assert found.loss_in_float32 == pytest.approx(float(loss_fn(w, x)), rel=1e-3)
