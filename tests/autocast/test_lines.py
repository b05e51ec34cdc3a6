"""What `autocast` runs is at the user's line, as it is without `autocast`."""

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
    "correlate": lambda w, x: jnp.correlate(x[0], w[0]),
    "cov": lambda w, x: jnp.cov(x @ w),
    "corrcoef": lambda w, x: jnp.corrcoef(x @ w),
    "kron": lambda w, x: jnp.kron(w, x) @ jnp.ones((16, 2)),
    "einsum": lambda w, x: jnp.einsum("ij,jk->ik", w, x),
    "tensordot": lambda w, x: jnp.tensordot(w, x, 1),
    "vdot": lambda w, x: jnp.vdot(w @ x, x),
    "polyval": lambda w, x: jnp.polyval(w[0], x @ w),
    "inv": lambda w, x: jnp.linalg.inv(w) @ x,
    "pinv": lambda w, x: jnp.linalg.pinv(w),
    "solve": lambda w, x: jnp.linalg.solve(w, x) @ w,
    "lstsq": lambda w, x: jnp.linalg.lstsq(w, x)[0],
    "cholesky": lambda w, x: jnp.linalg.cholesky(w @ w.T),
    "matrix_power": lambda w, x: jnp.linalg.matrix_power(w, 3),
    "multi_dot": lambda w, x: jnp.linalg.multi_dot([w, x, w]),
    "svd": lambda w, x: jnp.linalg.svd(w @ x, full_matrices=False)[0],
    "norm": lambda w, x: jnp.linalg.norm(w @ x, 2),
    "expm": lambda w, x: jax.scipy.linalg.expm(w),
    "cho_solve": lambda w, x: jax.scipy.linalg.cho_solve((w, True), x) @ w,
    "toeplitz": lambda w, x: jax.scipy.linalg.toeplitz(w[0]) @ x,
    "convolve in two dimensions": lambda w, x: jax.scipy.signal.convolve(x, w),
    "logpdf": lambda w, x: jax.scipy.stats.multivariate_normal.logpdf(x, x[0], w @ w.T),
    "derivative of svd": lambda w, x: derivative_of_all(
        lambda w: jnp.linalg.svd(w, full_matrices=False)[1]
    )(w),
    "derivative of qr": lambda w, x: derivative_of_all(lambda w: jnp.linalg.qr(w)[1])(
        w
    ),
    "derivative of det": lambda w, x: jax.grad(jnp.linalg.det)(w),
    "derivative of eigh": lambda w, x: derivative_of_all(
        lambda w: jnp.linalg.eigh(w)[1]
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
    gradient = jax.grad(lambda w, x: jnp.sum(ols.autocast(fun)(w, x)))
    lines = lines_of_products(gradient)
    assert lines
    # The derivative of a linear solve is made of what it holds, which has no line.
    assert "an unknown line" not in lines or name in ("inv", "solve")
