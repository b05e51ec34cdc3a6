"""Islands that compute the same, by the same lines, are traced once."""

import jax
import jax.numpy as jnp
import pytest
from against_float32 import assert_close, normal

import optax_lossscale as ols

W = normal(0, 4, 4, scale=0.5)
X = normal(1, 3, 4)


def traces(fun):
    """How many islands of a function are recomputed, and how many of these were traced."""
    eqns = jax.make_jaxpr(ols.autocast(fun))(W, X).eqns
    islands = [eqn.params["jaxpr"] for eqn in eqns if "policy" in eqn.params]
    return len(islands), len(set(map(id, islands)))


def layers(layer, n=4):
    """A function that runs a layer several times, each with its number."""

    def fun(w, x):
        for i in range(n):
            x = layer(w, x, i)
        return x

    return fun


@pytest.mark.parametrize(
    ("expected", "layer"),
    [
        (1, lambda w, x, i: jnp.exp(-(x @ w) ** 2)),
        (1, lambda w, x, i: jax.nn.softmax(jax.nn.gelu(x @ w))),
        # A number, a power, or an axis that differs is another operation.
        (4, lambda w, x, i: jnp.sin(x @ w) * (i + 2.5)),
        (2, lambda w, x, i: jnp.exp(x @ w + (0.0 if i % 2 else -0.0))),
        (2, lambda w, x, i: jnp.sin(x @ w) ** (2 + i % 2)),
        (2, lambda w, x, i: (h := jnp.exp(x @ w)) - jnp.max(h, i % 2, keepdims=True)),
        # So is one on other operands.
        (2, lambda w, x, i: (s := jnp.sin(h := x @ w)) - (jnp.cos(s) if i % 2 else jnp.cos(h))),
    ],
)  # fmt: skip
def test_layers_that_are_alike_are_traced_once(expected, layer):
    # The last one may leave its results in float32.
    last = lambda w, x: layers(layer)(w, x) @ w
    assert traces(last) == (4, expected)


def test_those_made_by_other_lines_or_in_other_scopes_are_not():
    """As errors and profiles name these."""

    def two_lines(w, x):
        x = jnp.exp(-(x @ w))
        x = jnp.exp(-(x @ w))
        return x @ w

    def two_scopes(w, x):
        for i in range(2):
            with jax.named_scope(f"layer{i}"):
                x = jnp.exp(-(x @ w))
        return x @ w

    assert traces(two_lines) == (2, 2)
    assert traces(two_scopes) == (2, 2)


def test_layers_that_differ_in_a_number_give_what_they_give_in_float32():
    fun = lambda w, x: jnp.sum(
        layers(lambda w, x, i: jnp.tanh(x @ w * (i + 1.5)))(w, x) ** 2
    )
    exact = jax.value_and_grad(fun)(W, X)
    assert_close(jax.value_and_grad(ols.autocast(fun))(W, X), exact, 0.02)
