"""Equations in wider floats: with all digits of these, or as they were traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import optax_lossscale as ols
from optax_lossscale._diagnosis.equations import equations
from optax_lossscale._diagnosis.notes import Origin
from optax_lossscale._diagnosis.pairs import AS_WRITTEN, compute, pair_of
from optax_lossscale._diagnosis.program import program_of
from optax_lossscale._programs.products import is_product

F16, F32 = jnp.float16, jnp.float32
HIGHEST = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
ONES = np.ones((8, 8), F16)


def convolved(x, y):
    return lax.conv(x[None, None], y[None, None], (1, 1), "SAME")[0, 0]


def by_an_algorithm(x, y):
    return jnp.matmul(x, y, precision="F16_F16_F32")


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize(
    "product",
    [
        jnp.matmul,
        convolved,
        by_an_algorithm,
        jax.jit(jnp.matmul),
        jax.checkpoint(jnp.matmul),
    ],
)
def test_products_have_all_digits_of_float32_beside_the_programs(product, dtype):
    """On some GPUs, a product of float32 has as few digits as float16 by default."""
    operands = ONES.astype(dtype), ONES.astype(dtype)
    traced = jax.make_jaxpr(product)(*operands)
    (piece,) = [
        piece
        for piece in program_of(traced, Origin()).pieces
        if is_product(piece.instructions[-1].eqn)
    ]
    ins = [pair_of(np.ones(v.aval.shape, dtype), AS_WRITTEN) for v in piece.reads]
    both = jax.make_jaxpr(lambda ins: compute(piece, AS_WRITTEN, ins))(ins)
    (as_traced,) = filter(is_product, equations(traced.jaxpr))
    precisions = [
        product.params["precision"]
        for product in filter(is_product, equations(both.jaxpr))
    ]
    assert precisions == [as_traced.params["precision"], HIGHEST]


def test_an_operation_that_no_one_knows_is_run_as_it_was_traced():
    def shape_of(x):
        if x.dtype != F16:
            raise TypeError("float16 alone")
        return x

    half = Primitive("half")
    half.def_abstract_eval(shape_of)
    lowering = mlir.lower_fun(lambda x: x / 2, multiple_results=False)
    mlir.register_lowering(half, lowering)

    def loss_fn(w):
        return jnp.sum(w.astype(F32)) + jnp.sum(half.bind(lax.stop_gradient(w)))

    found = ols.diagnose(loss_fn, jnp.ones(8, F16))
    assert found.loss_in_float32 == 12
    ((operation, line),) = found.not_compared
    assert operation == "half"
    assert line.startswith("tests/diagnosis/test_wide.py:")


@pytest.mark.parametrize("length", [0, 2])
def test_a_scan_is_compared_however_many_rounds_it_runs(length):
    def loss_fn(w):
        c, ys = lax.scan(
            lambda c, x: (c * x, x), w * F16(3), jnp.ones((length, 8), F16)
        )
        return jnp.sum(c.astype(F32)) + jnp.sum(ys.astype(F32))

    found = ols.diagnose(loss_fn, jnp.full(8, 0.1, F16))
    assert found.not_compared == ()
    assert found.loss_in_float32 == pytest.approx(
        8 * (3 * float(F16(0.1)) + length), rel=1e-6
    )
