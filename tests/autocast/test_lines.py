"""What `autocast` runs is at the user's line, as it is without `autocast`."""

import re

import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols

W, X = jnp.eye(4) + 0.1, jnp.ones((4, 4))


def derivative_of_all(fun):
    """The gradient of the sum of what a function gives."""
    return jax.grad(lambda w: jnp.sum(fun(w)))


# Functions that JAX jits itself, so that what it compiles and caches has lines of its
# own alone.
JITTED = {
    "convolve": lambda w, x: jnp.convolve(x[0], w[0]),
    "einsum": lambda w, x: jnp.einsum("ij,jk->ik", w, x),
    "cov": lambda w, x: jnp.cov(x @ w),
    "solve": lambda w, x: jnp.linalg.solve(w, x) @ w,
    "cholesky": lambda w, x: jnp.linalg.cholesky(w @ w.T),
    "matrix_power": lambda w, x: jnp.linalg.matrix_power(w, 3),
    "svd": lambda w, x: jnp.linalg.svd(w @ x, full_matrices=False)[0],
    "derivative of svd": lambda w, x: derivative_of_all(
        lambda w: jnp.linalg.svd(w, full_matrices=False)[1]
    )(w),
}


def lines_of_products(fun):
    """The lines at which a function multiplies, as the report of dtypes has them."""
    return {product.source for product in ols.dtype_report(fun, W, X).products}


@pytest.mark.filterwarnings("ignore:autocast leaves every")
@pytest.mark.parametrize("name", JITTED)
def test_what_jax_jits_itself_is_at_the_line_that_calls_it(name):
    fun = JITTED[name]
    assert lines_of_products(ols.autocast(fun)) == lines_of_products(fun)
    lines = lines_of_products(jax.grad(lambda w, x: jnp.sum(ols.autocast(fun)(w, x))))
    assert lines
    # The derivative of a linear solve is made of what it holds, which has no line.
    assert "an unknown line" not in lines or name == "solve"


def test_what_lies_between_products_is_in_its_scope_once():
    def fun(w, x):
        with jax.named_scope("mine"):
            return jnp.sum(jnp.exp(x @ w) @ w)

    compiled = jax.jit(ols.autocast(fun)).lower(W, X).compile()
    names = set(re.findall(r'op_name="([^"]*mine[^"]*)"', compiled.as_text()))
    assert any(name.endswith("exp") for name in names)
    assert all(name.count("mine") == 1 for name in names)
