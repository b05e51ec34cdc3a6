"""Saved and restored: Orbax, pickle, msgpack."""

import functools
import pickle

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import quick

import optax_lossscale as ols

PARAMS = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(8)}
INNER = optax.adamw(1e-2)
LOSS_SCALES = {
    "dynamic": ols.DynamicLossScale(initial_scale=64, growth_interval=3, hysteresis=2),
    "fixed": ols.FixedLossScale(128),
    "headroom": ols.HeadroomLossScale(initial_scale=64),
}
each_kind = pytest.mark.parametrize("loss_scale", LOSS_SCALES)


@functools.cache
def compiled_step(tx):
    def step(state, params, bad):
        grads = jax.tree.map(lambda p: p + bad, params)
        return tx.apply_gradients(grads, state, params)

    return jax.jit(step)


def stepped(tx, state, params=PARAMS):
    """Some steps on, one of them skipped."""
    for bad in (0.0, jnp.inf, 0.0):
        params, state = compiled_step(tx)(state, params, bad)
    return params, state


@functools.cache
def trained(loss_scale):
    """A transformation, and its state after some steps."""
    tx = ols.with_loss_scale(INNER, LOSS_SCALES[loss_scale])
    return tx, stepped(tx, tx.init(PARAMS))[1]


def save(folder, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def restore(folder, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, like)


@quick("loss_scale", {kind: kind for kind in LOSS_SCALES}, "dynamic", "headroom")
def test_orbax_restores_a_state_that_trains_on_alike(tmp_path, loss_scale):
    tx, state = trained(loss_scale)
    save(tmp_path / "state", state)
    restored = restore(tmp_path / "state", tx.init(PARAMS))
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(restored, state)
    chex.assert_trees_all_equal(stepped(tx, restored), stepped(tx, state))


def test_the_state_is_kept_and_the_new_configuration_holds(tmp_path):
    tx = ols.with_loss_scale(
        INNER, ols.DynamicLossScale(initial_scale=64, growth_interval=100)
    )
    _, state = stepped(tx, tx.init(PARAMS))
    save(tmp_path / "state", state)
    changed = ols.DynamicLossScale(growth_interval=2, backoff_factor=0.25)
    tx = ols.with_loss_scale(INNER, changed)
    restored = restore(tmp_path / "state", tx.init(PARAMS))
    chex.assert_trees_all_equal(jax.tree.leaves(restored), jax.tree.leaves(state))
    assert restored.loss_scale.get_config() == changed.get_config()
    assert (restored.loss_scale(), restored.loss_scale.growth_counter) == (32, 1)
    _, after = tx.apply_gradients(PARAMS, restored, PARAMS)
    assert after.loss_scale() == 64
    grads = jax.tree.map(lambda p: p * jnp.nan, PARAMS)
    _, after = tx.apply_gradients(grads, after, PARAMS)
    assert after.loss_scale() == 16


@pytest.mark.parametrize("devices", [1, 2])
def test_orbax_restores_onto_another_number_of_devices(tmp_path, devices):
    def place(tree, count):
        mesh = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])
        spec = lambda x: P("data") if x.ndim else P()
        return jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), tree
        )

    tx = ols.with_loss_scale(INNER, LOSS_SCALES["dynamic"])
    params, state = place((PARAMS, tx.init(PARAMS)), 4)
    params, state = stepped(tx, state, params)
    save(tmp_path / "state", (params, state))
    like = place((PARAMS, tx.init(PARAMS)), devices)
    restored = restore(tmp_path / "state", like)
    chex.assert_trees_all_equal(
        jax.tree.map(np.asarray, restored), jax.tree.map(np.asarray, (params, state))
    )
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    _, after = jax.jit(tx.apply_gradients)(restored[0], restored[1], restored[0])
    assert after.should_apply


def test_a_run_without_loss_scaling_goes_on_with_it(tmp_path):
    """From a checkpoint of the bare optimizer: its state is the wrapper's inner state."""
    inner_state = INNER.init(PARAMS)
    _, inner_state = INNER.update(PARAMS, inner_state, PARAMS)
    save(tmp_path / "state", inner_state)
    tx = ols.with_loss_scale(INNER)
    state = tx.init(PARAMS)._replace(
        inner_state=restore(tmp_path / "state", INNER.init(PARAMS))
    )
    chex.assert_trees_all_equal(state.inner_state, inner_state)
    _, state = tx.apply_gradients(PARAMS, state, PARAMS)
    assert state.inner_state[0].count == 2


@each_kind
def test_pickle_restores_every_state(loss_scale):
    _, state = trained(loss_scale)
    restored = pickle.loads(pickle.dumps(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    chex.assert_trees_all_equal(restored, state)


@each_kind
def test_msgpack_restores_every_leaf(loss_scale):
    """Flax serializes trees of its own kinds; leaves are of every kind."""
    tx, state = trained(loss_scale)
    leaves, treedef = jax.tree.flatten(state)
    data = flax.serialization.to_bytes(leaves)
    like = jax.tree.leaves(tx.init(PARAMS))
    restored = jax.tree.unflatten(treedef, flax.serialization.from_bytes(like, data))
    chex.assert_trees_all_equal(restored, state)
