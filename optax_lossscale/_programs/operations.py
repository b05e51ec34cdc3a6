"""The table of JAX's operations: a row for each, with what is known of it.

`operation(eqn)` looks up the row of an equation's operation, and `traits(eqn)` only its
traits. For `exp` these are `EXPONENTIAL` and `CHEAP`. As it has none of `MOVES`,
`PLACES`, `SENDS` and `PRODUCT`, `autocast` computes it in float32; as it is `CHEAP`, the
backward pass may recompute it. `EXPONENTIAL` is for `dtype_report`, which lists it where
its operand has 16 bits.
"""

import enum
import functools
from typing import Any, NamedTuple

from optax_lossscale._programs.versions import name_of


class Is(enum.Flag):
    """The traits of operations, of which one operation may have several."""

    MOVES = enum.auto()
    """Only moves or reshapes numbers: runs in the dtype in which they are stored."""
    SELECTS = enum.auto()
    """Its results are parts of an operand, and so may lack its largest numbers."""
    PLACES = enum.auto()
    """Moves numbers, but runs as traced, as its derivative may sum, or it casts."""
    SENDS = enum.auto()
    """Communicates between devices, for which the number of bytes counts."""
    SPREADS = enum.auto()
    """Gives an array to many devices, or lets it differ between them.

    Its derivative is a sum over these devices.
    """
    VARIES = enum.auto()
    """Exists only where JAX tracks along which mesh axes each array differs.

    It sums over these axes if it adds many, and else returns its operand.
    """
    CHOOSES = enum.auto()
    """Selects numbers of its operands, or negates them.

    It runs in float32 for all that, as its derivative may be a sum.
    """
    FILLS = enum.auto()
    """Puts numbers of one operand between those of another, as a mask does."""
    PADS = enum.auto()
    """Puts numbers around those of its operand, and perhaps between them."""
    PICKS = enum.auto()
    """Looks up parts of its first operand by index, as an embedding does."""
    NAMES = enum.auto()
    """Gives its operand a name, by which a policy of `jax.checkpoint` may keep it."""
    CASTS = enum.auto()
    """Converts its operand to the dtype of its result."""
    ADDS_TWO = enum.auto()
    """Adds or subtracts two operands, number by number."""
    ADDS_MANY = enum.auto()
    """Sums many terms: in 16 bits the last ones are lost once the sum is large.

    A sum over devices has one term for each device. Those are few, so it may run in 16
    bits nevertheless.
    """
    REDUCES = enum.auto()
    """Makes one number of those along its `axes`."""
    MULTIPLIES = enum.auto()
    """Multiplies two operands, number by number."""
    DIVIDES = enum.auto()
    """Divides two operands, number by number."""
    NEAR = enum.auto()
    """Its results have about the range of its operands."""
    SATURATES = enum.auto()
    """Approaches a limit for large numbers, at least for those of one sign."""
    EXPONENTIAL = enum.auto()
    """Its results leave the range of its operands: exponentials, logarithms, powers."""
    PRODUCT = enum.auto()
    """A matrix product or a convolution."""
    OUTER = enum.auto()
    """A product that, where it sums nothing, is a multiplication with broadcasting."""
    OF_BITS = enum.auto()
    """Reads or makes the bits of a number, which are those of its own dtype."""
    OPAQUE = enum.auto()
    """Runs code that no jaxpr shows, or does work that shapes do not determine."""
    ONCE = enum.auto()
    """Does more than compute its results, so that it must not run twice."""
    CALLS = enum.auto()
    """Runs the one program that it holds, once, from its operands to its results."""
    INLINED = enum.auto()
    """Only calls the program that it holds."""
    KEEPS = enum.auto()
    """Says itself which residuals of its program are kept, as `jax.checkpoint` does."""
    SCANS = enum.auto()
    """Runs its program once for each row of its operands, and carries a state along."""
    WAITS = enum.auto()
    """Runs its body, a program, as long as its condition, another program, holds."""
    BRANCHES = enum.auto()
    """Runs one of its programs, which an index chooses."""
    MAPS = enum.auto()
    """Runs its program on each device of a mesh."""
    JVP = enum.auto()
    """Holds a program whose derivative is a rule of the user's own."""
    VJP = enum.auto()
    """Holds a program whose pullback is a rule of the user's own.

    It runs once, where it is, and is never `CHEAP`: a rule that is not linear, as one
    that clips, has to see the whole cotangent.
    """
    CHEAP = enum.auto()
    """Takes no longer to recompute than its results take to read: compilers fuse it."""


class Operation(NamedTuple):
    """A row of the table; the defaults are the row of an operation that is not in it.

    So nothing is assumed of an unknown operation: it runs in the dtypes in which it was
    traced, is not recomputed, and is taken to run every program among its parameters.
    """

    traits: Is = Is(0)
    # What determines how many terms each result sums: the name of a parameter, or a
    # word that `_programs.work` explains
    terms: str = ""
    # What it is in the formula of a norm, if it may be in one: a word that
    # `_autocast.normalized` explains
    formula: str = ""
    # The parameters that hold the programs that it runs, in the order of running; None
    # means every parameter that holds one
    programs: tuple[str, ...] | None = None


# Operations have the names of their primitives, as jaxprs show them: `ragged_dot` is
# `ragged_dot_general` here. The columns are the fields of `Operation`; below "is" are
# the traits. A cell that is `-` or missing is empty: without `programs`, an operation
# runs none.
_ROWS = """
# Operation               | is                     | terms      | formula   | programs
# Returns its operands' numbers elsewhere
copy                      | moves cheap
dynamic_slice             | moves cheap selects
name                      | moves names
optimization_barrier      | moves
reshape                   | moves cheap
reshard                   | moves sends
rev                       | moves cheap
sharding_constraint       | moves sends
slice                     | moves cheap selects
split                     | moves cheap selects
squeeze                   | moves cheap
stop_gradient             | moves cheap
transpose                 | moves cheap
unstack                   | moves cheap selects
# Goes from device to device
all_gather                | sends spreads
all_gather_invariant      | sends
all_gather_reduced        | sends spreads
all_to_all                | sends
pmax                      | sends
pmin                      | sends
ppermute                  | sends
psum                      | sends adds_many
psum_invariant            | sends adds_many varies
reduce_scatter            | sends adds_many
unreduced_psum            | sends adds_many
unreduced_reduce_scatter  | sends adds_many
# Returns some of its operands' numbers
abs                       | chooses cheap
broadcast_in_dim          | places chooses cheap
clamp                     | chooses cheap
concatenate               | places chooses cheap
convert_element_type      | places chooses casts cheap
cummax                    | chooses
cummin                    | chooses
dynamic_update_slice      | chooses cheap
gather                    | places chooses picks cheap
max                       | chooses cheap          | -          | bound
min                       | chooses cheap
neg                       | chooses cheap
pad                       | places chooses cheap fills pads
pvary                     | spreads chooses cheap varies
reduce_max                | chooses cheap reduces
reduce_min                | chooses cheap reduces
reduce_window_max         | chooses cheap
reduce_window_min         | chooses cheap
scatter                   | chooses cheap
scatter-max               | chooses cheap
scatter-min               | chooses cheap
select_n                  | chooses cheap fills    | -          | choice
sort                      | chooses
stack                     | places chooses cheap
tile                      | places chooses cheap
top_k                     | chooses
# Sums
add                       | adds_two cheap         | -          | bound
add_any                   | adds_two cheap
cumsum                    | adds_many              | axis
reduce                    | adds_many              | dimensions
reduce_sum                | adds_many cheap reduces | axes       | sum
reduce_window             | adds_many              | window_dimensions
reduce_window_sum         | adds_many              | window_dimensions
scatter-add               | adds_many cheap        | updates
scatter-sub               | adds_many cheap        | updates
select_and_scatter_add    | adds_many              | window_dimensions
sub                       | adds_two cheap         | -          | minus
# Has about the range of its operands
ceil                      | near cheap
div                       | divides near cheap     | -          | over
erf                       | near saturates cheap
floor                     | near cheap
logistic                  | near saturates cheap
mul                       | multiplies near cheap  | -          | times
round                     | near cheap
sign                      | near cheap
tanh                      | near saturates cheap
# Leaves, or bounds, their range
cosh                      | exponential cheap
cumlogsumexp              | exponential
cumprod                   | exponential
erfc                      | saturates cheap
exp                       | exponential cheap
exp2                      | exponential cheap
expm1                     | exponential cheap
integer_pow               | exponential cheap      | -          | squared
lgamma                    | exponential
log                       | exponential cheap
log1p                     | exponential cheap
log2                      | exponential cheap
pow                       | exponential cheap
reduce_prod               | exponential cheap reduces
scatter-mul               | exponential cheap
sinh                      | exponential cheap
square                    | exponential cheap      | -          | squared
# Products
conv_general_dilated      | product                | kernel
dot_general               | product outer cheap    | contracted
ragged_dot_general        | product                | contracted
scaled_dot                | product                | contracted
scaled_matmul_wrapper     | product                | last
# Bits
bitcast_convert_type      | of_bits
nextafter                 | of_bits
random_gamma              | of_bits
rng_uniform               | of_bits
# What no jaxpr shows
bcoo_dot_general          | opaque
bcoo_dot_general_sampled  | opaque
bcoo_spdot_general        | opaque
bcsr_dot_general          | opaque
call_exported             | opaque
call_tf                   | opaque
coo_matmat                | opaque
coo_matvec                | opaque
coo_spmm                  | opaque
coo_spmv                  | opaque
csr_matmat                | opaque
csr_matvec                | opaque
csr_spmm                  | opaque
csr_spmv                  | opaque
cudnn_fusion              | opaque
dot_product_attention_bwd_wrapper | opaque
dot_product_attention_fp8_bwd_wrapper | opaque
dot_product_attention_fp8_fwd_wrapper | opaque
dot_product_attention_fwd_wrapper | opaque
ffi_call                  | opaque
io_callback               | opaque once
mosaic_gpu_call           | opaque
pallas_call               | opaque
pure_callback             | opaque
spsolve                   | opaque
tpu_custom_call           | opaque
triton_kernel_call        | opaque
# Runs code that returns nothing
debug_callback            | once
debug_print               | once
# Holds programs
closed_call               | inlined calls          | -          | -         | jaxpr call_jaxpr
composite                 | calls                  | -          | -         | jaxpr
cond                      | branches               | -          | -         | branches
custom_jvp_call           | jvp cheap calls        | -          | -         | call_jaxpr
custom_linear_solve       | -                      | -          | -         | jaxprs.solve
custom_partitioning       | -                      | -          | -         | call
custom_vjp_call           | vjp calls              | -          | -         | call_jaxpr
custom_vmap_call          | calls                  | -          | -         | call
CustomRoot                | -                      | -          | -         | solve_jaxpr
eval_jaxpr                | inlined calls          | -          | -         | jaxpr call_jaxpr
jit                       | inlined cheap calls    | -          | -         | jaxpr
linear_call               | -                      | -          | -         | callee
remat2                    | keeps calls            | -          | -         | jaxpr
run_state                 | -                      | -          | -         | jaxpr
scan                      | scans                  | -          | -         | jaxpr
shard_map                 | maps                   | -          | -         | jaxpr
while                     | waits                  | -          | -         | cond_jaxpr body_jaxpr
xla_metadata_call         | calls                  | -          | -         | jaxpr
# Cheap, of any range
acos                      | cheap
acosh                     | cheap
and                       | cheap
argmax                    | cheap
argmin                    | cheap
asin                      | cheap
asinh                     | cheap
atan                      | cheap
atan2                     | cheap
atanh                     | cheap
cbrt                      | cheap
cos                       | cheap
eq                        | cheap
erf_inv                   | cheap
ge                        | cheap
gt                        | cheap
iota                      | cheap
is_finite                 | cheap
le                        | cheap
lt                        | cheap
ne                        | cheap
not                       | cheap
one_minus_square          | cheap
or                        | cheap
reduce_and                | cheap
reduce_or                 | cheap
rem                       | cheap
rsqrt                     | cheap                  | -          | inverse root
sin                       | cheap
sqrt                      | cheap                  | -          | root
tan                       | cheap
xor                       | cheap
"""

# Operations of which nothing is assumed, and that run no program: known all the same,
# so `dtype_report` does not list them as what it cannot look into.
_OTHERS = """
accum_grad_in_ref addupdate after_all approx_top_k axis_index bcoo_extract
bcoo_fromdense bcoo_sort_indices bcoo_sum_duplicates bcoo_todense bcoo_transpose
bcsr_extract bcsr_fromdense bcsr_todense bessel_i0e bessel_i1e broadcast_to cholesky
cholesky_update clz complex conj coo_fromdense coo_todense create_token csr_fromdense
csr_todense device_put digamma dim_as_value dimension_size
eig eigh empty empty2 empty_ref fft free_ref freeze from_edtype geqp3 geqrf get
hessenberg householder_product igamma igamma_grad_a igammac imag iota_2x32_shape
layout_constraint lu lu_pivots_to_permutation mulhi new_ref ormqr pbroadcast
platform_index polygamma population_count qr ragged_all_to_all random_bits random_clone
random_fold_in random_seed random_split random_unwrap random_wrap real
reciprocal reduce_precision reduce_xor regularized_incomplete_beta rng_bit_generator
schur select_and_gather_add select_and_scatter shift_left shift_right_arithmetic
shift_right_logical svd swap symmetric_product threefry2x32 tie to_edtype
triangular_solve tridiagonal tridiagonal_solve with_memory_space_constraint zeros_like
zeta
"""


def _row(line: str) -> tuple[str, Operation]:
    """The name in a line of the table, and its row; a cell of `-` is empty."""
    cells = [cell.strip().removeprefix("-") for cell in line.split(" | ")]
    name, words, terms, formula, programs = cells + [""] * (5 - len(cells))
    flags = (Is[word.upper()] for word in words.split())
    every = functools.reduce(Is.__or__, flags, Is(0))
    return name, Operation(every, terms, formula, tuple(programs.split()))


TABLE = dict.fromkeys(_OTHERS.split(), Operation(programs=())) | dict(
    _row(line) for line in _ROWS.splitlines() if line and not line.startswith("#")
)
"""The row of each operation, by the operation's name in JAX."""

_UNKNOWN = Operation()


def operation(eqn: Any) -> Operation:
    """The row of an equation's operation; the defaults, if the table has none."""
    return TABLE.get(name_of(eqn), _UNKNOWN)


def traits(eqn: Any) -> Is:
    """The traits of an equation's operation."""
    return operation(eqn).traits


def traits_of(name: str) -> Is:
    """The traits of the operation of this name; `Is(0)` if it is not in the table."""
    return TABLE.get(name, _UNKNOWN).traits
