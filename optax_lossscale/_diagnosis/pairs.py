"""Pairs of a value and its reference in wider floats, and equations applied to pairs.

For `y = x.astype(float16) * 3`, with `x` in float32, the pairs are

              actual                 reference
    x         0.1                    0.1
    the cast  0.09998 in float16     0.1 in float32
    y         0.2998 in float16      0.3 in float32

and the difference in the last row is the error of `y`. `compute` applies the equations
of a piece to pairs, inside `jit`. A piece is a sequence of consecutive equations.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import AxisType, reshard

from optax_lossscale._diagnosis.figures import Figures, figures_of, figures_of_choices
from optax_lossscale._diagnosis.old_operations import Trait, traits
from optax_lossscale._diagnosis.old_walk import programs_in
from optax_lossscale._diagnosis.program import Piece
from optax_lossscale._diagnosis.wide import in_wide, wide_dtype, widened
from optax_lossscale._programs.values import (
    FLOAT32,
    FLOAT64,
    Array,
    is_inexact,
)

# Options with which XLA compiles faster on CPUs, because it optimizes less: a
# convolutional network of six layers took half the processor time (jax 0.10). Most
# pieces run so few times that compiling them without these options would take longer
# than running them.
_FAST_TO_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# For a piece that compares. At level 0, some kernels fuse a product and a sum into one
# rounding, and others do not. Where XLA computes a value in both, as in the maximum of
# a normalized array and in its derivative, the maximum would be equal to no element.
_SAME_BITS = _FAST_TO_COMPILE | {"xla_backend_optimization_level": 1}


class Widths(NamedTuple):
    """The dtypes to which the two arrays of a pair are widened, if they hold floats.

    Floats that are wider already stay as they are.

    Attributes:
      actual: the dtype of the first array, or None to run the program in its own
        dtypes.
      reference: the dtype of the second array.
    """

    actual: np.dtype | None
    reference: np.dtype


AS_WRITTEN = Widths(None, FLOAT32)
"""The program as it is, beside float32.

The reference follows the choices of the program.
"""

IN_FLOAT32 = Widths(FLOAT32, FLOAT64)
"""The program in float32, beside float64.

The program then makes the choices of float32, and the reference follows these. A run
with these widths needs `jax.enable_x64`.
"""


class Pair(NamedTuple):
    """A value as it is computed, and the same value in wider floats.

    Attributes:
      actual: the value as the program computes it, an array of any shape and dtype.
      reference: an array of the same shape and, if the value is a float, in floats that
        are at least as wide.
    """

    actual: Array
    reference: Array

    @property
    def as_operand(self) -> "Pair":
        """The pair as later equations read it, in which a choice is its own reference.

        The reference thus follows the choices of the program, such as indices.
        """
        return self if is_inexact(self.actual) else Pair(self.actual, self.actual)

    @property
    def figures(self) -> Figures:
        """The error and magnitude of floats, or the share of choices that differ.

        Each access copies both arrays to the host and compares them anew.
        """
        if not is_inexact(self.actual):
            return figures_of_choices(self.actual, self.reference)
        dtype = wide_dtype(self.actual.dtype, FLOAT32)
        actual = np.asarray(self.actual, dtype)
        # A float64 element above float32's range becomes infinite.
        with np.errstate(over="ignore"):
            reference = np.asarray(self.reference, dtype)
        return figures_of(actual, reference)


def pair_of(x: Array, widths: Widths) -> Pair:
    """Pairs an argument or a constant with itself; widens both to `widths`."""
    if not is_inexact(x):
        return Pair(x, x)
    actual = np.asarray(x, wide_dtype(x.dtype, widths.actual))
    reference = np.asarray(x, wide_dtype(x.dtype, widths.reference))
    return Pair(actual, reference)


def compute(piece: Piece, widths: Widths, inputs: Sequence[Pair]) -> list[list[Pair]]:
    """Applies the instructions of a piece to pairs.

    Args:
      piece: the piece.
      widths: the dtypes of each pair.
      inputs: the pair of each variable that the piece reads.

    Returns:
      The results of each instruction. If a result is a choice, its reference is the
      choice that the wider floats lead to, not the one that they follow later.
    """
    env = {}
    for v, pair in zip(piece.reads, inputs, strict=True):
        env[v] = _resharded(v, pair)
    results = []
    for instruction in piece.instructions:
        eqn = instruction.eqn
        operands = [env[v].as_operand for v in instruction.operands]
        # The mesh of an equation may differ from the current one, as in `auto_axes`.
        with eqn.ctx.manager:
            pairs = _apply(eqn, operands, widths)
        env.update(zip(eqn.outvars, pairs, strict=True))
        results.append(pairs)
    return results


def _resharded(v: Var, pair: Pair) -> Pair:
    """Gives the arrays of a pair the sharding that the variable had when traced.

    Arrays lose this sharding where they pass through the host. If an axis of the mesh
    is explicit, JAX refuses operands with another sharding.
    """
    sharding = getattr(v.aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return pair

    def resharded(x):
        current_mesh = jax.typeof(x).sharding.mesh
        axis_types = (*sharding.mesh.axis_types, *current_mesh.axis_types)
        if AxisType.Explicit not in axis_types:
            return x
        with jax.sharding.use_abstract_mesh(sharding.mesh):
            return reshard(x, sharding)

    return jax.tree.map(resharded, pair)


def _apply(eqn: JaxprEqn, operands: Sequence[Pair], widths: Widths) -> list[Pair]:
    """Applies an equation to the actual operands and to their references."""
    actual_operands = [pair.actual for pair in operands]
    actual = in_wide(eqn, actual_operands, widths.actual)
    if not any(map(is_inexact, [*eqn.invars, *eqn.outvars])):
        return list(map(Pair, actual, actual))
    if Trait.EFFECTFUL in traits(eqn):  # must not run a second time
        return [Pair(x, widened(x, widths.reference)) for x in actual]
    reference_operands = [pair.reference for pair in operands]
    reference = in_wide(eqn, reference_operands, widths.reference)
    pairs = list(map(Pair, actual, reference))
    return _with_same_pivots(eqn, reference_operands, pairs)


def _with_same_pivots(
    eqn: JaxprEqn, references: Sequence[Array], pairs: list[Pair]
) -> list[Pair]:
    """Makes the reference follow the pivots that an LU or QR decomposition chooses.

    Two decompositions can be compared only if their pivots are the same. The rows or
    columns of the matrix's reference are therefore put in the order of the actual
    pivots, and the reference is factored in that order.
    """
    if eqn.primitive is lax.linalg.lu_p:
        factors, pivots, order = pairs
        rows = order.actual[..., None]
        ordered = jnp.take_along_axis(references[0], rows, axis=-2)
        return [Pair(factors.actual, _lu_in_order(ordered)), pivots, order]
    if eqn.primitive is lax.linalg.qr_p and eqn.params["pivoting"]:
        q, r, order = pairs
        columns = order.actual[..., None, :]
        ordered = jnp.take_along_axis(references[0], columns, axis=-1)
        full_matrices = eqn.params["full_matrices"]
        q_in_order, r_in_order = lax.linalg.qr(ordered, full_matrices=full_matrices)
        return [Pair(q.actual, q_in_order), Pair(r.actual, r_in_order), order]
    return pairs


def _lu_in_order(matrix: Array) -> Array:
    """Returns L and U of a matrix, or of each in a batch, without exchanging rows.

    As for `lu`, both are in one array, without the ones on the diagonal of L.
    """
    if not matrix.size:  # a loop over no columns could not be traced
        return matrix
    height, width = matrix.shape[-2:]
    rows = jnp.arange(height)[:, None]
    columns = jnp.arange(width)

    def eliminated(k, matrix):
        row = lax.dynamic_index_in_dim(matrix, k, axis=-2)
        column = lax.dynamic_index_in_dim(matrix, k, axis=-1)
        pivot = lax.dynamic_index_in_dim(row, k, axis=-1)
        is_below = rows > k
        # A pivot is 0 if all of its column is, and 0 / 0 would be NaN.
        ratios = jnp.where(is_below & (column != 0), column / pivot, 0)
        difference = matrix - ratios * jnp.where(columns > k, row, 0)
        return jnp.where(is_below & (columns == k), ratios, difference)

    return lax.fori_loop(0, min(height, width), eliminated, matrix)


def compiler_options(piece: Piece) -> dict[str, bool | int]:
    """Returns options for a piece: keep every rounding and, on CPUs, compile faster."""
    # By default, XLA may remove a cast to 16 bits and back, and with it the rounding
    # that is to be measured.
    options: dict[str, bool | int] = {"xla_allow_excess_precision": False}
    if not _can_compile_faster():
        return options
    if any(_compares(instruction.eqn) for instruction in piece.instructions):
        return options | _SAME_BITS
    return options | _FAST_TO_COMPILE


def _compares(eqn: JaxprEqn) -> bool:
    """Whether an equation compares elements, as a program in it may do as well."""
    return Trait.COMPARES in traits(eqn) or bool(programs_in(eqn))


@functools.cache
def _can_compile_faster() -> bool:
    """Whether programs run on a CPU whose compiler knows these options.

    XLA does not list its options, and a release may drop one, so this tries whether it
    compiles with these.
    """
    if jax.default_backend() != "cpu":
        return False
    try:
        jax.jit(lambda: 0.0, compiler_options=_FAST_TO_COMPILE).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
