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

pytestmark = pytest.mark.filterwarnings(
    "ignore:a transformation stands before", "ignore::DeprecationWarning"
)

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(1e-3),
    "clipped_adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
}
MISTAKES = {}
RIGHT = {}
check = ols.testing.assert_scale_invariant


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
        check(jax.jit(step), params, tx.init(params), batch)
    said = str(error.value)
    if make is a_norm_of_scaled_gradients:
        assert "result[2]['norm']" in said
        assert "result[0]" not in said
    assert "value_and_scaled_grad" in said or "unscale the gradients first" in said


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
    with pytest.raises(AssertionError, match=r"gradient_norm"):
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
        with pytest.raises(AssertionError, match=r"args\[0\]\['state'\].inner_state"):
            ols.testing.assert_scale_invariant(step, trainer, X)
    assert trainer["params"] is PARAMS


@pytest.mark.parametrize("other", [optax.trace(0.9), optax.add_decayed_weights(0.1)])
def test_of_others_before_the_wrapper_a_state_is_found_and_a_sum_is_not(other):
    """What is added to scaled gradients vanishes beside them; the library warns of both."""
    tx = optax.chain(other, ols.with_loss_scale(optax.sgd(0.1)))

    def step(params, state):
        _, grads = ols.value_and_scaled_grad(small_loss, state)(params, X)
        return apply(tx, grads, state, params)

    if tx.init(PARAMS)[0] == optax.EmptyState():
        check(jax.jit(step), PARAMS, tx.init(PARAMS))
        return
    with pytest.raises(AssertionError, match=r"result\[1\]\[0\].trace"):
        check(jax.jit(step), PARAMS, tx.init(PARAMS))


def test_gradients_that_are_scaled_twice_are_found():
    """Although Adam's epsilon makes a small parameter follow the reciprocal."""
    loss_fn, params, batch = problem(jnp.float16)
    tx = ols.with_loss_scale(optax.adam(1e-2))

    @jax.jit
    def step(params, state, batch):
        def scaled_twice(params, batch):
            return 2.0**-10 * state.loss_scale.scale(loss_fn(params, batch))

        loss, grads = ols.value_and_scaled_grad(scaled_twice, state)(params, batch)
        return *tx.apply_gradients(grads, state, params), loss

    with pytest.raises(AssertionError, match="depends on the loss scale"):
        ols.testing.assert_scale_invariant(step, params, tx.init(params), batch)


def test_as_an_overflow_is_expected_debuggers_do_not_stop_at_it():
    def loss_fn(params):
        return jnp.sum(params["w"].astype(jnp.float16) * 100).astype(jnp.float32) ** 2

    def step(params, state):
        _, grads = ols.value_and_scaled_grad(loss_fn, state)(params)
        return TX.apply_gradients(grads, state, params)

    with jax.debug_nans(True):
        ols.testing.assert_scale_invariant(jax.jit(step), PARAMS, TX.init(PARAMS))


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
        loss, scaled = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
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


# No run at these loss scales crosses their thresholds.
NOT_FOUND_IN_LOGS = {
    "flag",
    "flag as a number",
    "share above a threshold",
    "saturated",
    "histogram",
}


@quick("name", [*WRONG_LOGS], "log", "edges")
def test_what_is_logged_of_scaled_gradients_is_found(name):
    step, arguments = logging_step(jnp.float16)
    ignored = [f"result[3]['{other}']" for other in WRONG_LOGS if other != name]
    ignored.append("result[2]['right']")
    try:
        check(step, *arguments, ignore=ignored)
        found = False
    except AssertionError as error:
        found = f"result[3]['{name}']" in str(error)
    assert found == (name not in NOT_FOUND_IN_LOGS)


@quick("dtype", {"float16": jnp.float16, "float32": jnp.float32}, "float16")
def test_what_is_logged_of_unscaled_gradients_is_not_accused(dtype):
    step, arguments = logging_step(dtype)
    check(step, *arguments, ignore=["result[3]", "result[2]['right']['grew']"])


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


# At no scale that is tried is one norm above these, and another below.
NOT_FOUND_IN_UPDATES = {
    ("sgd", "none above 100"),
    ("adam", "none above 100"),
    ("sgd", "smaller above 10"),
    ("adam", "smaller above 10"),
}


@quick("name", {"sgd": ("sgd", jnp.float32), "adam": ("adam", jnp.float16)}, "sgd")
@pytest.mark.parametrize("change", [*UPDATES])
def test_updates_that_depend_on_the_size_of_scaled_gradients_are_found(name, change):
    step, arguments = step_with_changed_updates(name[1], name[0])
    arguments = *arguments, list(UPDATES).index(change)
    if change == "right" or (name[0], change) in NOT_FOUND_IN_UPDATES:
        check(step, *arguments)
    else:
        with pytest.raises(AssertionError, match=r"result\[0\]"):
            check(step, *arguments)


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
    with pytest.raises(AssertionError, match="value_and_scaled_grad"):
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
    ols.testing.assert_scale_invariant(step, *arguments, True)
    with pytest.raises(
        AssertionError, match=r"result\[[01]\](.|\n)*before the scale adapts"
    ):
        ols.testing.assert_scale_invariant(step, *arguments, False)


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
    for bits in (6, 10):
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


@pytest.mark.parametrize("returned", [3])
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
        assert "args[0].bias" in str(error.value)
        assert "tied" not in str(error.value)


ADAMW = optax.adamw(1e-2)
WRAPPED = ols.with_loss_scale(ADAMW, ols.DynamicLossScale(2.0**8))
OTHERS = WRAPPED.init({})  # the state of another optimizer
TOO_LARGE = OTHERS._replace(loss_scale=ols.DynamicLossScale(2.0**60))


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
        (nan_to_num, "nan_to_num"),
        (state_made_anew, "the state that the step is given"),
        (another_optimizers_scale, "the state that the step is given"),
        (another_optimizers_scale_that_overflows, "skipped at every loss scale tried"),
    ],
)
def test_a_step_that_goes_wrong_at_an_overflow_or_at_all_is_found(minimize, said):
    loss_fn, params, batch = problem(jnp.float16)
    _, params, state = WRAPPED.minimize(loss_fn, WRAPPED.init(params), params, batch)
    step = jax.jit(lambda params, state: minimize(loss_fn, state, params, batch)[1:])
    if said is None:
        check(step, params, state)
    else:
        with pytest.raises(AssertionError, match=said):
            check(step, params, state)


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


def test_a_state_that_is_infinite_from_the_start_is_not_accused():
    inner = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau())
    tx = ols.with_loss_scale(inner)
    loss_fn, params, batch = problem(jnp.float16)
    step = jax.jit(lambda params, state: tx.minimize(loss_fn, state, params, batch)[1:])
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


def test_gradients_that_are_all_zero_show_nothing():
    step = jax.jit(small_step)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    with pytest.raises(AssertionError, match="gradients that are all zero"):
        check(step, zeros, TX.init(zeros), jnp.zeros_like(X))
