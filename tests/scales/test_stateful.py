"""What loss scales and skip rules have in common: `==` and `hash` of what holds arrays."""

import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale import skips

MADE = {
    "fixed": lambda: ols.FixedLossScale(128),
    "dynamic": lambda: ols.DynamicLossScale(growth_interval=3),
    "headroom": ols.HeadroomLossScale,
    "spikes": skips.spikes,
    "axlearn": lambda: skips.axlearn(skips.drop_norm_by_grad_norm_ema(), 0.9),
    "olmo_core": lambda: skips.olmo_core(8),
}
each = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


def moved(one):
    return one.update(2.0, 1.0)[0] if isinstance(one, skips.SkipRule) else one.update(2.0)[0]


@each
def test_equal_are_those_of_one_configuration_and_state(make):
    fresh, after = make(), moved(make())
    assert fresh == make()
    assert after == moved(make())
    assert after == jax.device_put(after)
    assert (fresh == after) == (not jax.tree.leaves(fresh))  # a fixed one never moves
    assert fresh != ols.DynamicLossScale(growth_interval=4)
    assert fresh != skips.spikes(7.0)
    assert fresh != 128


@each
def test_what_is_equal_has_one_hash_before_and_after_an_update(make):
    assert hash(make()) == hash(make()) == hash(moved(make()))
    assert len({make(), make()}) == 1
    assert hash(skips.spikes()) != hash(skips.spikes(7.0))


def test_one_may_be_a_static_argument():
    traced = []

    def scale(loss_scale, x):
        traced.append(1)
        return loss_scale.scale(x)

    scaled = jax.jit(scale, static_argnums=0)
    start = ols.DynamicLossScale(initial_scale=4.0)
    halved = start.adjust(False)
    assert [scaled(ls, 1.0) for ls in (start, halved, start, start.adjust(False))] == [4, 2, 4, 2]
    assert len(traced) == 2


@each
def test_traced_ones_have_a_hash_and_are_not_compared(make):
    one = make()

    @jax.jit
    def traced(other):
        assert hash(other) == hash(one)
        if jax.tree.leaves(one):
            with pytest.raises(TypeError, match="== reads numbers on the host: call it outside"):
                _ = one == other
        return jnp.zeros(())

    traced(one)
