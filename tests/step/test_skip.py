"""`skip=`: what else a step is skipped for, and that it is then skipped as by the loss scale."""

import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from pairs import one_in, pairwise, product, quick

import optax_lossscale as ols
from optax_lossscale import skips

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.25, 0.0])}
NORM = float(np.sqrt(1 + 4 + 0.25 + 9 + 0.0625))  # of gradients that are these
BAD = {"w": PARAMS["w"].at[0, 1].set(jnp.nan), "b": PARAMS["b"]}
LS = ols.DynamicLossScale(initial_scale=4, growth_interval=2)
each_scale = pytest.mark.parametrize("loss_scale", [None, 128, "dynamic", "headroom"])


def times(factor, tree=PARAMS):
    return jax.tree.map(lambda x: x * factor, tree)


def by_update(tx):
    def step(grads, state, params, **extra):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


DOORS = {"apply_gradients": lambda tx: tx.apply_gradients, "update": by_update}


class AtMost(skips.SkipRule):
    """Applies norms up to a limit, and remembers their sum, and that of the losses."""

    limit: float
    norms: jax.Array = ols.state_field(0.0)
    losses: jax.Array = ols.state_field(0.0)

    def decide(self, norm, value):
        losses = self.losses if value is None else self.losses + value
        return self.replace(norms=self.norms + norm, losses=losses), norm <= self.limit


class LossBelow(skips.SkipRule):
    """Needs the loss, and compares it with twice the smallest so far."""

    needs_value = True
    smallest: jax.Array = ols.state_field(2.0**100)

    def decide(self, norm, value):
        smallest = jnp.minimum(self.smallest, value)
        return self.replace(smallest=smallest), value < 2 * self.smallest


RULES = {
    "spikes": skips.spikes(),
    "threshold": skips.threshold(10.0),
    "own": AtMost(10.0),
    "own, of the loss": LossBelow(),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


class Scheduled(ols.LossScale):
    """Doubles at every step, and looks at nothing."""

    says: bool = True
    as_array: bool = False

    def adjust(self, grads_finite):
        return self.replace(loss_scale=2 * self())

    def update(self, grads, axis_name=None):
        return self.adjust(True), jnp.array(self.says) if self.as_array else self.says


class LooksAtNothing:
    """Has an `update`, and is no loss scale."""

    def update(self, grads, axis_name=None):
        return self, True


class Unchecked(ols.HeadroomLossScale):
    """Overrides the `update` that checks the gradients."""

    def update(self, grads, axis_name=None):
        return self, True


class Mixed(LooksAtNothing, ols.HeadroomLossScale):
    """Gets its `update` from the first of its base classes."""


UNCHECKED = {
    "none": None,
    "fixed": 128,
    "scheduled": Scheduled(initial_scale=4),
    "scheduled, an array": Scheduled(initial_scale=4, as_array=True),
    "overrides an update that checks": Unchecked(initial_scale=4),
    "mixes one in": Mixed(initial_scale=4),
}
CHECKED = {
    "dynamic": "dynamic",
    "headroom": "headroom",
}


@pairwise(
    loss_scale=UNCHECKED | CHECKED,
    branch={"platform's": None, "cond": "cond", "select": "select"},
    compiled={"compiled": True, "eager": False},
    door=[*DOORS],
    bad={"nan": jnp.nan, "inf": jnp.inf, "-inf": -jnp.inf},
)
def test_no_step_writes_what_is_not_finite_unless_asked_to(
    loss_scale, branch, compiled, door, bad
):
    tx = ols.with_loss_scale(optax.adam(0.1), loss_scale, branch=branch)
    step = jax.jit(DOORS[door](tx)) if compiled else DOORS[door](tx)
    params, state = step(times(2), tx.init(PARAMS), PARAMS)
    assert state.should_apply
    grads = {"w": PARAMS["w"].at[0, 1].set(bad), "b": PARAMS["b"]}
    skipped, after = step(grads, state, params)
    chex.assert_trees_all_equal(skipped, params)
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    assert not after.should_apply
    assert (after.skipped_steps, after.consecutive_skipped_steps) == (1, 1)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("loss_scale", UNCHECKED.values(), ids=UNCHECKED)
def test_asked_to_skip_nothing_what_checks_nothing_applies_everything(
    loss_scale, compiled
):
    tx = ols.with_loss_scale(optax.sgd(0.1), loss_scale, skip=None)
    step = jax.jit(tx.apply_gradients) if compiled else tx.apply_gradients
    params, state = step(BAD, tx.init(PARAMS), PARAMS, value=jnp.nan)
    assert state.should_apply
    assert state.skipped_steps == 0
    assert jnp.isnan(params["w"]).any()
    # What the loss scale became is kept, checked or not.
    assert state.loss_scale() == (
        8 if isinstance(loss_scale, Scheduled) else tx.init(PARAMS).loss_scale()
    )


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("branch", [None, "cond", "select"])
@pytest.mark.parametrize("loss_scale", UNCHECKED.values(), ids=UNCHECKED)
def test_asked_to_skip_nothing_each_form_applies_what_there_is(
    loss_scale, branch, compiled
):
    inner = optax.trace(0.9)
    tx = ols.with_loss_scale(inner, loss_scale, branch=branch, skip=None)
    step = jax.jit(tx.update) if compiled else tx.update
    updates, state = step(BAD, tx.init(PARAMS), PARAMS, value=jnp.inf)
    assert (
        jnp.isnan(updates["w"]).sum()
        == jnp.isnan(state.inner_state.trace["w"]).sum()
        == 1
    )


def test_a_loss_scale_that_looks_at_nothing_may_skip_and_change_all_the_same():
    for skip in (None, "nonfinite"):
        tx = ols.with_loss_scale(
            optax.sgd(0.1), Scheduled(initial_scale=4, says=False), skip=skip
        )
        params, state = tx.apply_gradients(PARAMS, tx.init(PARAMS), PARAMS)
        chex.assert_trees_all_equal(params, PARAMS)
        assert not state.should_apply
        assert state.loss_scale() == 8


def test_what_is_not_finite_is_skipped_unless_skip_says_otherwise():
    bad = lambda **skip: ols.with_loss_scale(optax.sgd(0.1), 128, **skip)
    applied = lambda tx: (
        tx.apply_gradients(BAD, tx.init(PARAMS), PARAMS)[1].should_apply
    )
    assert not applied(bad())
    assert not applied(bad(skip="nonfinite"))
    assert applied(bad(skip=None))


@pytest.mark.parametrize("loss_scale", ["dynamic", "headroom"])
def test_nonfinite_is_what_a_loss_scale_that_checks_does_anyway(loss_scale):
    ends = []
    for skip in (None, "nonfinite"):
        tx = ols.with_loss_scale(optax.sgd(0.1), loss_scale, skip=skip)
        params, state = PARAMS, tx.init(PARAMS)
        for grads in (PARAMS, BAD, PARAMS):
            params, state = jax.jit(tx.apply_gradients)(grads, state, params)
        ends.append((params, state._replace(gradient_norm=None)))
    chex.assert_trees_all_equal(*ends)


def test_without_a_rule_the_state_has_the_norm_if_it_is_measured():
    for skip, leaves in ((None, 3), ("nonfinite", 4)):
        state = ols.with_loss_scale(optax.sgd(0.1), LS, skip=skip).init(PARAMS)
        assert state.skip_rule is None
        assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(LS)) + leaves


@pairwise(
    door=[*DOORS],
    branch={"platform's": None, "cond": "cond", "select": "select"},
    compiled={"compiled": True, "eager": False},
    kind={"dynamic": "dynamic", "none": "none"},
)
def test_what_a_rule_skips_is_as_skipped_as_an_overflow(door, branch, compiled, kind):
    loss_scale = LS if kind == "dynamic" else None
    tx = ols.with_loss_scale(
        optax.adamw(1e-2), loss_scale, branch=branch, skip=AtMost(10.0)
    )
    step = jax.jit(DOORS[door](tx)) if compiled else DOORS[door](tx)
    scale = 4.0 if kind == "dynamic" else 1.0
    params, state = step(times(scale), tx.init(PARAMS), PARAMS, value=jnp.float32(1))
    assert state.should_apply
    old, new = {"mean": params["b"]}, {"mean": params["b"] + 1}
    skipped, after = step(times(100 * scale), state, params, value=jnp.float32(2))
    chex.assert_trees_all_equal(skipped, params)
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    chex.assert_trees_all_equal(ols.where_applied(after, new, old), old)
    assert not after.should_apply
    assert (after.skipped_steps, after.consecutive_skipped_steps) == (1, 1)
    assert after.skip_rule.skipped_by_rule == 1
    # it saw both
    np.testing.assert_allclose(after.skip_rule.norms, 101 * NORM, rtol=1e-6)
    assert after.skip_rule.losses == 3
    # A step that was not applied is no good step: the loss scale grows after the next
    # one.
    chex.assert_trees_all_equal(after.loss_scale, state.loss_scale)
    _, state = step(times(scale), after, params, value=1.0)
    assert state.should_apply
    assert state.loss_scale() == (8 if kind == "dynamic" else 1)
    assert (state.skipped_steps, state.consecutive_skipped_steps) == (1, 0)


@product(rule=RULES, bad={bad: bad for bad in ("gradients", "loss", "norm")})
def test_a_step_that_is_not_finite_teaches_a_rule_nothing(rule, bad):
    """The norm is infinite though the gradients are finite, where their squares are too large."""
    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=rule)
    step = jax.jit(tx.apply_gradients)
    params, state = step(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)
    grads = {"gradients": BAD, "loss": PARAMS, "norm": times(1e25)}[bad]
    skipped, after = step(grads, state, params, value=jnp.nan if bad == "loss" else 1.0)
    chex.assert_trees_all_equal(skipped, params)
    assert not after.should_apply
    assert after.gradient_norm == (NORM if bad == "loss" else jnp.inf)
    chex.assert_trees_all_equal(after.skip_rule, state.skip_rule)
    _, state = step(PARAMS, after, params, value=1.0)
    assert state.should_apply


@each_scale
def test_the_norm_is_that_of_the_unscaled_gradients_that_are_checked(loss_scale):
    w_alone = {"w": True, "b": False, "n": True}
    for mask, expected in ((None, NORM), (w_alone, float(np.sqrt(14.25)))):
        tx = ols.with_loss_scale(
            optax.sgd(0.1), loss_scale, mask=mask, skip=AtMost(10.0)
        )
        params = PARAMS | {"n": jnp.ones(3)}
        state = tx.init(params)
        grads = times(state.loss_scale()) | {"n": None}
        _, state = jax.jit(tx.apply_gradients)(grads, state, params)
        np.testing.assert_allclose(state.gradient_norm, expected, rtol=1e-6)
        assert state.gradient_norm.dtype == jnp.float32


@each_scale
def test_a_rule_that_skips_nothing_leaves_the_loss_scale_to_adapt_as_without_it(
    loss_scale,
):
    trajectories = []
    for skip in ("nonfinite", AtMost(1e3)):
        tx = ols.with_loss_scale(optax.set_to_zero(), loss_scale, skip=skip)
        step = jax.jit(tx.apply_gradients)
        params, state, scales = PARAMS, tx.init(PARAMS), []
        for factor in (1.0, 2.0, jnp.inf, 1.0, 1e-3, 1.0):
            params, state = step(times(factor * state.loss_scale()), state, params)
            scales.append(float(state.loss_scale()))
        trajectories.append(scales)
    assert trajectories[0] == trajectories[1]


GROWING = {
    "dynamic": ols.DynamicLossScale(8.0, growth_interval=1),
    "headroom": ols.HeadroomLossScale(8.0),
}


@product(loss_scale=GROWING, factor={"norm": 1.0, "norm beyond 2**64": 1e25})
def test_the_scale_stays_while_every_step_is_skipped_by_a_rule(loss_scale, factor):
    """Until an overflow, from which it learns as ever."""
    tx = ols.with_loss_scale(optax.sgd(0.1), loss_scale, skip=AtMost(1e-3))
    step = jax.jit(tx.apply_gradients)
    state = tx.init(PARAMS)
    for _ in range(5):
        _, state = step(times(8 * factor), state, PARAMS)
        assert not state.should_apply
        chex.assert_trees_all_equal(state.loss_scale, tx.init(PARAMS).loss_scale)
    _, state = step(BAD, state, PARAMS)
    expected = jax.jit(lambda ls: ls.update(BAD)[0])(tx.init(PARAMS).loss_scale)
    chex.assert_trees_all_close(state.loss_scale, expected)
    assert state.skipped_steps == 6


def test_a_spike_now_and_then_does_not_keep_the_scale_from_growing():
    loss_scale = ols.DynamicLossScale(8.0, growth_interval=4)
    tx = ols.with_loss_scale(optax.sgd(0.1), loss_scale, skip=AtMost(10.0))
    step, state = jax.jit(tx.apply_gradients), tx.init(PARAMS)
    for i in range(12):
        is_spike = i % 3 == 2
        _, state = step(
            times((10 if is_spike else 1) * state.loss_scale()), state, PARAMS
        )
        assert state.should_apply != is_spike
    assert state.skipped_steps == 4
    assert state.loss_scale() == 8 * 2**2  # of the eight steps that were applied


@each_rule
def test_a_rule_that_needs_the_loss_says_so_when_traced(rule):
    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=rule)
    trace = lambda **extra: jax.eval_shape(
        lambda: tx.apply_gradients(PARAMS, tx.init(PARAMS), PARAMS, **extra)
    )
    trace(value=jnp.float16(1.0))
    if not rule.needs_value:
        trace()
        return
    with pytest.raises(
        ValueError, match=r"needs the loss.*apply_gradients\(.*value=loss\)"
    ):
        trace()


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("float16", 1.5),
        ("bfloat16", 2.0**17),
        ("float32", 2.0**17 + 1),
        ("float64", 2.0**17 + 1),
    ],
)
def test_a_loss_of_any_dtype_reaches_the_rule_as_float32(dtype, number):
    class Noting(skips.SkipRule):
        def decide(self, norm, value):
            chex.assert_type([norm, value], jnp.float32)
            chex.assert_shape([norm, value], ())
            return self, value == number

    with jax.enable_x64(dtype == "float64"):
        tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=Noting())
        loss = jnp.asarray(number, dtype)
        _, state = jax.jit(tx.apply_gradients)(
            PARAMS, tx.init(PARAMS), PARAMS, value=loss
        )
        assert state.should_apply


def test_minimize_hands_the_loss_to_the_rule():
    tx = ols.with_loss_scale(optax.sgd(0.1), LS, skip=AtMost(1e3))
    loss_fn = lambda params: jnp.sum(params["w"] ** 2)
    loss, _, state = jax.jit(lambda s, p: tx.minimize(loss_fn, s, p))(
        tx.init(PARAMS), PARAMS
    )
    assert state.skip_rule.losses == loss


@each_rule
def test_steps_compile_once_and_keep_every_dtype_in_a_scan(rule):
    tx = ols.with_loss_scale(optax.adam(0.1), LS, skip=rule)
    step = jax.jit(chex.assert_max_traces(tx.apply_gradients, n=1))
    state = before = tx.init(PARAMS)
    for _ in range(3):
        _, state = step(PARAMS, state, PARAMS, value=jnp.float32(1))
    chex.assert_trees_all_equal_shapes_and_dtypes(state, before)
    assert not any(x.weak_type for x in jax.tree.leaves((state, before)))

    def body(carry, factor):
        params, state = tx.apply_gradients(
            times(factor), *carry[::-1], value=jnp.float32(1)
        )
        return (params, state), state.should_apply

    scan = jax.jit(lambda carry, factors: jax.lax.scan(body, carry, factors))
    (params, _), _ = scan((PARAMS, before), jnp.array([1.0, jnp.nan, 4.0]))
    assert ols.all_finite(params)


@each_rule
@pytest.mark.parametrize(
    "is_compiled", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_a_step_runs_under_jaxs_strictest_settings(rule, is_compiled):
    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=rule)
    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    step = jax.jit(tx.apply_gradients) if is_compiled else tx.apply_gradients
    with strict[0], strict[1], jax.debug_nans(True):
        _, state = step(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.float32(1))
    assert state.should_apply


DIFFERENTIATED = {
    **{name: (rule, None) for name, rule in RULES.items()},
    "headroom": (RULES["spikes"], "headroom"),
    "headroom alone": (None, "headroom"),
}


@pytest.mark.parametrize(
    "way", [jax.grad, pytest.param(jax.jacfwd, marks=pytest.mark.slow)]
)
@quick("options", DIFFERENTIATED, "spikes", "headroom")
def test_steps_are_differentiated_as_without_a_rule(options, way):
    skip, loss_scale = options

    def after_steps(learning_rate, skip, loss_scale):
        loss_fn = lambda params, x: 0.1 * jnp.sum((params["w"] * x) ** 2)
        tx = ols.with_loss_scale(optax.adam(learning_rate), loss_scale, skip=skip)

        def step(carry, x):
            _, params, state = tx.minimize(loss_fn, carry[1], carry[0], x)
            return (params, state), None

        xs = jnp.array([1.0, 1.1, 0.9])
        (params, _), _ = jax.lax.scan(
            step, ({"w": PARAMS["w"]}, tx.init({"w": PARAMS["w"]})), xs
        )
        return loss_fn(params, learning_rate)

    derivative = jax.jit(way(after_steps), static_argnums=(1, 2))
    expected = derivative(0.1, None, None)
    assert jnp.abs(expected) > 1e-3
    np.testing.assert_allclose(derivative(0.1, skip, loss_scale), expected, rtol=1e-4)


@each_rule
def test_what_a_rule_measures_is_not_differentiated(rule):
    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=rule)

    def ruled(x):
        return tx.apply_gradients(times(x), tx.init(PARAMS), PARAMS, value=x)[
            1
        ].skip_rule

    _, tangents = jax.jit(lambda x: jax.jvp(ruled, (x,), (1.0,)))(1.0)
    floats = [x for x in jax.tree.leaves(tangents) if x.dtype == jnp.float32]
    assert not any(x.any() for x in floats)


def test_what_init_returns_may_be_donated():
    rule = LossBelow()
    tx = ols.with_loss_scale(optax.adam(0.1), LS, skip=rule)
    step = jax.jit(lambda params, state: tx.apply_gradients(PARAMS, state, params, value=1.0),
                   donate_argnums=(0, 1))  # fmt: skip
    for _ in range(2):
        params, state = step(times(1), tx.init(PARAMS))
        step(params, state)


@each_rule
def test_members_under_vmap_each_go_by_their_own_norms(rule):
    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=rule)
    params = times(jnp.ones((2, 1, 1)), {"w": PARAMS["w"]})
    state = jax.vmap(tx.init)(params)
    step = jax.jit(jax.vmap(lambda g, s, p: tx.apply_gradients(g, s, p, value=1.0)))
    for i in range(12):
        noise = 1 + 0.1 * (i % 3)
        spikes = jnp.array([1.0, 1e3 if i == 11 else 1.0])[:, None, None]
        _, state = step(times(noise * spikes, params), state, params)
    np.testing.assert_array_equal(state.skip_rule.skipped_by_rule[0], 0)
    assert state.skip_rule.skipped_by_rule[1] == (not rule.needs_value)


REPLICAS = 4


@pytest.mark.parametrize("reduced", [False, True])
def test_replicas_go_by_the_largest_norm_and_the_mean_loss(reduced):
    tx = ols.with_loss_scale(
        optax.adam(1e-2), LS, axis_name="replica", skip=AtMost(10.0)
    )

    def step(params, state, factor):
        grads = times(factor * state.loss_scale())
        if reduced:
            grads = jax.lax.pmean(grads, "replica")
        return tx.apply_gradients(grads, state, params, value=factor)

    spread = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), tree)
    before = (spread(PARAMS), spread(tx.init(PARAMS)))
    step = jax.pmap(step, axis_name="replica")
    for factors, largest, mean in (([1, 1, 2, 2], 2, 1.5), ([1, 1, 1, 9], 9, 3)):
        params, state = step(*before, jnp.array(factors, jnp.float32))
        norm = NORM * (mean if reduced else largest)
        np.testing.assert_allclose(state.gradient_norm, [norm] * 4, rtol=1e-6)
        np.testing.assert_array_equal(state.skip_rule.losses, [mean] * 4)
        np.testing.assert_array_equal(state.should_apply, [norm <= 10] * 4)
        if norm > 10:
            chex.assert_trees_all_equal(params, before[0])


@pytest.mark.parametrize(
    "loss_scale", [LS, 4, "headroom"], ids=["dynamic", "fixed", "headroom"]
)
@pytest.mark.parametrize("skip", ["nonfinite", AtMost(1e9)], ids=["nonfinite", "rule"])
def test_an_overflow_on_one_replica_is_one_on_all(skip, loss_scale):
    tx = ols.with_loss_scale(optax.sgd(0.1), loss_scale, axis_name="replica", skip=skip)
    spread = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), tree)
    params, state = spread(PARAMS), spread(tx.init(PARAMS))
    grads = spread(PARAMS)
    grads["w"] = grads["w"].at[2, 0, 1].set(jnp.inf)
    after, state = jax.vmap(tx.apply_gradients, axis_name="replica")(
        grads, state, params
    )
    assert not state.should_apply.any()
    chex.assert_trees_all_equal(after, params)
    for leaf in jax.tree.leaves((state.loss_scale, state.skip_rule)):
        chex.assert_trees_all_equal(leaf, jnp.stack([leaf[0]] * REPLICAS))


@pytest.mark.parametrize("check_vma", [False, True])
def test_replicas_under_shard_map_agree(check_vma):
    mesh = jax.make_mesh((REPLICAS,), ("data",), axis_types=(AxisType.Auto,))
    tx = ols.with_loss_scale(optax.sgd(1e-2), LS, axis_name="data", skip=LossBelow())

    def step(params, state, x):
        mean_loss = lambda p, x: jax.lax.pmean(jnp.sum(p["w"] ** 2) * x[0], "data")
        loss, grads = ols.value_and_scaled_grad(mean_loss, state)(params, x)
        return tx.apply_gradients(grads, state, params, value=loss)

    spread = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    spread = jax.jit(spread)
    params, state = PARAMS, tx.init(PARAMS)
    decisions = []
    for i in range(8):
        params, state = spread(
            params, state, jnp.full(REPLICAS, 1e3 if i == 6 else 1.0)
        )
        decisions.append(bool(state.should_apply))
    assert decisions == [True] * 6 + [False, True]


def test_arrays_spread_by_the_compiler_have_the_norm_of_the_whole():
    mesh = jax.make_mesh((REPLICAS,), ("data",), axis_types=(AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, P("data"))
    params = {"w": jax.device_put(jnp.ones((8, 4)), sharding)}
    tx = ols.with_loss_scale(optax.sgd(0.1), LS, skip=AtMost(10.0))
    _, state = jax.jit(tx.apply_gradients)(times(4, params), tx.init(params), params)
    np.testing.assert_allclose(state.gradient_norm, 32**0.5, rtol=1e-6)


def test_a_skipped_micro_batch_is_left_out_of_its_window():
    tx = ols.with_loss_scale(
        optax.MultiSteps(optax.sgd(0.1), 2), None, skip=AtMost(10.0)
    )
    params, state = PARAMS, tx.init(PARAMS)
    step = jax.jit(tx.apply_gradients)
    for factor in (1.0, 100.0):
        params, state = step(times(factor), state, params)
    chex.assert_trees_all_equal(params, PARAMS)
    params, state = step(times(1.0), state, params)
    chex.assert_trees_all_close(params, times(0.9))


def test_a_state_of_another_rule_is_refused_and_the_remedy_works():
    old = ols.with_loss_scale(optax.sgd(0.1), LS)
    new = ols.with_loss_scale(optax.sgd(0.1), LS, skip=LossBelow())
    state = old.init(PARAMS)
    with pytest.raises(
        ValueError, match=r"_replace\(skip_rule=tx.init\(params\).skip_rule\)"
    ):
        new.apply_gradients(PARAMS, state, PARAMS, value=1.0)
    state = state._replace(skip_rule=new.init(PARAMS).skip_rule)
    _, state = new.apply_gradients(PARAMS, state, PARAMS, value=1.0)
    with pytest.raises(ValueError, match="transformation: None"):
        old.apply_gradients(PARAMS, state, PARAMS)


OTHERS = ["spikes", "NONFINITE", True, skips.spikes, 6.0, LS]


@pytest.mark.parametrize("skip", OTHERS, ids=lambda x: type(x).__name__)
def test_what_says_nothing_of_when_to_skip_is_refused(skip):
    with pytest.raises(ValueError, match="skip must be None, 'nonfinite', or a rule"):
        ols.with_loss_scale(optax.sgd(0.1), skip=skip)


def test_a_rule_that_becomes_another_is_refused():
    class Other(skips.SkipRule):
        def decide(self, norm, value):
            return skips.threshold(1.0), norm > 0

    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=Other())
    with pytest.raises(TypeError, match=r"Other\.decide returns .*self\.replace\(…\)"):
        tx.apply_gradients(PARAMS, tx.init(PARAMS), PARAMS)


def test_metrics_have_the_norm_and_what_the_rule_counts():
    tx = ols.with_loss_scale(optax.sgd(0.1), 128, skip=AtMost(2.0))
    assert "gradient_norm" not in ols.metrics(
        ols.with_loss_scale(optax.sgd(0.1), skip=None).init(PARAMS)
    )
    _, state = tx.apply_gradients(times(128), tx.init(PARAMS), PARAMS)
    found = jax.jit(ols.metrics)(state)
    np.testing.assert_allclose(found["gradient_norm"], NORM, rtol=1e-6)
    assert found["skipped_by_rule"] == found["skipped_steps"] == 1
    assert not found["should_apply"]
    assert "norms" in found
    assert all(jnp.shape(x) == () for x in found.values())


def test_check_says_that_it_was_the_rule():
    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=AtMost(2.0))
    state = tx.init(PARAMS)
    for _ in range(4):
        _, state = tx.update(PARAMS, state, PARAMS)
    ols.raise_if_stuck(state, max_consecutive_skips=4)
    with pytest.raises(
        ols.LossScaleError, match=r"AtMost has skipped 4 steps, .* norm of 3\.78"
    ):
        ols.raise_if_stuck(state, max_consecutive_skips=3)
    _, state = tx.update(BAD, state, PARAMS)
    with pytest.raises(ols.LossScaleError, match=r"AtMost has skipped 4 steps"):
        ols.raise_if_stuck(state, max_consecutive_skips=3)


@one_in(3, "rule", RULES)
def test_a_rule_is_saved_with_the_state(rule, tmp_path):
    tx = ols.with_loss_scale(optax.sgd(0.1), LS, skip=rule)
    _, state = tx.apply_gradients(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)
    chex.assert_trees_all_equal(pickle.loads(pickle.dumps(state)), state)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", tx.init(PARAMS))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    chex.assert_trees_all_equal(restored, state)
