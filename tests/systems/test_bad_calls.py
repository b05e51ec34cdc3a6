"""A bad call to every public function, the kind of the error, and the words that help."""

import functools

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import pytest
from pairs import quick

matplotlib.use("agg")
import matplotlib.pyplot as plt

import optax_lossscale as ols
from optax_lossscale import plot

PARAMS = {"w": jnp.ones(3)}
SGD = optax.sgd(0.1)
TX = ols.with_loss_scale(SGD)
STATE = TX.init(PARAMS)
LS = ols.DynamicLossScale()
LONG = "x" * 10_000_000
DEEP = functools.reduce(lambda inner, _: {"a": inner}, range(100_000), 1)
NAN = float("nan")


def loss_fn(params):
    return jnp.sum(params["w"] ** 2)


def step(
    mask=None, axis_name=None, grads=PARAMS, state=STATE, params=PARAMS, value=None
):
    tx = ols.with_loss_scale(SGD, mask=mask, axis_name=axis_name)
    return tx.apply_gradients(grads, state, params, value=value)


def differentiate(fun, *args, **kwargs):
    return ols.value_and_scaled_grad(fun, LS, **kwargs)(*args or (PARAMS,))


def taken(loss_scale):
    return ols.with_loss_scale(SGD, loss_scale)


def config(class_name="DynamicLossScale", **arguments):
    return taken({"class_name": class_name, "config": arguments})


def sam_around_the_wrapper():
    tx, params = optax.contrib.sam(TX, optax.sgd(0.1)), PARAMS
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)


def step_by(inner, state):
    return ols.with_loss_scale(inner).apply_gradients(PARAMS, state, PARAMS)


NUMBER, INT = "must be a number between", "must be an int between"
WRAPPER = {
    "no transformation": (
        lambda: ols.with_loss_scale(1e-3),
        TypeError,
        "Optax gradient trans",
    ),
    "an alias not called": (
        lambda: ols.with_loss_scale(optax.adam),
        TypeError,
        "init and update",
    ),
    "an alias not called, of master weights": (
        lambda: ols.with_master_weights(optax.adam),
        TypeError,
        "init and update",
    ),
    "swapped": (
        lambda: ols.with_loss_scale("dynamic", SGD),
        TypeError,
        "inner must be",
    ),
    "an unknown loss scale": (
        lambda: ols.with_loss_scale(SGD, "auto"),
        ValueError,
        "'dynamic'",
    ),
    "a class": (
        lambda: ols.with_loss_scale(SGD, ols.DynamicLossScale),
        ValueError,
        "a LossScale",
    ),
    "a scale of 0": (lambda: ols.with_loss_scale(SGD, 0), ValueError, NUMBER),
    "mask: a str": (
        lambda: ols.with_loss_scale(SGD, mask="x"),
        ValueError,
        "tree of bools",
    ),
    "mask: ints": (
        lambda: ols.with_loss_scale(SGD, mask={"w": 1}),
        ValueError,
        "tree of bools",
    ),
    "mask: a function to a str": (
        lambda: step(lambda grads: "x"),
        ValueError,
        "tree of bools",
    ),
    "mask: other keys": (
        lambda: step({"v": True}),
        ValueError,
        "a prefix of the gradients",
    ),
    "mask: too deep": (
        lambda: step({"w": [True]}),
        ValueError,
        "a prefix of the gradients",
    ),
    "axis: unknown": (
        lambda: step(axis_name="data"),
        ValueError,
        "jit alone, leave axis_name out",
    ),
    "axis: an int": (
        lambda: step(axis_name=3),
        ValueError,
        "axis_name=3 is not an axis",
    ),
    "axis: a list": (
        lambda: step(axis_name=["a"]),
        ValueError,
        "is not an axis of a pmap",
    ),
    "init: a function": (
        lambda: TX.init(loss_fn),
        TypeError,
        "must be a tree of arrays",
    ),
    "init: a dtype": (
        lambda: TX.init({"w": jnp.ones(3), "dtype": jnp.float32}),
        TypeError,
        "at dtype",
    ),
    "init: a str": (lambda: TX.init({"a": {"b": "x"}}), TypeError, "at a/b is 'x'"),
    "update: swapped": (
        lambda: TX.update(STATE, PARAMS),
        TypeError,
        "order of the arguments",
    ),
    "apply: swapped": (
        lambda: step(state=PARAMS, params=STATE),
        TypeError,
        "order of the arg",
    ),
    "apply: no state": (
        lambda: step(state=None),
        TypeError,
        "LossScaleState that this",
    ),
    "apply: inner state": (
        lambda: step(state=STATE.inner_state),
        TypeError,
        "LossScaleState",
    ),
    "apply: no params": (lambda: step(params=None), ValueError, "needs the parameters"),
    "grads: other keys": (
        lambda: step(grads={"v": 1.0}),
        ValueError,
        "structure of the param",
    ),
    "grads: with the loss": (
        lambda: step(grads=(1.0, PARAMS)),
        ValueError,
        "structure of the",
    ),
    "grads: a str": (
        lambda: step(grads={"w": "x"}),
        TypeError,
        "the gradients must be a tree",
    ),
    "grads: ints": (
        lambda: step(grads={"w": jnp.ones(3, jnp.int32)}),
        ValueError,
        "must have a floating-point dtype",
    ),
    "grads: other shape": (
        lambda: step(grads={"w": jnp.ones(4)}),
        ValueError,
        "(3,) at w",
    ),
    "grads: broadcast": (
        lambda: step(grads={"w": jnp.ones((3, 1))}),
        ValueError,
        "got (3, 1)",
    ),
    "grads: a batch": (
        lambda: step(grads={"w": jnp.ones((2, 3))}),
        ValueError,
        "average the gradients of a batch",
    ),
    "state: of a bad restore": (
        lambda: step(state=STATE._replace(loss_scale={"loss_scale": 1.0})),
        ValueError,
        "Restore a checkpoint into",
    ),
    "state: a stack": (
        lambda: step(state=jax.vmap(TX.init)({"w": jnp.ones((4, 3))})),
        ValueError,
        "the state is a stack of shape (4,), as made by vmap(tx.init)",
    ),
    "value: a dict": (
        lambda: step(value={"loss": 1.0}),
        TypeError,
        "pass the loss alone",
    ),
    "value: a str": (lambda: step(value="0.5"), TypeError, "a real number, got '0.5'"),
    "value: with aux": (
        lambda: step(value=(1.0, {"n": 2})),
        TypeError,
        "of a pair (loss, aux)",
    ),
    "value: with an array": (
        lambda: step(value=(jnp.ones(()), jnp.ones(3))),
        TypeError,
        "of a pair (loss, aux)",
    ),
    "value: a complex": (lambda: step(value=1j), TypeError, "a real number"),
    "value: a bool": (lambda: step(value=jnp.array(True)), TypeError, "a real number"),
    "value: a key": (lambda: step(value=jax.random.key(0)), TypeError, "a real number"),
    "value: a function": (lambda: step(value=len), TypeError, "a real number"),
    "value: a vector": (lambda: step(value=jnp.ones(3)), TypeError, "jnp.mean"),
    "sam around": (sam_around_the_wrapper, TypeError, "Put it inside the wrapper"),
    "apply_gradients: an Equinox model": (
        lambda: TX.apply_gradients(
            {"w": PARAMS["w"], "f": None}, STATE, PARAMS | {"f": jnp.tanh}
        ),
        TypeError,
        "pass eqx.filter(model, eqx.is_inexact_array)",
    ),
    "minimize: no function": (
        lambda: TX.minimize(3, STATE, PARAMS),
        TypeError,
        "got int, LossScaleState and",
    ),
    "minimize: a pair": (
        lambda: TX.minimize(lambda p: (loss_fn(p), 1), STATE, PARAMS),
        TypeError,
        "has_aux=True",
    ),
    "minimize: no scalar": (
        lambda: TX.minimize(lambda p: p["w"], STATE, PARAMS),
        TypeError,
        "reduce it",
    ),
}
GRADIENT = {
    "swapped": (
        lambda: ols.value_and_scaled_grad(STATE, loss_fn),
        ValueError,
        "loss scale",
    ),
    "parameters": (
        lambda: ols.value_and_scaled_grad(loss_fn, PARAMS),
        ValueError,
        "one loss scale",
    ),
    "the transformation": (
        lambda: ols.value_and_scaled_grad(loss_fn, TX),
        ValueError,
        "its init ret",
    ),
    "two states": (
        lambda: ols.value_and_scaled_grad(loss_fn, (STATE, STATE)),
        ValueError,
        "found 2",
    ),
    "a stack of states": (
        lambda: ols.value_and_scaled_grad(
            loss_fn, jax.vmap(TX.init)({"w": jnp.ones((4, 3))})
        ),
        ValueError,
        "the state is a stack of shape (4,), as made by vmap(tx.init)",
    ),
    "no function": (
        lambda: ols.value_and_scaled_grad(3, STATE),
        TypeError,
        "fun must be a function",
    ),
    "None for a function": (
        lambda: ols.value_and_scaled_grad(None, STATE),
        TypeError,
        "fun must be a function",
    ),
    "argnums: none": (
        lambda: differentiate(loss_fn, argnums=()),
        TypeError,
        "argnums must be",
    ),
    "argnums: a str": (
        lambda: differentiate(loss_fn, argnums="w"),
        TypeError,
        "argnums must be",
    ),
    "argnums: a bool": (
        lambda: differentiate(loss_fn, argnums=True),
        TypeError,
        "an int or",
    ),
    "argnums: a float": (
        lambda: differentiate(loss_fn, argnums=0.0),
        TypeError,
        "an int or",
    ),
    "scale_gradient: a pair": (
        lambda: ols.scale_gradient((jnp.ones(()), 1), LS),
        TypeError,
        "pass the loss alone",
    ),
    "a vector": (lambda: differentiate(lambda p: p["w"]), TypeError, "jnp.mean"),
    "a pair": (
        lambda: differentiate(lambda p: (loss_fn(p), 1)),
        TypeError,
        "has_aux=True",
    ),
    "no pair": (
        lambda: differentiate(loss_fn, has_aux=True),
        TypeError,
        "a pair (loss, aux)",
    ),
    "an int": (lambda: differentiate(lambda p: 1), TypeError, "grad requires real"),
    "a bool": (
        lambda: differentiate(lambda p: p["w"][0] > 0),
        TypeError,
        "a real number",
    ),
    "a complex": (
        lambda: differentiate(lambda p: 1j * loss_fn(p)),
        TypeError,
        "a real number",
    ),
    "None": (lambda: differentiate(lambda p: None), TypeError, "a real number"),
    "a dict": (
        lambda: differentiate(lambda p: {"loss": loss_fn(p)}),
        TypeError,
        "in a dict",
    ),
    "get_loss_scale: none": (lambda: ols.get_loss_scale(PARAMS), ValueError, "found 0"),
}
GET = {
    "a str": (lambda: taken("Dynamic"), ValueError, "'dynamic'"),
    "a list": (lambda: taken([128]), ValueError, "a number (fixed)"),
    "a bool": (lambda: taken(True), ValueError, "a number (fixed)"),
    "an array": (lambda: taken(jnp.ones(1000)), ValueError, "a number (fixed)"),
    "a traced number": (lambda: jax.jit(taken)(3.0), ValueError, "a number (fixed)"),
    "a negative number": (lambda: taken(-1), ValueError, NUMBER),
    "NaN": (lambda: taken(NAN), ValueError, NUMBER),
    "an empty dict": (
        lambda: taken({}),
        ValueError,
        "the keys 'class_name' and 'config'",
    ),
    "10 MB": (lambda: taken(LONG), ValueError, "'dynamic'"),
    "deep": (lambda: taken(DEEP), ValueError, "the keys 'class_name' and 'config'"),
    "wide": (
        lambda: taken(dict.fromkeys(range(10**5))),
        ValueError,
        "the keys 'class_name'",
    ),
    "a class of 10 MB": (lambda: config(LONG), ValueError, "Import the module"),
    "a key of 10 MB": (
        lambda: config(**{LONG: 1}),
        ValueError,
        "keys among initial_scale",
    ),
    "a value of 10 MB": (lambda: config(initial_scale=LONG), ValueError, NUMBER),
    "a deep value": (lambda: config(growth_interval=DEEP), ValueError, INT),
    "a huge int": (lambda: config(initial_scale=10**10_000), ValueError, "digits"),
    "an int key": (
        lambda: taken({"class_name": "DynamicLossScale", "config": {1: 2}}),
        ValueError,
        "keys among initial_scale",
    ),
    "no config": (lambda: config("FixedLossScale"), ValueError, "keys among scale"),
    "an unknown class": (lambda: config("Nonesuch"), ValueError, "Import the module"),
    "no class": (lambda: config(None), ValueError, "Import the module"),
    "from_config: a str": (
        lambda: ols.LossScale.from_config("x"),
        ValueError,
        "get_config()",
    ),
    "from_config: of another": (
        lambda: ols.HeadroomLossScale.from_config(LS.get_config()),
        ValueError,
        "The known classes are HeadroomLossScale",
    ),
}
LOSS_SCALES = {
    "fixed: None": (lambda: ols.FixedLossScale(None), ValueError, NUMBER),
    "fixed: large": (lambda: ols.FixedLossScale(2.0**127), ValueError, NUMBER),
    "fixed: traced": (lambda: jax.jit(ols.FixedLossScale)(3.0), ValueError, NUMBER),
    "dynamic: an array": (lambda: ols.DynamicLossScale(np.ones(2)), ValueError, NUMBER),
    "dynamic: bounds": (
        lambda: ols.DynamicLossScale(0.5),
        ValueError,
        "initial_scale must be a number between 1.0 and 2**60",
    ),
    "dynamic: interval": (
        lambda: ols.DynamicLossScale(growth_interval=2.5),
        ValueError,
        INT,
    ),
    "replace: configuration": (
        lambda: LS.replace(growth_interval=1),
        TypeError,
        "construct a new one",
    ),
    "replace: a str": (
        lambda: LS.replace(loss_scale="x"),
        ValueError,
        "could not convert string to float",
    ),
    "replace: None": (
        lambda: LS.replace(loss_scale=None),
        ValueError,
        "None is not a valid value",
    ),
    "adjust: gradients": (
        lambda: LS.adjust(PARAMS),
        TypeError,
        "where",
    ),
    "adjust: a str": (
        lambda: LS.adjust("yes"),
        TypeError,
        "where",
    ),
    "adjust: None": (lambda: LS.adjust(None), TypeError, "where requires"),
    "update: an axis": (
        lambda: LS.update(PARAMS, "data"),
        ValueError,
        "is not an axis",
    ),
    "subclassed: fixed": (
        lambda: type("Mine", (ols.FixedLossScale,), {}),
        TypeError,
        "subclass LossScale",
    ),
}
DIAGNOSIS = {
    "metrics: none": (
        lambda: ols.metrics(PARAMS),
        ValueError,
        "exactly one loss scale",
    ),
    "metrics: two": (lambda: ols.metrics((STATE, STATE)), ValueError, "found 2"),
    "check: none": (
        lambda: ols.raise_if_stuck(PARAMS),
        ValueError,
        "exactly one loss scale",
    ),
    "check: skips": (lambda: ols.raise_if_stuck(STATE, 0), ValueError, INT),
    "check: traced": (
        lambda: jax.jit(ols.raise_if_stuck)(STATE),
        TypeError,
        "call it outside jit",
    ),
    "where_applied: swapped": (
        lambda: ols.where_applied(1.0, 2.0, STATE),
        ValueError,
        "Pass the optimizer state",
    ),
    "several states": (
        lambda: ols.metrics((STATE, STATE)),
        ValueError,
        "a function of one",
    ),
}
DIAGNOSE = {
    "assert_scale_invariant: swapped": (
        lambda: ols.testing.assert_scale_invariant(PARAMS, loss_fn),
        TypeError,
        "the first argument is the training step",
    ),
    "assert_computes_in: no dtype": (
        lambda: ols.testing.assert_computes_in(loss_fn, PARAMS),
        TypeError,
        "the second argument is the dtype",
    ),
    "swapped": (lambda: ols.diagnose(PARAMS, loss_fn), TypeError, "loss_fn must be"),
    "no scalar": (lambda: ols.diagnose(lambda p: p["w"], PARAMS), TypeError, "reduce"),
    "a pair": (
        lambda: ols.diagnose(lambda p: (loss_fn(p), 1), PARAMS),
        TypeError,
        "has_aux",
    ),
    "no pair": (
        lambda: ols.diagnose(loss_fn, PARAMS, has_aux=True),
        TypeError,
        "a pair",
    ),
    "integers": (
        lambda: ols.diagnose(lambda p: jnp.sum(p), jnp.arange(3)),
        TypeError,
        "real",
    ),
    "traced": (
        lambda: jax.jit(lambda p: ols.diagnose(loss_fn, p).loss)(PARAMS),
        TypeError,
        "call it outside jit",
    ),
}
HISTORY = "what metrics returned after each step"
PLOT = {
    "loss_scale: nothing": (lambda: plot.loss_scale([]), ValueError, HISTORY),
    "loss_scale: None": (lambda: plot.loss_scale(None), ValueError, HISTORY),
    "loss_scale: scales": (lambda: plot.loss_scale([1.0, 2.0]), ValueError, HISTORY),
    "loss_scale: a state": (lambda: plot.loss_scale(STATE), ValueError, HISTORY),
    "loss_scale: one step": (
        lambda: plot.loss_scale(ols.metrics(STATE)),
        ValueError,
        HISTORY,
    ),
    "loss_scale: of a scale": (
        lambda: plot.loss_scale([ols.metrics(LS)]),
        ValueError,
        HISTORY,
    ),
    "loss_scale: axes": (
        lambda: plot.loss_scale([ols.metrics(STATE)], np.array([1, 2])),
        TypeError,
        "one matplotlib Axes",
    ),
}
CALLS = {
    f"{where}, {what}": call
    for where, calls in {
        "with_loss_scale": WRAPPER,
        "value_and_scaled_grad": GRADIENT,
        "get": GET,
        "loss scale": LOSS_SCALES,
        "diagnosis": DIAGNOSIS,
        "diagnose": DIAGNOSE,
        "plot": PLOT,
    }.items()
    for what, call in calls.items()
}


@pytest.mark.parametrize(("call", "kind", "said"), CALLS.values(), ids=CALLS)
def test_a_bad_call_says_what_helps(call, kind, said):
    with pytest.raises(kind) as raised:
        call()
    plt.close("all")
    assert raised.type is kind
    message = str(raised.value)
    assert said in message
    assert len(message) < 1000


def test_there_are_a_hundred_bad_calls():
    assert len(CALLS) >= 100


def is_refused(
    axis_name, door="apply_gradients", check_vma=True, compiled=False, around=True
):
    """Whether a step under `shard_map` over the axis `data` says what is wrong with a name."""
    tx = ols.with_loss_scale(SGD, axis_name=axis_name)
    calls = {
        "apply_gradients": lambda grads: tx.apply_gradients(grads, STATE, PARAMS)[0],
        "update": lambda grads: tx.update(grads, STATE, PARAMS)[0],
        "value": lambda grads: tx.update(grads, STATE, PARAMS, value=loss_fn(grads))[0],
        "LossScale.update": lambda grads: LS.update(grads, axis_name)[1],
        "HeadroomLossScale.update": lambda grads: ols.HeadroomLossScale().update(
            grads, axis_name
        )[1],
    }
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    P, call = jax.sharding.PartitionSpec, calls[door]
    if around:
        call = jax.shard_map(
            call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check_vma
        )
    try:
        (jax.jit(call) if compiled else call)(PARAMS)
    except ValueError as error:
        return f"axis_name={axis_name!r}" in str(error) and "pmap or shard_map" in str(
            error
        )
    return False


NAMES = {
    "another": "dta",
    "one of two": ("data", "model"),
    "None of two": ("data", None),
    "None alone": (None,),
    "a list": ["data"],
    "a list of another": ["dta"],
    "a set": {"data"},
    "a frozenset": frozenset({"data"}),
    "an int": 0,
    "a bool": False,
    "an empty str": "",
    "nested": (("data",),),
    "bytes": b"data",
    "a PartitionSpec": jax.sharding.PartitionSpec("data"),
}


@quick("name", NAMES, "another")
def test_a_name_of_no_axis_is_refused_in_words(name):
    for check_vma in (True, False):
        assert is_refused(name, check_vma=check_vma)
    assert is_refused(name, around=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "door", ["update", "value", "LossScale.update", "HeadroomLossScale.update"]
)
def test_a_name_of_no_axis_is_refused_at_every_door(door):
    for compiled in (True, False):
        assert is_refused("dta", door, compiled=compiled)
        assert is_refused(["data"], door, compiled=compiled)


def test_a_name_given_twice_is_refused_and_no_names_are_as_none():
    call = lambda name: jax.vmap(lambda g: LS.update(g, name)[1], axis_name="data")
    with pytest.raises(ValueError, match="without repetition"):
        call(("data", "data"))(jnp.ones(2))
    grads = jnp.array([1.0, jnp.inf])
    for name, decided in {
        (): [True, False],
        "data": [False] * 2,
        ("data",): [False] * 2,
    }.items():
        np.testing.assert_array_equal(call(name)(grads), decided)
