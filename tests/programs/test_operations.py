"""The table of operations: what it knows, and that nothing else names them."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

import optax_lossscale
from optax_lossscale._programs.enter import ENTERED, is_entered
from optax_lossscale._programs.operations import (
    _ROWS,
    TABLE,
    UNKNOWN,
    Row,
    Trait,
    row_of,
    traits,
)
from optax_lossscale._programs.walk import programs_in
from optax_lossscale._programs.work import count_terms, is_cheap

PACKAGE = pathlib.Path(optax_lossscale.__file__).parent
X = jnp.ones((4, 4))
FUNCTIONS = [
    jax.nn.softmax,
    jax.nn.gelu,
    jax.nn.logsumexp,
    jax.nn.standardize,
    lambda x: jax.scipy.special.betainc(x, x, x / 2),
    jnp.linalg.svd,
    jnp.linalg.inv,
    jnp.fft.rfft,
    jnp.sort,
    jnp.cumsum,
    jnp.cumprod,
    jnp.nanmedian,
    lambda x: jax.random.normal(jax.random.key(0), x.shape) * x,
    lambda x: x.at[0].add(x[1]).at[1].set(2),
    lambda x: jnp.einsum("ij,kj->ik", x, x) % 3,
    jax.grad(lambda x: jnp.sum(jnp.linalg.qr(x)[0] ** 2)),
]


def names(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from names(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_models_are_made_of_is_known(function):
    assert set(names(jax.make_jaxpr(function)(X).jaxpr)) <= TABLE.keys()


def test_what_is_entered_is_so_in_one_way_and_holds_programs():
    entered = [row for row in TABLE.values() if row.traits & ENTERED]
    assert len(entered) >= 8
    assert all(row.programs and len(row.traits & ENTERED) == 1 for row in entered)


def test_a_custom_derivative_is_not_entered_as_it_would_lose_its_rule():
    (eqn,) = jax.make_jaxpr(jax.nn.relu)(X[:1]).jaxpr.eqns
    assert Trait.JVP in traits(eqn)
    assert not is_entered(eqn)


def test_a_row_names_a_parameter_that_holds_a_program():
    """A product in a program that is not found would run more than once unseen."""
    (eqn,) = jax.make_jaxpr(jax.jit(jnp.sin))(1.0).jaxpr.eqns
    program = eqn.params["jaxpr"]
    assert programs_in(eqn) == [program]
    renamed = eqn.replace(params={"program": program})
    with pytest.raises(NotImplementedError, match="holds the program of `jit` in none"):
        is_cheap(renamed)


def test_a_row_names_an_attribute_of_a_parameter_that_holds_a_program():
    solve = lambda _, b: b
    function = lambda x: lax.custom_linear_solve(lambda y: y, x, solve, symmetric=True)
    (eqn,) = jax.make_jaxpr(function)(1.0).jaxpr.eqns
    assert programs_in(eqn) == [eqn.params["jaxprs"].solve]
    for params in ({"solvers": eqn.params["jaxprs"]}, {"jaxprs": None}):
        with pytest.raises(NotImplementedError, match="`custom_linear_solve` in none"):
            programs_in(eqn.replace(params=params))


def test_a_row_has_the_traits_that_follow_from_others():
    for row in TABLE.values():
        assert Trait.SELECTS not in row.traits or Trait.MOVES in row.traits
        assert Trait.PLACES not in row.traits or Trait.CHOOSES in row.traits


@pytest.mark.parametrize("flag", list(ENTERED), ids=lambda flag: flag.name)
def test_each_way_to_be_entered_is_that_of_an_operation_which_runs_so(flag):
    assert any(flag in row.traits for row in TABLE.values())


def test_of_an_unknown_operation_nothing_is_assumed():
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    unknown = eqn.replace(primitive=Primitive("unheard of"))
    assert row_of(unknown) == UNKNOWN
    # All of its parameters may hold programs that it runs.
    assert Row(programs=None) == UNKNOWN


def test_each_operation_has_one_row():
    names = " ".join(_ROWS).split()
    assert sorted(names) == sorted(TABLE)
    assert len(set(_ROWS.values())) == len(_ROWS)


PAIRS = [
    ("scatter-add", "scatter-sub"),
    ("scatter", "neg"),
    ("reduce_max", "reduce_min"),
    ("scatter-min", "scatter-max"),
    ("exp2", "expm1"),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_what_does_the_same_is_treated_alike(one, other):
    assert TABLE[one] == TABLE[other]


def test_all_that_adds_many_says_how_many():
    """Over devices, which no shape tells, they are not counted."""
    add, halves = lambda x, y: 2 * x + y, ((1, 2), (1, 1), "VALID")
    index = jnp.zeros((4, 1), jnp.int32)
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    functions = {
        "cumsum": (lax.cumsum, 4),
        "reduce": (lambda x: lax.reduce(x, 0.0, add, (1,)), 4),
        "reduce_sum": (lambda x: x.sum(0), 4),
        "reduce_window": (lambda x: lax.reduce_window(x, 0.0, add, *halves), 2),
        "reduce_window_sum": (lambda x: lax.reduce_window(x, 0.0, lax.add, *halves), 2),
        "scatter-add": (lambda x: lax.scatter_add(x[0], index, x[1], numbers), 4),
        "scatter-sub": (lambda x: lax.scatter_sub(x[0], index, x[1], numbers), 4),
        "select_and_scatter_add": (
            jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *halves).sum()),
            2,
        ),
    }
    adds_many = {name for name, row in TABLE.items() if Trait.ADDS_MANY in row.traits}
    assert functions.keys() == {
        name for name in adds_many if Trait.SENDS not in TABLE[name].traits
    }
    for name, (function, terms) in functions.items():
        eqns = jax.make_jaxpr(function)(X).jaxpr.eqns
        (found,) = (count_terms(eqn) for eqn in eqns if eqn.primitive.name == name)
        assert found == terms, name


READERS = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "_programs" in path.read_text() and path.name != "operations.py"
]


def operations_named(tree):
    """The strings in a file that name an operation, by which one is told from others.

    They are compared, or lie in a list, a set, or among the keys of a dictionary. Many of JAX's
    names are also words, such as "name" or "max", which may stand anywhere else, also where it is
    asked whether an equation has a parameter of this name.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            is_key = isinstance(node.ops[0], (ast.In, ast.NotIn))
            elements = node.comparators if is_key else [node.left, *node.comparators]
        elif isinstance(node, (ast.Set, ast.Tuple, ast.List)):
            elements = node.elts
        elif isinstance(node, ast.Dict):
            elements = node.keys
        elif isinstance(node, ast.MatchValue):
            elements = [node.value]
        else:
            continue
        yield from (
            e.value
            for e in elements
            if isinstance(e, ast.Constant) and e.value in TABLE
        )


@pytest.mark.parametrize("path", READERS, ids=lambda p: p.name)
def test_no_other_file_names_an_operation(path):
    assert list(operations_named(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("path", READERS, ids=lambda p: p.name)
def test_the_name_of_an_operation_is_asked_in_one_way(path):
    asks = "primitive.name" in path.read_text()
    assert asks == (path.name == "versions.py")
