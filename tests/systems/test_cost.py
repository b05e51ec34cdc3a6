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
from steps import by_apply_gradients, by_update

import optax_lossscale as ols
from optax_lossscale._arrays.finite import norm_and_all_finite

SGD = optax.sgd(1e-2, momentum=0.9)
ADAMW = optax.adamw(1e-3)
PARAMS = {f"w{i}": jnp.ones((128, 64)) for i in range(4)}
PARAMS_BYTES = sum(4 * p.size for p in PARAMS.values())
CHECKING = {"dynamic": ols.DynamicLossScale(), "headroom": ols.HeadroomLossScale()}
SCALES = CHECKING | {"none": None, "fixed": 128}
each_scale = pytest.mark.parametrize("loss_scale", SCALES.values(), ids=SCALES)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


def compiled_step(take, state, dtype):
    """The compiled step, with parameters and state donated in the order of the results.

    JAX pairs donated arrays with results of their shape in order: in another order, a
    parameter would be written over a moment, and both would be copied.
    """

    def step(params, state, grads):
        return take(grads, state, params)

    grads = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(PARAMS, state, grads)
    return lowered.compile(AS_USERS_DO)


@functools.cache
def plain(inner, dtype):
    """The step without loss scaling, which carries what else the state holds unchanged."""

    def step(grads, state, params):
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, inner_state = inner.update(grads, state.inner_state, params)
        params = optax.apply_updates(params, updates)
        return params, state._replace(inner_state=inner_state)

    tx = ols.with_loss_scale(inner, None, skip=None)
    return compiled_step(step, tx.init(PARAMS), dtype)


def ours(inner, loss_scale, dtype, way=by_apply_gradients, skip="nonfinite"):
    tx = ols.with_loss_scale(inner, loss_scale, skip=skip)
    return compiled_step(way(tx), tx.init(PARAMS), dtype)


def conditionals(compiled):
    return compiled.as_text().count(" conditional(")


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


def assert_the_check_is_one_read(inner, loss_scale, dtype):
    bare, step = plain(inner, dtype), ours(inner, loss_scale, dtype)
    assert temp_bytes(step) - temp_bytes(bare) <= 0.03 * PARAMS_BYTES
    grads_bytes = PARAMS_BYTES * jnp.dtype(dtype).itemsize / 4
    extra = bytes_accessed(step) - bytes_accessed(bare)
    # On a CPU, a loss scale that measures the gradients reads them once more.
    reads = 2 if loss_scale is CHECKING["headroom"] else 1
    assert 0.99 * grads_bytes <= extra <= 1.05 * reads * grads_bytes
    assert conditionals(step) == 1


@each_scale
def test_the_check_costs_one_read_of_the_gradients(loss_scale):
    assert_the_check_is_one_read(ADAMW, loss_scale, "float32")


@each_dtype
@pytest.mark.parametrize("inner", [SGD, optax.lion(1e-4)], ids=["sgd", "lion"])
def test_so_it_does_in_each_dtype_and_with_other_optimizers(inner, dtype):
    assert_the_check_is_one_read(inner, CHECKING["dynamic"], dtype)


@each_dtype
def test_a_rule_of_skipping_takes_its_norm_in_the_pass_of_the_check(dtype):
    checked = ours(ADAMW, "dynamic", dtype)
    ruled = ours(ADAMW, "dynamic", dtype, skip=ols.skips.spikes(window=16))
    # for the window
    assert bytes_accessed(ruled) - bytes_accessed(checked) <= 0.05 * PARAMS_BYTES
    assert temp_bytes(ruled) - temp_bytes(checked) <= 0.03 * PARAMS_BYTES
    assert conditionals(ruled) == 1


@each_dtype
def test_update_writes_the_updates_besides(dtype):
    bare, step = plain(ADAMW, dtype), ours(ADAMW, "dynamic", dtype, by_update)
    assert temp_bytes(step) - temp_bytes(bare) <= 1.03 * PARAMS_BYTES
    # Written in either branch and read once, besides the check's read of the gradients.
    grads_bytes = PARAMS_BYTES * jnp.dtype(dtype).itemsize / 4
    limit = 3.05 * PARAMS_BYTES + 1.05 * grads_bytes
    assert bytes_accessed(step) - bytes_accessed(bare) <= limit
    assert conditionals(step) == 1


@each_dtype
def test_without_loss_scaling_and_checks_the_program_is_the_plain_one(dtype):
    step = ours(ADAMW, None, dtype, skip=None)
    assert anonymous(step) == anonymous(plain(ADAMW, dtype))


@each_dtype
def test_a_fixed_scale_that_checks_nothing_is_a_constant_in_the_plain_program(dtype):
    bare, step = plain(ADAMW, dtype), ours(ADAMW, 128, dtype, skip=None)
    assert bytes_accessed(step) == bytes_accessed(bare)
    assert temp_bytes(step) == temp_bytes(bare)
    assert conditionals(step) == 0


CHECKS = {
    "all_finite": ols.all_finite,
    "norm": norm_and_all_finite,
    "unscaled": lambda grads: ols.all_finite(ols.FixedLossScale(3).unscale(grads)),
    "headroom": lambda grads: ols.HeadroomLossScale().update(grads)[0],
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@each_dtype
def test_the_check_alone_reads_once_and_allocates_nothing(check, dtype):
    grads = {"w": jnp.ones((1000, 320), dtype), "b": [jnp.ones((64, 64), dtype)] * 9}
    compiled = jax.jit(check).lower(grads).compile(AS_USERS_DO)
    size = sum(g.nbytes for g in jax.tree.leaves(grads))
    reads = 2 if check is CHECKS["headroom"] else 1
    assert temp_bytes(compiled) <= 0.02 * size
    assert bytes_accessed(compiled) <= 1.05 * reads * size


def test_no_kernel_takes_an_argument_for_every_leaf():
    """Such kernels made the time to compile quadratic in the number of leaves."""
    grads = [jnp.ones((40, 3))] * 200
    text = jax.jit(ols.all_finite).lower(grads).compile(AS_USERS_DO).as_text()
    fused = [line for line in re.findall(r"\n%.*\{\n", text) if "ENTRY" not in line]
    assert fused
    assert max(line.count("param_") for line in fused if "concatenate" not in line) < 10


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=["rows", "columns"])
@pytest.mark.parametrize("loss_scale", CHECKING.values(), ids=CHECKING)
def test_sharded_jit_communicates_one_scalar_a_leaf_at_once(
    loss_scale, axis_type, spec
):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    params = jax.device_put(PARAMS, NamedSharding(mesh, spec))
    tx = ols.with_loss_scale(SGD, loss_scale)
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)
        compiled = jax.jit(tx.apply_gradients).lower(params, state, params).compile()
    found = collectives(compiled)
    # the norm, and of headroom the largest
    assert len(found) == (1 if loss_scale is CHECKING["dynamic"] else 2)
    for shapes in found:
        assert set(re.findall(r"\w+\[[\d,]*\]", shapes)) == {"f32[]"}


@pytest.mark.parametrize("way", ["pmap", "shard_map"])
@pytest.mark.parametrize("loss_scale", CHECKING.values(), ids=CHECKING)
def test_replicas_agree_by_one_scalar(loss_scale, way):
    tx = ols.with_loss_scale(ADAMW, loss_scale, axis_name="data")
    arguments = (PARAMS, tx.init(PARAMS), PARAMS)
    if way == "pmap":
        stacked = jax.tree.map(lambda x: jnp.stack([x] * 4), arguments)
        lowered = jax.pmap(tx.apply_gradients, axis_name="data").lower(*stacked)
    else:
        mesh = jax.make_mesh((4,), ("data",))
        step = lambda *args: tx.apply_gradients(*args)
        step = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())
        lowered = jax.jit(step).lower(*arguments)
    is_dynamic = loss_scale is CHECKING["dynamic"]
    expected = "f32[]" if is_dynamic else "(f32[], f32[])"
    assert collectives(lowered.compile()) == [expected]


def test_the_check_is_lowered_for_the_platform_at_hand():
    traced = jax.jit(ols.all_finite).trace([jnp.ones((40, 3))])
    lowered = lambda platform: traced.lower(lowering_platforms=(platform,)).as_text()
    assert "optimization_barrier" in lowered("cpu")
    assert "optimization_barrier" not in lowered("cuda")
