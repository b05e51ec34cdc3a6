import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols


def taken(loss_scale):
    """The loss scale that `with_loss_scale` makes of its argument."""
    return ols.with_loss_scale(optax.sgd(0.1), loss_scale).init(()).loss_scale


def test_each_identifier_stands_for_its_loss_scale():
    assert taken(None) == ols.FixedLossScale(1)
    assert taken("dynamic") == ols.DynamicLossScale()
    for number in (
        128,
        128.0,
        np.float32(128),
        np.int64(128),
        jnp.float32(128),
        np.array(128),
    ):
        assert taken(number) == ols.FixedLossScale(128)
    ls = ols.DynamicLossScale(initial_scale=2)
    assert taken(ls) == ls
    assert taken(ls.get_config()) == ls


@pytest.mark.parametrize(
    "bad",
    [
        True,
        np.False_,
        "fixed",
        "Dynamic",
        [128],
        (1,),
        object(),
        jnp.ones(3),
        1j,
        b"dynamic",
        np.ones(3),
        np.array(["dynamic"]),
    ],
)
def test_an_unknown_identifier_is_answered_with_the_known(bad):
    with pytest.raises(
        ValueError, match=r"a loss scale is None .* a number .* 'dynamic'"
    ) as error:
        taken(bad)
    assert "autocast" not in str(error.value)


@pytest.mark.parametrize("bad", ["bf16", jnp.bfloat16, np.dtype("float16")])
def test_an_error_says_where_a_dtype_goes(bad):
    with pytest.raises(ValueError, match="Pass a dtype to autocast"):
        ols.with_loss_scale(optax.sgd(0.1), bad)


@pytest.mark.parametrize("bad", [0, -128, np.nan, np.inf])
def test_a_number_that_is_no_scale_is_refused(bad):
    with pytest.raises(ValueError, match=r"^loss_scale must be a number between"):
        taken(bad)


NO_SCALES = [-4.0, 0.0, -0.0, jnp.nan, jnp.inf, 1e-39]
AS_ARRAYS = {
    "float32": jnp.float32,
    "float16": jnp.float16,
    "bfloat16": jnp.bfloat16,
    "an array": lambda x: jnp.full((), x),
    "numpy": np.float32,
    "committed": lambda x: jax.device_put(jnp.float32(x), jax.devices()[-1]),
}
TAKERS = {
    "with_loss_scale": lambda x: ols.with_loss_scale(optax.sgd(0.1), x),
    "value_and_scaled_grad": lambda x: ols.value_and_scaled_grad(jnp.square, x),
    "scale_gradient": lambda x: ols.scale_gradient(1.0, x),
    "scale_gradient, closed over": lambda x: jax.jit(
        lambda y: ols.scale_gradient(y, x)
    )(1.0),
}


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
@pytest.mark.parametrize("as_array", AS_ARRAYS.values(), ids=AS_ARRAYS)
def test_an_array_that_is_no_scale_is_refused_where_it_is_at_hand(as_array, take):
    for number in NO_SCALES:
        with pytest.raises(
            ValueError, match=r"scale must be a number between .*, got "
        ):
            take(as_array(number))
    take(as_array(8.0))


def test_a_traced_array_is_taken_as_it_is():
    grad = jax.jit(lambda scale: ols.value_and_scaled_grad(jnp.square, scale)(3.0)[1])
    assert grad(8.0) == 48
    assert grad(-1.0) == -6


PARAMS = {"w": jnp.ones(2)}
TX = ols.with_loss_scale(optax.adam(1e-3))


@pytest.mark.parametrize(
    "tx",
    [
        TX,
        optax.chain(TX, optax.scale(0.5)),
        optax.named_chain(("scaled", TX)),
        optax.masked(TX, {"w": True}),
        ols.with_loss_scale(optax.MultiSteps(optax.adam(1e-3), 2)),
        optax.chain(optax.chain(optax.masked(TX, {"w": True})), optax.identity()),
    ],
)
def test_finds_the_loss_scale_however_deep_in_a_state(tx):
    state = tx.init(PARAMS)
    assert ols.get_loss_scale(state) == ols.DynamicLossScale()
    assert jax.jit(lambda state: ols.get_loss_scale(state)())(state) == 2**15


def test_finds_a_fixed_one_which_has_no_leaves():
    state = optax.chain(ols.with_loss_scale(optax.sgd(1.0), 8)).init(PARAMS)
    assert ols.get_loss_scale(state) == ols.FixedLossScale(8)


PRECEDED = {
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), TX),
    "summed": optax.chain(optax.trace(0.9), TX, optax.scale(0.5)),
    "named": optax.named_chain(("clip", optax.clip(1.0)), ("a", TX)),
    "nested": optax.chain(optax.chain(optax.clip(1.0), optax.chain(TX))),
    "first in a nested one": optax.chain(
        optax.chain(optax.clip(1.0), TX), optax.identity()
    ),
    "masked": optax.chain(optax.clip(1.0), optax.masked(TX, {"w": True})),
}


@pytest.mark.parametrize("tx", PRECEDED.values(), ids=PRECEDED)
def test_what_stands_before_it_in_a_chain_is_warned_of(tx):
    state = tx.init(PARAMS)
    for find in (
        ols.get_loss_scale,
        ols.metrics,
        lambda state: ols.value_and_scaled_grad(jnp.sum, state),
        lambda state: ols.scale_gradient(1.0, {"opt_state": state}),
    ):
        with pytest.warns(UserWarning, match="stands before with_loss_scale") as w:
            find(state)
        assert len(w) == 1
        assert w[0].filename == __file__


def test_a_carry_of_states_is_no_chain():
    ols.get_loss_scale((PARAMS, TX.init(PARAMS)))
    ols.get_loss_scale((optax.EmptyState(), PARAMS, TX.init(PARAMS)))
    ols.get_loss_scale(((), TX.init(PARAMS)))


def test_none_or_several_is_an_error():
    with pytest.raises(
        ValueError, match="exactly one loss scale in the state, found 0"
    ):
        ols.get_loss_scale(optax.adam(1e-3).init(PARAMS))
    with pytest.raises(
        ValueError, match="exactly one loss scale in the state, found 2"
    ):
        ols.get_loss_scale(optax.chain(TX, TX).init(PARAMS))


# What an argument `loss_scale` may be, wherever there is one.

GRADS = {"w": jnp.array([3.0, -1.0])}
MEANINGS = {
    "value_and_scaled_grad": lambda ls: ols.value_and_scaled_grad(lambda x: x, ls)(1.0)[
        1
    ],
    "scale_gradient": lambda ls: jax.grad(lambda x: ols.scale_gradient(x, ls))(1.0),
}
each_function = pytest.mark.parametrize("scale_of", MEANINGS.values(), ids=MEANINGS)
CONFIG = ols.FixedLossScale(128).get_config()


@each_function
@pytest.mark.parametrize(
    ("loss_scale", "scale"),
    [
        (None, 1),
        (128, 128),
        (0.5, 0.5),
        (np.float32(128), 128),
        (np.array(128), 128),
        (jnp.float32(128), 128),
        (jnp.int32(128), 128),
        ("dynamic", 2**15),
        (ols.HeadroomLossScale(initial_scale=8), 8),
        (CONFIG, 128),
        (TX.init(PARAMS), 2**15),
        ({"model": PARAMS, "optimizer": TX.init(PARAMS)}, 2**15),
        ({"class_name": ols.FixedLossScale(128), "step": 0}, 128),
    ],
)
def test_every_function_takes_what_get_takes_and_states(scale_of, loss_scale, scale):
    assert scale_of(loss_scale) == scale


@each_function
@pytest.mark.parametrize("scale", [jnp.float32(128), 128, 2.0**60], ids=str)
def test_every_function_takes_a_traced_number(scale_of, scale):
    traced = jax.jit(lambda scale: scale_of(scale))
    assert traced(scale) == scale
    assert jax.eval_shape(traced, scale).shape == ()


@each_function
@pytest.mark.parametrize(
    "bad", ["dynamc", True, 0, np.nan, object(), jnp.ones(3), jnp.array(True)]
)
def test_every_function_answers_an_unknown_identifier_as_get_does(scale_of, bad):
    with pytest.raises(
        ValueError, match=r"a loss scale is None|scale must be a number between"
    ):
        scale_of(bad)


@each_function
@pytest.mark.parametrize(
    "state", [(), {}, PARAMS, (TX.init(PARAMS),) * 2, {"config": CONFIG}]
)
def test_every_function_refuses_a_state_without_exactly_one(scale_of, state):
    with pytest.raises(ValueError, match="exactly one loss scale in the state, found"):
        scale_of(state)


@each_function
@pytest.mark.parametrize("config", [{"class_name": "Nonesuch", "config": {}}], ids=str)
def test_every_function_refuses_a_config_of_an_unknown_kind(scale_of, config):
    with pytest.raises(ValueError, match="config must be"):
        scale_of(config)


def test_a_split_state_of_nnx_is_to_be_merged_first():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the framework's, not ours
        from flax import nnx

        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
        graph, state = nnx.split(optimizer)
        with pytest.raises(ValueError, match=r"call nnx\.merge first"):
            ols.get_loss_scale(state)
        merged = nnx.merge(graph, state)
    assert ols.get_loss_scale(merged) == ols.DynamicLossScale()
