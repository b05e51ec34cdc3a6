"""What loss scales and skip rules have in common: frozen pytrees that may be compared."""

import copy
import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import skips


class Creeping(ols.LossScale):
    rate: float = 1.5
    steps: jax.Array = ols.state_field(0)
    rates: jax.Array = ols.state_field()

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "rates", np.full(2, self.rate, np.float32))

    def adjust(self, grads_finite):
        return self.replace(loss_scale=self() * self.rate, steps=self.steps + 1)


class Under(skips.SkipRule):
    limit: float
    largest: jax.Array = ols.state_field(0.0)

    def decide(self, norm, value):
        return self.replace(largest=jnp.maximum(self.largest, norm)), norm < self.limit


MADE = {
    "fixed": lambda: ols.FixedLossScale(128),
    "dynamic": lambda: ols.DynamicLossScale(np.float32(8), growth_interval=np.int64(3)),
    "headroom": ols.HeadroomLossScale,
    "own": lambda: Creeping(8.0, rate=2.0),
    "spikes": skips.spikes,
    "threshold": lambda: skips.threshold(1.0),
    "own rule": lambda: Under(limit=3.0),
}
each = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


def moved(one):
    is_rule = isinstance(one, skips.SkipRule)
    return one.update(2.0, 1.0)[0] if is_rule else one.update(2.0)[0]


@each
def test_equal_are_those_of_one_configuration_and_state(make):
    fresh, after = make(), moved(make())
    assert fresh == make()
    assert after == moved(make())
    assert after == jax.device_put(after)
    assert (fresh == after) == (not jax.tree.leaves(fresh))  # a fixed one never moves
    assert fresh not in (ols.DynamicLossScale(growth_interval=4), skips.spikes(7.0), 1)


@each
def test_what_is_equal_has_one_hash_before_and_after_an_update(make):
    assert hash(make()) == hash(make()) == hash(moved(make()))
    assert hash(skips.spikes()) != hash(skips.spikes(7.0))


def test_one_may_be_a_static_argument():
    traced = []

    def scale(loss_scale, x):
        traced.append(1)
        return loss_scale.scale(x)

    scaled = jax.jit(scale, static_argnums=0)
    start = ols.DynamicLossScale(initial_scale=4.0)
    given = (start, start.adjust(False), start, start.adjust(False))
    assert [scaled(ls, 1.0) for ls in given] == [4, 2, 4, 2]
    assert len(traced) == 2


def test_traced_ones_have_a_hash_and_are_not_compared_unless_structures_differ():
    one = ols.DynamicLossScale()

    @jax.jit
    def traced(other):
        assert hash(other) == hash(one)
        assert other != ols.FixedLossScale(8)
        with pytest.raises(TypeError, match="== reads numbers on the host"):
            _ = one == other

    traced(one)


@each
def test_leaves_are_named_after_their_fields_and_come_back_whole(make):
    one = moved(make())
    leaves = jax.tree.leaves_with_path(one)
    assert [path[-1].name for path, _ in leaves] == one._state_names
    back = jax.tree.unflatten(jax.tree.structure(one), jax.tree.leaves(one))
    assert back == one
    assert jax.jit(lambda x: x)(one) == one
    for placeholder in (object(), None, jnp.ones(3)):  # as JAX puts in, unchecked
        jax.tree.map(lambda _, placeholder=placeholder: placeholder, one)


@each
def test_one_is_frozen_and_replaced_only_in_its_state(make):
    one = make()
    field = dataclasses.fields(one)[0].name
    for name in (field, "another"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, name, 1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(one, field)
    with pytest.raises(TypeError, match=f"{type(one).__name__} has no state another; "):
        one.replace(another=1.0)


@each
def test_one_is_made_anew_from_its_config_through_json(make):
    one = make()
    config = json.loads(json.dumps(one.get_config()))
    base = skips.SkipRule if isinstance(one, skips.SkipRule) else ols.LossScale
    assert base.from_config(config) == type(one).from_config(config) == one
    assert moved(one).get_config() == one.get_config()


@each
def test_one_is_pickled_and_copied(make):
    after = moved(make())
    assert pickle.loads(pickle.dumps(after)) == copy.deepcopy(after) == after


def test_what_is_printed_is_the_configuration_and_the_state():
    printed = repr(Creeping(8.0, rate=2.0))
    assert printed.startswith("Creeping(initial_scale=8.0, loss_scale=")
    assert "rate=2.0, steps=" in printed


def test_a_subclass_of_ones_own_class_is_one_too():
    class Further(Creeping):
        more: int = 3

    assert moved(Further(4.0, rate=4.0)) == Further(4.0, rate=4.0).adjust(True)
    assert Further(4.0).adjust(True)() == 6


def test_the_first_value_of_state_is_the_classs_own_in_the_dtype_that_jax_gives_it():
    first = np.array([1.0, 2.0])

    class Mine(ols.LossScale):
        averages: jax.Array = ols.state_field(first)
        counts: jax.Array = ols.state_field([1, 2])
        half: jax.Array = ols.state_field(np.float16(2))

        def adjust(self, grads_finite):
            return self.replace(averages=self.averages + 1)

    first[0] = 7.0
    assert Mine().averages.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="read-only"):
        Mine().averages[0] = 7.0
    mine = Mine().adjust(True)
    assert [x.dtype for x in (mine.averages, mine.counts, mine.half)] == [
        "float32",
        "int32",
        "float16",
    ]


def test_state_is_no_argument_of_the_constructor():
    with pytest.raises(TypeError, match="steps"):
        Creeping(steps=3)


def test_what_a_post_init_leaves_unset_is_missed():
    class Forgetful(ols.LossScale):
        def __post_init__(self):
            pass

        def adjust(self, grads_finite):
            return self

    with pytest.raises(AttributeError, match="no attribute 'loss_scale'"):
        ols.with_loss_scale(optax.sgd(0.1), Forgetful()).init(jnp.ones(2))
