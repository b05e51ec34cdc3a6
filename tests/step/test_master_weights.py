"""16-bit parameters are the rounding of float32 numbers, which are what is trained."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pairs import product

import optax_lossscale as ols
from optax_lossscale import demo

PARAMS = {
    "w": jnp.linspace(-2.0, 3.0, 24).reshape(4, 6),
    "b": jnp.linspace(0.01, 100.0, 6),
}
each_dtype = pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"]
)
each_door = pytest.mark.parametrize("door", ["apply_gradients", "update"])


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def rounded(tree, dtype):
    """Float32 numbers in 16 bits, ties in bfloat16 away from zero."""
    if dtype != jnp.bfloat16:
        return cast(tree, dtype)
    upper = lambda x: ((np.asarray(x).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    return jax.tree.map(lambda x: jnp.asarray(upper(x).view(jnp.bfloat16.dtype)), tree)


def gradients(params, n):
    wide = cast(params, jnp.float32)
    return jax.tree.map(lambda p: 1e-3 * (jnp.sin(7.0 * p + n) + 0.5), wide)


def step_through(door, tx):
    def by_update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(tx.apply_gradients if door == "apply_gradients" else by_update)


@product(
    dtype={"float16": jnp.float16, "bfloat16": jnp.bfloat16},
    door=["apply_gradients", "update"],
)
def test_parameters_are_the_rounding_of_the_master_weights(dtype, door):
    params = cast(PARAMS, dtype)
    tx = ols.with_loss_scale(ols.with_master_weights(optax.adamw(1e-4)), 1)
    step, state = step_through(door, tx), tx.init(params)
    for n in range(50):
        params, state = step(gradients(params, n), state, params)
        chex.assert_trees_all_equal_dtypes(params, cast(PARAMS, dtype))
        chex.assert_trees_all_equal(
            params, rounded(state.inner_state.weights(params), dtype)
        )


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
    chex.assert_trees_all_close(state.inner_state.weights(params), plain, rtol=1e-6)


def test_without_loss_scaling_it_is_an_optax_transformation_of_its_own():
    params = cast(PARAMS, jnp.float16)
    tx = optax.chain(optax.clip(1.0), ols.with_master_weights(optax.sgd(1e-5)))
    state = tx.init(params)
    for n in range(5):
        updates, state = tx.update(
            cast(gradients(params, n), jnp.float16), state, params
        )
        params = optax.apply_updates(params, updates)
    chex.assert_trees_all_equal(params, cast(state[1].weights(params), jnp.float16))
    chex.assert_trees_all_equal_dtypes(params, cast(PARAMS, jnp.float16))


@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, ols.with_loss_scale], ids=["alone", "wrapped"]
)
@pytest.mark.parametrize("chained", [False, True])
def test_what_is_wide_already_is_kept_once(wrap, chained):
    params = {"w": jnp.ones(3, jnp.float16), "b": jnp.ones(2), "n": jnp.array([1, 2])}
    tx = ols.with_master_weights(optax.sgd(0.25))
    tx = wrap(optax.chain(optax.clip(1.0), tx) if chained else tx)
    state = tx.init(params)
    is_state = lambda x: hasattr(x, "remainders")
    states = [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]
    assert [x.dtype for x in jax.tree.leaves(states[0].remainders)] == [jnp.float32]
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
    tx = ols.with_loss_scale(
        optax.masked(ols.with_master_weights(optax.sgd(0.1)), mask), 1
    )
    state = tx.init(params)
    copies = jax.tree.leaves(state.inner_state.inner_state.remainders)
    assert [x.shape for x in copies] == [PARAMS["w"].shape]
    params, state = jax.jit(tx.apply_gradients)(gradients(params, 0), state, params)
    master = state.inner_state.inner_state.remainders["w"]
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
    np.testing.assert_array_equal(
        params["w"], np.full((4, 2), 1 - 2.0**-10, np.float16)
    )


def test_without_parameters_it_says_what_it_needs():
    tx = ols.with_master_weights(optax.sgd(0.1))
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(PARAMS, tx.init(PARAMS))


# Steps of 2**-10, in which bfloat16 has an eighth of what it can add to 1, and float16
# all of it.
STEP = 2.0**-10
each_wrap = pytest.mark.parametrize(
    "wrap",
    [lambda tx: tx, lambda tx: ols.with_loss_scale(tx, 1)],
    ids=["alone", "wrapped"],
)
is_state = lambda x: hasattr(x, "remainders")


def master_weights(state, params):
    """The float32 numbers that are trained."""
    (own,) = filter(is_state, jax.tree.leaves(state, is_leaf=is_state))
    return own.weights(params)


def trained(tx, params, grads, state=None, between=lambda params: params):
    """Parameters and state after a step for each of the gradients, as few programs as can be."""

    @jax.jit
    def step(params, state, grad):
        grads = jax.tree.map(lambda p: jnp.full(p.shape, grad, p.dtype), params)
        updates, state = tx.update(grads, state, params)
        return between(optax.apply_updates(params, updates)), state

    state = tx.init(params) if state is None else state
    for grad in grads:
        params, state = step(params, state, jnp.float32(grad))
    return params, state


@each_dtype
def test_training_is_that_of_a_float32_copy_to_the_bit(dtype):
    inner = optax.sgd(0.1, momentum=0.9)
    tx = ols.with_master_weights(inner)
    params, copy = cast(PARAMS, dtype), cast(cast(PARAMS, dtype), jnp.float32)
    state, copy_state = tx.init(params), inner.init(copy)
    for n in range(12):
        grads = gradients(params, n)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        copy_updates, copy_state = inner.update(grads, copy_state, copy)
        copy = optax.apply_updates(copy, copy_updates)
        chex.assert_trees_all_equal(params, rounded(copy, dtype))
    chex.assert_trees_all_equal(state.weights(params), copy)
    chex.assert_trees_all_equal(state.inner_state, copy_state)


def test_bfloat16_parameters_take_16_bits_more_and_no_copy():
    params = cast(PARAMS, jnp.bfloat16)
    tx = ols.with_loss_scale(ols.with_master_weights(optax.sgd(0.1)))
    nbytes = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    bare = ols.with_loss_scale(optax.sgd(0.1)).init(params)
    assert nbytes(tx.init(params)) - nbytes(bare) == nbytes(params)


@each_wrap
@each_dtype
def test_parameters_loaded_after_init_are_those_that_are_trained(dtype, wrap):
    tx = wrap(ols.with_master_weights(optax.sgd(STEP)))
    state, loaded = (
        tx.init(cast({"w": jnp.zeros(3)}, dtype)),
        jnp.array([1.0, -300.0, 2e-5], dtype),
    )
    params, state = trained(tx, {"w": loaded}, 8 * [1.0], state)
    expected = {"w": loaded.astype(jnp.float32) - 8 * STEP}
    chex.assert_trees_all_close(master_weights(state, params), expected, rtol=1e-6)
    chex.assert_trees_all_equal(params, rounded(master_weights(state, params), dtype))


@each_wrap
@each_dtype
def test_a_parameter_changed_between_steps_is_right(dtype, wrap):
    tx = wrap(ols.with_master_weights(optax.sgd(STEP)))
    params, state = trained(
        tx, {"w": jnp.array([1.0, 2.0, -3.0, 5.0], dtype)}, 5 * [1.3]
    )
    kept = master_weights(state, params)["w"][3]
    # an average, a pruned one, a new layer's
    others = jnp.array([-7.0, 0.0, 1e-3], dtype)
    params = {"w": params["w"].at[:3].set(others)}
    weights = master_weights(state, params)
    chex.assert_trees_all_equal(rounded(weights, dtype), params)
    assert weights["w"][3] == kept
    if dtype == jnp.float16:
        np.testing.assert_array_equal(weights["w"][:3], others.astype(jnp.float32))
    params, state = trained(tx, params, 4 * [1.0], state)
    after = master_weights(state, params)
    chex.assert_trees_all_close(after["w"], weights["w"] - 4 * STEP, rtol=1e-6)


@each_wrap
@each_dtype
def test_a_clipped_parameter_turns_round_with_one_in_float32(dtype, wrap):
    clipped = lambda params: jax.tree.map(lambda p: jnp.clip(p, -1, 1), params)
    grads = 50 * [-1.0] + 20 * [1.0]
    tx = wrap(ols.with_master_weights(optax.sgd(STEP)))
    params, state = trained(tx, {"w": jnp.ones(2, dtype)}, grads, between=clipped)
    expected, _ = trained(optax.sgd(STEP), {"w": jnp.ones(2)}, grads, between=clipped)
    half_of_the_last_place = jnp.finfo(dtype).eps / 2
    weights = master_weights(state, params)
    chex.assert_trees_all_close(weights, expected, rtol=0, atol=half_of_the_last_place)


@each_dtype
def test_a_small_parameter_of_either_zero_is_still_trained(dtype):
    """A float16 zero may stand for a number below 2**-25, whose sign its updates lose."""
    size = 1e-9 if dtype == jnp.float16 else 1e-37
    tx = ols.with_master_weights(optax.sgd(size))
    params, state = trained(tx, {"w": jnp.array([0.0, -0.0], dtype)}, 8 * [1.0])
    chex.assert_trees_all_close(
        state.weights(params), {"w": jnp.full(2, -8 * size)}, rtol=1e-5
    )


def test_an_infinite_parameter_stays_and_a_nan_spreads_to_no_other():
    params = {"w": jnp.array([jnp.inf, jnp.nan, 1.0], jnp.bfloat16)}
    tx = ols.with_master_weights(optax.sgd(STEP))
    params, state = trained(tx, params, 8 * [1.0])
    np.testing.assert_array_equal(
        params["w"][:2].astype(jnp.float32), [jnp.inf, jnp.nan]
    )
    np.testing.assert_array_equal(state.weights(params)["w"][2], 1 - 8 * STEP)


@each_dtype
def test_8_steps_in_one_program_keep_their_types_and_give_the_same(dtype):
    params, tx = {"w": jnp.ones(3, dtype)}, ols.with_master_weights(optax.sgd(STEP))

    def body(carry, grad):
        return trained(tx, carry[0], [grad], carry[1]), None

    after = jax.lax.scan(body, (params, tx.init(params)), jnp.ones(8))[0]
    chex.assert_trees_all_equal(after, trained(tx, params, 8 * [1.0]))


def test_each_of_an_ensemble_is_trained_as_alone():
    params = {"w": jnp.array([[1.0, 2.0], [-3.0, 0.5]], jnp.bfloat16)}
    tx = ols.with_master_weights(optax.sgd(STEP))
    run = lambda params: trained(tx, params, 2 * [1.0])
    together = jax.vmap(run)(params)
    for n in range(2):
        alone = run(jax.tree.map(lambda p, n=n: p[n], params))
        chex.assert_trees_all_equal(jax.tree.map(lambda x, n=n: x[n], together), alone)


ADAM = optax.scale_by_adam()
NOT_FOLLOWED = {
    "chain": lambda tx: optax.chain(optax.clip(1.0), optax.chain(optax.scale(1.0), tx)),
    "named_chain": lambda tx: optax.named_chain(("z", optax.clip(1.0)), ("a", tx)),
    "partition": lambda tx: optax.partition({"a": tx, "b": optax.sgd(0.1)}, {"w": "a"}),
    "flatten": optax.flatten,
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


@pytest.mark.parametrize("around", NOT_FOLLOWED.values(), ids=NOT_FOLLOWED)
def test_what_hands_its_updates_on_may_be_around_it(around):
    params, own = (
        {"w": jnp.ones(2, jnp.bfloat16)},
        ols.with_master_weights(optax.sgd(STEP)),
    )
    tx = ols.with_loss_scale(around(own), 1)
    after, state = trained(tx, params, 3 * [1.0])
    chex.assert_trees_all_equal(after, {"w": jnp.full(2, 1 - 2.0**-8, jnp.bfloat16)})
    (state,) = filter(is_state, jax.tree.leaves(state, is_leaf=is_state))
    assert [x.dtype for x in jax.tree.leaves(state.remainders)] == [jnp.uint16]


LEARNING_RATE = optax.scale_by_learning_rate(1e-3)


def test_the_last_in_a_bare_chain_trains_float32_numbers():
    own = ols.with_master_weights(optax.chain(ADAM, LEARNING_RATE))
    tx = optax.chain(optax.identity(), optax.chain(optax.clip(1.0), own))
    after, _ = trained(tx, {"w": jnp.ones(2, jnp.bfloat16)}, 100 * [1.0])
    np.testing.assert_allclose(after["w"].astype(jnp.float32), 0.9, atol=0.003)


def test_lookahead_inside_follows_that_of_float32_parameters():
    inner = optax.lookahead(optax.sgd(STEP), 3, 0.5)
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    ends = []
    for tx, synced in (
        (ols.with_master_weights(inner), optax.LookaheadParams.init_synced(params)),
        (inner, optax.LookaheadParams.init_synced(cast(params, jnp.float32))),
    ):
        state, grads, now = tx.init(synced), cast(params, jnp.float32), synced
        update = jax.jit(tx.update)
        for _ in range(10):
            updates, state = update(grads, state, now)
            now = optax.apply_updates(now, updates)
        ends.append(state.weights(now) if is_state(state) else now)
    chex.assert_trees_all_close(*ends, rtol=1e-6)


def test_steps_are_accumulated_inside_and_around():
    params, sgd = {"w": jnp.ones(2, jnp.bfloat16)}, optax.sgd(STEP)
    grads = [1.0, 3.0, 2.0, 0.0]
    for tx in (
        ols.with_master_weights(optax.MultiSteps(sgd, 2)),
        optax.MultiSteps(ols.with_master_weights(sgd), 2).gradient_transformation(),
    ):
        after, state = trained(tx, params, grads)
        np.testing.assert_array_equal(master_weights(state, after)["w"], 1 - 3 * STEP)


def test_without_the_wrapper_a_parameter_without_a_gradient_stays_with_its_slots():
    params = cast(PARAMS, jnp.bfloat16)
    tx = ols.with_master_weights(optax.adamw(0.1))
    grads = gradients(params, 0)
    updates, state = tx.update(grads, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    updates, after = tx.update({"w": None, "b": grads["b"]}, state, params)
    new = optax.apply_updates(params, updates)
    chex.assert_trees_all_equal(new["w"], params["w"])
    assert (new["b"] != params["b"]).any()
    adam, new_adam = state.inner_state[0], after.inner_state[0]
    for old, slot in ((adam.mu, new_adam.mu), (adam.nu, new_adam.nu)):
        chex.assert_trees_all_equal(slot["w"], old["w"])
        assert (slot["b"] != old["b"]).any()
    chex.assert_trees_all_equal(after.remainders["w"], state.remainders["w"])


OTHERS = {
    "shape": (
        {"w": jnp.ones(4, jnp.bfloat16)},
        r"uint16\[3\] where it needs uint16\[4\], at .*w",
    ),
    "dtype": (
        {"w": jnp.ones(3, jnp.float16)},
        r"uint16\[3\] where it needs float32\[3\], at .*w",
    ),
    "structure": ({"v": jnp.ones(3, jnp.bfloat16)}, "another structure"),
}


@each_wrap
@pytest.mark.parametrize(("others", "message"), OTHERS.values(), ids=OTHERS)
def test_the_state_of_other_parameters_is_refused(others, message, wrap):
    tx = wrap(ols.with_master_weights(optax.sgd(0.1)))
    state = tx.init({"w": jnp.ones(3, jnp.bfloat16)})
    with pytest.raises(ValueError, match=message):
        tx.update(others, state, others)


def test_a_gradient_of_another_shape_is_refused():
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    tx = ols.with_master_weights(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"of shape \(3,\) has the shape \(2, 3\)"):
        tx.update({"w": jnp.ones((2, 3))}, tx.init(params), params)


def test_the_state_of_a_bare_optimizer_is_refused_and_taken_when_cast_into_its_place():
    params = {"w": jnp.ones(3, jnp.float16)}
    inner = optax.adam(0.1)
    restored = inner.init(params)
    tx = ols.with_master_weights(inner)
    wrapped = ols.with_loss_scale(tx)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"another structure"):
        tx.update(params, restored, params)
    with pytest.raises(ValueError, match=r"another structure"):
        wrapped.update(
            params, wrapped.init(params)._replace(inner_state=restored), params
        )
    cast_once = optax.tree.cast_like(restored, state.inner_state)
    _, after = tx.update(params, state._replace(inner_state=cast_once), params)
    chex.assert_trees_all_equal_dtypes(after, state)


def test_8_bit_parameters_are_refused():
    tx = ols.with_master_weights(optax.sgd(2.0**-8))
    with pytest.raises(ValueError, match="must be one of 'float16', 'bfloat16', got"):
        tx.init({"w": jnp.ones(3, jnp.float8_e4m3fn)})


@pytest.mark.slow
def test_bfloat16_parameters_reach_the_loss_of_float32_in_the_setting_of_the_demo():
    steps = 400
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps + 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def final_loss(param_dtype, inner):
        tx = ols.with_loss_scale(inner)
        dtype = jnp.promote_types(param_dtype, jnp.bfloat16)

        @jax.jit
        def step(params, state, tokens):
            differentiate = ols.value_and_scaled_grad(
                lambda params, tokens: demo.loss(cast(params, dtype), tokens),
                state,
            )
            loss, grads = differentiate(params, tokens)
            return *tx.apply_gradients(grads, state, params, value=loss), loss

        params, losses = cast(demo.init(jax.random.key(0)), param_dtype), []
        state = tx.init(params)
        for tokens in demo.batches(steps):
            params, state, loss = step(params, state, tokens)
            losses.append(loss)
        return np.mean([float(loss) for loss in losses[-steps // 10 :]])

    wide = final_loss(jnp.float32, optimizer)
    assert final_loss(jnp.bfloat16, ols.with_master_weights(optimizer)) < 1.005 * wide
    assert final_loss(jnp.bfloat16, optimizer) > 1.01 * wide


def test_inner_may_take_no_value_and_parameters_may_hold_a_key():
    inner = ols.with_master_weights(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)))
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    tx = ols.with_loss_scale(inner)
    loss_fn = lambda p: jnp.sum(p["w"].astype(jnp.float32) ** 2)
    _, _, state = tx.minimize(loss_fn, tx.init(params), params)
    assert state.should_apply

    tx = ols.with_loss_scale(ols.with_master_weights(optax.adam(0.1)))
    params |= {"key": jax.random.key(0)}
    grads = {"w": jnp.ones(3), "key": None}
    after, state = tx.apply_gradients(grads, tx.init(params), params)
    assert state.should_apply
    assert (after["key"] == params["key"]).all()
