"""How a step is skipped: by a conditional or by a select, in one trace."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import lowered_for
from pairs import pairwise

import optax_lossscale as ols
from optax_lossscale import skips

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.25, 0.0])}
LS = ols.DynamicLossScale(initial_scale=1024, growth_interval=3)
BAD = {"w": PARAMS["w"].at[0, 1].set(jnp.nan), "b": PARAMS["b"]}

each_branch = pytest.mark.parametrize("branch", [None, "cond", "select"])


def step_through(door, tx):
    def by_update(grads, state, params, **extra):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return tx.apply_gradients if door == "apply_gradients" else by_update


each_door = pytest.mark.parametrize("door", ["apply_gradients", "update"])


def spy(seen):
    """An inner optimizer that notes what numbers it is given, when it runs."""

    def update(updates, state, params=None, *, value=0.0, **extra):
        finite = ols.all_finite((updates, value))
        jax.debug.callback(lambda ok: seen.append(bool(ok)), finite)
        return updates, state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )


@each_door
@each_branch
def test_a_skipped_step_leaves_parameters_and_inner_state_bit_for_bit(branch, door):
    tx = ols.with_loss_scale(optax.adamw(1e-2), LS, branch=branch)
    step = jax.jit(step_through(door, tx))
    params, state = step(PARAMS, tx.init(PARAMS), PARAMS)
    skipped, after = step(BAD, state, params)
    chex.assert_trees_all_equal(skipped, params)
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    assert not after.should_apply
    assert (after.skipped_steps, after.loss_scale()) == (1, 512)


LEAVES = {f"w{i}": jnp.arange(1.0, 7.0).reshape(3, 2) / (i + 1) for i in range(6)}
BADS = [("w5", jnp.nan), ("w0", jnp.inf), ("w3", -jnp.inf), ("w4", 6e4)]
"""Each beside finite leaves. The last is a spike, or, scaled in float16, an overflow."""


def series(missing):
    """Gradients and losses of a step each."""
    for i in range(24):
        grads = {name: (1 + i % 3 / 16) * g for name, g in LEAVES.items()}
        if i % 4 == 3:
            name, bad = BADS[i // 4 % 4]
            grads[name] = grads[name].at[2, 1].set(bad)
        yield grads | dict.fromkeys(missing), jnp.float32(jnp.nan if i == 17 else i % 3)


@pairwise(
    form={"cuda": ("cuda", None), "tpu": ("tpu", None), "select": ("cpu", "select")},
    inner={
        "adamw": (jnp.float32, optax.adamw(1e-2)),
        "clipped": (
            jnp.float32,
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9)),
        ),
        # Of powers of two: what differs by an ulp may be rounded to another float16.
        "master weights": (
            jnp.float16,
            ols.with_master_weights(optax.sgd(2.0**-12, 0.5)),
        ),
    },
    rules={
        "dynamic": (LS, "nonfinite"),
        "headroom, spikes": (ols.HeadroomLossScale(1024), skips.spikes()),
        "fixed, nonfinite": (1024, "nonfinite"),
        "hysteresis, threshold": (
            ols.DynamicLossScale(1024, hysteresis=2),
            skips.threshold(1e4),
        ),
    },
    missing={"none missing": (), "two missing": ("w1", "w2")},
    door=["apply_gradients", "update"],
)
def test_each_form_takes_the_steps_that_a_conditional_takes(
    form, inner, rules, missing, door
):
    (platform, branch), (dtype, inner), (loss_scale, skip) = form, inner, rules
    make = functools.partial(ols.with_loss_scale, inner, loss_scale, skip=skip)
    expected = jax.jit(step_through(door, tx := make(branch="cond")))
    step = lowered_for(platform, step_through(door, make(branch=branch)))
    params = {name: (g / 4).astype(dtype) for name, g in LEAVES.items()}
    both = [(params, tx.init(params))] * 2
    for grads, value in series(missing):
        scaled = both[0][1].loss_scale.scale(grads)
        scaled = jax.tree.map(lambda g: g.astype(dtype), scaled)
        both = [
            take(scaled, state, params, value=value)
            for take, (params, state) in zip((expected, step), both, strict=True)
        ]
        # Of a parameter that comes near 0, ulps of what it was before are many.
        chex.assert_trees_all_close(*both, rtol=1e-5, atol=1e-7)
    params, state = both[1]
    assert ols.all_finite(params)
    assert 6 <= state.skipped_steps <= 8


@pytest.mark.parametrize(
    ("branch", "runs"),
    [("cond", 1), pytest.param(None, 1, marks=pytest.mark.about_cpus), ("select", 2)],
)
def test_inner_runs_at_a_skipped_step_under_a_select_alone_and_then_on_finite_numbers(
    branch, runs
):
    seen = []
    tx = ols.with_loss_scale(spy(seen), LS, branch=branch)
    step = jax.jit(tx.apply_gradients)
    params, state = step(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.float32(1.0))
    step(BAD, state, params, value=jnp.float32(jnp.nan))
    jax.effects_barrier()
    assert seen == [True] * runs


@each_door
@each_branch
def test_inner_is_traced_once(branch, door):
    traces = []

    def update(updates, state, params=None):
        traces.append(updates)
        return updates, state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    tx = ols.with_loss_scale(inner, LS, branch=branch)
    jax.jit(step_through(door, tx)).trace(PARAMS, tx.init(PARAMS), PARAMS)
    assert len(traces) == 1


@each_door
@pytest.mark.parametrize(
    ("branch", "conditionals"),
    [("cond", 1), pytest.param(None, 1, marks=pytest.mark.about_cpus), ("select", 0)],
)
def test_on_cpu_there_is_a_conditional_unless_a_select_is_asked_for(
    branch, conditionals, door
):
    tx = ols.with_loss_scale(optax.adamw(1e-2), LS, branch=branch)
    compiled = (
        jax.jit(step_through(door, tx)).lower(PARAMS, tx.init(PARAMS), PARAMS).compile()
    )
    assert compiled.as_text().count(" conditional(") == conditionals


@each_door
@each_branch
def test_one_exported_program_serves_every_platform(branch, door):
    tx = ols.with_loss_scale(optax.sgd(0.5), LS, branch=branch)
    step = step_through(door, tx)
    flat = lambda grads, leaves, params: jax.tree.leaves(
        step(grads, jax.tree.unflatten(structure, leaves), params)
    )
    leaves, structure = jax.tree.flatten(tx.init(PARAMS))
    platforms = ("cpu", "cuda", "tpu")
    exported = jax.export.export(jax.jit(flat), platforms=platforms)(
        PARAMS, leaves, PARAMS
    )
    for grads in (PARAMS, BAD):
        here = exported.call(grads, leaves, PARAMS)
        chex.assert_trees_all_close(here, flat(grads, leaves, PARAMS))


@each_branch
def test_vmapped_each_replica_decides_for_itself(branch):
    tx = ols.with_loss_scale(optax.adam(1e-2), LS, branch=branch)
    both = jax.tree.map(lambda *x: jnp.stack(x), PARAMS, BAD)
    states = jax.vmap(lambda _: tx.init(PARAMS))(jnp.arange(2))
    step = jax.jit(jax.vmap(tx.apply_gradients, in_axes=(0, 0, None)))
    params, states = step(both, states, PARAMS)
    np.testing.assert_array_equal(states.should_apply, [True, False])
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[1], params), PARAMS)


@pytest.mark.parametrize(
    "platform", [pytest.param("cpu", marks=pytest.mark.about_cpus), "cuda", "tpu"]
)
def test_a_branch_that_is_named_is_the_one_on_every_platform(platform):
    """And without a name it is a conditional on CPU alone."""
    forms = {"cond": True, "select": False, None: platform == "cpu"}
    for branch, is_conditional in forms.items():
        tx = ols.with_loss_scale(optax.sgd(0.1), LS, branch=branch)
        step = lowered_for(platform, tx.apply_gradients)
        text = step.lower(PARAMS, tx.init(PARAMS), PARAMS).compile().as_text()
        assert (" conditional(" in text) == is_conditional


def test_another_branch_is_refused():
    with pytest.raises(
        ValueError, match=r"branch must be 'cond', 'select', or None .*'switch'"
    ):
        ols.with_loss_scale(optax.sgd(0.1), branch="switch")  # pyrefly: ignore
