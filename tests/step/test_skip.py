"""`skip=`: what a step is skipped for, and that a rule skips as an overflow does."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from steps import each_way

import optax_lossscale as ols
from optax_lossscale import skips

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.25, 0.0])}
NORM = float(np.sqrt(1 + 4 + 0.25 + 9 + 0.0625))  # of gradients that are these
BAD = {"w": PARAMS["w"].at[0, 1].set(jnp.nan), "b": PARAMS["b"]}
LS = ols.DynamicLossScale(initial_scale=4, growth_interval=2)


def times(factor, tree=PARAMS):
    return jax.tree.map(lambda x: x * factor, tree)


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


class Scheduled(ols.LossScale):
    """Doubles at every step, and looks at nothing."""

    def adjust(self, grads_finite):
        return self.replace(loss_scale=2 * self())

    def update(self, grads, axis_name=None):
        return self.adjust(True), True


UNCHECKED = {"none": None, "fixed": 128, "scheduled": Scheduled(initial_scale=4)}
CHECKED = {"dynamic": "dynamic", "headroom": "headroom"}


def each(**cases):
    [(name, by_id)] = cases.items()
    return pytest.mark.parametrize(name, by_id.values(), ids=by_id)


@each(loss_scale=UNCHECKED | CHECKED)
def test_what_is_not_finite_is_skipped_whatever_the_loss_scale(loss_scale):
    tx = ols.with_loss_scale(optax.adam(0.1), loss_scale)
    step = jax.jit(tx.apply_gradients)
    params, state = step(times(2), tx.init(PARAMS), PARAMS)
    assert state.should_apply
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        grads = {"w": PARAMS["w"].at[0, 1].set(bad), "b": PARAMS["b"]}
        skipped, after = step(grads, state, params)
        chex.assert_trees_all_equal(skipped, params)
        chex.assert_trees_all_equal(after.inner_state, state.inner_state)
        assert not after.should_apply
        assert (after.skipped_steps, after.consecutive_skipped_steps) == (1, 1)


@each(loss_scale=UNCHECKED)
def test_with_skip_none_a_loss_scale_that_checks_nothing_applies_everything(loss_scale):
    tx = ols.with_loss_scale(optax.sgd(0.1), loss_scale, skip=None)
    step = jax.jit(tx.apply_gradients)
    params, state = step(BAD, tx.init(PARAMS), PARAMS, value=jnp.nan)
    assert state.should_apply
    assert state.skipped_steps == 0
    assert jnp.isnan(params["w"]).any()
    assert state.gradient_norm is None
    is_scheduled = isinstance(loss_scale, Scheduled)
    assert state.loss_scale() == (8 if is_scheduled else tx.init(()).loss_scale())


# Rules


@each_way
@pytest.mark.parametrize(("loss_scale", "scale"), [(LS, 4.0), (None, 1.0)])
def test_what_a_rule_skips_is_as_skipped_as_an_overflow(way, loss_scale, scale):
    tx = ols.with_loss_scale(optax.adamw(1e-2), loss_scale, skip=AtMost(10.0))
    step = jax.jit(way(tx))
    params, state = step(times(scale), tx.init(PARAMS), PARAMS, value=1.0)
    assert state.should_apply
    skipped, after = step(times(100 * scale), state, params, value=2.0)
    chex.assert_trees_all_equal(skipped, params)
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    assert ols.where_applied(after, 1.0, 2.0) == 2
    assert not after.should_apply
    assert (after.skipped_steps, after.consecutive_skipped_steps) == (1, 1)
    assert after.skip_rule.skipped_by_rule == 1
    np.testing.assert_allclose(after.skip_rule.norms, 101 * NORM, rtol=1e-6)
    assert after.skip_rule.losses == 3


@pytest.mark.parametrize("bad", ["gradients", "loss", "norm"])
def test_a_step_that_is_not_finite_teaches_a_rule_nothing(bad):
    """The norm overflows where the squares of finite gradients are too large."""
    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=AtMost(10.0))
    params, state = tx.apply_gradients(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)
    grads = {"gradients": BAD, "loss": PARAMS, "norm": times(1e25)}[bad]
    value = jnp.nan if bad == "loss" else 1.0
    skipped, after = tx.apply_gradients(grads, state, params, value=value)
    chex.assert_trees_all_equal(skipped, params)
    assert not after.should_apply
    chex.assert_trees_all_equal(after.skip_rule, state.skip_rule)


@pytest.mark.parametrize("mask", [None, {"w": True, "b": False, "n": True}])
def test_the_norm_is_that_of_the_unscaled_gradients_that_are_checked(mask):
    tx = ols.with_loss_scale(optax.sgd(0.1), LS, mask=mask)
    params = PARAMS | {"n": jnp.ones(3)}
    grads = times(4) | {"n": None}
    _, state = jax.jit(tx.apply_gradients)(grads, tx.init(params), params)
    expected = NORM if mask is None else np.sqrt(14.25)
    np.testing.assert_allclose(state.gradient_norm, expected, rtol=1e-6)
    assert state.gradient_norm.dtype == jnp.float32


@each(
    loss_scale={
        "dynamic": ols.DynamicLossScale(8.0, growth_interval=1),
        "headroom": ols.HeadroomLossScale(8.0),
    }
)
def test_the_scale_stays_while_every_step_is_skipped_by_a_rule(loss_scale):
    """Until an overflow, from which it learns as ever."""
    tx = ols.with_loss_scale(optax.sgd(0.1), loss_scale, skip=AtMost(1e-3))
    step = jax.jit(tx.apply_gradients)
    state = first = tx.init(PARAMS)
    for _ in range(3):
        _, state = step(times(8), state, PARAMS)
        assert not state.should_apply
        chex.assert_trees_all_equal(state.loss_scale, first.loss_scale)
    _, state = step(BAD, state, PARAMS)
    assert state.loss_scale() == 4


def test_a_spike_now_and_then_does_not_keep_the_scale_from_growing():
    loss_scale = ols.DynamicLossScale(8.0, growth_interval=4)
    tx = ols.with_loss_scale(optax.sgd(0.1), loss_scale, skip=AtMost(10.0))
    step, state = jax.jit(tx.apply_gradients), tx.init(PARAMS)
    for i in range(12):
        is_spike = i % 3 == 2
        grads = times((10 if is_spike else 1) * state.loss_scale())
        _, state = step(grads, state, PARAMS)
        assert state.should_apply != is_spike
    assert state.loss_scale() == 8 * 2**2  # of the eight steps that were applied


def test_a_rule_that_needs_the_loss_says_so():
    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=LossBelow())
    _, state = tx.apply_gradients(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)
    with pytest.raises(ValueError, match=r"needs the loss.*apply_gradients\(.*value="):
        tx.apply_gradients(PARAMS, state, PARAMS)


@pytest.mark.parametrize(("dtype", "number"), [("float16", 1.5), ("bfloat16", 2.0**17)])
def test_a_loss_of_any_dtype_reaches_the_rule_as_float32(dtype, number):
    class Noting(skips.SkipRule):
        def decide(self, norm, value):
            chex.assert_type([norm, value], jnp.float32)
            return self, value == number

    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=Noting())
    value = jnp.asarray(number, dtype)
    _, state = tx.apply_gradients(PARAMS, tx.init(PARAMS), PARAMS, value=value)
    assert state.should_apply


RULES = {"spikes": skips.spikes(), "threshold": skips.threshold(10.0), "own": AtMost(9)}


@each(rule=RULES)
def test_steps_compile_once_and_a_scan_carries_the_rule(rule):
    tx = ols.with_loss_scale(optax.adam(0.1), LS, skip=rule)
    step = jax.jit(chex.assert_max_traces(tx.apply_gradients, n=1))

    def body(carry, factor):
        return step(times(factor), *carry[::-1], value=1.0), None

    state = tx.init(PARAMS)
    (params, after), _ = jax.lax.scan(body, (PARAMS, state), jnp.array([1, jnp.nan, 4]))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert not any(x.weak_type for x in jax.tree.leaves(after))
    assert ols.all_finite(params)


def test_steps_are_differentiated_as_without_a_rule_and_the_rule_is_not():
    def after_steps(learning_rate, skip, loss_scale):
        loss_fn = lambda params, x: 0.1 * jnp.sum((params["w"] * x) ** 2)
        tx = ols.with_loss_scale(optax.adam(learning_rate), loss_scale, skip=skip)
        params, state = {"w": PARAMS["w"]}, tx.init({"w": PARAMS["w"]})
        for x in (1.0, 1.1, 0.9):
            _, params, state = tx.minimize(loss_fn, state, params, x)
        return loss_fn(params, learning_rate), state

    derivative = jax.grad(after_steps, has_aux=True)
    expected, _ = derivative(0.1, None, None)
    assert jnp.abs(expected) > 1e-3
    ruled, _ = derivative(0.1, skips.spikes(), "headroom")
    np.testing.assert_allclose(ruled, expected, rtol=1e-4)
    tangents = jax.jvp(lambda x: after_steps(x, AtMost(9.0), None)[1], (0.1,), (1.0,))[
        1
    ]
    assert tangents.skip_rule.norms == tangents.gradient_norm == 0


REPLICAS = 4


def test_replicas_go_by_the_largest_norm_and_the_mean_loss():
    tx = ols.with_loss_scale(
        optax.adam(1e-2), LS, axis_name="replica", skip=AtMost(10.0)
    )

    def step(params, state, factor):
        return tx.apply_gradients(times(4 * factor), state, params, value=factor)

    spread = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), tree)
    before = (spread(PARAMS), spread(tx.init(PARAMS)))
    step = jax.pmap(step, axis_name="replica")
    for factors, largest, mean in (([1, 1, 2, 2], 2, 1.5), ([1, 1, 1, 9], 9, 3)):
        params, state = step(*before, jnp.array(factors, jnp.float32))
        np.testing.assert_allclose(state.gradient_norm, [largest * NORM] * 4, rtol=1e-6)
        np.testing.assert_array_equal(state.skip_rule.losses, [mean] * 4)
        np.testing.assert_array_equal(state.should_apply, [largest < 9] * 4)
    chex.assert_trees_all_equal(params, before[0])


@pytest.mark.parametrize("check_vma", [False, True])
def test_replicas_under_shard_map_go_by_one_loss(check_vma):
    mesh = jax.make_mesh((REPLICAS,), ("data",), axis_types=(AxisType.Auto,))
    tx = ols.with_loss_scale(optax.sgd(1e-2), LS, axis_name="data", skip=LossBelow())

    def step(params, state, x):
        mean_loss = lambda p: jax.lax.pmean(jnp.sum(p["w"] ** 2) * x[0], "data")
        return tx.minimize(mean_loss, state, params)[1:]

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    step = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs))
    params, state, decisions = PARAMS, tx.init(PARAMS), []
    for x in (1.0, 1.0, 1e3, 1.0):
        params, state = step(params, state, jnp.full(REPLICAS, x))
        decisions.append(bool(state.should_apply))
    assert decisions == [True, True, False, True]
