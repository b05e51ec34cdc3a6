"""All replicas decide alike, and every leaf keeps its placement."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols

LS = ols.DynamicLossScale(initial_scale=1024, growth_interval=2)
PARAMS = {"w": jnp.ones((8, 4)), "b": jnp.zeros(8)}
REPLICAS = 4


def loss_fn(params, x):
    return jnp.mean((params["w"] @ x) ** 2) + jnp.sum(params["b"] ** 2)


def batches(bad=None):
    """One vector a replica; the one of `bad` overflows."""
    x = jnp.arange(4.0 * REPLICAS).reshape(REPLICAS, 4) / 16
    return x if bad is None else x.at[bad].set(jnp.inf)


@pytest.mark.parametrize("bad", [None, 0, 3])
@pytest.mark.parametrize("reduced", [False, True])
def test_an_overflow_on_one_replica_makes_all_skip(bad, reduced):
    tx = ols.with_loss_scale(optax.adam(1e-2), LS, axis_name="replica")

    def step(params, state, x):
        grads = ols.value_and_scaled_grad(loss_fn, state)(params, x)[1]
        if reduced:
            grads = jax.lax.pmean(grads, "replica")
        return tx.apply_gradients(grads, state, params)

    spread = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), tree)
    before = (spread(PARAMS), spread(tx.init(PARAMS)))
    after = jax.pmap(step, axis_name="replica")(*before, batches(bad))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
    np.testing.assert_array_equal(after[1].should_apply, [bad is None] * REPLICAS)
    np.testing.assert_array_equal(
        after[1].loss_scale.loss_scale, [1024 if bad is None else 512] * 4
    )
    if bad is not None:
        chex.assert_trees_all_equal(after[0], before[0])
        chex.assert_trees_all_equal(after[1].inner_state, before[1].inner_state)


@pytest.mark.parametrize("loss_scale", [LS, ols.HeadroomLossScale()])
def test_an_axis_that_is_not_there_is_refused(loss_scale):
    tx = ols.with_loss_scale(optax.sgd(0.1), loss_scale, axis_name="data")
    with pytest.raises(
        ValueError, match=r"axis_name='data' is not an axis .* jit alone, leave"
    ):
        jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)


def test_without_axis_name_replicas_decide_alone():
    update = lambda g: LS.update(g)[1]
    flags = jax.pmap(update)(jnp.array([1.0, jnp.inf, 1.0, jnp.nan]))
    np.testing.assert_array_equal(flags, [True, False, True, False])
    agreed = jax.pmap(lambda g: LS.update(g, axis_name="i")[1], axis_name="i")
    np.testing.assert_array_equal(
        agreed(jnp.array([1.0, jnp.inf, 1.0, jnp.nan])), [False] * 4
    )


@pytest.mark.parametrize("bad", [None, 2])
@pytest.mark.parametrize("way", ["update", "apply_gradients"])
def test_replicas_under_shard_map_step_as_one_device_or_all_skip(bad, way):
    """The step of one device on the whole batch: the mean is taken in the loss."""
    mesh = jax.make_mesh((REPLICAS,), ("data",), axis_types=(AxisType.Auto,))
    inner = optax.sgd(1e-2, momentum=0.9)
    tx = ols.with_loss_scale(inner, LS, axis_name="data")

    def step(params, state, x):
        mean_loss = lambda params, x: jax.lax.pmean(loss_fn(params, x[0]), "data")
        grads = ols.value_and_scaled_grad(mean_loss, state)(params, x)[1]
        if way == "apply_gradients":
            return tx.apply_gradients(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    before = (PARAMS, tx.init(PARAMS))
    mapped = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P(), P())
        )
    )
    after = mapped(*before, batches(bad))
    assert bool(after[1].should_apply) == (bad is None)
    if bad is not None:
        chex.assert_trees_all_equal(after[0], PARAMS)
        return
    grads = jax.grad(lambda p: jnp.mean(jax.vmap(loss_fn, (None, 0))(p, batches())))(
        PARAMS
    )
    updates, _ = inner.update(grads, inner.init(PARAMS))
    chex.assert_trees_all_close(
        after[0], optax.apply_updates(PARAMS, updates), rtol=1e-5
    )


@pytest.mark.parametrize(
    "loss_scale", [LS, "headroom", 8], ids=["dynamic", "headroom", "fixed"]
)
@pytest.mark.parametrize("apart", ["gradients", "loss"])
def test_a_forgotten_axis_name_is_named_unless_each_replica_has_a_state_of_its_own(
    apart, loss_scale
):
    mesh = jax.make_mesh((REPLICAS,), ("data",), axis_types=(AxisType.Auto,))
    tx = ols.with_loss_scale(optax.sgd(0.1), loss_scale)

    def step(state, x):
        """Their losses differ, or the parameters that each has, and so their gradients."""
        state = jax.tree.map(lambda s: s[0] if s.ndim else s, state)
        params = jax.tree.map(lambda p: p + 0 * x[0, 0], PARAMS)
        mine = params if apart == "gradients" else PARAMS
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(mine, x[0])
        value = None if apart == "gradients" else loss
        _, state = tx.apply_gradients(grads, state, params, value=value)
        return jax.tree.map(
            lambda s: jnp.full(1, s), (state.should_apply, state.skipped_steps)
        )

    own = jax.vmap(lambda _: tx.init(PARAMS))(jnp.arange(REPLICAS))
    for state, spec in ((own, P("data")), (tx.init(PARAMS), P())):
        mapped = jax.jit(
            jax.shard_map(
                step, mesh=mesh, in_specs=(spec, P("data")), out_specs=P("data")
            )
        )
        own_scales = spec == P("data") and loss_scale != 8
        if spec == P("data") and (apart == "gradients" or own_scales):
            _, skipped = mapped(state, batches(2))
            summed = apart == "loss"  # as gradients of parameters that all share are
            np.testing.assert_array_equal(skipped, [1] * 4 if summed else [0, 0, 1, 0])
            continue
        said = {
            "gradients": r"each decide alone .*axis_name='data'.*pmean\(loss",
            # The gradients of parameters that all share are summed.
            "loss": "loss differs from replica to replica along the axis 'data'",
        }
        with pytest.raises(ValueError, match=said[apart]):
            mapped(state, batches())


@pytest.mark.parametrize("bad", [None, 2])
@pytest.mark.parametrize("way", ["update", "apply_gradients"])
def test_shards_under_shard_map_step_or_all_skip(bad, way):
    """Each device holds a shard of the parameters and of its gradients, none reduced."""
    mesh = jax.make_mesh((REPLICAS,), ("model",), axis_types=(AxisType.Auto,))
    tx = ols.with_loss_scale(optax.sgd(1.0, momentum=0.9), LS, axis_name="model")

    def step(params, state, grads):
        if way == "apply_gradients":
            return tx.apply_gradients(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    grads = (
        PARAMS if bad is None else {**PARAMS, "b": PARAMS["b"].at[2 * bad].set(jnp.nan)}
    )
    state = tx.init(PARAMS)
    specs = jax.tree.map(lambda x: P("model") if x.ndim else P(), state)
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("model"), specs, P("model")),
            out_specs=(P("model"), specs),
        )
    )
    params, state = mapped(PARAMS, state, grads)
    assert bool(state.should_apply) == (bad is None)
    applied = jax.tree.map(lambda p: p - p / 1024, PARAMS)
    expected = applied if bad is None else PARAMS
    chex.assert_trees_all_equal(params, expected)


@pytest.mark.parametrize(
    "axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
@pytest.mark.parametrize("way", ["update", "apply_gradients"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_sharded_jit_keeps_every_placement(axis_type, way, dtype):
    mesh = jax.make_mesh((REPLICAS,), ("model",), axis_types=(axis_type,))
    tx = ols.with_loss_scale(optax.adamw(1e-2), LS)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(grads, state, params):
        if way == "apply_gradients":
            return tx.apply_gradients(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        shard = lambda x: jax.device_put(
            x, NamedSharding(mesh, P("model") if x.ndim else P())
        )
        params = jax.tree.map(lambda p: shard(p.astype(dtype)), PARAMS)
        state = jax.tree.map(shard, tx.init(params))
        for finite in (True, False, True):
            bad = 0.0 if finite else jnp.inf
            grads = jax.tree.map(lambda p: shard(p + bad), params)  # noqa: B023
            new = step(grads, state, params)
            for old_leaf, new_leaf in zip(
                jax.tree.leaves((params, state)), jax.tree.leaves(new), strict=True
            ):
                assert new_leaf.sharding.is_equivalent_to(
                    old_leaf.sharding, new_leaf.ndim
                )
            params, state = new
            assert bool(state.should_apply) == finite


def replicated(step, check_vma=True):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs))


@pytest.mark.parametrize("axis_name", [None, "data"])
@pytest.mark.parametrize("door", ["minimize", "apply_gradients", "update"])
@pytest.mark.parametrize("habit", ["nothing", "mean of gradients"])
def test_the_loss_of_one_replica_beside_the_gradients_of_all_is_refused(
    axis_name, door, habit
):
    """They are four times those of the mean, as JAX has summed them already."""
    tx = ols.with_loss_scale(optax.sgd(0.1), 8, axis_name=axis_name)
    params = {"w": jnp.ones(3)}

    def step(params, state, x):
        loss_fn = lambda p: jnp.mean(x @ p["w"])
        if door == "minimize":
            return tx.minimize(loss_fn, state, params)[1]
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params)
        if habit == "mean of gradients":
            grads = jax.lax.pmean(grads, "data")
        if door == "update":
            return tx.update(grads, state, params, value=loss)[0]
        return tx.apply_gradients(grads, state, params, value=loss)[0]

    with pytest.raises(ValueError, match=r"'data' of a shard_map, .*pmean\(loss"):
        replicated(step)(params, tx.init(params), jnp.ones((4, 3)))


def test_the_mean_of_the_loss_is_taken_and_steps_as_one_device_does():
    tx = ols.with_loss_scale(optax.sgd(0.1), 8, axis_name="data")
    params = {"w": jnp.ones(3)}
    x = jnp.arange(12.0).reshape(4, 3)

    def step(params, state, x):
        loss_fn = lambda p: jax.lax.pmean(jnp.mean(x @ p["w"]), "data")
        return tx.minimize(loss_fn, state, params)[1]

    after = replicated(step)(params, tx.init(params), x)
    np.testing.assert_allclose(after["w"], 1 - 0.1 * x.mean(0), rtol=1e-6)
