"""The table of JAX's operations: what each is to a rule that runs programs."""

import enum
from typing import NamedTuple


class Is(enum.Flag):
    """What an operation is; it may be several of these at once."""

    MOVES = enum.auto()
    """Gives the numbers that it takes, in another place or shape: in 16 bits, if they are."""
    SENDS = enum.auto()
    """Goes from device to device, where the bytes count."""
    CHOOSES = enum.auto()
    """Gives no other numbers than it takes, but for their signs; its derivative may be a sum."""
    CASTS = enum.auto()
    """Rounds to its result's dtype."""
    ADDS_TWO = enum.auto()
    ADDS_MANY = enum.auto()
    """Sums many terms; in 16 bits the last ones are lost once the sum is large."""
    NEAR = enum.auto()
    """Its results have about the range of what it takes."""
    SATURATES = enum.auto()
    """Gives nearly the same for all large numbers."""
    EXPONENTIAL = enum.auto()
    """Leaves the range of what it takes."""
    CHEAP = enum.auto()
    """To compute it again takes no longer than to read what it gives: a compiler fuses it."""
    PRODUCT = enum.auto()
    OF_BITS = enum.auto()
    """Reads or makes the bits of a number, which are those of its own dtype."""
    OPAQUE = enum.auto()
    """Runs code that no program shows, or whose size no shape tells."""
    HOLDS = enum.auto()
    """Runs programs that it holds."""
    KEEPS = enum.auto()
    """Says itself what is kept for the gradient of the program that it holds."""
    INLINED = enum.auto()
    """Is no more than the program that it holds."""


class Operation(NamedTuple):
    """A row of the table.

    Attributes:
      traits: what it is; nothing for one that is computed as it was traced, and no more.
      programs: the parameters that hold the programs which it runs, in the order of running.
    """

    traits: Is = Is(0)
    programs: tuple[str, ...] = ()


TABLE = {
    "CustomRoot": Operation(Is.HOLDS, ("solve_jaxpr",)),
    "abs": Operation(Is.CHOOSES | Is.CHEAP),
    "acos": Operation(Is.CHEAP),
    "acosh": Operation(Is.CHEAP),
    "add": Operation(Is.ADDS_TWO | Is.CHEAP),
    "add_any": Operation(Is.ADDS_TWO | Is.ADDS_MANY | Is.CHEAP),
    "all_gather": Operation(Is.SENDS),
    "all_gather_invariant": Operation(Is.SENDS),
    "all_gather_reduced": Operation(Is.SENDS),
    "all_to_all": Operation(Is.SENDS),
    "and": Operation(Is.CHEAP),
    "argmax": Operation(Is.CHEAP),
    "argmin": Operation(Is.CHEAP),
    "asin": Operation(Is.CHEAP),
    "asinh": Operation(Is.CHEAP),
    "atan": Operation(Is.CHEAP),
    "atan2": Operation(Is.CHEAP),
    "atanh": Operation(Is.CHEAP),
    "bcoo_dot_general": Operation(Is.OPAQUE),
    "bcoo_dot_general_sampled": Operation(Is.OPAQUE),
    "bcoo_spdot_general": Operation(Is.OPAQUE),
    "bcsr_dot_general": Operation(Is.OPAQUE),
    "bitcast_convert_type": Operation(Is.OF_BITS),
    "broadcast_in_dim": Operation(Is.CHOOSES | Is.CHEAP),
    "call_exported": Operation(Is.OPAQUE),
    "call_tf": Operation(Is.OPAQUE),
    "cbrt": Operation(Is.CHEAP),
    "ceil": Operation(Is.NEAR | Is.CHEAP),
    "checkpoint": Operation(Is.HOLDS | Is.KEEPS, ("jaxpr",)),
    "clamp": Operation(Is.CHOOSES | Is.CHEAP),
    "closed_call": Operation(Is.HOLDS | Is.INLINED, ("jaxpr", "call_jaxpr")),
    "composite": Operation(Is.HOLDS, ("jaxpr",)),
    "concatenate": Operation(Is.CHOOSES | Is.CHEAP),
    "cond": Operation(Is.HOLDS, ("branches",)),
    "conv_general_dilated": Operation(Is.PRODUCT),
    "convert_element_type": Operation(Is.CHOOSES | Is.CASTS | Is.CHEAP),
    "coo_matmat": Operation(Is.OPAQUE),
    "coo_matvec": Operation(Is.OPAQUE),
    "coo_spmm": Operation(Is.OPAQUE),
    "coo_spmv": Operation(Is.OPAQUE),
    "copy": Operation(Is.MOVES | Is.CHEAP),
    "copy_p": Operation(Is.MOVES | Is.CHEAP),
    "core_call": Operation(Is.HOLDS | Is.INLINED, ("jaxpr", "call_jaxpr")),
    "cos": Operation(Is.CHEAP),
    "cosh": Operation(Is.CHEAP),
    "csr_matmat": Operation(Is.OPAQUE),
    "csr_matvec": Operation(Is.OPAQUE),
    "csr_spmm": Operation(Is.OPAQUE),
    "csr_spmv": Operation(Is.OPAQUE),
    "cudnn_fusion": Operation(Is.OPAQUE),
    "cumlogsumexp": Operation(Is.EXPONENTIAL),
    "cummax": Operation(Is.CHOOSES),
    "cummin": Operation(Is.CHOOSES),
    "cumsum": Operation(Is.ADDS_MANY),
    "custom_jvp_call": Operation(Is.HOLDS | Is.CHEAP, ("call_jaxpr",)),
    "custom_linear_solve": Operation(Is.HOLDS, ("jaxprs.solve",)),
    "custom_partitioning": Operation(Is.HOLDS, ("call",)),
    "custom_vjp_call": Operation(Is.HOLDS | Is.CHEAP, ("call_jaxpr",)),
    "custom_vmap_call": Operation(Is.HOLDS, ("call",)),
    "div": Operation(Is.NEAR | Is.CHEAP),
    "dot_general": Operation(Is.PRODUCT | Is.CHEAP),
    "dot_product_attention_bwd_wrapper": Operation(Is.OPAQUE),
    "dot_product_attention_fp8_bwd_wrapper": Operation(Is.OPAQUE),
    "dot_product_attention_fp8_fwd_wrapper": Operation(Is.OPAQUE),
    "dot_product_attention_fwd_wrapper": Operation(Is.OPAQUE),
    "dynamic_slice": Operation(Is.MOVES | Is.CHEAP),
    "dynamic_update_slice": Operation(Is.CHOOSES | Is.CHEAP),
    "eq": Operation(Is.CHEAP),
    "erf": Operation(Is.NEAR | Is.SATURATES | Is.CHEAP),
    "erf_inv": Operation(Is.CHEAP),
    "erfc": Operation(Is.SATURATES | Is.CHEAP),
    "eval_jaxpr": Operation(Is.HOLDS | Is.INLINED, ("jaxpr", "call_jaxpr")),
    "exp": Operation(Is.SATURATES | Is.EXPONENTIAL | Is.CHEAP),
    "exp2": Operation(Is.EXPONENTIAL | Is.CHEAP),
    "expand_dims": Operation(Is.MOVES | Is.CHEAP),
    "expm1": Operation(Is.EXPONENTIAL | Is.CHEAP),
    "ffi_call": Operation(Is.OPAQUE),
    "floor": Operation(Is.NEAR | Is.CHEAP),
    "gather": Operation(Is.CHOOSES | Is.CHEAP),
    "ge": Operation(Is.CHEAP),
    "gt": Operation(Is.CHEAP),
    "integer_pow": Operation(Is.CHEAP),
    "io_callback": Operation(Is.OPAQUE),
    "is_finite": Operation(Is.CHEAP),
    "jit": Operation(Is.HOLDS | Is.INLINED | Is.CHEAP, ("jaxpr",)),
    "le": Operation(Is.CHEAP),
    "linear_call": Operation(Is.HOLDS, ("callee",)),
    "log": Operation(Is.EXPONENTIAL | Is.CHEAP),
    "log1p": Operation(Is.EXPONENTIAL | Is.CHEAP),
    "log2": Operation(Is.EXPONENTIAL | Is.CHEAP),
    "logistic": Operation(Is.NEAR | Is.SATURATES | Is.CHEAP),
    "lt": Operation(Is.CHEAP),
    "max": Operation(Is.CHOOSES | Is.CHEAP),
    "min": Operation(Is.CHOOSES | Is.CHEAP),
    "mosaic_gpu_call": Operation(Is.OPAQUE),
    "mul": Operation(Is.NEAR | Is.CHEAP),
    "name": Operation(Is.MOVES),
    "ne": Operation(Is.CHEAP),
    "neg": Operation(Is.CHOOSES | Is.CHEAP),
    "nextafter": Operation(Is.OF_BITS),
    "not": Operation(Is.CHEAP),
    "one_minus_square": Operation(Is.CHEAP),
    "optimization_barrier": Operation(Is.MOVES),
    "or": Operation(Is.CHEAP),
    "pad": Operation(Is.CHOOSES | Is.CHEAP),
    "pallas_call": Operation(Is.OPAQUE),
    "pcast": Operation(Is.CHOOSES | Is.CHEAP),
    "pjit": Operation(Is.HOLDS | Is.INLINED | Is.CHEAP, ("jaxpr",)),
    "pmax": Operation(Is.SENDS),
    "pmin": Operation(Is.SENDS),
    "pow": Operation(Is.EXPONENTIAL | Is.CHEAP),
    "ppermute": Operation(Is.SENDS),
    "psum": Operation(Is.SENDS | Is.ADDS_MANY),
    "psum_invariant": Operation(Is.SENDS | Is.ADDS_MANY),
    "pure_callback": Operation(Is.OPAQUE),
    "pvary": Operation(Is.CHOOSES | Is.CHEAP),
    "ragged_dot_general": Operation(Is.PRODUCT),
    "reduce_and": Operation(Is.CHEAP),
    "reduce_max": Operation(Is.CHOOSES | Is.CHEAP),
    "reduce_min": Operation(Is.CHOOSES | Is.CHEAP),
    "reduce_or": Operation(Is.CHEAP),
    "reduce_prod": Operation(Is.CHEAP),
    "reduce_scatter": Operation(Is.SENDS | Is.ADDS_MANY),
    "reduce_sum": Operation(Is.ADDS_MANY | Is.CHEAP),
    "reduce_window_max": Operation(Is.CHOOSES | Is.CHEAP),
    "reduce_window_min": Operation(Is.CHOOSES | Is.CHEAP),
    "reduce_window_sum": Operation(Is.ADDS_MANY),
    "rem": Operation(Is.CHEAP),
    "remat": Operation(Is.HOLDS | Is.KEEPS, ("jaxpr",)),
    "remat2": Operation(Is.HOLDS | Is.KEEPS, ("jaxpr",)),
    "reshape": Operation(Is.MOVES | Is.CHEAP),
    "reshard": Operation(Is.MOVES | Is.CHEAP),
    "rev": Operation(Is.MOVES | Is.CHEAP),
    "rng_uniform": Operation(Is.OF_BITS),
    "round": Operation(Is.NEAR | Is.CHEAP),
    "rsqrt": Operation(Is.CHEAP),
    "run_state": Operation(Is.HOLDS, ("jaxpr",)),
    "scaled_dot": Operation(Is.PRODUCT),
    "scaled_matmul_wrapper": Operation(Is.PRODUCT),
    "scan": Operation(Is.HOLDS, ("jaxpr",)),
    "scatter": Operation(Is.CHOOSES | Is.CHEAP),
    "scatter-add": Operation(Is.ADDS_MANY | Is.CHEAP),
    "select_and_scatter_add": Operation(Is.ADDS_MANY),
    "select_n": Operation(Is.CHOOSES | Is.CHEAP),
    "shard_map": Operation(Is.HOLDS, ("jaxpr",)),
    "sharding_constraint": Operation(Is.MOVES | Is.CHEAP),
    "sign": Operation(Is.NEAR | Is.CHEAP),
    "sin": Operation(Is.CHEAP),
    "sinh": Operation(Is.CHEAP),
    "slice": Operation(Is.MOVES | Is.CHEAP),
    "sort": Operation(Is.CHOOSES),
    "split": Operation(Is.MOVES | Is.CHEAP),
    "spsolve": Operation(Is.OPAQUE),
    "sqrt": Operation(Is.CHEAP),
    "square": Operation(Is.CHEAP),
    "squeeze": Operation(Is.MOVES | Is.CHEAP),
    "stack": Operation(Is.CHOOSES | Is.CHEAP),
    "stop_gradient": Operation(Is.MOVES | Is.CHEAP),
    "sub": Operation(Is.ADDS_TWO | Is.CHEAP),
    "tan": Operation(Is.CHEAP),
    "tanh": Operation(Is.NEAR | Is.SATURATES | Is.CHEAP),
    "tile": Operation(Is.CHOOSES | Is.CHEAP),
    "top_k": Operation(Is.CHOOSES),
    "tpu_custom_call": Operation(Is.OPAQUE),
    "transpose": Operation(Is.MOVES | Is.CHEAP),
    "triton_kernel_call": Operation(Is.OPAQUE),
    "unreduced_psum": Operation(Is.SENDS | Is.ADDS_MANY),
    "unreduced_reduce_scatter": Operation(Is.SENDS | Is.ADDS_MANY),
    "unstack": Operation(Is.MOVES | Is.CHEAP),
    "while": Operation(Is.HOLDS, ("cond_jaxpr", "body_jaxpr")),
    "xla_metadata_call": Operation(Is.HOLDS, ("jaxpr",)),
    "xla_pmap": Operation(Is.HOLDS, ("call_jaxpr",)),
    "xor": Operation(Is.CHEAP),
}
_OTHERS = """
    accum_grad_in_ref addupdate after_all approx_top_k axis_index bcoo_extract bcoo_fromdense
    bcoo_sort_indices bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_extract
    bcsr_fromdense bcsr_todense bessel_i0e bessel_i1e broadcast_to cholesky cholesky_update clz
    complex conj coo_fromdense coo_todense create_token csr_fromdense csr_todense cumprod
    debug_callback debug_print device_put digamma dim_as_value dimension_size eig eigh empty
    empty2 empty_ref fft free_ref freeze from_edtype geqp3 geqrf get hessenberg
    householder_product igamma igamma_grad_a igammac imag iota iota_2x32_shape layout_constraint
    lgamma lu lu_pivots_to_permutation mulhi new_ref ormqr pbroadcast platform_index polygamma
    population_count qr ragged_all_to_all random_bits random_clone random_fold_in random_gamma
    random_seed random_split random_unwrap random_wrap real reciprocal reduce reduce_precision
    reduce_window reduce_xor regularized_incomplete_beta rng_bit_generator scatter-max scatter-min
    scatter-mul scatter-sub schur select_and_gather_add select_and_scatter shift_left
    shift_right_arithmetic shift_right_logical svd swap symmetric_product threefry2x32 tie
    to_edtype triangular_solve tridiagonal tridiagonal_solve with_memory_space_constraint
    zeros_like zeta
"""
TABLE |= dict.fromkeys(_OTHERS.split(), Operation())


def traits_of(name: str) -> Is:
    """What the operation of a name is; nothing, if it is not known."""
    return TABLE.get(name, Operation()).traits


def is_exact(name: str) -> bool:
    """Whether an operation rounds nothing, and makes nothing infinite."""
    traits = traits_of(name)
    is_any = traits & (Is.MOVES | Is.SENDS | Is.CHOOSES)
    return bool(is_any) and not traits & (Is.ADDS_TWO | Is.ADDS_MANY | Is.CASTS)
