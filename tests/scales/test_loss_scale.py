"""What holds of every loss scale, also of one's own."""

import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols


class Cautious(ols.LossScale):
    """A user's strategy: an option and a counter of its own."""

    patience: int = 3
    quiet_steps: jax.Array = ols.state_field(0)
    smoothed: jax.Array = ols.state_field(0.0)

    def adjust(self, grads_finite):
        quiet = jnp.where(grads_finite, self.quiet_steps + 1, 0)
        grows = quiet >= self.patience
        factor = jnp.where(grads_finite, jnp.where(grows, 2.0, 1.0), 0.5)
        return self.replace(
            loss_scale=self() * factor,
            quiet_steps=jnp.where(grows, 0, quiet),
            smoothed=0.9 * self.smoothed + 0.1 * grads_finite,
        )


ALL = [
    ols.FixedLossScale(128),
    ols.DynamicLossScale(initial_scale=1024, growth_interval=2),
    ols.HeadroomLossScale(initial_scale=1024),
    Cautious(initial_scale=1024.0, patience=2),
]
each = pytest.mark.parametrize("ls", ALL, ids=lambda ls: type(ls).__name__)


@each
def test_call_gives_a_float32_scalar(ls):
    for value in (ls(), jax.jit(lambda: ls())(), jax.jit(lambda ls: ls())(ls)):
        assert (value.shape, value.dtype, value.weak_type) == ((), jnp.float32, False)
        assert value == ls.initial_scale


@each
def test_update_and_adjust_compile_once_and_state_keeps_its_strong_dtypes(ls):
    update = jax.jit(chex.assert_max_traces(lambda ls, g: ls.update(g)[0], n=1))
    adjust = jax.jit(chex.assert_max_traces(lambda ls, f: ls.adjust(f), n=1))
    before = after = jax.tree.map(jnp.asarray, ls)
    for finite in (True, False, True):
        after = update(after, jnp.where(finite, 1.0, jnp.nan))
        after = adjust(after, finite)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(after))


def test_adjust_is_what_a_strategy_must_write():
    with pytest.raises(TypeError, match="adjust"):
        ols.LossScale()


def test_a_strategy_of_ones_own_follows_its_rule_in_a_scan():
    step = lambda ls, finite: (ls.adjust(finite), ls.adjust(finite)())
    finite = jnp.array([True, True, True, False, True, True])
    _, scales = jax.lax.scan(step, Cautious(8.0, patience=2), finite)
    np.testing.assert_array_equal(scales, [8, 16, 16, 8, 8, 16])


def test_replace_keeps_dtypes_and_knows_its_fields():
    ls = Cautious().replace(quiet_steps=2.0, smoothed=1, loss_scale=jnp.bfloat16(8))
    assert (ls.quiet_steps.dtype, ls.smoothed.dtype) == (jnp.int32, jnp.float32)
    assert ls() == 8
    with pytest.raises(TypeError, match="no state patience; its state fields"):
        ls.replace(patience=4)


@pytest.mark.parametrize("bad", [0, -1, np.inf, np.nan, True, "8", None, 10**400])
def test_no_scale_can_be_started_with_or_set_that_is_no_positive_number(bad):
    with pytest.raises(ValueError, match=r"initial_scale must be a number .* got "):
        Cautious(initial_scale=bad)
    if isinstance(bad, float):
        with pytest.raises(ValueError, match="loss_scale must be a number between"):
            Cautious().replace(loss_scale=bad)


def test_a_subclass_with_another_default_keeps_the_check():
    class Slow(ols.DynamicLossScale):
        initial_scale: float = 2.0**10
        growth_interval: int = 5000

    assert (Slow()(), Slow().growth_interval) == (2**10, 5000)
    for name in ("initial_scale", "growth_interval"):
        with pytest.raises(ValueError, match=f"{name} must be .* got 0"):
            Slow(**{name: 0})


def test_construction_needs_no_backend():
    """A module may build its optimizer before jax.distributed.initialize."""
    code = (
        "import jax, optax, optax_lossscale as ols\n"
        "ols.with_loss_scale(optax.adam(1e-3))\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # an error once a backend is up\n"
        "assert jax.device_count() == 3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_class_under_the_name_of_one_of_ours_goes_by_its_module_too():
    class DynamicLossScale(ols.LossScale):
        def adjust(self, grads_finite):
            return self

    ours, theirs = ols.DynamicLossScale(), DynamicLossScale(8.0)
    assert theirs.get_config()["class_name"].startswith(f"{__name__}.test_a_class")
    for one in (ours, theirs):
        assert ols.LossScale.from_config(one.get_config()) == one


def test_the_last_class_of_a_name_has_it():
    def define(factor):
        class Redefined(ols.LossScale):
            def adjust(self, grads_finite):
                return self.replace(loss_scale=self() * factor)

        return Redefined

    first, last = define(1), define(2)
    assert type(ols.LossScale.from_config(first().get_config())) is last


def test_float64_keeps_its_precision():
    with jax.enable_x64(True):
        x = jnp.array(1 / 3, jnp.float64)
        scaled = ols.FixedLossScale(64).scale([x, jnp.array(1j)])
        out = ols.FixedLossScale(128).unscale(scaled)
        assert [o.dtype for o in out] == [jnp.float64, jnp.complex128]
        assert out[0] == x / 2


@pytest.mark.parametrize(
    ("scale", "x"),
    [
        (scale, x)
        for scale in (2.0**60, 1000.0, 0.1, 2.0**-60)
        for x in (1.0, 2.0**125, 1e-10)
        if 2.0**-126 <= x / scale <= 3.4e38
    ],
)
def test_no_scale_is_too_large_or_small_to_unscale_by(scale, x):
    ls = ols.DynamicLossScale(initial_scale=scale, min_scale=scale)
    unscaled = jax.jit(lambda ls, x: ls.unscale(x))(ls, jnp.full((100,), x))
    np.testing.assert_allclose(unscaled, x / scale, rtol=3e-7)


@pytest.mark.parametrize("log2", [-60, -1, 0, 15, 60])
def test_powers_of_two_unscale_exactly(log2):
    ls = ols.DynamicLossScale(initial_scale=2.0**log2, min_scale=None)
    g = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(lambda ls: ls.unscale(ls.scale(g)))(ls), g)


def test_unscaling_float16_does_not_underflow_again():
    smallest = jnp.array([2.0**-24], jnp.float16)
    assert ols.FixedLossScale(2**15).unscale(smallest) == 2.0**-39


@each
def test_update_looks_at_the_gradients(ls):
    new, should_apply = ls.update({"w": jnp.ones(3), "b": None})
    assert should_apply
    new, should_apply = ls.update({"w": jnp.array([1.0, jnp.nan]), "b": None})
    if isinstance(ls, ols.FixedLossScale):
        assert should_apply is True
        assert new == ls
    else:
        assert not should_apply
        assert new() < ls()
        chex.assert_trees_all_close(new, jax.tree.map(jnp.asarray, ls.adjust(False)))


@pytest.mark.parametrize(
    ("factor", "bound"), [(1e30, 2.0**60), (1e-30, 2.0**-60), (np.nan, 2.0**15)]
)
@pytest.mark.parametrize("skip", ["nonfinite", None])
def test_a_scale_beyond_the_bounds_is_brought_back(factor, bound, skip):
    class Wild(ols.LossScale):
        def adjust(self, grads_finite):
            return self.replace(loss_scale=self.loss_scale * factor)

    class WildUpdate(Wild):
        def update(self, grads, axis_name=None):
            return self.adjust(True), True

    assert Wild().update(jnp.ones(2))[0]() == bound
    for loss_scale in (Wild(), WildUpdate()):
        tx = ols.with_loss_scale(optax.adam(0.1), loss_scale, skip=skip)
        params, state = jnp.ones(2), tx.init(jnp.ones(2))
        for _ in range(3):
            _, params, state = tx.minimize(lambda p: jnp.sum(p**2), state, params)
            assert state.should_apply
            assert state.loss_scale() == bound
        assert jnp.isfinite(params).all()
