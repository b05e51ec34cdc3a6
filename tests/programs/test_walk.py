"""Every equation of a program in its place."""

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._programs.walk import equations

W, X = jnp.ones((2, 4, 4)), jnp.ones((3, 4), jnp.float16)


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
