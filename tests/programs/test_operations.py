"""The table of operations: what it knows, and that nothing else names them."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import optax_lossscale
from optax_lossscale._programs.operations import PROGRAMS, TABLE, Is, is_exact
from optax_lossscale._programs.run import is_entered
from optax_lossscale._programs.work import terms_of

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


def test_what_moves_and_chooses_is_exact_and_what_adds_or_rounds_is_not():
    assert all(map(is_exact, ["transpose", "max", "all_gather", "pmax", "select_n"]))
    assert not any(map(is_exact, ["add", "psum", "convert_element_type", "exp", "not known"]))


def test_what_is_entered_holds_programs():
    called = [name for name in TABLE if is_entered(_Named(name))]
    assert PROGRAMS.keys() >= set(called)
    assert len(called) > 10


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
    adds_many = {name for name in TABLE if Is.ADDS_MANY in TABLE[name]}
    assert functions.keys() == {name for name in adds_many if Is.SENDS not in TABLE[name]}
    for name, (function, terms) in functions.items():
        eqns = jax.make_jaxpr(function)(X).jaxpr.eqns
        (found,) = (terms_of(eqn) for eqn in eqns if eqn.primitive.name == name)
        assert found == terms, name


def test_a_reduction_that_chooses_adds_nothing():
    largest = lambda x: lax.reduce(x, -jnp.inf, lambda x, y: jnp.where(x > y, x, y), (1,))
    (eqn,) = jax.make_jaxpr(largest)(X).jaxpr.eqns
    assert terms_of(eqn) == 1


class _Named:
    """An equation, as far as its name goes."""

    def __init__(self, name):
        self.primitive = self
        self.name = name


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_no_other_file_has_a_set_of_operations(path):
    """One of more than the six scatters, which `widened` calls by name."""
    if path.name in ("operations.py", "run.py"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Set, ast.Tuple, ast.List, ast.Dict)):
            elements = node.keys if isinstance(node, ast.Dict) else node.elts
            words = {e.value for e in elements if isinstance(e, ast.Constant)}
            assert len(words & TABLE.keys()) <= 6, (path, words)
