"""How long autocast takes to trace programs in programs: as many times longer as JAX's are."""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import pytest
from against_float32 import assert_close, normal, products
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from pairs import one_in

import optax_lossscale as ols
from optax_lossscale._programs import flat

W = normal(1, 4, 4, scale=0.5)
X = normal(0, 2, 4)


def layer(w, x):
    return jnp.tanh(x @ w)


# Each calls `inner`, in a program that it holds, on a layer of its own.


def cond(inner, w, x):
    return lax.cond(
        x.sum() > 0, lambda x: inner(w, layer(w, x)), lambda x: layer(w, x), x
    )


def switch(inner, w, x):
    branches = [lambda x: x, lambda x: inner(w, layer(w, x)), lambda x: layer(w, x)]
    return lax.switch(jnp.int32(x[0, 0]), branches, x)


def dynamic_loop(inner, w, x):
    return lax.fori_loop(0, jnp.int32(x[0, 0]), lambda i, x: inner(w, layer(w, x)), x)


def static_loop(inner, w, x):
    return lax.fori_loop(0, 2, lambda i, x: inner(w, layer(w, x)), x)


def scan_over_time(inner, w, x):
    return lax.scan(lambda x, _: (inner(w, layer(w, x)), None), x, length=2)[0]


def scan_over_layers(inner, w, x):
    def body(carry, w):
        x, y = carry
        return (x + inner(w, layer(w, y)), y + x @ w), None

    return lax.scan(body, (x @ w, x), jnp.stack([w, w]))[0][0]


def scan_until(inner, w, x):
    step = lambda state: (state[0] + 1, inner(w, layer(w, state[1])))
    return lax.while_loop(lambda state: state[0] < 2, step, (0, x))[1]


def checkpoint(inner, w, x):
    return jax.checkpoint(lambda w, x: inner(w, layer(w, x)))(w, x)


def jit(inner, w, x):
    return jax.jit(lambda w, x: inner(w, layer(w, x)))(w, x)


def vmap(inner, w, x):
    return jax.vmap(lambda x: inner(w, layer(w, x[None]))[0])(x)


def custom_jvp(inner, w, x):
    fun = lambda w, x: inner(w, layer(w, x))
    custom = jax.custom_jvp(fun)
    custom.defjvp(functools.partial(jax.jvp, fun))
    return custom(w, x)


def custom_vjp(inner, w, x):
    fun = lambda w, x: inner(w, layer(w, x))
    custom = jax.custom_vjp(fun)
    custom.defvjp(functools.partial(jax.vjp, fun), lambda pull, ct: pull(ct))
    return custom(w, x)


def shard_map(inner, w, x):
    around = jax.sharding.get_abstract_mesh()
    mesh = jax.make_mesh((1,) * 4, tuple("abcd"), axis_types=(AxisType.Auto,) * 4)
    axis = "abcd"[around.axis_types.count(AxisType.Manual)]
    fun = jax.shard_map(
        lambda w, x: inner(w, layer(w, x)),
        mesh=mesh if around.empty else around,
        in_specs=(P(), P()),
        out_specs=P(),
        axis_names={axis},
        check_vma=False,
    )
    return fun(w, x)


HOLDERS = [
    cond,
    switch,
    dynamic_loop,
    static_loop,
    scan_over_time,
    scan_over_layers,
    scan_until,
    checkpoint,
    jit,
    vmap,
    custom_jvp,
    custom_vjp,
]


def nested(holders, depth):
    """A function in a function, and so on, by turns of these kinds."""
    fun = layer
    for _, holder in zip(range(depth), itertools.cycle(holders), strict=False):
        fun = functools.partial(holder, fun)
    return fun


def called_twice(holder, depth, of=layer):
    """A jitted function that calls another twice, which calls another twice, and so on."""
    fun = jax.jit(of)
    for _ in range(depth):
        call = fun if holder is None else functools.partial(holder, fun)
        fun = jax.jit(functools.partial(lambda call, w, x: call(w, call(w, x)), call))
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


def assert_linear(make, depths):
    """Asserts that tracing it under autocast takes as much for each further level."""
    # It would be 1.67 if each level read all that are in it once more, and 8 if it did
    # so twice. JAX itself may take more for each, as old versions do for `vmap` in
    # `vmap`.
    by_jax = growth(lambda depth: make(depth), depths)
    assert growth(lambda depth: ols.autocast(make(depth)), depths) < max(
        1.4, 1.2 * by_jax
    )


def growth(make, depths):
    """How much more the second half of the levels takes than the first."""
    calls_to_trace(make(depths[0]))  # which may compile something
    first, second, third = (calls_to_trace(make(depth)) for depth in depths)
    return (third - second) / (second - first)


def name_of(holder):
    return getattr(holder, "__name__", "alone")


def name_of_both(pair):
    return "-".join(map(name_of, pair))


DIFFERENTIABLE = [h for h in HOLDERS if h not in (dynamic_loop, scan_until)]
PAIRS = list(itertools.combinations([*HOLDERS, shard_map], 2))


@one_in(2, "holder", {name_of(holder): holder for holder in HOLDERS})
def test_each_level_of_a_nested_program_takes_as_long_to_trace_as_the_last(holder):
    assert_linear(functools.partial(nested, [holder]), (3, 6, 9))


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=name_of_both)
def test_so_does_each_level_of_two_kinds_by_turns(pair):
    depths = (2, 4, 6) if shard_map in pair else (4, 8, 12)
    assert_linear(functools.partial(nested, pair), depths)


@pytest.mark.slow
@pytest.mark.parametrize("holder", [None, cond, checkpoint], ids=name_of)
def test_a_function_that_is_called_by_many_is_read_once(holder):
    """Though it would be millions of equations, were each call a copy."""
    assert_linear(functools.partial(called_twice, holder), (10, 15, 20))


@pytest.mark.slow
@pytest.mark.parametrize("holder", HOLDERS, ids=name_of)
def test_so_is_what_holds_the_calls(holder):
    assert_linear(functools.partial(called_twice, holder), (8, 12, 16))


@pytest.mark.slow
@pytest.mark.parametrize("holder", DIFFERENTIABLE, ids=name_of)
def test_gradients_of_nested_programs_take_few_times_what_they_take_in_float32(holder):
    fun = nested([holder], 8)
    grad = lambda fun: jax.grad(lambda w, x: jnp.sum(fun(w, x)))
    assert calls_to_trace(grad(ols.autocast(fun))) < 10 * calls_to_trace(grad(fun))


@pytest.mark.parametrize("holder", [None, cond, custom_vjp], ids=name_of)
def test_what_is_called_by_many_gives_what_it_gives_in_float32(holder, monkeypatch):
    monkeypatch.setattr(flat, "_MAX_INLINED", 5)
    fun = called_twice(
        holder, 3 if holder is None else 2, of=lambda w, x: jnp.cos(x @ w)
    )
    loss = lambda fun: lambda w, x: jnp.sum(fun(w, x) ** 2)
    exact = jax.jit(jax.value_and_grad(loss(fun)))(W, X)
    cast = jax.value_and_grad(ols.autocast(loss(fun)))
    assert_close(jax.jit(cast)(W, X), exact, 0.02)
    assert products(cast, W, X).keys() == {"float16"}


def test_short_functions_are_put_in_place_of_their_calls():
    """So that what lies between two products is in one checkpoint, whoever jitted parts of it."""
    double = jax.jit(lambda x: jnp.exp(x) * 2)
    fun = lambda w, x: double(double(x @ w) - 1) @ w
    jaxpr = str(jax.make_jaxpr(ols.autocast(fun))(W, X))
    assert jaxpr.count("= remat2[") + jaxpr.count("= checkpoint[") == 1
    assert products(ols.autocast(fun), W, X) == {"float16": 2}
