"""With what else Optax has: around the wrapper, inside it, and extra arguments through it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import optax_lossscale as ols

LS = ols.DynamicLossScale(initial_scale=1024, growth_interval=10**6)
PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.25, 0.5])}
X = jnp.array([[1.0, 2.0], [0.5, -1.0]])


def loss_fn(params):
    return jnp.mean((X @ params["w"] + params["b"]) ** 2)


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim == 2, params)


def labels(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)


def nothing(loss, grads):
    """No extra arguments."""
    return {}


@functools.cache
def plain_step(tx, extra):
    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params, **extra(loss, grads))
        return optax.apply_updates(params, updates), state

    return step


@functools.cache
def scaled_step(tx, extra):
    @jax.jit
    def step(params, state, bad):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params)
        true = ols.get_loss_scale(state).unscale(grads)
        grads = jax.tree.map(lambda g: jnp.where(bad, jnp.inf, g), grads)
        updates, state = tx.update(grads, state, params, **extra(loss, true))
        return optax.apply_updates(params, updates), state

    return step


def plain_run(tx, steps=5, extra=nothing):
    """Params and state after training without loss scaling."""
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        params, state = plain_step(tx, extra)(params, state)
    return params, state


def scaled_run(tx, steps=5, extra=nothing, skip=()):
    """Params and state after training through `tx.update`, with overflows at the steps `skip`."""
    params, state = PARAMS, tx.init(PARAMS)
    for i in range(steps):
        params, state = scaled_step(tx, extra)(params, state, i in skip)
    return params, state


INSIDE = {
    "chain": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "named_chain": optax.named_chain(
        ("clip", optax.clip(0.1)), ("adam", optax.adam(1e-2))
    ),
    "masked": optax.masked(optax.adam(1e-2), is_matrix),
    "partition": optax.partition(
        {"matrix": optax.adam(1e-2), "vector": optax.sgd(0.1)}, labels
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(0.1, 0, 9)
    ),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "ema": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
}


wrapped = functools.cache(lambda inner: ols.with_loss_scale(inner, LS))


@pytest.mark.parametrize("inner", INSIDE.values(), ids=INSIDE)
def test_a_combination_inside_the_wrapper_steps_as_without(inner):
    params, state = scaled_run(wrapped(inner))
    plain_params, plain_state = plain_run(inner)
    chex.assert_trees_all_close(params, plain_params, rtol=1e-5)
    chex.assert_trees_all_close(state.inner_state, plain_state, rtol=1e-5)


@pytest.mark.parametrize("inner", INSIDE.values(), ids=INSIDE)
def test_a_skipped_step_is_as_if_it_had_not_been(inner):
    skipped = scaled_run(wrapped(inner), steps=6, skip=(2,))
    params, state = scaled_run(wrapped(inner), steps=5)
    chex.assert_trees_all_equal(skipped[0], params)
    chex.assert_trees_all_equal(skipped[1].inner_state, state.inner_state)
    assert skipped[1].loss_scale() == 512


AROUND = {
    "chain": lambda tx: optax.chain(tx, optax.scale(0.5)),
    "named_chain": lambda tx: optax.named_chain(
        ("scaled", tx), ("half", optax.scale(0.5))
    ),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda factor: optax.chain(tx, optax.scale(factor))
    )(0.5),
    "with_extra_args": optax.with_extra_args_support,
}


ADAM = optax.adam(1e-2)
around_the_wrapper = functools.cache(lambda around: around(wrapped(ADAM)))


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_a_combination_around_the_wrapper_steps_as_without(around):
    params, _ = scaled_run(around_the_wrapper(around))
    plain_params, _ = plain_run(around(ADAM))
    chex.assert_trees_all_close(params, plain_params, rtol=1e-5)


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_a_combination_around_the_wrapper_changes_no_parameter_at_an_overflow(around):
    tx = around_the_wrapper(around)
    before, _ = scaled_run(tx, steps=2)
    after, state = scaled_run(tx, steps=3, skip=(2,))
    chex.assert_trees_all_equal(after, before)
    assert ols.get_loss_scale(state)() == 512


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.masked(tx, is_matrix),
        lambda tx: optax.partition({"matrix": tx, "vector": optax.sgd(0.1)}, labels),
    ],
    ids=["masked", "partition"],
)
def test_around_the_wrapper_what_would_leave_gradients_scaled_is_refused(around):
    tx = around(ols.with_loss_scale(optax.sgd(1.0), LS))
    state = tx.init(PARAMS)
    with pytest.raises(
        ValueError, match="Wrap the whole of it instead: with_loss_scale"
    ):
        tx.update(ols.value_and_scaled_grad(loss_fn, state)(PARAMS)[1], state, PARAMS)


def test_two_that_are_wrapped_in_a_chain_are_refused_by_their_state():
    state = optax.chain(wrapped(ADAM), wrapped(optax.sgd(1.0))).init(PARAMS)
    for take in (lambda state: ols.value_and_scaled_grad(loss_fn, state), ols.metrics):
        with pytest.raises(
            ValueError, match=r"found 2 .*Wrap an optimizer once, as a whole"
        ):
            take(state)


def test_wrapping_what_is_wrapped_is_refused():
    wrapped = ols.with_loss_scale(optax.sgd(1.0))
    for inner in (wrapped, optax.chain(optax.clip(1.0), wrapped)):
        with pytest.raises(ValueError, match="a part of inner is wrapped"):
            ols.with_loss_scale(inner).init(PARAMS)


@pytest.mark.parametrize("given", [None, 64, ols.DynamicLossScale(growth_interval=7)])
def test_a_state_of_another_configuration_is_refused_and_goes_on_with_the_new_one(
    given,
):
    tx = ols.with_loss_scale(optax.adam(0.1), LS)
    old = ols.with_loss_scale(optax.adam(0.1), given)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    overflow = jax.tree.map(lambda x: x * jnp.inf, grads)
    _, state = old.apply_gradients(overflow, old.init(PARAMS), PARAMS)
    params, state = old.apply_gradients(grads, state, PARAMS)
    with pytest.raises(ValueError, match="is configured differently") as error:
        tx.update(grads, state, params)
    migration = str(error.value).split(": ")[-1]
    migrated = eval(migration, {"tx": tx, "params": params, "state": state})
    chex.assert_trees_all_equal(
        migrated._replace(loss_scale=None), state._replace(loss_scale=None)
    )
    _, after = tx.update(grads, migrated, params)
    assert after.loss_scale() == LS()


def test_minimize_names_the_order_of_its_arguments():
    tx = ols.with_loss_scale(optax.sgd(0.1), LS)
    state = tx.init(PARAMS)
    for arguments in (
        (PARAMS, state, loss_fn),
        (state, loss_fn, PARAMS),
        (loss_fn, PARAMS, state),
    ):
        with pytest.raises(
            TypeError,
            match=r"call minimize\(loss_fn, state, params, …\); got",
        ):
            tx.minimize(*arguments)


def test_update_takes_the_keywords_of_optax():
    tx = ols.with_loss_scale(optax.adamw(0.1), LS)
    state = tx.init(PARAMS)
    by_name = tx.update(updates=PARAMS, state=state, params=PARAMS)
    chex.assert_trees_all_equal(by_name, tx.update(PARAMS, state, PARAMS))


def test_a_loss_scale_for_each_part_is_one_too_many_for_one_loss():
    each = {k: ols.with_loss_scale(optax.sgd(0.1), LS) for k in ("matrix", "vector")}
    state = optax.partition(each, labels).init(PARAMS)
    with pytest.raises(ValueError, match="2"):
        ols.value_and_scaled_grad(loss_fn, state)


def test_reduce_on_plateau_is_given_the_value():
    inner = optax.chain(
        optax.adam(0.5),
        optax.contrib.reduce_on_plateau(factor=0.5, patience=0, cooldown=0),
    )
    extra = lambda loss, grads: {"value": loss}
    params, state = scaled_run(ols.with_loss_scale(inner, LS), 12, extra)
    plain_params, plain_state = plain_run(inner, 12, extra)
    chex.assert_trees_all_close(params, plain_params, rtol=1e-5)
    chex.assert_trees_all_close(state.inner_state, plain_state, rtol=1e-5)
    assert state.inner_state[1].scale < 1


def test_lbfgs_is_given_true_values_and_gradients():
    """It compares gradients with values, so all that it is given beside the gradients is true."""
    inner = optax.lbfgs()
    extra = lambda loss, grads: {"value": loss, "grad": grads, "value_fn": loss_fn}
    params, _ = scaled_run(ols.with_loss_scale(inner, LS), 5, extra)
    plain_params, _ = plain_run(inner, 5, extra)
    chex.assert_trees_all_close(params, plain_params, rtol=1e-4)
    assert loss_fn(params) < 1e-3 * loss_fn(PARAMS)


def test_sam_differentiates_the_true_loss_itself():
    """In its opaque mode it takes further gradients by a function: of the loss, not scaled."""
    make = lambda: optax.contrib.sam(
        optax.sgd(0.1),
        optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
        opaque_mode=True,
    )
    extra = lambda loss, grads: {"grad_fn": lambda params, _: jax.grad(loss_fn)(params)}
    params, state = scaled_run(ols.with_loss_scale(make(), LS), 5, extra)
    plain_params, _ = plain_run(make(), 5, extra)
    chex.assert_trees_all_close(params, plain_params, rtol=1e-5)
    assert state.should_apply


def test_sam_that_shows_its_adversarial_steps_compiles_once_inside():
    inner = optax.contrib.sam(
        optax.adam(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    )
    tx = ols.with_loss_scale(inner, LS)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state):
        return tx.apply_gradients(
            ols.value_and_scaled_grad(loss_fn, state)(params)[1], state, params
        )

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(6):
        params, state = step(params, state)
    plain_params, _ = plain_run(inner, 6)
    chex.assert_trees_all_close(params, plain_params, rtol=1e-5)


def test_lookahead_inside_and_around_steps_as_without():
    fast = optax.adam(1e-1)
    params = optax.LookaheadParams.init_synced(PARAMS)

    def run(tx, grad_fn):
        now, state = params, tx.init(params)
        for _ in range(4):
            updates, state = tx.update(grad_fn(now.fast, state), state, now)
            now = optax.apply_updates(now, updates)
        return now

    make = lambda inner: optax.lookahead(inner, sync_period=2, slow_step_size=0.5)
    plain = run(make(fast), lambda p, _: jax.grad(loss_fn)(p))
    grad_fn = lambda p, state: ols.value_and_scaled_grad(loss_fn, state)(p)[1]
    chex.assert_trees_all_close(
        run(ols.with_loss_scale(make(fast), LS), grad_fn), plain
    )
    chex.assert_trees_all_close(
        run(make(ols.with_loss_scale(fast, LS)), grad_fn), plain
    )


def test_accumulation_is_the_large_batch():
    """Four micro-batches of two are one batch of eight, where the arithmetic is exact."""
    x = jnp.arange(16.0).reshape(8, 2) / 16
    of_batch = lambda params, x: jnp.mean((x @ params["w"] + params["b"]) ** 2)
    inner = optax.sgd(0.125)
    tx = ols.with_loss_scale(optax.MultiSteps(inner, 4), LS)
    params, state = PARAMS, tx.init(PARAMS)
    for micro in x.reshape(4, 2, 2):
        grads = ols.value_and_scaled_grad(of_batch, state)(params, micro)[1]
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    grads = jax.grad(of_batch)(PARAMS, x)
    expected = optax.apply_updates(PARAMS, inner.update(grads, inner.init(PARAMS))[0])
    chex.assert_trees_all_close(params, expected, rtol=1e-6)


@pytest.mark.parametrize("number", [0.05, np.float64(0.05), jnp.float32(0.05), 1])
@pytest.mark.parametrize("loss_scale", [LS, 1024], ids=["dynamic", "fixed"])
def test_a_hyperparameter_set_to_a_number_between_eager_steps(number, loss_scale):
    tx = ols.with_loss_scale(
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), loss_scale
    )
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(2):
        state.inner_state.hyperparams["learning_rate"] = number
        params, state = tx.apply_gradients(
            jax.tree.map(jnp.ones_like, params), state, params
        )
    expected = jax.tree.map(lambda p: p - 2 * number / 1024, PARAMS)
    chex.assert_trees_all_close(params, expected, rtol=1e-6)
    assert state.inner_state.count == 2
