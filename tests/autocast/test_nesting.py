"""How long autocast takes to trace programs in programs: as many times longer as JAX's are."""

import functools
import sys

import jax
import jax.numpy as jnp
import pytest
from against_float32 import assert_close, normal, products
from pairs import one_in
from wrappers import WRAPPERS

import optax_lossscale as ols
from optax_lossscale._programs import flat

W = normal(1, 4, 4, scale=0.5)
X = normal(0, 2, 4)
HOLDERS = {name: wrap for name, wrap in WRAPPERS.items() if name != "shard_map"}
DIFFERENTIABLE = {name: wrap for name, wrap in HOLDERS.items() if name != "while_loop"}


def layer(w, x):
    return jnp.tanh(x @ w)


def nested(wrap, depth):
    """A layer in a function that holds it after another layer, and so on."""
    after_a_layer = lambda fun: lambda w, x: fun(w, layer(w, x))
    fun = layer
    for _ in range(depth):
        fun = wrap(after_a_layer(fun))
    return fun


def called_twice(wrap, depth, of=layer):
    """A jitted function that calls another twice, which calls another twice, and so on."""
    twice = lambda fun: lambda w, x: fun(w, fun(w, x))
    fun = jax.jit(of)
    for _ in range(depth):
        fun = jax.jit(twice(wrap(fun)))
    return fun


def calls_to_trace(fun):
    """How many functions Python calls to trace one."""
    count = 0

    def called(frame, event, argument):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        jax.make_jaxpr(fun)(W, X)
    finally:
        sys.setprofile(before)
    return count


def growth(make, depths):
    """How much more the second half of the levels takes than the first."""
    calls_to_trace(make(depths[0]))  # which may compile something
    first, second, third = (calls_to_trace(make(depth)) for depth in depths)
    return (third - second) / (second - first)


def assert_linear(make, depths):
    """Asserts that tracing it under autocast takes as much for each further level."""
    # It would be 1.67 if each level read all that are in it once more, and 8 if it did
    # so twice. JAX itself may take more for each, as old versions do for `vmap` in
    # `vmap`.
    by_jax = growth(make, depths)
    cast = growth(lambda depth: ols.autocast(make(depth)), depths)
    assert cast < max(1.4, 1.2 * by_jax)


@one_in(2, "wrap", HOLDERS)
def test_each_level_of_a_nested_program_takes_as_long_to_trace_as_the_last(wrap):
    assert_linear(functools.partial(nested, wrap), (3, 6, 9))


CALLED = {"jit": lambda fun: fun} | {
    name: HOLDERS[name] for name in ("cond", "checkpoint", "custom_vjp")
}


@pytest.mark.slow
@pytest.mark.parametrize("wrap", CALLED.values(), ids=CALLED)
def test_a_function_that_is_called_by_many_is_read_once(wrap):
    """Though it would be millions of equations, were each call a copy."""
    assert_linear(functools.partial(called_twice, wrap), (10, 15, 20))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_gradients_of_nested_programs_take_few_times_what_they_take_in_float32(wrap):
    fun = nested(wrap, 8)
    grad = lambda fun: jax.grad(lambda w, x: jnp.sum(fun(w, x)))
    assert calls_to_trace(grad(ols.autocast(fun))) < 10 * calls_to_trace(grad(fun))


@pytest.mark.parametrize("wrap", CALLED.values(), ids=CALLED)
def test_what_is_called_by_many_gives_what_it_gives_in_float32(wrap, monkeypatch):
    monkeypatch.setattr(flat, "_MAX_INLINED", 5)
    fun = called_twice(wrap, 2, of=lambda w, x: jnp.cos(x @ w))
    loss = lambda w, x: jnp.sum(fun(w, x) ** 2)
    cast = jax.value_and_grad(ols.autocast(loss))
    assert_close(jax.jit(cast)(W, X), jax.jit(jax.value_and_grad(loss))(W, X), 0.02)
    assert products(cast, W, X).keys() == {"float16"}


def test_short_functions_are_put_in_place_of_their_calls():
    """So that what lies between two products is in one checkpoint, whoever jitted parts of it."""
    double = jax.jit(lambda x: jnp.exp(x) * 2)
    fun = lambda w, x: double(double(x @ w) - 1) @ w
    jaxpr = str(jax.make_jaxpr(ols.autocast(fun))(W, X))
    assert jaxpr.count("= remat2[") + jaxpr.count("= checkpoint[") == 1
    assert products(ols.autocast(fun), W, X) == {"float16": 2}


def stacked(w, x, scope):
    for n in range(8):
        with jax.named_scope(scope(n)):
            x = x + jnp.tanh(jax.nn.standardize(x) @ w)
    return jnp.sum(x)


def test_layers_alike_are_differentiated_once_whatever_they_are_called():
    """As a framework's, each in a scope of its own."""

    def calls(scope):
        fun = functools.partial(stacked, scope=scope)
        return calls_to_trace(jax.grad(ols.autocast(fun)))

    calls(lambda n: "warm up")
    assert calls(lambda n: f"layer{n}") < 1.05 * calls(lambda n: "layer")
