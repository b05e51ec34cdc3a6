"""A bad call to every public function, the kind of the error, and words that help."""

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import pytest

matplotlib.use("agg")

import optax_lossscale as ols

PARAMS = {"w": jnp.ones(3)}
SGD = optax.sgd(0.1)
TX = ols.with_loss_scale(SGD)
STATE = TX.init(PARAMS)
CHAINED = optax.chain(TX).init(PARAMS)
STACK = jax.vmap(TX.init)({"w": jnp.ones((4, 3))})
RESTORED = STATE._replace(loss_scale={"loss_scale": 1.0})
MODEL = PARAMS | {"f": jnp.tanh}
LS = ols.DynamicLossScale()
CONFIG = LS.get_config()
LONG = "x" * 10_000_000


def loss_fn(params):
    return jnp.sum(params["w"] ** 2)


def step(grads=PARAMS, state=STATE, params=PARAMS, value=None, **options):
    tx = ols.with_loss_scale(SGD, **options)
    return tx.apply_gradients(grads, state, params, value=value)


def gradient(fun, **options):
    return ols.value_and_scaled_grad(fun, LS, **options)(PARAMS)


def scaled_by(loss_scale):
    return ols.with_loss_scale(SGD, loss_scale)


def config(class_name="DynamicLossScale", **arguments):
    return scaled_by({"class_name": class_name, "config": arguments})


def sam_around_the_wrapper():
    tx, params = optax.contrib.sam(TX, SGD), PARAMS
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)


WRAPPER = {
    "ols.with_loss_scale(1e-3)": "TypeError: an Optax gradient transformation",
    "ols.with_loss_scale(optax.adam)": "TypeError: init and update",
    "ols.with_loss_scale(SGD, 0)": "ValueError: loss_scale must be a number between",
    "ols.with_loss_scale(SGD, branch='switch')": "ValueError: 'cond', 'select', or None",
    "ols.with_loss_scale(SGD, skip='spikes')": "ValueError: 'nonfinite', or a rule such as",
    "ols.with_loss_scale(TX).init(PARAMS)": "ValueError: a part of inner is wrapped",
    "ols.with_loss_scale(SGD, mask={'w': 1})": "ValueError: tree of bools",
    "step(mask={'v': True})": "ValueError: a prefix of the gradients",
    "step(axis_name='data')": "ValueError: jit alone, leave axis_name out",
    "step(axis_name=3)": "ValueError: axis_name=3 is not an axis",
    "TX.init(loss_fn)": "TypeError: must be a tree of arrays",
    "TX.init({'a': {'b': 'x'}})": "TypeError: at a/b is 'x'",
    "TX.update(STATE, PARAMS)": "TypeError: order of the arguments",
    "step(state=None)": "TypeError: LossScaleState that this",
    "step(state=RESTORED)": "ValueError: Restore a checkpoint into",
    "step(params=None)": "ValueError: needs the parameters",
    "step({'v': 1.0})": "ValueError: must have the structure of",
    "step({'w': 'x'})": "TypeError: the gradients must be a tree",
    "step({'w': jnp.arange(3)})": "ValueError: must have a floating-point dtype",
    "step({'w': jnp.ones(4)})": "ValueError: (3,) at w",
    "step({'w': jnp.ones((2, 3))})": "ValueError: average the gradients of a batch",
    "step(MODEL | {'f': None}, params=MODEL)": "TypeError: pass eqx.filter(model",
    "step(value={'loss': 1.0})": "TypeError: pass the loss alone",
    "step(value=(1.0, {'n': 2}))": "TypeError: of a pair (loss, aux)",
    "step(value='0.5')": "TypeError: a real number, got '0.5'",
    "step(value=jnp.ones(3))": "TypeError: jnp.mean",
    "sam_around_the_wrapper()": "TypeError: Put it inside the wrapper",
    "TX.minimize(loss_fn(PARAMS), STATE, PARAMS)": "TypeError: the function itself",
    "TX.minimize(loss_fn, PARAMS, STATE)": "TypeError: got function, dict and LossScaleState",
    "TX.minimize(loss_fn, CHAINED, PARAMS)": "TypeError: not the optimizer or train state",
    "TX.minimize(lambda p: (1.0, 1), STATE, PARAMS)": "TypeError: has_aux=True",
    "TX.minimize(loss_fn=loss_fn, state=STATE, params=PARAMS)": "TypeError: 'loss_fn'",
    "optax.chain(optax.clip(1.0), TX).minimize": "AttributeError: no attribute 'minimize'",
}
GRADIENT = {
    "ols.value_and_scaled_grad(STATE, loss_fn)": "ValueError: loss scale",
    "ols.value_and_scaled_grad(loss_fn, TX)": "ValueError: its init returned",
    "ols.value_and_scaled_grad(loss_fn, STACK)": "ValueError: the state is a stack of shape",
    "ols.value_and_scaled_grad(3, STATE)": "TypeError: fun must be a function",
    "gradient(loss_fn, argnums='w')": "TypeError: argnums must be",
    "gradient(loss_fn, has_aux=True)": "TypeError: a pair (loss, aux)",
    "gradient(lambda p: p['w'])": "TypeError: jnp.mean",
    "gradient(lambda p: (loss_fn(p), 1))": "TypeError: has_aux=True",
    "gradient(lambda p: {'loss': loss_fn(p)})": "TypeError: in a dict",
    "gradient(lambda p: 1)": "TypeError: grad requires real",
    "ols.value_and_scaled_grad(jnp.dot, LS, (0, -2))(1.0, 1.0)": "ValueError: each argument once",
    "ols.value_and_scaled_grad(loss_fn, LS)({'w': jnp.arange(3)})": "TypeError: got int32",
    "ols.value_and_scaled_grad(loss_fn, LS)({'a': ['x']})": "TypeError: the leaf at a/0 is 'x'",
    "ols.scale_gradient(3, LS)": "TypeError: the loss must be a floating-point number",
    "ols.scale_gradient(jnp.ones(3), LS)": "TypeError: shape (3,)",
    "ols.scale_gradient((1.0, 1), LS)": "TypeError: pass the loss alone",
}
LOSS_SCALES = {
    "jax.jit(scaled_by)(3.0)": "ValueError: a number (fixed)",
    "scaled_by(LONG)": "ValueError: 'dynamic'",
    "scaled_by({})": "ValueError: the keys 'class_name' and 'config'",
    "config(LONG)": "ValueError: Import the module",
    "config(**{LONG: 1})": "ValueError: keys among initial_scale",
    "config(initial_scale=10**10_000)": "ValueError: digits",
    "ols.LossScale.from_config('x')": "ValueError: get_config()",
    "ols.LossScale.from_config({'class_name': 'LossScale', 'config': {}})": "ValueError: known",
    "ols.HeadroomLossScale.from_config(CONFIG)": "ValueError: classes are HeadroomLossScale",
    "ols.skips.SkipRule.from_config(CONFIG)": "ValueError: a skip rule's config must be a dict",
    "ols.skips.SkipRule.from_config({'class_name': 'SpikeSkipRule', 'config': {'n': 1}})": (
        "ValueError: keys among factor, least"
    ),
    "ols.FixedLossScale(2.0**61)": "ValueError: must be a number between",
    "jax.jit(ols.DynamicLossScale)(3.0)": "ValueError: must be a number between",
    "ols.HeadroomLossScale(memory=0)": "ValueError: memory must be an int between 1",
    "ols.skips.threshold(-1)": "ValueError: norm must be a number between",
    "ols.skips.spikes(factor=0)": "ValueError: factor must be a number between",
    "ols.skips.spikes(least=-1)": "ValueError: least must be a number between",
    "ols.skips.spikes(max_skips=1.5)": "ValueError: max_skips must be an int between 0",
    "ols.skips.spikes(window=1)": "ValueError: window must be an int between 16",
    "LS.replace(growth_interval=1)": "TypeError: construct a new one",
    "LS.replace(loss_scale='x')": "ValueError: could not convert string to float",
    "LS.adjust(PARAMS)": "TypeError: where",
    "type('Mine', (ols.FixedLossScale,), {})": "TypeError: subclass LossScale",
}
SEEN = {
    "ols.metrics((STATE, STATE))": "ValueError: a function of one",
    "ols.raise_if_stuck(STATE, 0)": "ValueError: max_consecutive_skips must be an int",
    "jax.jit(ols.raise_if_stuck)(STATE)": "TypeError: call it outside jit",
    "ols.where_applied(1.0, 2.0, STATE)": "ValueError: Pass the optimizer state",
    "ols.testing.assert_scale_invariant(PARAMS, loss_fn)": "TypeError: the first argument",
    "ols.testing.assert_computes_in(loss_fn, PARAMS)": "TypeError: the second argument",
    "ols.diagnose(PARAMS, loss_fn)": "TypeError: loss_fn must be",
    "ols.diagnose(lambda p: p['w'], PARAMS)": "TypeError: reduce",
    "ols.diagnose(loss_fn, PARAMS, has_aux=True)": "TypeError: a pair",
    "ols.diagnose(lambda p: jnp.sum(p), jnp.arange(3))": "TypeError: real",
    "jax.jit(lambda p: ols.diagnose(loss_fn, p).loss)(PARAMS)": "TypeError: call it outside",
    "ols.plot.loss_scale([])": "ValueError: what metrics returned",
    "ols.plot.loss_scale(ols.metrics(STATE))": "ValueError: what metrics returned",
    "ols.plot.loss_scale([ols.metrics(STATE)], np.array([1]))": "TypeError: one matplotlib Axes",
}
CALLS = WRAPPER | GRADIENT | LOSS_SCALES | SEEN


@pytest.mark.parametrize(("call", "expected"), CALLS.items(), ids=CALLS)
def test_a_bad_call_says_what_helps(call, expected):
    kind, said = expected.split(": ", 1)
    with pytest.raises((TypeError, ValueError, AttributeError)) as raised:
        eval(call)
    assert raised.type.__name__ == kind
    message = str(raised.value)
    assert said in message
    assert len(message) < 1000


# Names of axes

MESH = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
P = jax.sharding.PartitionSpec
DOORS = {
    "apply_gradients": lambda grads, name: step(grads, axis_name=name)[0],
    "value": lambda grads, name: step(grads, value=loss_fn(grads), axis_name=name)[0],
    "update": lambda grads, name: LS.update(grads, name)[1],
    "headroom": lambda grads, name: ols.HeadroomLossScale().update(grads, name)[1],
}


@pytest.mark.parametrize("name", ["dta", ("data", "model"), ["data"], 0], ids=str)
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_name_of_no_axis_is_refused_in_words_at_every_door(door, name):
    call = lambda grads: door(grads, name)
    call = jax.shard_map(call, mesh=MESH, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match="pmap or shard_map") as raised:
        call(PARAMS)
    assert f"axis_name={name!r}" in str(raised.value)


def test_a_name_given_twice_is_refused_and_no_names_are_as_none():
    call = lambda name: jax.vmap(lambda g: LS.update(g, name)[1], axis_name="data")
    with pytest.raises(ValueError, match="without repetition"):
        call(("data", "data"))(jnp.ones(2))
    grads = jnp.array([1.0, jnp.inf])
    np.testing.assert_array_equal(call(())(grads), [True, False])
    for name in ("data", ("data",)):
        np.testing.assert_array_equal(call(name)(grads), [False, False])
