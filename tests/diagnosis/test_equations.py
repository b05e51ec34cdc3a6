"""Every equation of a program in its place."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from optax_lossscale._diagnosis.equations import (
    dtypes_within,
    equations,
    keeps_numbers,
)

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
    assert product.source.startswith("tests/diagnosis/test_equations.py")


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


def test_a_loop_in_a_shared_program_counts_all_of_its_rounds():
    loop = jax.jit(lambda w, x: lax.fori_loop(0, 5, lambda _, c: c @ w, x))
    twice = lambda w, x: loop(
        w, lax.scan(lambda c, _: (loop(w, c), None), x, None, 3)[0]
    )
    found = equations(jax.make_jaxpr(twice)(W[0], jnp.ones((3, 4))).jaxpr)
    assert sum(at.runs for at in found if at.name == "dot_general") == 20


def test_the_dtypes_within_are_found_without_visiting_each_call():
    jaxpr = jax.make_jaxpr(call_tree(40))(W[0], X)
    assert dtypes_within(jaxpr) == {jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("function", "keeps"),
    [
        (lambda x: x.T, True),
        (lambda x: jnp.broadcast_to(x, (2, 3, 4)), True),
        (lambda x: x.astype(jnp.float32), True),
        (lambda x: x.astype(jnp.bfloat16).astype(jnp.float16), False),
        (lambda x: x.astype(int), False),
        (lambda x: x * 2, False),
    ],
)
def test_what_is_moved_repeated_or_widened_keeps_its_numbers(function, keeps):
    *_, eqn = jax.make_jaxpr(function)(X).jaxpr.eqns
    assert keeps_numbers(eqn) == keeps
