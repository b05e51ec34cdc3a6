"""`with_loss_scale`: the transformation, its state, its step, and how it compiles."""

import copy
import pickle

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import each_way

import optax_lossscale as ols

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.25, 0.0])}
LS = ols.DynamicLossScale(initial_scale=1024, growth_interval=3)
X = jnp.array([[1.0, 2.0], [0.5, -1.0]])
OVERFLOW = jax.tree.map(lambda p: p + jnp.inf, PARAMS)
KINDS = {"dynamic": LS.adjust(True), "fixed": 64, "none": None, "headroom": "headroom"}
each_kind = pytest.mark.parametrize("loss_scale", KINDS.values(), ids=KINDS)


def loss_fn(params, x=X):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def stepped(tx, grads, params):
    return tx.apply_gradients(grads, tx.init(params), params)


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
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
    chex.assert_trees_all_equal(state.inner_state, optax.adam(1e-3).init(PARAMS))


# The step


@each_way
def test_counts_skipped_steps(way):
    tx = ols.with_loss_scale(optax.adam(1e-3), LS)
    step, params, state = jax.jit(way(tx)), PARAMS, tx.init(PARAMS)
    seen = []
    for grads in (PARAMS, OVERFLOW, OVERFLOW, PARAMS, OVERFLOW):
        params, state = step(grads, state, params)
        seen.append([int(s) for s in state[2:5]])
    assert seen == [[1, 0, 0], [0, 1, 1], [0, 2, 2], [1, 2, 0], [0, 3, 1]]


def test_counters_stop_at_the_int32_maximum():
    tx = ols.with_loss_scale(optax.sgd(0.1), LS)
    most = jnp.array(2**31 - 1, jnp.int32)
    state = tx.init(PARAMS)._replace(skipped_steps=most, consecutive_skipped_steps=most)
    _, state = tx.apply_gradients(OVERFLOW, state, PARAMS)
    assert (state.skipped_steps, state.consecutive_skipped_steps) == (most, most)


def test_unscales_by_the_scale_that_scaled():
    ls = ols.DynamicLossScale(initial_scale=8, growth_interval=1)
    tx = ols.with_loss_scale(optax.sgd(1.0), ls)
    params, state = stepped(tx, jnp.array(8.0), jnp.array(0.0))
    assert params == -1
    assert state.loss_scale() == 16


def test_a_division_that_overflows_is_an_overflow():
    ls = ols.DynamicLossScale(initial_scale=2.0**-10, min_scale=2.0**-20)
    tx = ols.with_loss_scale(optax.sgd(1.0), ls)
    params, state = stepped(tx, jnp.array(1e37), jnp.array(1.0))
    assert params == 1
    assert state.skipped_steps == 1


# Precision


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_inner_sees_float32_whatever_the_parameters(dtype):
    seen = {}

    def init(params):
        seen["init"] = jax.tree.map(lambda x: x.dtype, params)
        return optax.EmptyState()

    def update(grads, state, params=None):
        seen["grads"], seen["params"] = jax.tree.map(lambda x: x.dtype, (grads, params))
        return grads, state

    # What the mask excludes is widened, too.
    mask = {"w": True, "b": False}
    tx = ols.with_loss_scale(optax.GradientTransformation(init, update), LS, mask=mask)
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    state = tx.init(params)
    after = jax.eval_shape(tx.apply_gradients, params, state, params)
    float32 = jax.tree.map(lambda p: jnp.dtype("float32"), PARAMS)
    assert seen == {"init": float32, "grads": float32, "params": float32}
    chex.assert_trees_all_equal_shapes_and_dtypes(after, (params, state))


def test_float64_parameters_stay_float64():
    with jax.enable_x64(True):
        params = jnp.array([1 / 3], jnp.float64)
        tx = ols.with_loss_scale(optax.sgd(0.1), LS)
        new, _ = stepped(tx, 1024 * params, params)
        assert new.dtype == jnp.float64
        np.testing.assert_allclose(new, 0.9 / 3, rtol=1e-15)


def test_slots_that_the_inner_optimizer_keeps_in_16_bits_are_its_own():
    params = {"w": jnp.ones(3, jnp.float16)}
    tx = ols.with_loss_scale(optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    _, state = stepped(tx, params, params)
    assert state.inner_state[0].mu["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("compiled", [False, True])
def test_the_inner_state_keeps_its_strong_dtypes(compiled):
    init = lambda params: jnp.zeros((), jnp.float16)
    update = lambda updates, state, params=None: (updates, jnp.asarray(1.0))
    tx = ols.with_loss_scale(optax.GradientTransformation(init, update))
    step = jax.jit(tx.update) if compiled else tx.update
    _, state = step(PARAMS, tx.init(PARAMS), PARAMS)
    expected = jax.eval_shape(tx.init, PARAMS).inner_state
    after = state.inner_state
    assert (after.dtype, after.weak_type) == (expected.dtype, False)


# Compilation, loops, memory


@each_kind
def test_steps_compile_once_and_a_scan_carries_the_state(loss_scale):
    tx = ols.with_loss_scale(optax.adam(1e-2), loss_scale)

    @chex.assert_max_traces(n=1)
    def step(params, state, x):
        _, params, state = tx.minimize(loss_fn, state, params, x)
        return params, state

    start = after = (PARAMS, tx.init(PARAMS))
    compiled = jax.jit(step)
    xs = jnp.stack([X, X, X * jnp.inf, X])
    for x in xs:
        after = compiled(*after, x)
    body = lambda carry, x: (compiled(*carry, x), None)
    end, _ = jax.jit(lambda start: jax.lax.scan(body, start, xs))(start)
    chex.assert_trees_all_equal_shapes_and_dtypes(end, after, start)
    chex.assert_trees_all_close(end, after, rtol=1e-6)


def test_weakly_typed_parameters_become_strongly_typed():
    params = jnp.asarray(1.0)
    assert params.weak_type
    tx = ols.with_loss_scale(optax.adam(1e-3), LS)
    assert not stepped(tx, params, params)[0].weak_type


@each_kind
def test_what_init_returns_may_be_donated(loss_scale):
    """Though the transformation keeps its loss scale, and an optimizer its parameters."""
    rule, _ = ols.skips.spikes().update(1.0)  # whose state is on the device
    tx = ols.with_loss_scale(optax.contrib.dowg(), loss_scale, skip=rule)
    first = jax.tree.map(np.asarray, tx.init(PARAMS).loss_scale)
    step = jax.jit(tx.apply_gradients, donate_argnums=(1, 2))
    for _ in range(2):
        params = jax.tree.map(jnp.array, PARAMS)
        params, state = step(PARAMS, tx.init(params), params)
        step(PARAMS, state, params)
    assert tx.init(PARAMS).loss_scale == first


def test_nothing_waits_for_the_device():
    tx = ols.with_loss_scale(optax.adamw(1e-3), LS)
    params, state = jax.tree.map(jnp.array, PARAMS), tx.init(PARAMS)
    step = jax.jit(lambda state, params: tx.minimize(loss_fn, state, params))
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            _, params, state = step(state, params)
    text = step.lower(state, params).compile().as_text()
    assert "callback" not in text
    assert "outfeed" not in text


# Parts of trees


@each_way
@pytest.mark.parametrize("callable_mask", [False, True])
def test_leaves_masked_out_are_neither_unscaled_nor_checked(way, callable_mask):
    mask = {"w": True, "history": {"amax": False}}
    labels = {"w": "sgd", "history": "overwrite"}
    overwrite = optax.stateless(lambda g, p: jax.tree.map(jnp.subtract, g, p))
    tx = ols.with_loss_scale(
        optax.partition({"sgd": optax.sgd(1.0), "overwrite": overwrite}, labels),
        LS,
        mask=(lambda _: mask) if callable_mask else mask,
    )
    step = jax.jit(way(tx))
    params = {"w": jnp.zeros(2), "history": {"amax": jnp.zeros(())}}
    grads = {"w": jnp.full(2, 1024.0), "history": {"amax": jnp.array(7.0)}}
    params, state = step(grads, tx.init(params), params)
    expected = {"w": -jnp.ones(2), "history": {"amax": jnp.array(7.0)}}
    chex.assert_trees_all_equal(params, expected)
    grads["history"]["amax"] = jnp.array(jnp.inf)
    _, state = step(grads, state, params)
    assert state.should_apply
    grads["w"] = grads["w"].at[0].set(jnp.nan)
    _, state = step(grads, state, params)
    assert not state.should_apply


def test_a_mask_that_is_a_callable_tree_is_not_called():
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    mask = jax.tree.map(lambda _: True, model)
    tx = ols.with_loss_scale(optax.sgd(1.0), LS, mask=mask)
    grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), model)
    assert not stepped(tx, grads, model)[1].should_apply


def test_trees_with_none_and_empty_trees_keep_their_structure():
    tx = ols.with_loss_scale(optax.adam(1e-3), LS)
    for params in ({}, (), {"w": jnp.ones(2), "frozen": None}):
        new, state = stepped(tx, params, params)
        assert jax.tree.structure(new) == jax.tree.structure(params)
        assert state.should_apply


# Copies of the transformation


def init_nothing(params):
    return optax.EmptyState()


def halve(updates, state, params=None):
    return jax.tree.map(lambda u: -0.5 * u, updates), state


COPIES = {
    "deepcopy": copy.deepcopy,
    "tree.map": lambda tx: jax.tree.map(lambda x: x, tx),
    "pickle": lambda tx: pickle.loads(pickle.dumps(tx)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_takes_the_same_step(copied):
    """As what it is made of can be copied: Optax's own functions cannot be pickled."""
    inner = optax.GradientTransformation(init_nothing, halve)
    tx = ols.with_loss_scale(inner, LS, mask={"w": True, "b": False})
    same = copied(tx)
    assert type(same) is ols.LossScaledTransformation
    chex.assert_trees_all_equal(
        stepped(same, PARAMS, PARAMS), stepped(tx, PARAMS, PARAMS)
    )


def test_init_can_be_replaced():
    """To start with another scale, say, and keep the step."""
    tx = ols.with_loss_scale(optax.sgd(1.0), LS)
    quiet = LS.replace(loss_scale=8.0)
    same = tx._replace(init=lambda params: tx.init(params)._replace(loss_scale=quiet))
    params, _ = stepped(same, PARAMS, PARAMS)
    chex.assert_trees_all_equal(params, jax.tree.map(lambda p: p - p / 8, PARAMS))


def test_apply_gradients_refuses_to_take_another_step_than_a_replaced_update():
    tx = ols.with_loss_scale(optax.sgd(1.0), LS)
    other = tx._replace(update=lambda updates, state, params=None: (updates, state))
    state = other.init(PARAMS)
    assert other.update(PARAMS, state) == (PARAMS, state)
    said = r"update, which was replaced\. .*apply_updates"
    with pytest.raises(TypeError, match=said):
        other.apply_gradients(PARAMS, state, PARAMS)
    with pytest.raises(TypeError, match=said):
        other.minimize(loss_fn, state, PARAMS)


# A loss scale of one's own


def test_a_loss_scale_with_an_update_of_its_own_decides():
    class Wary(ols.LossScale):
        """Skips steps whose unscaled gradients are large."""

        def adjust(self, grads_finite):
            return self.replace(loss_scale=self() * jnp.where(grads_finite, 1.0, 0.5))

        def update(self, grads, axis_name=None):
            small = optax.tree.norm(grads) < 10
            return self.adjust(small), small

    tx = ols.with_loss_scale(optax.sgd(1.0), Wary(initial_scale=4.0))
    params, state = stepped(tx, jnp.array([36.0]), jnp.zeros(1))
    assert (params, state.loss_scale()) == (-9, 4)
    params, state = tx.apply_gradients(jnp.array([44.0]), state, params)
    assert (params, state.loss_scale()) == (-9, 2)


MISTAKEN = {
    "adjust returns None": (
        {"adjust": lambda self, finite: None},
        r"Own\.adjust returns must have the class and configuration of",
    ),
    "adjust changes a shape": (
        {"adjust": lambda self, finite: self.replace(loss_scale=jnp.ones(1))},
        r"Own\.adjust returns .* of the same shapes",
    ),
    "update returns another": (
        {"update": lambda self, grads, axis_name=None: (LS, True)},
        r"Own\.update returns .*self\.replace\(…\)\.",
    ),
    "update decides number by number": (
        {"update": lambda self, grads, axis_name=None: (self, jnp.isfinite(grads))},
        r"^update of Own must .* got shape \(3,\)",
    ),
}


@pytest.mark.parametrize(("methods", "said"), MISTAKEN.values(), ids=MISTAKEN)
def test_a_method_that_returns_something_else_is_refused(methods, said):
    own = type("Own", (ols.LossScale,), {"adjust": lambda self, _: self} | methods)
    tx = ols.with_loss_scale(optax.sgd(0.1), own())
    with pytest.raises(TypeError, match=said):
        stepped(tx, jnp.ones(3), jnp.ones(3))


def test_an_inner_state_in_16_bits_is_refused_and_taken_once_cast():
    """That of a bare optimizer of float16 parameters, whose second moments underflow."""
    params = {"w": jnp.full(3, 0.5, jnp.float16)}
    inner = optax.adam(1e-3)
    tx = ols.with_loss_scale(inner, 1)
    state, restored = tx.init(params), inner.init(params)
    said = r"float16\[3\] where it needs float32\[3\], at 0/mu/w.*cast"
    with pytest.raises(ValueError, match=said):
        tx.update(params, state._replace(inner_state=restored), params)
    cast = optax.tree.cast_like(restored, state.inner_state)
    grads = {"w": jnp.full(3, 1e-4, jnp.float16)}
    _, state = tx.apply_gradients(grads, state._replace(inner_state=cast), params)
    expected = np.square(grads["w"].astype(jnp.float32)) * 1e-3
    np.testing.assert_allclose(state.inner_state[0].nu["w"], expected, rtol=1e-3)
