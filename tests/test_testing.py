"""`assert_scale_invariant` accuses the wrong training steps, and no right one."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(1e-3),
    "clipped_adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
}
MISTAKES, RIGHT = {}, {}


def problem(dtype, seed=0):
    """A loss function of a small network, its parameters and a batch."""
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "in": jax.random.normal(keys[0], (8, 16)) / 3,
        "bias": jnp.zeros(16),
        "out": jax.random.normal(keys[1], (16, 2)) / 4,
    }
    batch = jax.random.normal(keys[2], (32, 8)), jax.random.normal(keys[3], (32, 2))

    def loss_fn(params, batch):
        x, y = batch
        p = jax.tree.map(lambda p: p.astype(dtype), params)
        prediction = jnp.tanh(x.astype(dtype) @ p["in"] + p["bias"]) @ p["out"]
        return jnp.mean((prediction - y).astype(jnp.float32) ** 2)

    return loss_fn, params, batch


def step_of(collection):
    def collect(make):
        collection[make.__name__] = make
        return make

    return collect


def apply(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@step_of(MISTAKES)
def forgotten_scaling(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner)

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return *tx.apply_gradients(grads, state, params), loss

    return tx, step


@step_of(MISTAKES)
def an_older_states_value_and_grad(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner)
    value_and_grad = ols.value_and_grad(loss_fn, tx.init(params))

    def step(params, state, batch):
        loss, grads = value_and_grad(params, batch)
        return *tx.apply_gradients(grads, state, params), loss

    return tx, step


@step_of(MISTAKES)
def unscaled_by_hand(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner)

    def step(params, state, batch):
        loss, grads = ols.value_and_grad(loss_fn, state)(params, batch)
        grads = state.loss_scale.unscale(grads)
        return *apply(tx, grads, state, params), loss

    return tx, step


@step_of(MISTAKES)
def a_clip_outside(loss_fn, inner, params):
    tx = optax.chain(optax.clip_by_global_norm(1.0), ols.with_loss_scale(inner))

    def step(params, state, batch):
        loss, grads = ols.value_and_grad(loss_fn, state)(params, batch)
        return *apply(tx, grads, state, params), loss

    return tx, step


@step_of(MISTAKES)
def a_norm_of_scaled_gradients(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner)

    def step(params, state, batch):
        loss, grads = ols.value_and_grad(loss_fn, state)(params, batch)
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        return *tx.apply_gradients(grads, state, params), {"loss": loss, "norm": norm}

    return tx, step


@step_of(RIGHT)
def apply_gradients(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner)

    def step(params, state, batch):
        loss, grads = ols.value_and_grad(loss_fn, state)(params, batch)
        return *tx.apply_gradients(grads, state, params), loss

    return tx, step


@step_of(RIGHT)
def update_and_apply_updates(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner)

    def step(params, state, batch):
        loss, grads = ols.value_and_grad(loss_fn, state)(params, batch)
        norm = optax.tree.norm(state.loss_scale.unscale(grads))
        scale = state.loss_scale()
        params, state = apply(tx, grads, state, params)
        return params, state, {"loss": loss, "norm": norm, "used": scale} | ols.metrics(state)

    return tx, step


@step_of(RIGHT)
def minimize(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner)

    def step(params, state, batch):
        loss, params, state = tx.minimize(loss_fn, state, params, batch)
        return params, state, loss

    return tx, step


@step_of(RIGHT)
def a_chain_around(loss_fn, inner, params):
    tx = optax.chain(ols.with_loss_scale(inner), optax.scale(0.5))

    def step(params, state, batch):
        loss, grads = ols.value_and_grad(loss_fn, state)(params, batch)
        return *apply(tx, grads, state, params), loss

    return tx, step


@step_of(RIGHT)
def multi_steps_inside(loss_fn, inner, params):
    return apply_gradients(loss_fn, optax.MultiSteps(inner, 2), params)


@step_of(RIGHT)
def multi_steps_outside(loss_fn, inner, params):
    tx = optax.MultiSteps(ols.with_loss_scale(inner), 2)

    def step(params, state, batch):
        loss, grads = ols.value_and_grad(loss_fn, state)(params, batch)
        return *apply(tx, grads, state, params), loss

    return tx, step


@step_of(RIGHT)
def a_loss_scale_that_follows_the_gradients(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner, ols.LogMaxLossScale())

    def step(params, state, batch):
        loss, grads = ols.value_and_grad(loss_fn, state)(params, batch)
        return *tx.apply_gradients(grads, state, params), loss, ols.metrics(state)

    return tx, step


@step_of(RIGHT)
def auxiliary_outputs_and_summaries(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner)

    def with_aux(params, batch):
        return loss_fn(params, batch), optax.tree.norm(params)

    def step(params, state, batch):
        (loss, aux), grads = ols.value_and_grad(with_aux, state, has_aux=True)(params, batch)
        leaves = ols.nonfinite_leaves(grads)
        return *tx.apply_gradients(grads, state, params), loss, aux, leaves

    return tx, step


@pytest.mark.parametrize(
    ("inner", "dtype"),
    [(inner, jnp.float16) for inner in OPTIMIZERS.values()] + [(optax.sgd(0.1), jnp.float32)],
    ids=[*OPTIMIZERS, "float32"],
)
@pytest.mark.parametrize("make", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found(make, inner, dtype):
    loss_fn, params, batch = problem(dtype)
    tx, step = make(loss_fn, inner, params)
    with pytest.raises(AssertionError, match="depends on the loss scale") as error:
        ols.testing.assert_scale_invariant(jax.jit(step), params, tx.init(params), batch)
    said = str(error.value)
    logged = make is a_norm_of_scaled_gradients
    assert ("\n  2**1: result[2]['norm']\nSo they are made of" in said) == logged
    assert ("\n  2**-1: result[" in said and "value_and_grad(loss_fn, state)" in said) != logged


@pytest.mark.parametrize("inner", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_a_right_step_is_not_accused(make, inner):
    loss_fn, params, batch = problem(jnp.float16)
    tx, step = make(loss_fn, inner, params)
    step = jax.jit(step, donate_argnums=(0, 1))
    state = tx.init(params)
    for _ in range(2):  # in a window of MultiSteps, and at its end
        ols.testing.assert_scale_invariant(step, params, state, batch)
        params, state, *_ = step(params, state, batch)


def test_a_mistake_at_the_end_of_a_window_is_found():
    loss_fn, params, batch = problem(jnp.float32)
    clipped = optax.chain(optax.clip(1e-3), ols.with_loss_scale(optax.sgd(0.1)))
    tx = optax.MultiSteps(clipped, 2)

    @jax.jit
    def step(params, state, batch):
        loss, grads = ols.value_and_grad(loss_fn, state)(params, batch)
        return *apply(tx, grads, state, params), loss

    params, state, _ = step(params, tx.init(params), batch)
    with pytest.raises(AssertionError, match=r"2\*\*-1: result\[0\]"):
        ols.testing.assert_scale_invariant(step, params, state, batch)


PARAMS, X = {"w": jnp.array([0.5, -1.0, 2.0])}, jnp.array([[1.0, 2.0, 3.0], [-0.3, 0.4, 0.1]])
TX = ols.with_loss_scale(optax.adam(1e-2))


def small_loss(params, x):
    return jnp.mean((x @ params["w"] - 1) ** 2)


def small_step(params, state, x, differentiate=ols.value_and_grad):
    loss, grads = differentiate(small_loss, state)(params, x)
    return *TX.apply_gradients(grads, state, params), loss


def forgetful_step(params, state, x):
    return small_step(params, state, x, lambda loss_fn, state: jax.value_and_grad(loss_fn))


def test_the_arguments_stay_as_they_are_and_the_step_is_traced_once():
    state = TX.init(PARAMS)
    before = jax.tree.map(np.asarray, (PARAMS, state))
    step = jax.jit(chex.assert_max_traces(small_step, n=1), donate_argnums=(0, 1))
    ols.testing.assert_scale_invariant(step, PARAMS, state, X)
    chex.assert_trees_all_equal((PARAMS, state), before)


def test_a_step_that_is_not_compiled():
    ols.testing.assert_scale_invariant(small_step, PARAMS, TX.init(PARAMS), x=X)
    with pytest.raises(AssertionError, match=r"result\[1\].inner_state\[0\].mu\['w'\]"):
        ols.testing.assert_scale_invariant(forgetful_step, PARAMS, TX.init(PARAMS), x=X)


def test_random_keys_and_what_is_no_array_go_to_the_step_as_they_are():
    @functools.partial(jax.jit, static_argnames="name")
    def step(params, state, key, rate, name):
        assert (name, rate.weak_type) == ("noisy", True)
        key, now = jax.random.split(key)
        x = X * jax.random.bernoulli(now, rate, X.shape)
        return *small_step(params, state, x), key

    arguments = (PARAMS, TX.init(PARAMS), jax.random.key(0), 0.5)
    ols.testing.assert_scale_invariant(step, *arguments, name="noisy")
    arguments = (PARAMS, TX.init(PARAMS), jax.random.PRNGKey(0), 0.5)
    ols.testing.assert_scale_invariant(step, *arguments, name="noisy")


@pytest.mark.parametrize("right", [True, False])
def test_a_step_that_changes_its_arguments_in_place(right):
    def step(trainer, x):
        update = small_step if right else forgetful_step
        trainer["params"], trainer["state"], loss = update(trainer["params"], trainer["state"], x)
        return loss

    trainer = {"params": PARAMS, "state": TX.init(PARAMS)}
    if right:
        ols.testing.assert_scale_invariant(step, trainer, X)
    else:
        with pytest.raises(AssertionError, match=r"2\*\*-1: args\[0\]\['state'\].inner_state"):
            ols.testing.assert_scale_invariant(step, trainer, X)
    assert trainer["params"] is PARAMS


def test_a_loss_scale_used_without_the_wrapper():
    inner = optax.adam(1e-2)

    def step(params, state, loss_scale, right):
        loss, grads = ols.value_and_grad(small_loss, loss_scale)(params, X)
        new_scale, finite = loss_scale.update(grads := loss_scale.unscale(grads))
        updates, new_state = inner.update(grads, state, params)
        new = optax.apply_updates(params, updates), new_state
        if not right:
            loss = loss_scale.scale(loss)
        return optax.tree.where(finite, new, (params, state)), new_scale, {"loss": loss}

    arguments = (PARAMS, inner.init(PARAMS), ols.DynamicLossScale())
    ols.testing.assert_scale_invariant(step, *arguments, right=True)
    with pytest.raises(AssertionError, match=r"2\*\*1: result\[2\]\['loss'\]"):
        ols.testing.assert_scale_invariant(step, *arguments, right=False)


def test_logged_scales_are_not_accused_by_whatever_name():
    def step(params, state):
        used = state.loss_scale()
        params, state, _ = small_step(params, state, X)
        logs = {f"train/{name}": value for name, value in ols.metrics(state).items()}
        history = {"loss_scale": jnp.stack([used, used / 2]), "log2_loss_scale": jnp.log2(used)}
        return params, state, logs, history, used, state.loss_scale(), jnp.log2(used)

    ols.testing.assert_scale_invariant(step, PARAMS, TX.init(PARAMS))


@pytest.mark.parametrize(
    ("around", "said"),
    [
        (lambda tx: optax.chain(optax.trace(0.9), tx), r"2\*\*1: result\[1\]\[0\].trace"),
        (lambda tx: optax.chain(optax.add_decayed_weights(0.1), tx), r"2\*\*-1: result\[0\]"),
    ],
)
def test_other_things_around_the_wrapper_are_found(around, said):
    tx = around(ols.with_loss_scale(optax.sgd(0.1)))

    def step(params, state):
        _, grads = ols.value_and_grad(small_loss, state)(params, X)
        return apply(tx, grads, state, params)

    with pytest.raises(AssertionError, match=said):
        ols.testing.assert_scale_invariant(jax.jit(step), PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize("share", [2.0**-30, 1.0, 2.0**20])
def test_gradients_that_underflow_or_overflow_at_most_loss_scales(share):
    def loss_fn(params, x):
        prediction = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)
        return share * jnp.mean((prediction - 1).astype(jnp.float32) ** 2)

    def step(params, state):
        loss, grads = ols.value_and_grad(loss_fn, state)(params, X)
        unscaled = state.loss_scale.unscale(grads)
        zeros = jnp.mean(unscaled["w"] == 0)
        return *TX.apply_gradients(grads, state, params), loss, optax.tree.norm(unscaled), zeros

    ols.testing.assert_scale_invariant(jax.jit(step), PARAMS, TX.init(PARAMS))


def test_a_norm_that_happens_to_be_the_loss_scale_is_accused_and_a_tiny_one_too():
    def step(w, state, factor):
        _, grads = ols.value_and_grad(lambda w: w * factor, state)(w)
        return *tx.apply_gradients(grads, state, w), {"norm": jnp.abs(grads)}

    tx = ols.with_loss_scale(optax.sgd(0.1))
    w = jnp.float32(0.5)
    for factor in (1.0, 1e-30):
        with pytest.raises(AssertionError, match=r"2\*\*1: result\[2\]\['norm'\]"):
            ols.testing.assert_scale_invariant(jax.jit(step), w, tx.init(w), factor)


def test_of_large_arrays_a_sample_is_compared():
    w = jnp.linspace(1, 2, 2**18).reshape(2**9, 2**9)
    state = TX.init(w)

    def step(w, state, right):
        grads = 2 * w * (state.loss_scale() if right else 1.0)
        return TX.apply_gradients(grads, state, w)

    ols.testing.assert_scale_invariant(step, w, state, right=True)
    with pytest.raises(AssertionError, match=r"2\*\*-1: result\[1\].inner_state"):
        ols.testing.assert_scale_invariant(step, w, state, right=False)


def test_as_an_overflow_is_expected_debuggers_do_not_stop_at_it():
    def loss_fn(params):
        return jnp.sum(params["w"].astype(jnp.float16) * 100).astype(jnp.float32) ** 2

    def step(params, state):
        _, grads = ols.value_and_grad(loss_fn, state)(params)
        return TX.apply_gradients(grads, state, params)

    with jax.debug_nans(True):
        ols.testing.assert_scale_invariant(jax.jit(step), PARAMS, TX.init(PARAMS))


def test_a_norm_that_is_infinite_at_high_loss_scales_is_accused_without_a_warning():
    loss_fn, params, batch = problem(jnp.float16)
    tx = ols.with_loss_scale(optax.adam(1e-3))

    @jax.jit
    def step(params, state, batch):
        grads = ols.grad(loss_fn, state)(params, batch)
        norm = sum(jnp.sum(g.astype(jnp.float16) ** 2) for g in jax.tree.leaves(grads))
        return *tx.apply_gradients(grads, state, params), norm

    with pytest.raises(AssertionError, match=r"2\*\*2: result\[2\]"):
        ols.testing.assert_scale_invariant(step, params, tx.init(params), batch)


def test_none_several_and_fixed_loss_scales_are_refused():
    check = functools.partial(ols.testing.assert_scale_invariant, small_step)
    with pytest.raises(ValueError, match="exactly one loss scale"):
        check(PARAMS, optax.sgd(0.1).init(PARAMS), X)
    state = TX.init(PARAMS)
    with pytest.raises(ValueError, match="found 2"):
        check(PARAMS, (state, state), X)
    fixed = ols.with_loss_scale(optax.sgd(0.1), 128)
    with pytest.raises(ValueError, match=r"FixedLossScale cannot be varied.*DynamicLossScale"):
        check(PARAMS, fixed.init(PARAMS), X)


def test_a_step_that_is_always_skipped_says_nothing():
    with pytest.raises(ValueError, match=r"skipped at all but 0 loss scales.*look for NaN"):
        ols.testing.assert_scale_invariant(
            jax.jit(small_step), PARAMS, TX.init(PARAMS), jnp.full_like(X, jnp.nan)
        )


def test_a_step_that_draws_numbers_by_itself_is_refused():
    rng = np.random.default_rng(0)

    def step(params, state):
        return small_step(params, state, rng.standard_normal(X.shape).astype(np.float32))

    with pytest.raises(ValueError, match="two runs at the same loss scale differ"):
        ols.testing.assert_scale_invariant(step, PARAMS, TX.init(PARAMS))
