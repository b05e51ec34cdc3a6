"""What the backward pass keeps, on programs of float32 and of 16 bits: no number changes."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_float32 import equations, normal
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from optax_lossscale._autocast.recompute import recompute

W, X = normal(0, 64, 64, scale=0.1), normal(1, 32, 64)


def recomputed(fun, *args):
    """The function that `recompute` makes of a function's program."""
    program = jax.make_jaxpr(fun)(*args)
    return lambda *args: recompute(program, prevent_cse=True)(list(args))[0]


def kept(fun, *args):
    """The dtypes and shapes of what a backward pass keeps, but for the arguments."""
    pullback = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
    shapes = collections.Counter(
        f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(pullback)
    )
    shapes.subtract(f"{x.dtype}{list(x.shape)}" for x in args)
    return +shapes


def cones(fun, *args):
    """The operations in each checkpoint of a function."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    return [
        [inner.primitive.name for inner in equations(eqn.params["jaxpr"])]
        for eqn in jaxpr.eqns
        if "policy" in eqn.params
    ]


def mlp(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2 @ w)


FUNCTIONS = {
    "between products": mlp,
    "softmax": lambda w, x: jnp.sum(jax.nn.softmax(x @ w) @ w),
    "in a scan": lambda w, x: lax.scan(lambda x, _: (jnp.sin(x @ w), 0), x, length=3)[0].sum(),
    "in a cond": lambda w, x: lax.cond(x[0, 0] < 9, mlp, lambda w, x: x.sum(), w, x),
    "its own checkpoint": lambda w, x: jax.checkpoint(mlp)(w, jnp.exp(x @ w)),
    "a gather": lambda w, x: jnp.sum(jnp.sin(w[jnp.arange(9) % 4]) @ w),
    "a custom derivative": lambda w, x: jnp.sum(jax.nn.relu(x @ w) @ w),
}  # fmt: skip


@pytest.mark.parametrize("fun", FUNCTIONS.values(), ids=FUNCTIONS)
def test_it_changes_no_number(fun):
    same = recomputed(fun, W, X)
    for exact, found in zip(
        jax.value_and_grad(fun, (0, 1))(W, X),
        jax.value_and_grad(same, (0, 1))(W, X),
        strict=True,
    ):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
            found,
            exact,
        )


def test_of_a_cone_what_it_reads_is_kept():
    assert (
        kept(recomputed(mlp, W, X), W, X)["float32[32, 64]"] == 2
    )  # the product and its square
    assert cones(recomputed(mlp, W, X), W, X)[0] == ["tanh", "integer_pow"]


def test_what_is_only_moved_is_in_no_checkpoint():
    fun = lambda w, x: x.astype(jnp.float16) @ w.astype(jnp.float16).T
    assert not cones(recomputed(fun, W, X), W, X)


def test_a_cheap_value_that_several_read_is_stored_unless_it_takes_more_bytes():
    def reads(fun, of):
        """What the second product's cone computes, of a value that the first reads too."""

        def both(w, x):
            y = of(x @ w)
            return fun(y, w)

        return cones(recomputed(lambda w, x: jnp.sum(both(w, x)), W, X), W, X)

    two = lambda y, w: jnp.cos(y) @ w + jnp.cosh(y) @ w
    # In float16 it takes half the bytes of the product: stored.
    rounded = lambda y: jnp.tanh(y).astype(jnp.float16).astype(jnp.float32)
    assert sum("tanh" in cone for cone in reads(two, rounded)) == 1
    # As many bytes: each computes it again.
    assert sum("tanh" in cone for cone in reads(two, jnp.tanh)) == 2


def test_reductions_are_kept_unless_their_rows_are_read_anyway():
    column = lambda w, x: jnp.sum(((x @ w) / jnp.sum((x @ w) ** 2, 0)) @ w)
    row = lambda w, x: jnp.sum(jax.nn.softmax(x @ w, -1) @ w)
    tall = normal(2, 128, 64)
    assert "float32[64]" in kept(recomputed(column, W, tall), W, tall)
    assert "float32[128]" not in kept(recomputed(row, W, tall), W, tall)


def test_a_name_goes_to_what_takes_fewer_bytes():
    """The policy of a checkpoint then saves the product in 16 bits, and not its sum."""

    def layer(w, x):
        h = lax.dot(x.astype(jnp.float16), w.astype(jnp.float16)).astype(jnp.float32)
        return jnp.sum(jnp.exp(checkpoint_name(h + w[0], "h")))

    policy = jax.checkpoint_policies.save_only_these_names("h")
    fun = jax.checkpoint(layer, policy=policy)
    assert kept(fun, W, X)["float32[32, 64]"] == 1
    found = kept(recomputed(fun, W, X), W, X)
    assert "float32[32, 64]" not in found
    assert found["float16[32, 64]"] == 1
    np.testing.assert_array_equal(recomputed(fun, W, X)(W, X), fun(W, X))


def test_cones_that_are_alike_are_traced_once():
    def traces(fun):
        jaxpr = jax.make_jaxpr(recomputed(fun, W, X))(W, X).jaxpr
        found = [e.params["jaxpr"] for e in jaxpr.eqns if "policy" in e.params]
        return len(found), len(set(map(id, found)))

    def layers(activation):
        def fun(w, x):
            for n in range(4):
                x = activation(x @ w, n) @ w
            return x

        return fun

    assert traces(layers(lambda x, n: jnp.sin(x))) == (4, 1)
    assert traces(layers(lambda x, n: jnp.sin(x * (n + 1.5)))) == (4, 4)
    zeros = (0.0, -0.0)
    assert traces(layers(lambda x, n: jnp.sin(x + zeros[n % 2]))) == (4, 2)


def test_effects_happen_once():
    seen = []

    def fun(w, x):
        y = jnp.tanh(x @ w)
        jax.debug.callback(lambda: seen.append(1))
        return jnp.sum(y @ w + jnp.cos(y) @ w)

    jax.block_until_ready(jax.jit(jax.grad(recomputed(fun, W, X)))(W, X))
    jax.effects_barrier()
    assert seen == [1]
