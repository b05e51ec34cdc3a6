"""Every equation of a program in its place."""

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._programs.walk import equations

F16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
W, X = jnp.ones((2, 4, 4)), jnp.ones((3, 4), jnp.float16)


def products(function, *args):
    """What the operands of each product were, before they were converted."""
    found = equations(jax.make_jaxpr(function)(*args).jaxpr)
    return [at.before[:2] for at in found if at.name == "dot_general"]


def test_what_a_loop_carries_is_what_it_began_with_in_the_first_round_alone():
    layers = lambda ws, x: lax.scan(lambda c, w: (c @ w, None), x.astype(F32), ws)[0]
    assert products(layers, W, X) == [(F32, F32)]
    rounds = lambda w, x: lax.fori_loop(0, 3, lambda _, c: c @ w[0], x.astype(F32))
    assert products(rounds, W, X) == [(F32, F32)]


def test_what_every_round_reads_was_what_it_was_before_the_loop():
    def function(ws, x):
        wide = x.astype(F32)
        return lax.scan(lambda c, w: (c + wide @ w, None), jnp.zeros((3, 4)), ws)[0]

    assert products(function, W, X) == [(F16, F32)]


def test_the_condition_of_a_while_has_operands_of_its_own():
    def function(a, b):
        wide, start = b.astype(F32), jnp.zeros(4)
        return lax.while_loop(lambda s: (a @ s).sum() < 9, lambda s: s + wide[0], start)

    assert products(function, W[0], X) == [(F32, F32)]


def call_tree(depth):
    """A function that calls another twice, which calls another twice, and so on."""
    function = jax.jit(lambda w, x: jnp.tanh(x @ w))
    for _ in range(depth):
        function = jax.jit(lambda w, x, inner=function: inner(w, inner(w, x)))
    return function


def test_a_shared_program_counts_as_often_as_it_runs():
    found = equations(jax.make_jaxpr(call_tree(5))(W[0], X).jaxpr)
    assert sum(at.runs for at in found if at.name == "dot_general") == 2**5


def test_a_loop_in_a_shared_program_counts_all_of_its_rounds():
    loop = jax.jit(lambda w, x: lax.fori_loop(0, 5, lambda _, c: c @ w, x))
    twice = lambda w, x: loop(
        w, lax.scan(lambda c, _: (loop(w, c), None), x, None, 3)[0]
    )
    found = equations(jax.make_jaxpr(twice)(W[0], jnp.ones((3, 4))).jaxpr)
    assert sum(at.runs for at in found if at.name == "dot_general") == 20
