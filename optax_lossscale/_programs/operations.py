"""The table of JAX's operations: a row for each, with what is known of it.

To add an operation, begin with its row here. Other files look up the row of an
equation's operation, `row_of(eqn)`, or the traits in that row, `traits(eqn)`. For
example, `exp` has the traits `EXPONENTIAL` and `CHEAP`. It has none of `MOVES`, `SENDS`
and `PRODUCT`, so `autocast` runs it as it was traced, in float32. Because it is
`CHEAP`, the backward pass may recompute it. Because it is `EXPONENTIAL`, `dtype_report`
lists it where its operand has 16 bits. An operation that is not in the table has the
row `UNKNOWN`.
"""

from collections.abc import Sequence
from enum import Flag, auto
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from optax_lossscale._programs.versions import name_of


class Trait(Flag):
    """The traits of operations; an operation may have several.

    Some operations only return numbers that their operands hold, so their results are
    the same in any dtype that can hold these numbers. This need not be true of their
    derivatives: a derivative that is a sum would lose digits in 16 bits. If the
    derivative is a sum, the operation therefore runs in the dtype in which it was
    traced. If the operation has a trait of `RUNS_AS_STORED`, it runs in the dtype in
    which its operands are stored, even if that has 16 bits. An example of each trait:

    ========  ==================  ================================  =========
    trait     example             its derivative                    it runs
    ========  ==================  ================================  =========
    MOVES     `reshape`           moves numbers back                as stored
    SELECTS   `slice`             puts zeros around numbers         as stored
    SENDS     `ppermute`          sends numbers back                as stored
    PLACES    `broadcast_in_dim`  sums what was repeated            as traced
    GATHERS   `gather`            sums what was read twice          as traced
    CHOOSES   `clamp`             sums what one bound replaced      as traced
    ========  ==================  ================================  =========

    An operation that `SPREADS` runs in 16 bits if `autocast` stores its result in 16
    bits, but its derivative, a sum over devices, runs in float32. Every other operation
    runs as traced, except for products and for sums that are stored in 16 bits.

    Attributes:
      MOVES: only moves numbers, or leaves some out, as `reshape` and `slice` do.
      SELECTS: returns parts of an operand, which may lack the largest numbers of the
        whole. Each such operation also `MOVES`, which `_row` adds.
      PLACES: moves or repeats numbers, puts them between others, or casts them. All of
        its results are numbers of its operands, so it also `CHOOSES`, which `_row`
        adds.
      SENDS: communicates between devices, so the number of bytes matters.
      SPREADS: copies an array to many devices, or marks it as one that may differ
        between them. Its derivative is a sum over these devices.
      VARIES: occurs only where JAX tracks the mesh axes along which each array varies.
        If it also `ADDS_MANY`, it sums over such axes. Otherwise it returns its
        operand.
      CHOOSES: returns numbers of its operands, possibly negated or cast, so it needs no
        more range than they do. The derivative of some such operations is a sum.
      FILLS: puts numbers of one operand between the numbers of another, as a mask does.
      GATHERS: looks up parts of its first operand by index, as an embedding does.
      NAMES: names its operand, so that a policy of `jax.checkpoint` can choose to save
        it.
      CASTS: converts its operand to the dtype of its result.
      ADDS_TWO: adds or subtracts two operands, number by number.
      ADDS_MANY: sums many terms. In 16 bits, the last terms are lost once the sum is
        large. A sum over devices, which also `SENDS`, has only one term for each
        device, so it runs in the dtype in which its operands are stored.
      REDUCES: combines the numbers along its `axes` into one.
      MULTIPLIES: multiplies two operands, number by number.
      DIVIDES: divides two operands, number by number.
      NEAR: its results have about the range of its operands.
      SATURATES: approaches a limit for large numbers of at least one sign.
      EXPONENTIAL: changes the range of its operands: exponentials, logarithms, powers.
      PRODUCT: a matrix product or convolution, even if it sums nothing: see
        `is_product`.
      OUTER: a matrix product that may be an inner or an outer product: `dot_general`.
      OF_BITS: works on the bits of numbers, so another dtype would change its results.
      OPAQUE: runs code that no jaxpr shows, or does work that shapes do not determine.
      EFFECTFUL: does more than compute its results, so it must not run twice.
      CALLS: calls the one program that it holds: runs it once, and returns its results.
      INLINED: does nothing but call its program, so the program's equations may replace
        it.
      CHECKPOINTS: decides which residuals of its program are saved, as `jax.checkpoint`
        does.
      SCANS: runs its program once for each row of some operands, and carries a state
        along.
      WHILE: runs one program, its body, as long as another, its condition, returns
        True.
      BRANCHES: runs one of its programs, chosen by an index.
      MAPS: runs its program on each device of a mesh.
      JVP: holds a program with a user-defined derivative, as `jax.custom_jvp` does.
      VJP: holds a program with a user-defined pullback, as `jax.custom_vjp` does. It
        runs once, where it stands, and is never `CHEAP`, because a nonlinear rule, such
        as one that clips, must get the whole cotangent at once.
      CHEAP: takes at most one pass over its operands. Usually it takes none, because
        the compiler fuses it with the operations that read its results. So a backward
        pass may recompute the results instead of saving them.
    """

    # --- How numbers are moved and chosen ---

    MOVES = auto()
    SELECTS = auto()
    PLACES = auto()
    SENDS = auto()
    SPREADS = auto()
    VARIES = auto()
    CHOOSES = auto()
    FILLS = auto()
    GATHERS = auto()
    NAMES = auto()
    CASTS = auto()

    # --- What is computed, and in which range ---

    ADDS_TWO = auto()
    ADDS_MANY = auto()
    REDUCES = auto()
    MULTIPLIES = auto()
    DIVIDES = auto()
    NEAR = auto()
    SATURATES = auto()
    EXPONENTIAL = auto()
    PRODUCT = auto()
    OUTER = auto()
    OF_BITS = auto()

    # --- Code, programs and cost ---

    OPAQUE = auto()
    EFFECTFUL = auto()
    CALLS = auto()
    INLINED = auto()
    CHECKPOINTS = auto()
    SCANS = auto()
    WHILE = auto()
    BRANCHES = auto()
    MAPS = auto()
    JVP = auto()
    VJP = auto()
    CHEAP = auto()


RUNS_AS_STORED = Trait.MOVES | Trait.SENDS
"""Operations with one of these traits run in the dtype in which operands are stored."""


class Row(NamedTuple):
    """What the table says of an operation.

    Attributes:
      traits: its traits.
      terms: how `count_terms` in `_programs/work.py` counts the terms of a sum:
        "contracted", "kernel", "last", "updates", or the name of a parameter; None for
        one term.
      formula: the word for it in the formulas of means and norms, by which
        `_autocast/normalized.py` recognizes them; None if it is in none of them.
      programs: the names of the parameters that hold the programs it runs, in the order
        in which they run; None for every parameter that holds a program.
    """

    traits: Trait = Trait(0)
    terms: str | None = None
    formula: str | None = None
    programs: Sequence[str] | None = ()


def _row(trait_names: str = "", programs: str = "", **cells: str) -> Row:
    """Builds a row from the names of traits and of the parameters that hold programs.

    It adds the traits that follow from others.
    """
    traits = Trait(0)
    for name in trait_names.split():
        traits |= Trait[name]
    if Trait.SELECTS in traits:
        traits |= Trait.MOVES
    if Trait.PLACES in traits:
        traits |= Trait.CHOOSES
    return Row(traits, programs=tuple(programs.split()), **cells)


UNKNOWN = Row(programs=None)
"""The row of an operation that is not in the table: nothing is assumed about it.

`autocast` runs the operation in the dtypes in which it was traced, leaves the products
in its programs as they are, and keeps it out of islands (see `_autocast/__init__.py`).
The reports assume that the operation runs every program among its parameters, and
`dtype_report` lists it as one that it cannot look into.
"""

# The names are those of primitives, as jaxprs print them: `lax.ragged_dot` is called
# `ragged_dot_general`. Operations that are alike share a row. None has two rows.
_ROWS = {
    # Moves numbers
    "copy reshape rev squeeze stop_gradient transpose": _row("MOVES CHEAP"),
    "dynamic_slice slice split unstack": _row("SELECTS CHEAP"),
    "name": _row("MOVES NAMES"),
    "optimization_barrier": _row("MOVES"),
    "reshard sharding_constraint": _row("MOVES SENDS"),
    # Communicates between devices
    "all_gather all_gather_reduced": _row("SENDS SPREADS"),
    "all_gather_invariant all_to_all pmax pmin ppermute": _row("SENDS"),
    "psum reduce_scatter unreduced_psum unreduced_reduce_scatter": _row(
        "SENDS ADDS_MANY"
    ),
    "psum_invariant": _row("SENDS ADDS_MANY VARIES"),
    # Returns numbers of its operands
    (
        "abs clamp dynamic_update_slice min neg reduce_window_max reduce_window_min "
        "scatter scatter-max scatter-min"
    ): _row("CHOOSES CHEAP"),
    "broadcast_in_dim concatenate stack tile": _row("PLACES CHEAP"),
    "convert_element_type": _row("PLACES CASTS CHEAP"),
    "cummax cummin sort top_k": _row("CHOOSES"),
    "gather": _row("PLACES GATHERS CHEAP"),
    "max": _row("CHOOSES CHEAP", formula="plus or max"),
    "pad": _row("PLACES CHEAP FILLS"),
    "pvary": _row("SPREADS CHOOSES CHEAP VARIES"),
    "reduce_max reduce_min": _row("CHOOSES CHEAP REDUCES"),
    "select_n": _row("CHOOSES CHEAP FILLS", formula="choice"),
    # Sums
    "add": _row("ADDS_TWO CHEAP", formula="plus or max"),
    "add_any": _row("ADDS_TWO CHEAP"),
    "cumsum": _row("ADDS_MANY", terms="axis"),
    "reduce": _row("ADDS_MANY", terms="dimensions"),
    "reduce_sum": _row("ADDS_MANY CHEAP REDUCES", terms="axes", formula="sum"),
    "reduce_window reduce_window_sum select_and_scatter_add": _row(
        "ADDS_MANY", terms="window_dimensions"
    ),
    "scatter-add scatter-sub": _row("ADDS_MANY CHEAP", terms="updates"),
    "sub": _row("ADDS_TWO CHEAP", formula="minus"),
    # Has about the range of its operands
    "ceil floor round sign": _row("NEAR CHEAP"),
    "div": _row("DIVIDES NEAR CHEAP", formula="over"),
    "erf logistic tanh": _row("NEAR SATURATES CHEAP"),
    "mul": _row("MULTIPLIES NEAR CHEAP", formula="times"),
    # Has another range than its operands
    "cosh exp exp2 expm1 log log1p log2 pow scatter-mul sinh": _row(
        "EXPONENTIAL CHEAP"
    ),
    "cumlogsumexp cumprod lgamma": _row("EXPONENTIAL"),
    "erfc": _row("SATURATES CHEAP"),
    "integer_pow square": _row("EXPONENTIAL CHEAP", formula="squared"),
    "reduce_prod": _row("EXPONENTIAL CHEAP REDUCES"),
    # Products
    "conv_general_dilated": _row("PRODUCT", terms="kernel"),
    # Outer and inner products are cheap: they take one pass over their operands. For
    # any other `dot_general`, `is_product` is True, and `is_cheap` therefore False.
    "dot_general": _row("PRODUCT OUTER CHEAP", terms="contracted"),
    "ragged_dot_general scaled_dot": _row("PRODUCT", terms="contracted"),
    "scaled_matmul_wrapper": _row("PRODUCT", terms="last"),
    # Bits
    "bitcast_convert_type nextafter random_gamma rng_uniform": _row("OF_BITS"),
    # Runs code that no jaxpr shows
    (
        "bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general "
        "bcsr_dot_general call_exported call_tf coo_matmat coo_matvec coo_spmm "
        "coo_spmv core_map csr_matmat csr_matvec csr_spmm csr_spmv cudnn_fusion "
        "dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd_wrapper "
        "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd_wrapper "
        "ffi_call mosaic_gpu_call mpmd_map pallas_call pure_callback spsolve "
        "tpu_custom_call triton_kernel_call"
    ): _row("OPAQUE"),
    "io_callback": _row("OPAQUE EFFECTFUL"),
    # Runs code that returns nothing
    "debug_callback debug_print inspect_sharding": _row("EFFECTFUL"),
    # Holds programs
    "closed_call eval_jaxpr": _row("INLINED CALLS", programs="jaxpr call_jaxpr"),
    "composite xla_metadata_call": _row("CALLS", programs="jaxpr"),
    "cond": _row("BRANCHES", programs="branches"),
    "custom_jvp_call": _row("JVP CHEAP CALLS", programs="call_jaxpr"),
    "custom_linear_solve": _row(programs="jaxprs.solve"),
    "custom_partitioning": _row(programs="call"),
    "custom_vjp_call": _row("VJP CALLS", programs="call_jaxpr"),
    "custom_vmap_call": _row("CALLS", programs="call"),
    "CustomRoot": _row(programs="solve_jaxpr"),
    "jit": _row("INLINED CHEAP CALLS", programs="jaxpr"),
    "linear_call": _row(programs="callee"),
    "remat_opt": _row("INLINED CALLS", programs="fwd_jaxpr"),
    "remat2": _row("CHECKPOINTS CALLS", programs="jaxpr"),
    "run_state": _row(programs="jaxpr"),
    "scan": _row("SCANS", programs="jaxpr"),
    "shard_map": _row("MAPS", programs="jaxpr"),
    "while": _row("WHILE", programs="cond_jaxpr body_jaxpr"),
    # Cheap; nothing is assumed about the range of the results
    (
        "acos acosh and argmax argmin asin asinh atan atan2 atanh cbrt cos eq erf_inv "
        "ge gt iota is_finite le lt ne not one_minus_square or polynomial "
        "reduce_and reduce_or rem sin tan xor"
    ): _row("CHEAP"),
    "rsqrt": _row("CHEAP", formula="inverse root"),
    "sqrt": _row("CHEAP", formula="root"),
    # Treated like an unknown operation, but known to run no program
    (
        "accum_grad_in_ref addupdate after_all approx_top_k axis_index bcoo_extract "
        "bcoo_fromdense bcoo_sort_indices bcoo_sum_duplicates bcoo_todense "
        "bcoo_transpose bcsr_extract bcsr_fromdense bcsr_todense bessel_i0e "
        "bessel_i1e broadcast_to cholesky cholesky_update clz complex conj "
        "coo_fromdense coo_todense create_token csr_fromdense csr_todense device_put "
        "digamma dim_as_value dimension_size eig eigh empty empty2 empty_ref fft "
        "free_ref freeze from_edtype geqp3 geqrf get hessenberg householder_product "
        "igamma igamma_grad_a igammac imag iota_2x32_shape layout_constraint lu "
        "lu_pivots_to_permutation mulhi new_ref ormqr pbroadcast platform_index "
        "polygamma population_count qr ragged_all_to_all random_bits random_clone "
        "random_fold_in random_seed random_split random_unwrap random_wrap real "
        "reciprocal reduce_precision reduce_xor regularized_incomplete_beta "
        "rng_bit_generator schur select_and_gather_add select_and_scatter shift_left "
        "shift_right_arithmetic shift_right_logical svd swap symmetric_product "
        "threefry2x32 tie to_edtype triangular_solve tridiagonal tridiagonal_solve "
        "with_memory_space_constraint zeros_like zeta"
    ): _row(),
}

TABLE = {name: row for names, row in _ROWS.items() for name in names.split()}
"""The row of each operation by name, which is the name of its primitive in JAX."""


def row_of(eqn: JaxprEqn) -> Row:
    """Returns the row of an equation's operation; `UNKNOWN` if the table has none."""
    return TABLE.get(name_of(eqn), UNKNOWN)


def traits(eqn: JaxprEqn) -> Trait:
    """Returns the traits of an equation's operation."""
    return row_of(eqn).traits


def traits_of(name: str) -> Trait:
    """Returns the traits of the operation with this name; none if it has no row."""
    return TABLE.get(name, UNKNOWN).traits
