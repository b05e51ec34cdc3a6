"""All replicas decide alike, and every leaf keeps its placement."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from steps import each_way

import optax_lossscale as ols

LS = ols.DynamicLossScale(initial_scale=1024, growth_interval=2)
PARAMS = {"w": jnp.ones((8, 4)), "b": jnp.zeros(8)}
REPLICAS = 4
BATCHES = jnp.arange(4.0 * REPLICAS).reshape(REPLICAS, 4) / 16  # one vector a replica
SCALES = {"dynamic": LS, "headroom": "headroom", "fixed": 8}
each_scale = pytest.mark.parametrize("loss_scale", SCALES.values(), ids=SCALES)


def loss_fn(params, x):
    return jnp.mean((params["w"] @ x) ** 2) + jnp.sum(params["b"] ** 2)


def mesh_of(name, axis_type=AxisType.Auto):
    return jax.make_mesh((REPLICAS,), (name,), axis_types=(axis_type,))


def replicated(step, **options):
    """A step under `shard_map` with parameters and state that all replicas share."""
    options = {"in_specs": (P(), P(), P("data")), "out_specs": P()} | options
    return jax.jit(jax.shard_map(step, mesh=mesh_of("data"), **options))


@each_scale
@pytest.mark.parametrize("reduced", [False, True])
def test_under_pmap_an_overflow_on_one_replica_makes_all_skip(reduced, loss_scale):
    tx = ols.with_loss_scale(optax.adam(1e-2), loss_scale, axis_name="replica")

    def step(params, state, x):
        _, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x)
        if reduced:
            grads = jax.lax.pmean(grads, "replica")
        return tx.apply_gradients(grads, state, params)

    spread = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), tree)
    before = (spread(PARAMS), spread(tx.init(PARAMS)))
    step = jax.pmap(step, axis_name="replica")
    _, state = step(*before, BATCHES)
    assert state.should_apply.all()
    params, state = step(*before, BATCHES.at[3].set(jnp.inf))
    assert not state.should_apply.any()
    chex.assert_trees_all_equal(params, before[0])
    chex.assert_trees_all_equal(state.inner_state, before[1].inner_state)
    for leaf in jax.tree.leaves(state.loss_scale):
        chex.assert_trees_all_equal(leaf, jnp.stack([leaf[0]] * REPLICAS))


def test_without_axis_name_replicas_decide_alone():
    grads = jnp.array([1.0, jnp.inf, 1.0, jnp.nan])
    flags = jax.pmap(lambda g: LS.update(g)[1])(grads)
    np.testing.assert_array_equal(flags, [True, False, True, False])
    agreed = jax.pmap(lambda g: LS.update(g, axis_name="i")[1], axis_name="i")
    np.testing.assert_array_equal(agreed(grads), [False] * 4)


@each_way
def test_replicas_under_shard_map_step_as_one_device_or_all_skip(way):
    """The step of one device on the whole batch: the mean is taken in the loss."""
    inner = optax.sgd(1e-2, momentum=0.9)
    tx = ols.with_loss_scale(inner, LS, axis_name="data")

    def step(params, state, x):
        mean_loss = lambda params: jax.lax.pmean(loss_fn(params, x[0]), "data")
        _, grads = ols.value_and_scaled_grad(mean_loss, state)(params)
        return way(tx)(grads, state, params)

    step, state = replicated(step), tx.init(PARAMS)
    params, after = step(PARAMS, state, BATCHES)
    assert after.should_apply
    whole = lambda params: jnp.mean(jax.vmap(loss_fn, (None, 0))(params, BATCHES))
    updates, _ = inner.update(jax.grad(whole)(PARAMS), inner.init(PARAMS))
    expected = optax.apply_updates(PARAMS, updates)
    chex.assert_trees_all_close(params, expected, rtol=1e-5)
    params, after = step(PARAMS, state, BATCHES.at[2].set(jnp.inf))
    assert not after.should_apply
    chex.assert_trees_all_equal(params, PARAMS)


@each_way
def test_shards_under_shard_map_step_or_all_skip(way):
    """Each device holds a shard of the parameters and of its gradients, none reduced."""
    tx = ols.with_loss_scale(optax.sgd(1.0, momentum=0.9), LS, axis_name="model")
    state = tx.init(PARAMS)
    specs = jax.tree.map(lambda x: P("model") if x.ndim else P(), state)
    step = jax.shard_map(
        lambda grads, state, params: way(tx)(grads, state, params),
        mesh=mesh_of("model"),
        in_specs=(P("model"), specs, P("model")),
        out_specs=(P("model"), specs),
    )
    step = jax.jit(step)
    params, after = step(PARAMS, state, PARAMS)
    assert after.should_apply
    chex.assert_trees_all_equal(params, jax.tree.map(lambda p: p - p / 1024, PARAMS))
    bad = PARAMS | {"b": PARAMS["b"].at[4].set(jnp.nan)}
    params, after = step(bad, state, PARAMS)
    assert not after.should_apply
    chex.assert_trees_all_equal(params, PARAMS)


@each_way
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_jit_keeps_every_placement(axis_type, way):
    mesh = mesh_of("model", axis_type)
    tx = ols.with_loss_scale(optax.adamw(1e-2), LS)
    step = jax.jit(chex.assert_max_traces(way(tx), n=1))
    spec = lambda x: P("model") if x.ndim else P()
    shard = lambda x: jax.device_put(x, NamedSharding(mesh, spec(x)))
    with jax.set_mesh(mesh):
        params = jax.tree.map(lambda p: shard(p.astype(jnp.float16)), PARAMS)
        state = jax.tree.map(shard, tx.init(params))
        for bad in (0.0, jnp.inf, 0.0):
            grads = jax.tree.map(lambda p: shard(p + bad), params)  # noqa: B023
            new = step(grads, state, params)
            leaves = map(jax.tree.leaves, (new, (params, state)))
            for a, b in zip(*leaves, strict=True):
                assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
            params, state = new
            assert state.should_apply == (bad == 0)


# Mistakes


@each_scale
@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("gradients", r"each decide alone .*axis_name='data'.*pmean\(loss"),
        ("loss", "loss differs from replica to replica along the axis 'data'"),
    ],
)
def test_a_forgotten_axis_name_is_named(own, said, loss_scale):
    tx = ols.with_loss_scale(optax.sgd(0.1), loss_scale)

    def step(params, state, x):
        mine = jax.tree.map(lambda p: p + 0 * x[0, 0], params)
        mine = mine if own == "gradients" else params
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(mine, x[0])
        value = loss if own == "loss" else None
        _, state = tx.apply_gradients(grads, state, mine, value=value)
        return state.should_apply

    with pytest.raises(ValueError, match=said):
        replicated(step)(PARAMS, tx.init(PARAMS), BATCHES)


def test_replicas_with_states_of_their_own_need_no_axis_name():
    tx = ols.with_loss_scale(optax.sgd(0.1), LS)

    def step(params, state, x):
        params, state = jax.tree.map(lambda x: x[0], (params, state))
        _, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x[0])
        _, state = tx.apply_gradients(grads, state, params)
        return state.should_apply[None]

    own = jax.tree.map(lambda x: jnp.stack([x] * 4), (PARAMS, tx.init(PARAMS)))
    step = replicated(step, in_specs=P("data"), out_specs=P("data"))
    applied = step(*own, BATCHES.at[2].set(jnp.inf))
    np.testing.assert_array_equal(applied, [True, True, False, True])


@pytest.mark.parametrize("axis_name", [None, "data"])
@pytest.mark.parametrize("habit", ["minimize", "two calls", "mean of gradients"])
def test_the_loss_of_one_replica_beside_the_gradients_of_all_is_refused(
    axis_name, habit
):
    """They are four times those of the mean, as JAX has summed them already."""
    tx = ols.with_loss_scale(optax.sgd(0.1), 8, axis_name=axis_name)

    def step(params, state, x):
        if habit == "minimize":
            return tx.minimize(loss_fn, state, params, x[0])[1]
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x[0])
        if habit == "mean of gradients":
            grads = jax.lax.pmean(grads, "data")
        return tx.update(grads, state, params, value=loss)[0]

    with pytest.raises(ValueError, match=r"'data' of a shard_map, .*pmean\(loss"):
        replicated(step)(PARAMS, tx.init(PARAMS), BATCHES)
