"""The table of JAX's operations: a row for each, with what is known of it.

`row_of(eqn)` is the row of an equation's operation, and `traits(eqn)` the first cell of
that row. For `exp` the traits are `EXPONENTIAL` and `CHEAP`. As it has none of `MOVES`,
`SENDS` and `PRODUCT`, `autocast` runs it as it was traced, in float32; as it is
`CHEAP`, the backward pass may recompute it. `EXPONENTIAL` is for `dtype_report`, which
lists it where its operand has 16 bits. An operation without a row has the row
`UNKNOWN`.
"""

from collections.abc import Sequence
from enum import Flag, auto
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from optax_lossscale._programs.versions import name_of


class Trait(Flag):
    """The traits of operations, of which one operation may have several.

    An operation that only returns numbers of its operands gives the same numbers in any
    dtype. What decides about its dtype is its derivative: if that is a sum, the
    operation has to run in the dtype in which it was traced. Otherwise it may run in
    the dtype in which its operands are stored, perhaps one of 16 bits, and does so if
    it has a trait of `RUNS_AS_STORED`. An example of each:

    ========  ==================  ================================  =========
    trait     example             its derivative                    it runs
    ========  ==================  ================================  =========
    MOVES     `reshape`           moves numbers back                as stored
    SELECTS   `slice`             puts zeros around numbers         as stored
    SENDS     `ppermute`          sends numbers back                as stored
    PLACES    `broadcast_in_dim`  sums what was repeated            as traced
    GATHERS   `gather`            sums what was read twice          as traced
    CHOOSES   `clamp`             sums, where one bound serves all  as traced
    ========  ==================  ================================  =========

    An operation that is `SPREADS` gives 16 bits if its result is stored so, while its
    derivative, a sum over devices, runs in float32. Apart from products and from sums
    stored in 16 bits, every other operation runs as traced.
    """

    # --- how numbers are moved and chosen ---

    # Only moves or reshapes numbers.
    MOVES = auto()
    # Its results are parts of an operand, and so may lack its largest numbers.
    SELECTS = auto()
    # Moves or repeats numbers, perhaps to between others, or casts them: all of its
    # results are numbers of its operands. Each such operation also `CHOOSES`.
    PLACES = auto()
    # Communicates between devices, for which the number of bytes counts.
    SENDS = auto()
    # Gives an array to many devices, or lets it differ between them. Its derivative is
    # a sum over these devices.
    SPREADS = auto()
    # Exists only where JAX tracks along which mesh axes each array differs. One that is
    # `ADDS_MANY` sums over these axes, and any other returns its operand.
    VARIES = auto()
    # Its results are numbers of its operands, perhaps negated or cast, so it needs no
    # more range than these. For some of these operations the derivative is a sum.
    CHOOSES = auto()
    # Puts numbers of one operand between those of another, as a mask does.
    FILLS = auto()
    # Looks up parts of its first operand by index, as an embedding does.
    GATHERS = auto()
    # Gives its operand a name, by which a policy of `jax.checkpoint` may keep it.
    NAMES = auto()
    # Converts its operand to the dtype of its result.
    CASTS = auto()
    # --- what is computed, and in which range ---

    # Adds or subtracts two operands, number by number.
    ADDS_TWO = auto()
    # Sums many terms: in 16 bits the last ones are lost once the sum is large. A sum
    # over devices also `SENDS`: it has one term for each device, which are few, and so
    # runs in the dtype in which its operands are stored.
    ADDS_MANY = auto()
    # Makes one number of those along its `axes`.
    REDUCES = auto()
    # Multiplies two operands, number by number.
    MULTIPLIES = auto()
    # Divides two operands, number by number.
    DIVIDES = auto()
    # Its results have about the range of its operands.
    NEAR = auto()
    # Approaches a limit for large numbers, at least for those of one sign.
    SATURATES = auto()
    # Its results leave the range of its operands: exponentials, logarithms, powers.
    EXPONENTIAL = auto()
    # A matrix product or a convolution, also one that sums nothing: see `is_product`.
    PRODUCT = auto()
    # A matrix product that may be an inner or an outer product: `dot_general`.
    OUTER = auto()
    # Reads or makes a number's bits, so that it gives others in another dtype.
    OF_BITS = auto()
    # --- code, programs and cost ---

    # Runs code that no jaxpr shows, or does work that shapes do not determine.
    OPAQUE = auto()
    # Does more than compute its results, so that it must not run twice.
    EFFECTFUL = auto()
    # Runs the one program that it holds, once, from its operands to its results.
    CALLS = auto()
    # Only calls the program that it holds.
    INLINED = auto()
    # Says itself which residuals of its program are kept, as `jax.checkpoint` does.
    CHECKPOINTS = auto()
    # Runs its program once for each row of its operands, and carries a state along.
    SCANS = auto()
    # Runs its body, a program, as long as its condition, another program, holds.
    WHILE = auto()
    # Runs one of its programs, which an index chooses.
    BRANCHES = auto()
    # Runs its program on each device of a mesh.
    MAPS = auto()
    # Holds a program whose derivative is a rule of the user's own.
    JVP = auto()
    # Holds a program whose pullback is a rule of the user's own. It runs once, where it
    # is, and is never `CHEAP`: a rule that is not linear, as one that clips, has to see
    # the whole cotangent.
    VJP = auto()
    # Takes at most one pass over its operands, and none if a compiler fuses it with
    # the operations that read its results, as it mostly does. So a backward pass may
    # recompute the results instead of keeping them.
    CHEAP = auto()


RUNS_AS_STORED = Trait.MOVES | Trait.SENDS
"""The traits of operations that run in the dtypes in which their operands are stored."""


class Row(NamedTuple):
    """What is known of an operation."""

    traits: Trait = Trait(0)
    # For one that sums: where `terms_of` in `_programs.work` reads how many terms. Each
    # is the name of a parameter, but for "contracted", "kernel", "last" and "updates".
    terms: str | None = None
    # What it is in the formula of a norm, as `_autocast.normalized` reads it
    formula: str | None = None
    # The parameters with the programs that it runs, in the order of running; None means
    # every parameter that holds one
    programs: Sequence[str] | None = ()


def _row(words: str = "", programs: str = "", **cells: str) -> Row:
    """A row with the traits of these names, and with programs in these parameters."""
    traits = Trait(0)
    for word in words.split():
        traits |= Trait[word]
    return Row(traits, programs=tuple(programs.split()), **cells)


UNKNOWN = Row(programs=None)
"""The row of an operation that is not in the table, of which nothing is assumed.

`autocast` runs it in the dtypes in which it was traced, never narrows the products in
its programs, and never puts it in an island. The reports take it to run every program
among its parameters, and `dtype_report` lists it among what it cannot look into.
"""

# By the names of primitives, as jaxprs show them: `ragged_dot` is `ragged_dot_general`
# here. Operations of which the same is known share a row, and none has two.
_ROWS = {
    # Moves numbers
    "copy reshape rev squeeze stop_gradient transpose": _row("MOVES CHEAP"),
    "dynamic_slice slice split unstack": _row("MOVES CHEAP SELECTS"),
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
    "broadcast_in_dim concatenate stack tile": _row("PLACES CHOOSES CHEAP"),
    "convert_element_type": _row("PLACES CHOOSES CASTS CHEAP"),
    "cummax cummin sort top_k": _row("CHOOSES"),
    "gather": _row("PLACES CHOOSES GATHERS CHEAP"),
    "max": _row("CHOOSES CHEAP", formula="at least"),
    "pad": _row("PLACES CHOOSES CHEAP FILLS"),
    "pvary": _row("SPREADS CHOOSES CHEAP VARIES"),
    "reduce_max reduce_min": _row("CHOOSES CHEAP REDUCES"),
    "select_n": _row("CHOOSES CHEAP FILLS", formula="choice"),
    # Sums
    "add": _row("ADDS_TWO CHEAP", formula="at least"),
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
    # An outer or an inner product takes one pass over its operands. Any other
    # `dot_general` is found by `is_product`, and `is_cheap` leaves it out.
    "dot_general": _row("PRODUCT OUTER CHEAP", terms="contracted"),
    "ragged_dot_general scaled_dot": _row("PRODUCT", terms="contracted"),
    "scaled_matmul_wrapper": _row("PRODUCT", terms="last"),
    # Bits
    "bitcast_convert_type nextafter random_gamma rng_uniform": _row("OF_BITS"),
    # What no jaxpr shows
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
    # Cheap, of any range
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
"""The row of each operation, by the operation's name in JAX."""


def row_of(eqn: JaxprEqn) -> Row:
    """The row of an equation's operation; `UNKNOWN` if the table has none."""
    return TABLE.get(name_of(eqn), UNKNOWN)


def traits(eqn: JaxprEqn) -> Trait:
    """The traits of an equation's operation."""
    return row_of(eqn).traits


def traits_of(name: str) -> Trait:
    """The traits of the operation of this name; `Trait(0)` if it is not in the table."""
    return TABLE.get(name, UNKNOWN).traits
