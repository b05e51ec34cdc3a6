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


def test_each_shared_program_is_gone_through_once():
    """Of programs that each call the one before twice, some would take years otherwise."""
    found = equations(jax.make_jaxpr(call_tree(60))(W[0], W[0]).jaxpr)
    (product,) = (at for at in found if at.name == "dot_general")
    assert product.count == product.runs == 2**60
    assert product.source.startswith("tests/programs/test_walk.py")


def test_what_no_line_of_the_users_made_is_of_each_line_that_runs_it():
    """JAX traces what it compiles but once, and with the first of these lines."""
    inner = jax.make_jaxpr(call_tree(0))(W[0], X)
    (call,) = inner.eqns
    program = call.params["jaxpr"].jaxpr
    nowhere = call.source_info.replace(traceback=None)
    bare = program.replace(eqns=[e.replace(source_info=nowhere) for e in program.eqns])
    params = call.params | {"jaxpr": call.params["jaxpr"].replace(jaxpr=bare)}
    call = call.replace(params=params)
    found = equations(inner.jaxpr.replace(eqns=[call, call]))
    assert {at.source for at in found} == {found[0].source}
    assert [at.runs for at in found if at.name == "dot_general"] == [2]
    found = equations(bare)
    assert {at.source for at in found} == {"an unknown line"}


def test_a_loop_in_a_shared_program_counts_all_of_its_rounds():
    loop = jax.jit(lambda w, x: lax.fori_loop(0, 5, lambda _, c: c @ w, x))
    twice = lambda w, x: loop(
        w, lax.scan(lambda c, _: (loop(w, c), None), x, None, 3)[0]
    )
    found = equations(jax.make_jaxpr(twice)(W[0], jnp.ones((3, 4))).jaxpr)
    assert sum(at.runs for at in found if at.name == "dot_general") == 20
