"""16-bit parameters are the rounding of float32 numbers, which are what is trained."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import each_way

import optax_lossscale as ols
from optax_lossscale import demo

PARAMS = {
    "w": jnp.linspace(-2.0, 3.0, 24).reshape(4, 6),
    "b": jnp.linspace(0.01, 100.0, 6),
}
# A step in which bfloat16 has an eighth of what it can add to 1, and float16 all of it.
STEP = 2.0**-10
each_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
each_wrap = pytest.mark.parametrize(
    "wrap",
    [lambda tx: tx, lambda tx: ols.with_loss_scale(tx, 1)],
    ids=["own", "wrapped"],
)


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def rounded(tree, dtype):
    """Float32 numbers in 16 bits, ties in bfloat16 away from zero."""
    if dtype != "bfloat16":
        return cast(tree, dtype)
    upper = lambda x: ((np.asarray(x).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    return jax.tree.map(lambda x: jnp.asarray(upper(x).view(jnp.bfloat16.dtype)), tree)


def gradients(params, n):
    wide = cast(params, jnp.float32)
    return jax.tree.map(lambda p: 1e-3 * (jnp.sin(7.0 * p + n) + 0.5), wide)


def own_state(state):
    is_own = lambda x: hasattr(x, "remainders")
    [own] = filter(is_own, jax.tree.leaves(state, is_leaf=is_own))
    return own


def trained(tx, params, grads, state=None, between=lambda params: params):
    """Parameters and state after a step for each of the gradients."""

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


@each_way
def test_a_skipped_step_leaves_the_master_weights_bit_for_bit(way):
    params = cast(PARAMS, jnp.bfloat16)
    tx = ols.with_loss_scale(ols.with_master_weights(optax.adam(1e-2)))
    step, state = jax.jit(way(tx)), tx.init(params)
    params, state = step(gradients(params, 0), state, params)
    skipped, after = step(jax.tree.map(lambda p: p * jnp.inf, params), state, params)
    chex.assert_trees_all_equal(skipped, params)
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)


def test_what_is_wide_already_or_no_float_is_kept_once():
    params = {"w": jnp.ones(3, jnp.float16), "b": jnp.ones(2), "n": jnp.array([1, 2])}
    tx = ols.with_master_weights(optax.sgd(0.25))
    state = tx.init(params)
    assert [x.dtype for x in jax.tree.leaves(state.remainders)] == [jnp.float32]
    grads = {"w": params["w"], "b": params["b"], "n": jnp.zeros(2, jnp.int32)}
    updates, after = tx.update(grads, state, params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(new["w"], np.full(3, 0.75, np.float16))
    np.testing.assert_array_equal(new["b"], np.full(2, 0.75, np.float32))
    chex.assert_trees_all_equal_structs(after, state)


def test_bfloat16_parameters_take_16_bits_more_and_no_copy():
    params = cast(PARAMS, jnp.bfloat16)
    nbytes = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    tx = ols.with_master_weights(optax.sgd(0.1))
    assert nbytes(tx.init(params)) == nbytes(params)


def test_donated_and_sharded_parameters_keep_their_place():
    mesh = jax.make_mesh((4,), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    params = {"w": jax.device_put(jnp.ones((4, 2), jnp.float16), place)}
    tx = ols.with_loss_scale(ols.with_master_weights(optax.sgd(2.0**-14)), 1)
    state = jax.jit(tx.init)(params)
    step = jax.jit(lambda p, s, g: tx.apply_gradients(g, s, p), donate_argnums=(0, 1))
    for _ in range(16):
        params, state = step(params, state, jax.tree.map(jnp.ones_like, params))
    assert params["w"].sharding.is_equivalent_to(place, 2)
    expected = np.full((4, 2), 1 - 2.0**-10, np.float16)
    np.testing.assert_array_equal(params["w"], expected)


# Parameters that something else changes


@each_wrap
@each_dtype
def test_parameters_loaded_after_init_are_those_that_are_trained(dtype, wrap):
    tx = wrap(ols.with_master_weights(optax.sgd(STEP)))
    state = tx.init(cast({"w": jnp.zeros(3)}, dtype))
    loaded = jnp.array([1.0, -300.0, 2e-5], dtype)
    params, state = trained(tx, {"w": loaded}, 8 * [1.0], state)
    weights = own_state(state).weights(params)
    expected = {"w": loaded.astype(jnp.float32) - 8 * STEP}
    chex.assert_trees_all_close(weights, expected, rtol=1e-6)
    chex.assert_trees_all_equal(params, rounded(weights, dtype))


@each_dtype
def test_a_parameter_changed_between_steps_is_right(dtype):
    """An average, a pruned one, a new layer's; the last one stays."""
    tx = ols.with_master_weights(optax.sgd(STEP))
    params = {"w": jnp.array([1.0, 2.0, -3.0, 5.0], dtype)}
    params, state = trained(tx, params, 5 * [1.3])
    kept = state.weights(params)["w"][3]
    params = {"w": params["w"].at[:3].set(jnp.array([-7.0, 0.0, 1e-3], dtype))}
    weights = state.weights(params)
    chex.assert_trees_all_equal(rounded(weights, dtype), params)
    assert weights["w"][3] == kept
    params, state = trained(tx, params, 4 * [1.0], state)
    after = state.weights(params)
    chex.assert_trees_all_close(after["w"], weights["w"] - 4 * STEP, rtol=1e-6)


@each_dtype
def test_a_clipped_parameter_turns_round_with_one_in_float32(dtype):
    clipped = lambda params: jax.tree.map(lambda p: jnp.clip(p, -1, 1), params)
    grads = 50 * [-1.0] + 20 * [1.0]
    tx = ols.with_master_weights(optax.sgd(STEP))
    params, state = trained(tx, {"w": jnp.ones(2, dtype)}, grads, between=clipped)
    expected, _ = trained(optax.sgd(STEP), {"w": jnp.ones(2)}, grads, between=clipped)
    half_of_the_last_place = jnp.finfo(dtype).eps / 2
    weights = state.weights(params)
    chex.assert_trees_all_close(weights, expected, rtol=0, atol=half_of_the_last_place)


@each_dtype
def test_a_small_parameter_of_either_zero_is_still_trained(dtype):
    """A float16 zero may stand for a number below 2**-25, whose sign its updates lose."""
    size = 1e-9 if dtype == "float16" else 1e-37
    tx = ols.with_master_weights(optax.sgd(size))
    params, state = trained(tx, {"w": jnp.array([0.0, -0.0], dtype)}, 8 * [1.0])
    expected = {"w": jnp.full(2, -8 * size)}
    chex.assert_trees_all_close(state.weights(params), expected, rtol=1e-5)


def test_an_infinite_parameter_stays_and_a_nan_spreads_to_no_other():
    params = {"w": jnp.array([jnp.inf, jnp.nan, 1.0], jnp.bfloat16)}
    params, state = trained(ols.with_master_weights(optax.sgd(STEP)), params, 8 * [1.0])
    odd = params["w"][:2].astype(jnp.float32)
    np.testing.assert_array_equal(odd, [jnp.inf, jnp.nan])
    assert state.weights(params)["w"][2] == 1 - 8 * STEP


# What is around it and inside


AROUND = {
    "chain": lambda tx: optax.chain(optax.clip(1.0), optax.chain(optax.scale(1.0), tx)),
    "named_chain": lambda tx: optax.named_chain(("z", optax.clip(1.0)), ("a", tx)),
    "masked": lambda tx: optax.masked(tx, {"w": True}),
    "partition": lambda tx: optax.partition({"a": tx, "b": optax.sgd(0.1)}, {"w": "a"}),
    "flatten": optax.flatten,
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_what_hands_its_updates_on_may_be_around_it(around):
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    own = ols.with_master_weights(optax.sgd(STEP))
    tx = ols.with_loss_scale(around(own), 1)
    after, state = trained(tx, params, 4 * [1.0])
    chex.assert_trees_all_equal(after, {"w": jnp.full(2, 1 - 2.0**-8, jnp.bfloat16)})
    assert [x.dtype for x in jax.tree.leaves(own_state(state).remainders)] == ["uint16"]


def test_lookahead_inside_follows_that_of_float32_parameters():
    inner = optax.lookahead(optax.sgd(STEP), 3, 0.5)
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    wide = cast(params, jnp.float32)

    def run(tx, params):
        params = optax.LookaheadParams.init_synced(params)
        state = tx.init(params)
        for _ in range(10):
            updates, state = tx.update(wide, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    after, state = run(ols.with_master_weights(inner), params)
    chex.assert_trees_all_close(state.weights(after), run(inner, wide)[0], rtol=1e-6)


def test_steps_are_accumulated_inside():
    tx = ols.with_master_weights(optax.MultiSteps(optax.sgd(STEP), 2))
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    params, state = trained(tx, params, [1.0, 3.0, 2.0, 0.0])
    np.testing.assert_array_equal(state.weights(params)["w"], 1 - 3 * STEP)


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
    of_w = lambda state: (state.inner_state[0].mu["w"], state.remainders["w"])
    chex.assert_trees_all_equal(of_w(after), of_w(state))


# What is refused


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


def test_the_state_of_a_bare_optimizer_is_refused_and_taken_when_cast_into_its_place():
    params = {"w": jnp.ones(3, jnp.float16)}
    inner = optax.adam(0.1)
    tx = ols.with_master_weights(inner)
    restored, state = inner.init(params), tx.init(params)
    with pytest.raises(ValueError, match="another structure"):
        tx.update(params, restored, params)
    cast_once = optax.tree.cast_like(restored, state.inner_state)
    _, after = tx.update(params, state._replace(inner_state=cast_once), params)
    chex.assert_trees_all_equal_dtypes(after, state)


def test_other_gradients_and_parameters_are_refused():
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    tx = ols.with_master_weights(optax.sgd(0.1))
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match=r"of shape \(3,\) has the shape \(2, 3\)"):
        tx.update({"w": jnp.ones((2, 3))}, tx.init(params), params)
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
        loss_fn = lambda params, tokens: demo.loss(cast(params, dtype), tokens)
        step = jax.jit(lambda s, p, tokens: tx.minimize(loss_fn, s, p, tokens))
        params, losses = cast(demo.init(jax.random.key(0)), param_dtype), []
        state = tx.init(params)
        for tokens in demo.batches(steps):
            loss, params, state = step(state, params, tokens)
            losses.append(float(loss))
        return np.mean(losses[-steps // 10 :])

    wide = final_loss(jnp.float32, optimizer)
    assert final_loss(jnp.bfloat16, ols.with_master_weights(optimizer)) < 1.005 * wide
    assert final_loss(jnp.bfloat16, optimizer) > 1.01 * wide
