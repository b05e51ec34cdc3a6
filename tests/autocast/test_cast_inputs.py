"""`cast_inputs`: a kernel that takes 16 bits alone, called from a model in float32."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_lossscale as ols

Q = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 4)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 4)), jnp.float32)
each_dtype = pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])


def attention(q, k, v):
    weights = jax.nn.softmax(q @ k.mT)
    return weights @ v


def in_16_bits(q, k, v):
    """As cuDNN's, it refuses to be traced in float32."""
    if jnp.result_type(q, k, v) not in (jnp.float16, jnp.bfloat16):
        raise TypeError(f"takes 16 bits, got {q.dtype}")
    return attention(q, k, v)


def loss_with(attend):
    return lambda w, x: jnp.mean(attend(x @ w, x, x @ w.T) ** 2)


@each_dtype
def test_a_kernel_that_refuses_float32_is_given_16_bits_and_trained_through(dtype):
    loss_fn = ols.autocast(loss_with(ols.cast_inputs(in_16_bits)), dtype)
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(W, Q)
    exact, true = jax.value_and_grad(loss_with(attention))(W, Q)
    assert loss.dtype == grads.dtype == jnp.float32
    chex.assert_trees_all_close((loss, grads), (exact, true), rtol=0.1, atol=0.05)


def test_elsewhere_it_is_the_function():
    loss_fn = loss_with(ols.cast_inputs(attention))
    jaxpr = str(jax.make_jaxpr(jax.grad(loss_fn))(W, Q))
    assert jaxpr == str(jax.make_jaxpr(jax.grad(loss_with(attention)))(W, Q))
    with pytest.raises(TypeError, match="takes 16 bits, got float32"):
        jax.jit(loss_with(ols.cast_inputs(in_16_bits)))(W, Q)


def dtypes_seen():
    """A function that tells in which dtypes it was called, and the list of these."""
    seen = []

    @ols.cast_inputs
    def kernel(x):
        seen.append(x.dtype)
        return 2 * x

    return kernel, seen


def test_a_function_that_was_compiled_outside_of_autocast_is_traced_anew_inside():
    kernel, seen = dtypes_seen()
    compiled = jax.jit(kernel)
    for run in (
        compiled,
        ols.autocast(compiled),
        compiled,
        ols.autocast(compiled, jnp.bfloat16),
    ):
        assert run(Q).dtype == jnp.float32
    assert seen == [jnp.float32, jnp.float16, jnp.bfloat16]


def test_an_autocast_inside_of_another_has_its_own_dtype():
    kernel, seen = dtypes_seen()
    ols.autocast(lambda x: kernel(ols.autocast(kernel, jnp.bfloat16)(x)))(Q)
    assert seen == [jnp.bfloat16, jnp.float16]


@pytest.mark.parametrize(
    "inside",
    [
        lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
        lambda f: lambda x: lax.cond(x.sum() > 0, f, f, x),
        lambda f: jax.checkpoint(f),
        lambda f: jax.vmap(f),
        lambda f: lambda x: lax.fori_loop(0, 2, lambda i, c: f(c), x),
    ],
    ids=["scan", "cond", "checkpoint", "vmap", "fori_loop"],
)
def test_it_is_cast_wherever_it_stands(inside):
    kernel, seen = dtypes_seen()
    jax.jit(jax.value_and_grad(ols.autocast(lambda x: inside(kernel)(x).sum())))(Q)
    assert set(seen) == {jnp.dtype(jnp.float16)}


def test_it_is_cast_in_the_rules_of_derivatives():
    forward, of_forward = dtypes_seen()
    backward, of_backward = dtypes_seen()

    @jax.custom_vjp
    def f(w, x):
        return forward(x @ w)

    f.defvjp(
        lambda w, x: (f(w, x), (w, x)),
        lambda saved, g: (saved[1].T @ backward(g), g @ saved[0].T),
    )
    jax.jit(jax.grad(ols.autocast(lambda w: f(w, Q[0]).sum())))(W)
    assert set(of_forward) == set(of_backward) == {jnp.dtype(jnp.float16)}


def test_only_float32_arrays_are_cast():
    seen = {}

    @ols.cast_inputs
    def kernel(tree, **given):
        seen.update(tree, **given)
        return tree["wide"] * given["scale"], tree["ids"]

    tree = {"wide": Q, "numpy": np.ones(2, "f"), "brain": Q.astype(jnp.bfloat16)}
    tree |= {"ids": jnp.arange(3), "mask": Q > 0}
    given = {"scale": 2.0, "name": "causal", "nothing": None}
    outs = ols.autocast(lambda tree: kernel(tree, **given))(tree)
    assert [x.dtype for x in outs] == [jnp.float32, jnp.int32]
    assert {name: seen[name] for name in given} == given
    dtypes = [seen[name].dtype.name for name in tree]
    assert dtypes == ["float16", "float16", "bfloat16", "int32", "bool"]


def test_it_warns_of_nothing_where_all_products_are_in_the_kernel():
    loss_fn = ols.autocast(lambda x: ols.cast_inputs(in_16_bits)(x, x, x).sum())
    assert jnp.isfinite(loss_fn(Q))


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="fun"):
        ols.cast_inputs(Q)


def test_what_it_sets_in_an_nnx_module_is_kept():
    """And parameters, which it reads in 16 bits, keep their digits."""
    nnx = pytest.importorskip("flax.nnx")

    class Counting(nnx.Module):
        def __init__(self):
            self.count = nnx.BatchStat(jnp.zeros(()))
            self.again = self.count
            self.w = nnx.Param(W)

        def __call__(self, x):
            assert self.w[...].dtype == jnp.float16
            self.count[...] = self.count[...] + 1
            self.again[...] = self.again[...] + 1
            return x @ self.w[...]

    model = Counting()
    kernel = ols.cast_inputs(lambda model, x: model(x))
    out = ols.autocast(lambda model, x: kernel(model, x) + kernel(model, x))(model, Q)
    assert out.dtype == model.count[...].dtype == jnp.float32
    assert model.count[...] == 4
    assert model.again is model.count
    np.testing.assert_array_equal(model.w[...], W)
    with pytest.raises(Exception, match="different trace level"):
        ols.autocast(lambda x: kernel(model, x))(Q)
