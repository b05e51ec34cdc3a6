"""The sets of operations, and which programs an equation runs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

from optax_lossscale._programs import operations
from optax_lossscale._programs.enter import is_entered
from optax_lossscale._programs.products import count_multiplications, is_product
from optax_lossscale._programs.walk import programs_in

X = jnp.ones((4, 4))


def equation(fun, *args):
    """The first equation of a function."""
    return jax.make_jaxpr(fun)(*args).jaxpr.eqns[0]


def test_no_operation_is_both_cheap_and_something_dear():
    dear = operations.PRODUCTS | operations.SENDS | operations.OPAQUE
    assert not operations.CHEAP & dear
    assert not operations.OPAQUE & operations.HOLDERS.keys()


def test_a_custom_derivative_is_not_entered_as_it_would_lose_its_rule():
    assert not is_entered(equation(jax.nn.relu, X[:1]))


def test_an_operation_names_a_parameter_that_holds_a_program():
    """A product in a program that is not found would run more than once unseen."""
    eqn = equation(jax.jit(jnp.sin), 1.0)
    program = eqn.params["jaxpr"]
    assert programs_in(eqn) == [program]
    renamed = eqn.replace(params={"program": program})
    with pytest.raises(NotImplementedError, match="holds the program of `jit` in none"):
        programs_in(renamed)


def test_an_operation_names_an_attribute_of_a_parameter_that_holds_a_program():
    solve = lambda _, b: b
    function = lambda x: lax.custom_linear_solve(lambda y: y, x, solve, symmetric=True)
    eqn = equation(function, 1.0)
    assert programs_in(eqn) == [eqn.params["jaxprs"].solve]
    for params in ({"solvers": eqn.params["jaxprs"]}, {"jaxprs": None}):
        with pytest.raises(NotImplementedError, match="`custom_linear_solve` in none"):
            programs_in(eqn.replace(params=params))


def test_all_programs_of_an_unknown_operation_count_and_none_of_an_opaque_one():
    eqn = equation(jax.jit(jnp.sin), 1.0)
    unknown = eqn.replace(primitive=Primitive("unheard of"))
    assert programs_in(unknown) == programs_in(eqn)
    assert programs_in(eqn.replace(primitive=Primitive("pallas_call"))) == []


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("ij,jk->ik", True),
        ("i,j->ij", False),
        ("i,i->", False),
        ("bi,bi->b", False),
        ("bi,ij->bj", True),
    ],
)
def test_a_product_sums_and_is_no_inner_product(formula, expected):
    operands = [
        jnp.ones((4,) * len(part)) for part in formula[: formula.index("-")].split(",")
    ]
    found = jax.make_jaxpr(lambda *xs: jnp.einsum(formula, *xs))(*operands)
    eqns = [
        e
        for e in found.eqns
        for e in (e.params["jaxpr"].eqns if "jaxpr" in e.params else [e])
    ]
    (dot,) = (eqn for eqn in eqns if eqn.primitive.name == "dot_general")
    assert is_product(dot) == expected


def test_the_multiplications_of_a_product():
    assert (
        count_multiplications(equation(lax.dot, jnp.ones((8, 4)), jnp.ones((4, 2))))
        == 64
    )
