"""`assert_survives_overflow` finds what an overflow leaves behind, and accuses no right step.

Each table holds a wrong and a right step of a kind, and what the error says of the wrong one.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import one_in

import optax_lossscale as ols

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the framework's, not ours
    from flax import nnx

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {"w": jax.random.normal(KEYS[0], (4, 3)), "b": jnp.zeros(3)}
X, Y = jax.random.normal(KEYS[1], (8, 4)), jax.random.normal(KEYS[2], (8, 3))
INNER = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))
LOSS_SCALE = ols.DynamicLossScale(2.0**8)
TX = ols.with_loss_scale(INNER, LOSS_SCALE)
KEPT = "where_applied"
CHANGED = "an overflow changed it"
APPLIED = "the step is applied despite an overflow"
AT_NAN = "the step is applied despite a NaN in argument"
NOT_ADAPTED = "the step does not adapt its loss scale"
NAN = "a NaN in argument 3 changed it"


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


autocast_loss = ols.autocast(loss_fn)


def begun(tx, params=PARAMS):
    """Parameters and a state with moments, after a step."""
    _, params, state = tx.minimize(autocast_loss, tx.init(params), params, X, Y)
    return params, state


def average(old, new):
    return jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, new)


def kept_if(right, state, new, old):
    return ols.where_applied(state, new, old) if right else new


STEPS = {}


def step_of(found, *said, **options):
    """Registers a maker of a step and its arguments, and what is found if it is not right."""

    def register(make):
        STEPS[make.__name__] = make, found, said, options
        return make

    return register


@step_of(CHANGED, "result[1]['w']", KEPT)
def average_of_parameters(right):
    def step(params, ema, state, x, y):
        loss, params, state = TX.minimize(autocast_loss, state, params, x, y)
        return params, kept_if(right, state, average(ema, params), ema), state, loss

    params, state = begun(TX)
    return jax.jit(step, donate_argnums=(0, 1, 2)), (params, PARAMS, state, X, Y)


@step_of(CHANGED, "result[3]", KEPT, carry={0: 1, 1: 2, 3: 3})
def running_mean_of_the_loss(right):
    def step(params, state, x, mean, y):
        loss, params, state = TX.minimize(loss_fn, state, params, x, y)
        return loss, params, state, kept_if(right, state, 0.9 * mean + 0.1 * loss, mean)

    params, state = begun(TX)
    return jax.jit(step), (params, state, X, jnp.float32(0), Y)


@step_of(CHANGED, "args[1]", KEPT, carry={0: 0, 2: 1})
def statistics_in_an_array_of_numpy(right):
    fast = jax.jit(functools.partial(TX.minimize, loss_fn))

    def step(params, mean, state, x, y):
        new = 0.9 * mean + 0.1 * np.mean(x, axis=0)
        loss, params, state = fast(state, params, x - mean, y)
        mean[:] = kept_if(right, state, new, mean)
        return params, state, loss

    params, state = begun(TX)
    return step, (params, np.zeros(4, np.float32), state, X, Y)


@step_of(APPLIED, "nan_to_num")
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
        grads = state.loss_scale.unscale(grads)
        loss_scale, finite = state.loss_scale.update(grads)
        zeroed = jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)
        updates, inner = INNER.update(zeroed, state.inner_state, params)
        old = params, state.inner_state
        new = optax.apply_updates(params, updates), inner
        params, inner = optax.tree.where(finite | (not right), new, old)
        skipped = state.skipped_steps + 1 - finite
        state = state._replace(
            loss_scale=loss_scale,
            inner_state=inner,
            should_apply=finite,
            skipped_steps=skipped,
        )
        return params, state, loss

    return jax.jit(step), (*begun(TX), X, Y)


@step_of(APPLIED, "the new state as it is")
def old_state(right):
    def step(params, state, x, y):
        loss, params, new = TX.minimize(autocast_loss, state, params, x, y)
        return params, new if right else state, loss

    return jax.jit(step), (*begun(TX), X, Y)


@step_of(CHANGED, "result[1][1].trace['w']", KEPT)
def momentum_after_the_wrapper(right):
    outside = optax.trace(0.9)
    tx = ols.with_loss_scale(optax.chain(INNER, outside), LOSS_SCALE)
    tx = tx if right else optax.chain(TX, outside)

    @jax.jit
    def step(params, state, x, y):
        loss, grads = ols.value_and_scaled_grad(autocast_loss, state)(params, x, y)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    params, state, _ = step(PARAMS, tx.init(PARAMS), X, Y)  # it has a moment
    return step, (params, state, X, Y)


@step_of(NOT_ADAPTED, "comes back as it was given, or as it always is")
def a_loss_scale_made_anew(right):
    def step(params, state, x, y):
        loss, params, state = TX.minimize(autocast_loss, state, params, x, y)
        loss_scale = state.loss_scale if right else LOSS_SCALE
        return params, state._replace(loss_scale=loss_scale), loss

    return jax.jit(step), (PARAMS, TX.init(PARAMS), X, Y)


@step_of(AT_NAN, "skip=None", nan_in=0)
def tokens_without_a_loss_scale(right):
    tx = ols.with_loss_scale(INNER, None, skip="nonfinite" if right else None)
    params = {"table": jnp.ones((4, 2), jnp.bfloat16)}

    def step(params, state, tokens):
        def loss_fn(params):
            return jnp.mean(params["table"][tokens].astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return *tx.apply_gradients(grads, state, params, value=loss), loss

    return jax.jit(step), (params, tx.init(params), jnp.array([0, 2]))


@step_of(NAN, "result[1]", KEPT, nan_in=3)
def statistics_that_are_kept_at_an_overflow_alone(right):
    def step(params, mean, state, x, y):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x, y)
        finite = jnp.isfinite(optax.tree.norm(grads)) | jnp.isnan(loss)
        new = jnp.where(finite, average(mean, x.mean(0)), mean)
        params, state = TX.apply_gradients(grads, state, params, value=loss)
        return params, kept_if(right, state, new, mean), state, loss

    params, state = begun(TX)
    return jax.jit(step), (params, jnp.zeros(4), state, X, Y)


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


@one_in(2, "name", [*STEPS])
def test_what_an_overflow_or_a_nan_leaves_is_found(name):
    make, found, said, options = STEPS[name]
    step, arguments = make(right=False)
    with pytest.raises(AssertionError) as error:
        ols.testing.assert_survives_overflow(step, *arguments, **options)
    assert all(text in str(error.value) for text in (found, *said)), str(error.value)


@one_in(3, "name", [*STEPS], first=1)
def test_a_right_step_is_not_accused(name):
    make, _, _, options = STEPS[name]
    step, arguments = make(right=True)
    for _ in range(2):  # the arguments are as they were
        ols.testing.assert_survives_overflow(step, *arguments, **options)


def replicated_step(axis_name="data", mean=True, mapped="pmap", name="data"):
    """A step and its arguments, under `pmap`, or `shard_map` without `check_vma`."""
    tx = ols.with_loss_scale(INNER, LOSS_SCALE, axis_name=axis_name)

    def step(params, state, x, y):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x, y)
        if mean:
            grads = jax.lax.pmean(grads, name)
        return *tx.apply_gradients(grads, state, params, value=loss), loss[None]

    given = PARAMS, tx.init(PARAMS)
    if mapped == "pmap":
        given = jax.tree.map(lambda x: jnp.stack([x, x]), given)
        batch = X.reshape(2, 4, 4), Y.reshape(2, 4, 3)
        return jax.pmap(step, axis_name=name), *given, *batch
    mesh = jax.make_mesh((2,), (name,), axis_types=(AxisType.Auto,))
    specs = (P(), P(), P(name), P(name)), (P(), P(), P(name))
    step = jax.shard_map(
        step, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
    )
    return jax.jit(step), *given, X, Y


BOTH = [ols.testing.assert_survives_overflow, ols.testing.assert_scale_invariant]
each_assertion = pytest.mark.parametrize("check", BOTH)
each_map = pytest.mark.parametrize("mapped", ["pmap", "shard_map"])


@each_assertion
@each_map
def test_devices_that_apply_their_own_gradients_drift_apart(check, mapped):
    check(*replicated_step(mapped=mapped))
    alone = replicated_step(mean=False, mapped=mapped, name="batch", axis_name="batch")
    with pytest.raises(AssertionError) as error:
        check(*alone)
    said = str(error.value)
    assert said.startswith("devices drift apart along the axis 'batch'")
    assert "result[0]['w']" in said
    assert "grads = jax.lax.pmean(grads, 'batch')" in said
    assert "loss = jax.lax.pmean(loss, 'batch')" in said
    check(*alone, ignore=["result[0]", "result[1]"])


@each_assertion
def test_devices_whose_losses_differ_let_a_rule_drift_apart(check):
    tx = ols.with_loss_scale(INNER, LOSS_SCALE, skip=ols.skips.spikes())

    def step(params, state, x, y):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x, y)
        grads = jax.lax.pmean(grads, "batch")
        return tx.apply_gradients(grads, state, params, value=loss)

    step = jax.pmap(step, axis_name="batch")
    given = jax.tree.map(lambda x: jnp.stack([x, x]), (PARAMS, tx.init(PARAMS)))
    with pytest.raises(AssertionError, match="along the axis 'batch'") as error:
        check(step, *given, X.reshape(2, 4, 4), Y.reshape(2, 4, 3))
    assert "result[1].skip_rule" in str(error.value)


@each_map
def test_devices_that_decide_alone_drift_apart_at_a_nan(mapped):
    check = ols.testing.assert_survives_overflow
    check(*replicated_step(mapped=mapped), nan_in=2)
    with pytest.raises(AssertionError, match="drift apart along the axis 'data'"):
        check(*replicated_step(None, mean=False, mapped=mapped), nan_in=2)


def test_one_device_shows_no_drift():
    step, *arguments = replicated_step()
    arguments = jax.tree.map(lambda x: x[:1], arguments)
    with pytest.raises(ValueError, match=r"cannot be checked(.|\n)*num_cpu_devices"):
        ols.testing.assert_survives_overflow(step, *arguments)


@jax.jit
def step(params, state, x, y):
    loss, params, state = TX.minimize(autocast_loss, state, params, x, y)
    return params, state, loss


@each_assertion
def test_wrong_calls_get_their_own_words(check):
    state = TX.init(PARAMS)
    with pytest.raises(TypeError, match="the first argument is the training step"):
        check(PARAMS, state, step)
    with pytest.raises(TypeError, match=r"or by jax\.debug\.callback|outside jit"):
        jax.jit(lambda state: check(step, PARAMS, state, X, Y))(state)
    given = step, PARAMS, state, X, Y
    for carry, said in (
        ({0: 7}, r"carry=\{0: 7\} must lead"),
        ({0: -1}, r"carry=\{0: -1\} must lead"),
        ({0: 2}, r"says that result\[2\] stands for args\[0\], which has another"),
        ((0, 1), r"carry must be a dict \{argument: result\}"),
        ({"params": 0}, r"carry must be a dict \{argument: result\}"),
    ):
        with pytest.raises(ValueError, match=said):
            check(*given, carry=carry)
    with pytest.raises(ValueError, match=r"ignore='result\[9\]' names nothing"):
        check(*given, ignore="result[9]")
    for ignore in (2, "", [0]):
        with pytest.raises(ValueError, match="ignore must be a name of a result"):
            check(*given, ignore=ignore)
    with pytest.raises(TypeError, match="runs the step: pass arrays"):
        check(*given[:3], jax.ShapeDtypeStruct((8, 4), jnp.float32), Y)
    none = ols.with_loss_scale(INNER, None)
    with pytest.raises(ValueError, match=r"bfloat16|nan_in=2"):
        check(step, PARAMS, none.init(PARAMS), X, Y)


def test_results_in_other_places_are_to_be_said():
    @jax.jit
    def in_order_of_minimize(params, state, x, y):
        return TX.minimize(autocast_loss, state, params, x, y)

    check = functools.partial(
        ols.testing.assert_survives_overflow, in_order_of_minimize, *begun(TX), X, Y
    )
    with pytest.raises(ValueError, match=r"not handed on(.|\n)*carry=\{0: 1, 1: 2\}"):
        check()
    check(carry={0: 1, 1: 2})

    def in_a_dict(*given):
        loss, params, state = in_order_of_minimize(*given)
        return {"loss": loss, "params": params, "state": state}

    with pytest.raises(ValueError, match="is to return a tuple"):
        ols.testing.assert_survives_overflow(in_a_dict, *begun(TX), X, Y)
    with pytest.raises(ValueError, match="nan_in=5 names no argument"):
        check(carry={0: 1, 1: 2}, nan_in=5)


@each_assertion
def test_a_residual_in_the_place_of_no_argument_is_not_accused(check):
    @jax.jit
    def with_residual(params, state, x, temperature):
        loss_of = lambda params: temperature * loss_fn(params, x, Y)
        loss, params, state = TX.minimize(loss_of, state, params)
        return params, state, {"loss": loss, "residual": x @ params["w"] - Y}

    check(with_residual, PARAMS, TX.init(PARAMS), X, jnp.float32(0.5))


@each_assertion
def test_donation_static_arguments_and_guards_of_transfers(check):
    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
    def compiled(_, params, state):
        loss, params, state = TX.minimize(autocast_loss, state, params, X, Y)
        return params, state, loss

    params, state = begun(TX)
    before = jax.tree.map(np.asarray, (params, state))
    with jax.transfer_guard("disallow"), jax.debug_nans(True):
        check(compiled, "static", params, state, carry={1: 0, 2: 1})
    after = jax.tree.map(np.asarray, (params, state))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


@each_assertion
def test_a_state_that_has_skipped_may_come_back_twice(check):
    @jax.jit
    def logging(params, state, x, y):
        loss, params, state = TX.minimize(autocast_loss, state, params, x, y)
        return params, state, {"loss": loss, "state": state}

    state = TX.init(PARAMS)._replace(skipped_steps=jnp.int32(3))
    check(logging, PARAMS, state, X, Y)


@each_assertion
def test_a_step_that_does_not_return_its_state_is_found(check):
    @jax.jit
    def forgetful(params, state, x, y):
        loss, params, _ = TX.minimize(autocast_loss, state, params, x, y)
        return params, loss

    with pytest.raises(AssertionError, match="does not return its new state"):
        check(forgetful, PARAMS, TX.init(PARAMS), X, Y)


def test_an_error_at_an_infinite_loss_scale_says_where_it_was_raised():
    def logging(params, state, x, y):
        return *step(params, state, x, y), int(jnp.log2(state.loss_scale()))

    with pytest.raises(OverflowError) as error:
        ols.testing.assert_survives_overflow(logging, PARAMS, TX.init(PARAMS), X, Y)
    assert error.value.__notes__[-1].endswith("set the loss scale to inf.")
