"""What loss scales and skip rules have in common: `==` and `hash` of what holds arrays."""

import copy
import dataclasses
import json
import operator
import pickle
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import skips
from optax_lossscale._arrays import stateful

MADE = {
    "fixed": lambda: ols.FixedLossScale(128),
    "dynamic": lambda: ols.DynamicLossScale(growth_interval=3),
    "headroom": ols.HeadroomLossScale,
    "spikes": skips.spikes,
    "threshold": lambda: skips.threshold(1.0),
}
each = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


def moved(one):
    return (
        one.update(2.0, 1.0)[0]
        if isinstance(one, skips.SkipRule)
        else one.update(2.0)[0]
    )


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
    assert [scaled(ls, 1.0) for ls in (start, halved, start, start.adjust(False))] == [
        4,
        2,
        4,
        2,
    ]
    assert len(traced) == 2


@each
def test_traced_ones_have_a_hash_and_are_not_compared(make):
    one = make()

    @jax.jit
    def traced(other):
        assert hash(other) == hash(one)
        if jax.tree.leaves(one):
            with pytest.raises(
                TypeError, match="== reads numbers on the host: call it outside"
            ):
                _ = one == other
        return jnp.zeros(())

    traced(one)


@each
def test_a_foreign_type_may_define_equality(make):
    assert make() == mock.ANY


@each
def test_keys_are_made_only_where_paths_are_asked_for(make, monkeypatch):
    one = make()
    leaves_with_paths = jax.tree.leaves_with_path(one)
    names = [path[-1].name for path, _ in leaves_with_paths]
    assert names == one._state_names
    leaves = [leaf for _, leaf in leaves_with_paths]
    identity = jax.jit(lambda x: x)
    assert identity(one) == one  # compiled here, where JAX names the arguments

    def refuse(name):
        raise AssertionError(f"a key for {name}")

    monkeypatch.setattr(stateful, "GetAttrKey", refuse)
    assert all(map(operator.is_, jax.tree.leaves(one), leaves))
    assert identity(one) == one


def test_traced_ones_differ_from_what_has_another_structure():
    traced = lambda ls: jnp.array([ls == 3, ls == None, ls == ols.FixedLossScale(8)])  # noqa: E711
    assert not jax.jit(traced)(ols.DynamicLossScale()).any()


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


def test_one_of_ones_own_is_a_frozen_dataclass():
    scale, rule = Creeping(8.0, rate=2.0), Under(limit=3.0)
    for one, field in ((scale, "rate"), (rule, "limit")):
        after = moved(one)
        same = jax.jit(lambda x: x)(after)
        assert same == after
        assert hash(same) == hash(one) == hash(copy.deepcopy(one))
        assert one != after
        assert [len(jax.tree.leaves(x)) for x in (one, after)] == [
            len(one._state_names)
        ] * 2
        for name in (field, "another"):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(one, name, 1.0)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(one, field)
        config = json.loads(json.dumps(one.get_config()))
        assert type(one).from_config(config) == one
        assert {f.name for f in dataclasses.fields(one)} >= {field, *one._state_names}
        assert not set(one.get_config()["config"]) & set(one._state_names)
    assert moved(scale)() == 16
    assert moved(scale).steps == 1
    assert moved(rule).largest == 2

    class Further(Creeping):
        more: int = 3

    assert moved(Further(4.0, rate=4.0)) == Further(4.0, rate=4.0).adjust(True)
    assert Further(4.0).adjust(True)() == 6


def test_the_first_value_of_state_is_the_classs_own():
    first = np.array([1.0, 2.0], np.float32)

    class Mine(ols.LossScale):
        averages: jax.Array = ols.state_field(first)

        def adjust(self, grads_finite):
            return self

    first[0] = 7.0
    assert Mine().averages.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="read-only"):
        Mine().averages[0] = 7.0


def test_the_first_value_of_state_has_the_dtype_that_jax_gives_it():
    class Mine(ols.LossScale):
        counts: jax.Array = ols.state_field([1, 2])
        averages: jax.Array = ols.state_field(np.zeros(2))
        weight: jax.Array = ols.state_field(1.0)

        def adjust(self, grads_finite):
            return self

    dtypes = [jnp.asarray(x).dtype for x in ([1, 2], np.zeros(2), 1.0)]
    assert [x.dtype for x in (Mine().counts, Mine().averages, Mine().weight)] == dtypes


def test_what_a_post_init_leaves_unset_is_missed():
    class Forgetful(ols.LossScale):
        def __post_init__(self):
            pass

        def adjust(self, grads_finite):
            return self

    with pytest.raises(AttributeError, match="no attribute 'loss_scale'"):
        ols.with_loss_scale(optax.sgd(0.1), Forgetful()).init(jnp.ones(2))


@each
def test_what_is_printed_can_be_read_by_the_user(make):
    assert not re.search(r"\b_", repr(moved(make())))


def test_what_is_printed_is_the_configuration_and_the_state():
    printed = repr(Creeping(8.0, rate=2.0))
    assert printed.startswith("Creeping(initial_scale=8.0, loss_scale=")
    assert "rate=2.0, steps=" in printed


@each
def test_one_is_pickled_and_copied(make):
    after = moved(make())
    for same in (
        pickle.loads(pickle.dumps(after)),
        copy.copy(after),
        copy.deepcopy(after),
    ):
        assert same == after
