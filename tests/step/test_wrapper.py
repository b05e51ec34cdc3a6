import copy
import functools
import pickle
import types

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pairs import pairwise

import optax_lossscale as ols

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.25, 0.0])}
LS = ols.DynamicLossScale(initial_scale=1024, growth_interval=3)
X = jnp.array([[1.0, 2.0], [0.5, -1.0]])


def loss_fn(params, x=X):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def overflowing(params):
    return jax.tree.map(lambda p: p.at[(0,) * p.ndim].set(jnp.inf), params)


def through_update(tx):
    def step(grads, state, params, **extra):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


def through_apply_gradients(tx):
    return tx.apply_gradients


WAYS = {"update": through_update, "apply_gradients": through_apply_gradients}
KINDS = {"dynamic": LS, "fixed": ols.FixedLossScale(64), "none": None}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "adafactor": optax.adafactor(1e-2),
    "lion": optax.lion(1e-2),
    "injected": optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(1e-2, 1e-3, 9)
    ),
}
both_ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
each_kind = pytest.mark.parametrize("loss_scale", KINDS.values(), ids=KINDS)
each_optimizer = pytest.mark.parametrize("inner", OPTIMIZERS.values(), ids=OPTIMIZERS)
each_with_each = pairwise(inner=OPTIMIZERS, loss_scale=KINDS, way=WAYS)


@functools.cache
def compiled_step(inner, loss_scale, way):
    """The transformation, its compiled step, and a list that grows when that is traced."""
    tx, traces = ols.with_loss_scale(inner, loss_scale), []

    def step(grads, state, params):
        traces.append(None)
        return way(tx)(grads, state, params)

    return tx, jax.jit(step), traces


compiled_plain_step = functools.cache(lambda inner: jax.jit(through_update(inner)))


def test_is_an_optax_transformation():
    tx = ols.with_loss_scale(optax.adam(1e-3))
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    init, update = tx
    assert (init, update) == (tx.init, tx.update)


def test_the_first_state_is_of_strongly_typed_arrays_and_inners_own():
    state = ols.with_loss_scale(optax.adam(1e-3), LS).init(PARAMS)
    assert isinstance(state, ols.LossScaleState)
    assert state.loss_scale == LS
    assert state.should_apply
    assert (state.skipped_steps, state.consecutive_skipped_steps) == (0, 0)
    for leaf in jax.tree.leaves(state):
        assert isinstance(leaf, jax.Array)
        assert not leaf.weak_type
    chex.assert_trees_all_equal(state.inner_state, optax.adam(1e-3).init(PARAMS))


# The step


def trajectory(step, state, grad_fn):
    params = PARAMS
    for _ in range(4):
        params, state = step(grad_fn(params, state), state, params)
    return params, state


@pairwise(
    inner=OPTIMIZERS,
    loss_scale=KINDS,
    way=WAYS,
    compiled={"eager": False, "compiled": True},
)
def test_equals_the_unwrapped_optimizer(inner, loss_scale, way, compiled):
    """Bit for bit, but for the fused multiply-adds that a compiler may choose otherwise."""
    tx, step, _ = compiled_step(inner, loss_scale, way)
    plain_step = compiled_plain_step(inner)
    with jax.disable_jit(not compiled):
        plain_params, plain_state = trajectory(
            plain_step, inner.init(PARAMS), lambda params, _: jax.grad(loss_fn)(params)
        )
        params, state = trajectory(
            step,
            tx.init(PARAMS),
            lambda params, state: ols.value_and_scaled_grad(loss_fn, state)(params)[1],
        )
    rtol = 1e-5 if compiled else 0
    chex.assert_trees_all_close(
        (params, state.inner_state),
        (plain_params, plain_state),
        rtol=rtol,
        atol=rtol / 100,
    )


@both_ways
@each_optimizer
def test_a_skipped_step_changes_nothing(inner, way):
    tx, step, _ = compiled_step(inner, LS, way)
    params, state = step(
        ols.value_and_scaled_grad(loss_fn, LS)(PARAMS)[1], tx.init(PARAMS), PARAMS
    )
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        grads = ols.value_and_scaled_grad(loss_fn, state)(params)[1]
        grads["b"] = grads["b"].at[1].set(bad)
        after, skipped = step(grads, state, params)
        chex.assert_trees_all_equal(after, params)
        chex.assert_trees_all_equal(skipped.inner_state, state.inner_state)
        assert not skipped.should_apply
        assert skipped.loss_scale() == 512


@both_ways
def test_counts_skipped_steps(way):
    tx = ols.with_loss_scale(optax.adam(1e-3), LS)
    step, params, state = jax.jit(way(tx)), PARAMS, tx.init(PARAMS)
    seen = []
    for finite in (True, False, False, True, False):
        grads = PARAMS if finite else overflowing(PARAMS)
        params, state = step(grads, state, params)
        seen.append([int(s) for s in state[2:5]])
    assert seen == [[1, 0, 0], [0, 1, 1], [0, 2, 2], [1, 2, 0], [0, 3, 1]]


def test_counters_stop_at_the_int32_maximum():
    tx = ols.with_loss_scale(optax.sgd(0.1), LS)
    most = jnp.array(2**31 - 1, jnp.int32)
    state = tx.init(PARAMS)._replace(skipped_steps=most, consecutive_skipped_steps=most)
    _, state = tx.apply_gradients(overflowing(PARAMS), state, PARAMS)
    assert (state.skipped_steps, state.consecutive_skipped_steps) == (most, most)


def test_skipped_updates_are_zero():
    tx = ols.with_loss_scale(optax.adam(1e-3), LS)
    updates, _ = tx.update(overflowing(PARAMS), tx.init(PARAMS))
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, PARAMS))


def test_unscales_by_the_scale_that_scaled():
    ls = ols.DynamicLossScale(initial_scale=8, growth_interval=1)
    tx = ols.with_loss_scale(optax.sgd(1.0), ls)
    params, state = tx.apply_gradients(
        jnp.array(8.0), tx.init(jnp.array(0.0)), jnp.array(0.0)
    )
    assert params == -1
    assert state.loss_scale() == 16


def test_a_clip_inside_clips_true_gradients():
    tx = ols.with_loss_scale(optax.chain(optax.clip(1.0), optax.sgd(1.0)), 1024)
    params, _ = tx.apply_gradients(
        jnp.array(512.0), tx.init(jnp.array(0.0)), jnp.array(0.0)
    )
    assert params == -0.5


def test_a_division_that_overflows_is_an_overflow():
    ls = ols.DynamicLossScale(initial_scale=2.0**-10, min_scale=2.0**-20)
    tx = ols.with_loss_scale(optax.sgd(1.0), ls)
    params, state = jax.jit(tx.apply_gradients)(
        jnp.array(1e37), tx.init(jnp.zeros(())), jnp.ones(())
    )
    assert params == 1
    assert state.skipped_steps == 1


def test_a_fixed_scale_never_skips_if_nothing_is_to_be_skipped():
    tx = ols.with_loss_scale(optax.sgd(1.0), 2, skip=None)
    params, state = tx.apply_gradients(
        jnp.array(jnp.inf), tx.init(jnp.zeros(())), jnp.zeros(())
    )
    assert params == -jnp.inf
    assert state.should_apply
    assert state.skipped_steps == 0


def test_minimize_is_the_loss_its_gradients_and_the_step():
    tx = ols.with_loss_scale(optax.sgd(0.1), LS)
    loss, params, _state = jax.jit(lambda s, p: tx.minimize(loss_fn, s, p, x=2 * X))(
        tx.init(PARAMS), PARAMS
    )
    assert loss == jax.jit(loss_fn)(PARAMS, 2 * X)
    expected = through_update(optax.sgd(0.1))(
        jax.grad(loss_fn)(PARAMS, 2 * X), optax.sgd(0.1).init(PARAMS), PARAMS
    )
    chex.assert_trees_all_close(params, expected[0], rtol=1e-6)
    with_aux = lambda params, x: (loss_fn(params, x), "aux")
    (loss2, aux), params2, _ = tx.minimize(
        with_aux, tx.init(PARAMS), PARAMS, 2 * X, has_aux=True
    )
    assert aux == "aux"
    chex.assert_trees_all_close((loss2, params2), (loss, params), rtol=1e-6)


def test_users_own_strategy_with_an_update_of_its_own():
    class Wary(ols.LossScale):
        """Skips steps whose unscaled gradients are large."""

        def adjust(self, grads_finite):
            return self.replace(loss_scale=self() * jnp.where(grads_finite, 1.0, 0.5))

        def update(self, grads, axis_name=None):
            small = optax.tree.norm(grads) < 10
            return self.adjust(small), small

    tx = ols.with_loss_scale(optax.sgd(1.0), Wary(initial_scale=4.0))
    params, state = tx.apply_gradients(
        jnp.array([36.0]), tx.init(jnp.zeros(1)), jnp.zeros(1)
    )
    assert (params, state.loss_scale()) == (-9, 4)
    params, state = tx.apply_gradients(jnp.array([44.0]), state, params)
    assert (params, state.loss_scale()) == (-9, 2)


@pytest.mark.parametrize("take", [lambda step: step, jax.jit])
@pytest.mark.parametrize("size", [1, 3])
def test_a_strategy_that_decides_number_by_number_is_an_error(size, take):
    class Each(ols.LossScale):
        def adjust(self, grads_finite):
            return self

        def update(self, grads, axis_name=None):
            return self, jnp.isfinite(grads)

    tx = ols.with_loss_scale(optax.sgd(1.0), Each())
    params = jnp.ones(size)
    with pytest.raises(TypeError, match=r"^update of Each must .* got shape \(\d,\)"):
        take(tx.update)(params, tx.init(params), params)


# Precision


@both_ways
@each_optimizer
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_inner_sees_float32_whatever_the_parameters(inner, dtype, way):
    seen = {}

    def spy_init(params):
        seen["init"] = jax.tree.map(lambda x: x.dtype, params)
        return optax.EmptyState()

    def spy_update(updates, state, params=None):
        seen["updates"], seen["params"] = jax.tree.map(
            lambda x: x.dtype, (updates, params)
        )
        return updates, state

    spy = optax.GradientTransformation(spy_init, spy_update)
    tx = ols.with_loss_scale(optax.chain(spy, inner), LS)
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    state = tx.init(params)
    after = jax.eval_shape(way(tx), params, state, params)
    float32 = jax.tree.map(lambda p: jnp.dtype("float32"), PARAMS)
    assert seen == {"init": float32, "updates": float32, "params": float32}
    chex.assert_trees_all_equal_shapes_and_dtypes(after, (params, state))


def test_float64_parameters_stay_float64():
    with jax.enable_x64(True):
        params = jnp.array([1 / 3], jnp.float64)
        tx = ols.with_loss_scale(optax.sgd(0.1), LS)
        new, _ = tx.apply_gradients(1024 * params, tx.init(params), params)
        assert new.dtype == jnp.float64
        np.testing.assert_allclose(new, 0.9 / 3, rtol=1e-15)


# Compilation, loops, memory


@each_with_each
def test_compiles_once(inner, loss_scale, way):
    tx, step, traces = compiled_step(inner, loss_scale, way)
    params, state, before = PARAMS, tx.init(PARAMS), len(traces)
    for _ in range(4):
        params, state = step(params, state, params)
    assert len(traces) <= before + 1


def test_weakly_typed_parameters_compile_once_more_at_most():
    params = jnp.asarray(1.0)
    assert params.weak_type
    tx = ols.with_loss_scale(optax.adam(1e-3), LS)
    params, _state = tx.apply_gradients(params, tx.init(params), params)
    assert not params.weak_type


@each_with_each
def test_a_scan_over_steps_carries_the_state(inner, loss_scale, way):
    tx = ols.with_loss_scale(inner, loss_scale)

    def body(carry, x):
        params, state = carry
        grads = ols.value_and_scaled_grad(loss_fn, state)(params, x)[1]
        params, state = way(tx)(grads, state, params)
        return (params, state), ols.get_loss_scale(state)()

    start = (PARAMS, tx.init(PARAMS))
    xs = jnp.stack([X, X, X * jnp.inf, X])
    end, scales = jax.jit(lambda start: jax.lax.scan(body, start, xs))(start)
    chex.assert_trees_all_equal_shapes_and_dtypes(end, start)
    if loss_scale is LS:
        np.testing.assert_array_equal(scales, [1024, 1024, 512, 512])


@each_kind
def test_a_donated_state_leaves_a_second_init_its_loss_scale(loss_scale):
    tx = ols.with_loss_scale(optax.adamw(1e-2), loss_scale)
    first = jax.tree.map(np.asarray, tx.init(PARAMS).loss_scale)
    step = jax.jit(tx.apply_gradients, donate_argnums=(1, 2))
    for _ in range(2):
        params = jax.tree.map(jnp.array, PARAMS)
        state = tx.init(params)
        for _ in range(2):
            params, state = step(PARAMS, state, params)
    assert tx.init(PARAMS).loss_scale == first


def test_a_donated_state_leaves_a_loss_scale_of_device_arrays_whole():
    tx = ols.with_loss_scale(optax.sgd(0.1), LS.adjust(False))
    step = jax.jit(tx.apply_gradients, donate_argnums=(1,))
    step(PARAMS, tx.init(PARAMS), PARAMS)
    assert tx.init(PARAMS).loss_scale() == 512


def test_evaluates_abstractly():
    tx = ols.with_loss_scale(optax.adamw(1e-3), LS)
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float16), PARAMS)
    state = jax.eval_shape(tx.init, params)
    out = jax.eval_shape(tx.apply_gradients, params, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(out, (params, state))


def test_nothing_waits_for_the_device():
    """No value is fetched: a step on abstract values, and one under a transfer guard."""
    tx = ols.with_loss_scale(optax.adamw(1e-3), LS)
    params = jax.tree.map(jnp.array, PARAMS)

    @jax.jit
    def train_step(params, state):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params)
        return *tx.apply_gradients(grads, state, params), loss

    state = tx.init(params)
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            params, state, _ = train_step(params, state)
    text = train_step.lower(params, state).compile().as_text()
    assert "callback" not in text
    assert "outfeed" not in text


def test_a_population_under_vmap_skips_each_for_itself():
    tx = ols.with_loss_scale(optax.adam(1e-2), LS)
    seeds = jnp.array([1.0, jnp.inf, 2.0])
    params = jax.vmap(lambda s: jax.tree.map(lambda p: p + 0 * s, PARAMS))(jnp.ones(3))
    state = jax.vmap(tx.init)(params)
    grads = jax.vmap(lambda p, s: ols.value_and_scaled_grad(loss_fn, LS)(p, X * s)[1])(
        params, seeds
    )
    new, state = jax.jit(jax.vmap(tx.apply_gradients))(grads, state, params)
    np.testing.assert_array_equal(state.loss_scale.loss_scale, [1024, 512, 1024])
    np.testing.assert_array_equal(new["w"][1], PARAMS["w"])
    assert (new["w"][0] != PARAMS["w"]).all()


# Composition


def test_inside_a_chain_hands_on_unscaled_updates():
    tx = optax.chain(ols.with_loss_scale(optax.sgd(1.0), LS), optax.scale(0.5))
    state = tx.init(PARAMS)
    updates, state = jax.jit(tx.update)(
        ols.value_and_scaled_grad(loss_fn, state)(PARAMS)[1], state, PARAMS
    )
    expected = jax.tree.map(lambda g: -0.5 * g, jax.grad(loss_fn)(PARAMS))
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)


def test_extra_arguments_reach_inner():
    inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1))
    tx = ols.with_loss_scale(inner, LS)
    _, state = tx.apply_gradients(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.array(3.0))
    assert state.inner_state[1].best_value == 3


# Parts of trees


@both_ways
@pytest.mark.parametrize("callable_mask", [False, True])
def test_leaves_masked_out_are_neither_unscaled_nor_checked(way, callable_mask):
    mask = {"w": True, "history": {"amax": False}}
    labels = {"w": "sgd", "history": "overwrite"}
    overwrite = optax.stateless(lambda g, p: jax.tree.map(lambda g, p: g - p, g, p))
    tx = ols.with_loss_scale(
        optax.partition({"sgd": optax.sgd(1.0), "overwrite": overwrite}, labels),
        LS,
        mask=(lambda _: mask) if callable_mask else mask,
    )
    params = {"w": jnp.zeros(2), "history": {"amax": jnp.zeros(())}}
    grads = {"w": jnp.full(2, 1024.0), "history": {"amax": jnp.array(7.0)}}
    params, state = jax.jit(way(tx))(grads, tx.init(params), params)
    chex.assert_trees_all_equal(
        params, {"w": -jnp.ones(2), "history": {"amax": jnp.array(7.0)}}
    )
    grads["history"]["amax"] = jnp.array(jnp.inf)
    _, state = jax.jit(way(tx))(grads, state, params)
    assert state.should_apply
    grads["w"] = grads["w"].at[0].set(jnp.nan)
    _, state = jax.jit(way(tx))(grads, state, params)
    assert not state.should_apply


def test_a_mask_that_is_a_callable_tree_is_not_called():
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    mask = jax.tree.map(lambda _: True, model)
    tx = ols.with_loss_scale(optax.sgd(1.0), LS, mask=mask)
    grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), model)
    _, state = tx.apply_gradients(grads, tx.init(model), model)
    assert not state.should_apply


@each_optimizer
def test_a_parameter_whose_gradient_is_none_stays(inner):
    tx = ols.with_loss_scale(inner, LS)
    state, step = tx.init(PARAMS), jax.jit(tx.apply_gradients)
    params, state = step({"w": None, "b": PARAMS["b"] + 1}, state, PARAMS)
    chex.assert_trees_all_equal(params["w"], PARAMS["w"])
    assert (params["b"] != PARAMS["b"]).all()
    assert state.should_apply
    _, state = step({"w": None, "b": jnp.full(2, jnp.inf)}, state, params)
    assert state.skipped_steps == 1


def test_the_update_for_a_gradient_that_is_none_is_zero():
    tx = ols.with_loss_scale(optax.adamw(0.1, weight_decay=0.1), LS)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    updates, _ = tx.update({"w": None, "b": PARAMS["b"]}, state, PARAMS)
    chex.assert_trees_all_equal(updates["w"], jnp.zeros_like(PARAMS["w"]))


def test_trees_with_none_and_empty_trees_keep_their_structure():
    tx = ols.with_loss_scale(optax.adam(1e-3), LS)
    for params in ({}, (), {"w": jnp.ones(2), "frozen": None}):
        new, state = tx.apply_gradients(params, tx.init(params), params)
        assert jax.tree.structure(new) == jax.tree.structure(params)
        assert state.should_apply


def test_leaves_whose_gradient_is_their_new_value_are_overwritten():
    overwrite = optax.stateless(lambda new, old: jax.tree.map(jnp.subtract, new, old))
    inner = optax.partition(
        {"train": optax.sgd(0.5), "set": overwrite}, {"w": "train", "s": "set"}
    )
    tx = ols.with_loss_scale(inner, LS, mask={"w": True, "s": False})
    params = {"w": jnp.ones(2), "s": jnp.ones(())}
    state = tx.init(params)
    grads = {"w": state.loss_scale.scale(jnp.ones(2)), "s": jnp.float32(3.0)}
    params, _ = tx.apply_gradients(grads, state, params)
    chex.assert_trees_all_equal(params, {"w": jnp.full(2, 0.5), "s": jnp.float32(3.0)})


def test_masked_leaves_too_reach_inner_in_float32():
    tx = ols.with_loss_scale(optax.adam(1e-2), LS, mask={"w": False, "b": True})
    params = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS)
    grads = jax.tree.map(lambda p: jnp.full_like(p, 1e-4), params)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -1e-2, rtol=1e-2)


def test_lookahead_steps_with_its_two_trees_of_parameters():
    inner = optax.lookahead(optax.sgd(1.0), sync_period=2, slow_step_size=0.5)
    tx = ols.with_loss_scale(inner, LS)
    params = optax.LookaheadParams.init_synced(PARAMS)
    grads = jax.tree.map(lambda p: 1024 * jnp.ones_like(p), PARAMS)
    new, _ = jax.jit(tx.apply_gradients)(grads, tx.init(params), params)
    chex.assert_trees_all_equal(new.fast, jax.tree.map(lambda p: p - 1, PARAMS))


def test_float8_parameters_stay_float8():
    params = jnp.ones(3, jnp.float8_e4m3fn)
    tx = ols.with_loss_scale(optax.sgd(0.5), 1)
    new, _ = tx.apply_gradients(params, tx.init(params), params)
    assert new.dtype == params.dtype
    np.testing.assert_array_equal(new.astype(jnp.float32), 0.5)


def test_a_state_that_holds_the_parameters_can_be_donated_with_them():
    tx = ols.with_loss_scale(optax.contrib.dowg(), LS)
    params = jax.tree.map(jnp.array, PARAMS)
    jax.jit(tx.apply_gradients, donate_argnums=(1, 2))(PARAMS, tx.init(params), params)


def test_a_scale_that_is_a_constant_to_the_compiler_unscales_alike():
    ls = ols.DynamicLossScale(initial_scale=0.5, min_scale=2.0**-20)
    tx, params = ols.with_loss_scale(optax.sgd(1.0), ls), jnp.zeros(3)
    step = lambda g: tx.apply_gradients(g, tx.init(params), params)
    new, state = jax.jit(step)(jnp.full(3, 3e38))
    np.testing.assert_array_equal(new, params)
    assert not state.should_apply
    huge = ols.DynamicLossScale(initial_scale=2.0**60)
    np.testing.assert_array_equal(jax.jit(huge.unscale)(jnp.full(3, 2.0**60)), 1)


def init_nothing(params):
    return optax.EmptyState()


def halve(updates, state, params=None):
    return jax.tree.map(lambda u: -0.5 * u, updates), state


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda tx: jax.tree.map(lambda x: x, tx),
        lambda tx: tx._replace(),
    ],
    ids=["copy", "deepcopy", "tree.map", "_replace"],
)
def test_a_copy_takes_the_same_step(copied):
    tx = ols.with_loss_scale(optax.adam(1e-2), LS)
    same = copied(tx)
    assert type(same) is ols.LossScaledTransformation
    state = same.init(PARAMS)
    chex.assert_trees_all_equal(state, tx.init(PARAMS))
    for step, original in (
        (same.apply_gradients, tx.apply_gradients),
        (same.update, tx.update),
    ):
        chex.assert_trees_all_equal(
            step(PARAMS, state, PARAMS), original(PARAMS, state, PARAMS)
        )


def test_what_is_made_of_module_level_functions_can_be_pickled():
    inner = optax.GradientTransformation(init_nothing, halve)
    tx = ols.with_loss_scale(inner, LS, axis_name=None, mask={"w": True, "b": False})
    same = pickle.loads(pickle.dumps(tx))
    assert type(same) is ols.LossScaledTransformation
    chex.assert_trees_all_equal(
        same.apply_gradients(PARAMS, same.init(PARAMS), PARAMS),
        tx.apply_gradients(PARAMS, tx.init(PARAMS), PARAMS),
    )


def test_init_can_be_replaced():
    """To start with another scale, say, and keep the step."""
    tx = ols.with_loss_scale(optax.sgd(1.0), LS)
    quiet = lambda params: tx.init(params)._replace(
        loss_scale=LS.replace(loss_scale=8.0)
    )
    same = tx._replace(init=quiet)
    params, state = same.apply_gradients(PARAMS, same.init(PARAMS), PARAMS)
    assert state.loss_scale() == 8
    chex.assert_trees_all_equal(params, jax.tree.map(lambda p: p - p / 8, PARAMS))
    _, params, _ = same.minimize(loss_fn, state, params)
    chex.assert_tree_all_finite(params)


def test_apply_gradients_refuses_to_take_another_step_than_a_replaced_update():
    tx = ols.with_loss_scale(optax.sgd(1.0), LS)
    other = tx._replace(
        update=lambda updates, state, params=None, **extra: (updates, state)
    )
    state = other.init(PARAMS)
    assert other.update(PARAMS, state) == (PARAMS, state)
    for step in (
        lambda: other.apply_gradients(PARAMS, state, PARAMS),
        lambda: other.minimize(loss_fn, state, PARAMS),
    ):
        with pytest.raises(
            TypeError, match=r"update, which was replaced\. .*apply_updates"
        ):
            step()


# Bad input


@pytest.mark.parametrize("grads", [{"w": jnp.ones(2)}, {}, jnp.ones(3), [1.0, 2.0]])
@both_ways
def test_gradients_of_another_structure_are_refused(grads, way):
    tx = ols.with_loss_scale(optax.sgd(0.1), LS)
    with pytest.raises(ValueError, match="must have the structure of the parameters"):
        way(tx)(grads, tx.init(PARAMS), PARAMS)


@both_ways
@pytest.mark.parametrize("state", [None, PARAMS, optax.adam(1e-3).init(PARAMS)])
def test_a_state_that_is_not_its_own_is_refused(state, way):
    tx = ols.with_loss_scale(optax.adam(1e-3), LS)
    with pytest.raises(
        TypeError, match=r"must be the LossScaleState .* got a (NoneType|dict|tuple)"
    ):
        way(tx)(PARAMS, state, PARAMS)


@pytest.mark.parametrize("returned", [None, 2.0, LS, ols.FixedLossScale(1)])
def test_a_strategy_that_returns_something_else_is_refused(returned):
    class Forgetful(ols.LossScale):
        def adjust(self, grads_finite):
            return returned

    tx = ols.with_loss_scale(optax.sgd(0.1), Forgetful())
    with pytest.raises(
        TypeError,
        match=r"Forgetful\.adjust returns must have the class and configuration of",
    ):
        tx.apply_gradients(PARAMS, tx.init(PARAMS), PARAMS)


def test_the_error_names_the_method_that_returned_something_else():
    class Measuring(ols.LossScale):
        def adjust(self, grads_finite):
            return self

        def update(self, grads, axis_name=None):
            return LS, True

    tx = ols.with_loss_scale(optax.sgd(0.1), Measuring())
    with pytest.raises(
        TypeError, match=r"Measuring\.update returns .*self\.replace\(…\)\."
    ):
        tx.apply_gradients(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    "inner",
    [
        None,
        "adam",
        optax.adam,
        1e-3,
        optax.constant_schedule(1.0),
        types.SimpleNamespace(init=optax.sgd(0.1).init),
        types.SimpleNamespace(update=optax.sgd(0.1).update),
    ],
)
def test_an_inner_that_is_no_transformation_is_refused(inner):
    with pytest.raises(
        TypeError, match="inner must be an Optax gradient transformation"
    ):
        ols.with_loss_scale(inner)


def test_an_unknown_loss_scale_is_refused_at_construction():
    with pytest.raises(ValueError, match="a loss scale is None"):
        ols.with_loss_scale(optax.sgd(0.1), "static")


def test_a_state_in_16_bits_is_refused_where_init_makes_float32_and_taken_once_cast():
    """That of a bare optimizer of float16 parameters, whose second moments underflow."""
    params = {"w": jnp.full(3, 0.5, jnp.float16)}
    inner = optax.adam(1e-3)
    tx = ols.with_loss_scale(inner, 1)
    state, restored = tx.init(params), inner.init(params)
    for step in (tx.update, tx.apply_gradients):
        with pytest.raises(
            ValueError,
            match=r"float16\[3\] where it needs float32\[3\], at 0/mu/w.*cast",
        ):
            step(params, state._replace(inner_state=restored), params)
    state = state._replace(
        inner_state=optax.tree.cast_like(restored, state.inner_state)
    )
    grads = {"w": jnp.full(3, 1e-4, jnp.float16)}
    after, state = tx.apply_gradients(grads, state, params)
    expected = np.square(grads["w"].astype(jnp.float32)) * 1e-3
    np.testing.assert_allclose(state.inner_state[0].nu["w"], expected, rtol=1e-3)
    np.testing.assert_allclose(after["w"].astype(jnp.float32), 0.5 - 1e-3, rtol=1e-3)


def test_slots_that_the_inner_optimizer_keeps_in_16_bits_are_its_own():
    params = {"w": jnp.ones(3, jnp.float16)}
    tx = ols.with_loss_scale(optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    state = tx.init(params)
    _, after = tx.apply_gradients(params, state, params)
    assert after.inner_state[0].mu["w"].dtype == jnp.bfloat16
    assert after.should_apply


def test_a_strategy_whose_state_changes_shape_is_refused_at_that_step():
    class Growing(ols.LossScale):
        def adjust(self, grads_finite):
            return self.replace(loss_scale=self.loss_scale * jnp.ones(1))

    tx = ols.with_loss_scale(optax.sgd(0.1), Growing())
    with pytest.raises(
        TypeError, match=r"Growing\.adjust returns .* of the same shapes"
    ):
        tx.apply_gradients(PARAMS, tx.init(PARAMS), PARAMS)


def test_a_loss_scale_that_is_no_number_is_named_as_the_argument_is():
    with pytest.raises(ValueError, match=r"^loss_scale must be a number between"):
        ols.with_loss_scale(optax.sgd(0.1), -1)
