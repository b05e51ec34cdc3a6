"""`assert_scale_invariant` accuses the wrong training steps, and no right one."""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pairs import one_in, quick

import optax_lossscale as ols

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the framework's, not ours
    from flax import nnx

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(1e-3),
    "clipped_adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
}
MISTAKES, RIGHT = {}, {}


def each_with_some(steps, problems):
    """Every second step with the next of the problems; the rest of their product is slow."""
    for i, make in enumerate(steps):
        chosen = None if i % 2 else i // 2 % len(problems)
        for j, problem in enumerate(problems):
            marks = () if j == chosen else pytest.mark.slow
            yield pytest.param(
                steps[make], *problems[problem], id=f"{make}-{problem}", marks=marks
            )


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


def step_by_update(tx, loss_fn):
    """A step of a transformation that may be wrapped around the wrapper."""

    def step(params, state, batch):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
        return *apply(tx, grads, state, params), loss

    return step


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
    value_and_grad = ols.value_and_scaled_grad(loss_fn, tx.init(params))

    def step(params, state, batch):
        loss, grads = value_and_grad(params, batch)
        return *tx.apply_gradients(grads, state, params), loss

    return tx, step


@step_of(MISTAKES)
def unscaled_by_hand(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner)

    def step(params, state, batch):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
        grads = state.loss_scale.unscale(grads)
        return *apply(tx, grads, state, params), loss

    return tx, step


@step_of(MISTAKES)
def a_clip_outside(loss_fn, inner, params):
    tx = optax.chain(optax.clip_by_global_norm(1.0), ols.with_loss_scale(inner))
    return tx, step_by_update(tx, loss_fn)


@step_of(MISTAKES)
def a_norm_of_scaled_gradients(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner)

    def step(params, state, batch):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        return *tx.apply_gradients(grads, state, params), {"loss": loss, "norm": norm}

    return tx, step


@step_of(RIGHT)
def normalized_gradients(loss_fn, inner, params):
    """Where all gradients underflow, they are 0 divided by 0, and the step is skipped."""
    tx = ols.with_loss_scale(inner)

    def step(params, state, batch):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
        norm = optax.tree.norm(grads)
        grads = state.loss_scale.scale(jax.tree.map(lambda g: g / norm, grads))
        return *tx.apply_gradients(grads, state, params, value=loss), loss

    return tx, step


@step_of(RIGHT)
def apply_gradients(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner)

    def step(params, state, batch):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
        return *tx.apply_gradients(grads, state, params), loss

    return tx, step


@step_of(RIGHT)
def update_and_apply_updates(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner)

    def step(params, state, batch):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
        norm = optax.tree.norm(state.loss_scale.unscale(grads))
        used = {f"used/{name}": value for name, value in ols.metrics(state).items()}
        params, state = apply(tx, grads, state, params)
        return params, state, {"loss": loss, "norm": norm} | used | ols.metrics(state)

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
    return tx, step_by_update(tx, loss_fn)


@step_of(RIGHT)
def multi_steps(loss_fn, inner, params):
    return apply_gradients(loss_fn, optax.MultiSteps(inner, 2), params)


@step_of(RIGHT)
def a_loss_scale_that_follows_the_gradients(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner, "headroom")

    def step(params, state, batch):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
        return *tx.apply_gradients(grads, state, params), loss, ols.metrics(state)

    return tx, step


@step_of(RIGHT)
def auxiliary_outputs_and_summaries(loss_fn, inner, params):
    tx = ols.with_loss_scale(inner)

    def with_aux(params, batch):
        return loss_fn(params, batch), optax.tree.norm(params)

    def step(params, state, batch):
        (loss, aux), grads = ols.value_and_scaled_grad(with_aux, state, has_aux=True)(
            params, batch
        )
        return *tx.apply_gradients(grads, state, params), loss, aux

    return tx, step


IN_FLOAT16 = {name: (inner, jnp.float16) for name, inner in OPTIMIZERS.items()}
IN_BOTH = IN_FLOAT16 | {"float32": (optax.sgd(0.1), jnp.float32)}


@pytest.mark.parametrize(
    ("make", "inner", "dtype"), [*each_with_some(MISTAKES, IN_BOTH)]
)
def test_a_mistake_is_found(make, inner, dtype):
    loss_fn, params, batch = problem(dtype)
    tx, step = make(loss_fn, inner, params)
    with pytest.raises(AssertionError, match="depends on the loss scale") as error:
        ols.testing.assert_scale_invariant(
            jax.jit(step), params, tx.init(params), batch
        )
    said = str(error.value)
    logged = make is a_norm_of_scaled_gradients
    why = "they come from gradients that are still multiplied by the loss scale"
    assert (f"\n  2**1: result[2]['norm']\nMost likely, {why}" in said) == logged
    found = (
        "the step depends on the loss scale: gradients are divided by it once too often"
    )
    assert said.startswith(found) != logged
    why = "are not, or no longer, multiplied by the scale that they are divided by"
    remedy = "value_and_scaled_grad(loss_fn, state)"
    assert all(text in said for text in ("\n  2**-1: result[", why, remedy)) != logged


@pytest.mark.parametrize(
    ("make", "inner", "dtype"), [*each_with_some(RIGHT, IN_FLOAT16)]
)
def test_a_right_step_is_not_accused(make, inner, dtype):
    loss_fn, params, batch = problem(dtype)
    tx, step = make(loss_fn, inner, params)
    step = jax.jit(step, donate_argnums=(0, 1))
    state = tx.init(params)
    for _ in range(2):  # in a window of MultiSteps, and at its end
        ols.testing.assert_scale_invariant(step, params, state, batch)
        params, state, *_ = step(params, state, batch)


def test_a_mistake_at_the_end_of_a_window_is_found():
    loss_fn, params, batch = problem(jnp.float32)
    accumulating = optax.MultiSteps(optax.sgd(0.1), 2)
    tx = optax.chain(optax.clip(1e-3), ols.with_loss_scale(accumulating))
    step = jax.jit(step_by_update(tx, loss_fn))

    params, state, _ = step(params, tx.init(params), batch)
    with pytest.raises(AssertionError, match=r"2\*\*-1: result\[0\]"):
        ols.testing.assert_scale_invariant(step, params, state, batch)


PARAMS, X = (
    {"w": jnp.array([0.5, -1.0, 2.0])},
    jnp.array([[1.0, 2.0, 3.0], [-0.3, 0.4, 0.1]]),
)
TX = ols.with_loss_scale(optax.adam(1e-2))


def small_loss(params, x):
    return jnp.mean((x @ params["w"] - 1) ** 2)


def small_step(params, state, x, differentiate=ols.value_and_scaled_grad):
    loss, grads = differentiate(small_loss, state)(params, x)
    return *TX.apply_gradients(grads, state, params), loss


def forgetful_step(params, state, x):
    return small_step(
        params, state, x, lambda loss_fn, state: jax.value_and_grad(loss_fn)
    )


def test_the_arguments_stay_as_they_are_and_the_step_is_traced_once():
    state = TX.init(PARAMS)
    before = jax.tree.map(np.asarray, (PARAMS, state))
    step = jax.jit(chex.assert_max_traces(small_step, n=1), donate_argnums=(0, 1))
    ols.testing.assert_scale_invariant(step, PARAMS, state, X)
    chex.assert_trees_all_equal((PARAMS, state), before)


@pytest.mark.slow
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
        trainer["params"], trainer["state"], loss = update(
            trainer["params"], trainer["state"], x
        )
        return loss

    trainer = {"params": PARAMS, "state": TX.init(PARAMS)}
    if right:
        ols.testing.assert_scale_invariant(step, trainer, X)
    else:
        with pytest.raises(
            AssertionError, match=r"2\*\*-1: args\[0\]\['state'\].inner_state"
        ):
            ols.testing.assert_scale_invariant(step, trainer, X)
    assert trainer["params"] is PARAMS


def test_a_loss_scale_used_without_the_wrapper():
    inner = optax.adam(1e-2)

    def step(params, state, loss_scale, right):
        loss, grads = ols.value_and_scaled_grad(small_loss, loss_scale)(params, X)
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


def test_what_metrics_returns_is_not_accused_under_whatever_name_and_in_whatever_form():
    def step(params, state):
        used = ols.metrics(state)["loss_scale"]
        params, state, _ = small_step(params, state, X)
        logs = {f"train/{name}": value for name, value in ols.metrics(state).items()}
        return (
            params,
            state,
            logs,
            jnp.stack([used, used / 2]),
            1 / used,
            jnp.log10(used),
        )

    for tested in (step, jax.jit(step)):
        ols.testing.assert_scale_invariant(tested, PARAMS, TX.init(PARAMS))


def test_other_outputs_that_are_loss_scales_have_to_be_named():
    def step(params, state):
        params, state, loss = small_step(params, state, X)
        return params, state, {"loss": loss, "loss_scale": state.loss_scale()}

    arguments = (jax.jit(step), PARAMS, TX.init(PARAMS))
    with pytest.raises(
        AssertionError, match=r"2\*\*1: result\[2\]\['loss_scale'\](.|\n)*metrics"
    ):
        ols.testing.assert_scale_invariant(*arguments)
    ols.testing.assert_scale_invariant(*arguments, ignore="result[2]['loss_scale']")


@pytest.mark.parametrize(
    ("around", "said"),
    [
        (
            lambda tx: optax.chain(optax.trace(0.9), tx),
            r"2\*\*1: result\[1\]\[0\].trace",
        ),
        (
            lambda tx: optax.chain(optax.add_decayed_weights(0.1), tx),
            r"2\*\*-1: result\[0\]",
        ),
    ],
)
def test_other_things_around_the_wrapper_are_found(around, said):
    tx = around(ols.with_loss_scale(optax.sgd(0.1)))

    def step(params, state):
        _, grads = ols.value_and_scaled_grad(small_loss, state)(params, X)
        return apply(tx, grads, state, params)

    with pytest.raises(AssertionError, match=said):
        ols.testing.assert_scale_invariant(jax.jit(step), PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize("share", [2.0**-30, 1.0, 2.0**20])
def test_gradients_that_underflow_or_overflow_at_most_loss_scales(share):
    def loss_fn(params, x):
        prediction = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)
        return share * jnp.mean((prediction - 1).astype(jnp.float32) ** 2)

    def step(params, state):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, X)
        unscaled = state.loss_scale.unscale(grads)
        zeros = jnp.mean(unscaled["w"] == 0)
        return (
            *TX.apply_gradients(grads, state, params),
            loss,
            optax.tree.norm(unscaled),
            zeros,
        )

    ols.testing.assert_scale_invariant(jax.jit(step), PARAMS, TX.init(PARAMS))


def test_a_norm_that_happens_to_be_the_loss_scale_is_accused_and_a_tiny_one_too():
    def step(w, state, factor):
        _, grads = ols.value_and_scaled_grad(lambda w: w * factor, state)(w)
        return *tx.apply_gradients(grads, state, w), {"norm": jnp.abs(grads)}

    tx = ols.with_loss_scale(optax.sgd(0.1))
    w = jnp.float32(0.5)
    for factor in (1.0, 1e-30):
        with pytest.raises(AssertionError, match=r"2\*\*1: result\[2\]\['norm'\]"):
            ols.testing.assert_scale_invariant(jax.jit(step), w, tx.init(w), factor)


def test_the_advice_goes_by_the_power_and_not_by_names():
    @jax.jit
    def step(params, state, x):
        _, grads = ols.value_and_scaled_grad(small_loss, state)(params, x)
        logged = {"norm_at_2**-3": optax.tree.norm(grads)}
        return *TX.apply_gradients(grads, state, params), logged

    with pytest.raises(AssertionError, match="still multiplied by the loss scale"):
        ols.testing.assert_scale_invariant(step, PARAMS, TX.init(PARAMS), X)


def test_gradients_that_are_scaled_twice_are_not_said_to_be_divided():
    """Although Adam's epsilon makes a small parameter follow the reciprocal."""
    loss_fn, params, batch = problem(jnp.float16)
    tx = ols.with_loss_scale(optax.adam(1e-2))

    @jax.jit
    def step(params, state, batch):
        def scaled_twice(params, batch):
            return 2.0**-10 * state.loss_scale.scale(loss_fn(params, batch))

        loss, grads = ols.value_and_scaled_grad(scaled_twice, state)(params, batch)
        return *tx.apply_gradients(grads, state, params), loss

    with pytest.raises(AssertionError, match="still multiplied by the loss scale"):
        ols.testing.assert_scale_invariant(step, params, tx.init(params), batch)


@pytest.mark.slow
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
        _, grads = ols.value_and_scaled_grad(loss_fn, state)(params)
        return TX.apply_gradients(grads, state, params)

    with jax.debug_nans(True):
        ols.testing.assert_scale_invariant(jax.jit(step), PARAMS, TX.init(PARAMS))


def test_a_norm_that_is_infinite_at_high_loss_scales_is_accused_without_a_warning():
    loss_fn, params, batch = problem(jnp.float16)
    tx = ols.with_loss_scale(optax.adam(1e-3))

    @jax.jit
    def step(params, state, batch):
        grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)[1]
        norm = sum(jnp.sum(g.astype(jnp.float16) ** 2) for g in jax.tree.leaves(grads))
        return *tx.apply_gradients(grads, state, params), norm

    with pytest.raises(AssertionError, match=r"2\*\*2: result\[2\]"):
        ols.testing.assert_scale_invariant(step, params, tx.init(params), batch)


def test_none_several_and_fixed_loss_scales_are_refused():
    check = functools.partial(ols.testing.assert_scale_invariant, small_step)
    found = "exactly one loss scale among the step's arguments, found"
    with pytest.raises(ValueError, match=rf"{found} 0\. Wrap the whole optimizer"):
        check(PARAMS, optax.sgd(0.1).init(PARAMS), X)
    state = TX.init(PARAMS)
    with pytest.raises(ValueError, match=rf"{found} 2\. .*close over the others"):
        check(PARAMS, (state, state), X)
    fixed = ols.with_loss_scale(optax.sgd(0.1), 128)
    with pytest.raises(
        ValueError, match=r"FixedLossScale cannot be varied.*DynamicLossScale"
    ):
        check(PARAMS, fixed.init(PARAMS), X)


def two_optimizers(loss_scales, right=True):
    """A step with a state of each, the last one wrong if it is not right, and arguments."""
    txs = [ols.with_loss_scale(optax.adam(1e-2), x) for x in loss_scales]

    @jax.jit
    def step(params, states, x):
        new, losses = [], []
        for tx, p, state in zip(txs, params, states, strict=True):
            loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)
            gradient = ols.value_and_scaled_grad(loss, state)
            if not right and state is states[-1]:
                gradient = jax.value_and_grad(loss)
            value, grads = gradient(p, x)
            new.append(tx.apply_gradients(grads, state, p))
            losses.append(value)
        return [p for p, _ in new], [state for _, state in new], losses

    params = [PARAMS for _ in txs]
    return step, params, [tx.init(PARAMS) for tx in txs], X


@pytest.mark.slow
def test_a_loss_scale_of_none_does_not_count():
    """There is nothing to vary, and in an overflow its gradients overflow, too."""
    for loss_scales in ([None, None], [None, "dynamic"], [128, None, "dynamic"]):
        ols.testing.assert_survives_overflow(*two_optimizers(loss_scales))
    ols.testing.assert_scale_invariant(*two_optimizers([None, None, "dynamic"]))
    with pytest.raises(AssertionError, match=r"result\[1\]\[1\].inner_state"):
        ols.testing.assert_scale_invariant(
            *two_optimizers([None, "dynamic"], right=False)
        )
    with pytest.raises(ValueError, match=r"FixedLossScale cannot be varied"):
        ols.testing.assert_scale_invariant(*two_optimizers([None, None]))
    with pytest.raises(ValueError, match="found 2"):
        ols.testing.assert_scale_invariant(
            *two_optimizers(["dynamic", None, "dynamic"])
        )


def test_a_step_that_is_always_skipped_says_nothing():
    with pytest.raises(
        ValueError, match=r"applied at none of the loss scales tried.*look for NaN"
    ):
        ols.testing.assert_scale_invariant(
            jax.jit(small_step), PARAMS, TX.init(PARAMS), jnp.full_like(X, jnp.nan)
        )


def test_a_step_that_draws_numbers_by_itself_is_refused():
    rng = np.random.default_rng(0)

    def step(params, state):
        return small_step(
            params, state, rng.standard_normal(X.shape).astype(np.float32)
        )

    with pytest.raises(ValueError, match="two runs at the same loss scale differ"):
        ols.testing.assert_scale_invariant(step, PARAMS, TX.init(PARAMS))


def norm_of(grads):
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))


def numbers_of(grads):
    return jnp.concatenate(
        [jnp.ravel(g).astype(jnp.float32) for g in jax.tree.leaves(grads)]
    )


WRONG_LOGS = {
    "log": lambda scaled: jnp.log(norm_of(scaled)),
    "decibels": lambda scaled: 20 * jnp.log10(norm_of(scaled)),
    "log1p": lambda scaled: jnp.log1p(norm_of(scaled)),
    "logs of the largest": lambda scaled: {
        k: jnp.log2(jnp.abs(g).max()) for k, g in scaled.items()
    },
    "exponent": lambda scaled: jnp.frexp(norm_of(scaled))[1],
    "root": lambda scaled: jnp.sqrt(norm_of(scaled)),
    "flag": lambda scaled: norm_of(scaled) > 1,
    "flag as a number": lambda scaled: jnp.float32(norm_of(scaled) < 100),
    "share above a threshold": lambda scaled: jnp.mean(jnp.abs(numbers_of(scaled)) > 1),
    "clip factor": lambda scaled: jnp.minimum(1, 1 / norm_of(scaled)),
    "saturated": lambda scaled: jnp.tanh(norm_of(scaled)),
    "rounded": lambda scaled: jnp.round(norm_of(scaled)).astype(jnp.int32),
    "histogram": lambda scaled: jnp.histogram(numbers_of(scaled), 16, (-1, 1))[0],
    "histogram of logarithms": lambda scaled: jnp.histogram(
        jnp.log2(jnp.abs(numbers_of(scaled)) + 1e-30), 12, (-24, 16)
    )[0],
    "edges": lambda scaled: jnp.histogram(numbers_of(scaled))[1],
}


@functools.cache
def logging_step(dtype):
    """A step, with its arguments, that logs much of which nothing or all depends on the scale."""
    loss_fn, params, batch = problem(dtype)
    tx = ols.with_loss_scale(optax.adam(1e-3))

    @jax.jit
    def step(params, state, batch):
        loss, scaled = ols.value_and_scaled_grad(loss_fn, state, grad_dtype=dtype)(
            params, batch
        )
        before, unscaled = state.loss_scale, state.loss_scale.unscale(scaled)
        params, state = tx.apply_gradients(scaled, state, params)
        right = {name: log(unscaled) for name, log in WRONG_LOGS.items()} | {
            "zeros": jax.tree.map(lambda g: jnp.mean(g == 0), scaled),
            "count of zeros": jnp.sum(numbers_of(scaled) == 0),
            "divided": norm_of(scaled) / before(),
            "finite": ols.all_finite(scaled),
            "direction": jax.tree.map(
                lambda g: g.astype(jnp.float32) / norm_of(g), scaled
            ),
            "applied": state.should_apply,
            "grew": state.loss_scale() > before(),
            "metrics": {f"train/{k}": x for k, x in ols.metrics(state).items()},
        }
        wrong = {name: log(scaled) for name, log in WRONG_LOGS.items()}
        return params, state, {"loss": loss, "right": right}, wrong

    return step, (params, tx.init(params), batch)


@one_in(3, "name", [*WRONG_LOGS])
def test_what_is_logged_of_scaled_gradients_is_found(name):
    step, arguments = logging_step(jnp.float16)
    others = [f"result[3]['{other}']" for other in WRONG_LOGS if other != name]
    with pytest.raises(AssertionError) as error:
        ols.testing.assert_scale_invariant(step, *arguments, ignore=others)
    assert f"result[3]['{name}']" in str(error.value)


@quick("dtype", {"float16": jnp.float16, "float32": jnp.float32}, "float16")
def test_what_is_logged_of_unscaled_gradients_and_of_the_loss_scale_is_not_accused(
    dtype,
):
    step, arguments = logging_step(dtype)
    ols.testing.assert_scale_invariant(step, *arguments, ignore="result[3]")


def test_the_error_says_where_a_number_changes():
    step, arguments = logging_step(jnp.float16)
    others = [f"result[3]['{other}']" for other in WRONG_LOGS if other != "flag"]
    said = r"result\[3\]\['flag'\], between 2\*\*-?\d+ and 2\*\*-?\d+\n"
    with pytest.raises(AssertionError, match=said):
        ols.testing.assert_scale_invariant(step, *arguments, ignore=others)


def test_what_is_to_be_ignored_is_there():
    step, arguments = logging_step(jnp.float16)
    with pytest.raises(
        ValueError, match=r"ignore='result\[4\]' names no output(.|\n)*\['flag'\]"
    ):
        ols.testing.assert_scale_invariant(
            step, *arguments, ignore=["result[3]", "result[4]"]
        )
    with pytest.raises(ValueError, match="names no output"):  # no part of a name
        ols.testing.assert_scale_invariant(step, *arguments, ignore="result[3]['fl")


UPDATES = {
    "right": lambda updates, norm: updates,
    "1 + norm": lambda updates, norm: optax.tree.scale(1 / (1 + norm), updates),
    "root": lambda updates, norm: optax.tree.scale(1 / jnp.sqrt(norm), updates),
    "logarithm": lambda updates, norm: optax.tree.scale(1 / jnp.log1p(norm), updates),
    "none above 100": lambda updates, norm: optax.tree.scale(
        1.0 * (norm < 100), updates
    ),
    "smaller above 10": lambda updates, norm: optax.tree.scale(
        jnp.where(norm > 10, 0.5, 1), updates
    ),
}


@functools.cache
def step_with_changed_updates(dtype, name):
    """A step, with its arguments, of which the last says what becomes of the updates."""
    loss_fn, params, batch = problem(dtype)
    tx = ols.with_loss_scale({"sgd": optax.sgd(0.1), "adam": optax.adam(1e-3)}[name])

    @jax.jit
    def step(params, state, batch, change):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
        updates, state = tx.update(grads, state, params)
        updates = jax.lax.switch(
            change, list(UPDATES.values()), updates, norm_of(grads)
        )
        return optax.apply_updates(params, updates), state, loss

    return step, (params, tx.init(params), batch)


@pytest.mark.parametrize(
    ("name", "dtype"), [("sgd", jnp.float32), ("adam", jnp.float16)]
)
@one_in(2, "change", [*UPDATES])
def test_updates_that_depend_on_the_size_of_scaled_gradients_are_found(
    change, name, dtype
):
    step, arguments = step_with_changed_updates(dtype, name)
    check = functools.partial(ols.testing.assert_scale_invariant, step, *arguments)
    if change == "right":
        check(0)
    else:
        with pytest.raises(AssertionError, match=r"result\[0\]"):
            check(list(UPDATES).index(change))


INVARIANT = {
    "lars": optax.lars(0.1),
    "sign_sgd": optax.sign_sgd(0.01),
    "rprop": optax.rprop(0.01),
    "normalized": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
}


@one_in(2, "inner", INVARIANT)
def test_forgotten_scaling_is_found_under_optimizers_that_hide_it(inner):
    tx = ols.with_loss_scale(inner)

    @jax.jit
    def step(params, state, x, right):
        used = jnp.where(right, state.loss_scale(), 1.0)
        loss, grads = ols.value_and_scaled_grad(small_loss, used)(params, x)
        return *tx.apply_gradients(grads, state, params), loss

    state = tx.init(PARAMS)
    ols.testing.assert_scale_invariant(step, PARAMS, state, X, True)
    with pytest.raises(
        AssertionError,
        match=r"^the step is applied at an infinite(.|\n)*result\[[01]\](.|\n)*value_and",
    ):
        ols.testing.assert_scale_invariant(step, PARAMS, state, X, False)


@pytest.mark.parametrize(
    ("inner", "loss_scale"),
    [
        (optax.sgd(0.1), ols.DynamicLossScale()),
        (optax.adam(1e-2), ols.DynamicLossScale(min_scale=None)),
    ],
    ids=["sgd", "adam"],
)
def test_a_scale_that_adapts_before_it_unscales_is_found(inner, loss_scale):
    @jax.jit
    def step(params, state, loss_scale, right):
        _, grads = ols.value_and_scaled_grad(small_loss, loss_scale)(params, X)
        new_scale, finite = loss_scale.update(loss_scale.unscale(grads))
        grads = new_scale.replace(
            loss_scale=jnp.where(right, loss_scale(), new_scale())
        ).unscale(grads)
        updates, new_state = inner.update(grads, state, params)
        new = optax.apply_updates(params, updates), new_state
        return *optax.tree.where(finite, new, (params, state)), new_scale

    arguments = (PARAMS, inner.init(PARAMS), loss_scale)
    ols.testing.assert_scale_invariant(step, *arguments, right=True)
    with pytest.raises(
        AssertionError,
        match=r"scale grows\.\n(.|\n)*result\[[01]\](.|\n)*by the new loss",
    ):
        ols.testing.assert_scale_invariant(step, *arguments, right=False)


def test_parts_of_different_sizes_in_float16_are_not_accused():
    """Of which one underflows at loss scales at which the other does not."""
    loss_fn, params, batch = problem(jnp.float16)
    tx = ols.with_loss_scale(optax.sign_sgd(1e-3))

    @jax.jit
    def step(params, state, batch, share):
        def both(params, batch):
            return loss_fn(params["a"], batch) + share * loss_fn(params["b"], batch)

        loss, grads = ols.value_and_scaled_grad(both, state)(params, batch)
        return *tx.apply_gradients(grads, state, params), loss

    params = {"a": params, "b": jax.tree.map(lambda p: 1.1 * p, params)}
    for bits in (10, 18, 26):
        ols.testing.assert_scale_invariant(
            step, params, tx.init(params), batch, 2.0**-bits
        )


def test_steps_of_which_one_overflows_are_not_compared():
    loss_fn, params, batch = problem(jnp.float16)
    tx = ols.with_loss_scale(optax.sgd(0.1))

    @jax.jit
    def steps(params, state, batch):
        def step(carry, _):
            loss, params, state = tx.minimize(loss_fn, carry[1], carry[0], batch)
            return (params, state), loss

        return jax.lax.scan(step, (params, state), length=3)

    ols.testing.assert_scale_invariant(steps, params, tx.init(params), batch)


@pytest.mark.parametrize("returned", [2, 3])
def test_a_step_without_the_wrapper_that_keeps_the_parameters_at_an_overflow(returned):
    loss_fn, params, batch = problem(jnp.float16)
    inner = optax.sgd(0.1)

    @jax.jit
    def step(params, state, loss_scale):
        _, grads = ols.value_and_scaled_grad(loss_fn, loss_scale)(params, batch)
        new_scale, finite = loss_scale.update(grads := loss_scale.unscale(grads))
        updates, new_state = inner.update(grads, state, params)
        new = optax.apply_updates(params, updates), new_state
        return (*optax.tree.where(finite, new, (params, state)), new_scale)[:returned]

    arguments = (params, inner.init(params), ols.HeadroomLossScale())
    ols.testing.assert_scale_invariant(step, *arguments)


@pytest.mark.parametrize(
    ("keeps", "left", "wrapped"),
    [
        (set(), {"result[0]['w']", "result[1][0].mu['w']"}, True),
        (set(), {"result[0]['w']", "result[1][0].mu['w']"}, False),
        ({"params"}, {"result[1][0].mu['w']"}, False),
        ({"inner_state"}, {"result[0]['w']"}, False),
        ({"params", "inner_state"}, set(), False),
    ],
)
def test_a_step_that_does_not_skip_an_overflow_is_found(keeps, left, wrapped):
    """As one that unscales by hand, and goes on; gradients that it logs may well be NaN."""
    inner = optax.adam(1e-2)
    loss_fn = ols.autocast(lambda params: jnp.mean(jnp.tanh(X @ params["w"]) ** 2))

    @jax.jit
    def step(params, inner_state, state):
        loss, scaled_grads = ols.value_and_scaled_grad(loss_fn, state)(params)
        loss_scale = ols.get_loss_scale(state)
        loss_scale, finite = loss_scale.update(
            grads := loss_scale.unscale(scaled_grads)
        )
        updates, new_inner_state = inner.update(grads, inner_state, params)
        new = {
            "params": optax.apply_updates(params, updates),
            "inner_state": new_inner_state,
        }
        old = {"params": params, "inner_state": inner_state}
        kept = {
            n: optax.tree.where(finite, new[n], old[n]) if n in keeps else new[n]
            for n in new
        }
        state = state._replace(loss_scale=loss_scale) if wrapped else loss_scale
        logged = {"loss": loss, "grads": grads, "norm": optax.tree.norm(grads)}
        return *kept.values(), state, logged

    state = TX.init(PARAMS) if wrapped else ols.DynamicLossScale()
    arguments = step, PARAMS, inner.init(PARAMS), state
    if not left:
        ols.testing.assert_scale_invariant(*arguments)
        return
    with pytest.raises(
        AssertionError, match="so that the step should be skipped"
    ) as raised:
        ols.testing.assert_scale_invariant(*arguments)
    names = {
        line.strip() for line in str(raised.value).splitlines() if line.startswith("  ")
    }
    assert left <= names
    assert not any("result[3]" in name for name in names)


def test_a_batch_without_a_gradient_is_not_accused():
    tx = ols.with_loss_scale(optax.sign_sgd(0.1))

    @jax.jit
    def step(params, state, x, is_counted):
        loss_fn = lambda params: jnp.sum(jnp.where(is_counted, x @ params["w"], 0))
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params)
        return *tx.apply_gradients(grads, state, params), loss

    ols.testing.assert_scale_invariant(
        step, PARAMS, tx.init(PARAMS), X, jnp.zeros(2, bool)
    )


def test_a_step_that_stops_at_an_infinite_loss_scale_is_not_accused():
    compiled = jax.jit(small_step)

    def step(params, state):
        params, state, loss = compiled(params, state, X)
        ols.raise_if_stuck(state)
        return params, state, {"loss": loss, "bits": int(np.log2(state.loss_scale()))}

    bits = "result[2]['bits']"

    ols.testing.assert_scale_invariant(step, PARAMS, TX.init(PARAMS), ignore=bits)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("right", [True, False])
def test_variables_of_nnx_that_are_aliases_count_once(right):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ols.with_loss_scale(optax.sgd(0.1)), wrt=nnx.Param)
    model.tied = model.kernel
    model.loss_scale = nnx.data(optimizer.opt_state.loss_scale)

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            loss = jnp.mean((model(x) - 1) ** 2)
            return ols.scale_gradient(loss, model.loss_scale) if right else loss

        wrt = nnx.DiffState(0, nnx.Param)
        loss, grads = nnx.value_and_grad(loss_fn, argnums=wrt)(model)
        optimizer.update(model, grads)
        return loss

    if right:
        ols.testing.assert_scale_invariant(step, model, optimizer, X)
    else:
        with pytest.raises(AssertionError) as error:
            ols.testing.assert_scale_invariant(step, model, optimizer, X)
        assert "args[0].kernel" in str(error.value)
        assert "tied" not in str(error.value)


def test_inside_a_scan_it_is_called_by_a_callback():
    """There its arguments are traced, and the error says so."""
    loss_fn, params, batch = problem(jnp.float16)
    tx, seen = ols.with_loss_scale(OPTIMIZERS["adam"]), []
    state = tx.init(params)

    def step(params, state):
        loss, scaled_grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
        return tx.apply_gradients(scaled_grads, state, params, value=loss)

    def check(params, state):
        ols.testing.assert_scale_invariant(jax.jit(step), params, state)
        seen.append(True)

    def steps(check):
        def one(carry, _):
            check(*carry)
            return step(*carry), None

        return jax.jit(lambda *carry: jax.lax.scan(one, carry, length=1)[0])

    with pytest.raises(TypeError, match=r"or by jax\.debug\.callback"):
        steps(check)(params, state)
    jax.block_until_ready(
        steps(lambda *args: jax.debug.callback(check, *args))(params, state)
    )
    jax.effects_barrier()
    assert seen


ADAMW = optax.adamw(1e-2)
WRAPPED = ols.with_loss_scale(ADAMW, ols.DynamicLossScale(2.0**8))
OTHERS = WRAPPED.init({})  # the state of another optimizer
TOO_LARGE = OTHERS._replace(loss_scale=ols.DynamicLossScale(2.0**40))


def zeroed_by_hand(loss_fn, state, params, batch):
    loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
    loss_scale, finite = state.loss_scale.update(
        grads := state.loss_scale.unscale(grads)
    )
    zeroed = jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)
    updates, inner_state = ADAMW.update(zeroed, state.inner_state, params)
    count = state.skipped_steps + 1 - finite
    state = ols.LossScaleState(loss_scale, inner_state, finite, count, count)
    return loss, optax.apply_updates(params, updates), state


def nan_to_num(loss_fn, state, params, batch):
    loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
    return loss, *WRAPPED.apply_gradients(
        jax.tree.map(jnp.nan_to_num, grads), state, params
    )


def old_loss_scale(loss_fn, state, params, batch):
    loss, params, new = WRAPPED.minimize(loss_fn, state, params, batch)
    return loss, params, new._replace(loss_scale=state.loss_scale)


def old_state(loss_fn, state, params, batch):
    loss, params, _ = WRAPPED.minimize(loss_fn, state, params, batch)
    return loss, params, state


def state_made_anew(loss_fn, state, params, batch):
    return WRAPPED.minimize(loss_fn, WRAPPED.init(params), params, batch)


def guarded_against_nan_alone(loss_fn, state, params, batch):
    loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
    grads = state.loss_scale.unscale(grads)
    is_nan = [jnp.isnan(g).any() for g in jax.tree.leaves(grads)]
    applied = ~jnp.any(jnp.array(is_nan))
    updates, inner_state = ADAMW.update(grads, state.inner_state, params)
    new = optax.apply_updates(params, updates)
    state = state._replace(
        loss_scale=state.loss_scale.adjust(applied),
        inner_state=inner_state,
        should_apply=applied,
        skipped_steps=state.skipped_steps + 1 - applied,
    )
    return loss, optax.tree.where(applied, new, params), state


def another_optimizers_scale(loss_fn, state, params, batch):
    loss, grads = ols.value_and_scaled_grad(loss_fn, OTHERS)(params, batch)
    return loss, *WRAPPED.apply_gradients(grads, state, params)


def another_optimizers_scale_that_overflows(loss_fn, state, params, batch):
    loss, grads = ols.value_and_scaled_grad(loss_fn, TOO_LARGE)(params, batch)
    return loss, *WRAPPED.apply_gradients(grads, state, params)


@pytest.mark.parametrize(
    ("minimize", "said"),
    [
        (WRAPPED.minimize, None),
        (
            zeroed_by_hand,
            r"^an overflow changes what the step passes on(.|\n)*"
            r"should be skipped, it changed:(.|\n)*result\[1\](.|\n)*minimize",
        ),
        (nan_to_num, r"^the step is applied at(.|\n)*result\[1\](.|\n)*nan_to_num"),
        (old_loss_scale, r"loss scale comes back as it was(.|\n)*return the state"),
        (old_state, r"loss scale comes back as it was(.|\n)*return the state"),
        (state_made_anew, r"^the step is applied at(.|\n)*that the step is given"),
        (
            guarded_against_nan_alone,
            r"^the step applies gradients that overflow\.\n"
            r"These outputs become infinite(.|\n)*result\[1\](.|\n)*all_finite",
        ),
        (another_optimizers_scale, r"2\*\*-1: result\[1\](.|\n)*not an older one"),
        (
            another_optimizers_scale_that_overflows,
            r"applied at (none|only \d)(.|\n)*a scale other than that of the state",
        ),
    ],
)
def test_a_step_that_goes_wrong_at_an_overflow_or_at_all_is_found(minimize, said):
    """And one with moments, which move the parameters even where gradients are zero."""
    loss_fn, params, batch = problem(jnp.float16)
    _, params, state = WRAPPED.minimize(loss_fn, WRAPPED.init(params), params, batch)
    step = jax.jit(lambda params, state: minimize(loss_fn, state, params, batch))
    if said is None:
        ols.testing.assert_scale_invariant(step, params, state)
    else:
        with pytest.raises(AssertionError, match=said):
            ols.testing.assert_scale_invariant(step, params, state)


@pytest.mark.parametrize(
    "change",
    [lambda g: jnp.clip(g, -1, 1), lambda g: g / (1 + jnp.linalg.norm(g))],
    ids=["clips", "normalizes"],
)
def test_a_backward_pass_that_is_not_linear_is_found(change):
    layer = jax.custom_vjp(lambda x: x)
    layer.defvjp(lambda x: (x, None), lambda _, g: (change(g),))

    @jax.jit
    def step(params, state):
        loss_fn = lambda params: jnp.mean(layer(X @ params["w"]) ** 2)
        loss, params, state = TX.minimize(loss_fn, state, params)
        return params, state, loss

    with pytest.raises(AssertionError, match="custom_vjp"):
        ols.testing.assert_scale_invariant(step, PARAMS, TX.init(PARAMS))


def test_a_loss_scale_is_known_by_its_type_and_not_by_name_value_or_identity():
    """A parameter is called as one is, a scaled gradient is as large, an array is the same."""
    tx = ols.with_loss_scale(optax.sgd(0.1))
    params = {"loss_scale_net": jnp.ones(3), "loss_scale": jnp.ones(())}
    state = tx.init(params)

    def forgotten(params, state):
        return tx.apply_gradients(jax.grad(optax.tree.sum)(params), state, params)

    def logged(params, state, name):
        _, grads = ols.value_and_scaled_grad(optax.tree.sum, state)(params)
        return *tx.apply_gradients(grads, state, params), {name: grads["loss_scale"]}

    def carried(params, state, scale):
        _, grads = ols.value_and_scaled_grad(optax.tree.sum, scale)(params)
        params, state = tx.apply_gradients(grads, state, params)
        return params, state, state.loss_scale()

    check = ols.testing.assert_scale_invariant
    with pytest.raises(AssertionError, match=r"result\[0\]\['loss_scale_net'\]"):
        check(jax.jit(forgotten), params, state)
    for name in ("loss_scaled_norm", "loss_scale"):
        with pytest.raises(AssertionError, match=rf"2\*\*1: result\[2\]\['{name}'\]"):
            check(jax.jit(functools.partial(logged, name=name)), params, state)
    with pytest.raises(
        AssertionError, match=r"2\*\*-1: result\[0\](.|\n)*kept beside it"
    ):
        check(jax.jit(carried), params, state, state.loss_scale())


def test_a_state_that_is_infinite_from_the_start_is_not_accused():
    inner = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau())
    tx = ols.with_loss_scale(inner)
    loss_fn, params, batch = problem(jnp.float16)
    step = jax.jit(lambda params, state: tx.minimize(loss_fn, state, params, batch))
    state = tx.init(params)
    assert jnp.isinf(state.inner_state[1].best_value)
    ols.testing.assert_scale_invariant(step, params, state)
    ols.testing.assert_survives_overflow(step, params, state)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_a_cast_to_8_bits_in_the_loss_is_not_accused(dtype):
    def loss_fn(params, x):
        return jnp.mean((x @ params["w"]).astype(dtype).astype(jnp.float32) ** 2)

    step = jax.jit(lambda params, state: TX.minimize(loss_fn, state, params, X))
    ols.testing.assert_scale_invariant(step, PARAMS, TX.init(PARAMS))


def test_where_implicit_transfers_are_disallowed():
    step = jax.jit(small_step)
    arguments = (PARAMS, TX.init(PARAMS), X)
    with jax.transfer_guard("disallow"):
        ols.testing.assert_scale_invariant(step, *arguments)
        ols.testing.assert_survives_overflow(step, *arguments)


def halved(inner):
    """A transformation of one's own, which changes the updates of another."""

    def update(updates, state, params=None, **extra_args):
        updates, state = inner.update(updates, state, params, **extra_args)
        return jax.tree.map(lambda u: 0.5 * u, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


@pytest.mark.parametrize("place", ["none", "inside", "outside"])
def test_updates_of_master_weights_that_others_change_are_found(place):
    loss_fn, params, batch = problem(jnp.float16)
    params = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    tx = ols.with_master_weights(optax.adam(1e-2))
    tx = ols.with_loss_scale(halved(tx) if place == "inside" else tx)
    tx = halved(tx) if place == "outside" else tx
    step = jax.jit(step_by_update(tx, loss_fn))
    arguments = (step, params, tx.init(params), batch)
    if place == "none":
        ols.testing.assert_scale_invariant(*arguments)
    else:
        after = "Let nothing come after this wrapper"
        said = rf"loses digits(.|\n)*remainders\['in'\](.|\n)*{after}"
        with pytest.raises(AssertionError, match=said):
            ols.testing.assert_scale_invariant(*arguments)


def test_an_output_that_is_nan_at_growth_alone_is_found():
    loss_fn, params, batch = problem(jnp.float32)
    tx = ols.with_loss_scale(optax.sgd(0.1))

    @jax.jit
    def step(params, mean, state, batch):
        old = state.loss_scale()
        loss, params, state = tx.minimize(loss_fn, state, params, batch)
        mean = ols.where_applied(state, 0.9 * mean + 0.1 * loss, mean)
        grows = state.loss_scale() > old
        return params, jnp.where(grows, jnp.nan, mean), state, loss

    with pytest.raises(AssertionError, match=r"scale grows(.|\n)*result\[1\]"):
        ols.testing.assert_scale_invariant(
            step, params, jnp.ones(()), tx.init(params), batch
        )


def test_a_step_that_is_skipped_at_most_low_scales_is_right():
    """Its gradients are so small that the first scales tried, too, leave nothing of them."""
    loss_fn, params, batch = problem(jnp.float16)
    small_loss = lambda params, batch: 2.0**-10 * loss_fn(params, batch)
    tx, step = normalized_gradients(small_loss, optax.sgd(0.1), params)
    ols.testing.assert_scale_invariant(jax.jit(step), params, tx.init(params), batch)
