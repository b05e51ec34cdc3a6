"""The table of operations that `diagnose` reads."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

import optax_lossscale
from optax_lossscale._diagnosis.old_operations import (
    _ROWS,
    TABLE,
    UNKNOWN,
    Row,
    Trait,
    row_of,
)
from optax_lossscale._diagnosis.old_work import count_terms

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


def test_a_row_has_the_traits_that_follow_from_others():
    for row in TABLE.values():
        assert Trait.SELECTS not in row.traits or Trait.MOVES in row.traits
        assert Trait.PLACES not in row.traits or Trait.CHOOSES in row.traits


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
