"""What a step costs on the GPUs and the TPU that it is compiled for; nothing is run.

Skipped where the compilers are not installed; `.ci/accelerators` installs them.
"""

import functools
import runpy
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from benchmarks import _autocast, _hlo, _targets, _ways
from benchmarks._compiled import Case

DOORS = {"apply_gradients": _ways.apply_gradients, "update": _ways.update}
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


# More than a TPU keeps on the chip; none of it is ever allocated.
PARAMS = [struct(2048, 2048)] * 12
BATCH = struct(1024, 2048, dtype="float16")
# For eight devices, which takes a TPU's compiler longer.
FEWER_PARAMS = [struct(1024, 1024)] * 4
LARGER_BATCH = struct(2048, 1024, dtype="float16")


def mlp(params, x):
    """The loss of a model that casts its parameters to float16 itself."""
    for w in params:
        x = jnp.tanh(x @ w.astype(jnp.float16))
    return jnp.mean(x.astype(jnp.float32) ** 2)


def compile_for(placement, function, *args):
    placed = _targets.place(args, placement)
    jitted = jax.jit(function, donate_argnums=(0, 1))
    return _hlo.of(jitted.lower(*placed).compile())


def optimizer_step(way, target, dtype):
    grads = [struct(*p.shape, dtype=dtype) for p in PARAMS]
    args = PARAMS, jax.eval_shape(way.init, PARAMS), grads
    return compile_for(target.device(), way.step, *args)


def whole_step(way, target):
    args = PARAMS, jax.eval_shape(way.init, PARAMS), BATCH
    return compile_for(target.device(), way.train(mlp), *args)


@functools.cache
def plain_optimizer_step(inner, target, dtype):
    return optimizer_step(_ways.plain(inner), target, dtype)


def stays_in_place(ours, plain, share=0.05):
    """At most that share of the parameters' bytes more, and no parameter is copied."""
    is_small = ours.temp_bytes - plain.temp_bytes <= share * nbytes(PARAMS)
    return is_small and all(copy.nbytes < nbytes(PARAMS[0]) for copy in ours.copies)


def over_targets(*targets):
    return pytest.mark.parametrize("target", targets, ids=lambda target: target.name)


@pytest.fixture(autouse=True)
def _compiler(request):
    target = request.getfixturevalue("target")
    if not target.is_installed:
        pytest.skip(f"no compiler for {target.name} is installed")


over_h100 = over_targets(_targets.H100)
over_two = over_targets(_targets.H100, _targets.V5E)
over_doors = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
over_skips = pytest.mark.parametrize(
    "skip", ["nonfinite", ols.skips.spikes()], ids=["check", "rule"]
)


@over_targets(*_targets.TARGETS.values())
@pytest.mark.parametrize("loss_scale", [128, "dynamic", "headroom"])
@over_doors
def test_the_optimizer_step_stays_in_place(target, door, loss_scale):
    plain = plain_optimizer_step(ADAMW, target, "float16")
    ours = optimizer_step(door(ADAMW, loss_scale), target, "float16")
    assert stays_in_place(ours, plain)


@over_h100
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@over_skips
@over_doors
@pytest.mark.parametrize(("inner", "reads"), [(ADAMW, 1), (CLIPPED, 0)])
def test_the_gradients_are_read_once_more(target, inner, reads, door, skip, dtype):
    """A check, the norm of a rule and that of a clip inside take one pass together."""
    plain = plain_optimizer_step(inner, target, dtype)
    ours = optimizer_step(door(inner, skip=skip), target, dtype)
    once = sum(p.size for p in PARAMS) * jnp.dtype(dtype).itemsize
    assert ours.bytes_moved - plain.bytes_moved == pytest.approx(
        reads * once, abs=3e-3 * nbytes(PARAMS)
    )
    assert stays_in_place(ours, plain)


@over_two
@over_doors
def test_a_whole_float16_step_takes_the_memory_of_the_plain_one(target, door):
    plain = whole_step(_ways.plain(ADAMW), target)
    ours = whole_step(door(ADAMW), target)
    assert stays_in_place(ours, plain, share=0.15)
    if target is _targets.H100:
        assert ours.bytes_moved <= 1.06 * plain.bytes_moved


@over_targets(_targets.V5E)
def test_a_conditional_would_be_noticed(target):
    """What the tests above are for: they would not pass with the wrong branch."""
    plain = plain_optimizer_step(ADAMW, target, "float32")
    ours = optimizer_step(_ways.update(ADAMW, branch="cond"), target, "float32")
    assert not stays_in_place(ours, plain, share=0.9)
    assert ours.bytes_moved > 1.4 * plain.bytes_moved


def parallel_step(way, target, placement):
    """The program of each of eight devices, over which the batch is spread."""
    mesh = target.mesh()
    everywhere, by_rows = NamedSharding(mesh, P()), _targets.by_rows(mesh)
    gather = lambda w: lax.with_sharding_constraint(w.astype(jnp.float16), everywhere)
    gathered = lambda params, x: mlp([gather(w) for w in params], x)
    mean = lambda params, x: lax.pmean(mlp(params, x), "data")
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    step = {
        "data parallelism": way.train(mlp),
        "FSDP": way.train(gathered),
        "shard_map": jax.shard_map(way.train(mean), mesh=mesh, **specs),
    }[placement]
    is_matrix = lambda x: x.shape == FEWER_PARAMS[0].shape
    rows = lambda x: by_rows(x) if is_matrix(x) else everywhere
    carry = FEWER_PARAMS, jax.eval_shape(way.init, FEWER_PARAMS)
    placed = _targets.place(carry, rows if placement == "FSDP" else everywhere)
    batch = _targets.place(LARGER_BATCH, by_rows)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return _hlo.of(jitted.lower(*placed, batch).compile()).collectives


@over_two
@pytest.mark.parametrize("placement", ["data parallelism", "FSDP", "shard_map"])
@over_skips
@over_doors
def test_devices_agree_by_scalars(target, door, skip, placement):
    axis_name = "data" if placement == "shard_map" else None
    plain = parallel_step(_ways.plain(ADAMW), target, placement)
    ours = parallel_step(door(ADAMW, axis_name=axis_name, skip=skip), target, placement)
    scalars = 1 if skip == "nonfinite" else 2  # the flag, and the norm of a rule
    assert len(ours) - len(plain) <= scalars
    assert sum(o.nbytes for o in ours) - sum(o.nbytes for o in plain) <= 4 * scalars


# Memory and bytes moved over those of a cast by hand, at most.
WORST = {
    ("norms after the sums, as in BERT", "H100"): (1.05, 1.05),
    ("128k classes", "H100"): (1.05, 1.05),
    ("ResNet with batch norm", "H100"): (1.06, 1.09),
    ("recommender", "H100"): (1.05, 1.15),
    ("layers in a scan, kept by name", "H100"): (1.10, 1.05),
    ("Mamba", "H100"): (1.05, 1.05),
    ("mixture of experts", "v5e"): (1.05, 1.05),
}


@pytest.mark.parametrize(
    ("model", "target"), [(model, _targets.TARGETS[t]) for model, t in WORST], ids=str
)
def test_autocast_costs_about_what_a_cast_by_hand_does(target, model):
    of = lambda way: _autocast.costs(False, Case(model, way, target.name))
    ours, by_hand = of(_autocast.AUTOCAST), of(_autocast.BY_HAND)
    memory, moved = WORST[model, target.name]
    assert ours.memory <= memory * by_hand.memory
    assert ours.moved <= moved * by_hand.moved


@over_h100
def test_a_transformer_sends_what_it_does_with_a_cast_by_hand(target):
    of = lambda way: _autocast.costs(False, Case(_autocast.GATHERED, way, target.name))
    ours, by_hand = of(_autocast.AUTOCAST), of(_autocast.BY_HAND)
    assert ours.sent <= 1.02 * by_hand.sent
    assert ours.sent + ours.summed <= 1.5 * (by_hand.sent + by_hand.summed)


@over_h100
@pytest.mark.parametrize(
    ("section", "program", "row"),
    [("accelerators", "optimizer step", "JMP"), ("autocast", "whole step", "autocast")],
)
def test_a_section_compiles_its_programs_and_prints_its_table(
    target, section, program, row, tmp_path, monkeypatch, capsys
):
    argv = ["benchmarks", section, "--quick", "--out", str(tmp_path)]
    argv += ["--only", program, "--on", target.name]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_module("benchmarks", run_name="__main__")
    assert f"\n| {row} | " in capsys.readouterr().out
