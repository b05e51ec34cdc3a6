"""What `diagnose` alone still asks, until it is rewritten: see `operations` below.

The table of JAX's operations: a row for each, with what is known of it.

To add an operation, begin with its row here. Other files look up the row of an
equation's operation, `row_of(eqn)`, or the traits in that row, `traits(eqn)`. For
example, `exp` has the traits `EXPONENTIAL` and `CHEAP`: `dtype_report` lists it where
its operand has 16 bits, and the backward pass may recompute it. Because it has none of
`MOVES`, `SENDS` and `PRODUCT`, `autocast` runs it as it was traced, in float32. An
operation that is not in the table has the row `UNKNOWN`.
"""

from enum import Flag, auto
from typing import Literal, NamedTuple

from jax.extend.core import JaxprEqn

from optax_lossscale._programs.versions import name_of


class Trait(Flag):
    """The traits of operations; an operation may have several.

    `autocast` runs an operation with a trait of `RUNS_AS_STORED` in the dtype in which
    its operands are stored, even in 16 bits, and any other operation in the dtype in
    which it was traced. An operation that only returns elements of its operands could
    run in any dtype that holds these elements, but the derivative of some such
    operations is a sum, which would lose digits in 16 bits. The table has an example
    for each trait of operations that only return elements:

    ========  ==================  ================================  =========
    trait     example             its derivative                    it runs
    ========  ==================  ================================  =========
    MOVES     `reshape`           moves elements back               as stored
    SELECTS   `slice`             puts zeros around elements        as stored
    SENDS     `ppermute`          sends elements back               as stored
    PLACES    `broadcast_in_dim`  sums what was repeated            as traced
    GATHERS   `gather`            sums what was read twice          as traced
    CHOOSES   `clamp`             sums what one bound replaced      as traced
    ========  ==================  ================================  =========

    Four kinds of operations run in 16 bits in any case:

    - a product that is narrowed,
    - a sum that `autocast` stores in 16 bits,
    - an operation that `RUNS_AS_STORED` and is neither `CHEAP` nor a sum, such as a
      transfer between devices, if all readers of its result need 16 bits, and
    - an operation that `SPREADS`, if its result is stored in 16 bits. Its derivative, a
      sum over devices, still runs in float32.

    Attributes:
      MOVES: only moves elements, or leaves some out, as `reshape` and `slice` do.
      SELECTS: returns parts of an operand, which may lack the largest elements of the
        whole. Each such operation also `MOVES`.
      PLACES: moves or repeats elements, puts them between others, or casts them. It
        returns only elements of its operands, so it also `CHOOSES`.
      SENDS: communicates between devices, so the number of bytes matters.
      SPREADS: copies an array to many devices, or marks it as one that may differ
        between them. Its derivative is a sum over these devices.
      VARIES: changes along which mesh axes an array varies, where JAX tracks these. If
        it also `ADDS_MANY`, it sums over such axes. Otherwise it returns its operand.
      CHOOSES: returns elements of its operands, possibly negated or cast, so it needs
        no more range than they do.
      COMPARES: its result depends on which of two elements is larger, or on whether
        they are equal. If XLA computes an element twice, both must have the same bits.
      FILLS: puts elements of one operand between those of another, as a mask does.
      GATHERS: looks up parts of its first operand by index, as an embedding does.
      NAMES: names its operand, so that a policy of `jax.checkpoint` can choose to save
        it.
      CASTS: converts its operand to the dtype of its result.
      ADDS_TWO: adds or subtracts two operands, element by element.
      ADDS_MANY: sums many terms. In 16 bits, the last terms are lost once the sum is
        large. A sum over devices, which also `SENDS`, has only one term for each
        device, so it runs in the dtype in which its operands are stored.
      REDUCES: combines the elements along its `axes` into one.
      MULTIPLIES: multiplies two operands, element by element.
      DIVIDES: divides two operands, element by element.
      KEEPS_RANGE: its results have about the range of its operands.
      SATURATES: approaches a limit for large operands of at least one sign.
      EXPONENTIAL: changes the range of its operands, as exponentials, logarithms,
        powers and products of many elements do.
      PRODUCT: a matrix product or convolution, even if it sums nothing: see
        `is_product`.
      MAY_BE_OUTER: a matrix product that may also be an outer or an inner product, by
        its shapes: `dot_general`.
      OF_BITS: works on the bits of numbers, so another dtype would change its results.
      OPAQUE: runs code that no jaxpr shows, or does work that shapes do not determine.
      EFFECTFUL: does more than compute its results, so it must not run twice.
      CALLS: calls the one program that it holds: runs it once and returns its results.
      INLINED: does nothing but call its program, so the program's equations may replace
        it.
      CHECKPOINTS: decides which residuals of its program are saved, as `jax.checkpoint`
        does.
      SCANS: runs its program once for each row of some operands and carries a state
        along.
      WHILE: runs one program, its body, as long as another, its condition, returns
        True.
      BRANCHES: runs one of its programs, chosen by an index.
      MAPS: runs its program on each device of a mesh.
      JVP: holds a program with a user-defined derivative, as `jax.custom_jvp` does.
      VJP: holds a program with a user-defined pullback, as `jax.custom_vjp` does. It
        runs once, where it stands, and is never `CHEAP`, because a nonlinear rule, such
        as one that clips, must get the whole cotangent at once.
      CHEAP: takes at most one pass over its operands, and usually none, because the
        compiler can fuse it with the operations that read its results. A backward pass
        may therefore recompute the results instead of saving them.
    """

    # --- How elements are moved and chosen ---

    MOVES = auto()
    SELECTS = auto()
    PLACES = auto()
    SENDS = auto()
    SPREADS = auto()
    VARIES = auto()
    CHOOSES = auto()
    COMPARES = auto()
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
    KEEPS_RANGE = auto()
    SATURATES = auto()
    EXPONENTIAL = auto()
    PRODUCT = auto()
    MAY_BE_OUTER = auto()
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


Terms = Literal["contracted", "kernel", "last", "updates", "window"]
"""How `count_terms` in `_programs/work.py` counts the terms of a sum."""

Formula = Literal[
    "choice",
    "inverse root",
    "minus",
    "over",
    "plus or max",
    "root",
    "squared",
    "sum",
    "times",
]
"""The word for an operation in the formulas of means and norms."""


class Row(NamedTuple):
    """What the table says of an operation.

    Attributes:
      traits: its traits.
      axes: the name of the parameter that holds the axes it sums over, if it has one.
      terms: how the terms of any other sum are counted; None for one term.
      formula: the word by which `_autocast/normalized.py` recognizes formulas of means
        and norms; None if the operation is in none of them.
      programs: the names of the parameters that hold the programs it runs, in the order
        in which they run; None for every parameter that holds a program.
    """

    traits: Trait = Trait(0)
    axes: str | None = None
    terms: Terms | None = None
    formula: Formula | None = None
    programs: tuple[str, ...] | None = ()


UNKNOWN = Row(programs=None)
"""The row of an operation that is not in the table: nothing is assumed about it.

`autocast` runs the operation in the dtypes in which it was traced, leaves the products
in its programs as they are, and keeps it out of islands (see `_autocast/__init__.py`).
The reports assume that the operation runs every program among its parameters, and
`dtype_report` lists it as one that it cannot look into.
"""

# The names are those of primitives, as jaxprs print them: `lax.ragged_dot` is called
# `ragged_dot_general`. Operations that are alike share a row, and no operation has two.
_ROWS = {
    # Moves elements
    "copy reshape rev squeeze stop_gradient transpose": Row(Trait.MOVES | Trait.CHEAP),
    "dynamic_slice slice split unstack": Row(Trait.MOVES | Trait.SELECTS | Trait.CHEAP),
    "name": Row(Trait.MOVES | Trait.NAMES),
    "optimization_barrier": Row(Trait.MOVES),
    "reshard sharding_constraint": Row(Trait.MOVES | Trait.SENDS),
    # Communicates between devices
    "all_gather all_gather_reduced": Row(Trait.SENDS | Trait.SPREADS),
    "all_gather_invariant all_to_all pmax pmin ppermute": Row(Trait.SENDS),
    "psum reduce_scatter unreduced_psum unreduced_reduce_scatter": Row(
        Trait.SENDS | Trait.ADDS_MANY
    ),
    "psum_invariant": Row(Trait.SENDS | Trait.ADDS_MANY | Trait.VARIES),
    # Returns elements of its operands
    "abs dynamic_update_slice neg scatter": Row(Trait.CHOOSES | Trait.CHEAP),
    "broadcast_in_dim concatenate stack tile": Row(
        Trait.PLACES | Trait.CHOOSES | Trait.CHEAP
    ),
    "convert_element_type": Row(
        Trait.PLACES | Trait.CHOOSES | Trait.CASTS | Trait.CHEAP
    ),
    "clamp min reduce_window_max reduce_window_min scatter-max scatter-min": Row(
        Trait.CHOOSES | Trait.COMPARES | Trait.CHEAP
    ),
    "cummax cummin sort top_k": Row(Trait.CHOOSES | Trait.COMPARES),
    "gather": Row(Trait.PLACES | Trait.CHOOSES | Trait.GATHERS | Trait.CHEAP),
    "max": Row(Trait.CHOOSES | Trait.COMPARES | Trait.CHEAP, formula="plus or max"),
    "pad": Row(Trait.PLACES | Trait.CHOOSES | Trait.CHEAP | Trait.FILLS),
    "pvary": Row(Trait.SPREADS | Trait.CHOOSES | Trait.CHEAP | Trait.VARIES),
    "reduce_max reduce_min": Row(
        Trait.CHOOSES | Trait.COMPARES | Trait.CHEAP | Trait.REDUCES
    ),
    "select_n": Row(Trait.CHOOSES | Trait.CHEAP | Trait.FILLS, formula="choice"),
    # Sums
    "add": Row(Trait.ADDS_TWO | Trait.CHEAP, formula="plus or max"),
    "add_any": Row(Trait.ADDS_TWO | Trait.CHEAP),
    "cumsum": Row(Trait.ADDS_MANY, axes="axis"),
    "reduce": Row(Trait.ADDS_MANY, axes="dimensions"),
    "reduce_sum": Row(
        Trait.ADDS_MANY | Trait.CHEAP | Trait.REDUCES, axes="axes", formula="sum"
    ),
    "reduce_window reduce_window_sum": Row(Trait.ADDS_MANY, terms="window"),
    "select_and_scatter_add": Row(Trait.ADDS_MANY | Trait.COMPARES, terms="window"),
    "scatter-add scatter-sub": Row(Trait.ADDS_MANY | Trait.CHEAP, terms="updates"),
    "sub": Row(Trait.ADDS_TWO | Trait.CHEAP, formula="minus"),
    # Has about the range of its operands
    "ceil floor round sign": Row(Trait.KEEPS_RANGE | Trait.CHEAP),
    "div": Row(Trait.DIVIDES | Trait.KEEPS_RANGE | Trait.CHEAP, formula="over"),
    "erf logistic tanh": Row(Trait.KEEPS_RANGE | Trait.SATURATES | Trait.CHEAP),
    "mul": Row(Trait.MULTIPLIES | Trait.KEEPS_RANGE | Trait.CHEAP, formula="times"),
    # Has another range than its operands
    "cosh exp exp2 expm1 log log1p log2 pow scatter-mul sinh": Row(
        Trait.EXPONENTIAL | Trait.CHEAP
    ),
    "cumlogsumexp cumprod lgamma": Row(Trait.EXPONENTIAL),
    "erfc": Row(Trait.SATURATES | Trait.CHEAP),
    "integer_pow square": Row(Trait.EXPONENTIAL | Trait.CHEAP, formula="squared"),
    "reduce_prod": Row(Trait.EXPONENTIAL | Trait.CHEAP | Trait.REDUCES),
    # Products
    "conv_general_dilated": Row(Trait.PRODUCT, terms="kernel"),
    # Outer and inner products are cheap: they take one pass over their operands. For
    # any other `dot_general`, `is_product` is True, and `is_cheap` therefore False.
    "dot_general": Row(
        Trait.PRODUCT | Trait.MAY_BE_OUTER | Trait.CHEAP, terms="contracted"
    ),
    "ragged_dot_general scaled_dot": Row(Trait.PRODUCT, terms="contracted"),
    "scaled_matmul_wrapper": Row(Trait.PRODUCT, terms="last"),
    # Bits
    "bitcast_convert_type nextafter random_gamma rng_uniform": Row(Trait.OF_BITS),
    # Runs code that no jaxpr shows
    (
        "bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general "
        "bcsr_dot_general call_exported call_tf coo_matmat coo_matvec coo_spmm "
        "coo_spmv core_map csr_matmat csr_matvec csr_spmm csr_spmv cudnn_fusion "
        "dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd_wrapper "
        "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd_wrapper "
        "ffi_call mosaic_gpu_call mpmd_map pallas_call pure_callback spsolve "
        "tpu_custom_call triton_kernel_call"
    ): Row(Trait.OPAQUE),
    "io_callback": Row(Trait.OPAQUE | Trait.EFFECTFUL),
    # Runs code that returns nothing
    "debug_callback debug_print inspect_sharding": Row(Trait.EFFECTFUL),
    # Holds programs
    "closed_call eval_jaxpr": Row(
        Trait.INLINED | Trait.CALLS, programs=("jaxpr", "call_jaxpr")
    ),
    "composite xla_metadata_call": Row(Trait.CALLS, programs=("jaxpr",)),
    "cond": Row(Trait.BRANCHES, programs=("branches",)),
    "custom_jvp_call": Row(
        Trait.JVP | Trait.CHEAP | Trait.CALLS, programs=("call_jaxpr",)
    ),
    "custom_linear_solve": Row(programs=("jaxprs.solve",)),
    "custom_partitioning": Row(programs=("call",)),
    "custom_vjp_call": Row(Trait.VJP | Trait.CALLS, programs=("call_jaxpr",)),
    "custom_vmap_call": Row(Trait.CALLS, programs=("call",)),
    "CustomRoot": Row(programs=("solve_jaxpr",)),
    "jit": Row(Trait.INLINED | Trait.CHEAP | Trait.CALLS, programs=("jaxpr",)),
    "linear_call": Row(programs=("callee",)),
    "remat_opt": Row(Trait.INLINED | Trait.CALLS, programs=("fwd_jaxpr",)),
    "remat2": Row(Trait.CHECKPOINTS | Trait.CALLS, programs=("jaxpr",)),
    "run_state": Row(programs=("jaxpr",)),
    "scan": Row(Trait.SCANS, programs=("jaxpr",)),
    "shard_map": Row(Trait.MAPS, programs=("jaxpr",)),
    "while": Row(Trait.WHILE, programs=("cond_jaxpr", "body_jaxpr")),
    # Cheap; nothing is assumed about the range of the results
    (
        "acos acosh and asin asinh atan atan2 atanh cbrt cos erf_inv iota is_finite "
        "not one_minus_square or polynomial reduce_and reduce_or rem sin tan xor"
    ): Row(Trait.CHEAP),
    "argmax argmin eq ge gt le lt ne": Row(Trait.COMPARES | Trait.CHEAP),
    "rsqrt": Row(Trait.CHEAP, formula="inverse root"),
    "sqrt": Row(Trait.CHEAP, formula="root"),
    "approx_top_k select_and_gather_add select_and_scatter": Row(Trait.COMPARES),
    # Treated like an unknown operation, but known to run no program
    (
        "accum_grad_in_ref addupdate after_all axis_index bcoo_extract "
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
        "rng_bit_generator schur shift_left "
        "shift_right_arithmetic shift_right_logical svd swap symmetric_product "
        "threefry2x32 tie to_edtype triangular_solve tridiagonal tridiagonal_solve "
        "with_memory_space_constraint zeros_like zeta"
    ): Row(),
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
