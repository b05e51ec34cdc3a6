"""What an argument `loss_scale` may be, and where `get_loss_scale` finds one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

PARAMS = {"w": jnp.ones(2)}
TX = ols.with_loss_scale(optax.adam(1e-3))
STATE = TX.init(PARAMS)
CONFIG = ols.FixedLossScale(128).get_config()
TAKERS = {
    "with_loss_scale": lambda x: ols.with_loss_scale(optax.sgd(0.1), x),
    "value_and_scaled_grad": lambda x: ols.value_and_scaled_grad(jnp.square, x),
    "scale_gradient": lambda x: ols.scale_gradient(1.0, x),
}
each_taker = pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ols.FixedLossScale(1)),
        (128, ols.FixedLossScale(128)),
        (np.float32(128), ols.FixedLossScale(128)),
        (jnp.float16(128), ols.FixedLossScale(128)),
        ("dynamic", ols.DynamicLossScale()),
        ("headroom", ols.HeadroomLossScale()),
        (ols.DynamicLossScale(2.0), ols.DynamicLossScale(2.0)),
        (ols.DynamicLossScale(2.0).get_config(), ols.DynamicLossScale(2.0)),
    ],
    ids=str,
)
def test_what_stands_for_a_loss_scale(given, expected):
    tx = ols.with_loss_scale(optax.sgd(0.1), given)
    assert tx.init(()).loss_scale == expected
    grad = lambda x: ols.value_and_scaled_grad(lambda x: x, given)(x)[1]
    assert grad(1.0) == expected()
    assert jax.grad(lambda x: ols.scale_gradient(x, given))(1.0) == expected()


@each_taker
@pytest.mark.parametrize(
    "bad", [True, "Dynamic", object, jnp.ones(3), 1j, b"dynamic"], ids=str
)
def test_an_unknown_identifier_is_answered_with_the_known(take, bad):
    said = r"a loss scale is None .* a number .* 'dynamic'"
    with pytest.raises(ValueError, match=said):
        take(bad)


def test_an_error_says_where_a_dtype_goes():
    with pytest.raises(ValueError, match="Pass a dtype to autocast"):
        ols.with_loss_scale(optax.sgd(0.1), jnp.bfloat16)


@each_taker
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_number_that_is_no_scale_is_refused(take, dtype):
    for number in (-4.0, 0.0, jnp.nan, jnp.inf):
        for bad in (number, jnp.asarray(number, dtype)):
            with pytest.raises(ValueError, match="scale must be a number between"):
                take(bad)


def test_a_traced_number_is_taken_as_it_is():
    grad = jax.jit(lambda scale: ols.value_and_scaled_grad(jnp.square, scale)(3.0)[1])
    assert grad(8.0) == 48
    scaled = lambda scale: jax.grad(lambda x: ols.scale_gradient(x, scale))(1.0)
    assert jax.jit(scaled)(8) == 8


HOLDERS = {
    "chain": optax.chain(TX, optax.scale(0.5)),
    "named_chain": optax.named_chain(("scaled", TX)),
    "masked": optax.masked(TX, {"w": True}),
    "nested": optax.chain(optax.chain(optax.masked(TX, {"w": True})), optax.identity()),
}


@pytest.mark.parametrize("tx", HOLDERS.values(), ids=HOLDERS)
def test_finds_the_loss_scale_however_deep_in_a_state(tx):
    state = tx.init(PARAMS)
    assert ols.get_loss_scale(state) == ols.DynamicLossScale()
    assert jax.jit(lambda state: ols.get_loss_scale(state)())(state) == 2**15
    held = {"model": PARAMS, "optimizer": state}
    assert ols.value_and_scaled_grad(lambda x: x, held)(1.0)[1] == 2**15
    assert jax.grad(lambda x: ols.scale_gradient(x, held))(1.0) == 2**15


def test_finds_a_fixed_one_which_has_no_leaves():
    state = optax.chain(ols.with_loss_scale(optax.sgd(1.0), 8)).init(PARAMS)
    assert ols.get_loss_scale(state) == ols.FixedLossScale(8)


@pytest.mark.parametrize("state", [(), PARAMS, (STATE, STATE), {"config": CONFIG}])
def test_none_or_several_is_an_error(state):
    for find in (
        ols.get_loss_scale,
        lambda state: ols.value_and_scaled_grad(lambda x: x, state),
        lambda state: ols.scale_gradient(1.0, state),
    ):
        with pytest.raises(ValueError, match="exactly one loss scale"):
            find(state)


PRECEDED = {
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), TX),
    "named": optax.named_chain(("clip", optax.clip(1.0)), ("a", TX)),
    "nested": optax.chain(optax.chain(optax.clip(1.0), optax.chain(TX))),
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
        assert [warning.filename for warning in w] == [__file__]


def test_a_carry_of_states_is_no_chain():
    ols.get_loss_scale((PARAMS, STATE))
    ols.get_loss_scale((optax.EmptyState(), PARAMS, STATE))
