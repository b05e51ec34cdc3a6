"""Sets of JAX's operations, one for each question that the package asks of them.

The names are those of primitives, as jaxprs print them. An operation in no set is
computed in the dtypes in which it was traced, and is not computed again.
"""


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


PRODUCTS = _named(
    """
    conv_general_dilated dot_general ragged_dot_general scaled_dot
    scaled_matmul_wrapper
    """
)
"""Matrix products and convolutions; `products.py` says which of them sum nothing."""

SUMS = _named("add add_any")
"""Sums of two operands, as of a residual connection."""

MOVES = _named(
    """
    copy dynamic_slice optimization_barrier reshape rev slice split squeeze
    stop_gradient transpose unstack
    """
)
"""Return elements of their first operand as they are, so rounding commutes with them."""

SPREADS = _named("all_gather all_gather_reduced pvary")
"""Copy an array to several devices, so that its gradient is a sum over devices."""

SENDS = SPREADS | _named(
    """
    all_gather_invariant all_to_all name ppermute reshard sharding_constraint
    """
)
"""Move elements at a price by the byte: to another device, or into what is saved."""

REARRANGES = MOVES | _named(
    "broadcast_in_dim concatenate convert_element_type gather pad stack tile"
)
"""Compute nothing: to compute them again saves no work and may save memory."""

REDUCES = _named("reduce_max reduce_min reduce_prod reduce_sum")
"""Combine the elements along their parameter `axes` into one."""

CHEAP = (
    (REARRANGES - {"optimization_barrier"})
    | REDUCES
    | SUMS
    | _named(
        """
        abs acos acosh and argmax argmin asin asinh atan atan2 atanh cbrt ceil clamp
        complex conj cos cosh custom_jvp_call div dynamic_update_slice eq erf erf_inv
        erfc exp exp2 expm1 floor ge gt imag integer_pow iota is_finite jit le log log1p
        log2 logistic lt max min mul ne neg not one_minus_square or polynomial pow
        real reciprocal reduce_and reduce_or reduce_window_max reduce_window_min rem
        round rsqrt scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub
        select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
        sqrt square sub tan tanh xor
    """
    )
)
"""Take one pass over memory at most, and none where a compiler fuses them.

A `jit` or `custom_jvp_call` is cheap if all that it holds is.
"""

OPAQUE = _named(
    """
    call_exported call_tf core_map cudnn_fusion
    dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd_wrapper
    dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd_wrapper
    ffi_call io_callback mosaic_gpu_call mpmd_map pallas_call pure_callback
    tpu_custom_call triton_kernel_call
    """
)
"""Run code that no jaxpr shows, or that stands for a kernel and not for arrays."""

CALLS = _named("closed_call eval_jaxpr jit remat_opt")
"""Do nothing but run their program, so its equations may stand in their place."""

HOLDERS = {
    "closed_call": ["jaxpr", "call_jaxpr"],
    "composite": ["jaxpr"],
    "cond": ["branches"],
    "custom_jvp_call": ["call_jaxpr"],
    "custom_linear_solve": ["jaxprs.solve"],
    "custom_partitioning": ["call"],
    "custom_vjp_call": ["call_jaxpr"],
    "custom_vmap_call": ["call"],
    "CustomRoot": ["solve_jaxpr"],
    "eval_jaxpr": ["jaxpr", "call_jaxpr"],
    "jit": ["jaxpr"],
    "linear_call": ["callee"],
    "remat2": ["jaxpr"],
    "remat_opt": ["fwd_jaxpr"],
    "run_state": ["jaxpr"],
    "scan": ["jaxpr"],
    "shard_map": ["jaxpr"],
    "while": ["cond_jaxpr", "body_jaxpr"],
    "xla_metadata_call": ["jaxpr"],
}
"""Hold programs, in these parameters, in the order in which they run.

Of an operation that is not listed, every parameter that is a program counts.
"""
