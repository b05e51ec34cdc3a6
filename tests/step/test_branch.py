"""How a step is skipped: by a conditional or by a select, in one trace."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from compiling import lowered_for
from steps import each_branch, each_way

import optax_lossscale as ols
from optax_lossscale import skips

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.25, 0.0])}
LS = ols.DynamicLossScale(initial_scale=1024, growth_interval=3)
BAD = {"w": PARAMS["w"].at[0, 1].set(jnp.nan), "b": PARAMS["b"]}
on_cpus = pytest.mark.about_cpus


def spy(seen):
    """An optimizer that notes when it runs, and whether its numbers are finite."""

    def update(updates, state, params=None, *, value=0.0, **extra):
        finite = ols.all_finite((updates, value))
        jax.debug.callback(lambda ok: seen.append(bool(ok)), finite)
        return updates, state

    init = lambda params: optax.EmptyState()
    return optax.GradientTransformationExtraArgs(init, update)


@each_way
@each_branch
def test_a_skipped_step_leaves_parameters_and_inner_state_bit_for_bit(branch, way):
    tx = ols.with_loss_scale(optax.adamw(1e-2), LS, branch=branch)
    for step in (way(tx), jax.jit(way(tx))):
        params, state = step(PARAMS, tx.init(PARAMS), PARAMS)
        skipped, after = step(BAD, state, params)
        chex.assert_trees_all_equal(skipped, params)
        chex.assert_trees_all_equal(after.inner_state, state.inner_state)
        assert not after.should_apply
        assert (after.skipped_steps, after.loss_scale()) == (1, 512)


SCALES = {
    "dynamic": (LS, "nonfinite"),
    "headroom, spikes": (ols.HeadroomLossScale(1024), skips.spikes()),
    "fixed": (1024, "nonfinite"),
    "hysteresis, threshold": (
        ols.DynamicLossScale(1024, hysteresis=2),
        skips.threshold(1e3),
    ),
}


@each_way
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize(("loss_scale", "skip"), SCALES.values(), ids=SCALES)
def test_a_select_takes_the_steps_that_a_conditional_takes(
    loss_scale, skip, platform, way
):
    """On "cuda" and "tpu" the select is their own choice."""
    make = lambda branch: ols.with_loss_scale(
        ols.with_master_weights(optax.sgd(2.0**-12, 0.5)),
        loss_scale,
        branch=branch,
        skip=skip,
    )
    tx = make("cond")
    other = make("select" if platform == "cpu" else None)
    steps = [jax.jit(way(tx)), lowered_for(platform, way(other))]
    params = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS)
    both = [(params, tx.init(params))] * 2
    spike = {"w": 1e4 * PARAMS["w"], "b": None}
    for grads in (PARAMS, BAD, PARAMS, spike, {"w": None, "b": BAD["b"]}, PARAMS):
        scaled = both[0][1].loss_scale.scale(grads)
        both = [
            step(scaled, state, params, value=1.0)
            for step, (params, state) in zip(steps, both, strict=True)
        ]
        chex.assert_trees_all_close(*both, rtol=1e-5)
    assert ols.all_finite(both[0][0])


RUNS = [("cond", 1), pytest.param(None, 1, marks=on_cpus), ("select", 2)]


@pytest.mark.parametrize(("branch", "runs"), RUNS)
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


@each_way
@each_branch
def test_inner_is_traced_once(branch, way):
    traces = []

    def update(updates, state, params=None):
        traces.append(updates)
        return updates, state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    tx = ols.with_loss_scale(inner, LS, branch=branch)
    jax.jit(way(tx)).trace(PARAMS, tx.init(PARAMS), PARAMS)
    assert len(traces) == 1


@pytest.mark.parametrize(
    "platform", [pytest.param("cpu", marks=on_cpus), "cuda", "tpu"]
)
def test_a_branch_that_is_named_is_the_one_on_every_platform(platform):
    """And without a name it is a conditional on CPU alone."""
    forms = {"cond": True, "select": False, None: platform == "cpu"}
    for branch, is_conditional in forms.items():
        tx = ols.with_loss_scale(optax.sgd(0.1), LS, branch=branch)
        step = lowered_for(platform, tx.apply_gradients)
        text = step.lower(PARAMS, tx.init(PARAMS), PARAMS).compile().as_text()
        assert (" conditional(" in text) == is_conditional


@each_branch
def test_under_vmap_each_member_decides_for_itself(branch):
    tx = ols.with_loss_scale(optax.adam(1e-2), LS, branch=branch)
    both = jax.tree.map(lambda *x: jnp.stack(x), PARAMS, BAD)
    states = jax.vmap(lambda _: tx.init(PARAMS))(jnp.arange(2))
    step = jax.jit(jax.vmap(tx.apply_gradients, in_axes=(0, 0, None)))
    params, states = step(both, states, PARAMS)
    assert states.should_apply.tolist() == [True, False]
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[1], params), PARAMS)
