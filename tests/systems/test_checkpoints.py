"""Saved and restored: Orbax, pickle, msgpack."""

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

import optax_lossscale as ols

PARAMS = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(8)}
INNER = optax.adamw(1e-2)
DYNAMIC = ols.DynamicLossScale(initial_scale=64, growth_interval=3, hysteresis=2)
OPTIMIZERS = {
    "dynamic": ols.with_loss_scale(INNER, DYNAMIC),
    "fixed": ols.with_loss_scale(INNER, 128),
    "headroom, a rule": ols.with_loss_scale(INNER, "headroom", skip=ols.skips.spikes()),
}
each = pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)


def trained(tx, state, params=PARAMS):
    """Some steps on, one of them skipped."""
    step = jax.jit(tx.apply_gradients)
    for bad in (0.0, jnp.inf, 0.0):
        params, state = step(jax.tree.map(lambda p: p + bad, params), state, params)  # noqa: B023
    return params, state


def restored(folder, tree, like):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", like)


@each
def test_orbax_restores_a_state_that_trains_on_alike(tmp_path, tx):
    _, state = trained(tx, tx.init(PARAMS))
    back = restored(tmp_path, state, tx.init(PARAMS))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    chex.assert_trees_all_equal_shapes_and_dtypes(back, state)
    chex.assert_trees_all_equal(back, state)
    chex.assert_trees_all_equal(trained(tx, back), trained(tx, state))


@each
def test_pickle_and_msgpack_restore_every_leaf(tx):
    """Flax serializes trees of its own kinds; leaves are of every kind."""
    _, state = trained(tx, tx.init(PARAMS))
    chex.assert_trees_all_equal(pickle.loads(pickle.dumps(state)), state)
    leaves, treedef = jax.tree.flatten(state)
    like = jax.tree.leaves(tx.init(PARAMS))
    data = flax.serialization.to_bytes(leaves)
    leaves = flax.serialization.from_bytes(like, data)
    chex.assert_trees_all_equal(jax.tree.unflatten(treedef, leaves), state)


def test_the_state_is_kept_and_the_new_configuration_holds(tmp_path):
    _, state = trained(OPTIMIZERS["dynamic"], OPTIMIZERS["dynamic"].init(PARAMS))
    changed = ols.DynamicLossScale(growth_interval=2, backoff_factor=0.25)
    tx = ols.with_loss_scale(INNER, changed)
    back = restored(tmp_path, state, tx.init(PARAMS))
    chex.assert_trees_all_equal(jax.tree.leaves(back), jax.tree.leaves(state))
    assert back.loss_scale.get_config() == changed.get_config()
    assert (back.loss_scale(), back.loss_scale.growth_counter) == (64, 1)
    _, after = tx.apply_gradients(PARAMS, back, PARAMS)
    assert after.loss_scale() == 128
    bad = jax.tree.map(lambda p: p * jnp.nan, PARAMS)
    _, after = tx.apply_gradients(bad, after, PARAMS)
    assert after.loss_scale() == 32


@pytest.mark.parametrize("devices", [1, 2])
def test_orbax_restores_onto_another_number_of_devices(tmp_path, devices):
    def place(tree, count):
        mesh = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])
        spec = lambda x: P("data") if x.ndim else P()
        put = lambda x: jax.device_put(x, NamedSharding(mesh, spec(x)))
        return jax.tree.map(put, tree)

    tx = OPTIMIZERS["dynamic"]
    params, state = place((PARAMS, tx.init(PARAMS)), 4)
    saved = trained(tx, state, params)
    like = place((PARAMS, tx.init(PARAMS)), devices)
    params, state = back = restored(tmp_path, saved, like)
    as_numpy = lambda tree: jax.tree.map(np.asarray, tree)
    chex.assert_trees_all_equal(as_numpy(back), as_numpy(saved))
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(like), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    _, after = jax.jit(tx.apply_gradients)(params, state, params)
    assert after.should_apply


def test_a_run_without_loss_scaling_goes_on_with_it(tmp_path):
    """From a checkpoint of the bare optimizer: its state is the wrapper's inner state."""
    _, inner_state = INNER.update(PARAMS, INNER.init(PARAMS), PARAMS)
    tx = ols.with_loss_scale(INNER)
    back = restored(tmp_path, inner_state, INNER.init(PARAMS))
    state = tx.init(PARAMS)._replace(inner_state=back)
    _, state = tx.apply_gradients(PARAMS, state, PARAMS)
    assert state.inner_state[0].count == 2
