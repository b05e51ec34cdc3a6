"""`assert_survives_overflow` finds what an overflow leaves behind, and accuses no right step.

Each table holds a wrong and a right step of a kind, and what the error says of the wrong one.
"""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import one_in

import optax_lossscale as ols
from optax_lossscale.testing import _experiment

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the framework's, not ours
    from flax import nnx

KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {"w": jax.random.normal(KEYS[0], (4, 3)), "b": jnp.zeros(3)}
X, Y = jax.random.normal(KEYS[1], (8, 4)), jax.random.normal(KEYS[2], (8, 3))
INNER = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))
LOSS_SCALE = ols.DynamicLossScale(2.0**8)
TX = ols.with_loss_scale(INNER, LOSS_SCALE)
HALF = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS)
KEPT = "where_applied"
CHANGED = "an overflow changes what the step passes on"
APPLIED = "the step is applied at an infinite loss scale"
NOT_ADAPTED = "the step does not adapt its loss scale"
UNCOUNTED = "the step is skipped, but the state that comes back does not count the skip"
NAN = "a NaN spoils what the step passes on"


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def autocast_loss(params, x, y):
    return ols.autocast(loss_fn)(params, x, y)


def begun(tx, params=PARAMS):
    """Parameters and a state with moments, after a step."""
    _, params, state = tx.minimize(autocast_loss, tx.init(params), params, X, Y)
    return params, state


def average(old, new):
    return jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, new)


def kept_if(right, state, new, old):
    return ols.where_applied(state, new, old) if right else new


STEPS = {}


def step_of(found, *said):
    """Registers a maker of a step and its arguments, and what is found if it is not right."""

    def register(make):
        STEPS[make.__name__] = make, found, said
        return make

    return register


@step_of(CHANGED, "result[1]['w']", KEPT)
def average_of_parameters(right):
    def step(params, ema, state, x, y):
        loss, params, state = TX.minimize(autocast_loss, state, params, x, y)
        return params, kept_if(right, state, average(ema, params), ema), state, loss

    params, state = begun(TX)
    return jax.jit(step, donate_argnums=(0, 1, 2)), (params, PARAMS, state, X, Y)


@step_of(CHANGED, "result[3]", KEPT)
def running_mean_of_the_loss(right):
    def step(params, state, x, mean, y):
        loss, params, state = TX.minimize(loss_fn, state, params, x, y)
        return loss, params, state, kept_if(right, state, 0.9 * mean + 0.1 * loss, mean)

    params, state = begun(TX)
    return jax.jit(step), (params, state, X, jnp.float32(0), Y)


@step_of(CHANGED, "args[1]", KEPT)
def statistics_in_an_array_of_numpy(right):
    fast = jax.jit(functools.partial(TX.minimize, loss_fn))

    def step(params, mean, state, x, y):
        new = 0.9 * mean + 0.1 * np.mean(x, axis=0)
        loss, params, state = fast(state, params, x - mean, y)
        mean[:] = kept_if(right, state, new, mean)
        return params, state, loss

    params, state = begun(TX)
    return step, (params, np.zeros(4, np.float32), state, X, Y)


@step_of(CHANGED, "result['stats']['mean']", KEPT)
def statistics_in_a_dict(right):
    def step(carry, x, y):
        loss, params, state = TX.minimize(
            loss_fn, carry["state"], carry["params"], x, y
        )
        stats = {"mean": 0.5 * carry["stats"]["mean"] + 0.5 * x.mean(0)}
        stats = kept_if(right, state, stats, carry["stats"])
        return {"params": params, "state": state, "stats": stats, "loss": loss}

    params, state = begun(TX)
    stats = {"mean": jnp.zeros(4)}
    return jax.jit(step), ({"params": params, "state": state, "stats": stats}, X, Y)


@step_of(APPLIED, "result[0]['w']", "skip=None")
def gradients_that_are_not_finite(right):
    def step(params, state, x, y):
        loss, grads = ols.value_and_scaled_grad(autocast_loss, state)(params, x, y)
        grads = grads if right else jax.tree.map(jnp.nan_to_num, grads)
        norm = optax.tree.norm(state.loss_scale.unscale(grads))
        return *TX.apply_gradients(grads, state, params, value=loss), {"norm": norm}

    return jax.jit(step), (*begun(TX), X, Y)


@step_of(CHANGED, "result[0]['w']", "result[1].inner_state[0].mu['w']", "minimize")
def gradients_zeroed_by_hand(right):
    def step(params, state, x, y):
        loss, grads = ols.value_and_scaled_grad(autocast_loss, state)(params, x, y)
        loss_scale, finite = state.loss_scale.update(
            grads := state.loss_scale.unscale(grads)
        )
        zeroed = jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)
        updates, inner_state = INNER.update(zeroed, state.inner_state, params)
        new = optax.apply_updates(params, updates), inner_state
        params, inner_state = (
            optax.tree.where(finite, new, (params, state.inner_state)) if right else new
        )
        count = state.skipped_steps + 1 - finite
        return (
            params,
            ols.LossScaleState(loss_scale, inner_state, finite, count, count),
            loss,
        )

    return jax.jit(step), (*begun(TX), X, Y)


@step_of(NOT_ADAPTED, "loss scale comes back as it was", "return the state")
def old_loss_scale(right):
    def step(params, state, x, y):
        loss, params, new = TX.minimize(autocast_loss, state, params, x, y)
        return params, new if right else new._replace(loss_scale=state.loss_scale), loss

    return jax.jit(step), (*begun(TX), X, Y)


@step_of(NOT_ADAPTED, "loss scale comes back as it was", "return the state")
def old_state(right):
    def step(params, state, x, y):
        loss, params, new = TX.minimize(autocast_loss, state, params, x, y)
        return params, new if right else state, loss

    return jax.jit(step), (*begun(TX), X, Y)


@step_of(UNCOUNTED)
def old_count(right):
    def step(params, state, x, y):
        loss, params, new = TX.minimize(autocast_loss, state, params, x, y)
        return (
            params,
            new if right else new._replace(skipped_steps=state.skipped_steps),
            loss,
        )

    return jax.jit(step), (*begun(TX), X, Y)


@step_of(CHANGED, "result[1][1].trace['w']", KEPT)
def momentum_after_the_wrapper(right):
    outside = optax.trace(0.9)
    tx = ols.with_loss_scale(optax.chain(INNER, outside), LOSS_SCALE)
    tx = tx if right else optax.chain(TX, outside)

    def step(params, state, x, y):
        loss, grads = ols.value_and_scaled_grad(autocast_loss, state)(params, x, y)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    step = jax.jit(step)
    params, state, _ = step(PARAMS, tx.init(PARAMS), X, Y)
    return step, (params, state, X, Y)


@step_of(CHANGED, "result[1][1].trace['w']", KEPT)
def momentum_after_the_wrapper_before_the_first_step(right):
    outside = optax.trace(0.9)
    inner = optax.sgd(0.1)
    tx = ols.with_loss_scale(optax.chain(inner, outside) if right else inner)
    tx = tx if right else optax.chain(tx, outside)

    def step(params, state, x, y):
        loss, grads = ols.value_and_scaled_grad(autocast_loss, state)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step), (PARAMS, tx.init(PARAMS), X, Y)


@step_of(CHANGED, "Adam's count", KEPT)
def a_count_that_goes_on(right):
    def step(params, state, x, y):
        loss, new_params, new = TX.minimize(autocast_loss, state, params, x, y)
        if not right:
            adam, *others = new.inner_state
            adam = adam._replace(count=state.inner_state[0].count + 1)
            new = new._replace(inner_state=(adam, *others))
        return new_params, new, loss

    return jax.jit(step), (*begun(TX), X, Y)


@step_of(CHANGED, "result[2]['w']", KEPT)
def average_that_begins_as_a_copy(right):
    def step(params, state, mean, count, x, y):
        loss, params, state = TX.minimize(autocast_loss, state, params, x, y)
        new = jax.tree.map(lambda m, p: m + (p - m) / (count + 1), mean, params)
        return params, state, kept_if(right, state, new, mean), count + 1, loss

    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    return jax.jit(step), (PARAMS, TX.init(PARAMS), zeros, 0, X, Y)


@step_of(CHANGED, "result[0]['w']", KEPT)
def weights_that_are_clipped_at_a_skip(right):
    def step(params, state, x, y):
        loss, new, state = TX.minimize(autocast_loss, state, params, x, y)
        clipped = jax.tree.map(lambda p: jnp.clip(p, -0.3, 0.3), new)
        return kept_if(right, state, clipped, params), state, loss

    return jax.jit(step), (PARAMS, TX.init(PARAMS), X, Y)


@step_of(CHANGED, "Adam's count", KEPT)
def a_schedule_after_the_wrapper(right):
    schedule = optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 10))
    inner = optax.chain(INNER, schedule)
    inside = ols.with_loss_scale(inner, LOSS_SCALE)
    tx = inside if right else optax.chain(TX, schedule)

    def step(params, state, x, y):
        loss, grads = ols.value_and_scaled_grad(autocast_loss, state)(params, x, y)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step), (PARAMS, tx.init(PARAMS), X, Y)


@step_of(NOT_ADAPTED, "loss scale comes back as it was given, or at its initial value")
def a_loss_scale_made_anew(right):
    def step(params, state, x, y):
        loss, params, state = TX.minimize(autocast_loss, state, params, x, y)
        loss_scale = state.loss_scale if right else LOSS_SCALE
        return params, state._replace(loss_scale=loss_scale), loss

    return jax.jit(step), (PARAMS, TX.init(PARAMS), X, Y)


@step_of(APPLIED, "result[0]['w']", "nan_to_num")
def gradients_that_are_not_scaled_and_not_finite(right):
    tx = ols.with_loss_scale(INNER, None)

    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        grads = grads if right else jax.tree.map(jnp.nan_to_num, grads)
        return *tx.apply_gradients(grads, state, params), loss

    return jax.jit(step), (*begun(tx), X, Y)


@step_of(APPLIED, "result[0]['table']", "skip=None")
def tokens_without_a_loss_scale(right):
    tx = ols.with_loss_scale(INNER, None, skip="nonfinite" if right else None)
    params = {"table": jnp.ones((4, 2), jnp.bfloat16)}

    def step(params, state, tokens):
        def loss_fn(params):
            return jnp.mean(params["table"][tokens].astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return *tx.apply_gradients(grads, state, params, value=loss), loss

    return jax.jit(step), (params, tx.init(params), jnp.array([0, 2]))


@step_of(APPLIED, "result[0]['w']", "skip=None")
def fixed_loss_scale(right):
    tx = ols.with_loss_scale(INNER, 2.0**10, skip="nonfinite" if right else None)

    def step(params, state, x, y):
        loss, params, state = tx.minimize(autocast_loss, state, params, x, y)
        return params, state, loss

    return jax.jit(step), (*begun(tx), X, Y)


@step_of(APPLIED, "result[0]['w']", "skip=None")
def bfloat16_without_a_loss_scale(right):
    tx = ols.with_loss_scale(INNER, None, skip="nonfinite" if right else None)
    bfloat16 = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)

    def step(params, state, tokens):
        loss = lambda params: jnp.sum(params["w"][tokens].astype(jnp.float32) ** 2)
        loss, params, state = tx.minimize(loss, state, params)
        return params, state, loss

    return jax.jit(step), (bfloat16, tx.init(bfloat16), jnp.array([0, 2]))


@step_of(APPLIED, "result[0]['w']", "scale_gradient")
def unscaled_gradients(right):
    def step(params, state, x, y):
        grad_fn = (
            ols.value_and_scaled_grad(loss_fn, state)
            if right
            else jax.value_and_grad(loss_fn)
        )
        loss, grads = grad_fn(params, x, y)
        return *TX.apply_gradients(grads, state, params), loss

    return jax.jit(step), (*begun(TX), X, Y)


@step_of(NAN, "With a NaN in args[3]", "result[1]", KEPT)
def statistics_that_are_kept_at_an_overflow_alone(right):
    def step(params, mean, state, x, y):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x, y)
        finite = jnp.isfinite(optax.tree.norm(grads)) | jnp.isnan(loss)
        new = jnp.where(finite, average(mean, x.mean(0)), mean)
        params, state = TX.apply_gradients(grads, state, params, value=loss)
        return params, kept_if(right, state, new, mean), state, loss

    params, state = begun(TX)
    return jax.jit(step), (params, jnp.zeros(4), state, X, Y)


@step_of(CHANGED, "result[1]['w']", KEPT)
def master_weights_multi_steps_and_an_average(right):
    tx = ols.with_loss_scale(
        ols.with_master_weights(optax.MultiSteps(INNER, 2).gradient_transformation())
    )

    def step(params, ema, state, key, x, y):
        key, now = jax.random.split(key)
        loss, params, state = tx.minimize(
            autocast_loss, state, params, x + jax.random.normal(now), y
        )
        return (
            params,
            kept_if(right, state, average(ema, params), ema),
            state,
            key,
            loss,
        )

    return jax.jit(step), (HALF, HALF, tx.init(HALF), jax.random.key(1), X, Y)


@step_of(CHANGED, "result[0]['w']", KEPT)
def decay_after_a_scan_of_steps(right):
    def step(params, state, x, y):
        def one(carry, batch):
            loss, params, state = TX.minimize(autocast_loss, carry[1], carry[0], *batch)
            decayed = jax.tree.map(lambda p: 0.99 * p, params)
            return (kept_if(right, state, decayed, params), state), loss

        carry, losses = jax.lax.scan(one, (params, state), (x, y))
        return *carry, losses

    return jax.jit(step), (*begun(TX), jnp.stack([X, X]), jnp.stack([Y, Y]))


@step_of(CHANGED, "result[1]['mean']", KEPT)
def under_pmap(right):
    tx = ols.with_loss_scale(INNER, axis_name="data")

    def step(params, stats, state, x, y):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x, y)
        grads, mean = jax.lax.pmean((grads, x.mean(0)), "data")
        params, state = tx.apply_gradients(grads, state, params, value=loss)
        new = average(stats, {"mean": mean})
        return params, kept_if(right, state, new, stats), state, loss

    given = PARAMS, {"mean": X[0]}, tx.init(PARAMS)
    replicated = jax.tree.map(lambda x: jnp.stack([x, x]), given)
    batch = X.reshape(2, 4, 4), Y.reshape(2, 4, 3)
    return jax.pmap(step, axis_name="data"), (*replicated, *batch)


@step_of(CHANGED, "result[1]['mean']", KEPT)
def under_shard_map(right):
    mesh = jax.make_mesh((2,), ("data",))
    tx = ols.with_loss_scale(INNER, axis_name="data")

    def step(params, stats, state, x, y):
        def mean_loss(params):
            return jax.lax.pmean(loss_fn(params, x, y), "data")

        loss, grads = ols.value_and_scaled_grad(mean_loss, state)(params)
        params, state = tx.apply_gradients(grads, state, params, value=loss)
        new = average(stats, {"mean": jax.lax.pmean(x.mean(0), "data")})
        return params, kept_if(right, state, new, stats), state, loss

    specs = {"in_specs": (P(), P(), P(), P("data"), P("data")), "out_specs": P()}
    arguments = jax.device_put(
        (PARAMS, {"mean": X[0]}, tx.init(PARAMS)), NamedSharding(mesh, P())
    )
    batch = jax.device_put((X, Y), NamedSharding(mesh, P("data")))
    return jax.jit(jax.shard_map(step, mesh=mesh, **specs)), (*arguments, *batch)


@step_of(CHANGED, "result[1]", KEPT)
def hidden_state_of_a_recurrent_layer(right):
    weights = {
        "in": 0.4 * PARAMS["w"],
        "hidden": jax.nn.initializers.orthogonal()(KEYS[0], (3, 3)),
    }

    def recurrent_loss(params, hidden, x, y):
        def cell(hidden, x):
            hidden = jnp.tanh(x @ params["in"] + hidden @ params["hidden"])
            return hidden, hidden

        hidden, outputs = jax.lax.scan(cell, hidden, x)
        return jnp.mean((outputs - y) ** 2), hidden

    def step(params, hidden, state, x, y):
        (loss, new), params, state = TX.minimize(
            recurrent_loss, state, params, hidden, x, y, has_aux=True
        )
        return params, kept_if(right, state, new, hidden), state, loss

    batch = X.reshape(4, 2, 4), Y.reshape(4, 2, 3)
    return jax.jit(step), (weights, jnp.zeros((2, 3)), TX.init(weights), *batch)


class Normalized(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False)(linen.Dense(3)(x))


@step_of(CHANGED, "result[1]['BatchNorm_0']['mean']", KEPT)
def batch_norm_of_linen(right):
    model = Normalized()

    def step(params, stats, state, x, y):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": stats}
            out, changed = model.apply(variables, x, mutable="batch_stats")
            return jnp.mean((out - y) ** 2), changed["batch_stats"]

        (loss, new), grads = ols.value_and_scaled_grad(loss_fn, state, has_aux=True)(
            params
        )
        params, state = TX.apply_gradients(grads, state, params, value=loss)
        return params, kept_if(right, state, new, stats), state, loss

    variables = model.init(jax.random.key(0), X)
    params = variables["params"]
    return jax.jit(step), (params, variables["batch_stats"], TX.init(params), X, Y)


class NormalizedNnx(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.linear(x))


@step_of(CHANGED, "args[0].norm.mean", KEPT)
def batch_norm_of_nnx(right):
    model = NormalizedNnx()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss_fn(model):
            return ols.scale_gradient(jnp.mean((model(x) - y) ** 2), optimizer)

        before = nnx.clone(nnx.state(model, nnx.BatchStat))
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads, value=loss)
        after = nnx.state(model, nnx.BatchStat)
        if right:
            nnx.update(model, ols.where_applied(optimizer, after, before))
        return loss

    return step, (model, optimizer, X, Y)


@step_of(CHANGED, "result[1].layers[0].weight", KEPT)
def average_of_an_equinox_model(right):
    model = eqx.nn.MLP(4, 3, width_size=8, depth=1, key=jax.random.key(0))

    @eqx.filter_jit
    def step(model, ema, state, x, y):
        def loss_fn(model):
            return ols.scale_gradient(jnp.mean((jax.vmap(model)(x) - y) ** 2), state)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        params, state = TX.apply_gradients(grads, state, params, value=loss)
        old, _ = eqx.partition(ema, eqx.is_inexact_array)
        new = kept_if(right, state, average(old, params), old)
        return eqx.combine(params, static), eqx.combine(new, static), state, loss

    state = TX.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, model, state, X, Y)


@step_of(APPLIED, "skip=None", "result[0]['w']")
def gradients_of_jax_itself_in_bfloat16(right):
    tx = ols.with_loss_scale(INNER, None, skip="nonfinite" if right else None)
    narrow_loss = ols.autocast(loss_fn, jnp.bfloat16)

    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(narrow_loss)(params, x, y)
        return *tx.apply_gradients(grads, state, params), loss

    return jax.jit(step), (*begun(tx), X, Y)


def test_a_step_without_a_loss_scale_that_nothing_makes_overflow_is_not_passed():
    tx = ols.with_loss_scale(optax.sgd(0.1), None)

    @jax.jit
    def step(table, state, tokens):
        loss, grad = jax.value_and_grad(lambda table: jnp.sum(table[tokens]))(table)
        return *tx.apply_gradients(grad, state, table), loss

    table = jnp.ones((4, 2))
    with pytest.raises(AssertionError, match="not multiplied by the loss scale"):
        ols.testing.assert_survives_overflow(step, table, tx.init(table), jnp.arange(3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@one_in(3, "name", [*STEPS])
def test_what_an_overflow_or_a_nan_leaves_is_found(name):
    make, found, said = STEPS[name]
    step, arguments = make(right=False)
    with pytest.raises(AssertionError, match=rf"^{found}\b") as error:
        ols.testing.assert_survives_overflow(step, *arguments)
    assert all(text in str(error.value) for text in said), str(error.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@one_in(3, "name", [*STEPS], first=1)
def test_a_right_step_is_not_accused(name):
    step, arguments = STEPS[name][0](right=True)
    ols.testing.assert_survives_overflow(step, *arguments)
    ols.testing.assert_survives_overflow(step, *arguments)  # they are as they were


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [ols.testing.assert_survives_overflow, ols.testing.assert_scale_invariant]
)
def test_a_step_that_hands_nothing_back_cannot_be_judged(check):
    params, state = begun(TX)

    def step(params, state):
        loss, *_ = TX.minimize(autocast_loss, state, params, X, Y)
        return loss

    with pytest.raises(ValueError, match="no output of the step is the new value"):
        check(step, params, state)


def test_an_optimizer_may_be_among_the_arguments():
    params, state = begun(TX)

    @functools.partial(jax.jit, static_argnums=0)
    def step(optimizer, params, state):
        loss, params, state = optimizer.minimize(autocast_loss, state, params, X, Y)
        return params, state, loss

    ols.testing.assert_survives_overflow(step, TX, params, state)
    ols.testing.assert_survives_overflow(
        lambda _, params, state: step(TX, params, state), optax.sgd(0.1), params, state
    )


def shard_mapped_step(axis_name, mean, loss_fn=loss_fn):
    """A step and its arguments. Each device returns the loss of its own share."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    tx = ols.with_loss_scale(INNER, axis_name=axis_name)

    def step(params, state, x, y):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x, y)
        if mean:
            grads = jax.lax.pmean(grads, "data")
        return *tx.apply_gradients(grads, state, params, value=loss), loss

    specs = {"in_specs": (P(), P(), P("data"), P("data")), "out_specs": P()}
    mapped = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
    return jax.jit(mapped), PARAMS, tx.init(PARAMS), X, Y


@pytest.mark.parametrize(
    ("axis_name", "mean", "name"),
    [("data", False, r"result\[0\]"), (None, True, r"result\[1\].loss_scale")],
)
def test_replicas_that_decide_alone_drift_apart(axis_name, mean, name):
    """What is only returned, such as the loss of each device, may differ."""
    ols.testing.assert_survives_overflow(*shard_mapped_step("data", mean=True))
    found = f"^devices drift apart.\nTheir copies of these outputs differ:\n  {name}"
    with pytest.raises(AssertionError, match=found):
        ols.testing.assert_survives_overflow(*shard_mapped_step(axis_name, mean))


def test_replicas_whose_first_step_is_skipped_drift_apart_later():
    step, *arguments = shard_mapped_step("data", mean=False, loss_fn=autocast_loss)
    _, state, _ = step(*arguments)
    assert state.skipped_steps == 1
    with pytest.raises(AssertionError, match=r"outputs differ:\n  result\[0\]"):
        ols.testing.assert_survives_overflow(step, *arguments)


def test_a_step_that_stops_at_an_infinite_loss_scale_is_not_accused():
    """At finite ones its gradients do not overflow, so it is right to apply them."""

    def small_loss(params, x, y):
        return 2.0**-20 * loss_fn(params, x, y)

    def step(params, state):
        bits = int(jnp.log2(state.loss_scale()))
        loss, params, state = compiled(small_loss, state, params, X, Y)
        return params, state, {"loss": loss, "bits": bits}

    compiled = jax.jit(TX.minimize, static_argnums=0)
    bits = "result[2]['bits']"
    said = (
        r"OverflowError.* at an infinite loss scale, so it was tested only .* 2\*\*60"
    )
    with pytest.warns(UserWarning, match=said) as warned:
        ols.testing.assert_survives_overflow(step, PARAMS, TX.init(PARAMS), ignore=bits)
    assert [warning.filename for warning in warned] == [__file__]


def test_a_step_that_calls_raise_if_stuck_needs_no_warning():
    """At an infinite loss scale it raises an error, which says that it was skipped."""

    def step(params, state):
        loss, params, state = compiled(loss_fn, state, params, X, Y)
        ols.raise_if_stuck(state)
        return params, state, loss

    compiled = jax.jit(TX.minimize, static_argnums=0)
    ols.testing.assert_survives_overflow(step, PARAMS, TX.init(PARAMS))


@pytest.mark.parametrize(
    "check", [ols.testing.assert_survives_overflow, ols.testing.assert_scale_invariant]
)
def test_an_error_of_an_assertion_itself_is_not_taken_for_the_steps(check, monkeypatch):
    """Where only an infinite loss scale causes it, too."""

    def copy_tree(tree, values):
        if any(np.isinf(x).any() for x in values.values()):
            raise RuntimeError("a bug of the assertion")
        return original(tree, values)

    @jax.jit
    def step(params, state):
        loss, params, state = TX.minimize(loss_fn, state, params, X, Y)
        return params, state, loss

    original = _experiment._copy_tree
    monkeypatch.setattr(_experiment, "_copy_tree", copy_tree)
    with pytest.raises(RuntimeError, match="a bug of the assertion"):
        check(step, PARAMS, TX.init(PARAMS))


@jax.jit
def step_without_wrapper(params, inner_state, loss_scale):
    _, grads = ols.value_and_scaled_grad(loss_fn, loss_scale)(params, X, Y)
    grads = loss_scale.unscale(grads)
    updates, new = INNER.update(grads, inner_state, params)
    new_params = optax.apply_updates(params, updates)
    old = params, inner_state
    return optax.tree.where(ols.all_finite(grads), (new_params, new), old)


@pytest.mark.parametrize(
    "check", [ols.testing.assert_survives_overflow, ols.testing.assert_scale_invariant]
)
def test_a_step_that_does_not_tell_whether_it_was_applied_is_not_accused(check):
    """In float32 its gradients may not overflow at the highest finite loss scale."""

    check(step_without_wrapper, PARAMS, INNER.init(PARAMS), LOSS_SCALE)


@pytest.mark.parametrize(
    "check", [ols.testing.assert_survives_overflow, ols.testing.assert_scale_invariant]
)
def test_a_loss_is_not_taken_for_the_new_value_of_a_rate(check):
    @jax.jit
    def step(params, state, rate):
        def scaled_loss(params):
            return rate * loss_fn(params, X, Y)

        loss, params, state = TX.minimize(scaled_loss, state, params)
        return params, state, loss

    check(step, *begun(TX), 0.5)


@pytest.mark.parametrize(
    "check", [ols.testing.assert_survives_overflow, ols.testing.assert_scale_invariant]
)
def test_a_call_whose_last_steps_overflow_may_apply_its_first(check):
    tx = ols.with_loss_scale(optax.adam(1e-2), LOSS_SCALE)
    batches = jnp.stack([X, 2 * X, 4 * X, 100 * X])

    @jax.jit
    def epoch(params, state, batches):
        def one(carry, x):
            loss, params, state = tx.minimize(autocast_loss, carry[1], carry[0], x, Y)
            return (params, state), loss

        carry, losses = jax.lax.scan(one, (params, state), batches)
        return *carry, losses

    _, state, _ = epoch(PARAMS, tx.init(PARAMS), batches)
    assert state.skipped_steps == state.consecutive_skipped_steps == 1
    check(epoch, PARAMS, tx.init(PARAMS), batches)


def test_a_step_that_does_not_return_the_state_is_found():
    tx = ols.with_loss_scale(optax.sgd(0.1))

    @jax.jit
    def step(params, state, x, y):
        loss, params, _ = tx.minimize(autocast_loss, state, params, x, y)
        return params, loss

    with pytest.raises(AssertionError, match="not return the optimizer's new state"):
        ols.testing.assert_survives_overflow(step, PARAMS, tx.init(PARAMS), X, Y)


@pytest.mark.parametrize(
    "check", [ols.testing.assert_survives_overflow, ols.testing.assert_scale_invariant]
)
def test_another_network_whose_state_is_closed_over_goes_on(check):
    """As the page on several losses says of a GAN."""
    tx = ols.with_loss_scale(optax.adam(1e-2), LOSS_SCALE)
    other_state = tx.init(PARAMS)

    @jax.jit
    def step(params, state, other_params, x, y):
        loss, params, state = tx.minimize(autocast_loss, state, params, x, y)

        def other_loss(other_params):
            return autocast_loss(other_params, x @ params["w"] @ params["w"].T, y)

        other_loss, other_params, new_state = tx.minimize(
            other_loss, other_state, other_params
        )
        return params, state, other_params, new_state, loss, other_loss

    others = jax.tree.map(lambda p: p + 1, PARAMS)
    check(step, PARAMS, tx.init(PARAMS), others, X, Y)


@pytest.mark.parametrize("decay", [0.9, 0.995])
def test_an_average_that_is_returned_before_the_parameters(decay):
    params = {**PARAMS, "scale": jnp.ones(1)}

    def scaled_loss(params, x, y):
        return autocast_loss(params, params["scale"] * x, y)

    @jax.jit
    def step(params, ema, state, x, y):
        loss, params, state = TX.minimize(scaled_loss, state, params, x, y)
        new = jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, ema, params)
        return ols.where_applied(state, new, ema), params, state, loss

    zeros = jax.tree.map(jnp.zeros_like, params)
    for ema in (zeros, params):
        ols.testing.assert_survives_overflow(step, params, ema, TX.init(params), X, Y)


def test_gradients_are_not_taken_for_the_new_teacher():
    """Though they have its form, and depend on it."""

    @jax.jit
    def step(params, teacher, state, x, y):
        def distance(params, teacher):
            return loss_fn(params, x, x @ teacher["w"] + teacher["b"])

        loss, grads = ols.value_and_scaled_grad(distance, state)(params, teacher)
        unscaled = state.loss_scale.unscale(grads)
        params, state = TX.apply_gradients(grads, state, params, value=loss)
        return params, state, loss, unscaled

    teacher = jax.tree.map(lambda p: p + 1, PARAMS)
    arguments = PARAMS, teacher, TX.init(PARAMS), X, Y
    ols.testing.assert_survives_overflow(step, *arguments)


def test_a_fixed_loss_scale_without_the_wrapper_is_not_accused():
    def step(params, inner_state, loss_scale):
        return *step_without_wrapper(params, inner_state, loss_scale), loss_scale

    arguments = PARAMS, INNER.init(PARAMS), ols.FixedLossScale(128)
    ols.testing.assert_survives_overflow(step, *arguments)


def test_another_optimizer_that_goes_on_may_be_ignored_with_its_count():
    other = optax.adam(1e-3)

    @jax.jit
    def step(params, state, other_params, other_state):
        loss, params, state = TX.minimize(autocast_loss, state, params, X, Y)
        grads = jax.grad(loss_fn)(other_params, X, Y)
        updates, other_state = other.update(grads, other_state)
        other_params = optax.apply_updates(other_params, updates)
        return params, state, other_params, other_state, loss

    others = jax.tree.map(lambda p: p + 1, PARAMS)
    arguments = step, *begun(TX), others, other.init(others)
    with pytest.raises(AssertionError, match=r"result\[3\]\[0\].count"):
        ols.testing.assert_survives_overflow(*arguments)
    both = ["result[2]", "result[3]"]
    ols.testing.assert_survives_overflow(*arguments, ignore=both)


@pytest.mark.parametrize("mean", [0.0, 0.3, 0.3j, np.float64(0.3), np.full(3, 0.3)])
def test_an_argument_that_jax_rounds_to_32_bits_is_not_taken_for_changed(mean):
    @jax.jit
    def step(params, state, mean, rate):
        loss, params, state = TX.minimize(loss_fn, state, params, X, Y)
        mean = ols.where_applied(state, 0.9 * mean + 0.1 * loss, mean)
        return params, state, mean, rate

    arguments = *begun(TX), mean, 0.1
    ols.testing.assert_survives_overflow(step, *arguments)
    ols.testing.assert_scale_invariant(step, *arguments)


@pytest.mark.parametrize(
    "check", [ols.testing.assert_survives_overflow, ols.testing.assert_scale_invariant]
)
def test_arrays_of_text_and_of_objects_are_passed_on(check):
    def step(params, state, batch):
        assert batch["names"].tolist() == ["a", "b"]
        return compiled(loss_fn, state, params, batch["x"], Y)

    compiled = jax.jit(TX.minimize, static_argnums=0)
    objects = np.array([None, "a"], object)
    batch = {"x": X, "names": np.array(["a", "b"]), "objects": objects}
    check(step, *begun(TX), batch)


@pytest.mark.parametrize(
    "check", [ols.testing.assert_survives_overflow, ols.testing.assert_scale_invariant]
)
def test_a_step_may_have_a_keyword_called_step(check):
    @jax.jit
    def train_step(params, state, step):
        loss, params, state = TX.minimize(loss_fn, state, params, X, Y)
        return params, state, loss * step

    check(train_step, *begun(TX), step=3)


def test_an_empty_array_is_not_taken_for_the_batch():
    def step(params, state, extra, x):
        return compiled(loss_fn, state, params, jnp.concatenate([x, extra]), Y)

    compiled = jax.jit(TX.minimize, static_argnums=0)
    ols.testing.assert_survives_overflow(step, *begun(TX), jnp.zeros((0, 4)), X)


def test_a_step_without_a_loss_scale_may_have_an_empty_parameter():
    tx = ols.with_loss_scale(optax.sgd(0.1), None)

    @jax.jit
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        return *tx.apply_gradients(grads, state, params), loss

    params = {"a": jnp.zeros((0, 3)), **PARAMS}
    ols.testing.assert_survives_overflow(step, params, tx.init(params), X, Y)


@pytest.mark.parametrize("size", [1_000, 100_001])
def test_every_number_of_a_large_array_is_compared(size):
    @jax.jit
    def step(params, histogram, state, tokens):
        loss, params, state = TX.minimize(loss_fn, state, params, X, Y)
        return params, histogram.at[tokens].add(1.0), state, loss

    params, state = begun(TX)
    with pytest.raises(AssertionError, match=r"result\[1\]"):
        ols.testing.assert_survives_overflow(
            step, params, jnp.ones(size), state, jnp.array([1, 3])
        )


def test_half_of_a_large_array_is_not_taken_for_its_new_value():
    @jax.jit
    def step(frozen, params, state):
        loss, params, state = TX.minimize(loss_fn, state, params, X, Y)
        return 0.9 * frozen[::2], params, state, loss

    ols.testing.assert_survives_overflow(step, jnp.ones(2**16), *begun(TX))


def test_a_count_that_goes_on_at_a_nan_is_found():
    tx = ols.with_loss_scale(optax.adam(1e-3), LOSS_SCALE)

    @jax.jit
    def step(params, state, x):
        loss, params, state = tx.minimize(loss_fn, state, params, x, Y)
        adam, *others = state.inner_state
        adam = adam._replace(count=adam.count + jnp.isnan(x).any())
        return params, state._replace(inner_state=(adam, *others)), loss

    with pytest.raises(AssertionError, match=r"With a NaN in .*\n.*count"):
        ols.testing.assert_survives_overflow(step, PARAMS, tx.init(PARAMS), X)


def test_a_skip_is_counted_inside_a_state_of_optax_as_well():
    tx = optax.contrib.split_real_and_imaginary(TX)

    @jax.jit
    def step(params, state, x, y):
        grad = ols.value_and_scaled_grad(autocast_loss, state)
        loss, grads = grad(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    ols.testing.assert_survives_overflow(step, PARAMS, tx.init(PARAMS), X, Y)
