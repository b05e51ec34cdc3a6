"""16-bit parameters are the rounding of a float32 copy, which is what is trained."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale.demo import _model, _text

PARAMS = {"w": jnp.linspace(-2.0, 3.0, 24).reshape(4, 6), "b": jnp.linspace(0.01, 100.0, 6)}
each_dtype = pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"]
)
each_door = pytest.mark.parametrize("door", ["apply_gradients", "update"])


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def gradients(params, n):
    wide = cast(params, jnp.float32)
    return jax.tree.map(lambda p: 1e-3 * (jnp.sin(7.0 * p + n) + 0.5), wide)


def step_through(door, tx):
    def by_update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(tx.apply_gradients if door == "apply_gradients" else by_update)


@each_door
@each_dtype
def test_parameters_are_the_rounding_of_the_master_weights(dtype, door):
    params = cast(PARAMS, dtype)
    tx = ols.with_loss_scale(ols.with_master_weights(optax.adamw(1e-4)), 1)
    step, state = step_through(door, tx), tx.init(params)
    for n in range(50):
        params, state = step(gradients(params, n), state, params)
        chex.assert_trees_all_equal_dtypes(params, cast(PARAMS, dtype))
        chex.assert_trees_all_equal(params, cast(state.inner_state.master_weights, dtype))


@each_dtype
def test_master_weights_follow_the_optimizer_of_float32_parameters(dtype):
    params, plain = cast(PARAMS, dtype), cast(cast(PARAMS, dtype), jnp.float32)
    inner = optax.adamw(1e-5)
    tx = ols.with_loss_scale(ols.with_master_weights(inner))
    state, plain_state = tx.init(params), inner.init(plain)
    step = jax.jit(tx.apply_gradients)
    scale = state.loss_scale()
    for n in range(20):
        grads = gradients(plain, n)
        updates, plain_state = inner.update(grads, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
        params, state = step(jax.tree.map(lambda g: g * scale, grads), state, params)
    chex.assert_trees_all_close(state.inner_state.master_weights, plain, rtol=1e-6)


def test_without_loss_scaling_it_is_an_optax_transformation_of_its_own():
    params = cast(PARAMS, jnp.float16)
    tx = optax.chain(optax.clip(1.0), ols.with_master_weights(optax.sgd(1e-5)))
    state = tx.init(params)
    for n in range(5):
        updates, state = tx.update(cast(gradients(params, n), jnp.float16), state, params)
        params = optax.apply_updates(params, updates)
    chex.assert_trees_all_equal(params, cast(state[1].master_weights, jnp.float16))
    chex.assert_trees_all_equal_dtypes(params, cast(PARAMS, jnp.float16))


@pytest.mark.parametrize("wrap", [lambda tx: tx, ols.with_loss_scale], ids=["alone", "wrapped"])
@pytest.mark.parametrize("chained", [False, True])
def test_what_is_wide_already_is_kept_once(wrap, chained):
    params = {"w": jnp.ones(3, jnp.float16), "b": jnp.ones(2), "n": jnp.array([1, 2])}
    tx = ols.with_master_weights(optax.sgd(0.25))
    tx = wrap(optax.chain(optax.clip(1.0), tx) if chained else tx)
    state = tx.init(params)
    is_state = lambda x: isinstance(x, ols.MasterWeightsState)
    states = [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]
    assert [x.dtype for x in jax.tree.leaves(states[0].master_weights)] == [jnp.float32]
    grads = {"w": params["w"], "b": params["b"], "n": jnp.zeros(2, jnp.int32)}
    scale = ols.get_loss_scale(state)() if wrap is ols.with_loss_scale else 1
    scaled = jax.tree.map(lambda g: g * scale if g.dtype != jnp.int32 else g, grads)
    updates, after = tx.update(scaled, state, params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(new["w"], np.full(3, 0.75, np.float16))
    np.testing.assert_array_equal(new["b"], np.full(2, 0.75, np.float32))
    chex.assert_trees_all_equal_structs(after, state)


@each_door
def test_a_skipped_step_leaves_the_master_weights_bit_for_bit(door):
    params = cast(PARAMS, jnp.bfloat16)
    tx = ols.with_loss_scale(ols.with_master_weights(optax.adam(1e-2)))
    step, state = step_through(door, tx), tx.init(params)
    params, state = step(gradients(params, 0), state, params)
    skipped, after = step(jax.tree.map(lambda p: p * jnp.inf, params), state, params)
    chex.assert_trees_all_equal(skipped, params)
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)


def test_inside_masked_it_keeps_a_copy_of_its_own_part_alone():
    params = cast(PARAMS, jnp.float16)
    mask = {"w": True, "b": False}
    tx = ols.with_loss_scale(optax.masked(ols.with_master_weights(optax.sgd(0.1)), mask), 1)
    state = tx.init(params)
    copies = jax.tree.leaves(state.inner_state.inner_state.master_weights)
    assert [x.shape for x in copies] == [PARAMS["w"].shape]
    params, state = jax.jit(tx.apply_gradients)(gradients(params, 0), state, params)
    master = state.inner_state.inner_state.master_weights["w"]
    chex.assert_trees_all_equal(params["w"], master.astype(jnp.float16))


def test_donated_and_sharded_parameters_keep_their_place():
    mesh = jax.make_mesh((4,), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    params = {"w": jax.device_put(jnp.ones((4, 2), jnp.float16), place)}
    tx = ols.with_loss_scale(ols.with_master_weights(optax.sgd(2.0**-14)))
    state = jax.jit(tx.init)(params)
    step = jax.jit(lambda p, s, g: tx.apply_gradients(g, s, p), donate_argnums=(0, 1))
    for _ in range(16):
        grads = jax.tree.map(lambda p: p.astype(jnp.float32) * 2.0**15, params)
        params, state = step(params, state, grads)
    assert params["w"].sharding.is_equivalent_to(place, 2)
    np.testing.assert_array_equal(params["w"], np.full((4, 2), 1 - 2.0**-10, np.float16))


def test_without_parameters_it_says_what_it_needs():
    tx = ols.with_master_weights(optax.sgd(0.1))
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(PARAMS, tx.init(PARAMS))


@pytest.mark.slow
def test_bfloat16_parameters_reach_the_loss_of_float32_in_the_setting_of_the_demo():
    steps, text = 400, _text.read(None)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps + 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def final_loss(param_dtype, inner):
        tx = ols.with_loss_scale(inner)
        dtype = jnp.promote_types(param_dtype, jnp.bfloat16)

        @jax.jit
        def step(params, state, tokens):
            differentiate = ols.value_and_grad(_model.loss, state, compute_dtype=param_dtype)
            loss, grads = differentiate(params, tokens, dtype)
            return *tx.apply_gradients(grads, state, params, value=loss), loss

        params, losses = cast(_model.init(jax.random.key(0)), param_dtype), []
        state = tx.init(params)
        for tokens in _text.batches(text, steps, 0):
            params, state, loss = step(params, state, tokens)
            losses.append(loss)
        return np.mean(losses[-steps // 10 :])

    wide = final_loss(jnp.float32, optimizer)
    assert final_loss(jnp.bfloat16, ols.with_master_weights(optimizer)) < 1.005 * wide
    assert final_loss(jnp.bfloat16, optimizer) > 1.01 * wide
