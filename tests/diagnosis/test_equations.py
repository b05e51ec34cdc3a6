"""Every equation of a program once."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from optax_lossscale._diagnosis.equations import equations, keeps_numbers
from optax_lossscale._programs.versions import name_of

X = jnp.ones((3, 4), jnp.float16)


def test_equations_of_a_program_that_several_call_are_there_once():
    """Of programs that each call the one before twice, some would take years otherwise."""
    function = jax.jit(jnp.tanh)
    for _ in range(60):
        function = jax.jit(lambda x, inner=function: inner(inner(x)))
    found = equations(jax.make_jaxpr(function)(X))
    assert [name_of(eqn) for eqn in found if name_of(eqn) != "jit"] == ["tanh"]


def test_equations_in_loops_are_found():
    loop = lambda x: lax.fori_loop(0, 5, lambda _, c: jnp.tanh(c), x)
    assert "tanh" in map(name_of, equations(jax.make_jaxpr(loop)(X)))


@pytest.mark.parametrize(
    ("function", "keeps"),
    [
        (lambda x: x.T, True),
        (lambda x: jnp.broadcast_to(x, (2, 3, 4)), True),
        (lambda x: x.astype(jnp.float32), True),
        (lambda x: x.astype(jnp.bfloat16).astype(jnp.float16), False),
        (lambda x: x.astype(int), False),
        (lambda x: x * 2, False),
        (lambda x: lax.optimization_barrier((x, x * 2)), True),
    ],
)
def test_what_is_moved_repeated_or_widened_keeps_its_numbers(function, keeps):
    *_, eqn = jax.make_jaxpr(function)(X).jaxpr.eqns
    assert keeps_numbers(eqn) == keeps
