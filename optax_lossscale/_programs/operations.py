"""The tables of JAX's operations: what each is to a rule that runs programs."""

import enum


class Is(enum.Flag):
    """What an operation is; it may be several of these at once."""

    MOVES = enum.auto()
    """Returns its operands' numbers in another place or shape; runs in 16 bits if they are so."""
    SENDS = enum.auto()
    """Goes from device to device, where the bytes count."""
    SPREADS = enum.auto()
    """Gives many devices what one had, or says that it may differ: its derivative is a sum."""
    CHOOSES = enum.auto()
    """Returns some operands' numbers, or their negatives; in float32, as a derivative may sum."""
    CASTS = enum.auto()
    """Rounds to its result's dtype."""
    ADDS_TWO = enum.auto()
    ADDS_MANY = enum.auto()
    """Sums many terms: in 16 bits the last ones are lost once the sum is large.

    A sum over devices has few terms, one for each, and may be in 16 bits all the same.
    """
    NEAR = enum.auto()
    """Its results have about the range of its operands."""
    SATURATES = enum.auto()
    """Returns nearly the same for all large numbers."""
    EXPONENTIAL = enum.auto()
    """Its results leave the range of its operands."""
    CHEAP = enum.auto()
    """Recomputing it takes no longer than reading its results: a compiler fuses it."""
    PRODUCT = enum.auto()
    OF_BITS = enum.auto()
    """Reads or makes the bits of a number, which are those of its own dtype."""
    OPAQUE = enum.auto()
    """Runs code that no jaxpr shows, or whose amount of work no shape tells."""
    KEEPS = enum.auto()
    """Itself says what is kept for the gradient of the program that it holds."""
    INLINED = enum.auto()
    """Is no more than the program that it holds."""


_NAMES = {
    Is.MOVES | Is.CHEAP: """
        copy copy_p dynamic_slice expand_dims reshape rev slice split squeeze stop_gradient
        transpose unstack
    """,
    Is.MOVES | Is.SENDS | Is.CHEAP: "reshard sharding_constraint",
    Is.MOVES: "name optimization_barrier",
    Is.SENDS | Is.SPREADS: "all_gather all_gather_reduced",
    Is.SENDS: "all_gather_invariant all_to_all pmax pmin ppermute",
    Is.SENDS | Is.ADDS_MANY: """
        psum psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter
    """,
    Is.CHOOSES | Is.CHEAP: """
        abs broadcast_in_dim clamp concatenate dynamic_update_slice gather max min neg pad
        reduce_max reduce_min reduce_window_max reduce_window_min scatter select_n stack tile
    """,
    Is.SPREADS | Is.CHOOSES | Is.CHEAP: "pcast pvary",
    Is.CHOOSES: "cummax cummin sort top_k",
    Is.CHOOSES | Is.CASTS | Is.CHEAP: "convert_element_type",
    Is.ADDS_TWO | Is.CHEAP: "add add_any sub",
    Is.ADDS_MANY | Is.CHEAP: "reduce_sum scatter-add",
    Is.ADDS_MANY: """
        cumsum reduce reduce_window reduce_window_sum scatter-sub select_and_scatter_add
    """,
    Is.NEAR | Is.CHEAP: "ceil div floor mul round sign",
    Is.NEAR | Is.SATURATES | Is.CHEAP: "erf logistic tanh",
    Is.SATURATES | Is.CHEAP: "erfc",
    Is.SATURATES | Is.EXPONENTIAL | Is.CHEAP: "exp",
    Is.EXPONENTIAL | Is.CHEAP: """
        cosh exp2 expm1 integer_pow log log1p log2 pow reduce_prod sinh square
    """,
    Is.EXPONENTIAL: "cumlogsumexp cumprod lgamma",
    Is.CHEAP: """
        acos acosh and argmax argmin asin asinh atan atan2 atanh cbrt cos custom_jvp_call
        custom_vjp_call eq erf_inv ge gt iota is_finite le lt ne not one_minus_square
        or reduce_and reduce_or rem rsqrt sin sqrt tan xor
    """,
    Is.CHEAP | Is.PRODUCT: "dot_general",
    Is.PRODUCT: "conv_general_dilated ragged_dot_general scaled_dot scaled_matmul_wrapper",
    Is.OF_BITS: "bitcast_convert_type nextafter rng_uniform",
    Is.OPAQUE: """
        bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general bcsr_dot_general call_exported
        call_tf coo_matmat coo_matvec coo_spmm coo_spmv csr_matmat csr_matvec csr_spmm csr_spmv
        cudnn_fusion dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd_wrapper
        dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd_wrapper ffi_call
        io_callback mosaic_gpu_call pallas_call pure_callback spsolve tpu_custom_call
        triton_kernel_call
    """,
    Is.KEEPS: "checkpoint remat remat2",
    Is.CHEAP | Is.INLINED: "jit pjit",
    Is.INLINED: "closed_call core_call eval_jaxpr",
    Is(0): """
        CustomRoot accum_grad_in_ref addupdate after_all approx_top_k axis_index bcoo_extract
        bcoo_fromdense bcoo_sort_indices bcoo_sum_duplicates bcoo_todense bcoo_transpose
        bcsr_extract bcsr_fromdense bcsr_todense bessel_i0e bessel_i1e broadcast_to cholesky
        cholesky_update clz complex composite cond conj coo_fromdense coo_todense create_token
        csr_fromdense csr_todense custom_linear_solve custom_partitioning custom_vmap_call
        debug_callback debug_print device_put digamma dim_as_value dimension_size eig eigh empty
        empty2 empty_ref fft free_ref freeze from_edtype geqp3 geqrf get hessenberg
        householder_product igamma igamma_grad_a igammac imag iota_2x32_shape layout_constraint
        linear_call lu lu_pivots_to_permutation mulhi new_ref ormqr pbroadcast
        platform_index polygamma population_count qr ragged_all_to_all random_bits random_clone
        random_fold_in random_gamma random_seed random_split random_unwrap random_wrap real
        reciprocal reduce_precision reduce_xor regularized_incomplete_beta rng_bit_generator
        run_state scan scatter-max scatter-min scatter-mul schur select_and_gather_add
        select_and_scatter shard_map shift_left shift_right_arithmetic shift_right_logical svd swap
        symmetric_product threefry2x32 tie to_edtype triangular_solve tridiagonal tridiagonal_solve
        while with_memory_space_constraint xla_metadata_call xla_pmap zeros_like zeta
    """,
}
TABLE = {name: traits for traits, names in _NAMES.items() for name in names.split()}
"""What each operation is: `Is(0)` for one that is known, but treated like an unknown one."""

_HELD = {
    "jaxpr": """
        checkpoint composite jit pjit remat remat2 run_state scan shard_map xla_metadata_call
    """,
    "call_jaxpr": "custom_jvp_call custom_vjp_call xla_pmap",
    "jaxpr call_jaxpr": "closed_call core_call eval_jaxpr",
    "call": "custom_partitioning custom_vmap_call",
    "callee": "linear_call",
    "branches": "cond",
    "cond_jaxpr body_jaxpr": "while",
    "jaxprs.solve": "custom_linear_solve",
    "solve_jaxpr": "CustomRoot",
}
PROGRAMS = {name: held.split() for held, names in _HELD.items() for name in names.split()}
"""The parameters that hold the programs that an operation runs, in the order of running."""

NORMALIZES = {"sub": "div", "mul": "rsqrt", "div": "sqrt"}
"""Operations that subtract a mean or divide by a norm, each with one that makes it of a sum."""


def traits_of(name: str) -> Is:
    """What the operation with a name is; `Is(0)` if it is unknown."""
    return TABLE.get(name, Is(0))


def is_exact(name: str) -> bool:
    """Whether an operation rounds nothing, and makes nothing infinite."""
    traits = traits_of(name)
    is_any = traits & (Is.MOVES | Is.SENDS | Is.CHOOSES)
    return bool(is_any) and not traits & (Is.ADDS_TWO | Is.ADDS_MANY | Is.CASTS)
