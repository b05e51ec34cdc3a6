"""What is kept for the backward pass takes the memory of a model that was cast by hand."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from compiling import AS_USERS_DO
from jax import lax

import optax_lossscale as ols
from benchmarks import _transformer

TOKENS = jax.ShapeDtypeStruct((64, _transformer.CONTEXT + 1), jnp.int32)


def unrolled(params, tokens, dtype):
    return _transformer.uncast_loss(optax.tree.cast(params, dtype), tokens)


def scanned(params, tokens, dtype, block=_transformer.block):
    """The same with its blocks in a scan."""
    p = optax.tree.cast(params, dtype)
    x = p["embedding"][tokens[:, :-1]] + p["position"]
    blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *p["blocks"])
    x, _ = lax.scan(lambda x, p: (block(p, x), None), x, blocks)
    logits = (_transformer.normed(x, p["norm"]) @ p["head"]).astype(jnp.float32)
    return _transformer.cross_entropy(logits, tokens[:, 1:]).mean()


@pytest.fixture
def params():
    return jax.eval_shape(lambda: _transformer.init(128))


def in_dtype(loss, dtype):
    return lambda params, tokens: loss(params, tokens, dtype)


def bytes_kept(loss, params):
    """Of the arrays that the backward pass gets from the forward pass, without the parameters."""
    pullback = jax.eval_shape(
        lambda *args: jax.vjp(loss, *args, has_aux=False)[1], params, TOKENS
    )
    sizes = {p.shape for p in jax.tree.leaves(params)}
    kept = (x for x in jax.tree.leaves(pullback) if x.shape not in sizes)
    return sum(x.size * x.dtype.itemsize for x in kept)


@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_no_more_is_kept_for_the_backward_pass_than_by_hand(loss, params):
    wide, by_hand = (in_dtype(loss, dtype) for dtype in (jnp.float32, jnp.float16))
    kept = bytes_kept(ols.autocast(wide), params)
    assert kept <= bytes_kept(by_hand, params)
    assert kept <= 0.5 * bytes_kept(wide, params)


def test_of_a_residual_stream_what_takes_fewer_bytes_is_kept():
    """Its float32 sums, or what was added in 16 bits, but not both."""

    def loss(params, x):
        x = x @ params["in"]
        for w in params["layers"]:
            x = x + jax.nn.standardize(x) @ w
        return jnp.mean(jax.nn.standardize(x) ** 2)

    matrix = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    params, x = (
        {"in": matrix, "layers": [matrix] * 4},
        jax.ShapeDtypeStruct((64, 8), jnp.float32),
    )
    pullback = jax.eval_shape(
        lambda *args: jax.vjp(ols.autocast(loss), *args)[1], params, x
    )
    kept = [y for y in jax.tree.leaves(pullback) if y.shape == x.shape]
    # The input of each product, and of the sums the first two terms and those that
    # follow: each is 16 bits beside a sum in float32.
    assert [y.dtype for y in kept].count(jnp.float16) == 5 + 3
    assert [y.dtype for y in kept].count(jnp.float32) == 2


@pytest.mark.slow
@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_compiled_for_a_cpu_it_takes_no_more_memory_than_in_float32(loss, params):
    def temp_bytes(loss):
        step = jax.jit(jax.value_and_grad(loss), compiler_options=AS_USERS_DO)
        return step.lower(params, TOKENS).compile().memory_analysis().temp_size_in_bytes

    wide = in_dtype(loss, jnp.float32)
    assert temp_bytes(ols.autocast(wide)) <= temp_bytes(wide)


@pytest.mark.parametrize(
    ("backend", "prevents"), [("gpu", True), ("cpu", True), ("tpu", False)]
)
def test_a_tpus_compiler_may_share_what_is_recomputed(backend, prevents, monkeypatch):
    """It recomputes by itself what it lacks the memory for, and fuses more without a barrier."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    loss = ols.autocast(lambda w, x: jnp.sum(jax.nn.softmax(x @ w) @ w))
    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones((8, 8)), jnp.ones((4, 8)))
    assert ("prevent_cse=True" in str(jaxpr)) == prevents


def test_gradients_of_a_value_that_is_read_often_are_summed_in_float32():
    """And rounded once, where they leave the stretch between two products."""

    def loss(w, x):
        h = x @ w
        return jnp.sum(jnp.sin(h) * jnp.cos(2 * h) + jnp.exp(-(h**2)))

    text = str(
        jax.make_jaxpr(jax.grad(ols.autocast(loss)))(jnp.ones((8, 8)), jnp.ones((4, 8)))
    )
    sums = re.findall(r":(f16|f32)\[4,8\] = add_any", text)
    assert set(sums) == {"f32"}
