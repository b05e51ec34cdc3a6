"""What a step costs, as the compiler reports it: no clock is read here."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from compiling import AS_USERS_DO
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import pairwise

import optax_lossscale as ols
from optax_lossscale._arrays.finite import norm_and_all_finite

OPTIMIZERS = {
    "sgd": optax.sgd(1e-2, momentum=0.9),
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-4),
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
PARAMS = {f"w{i}": jnp.ones((128, 64)) for i in range(4)}
PARAMS_BYTES = sum(4 * p.size for p in PARAMS.values())

CHECKING = {
    "dynamic": ols.DynamicLossScale(),
    "headroom": ols.HeadroomLossScale(),
}

over_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
over_optimizers = pytest.mark.parametrize("inner", OPTIMIZERS.values(), ids=OPTIMIZERS)


def compile_step(step, state, dtype):
    """The compiled `step(params, state, grads)`, parameters and state donated."""
    grads = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    return (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(PARAMS, state, grads)
        .compile(AS_USERS_DO)
    )


@functools.cache
def compile_plain(inner, dtype):
    """The step without loss scaling, which carries what else the state holds unchanged."""
    state = ols.with_loss_scale(inner, None, skip=None).init(PARAMS)

    def step(params, state, grads):
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, inner_state = inner.update(grads, state.inner_state, params)
        return optax.apply_updates(params, updates), state._replace(
            inner_state=inner_state
        )

    return compile_step(step, state, dtype)


def compile_ours(inner, loss_scale, dtype, way="apply_gradients", skip="nonfinite"):
    tx = ols.with_loss_scale(inner, loss_scale, skip=skip)

    def step(params, state, grads):
        if way == "apply_gradients":
            return tx.apply_gradients(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return compile_step(step, tx.init(PARAMS), dtype)


def conditionals(compiled):
    return len(re.findall(r" conditional\(", compiled.as_text()))


def collectives(compiled):
    """The shapes of what is communicated, one string for each collective operation."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    return re.findall(rf" = (.*?) (?:{kinds})(?:-start)?\(", compiled.as_text())


def temp_bytes(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def bytes_accessed(compiled):
    return compiled.cost_analysis()["bytes accessed"]


def anonymous(compiled):
    """The program's text without the names and source lines in it."""
    text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
    text = text[text.index("\n%") :]
    names = {}
    return re.sub(r"%[\w.-]+", lambda m: names.setdefault(m[0], f"%{len(names)}"), text)


@pairwise(
    loss_scale=CHECKING | {"none": None, "fixed": 128}, inner=OPTIMIZERS, dtype=DTYPES
)
def test_the_check_costs_one_read_of_the_gradients(loss_scale, inner, dtype):
    plain, ours = compile_plain(inner, dtype), compile_ours(inner, loss_scale, dtype)
    assert temp_bytes(ours) - temp_bytes(plain) <= 0.03 * PARAMS_BYTES
    grads_bytes = PARAMS_BYTES * jnp.dtype(dtype).itemsize / 4
    extra = bytes_accessed(ours) - bytes_accessed(plain)
    # On a CPU, a loss scale that measures the gradients reads them once more.
    reads = 2 if loss_scale is CHECKING["headroom"] else 1
    assert 0.99 * grads_bytes <= extra <= 1.05 * reads * grads_bytes
    assert conditionals(ours) == 1


@pytest.mark.slow
@pairwise(
    loss_scale={"none": None, "fixed": 128, "dynamic": ols.DynamicLossScale()},
    inner=OPTIMIZERS,
    dtype=DTYPES,
)
def test_a_rule_of_skipping_takes_its_norm_in_the_pass_of_the_check(
    loss_scale, inner, dtype
):
    checked = compile_ours(inner, loss_scale, dtype)
    ruled = compile_ours(inner, loss_scale, dtype, skip=ols.skips.spikes(window=16))
    grads_bytes = PARAMS_BYTES * jnp.dtype(dtype).itemsize / 4
    # for the window
    assert bytes_accessed(ruled) - bytes_accessed(checked) <= 0.1 * grads_bytes
    assert temp_bytes(ruled) - temp_bytes(checked) <= 0.03 * PARAMS_BYTES
    assert conditionals(ruled) == 1


@over_dtypes
def test_update_writes_the_updates_besides(dtype):
    adamw = OPTIMIZERS["adamw"]
    plain, ours = (
        compile_plain(adamw, dtype),
        compile_ours(adamw, "dynamic", dtype, "update"),
    )
    assert temp_bytes(ours) - temp_bytes(plain) <= 1.03 * PARAMS_BYTES
    # Written in either branch and read once, besides the check's read of the gradients.
    grads_bytes = PARAMS_BYTES * jnp.dtype(dtype).itemsize / 4
    limit = 3.05 * PARAMS_BYTES + 1.05 * grads_bytes
    assert bytes_accessed(ours) - bytes_accessed(plain) <= limit
    assert conditionals(ours) == 1


@over_dtypes
@over_optimizers
def test_without_loss_scaling_and_checks_the_program_is_the_plain_one(inner, dtype):
    ours = compile_ours(inner, None, dtype, skip=None)
    assert anonymous(ours) == anonymous(compile_plain(inner, dtype))


@over_dtypes
@over_optimizers
def test_a_fixed_scale_that_checks_nothing_is_a_constant_in_the_plain_program(
    inner, dtype
):
    plain, ours = (
        compile_plain(inner, dtype),
        compile_ours(inner, 128, dtype, skip=None),
    )
    assert bytes_accessed(ours) == bytes_accessed(plain)
    assert (
        ours.memory_analysis().temp_size_in_bytes
        == plain.memory_analysis().temp_size_in_bytes
    )
    assert conditionals(ours) == 0
    fusions = lambda compiled: compiled.as_text().count(" fusion(")
    assert fusions(ours) == fusions(plain)


@over_dtypes
def test_the_check_allocates_nothing(dtype):
    grads = {"w": jnp.ones((1000, 320), dtype), "b": [jnp.ones((64, 64), dtype)] * 9}
    for check in (
        ols.all_finite,
        lambda grads: ols.DynamicLossScale().update(
            ols.FixedLossScale(3).unscale(grads)
        ),
        lambda grads: ols.HeadroomLossScale().update(
            ols.FixedLossScale(3).unscale(grads)
        ),
        lambda grads: norm_and_all_finite(ols.FixedLossScale(3).unscale(grads)),
    ):
        compiled = jax.jit(check).lower(grads).compile(AS_USERS_DO)
        size = sum(g.nbytes for g in jax.tree.leaves(grads))
        assert temp_bytes(compiled) <= 0.02 * size
        assert bytes_accessed(compiled) <= 1.05 * size


@pytest.mark.parametrize("check", [ols.all_finite, norm_and_all_finite])
def test_no_kernel_takes_an_argument_for_every_leaf(check):
    """Such kernels made the time to compile quadratic in the number of leaves."""
    grads = [jnp.ones((40, 3))] * 200
    text = jax.jit(check).lower(grads).compile(AS_USERS_DO).as_text()
    fused = [line for line in re.findall(r"\n%.*\{\n", text) if "ENTRY" not in line]
    assert fused
    assert max(line.count("param_") for line in fused if "concatenate" not in line) < 10


def test_the_reciprocal_of_the_scale_is_one_argument_of_a_kernel():
    check = lambda loss_scale, grads: ols.all_finite(loss_scale.unscale(grads))
    compiled = jax.jit(check).lower(ols.DynamicLossScale(), PARAMS).compile(AS_USERS_DO)
    checking = [c for c in compiled.as_text().split("\n\n") if " is-finite(" in c]
    assert len(checking) == len(PARAMS)
    assert all(c.count(" parameter(") == 2 for c in checking)


@pairwise(
    loss_scale=CHECKING,
    axis_type={"auto": AxisType.Auto, "explicit": AxisType.Explicit},
    spec={"replicated": P(), "rows": P("data"), "columns": P(None, "data")},
)
def test_sharded_jit_communicates_one_scalar_a_leaf_at_once(
    loss_scale, axis_type, spec
):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    params = jax.device_put(PARAMS, NamedSharding(mesh, spec))
    tx = ols.with_loss_scale(OPTIMIZERS["sgd"], loss_scale)
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)
        compiled = jax.jit(tx.apply_gradients).lower(params, state, params).compile()
    found = collectives(compiled)
    kinds = 1 if loss_scale is CHECKING["dynamic"] else 2  # the norm, and the largest
    assert len(found) == (0 if spec == P() else kinds)
    for shapes in found:
        assert set(re.findall(r"\w+\[[\d,]*\]", shapes)) == {"f32[]"}


@pytest.mark.parametrize("way", ["pmap", "shard_map"])
@pytest.mark.parametrize("loss_scale", CHECKING.values(), ids=CHECKING)
def test_replicas_agree_by_one_scalar(loss_scale, way):
    tx = ols.with_loss_scale(optax.adamw(1e-3), loss_scale, axis_name="data")
    state = tx.init(PARAMS)
    step = lambda params, state, grads: tx.apply_gradients(grads, state, params)
    if way == "pmap":
        stacked = jax.tree.map(lambda x: jnp.stack([x] * 4), (PARAMS, state, PARAMS))
        compiled = jax.pmap(step, axis_name="data").lower(*stacked).compile()
    else:
        mesh = jax.make_mesh((4,), ("data",))
        step = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())
        compiled = jax.jit(step).lower(PARAMS, state, PARAMS).compile()
    is_dynamic = loss_scale is CHECKING["dynamic"]
    assert collectives(compiled) == ["f32[]" if is_dynamic else "(f32[], f32[])"]


def test_the_check_is_lowered_for_the_platform_at_hand():
    for check in (ols.all_finite, ols.HeadroomLossScale().update):
        traced = jax.jit(check).trace([jnp.ones((40, 3))])
        cpu, cuda = (
            traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda")
        )
        assert "optimization_barrier" in cpu
        assert "optimization_barrier" not in cuda
