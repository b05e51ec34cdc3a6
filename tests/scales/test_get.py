import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols


def test_each_identifier_stands_for_its_loss_scale():
    assert ols.get(None) == ols.FixedLossScale(1)
    assert ols.get("dynamic") == ols.DynamicLossScale()
    for number in (128, 128.0, np.float32(128), np.int64(128), jnp.float32(128), np.array(128)):
        assert ols.get(number) == ols.FixedLossScale(128)
    ls = ols.DynamicLossScale(initial_scale=2)
    assert ols.get(ls) is ls
    assert ols.get(ls.get_config()) == ls


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
    with pytest.raises(ValueError, match=r"a loss scale is None .* a number .* 'dynamic'"):
        ols.get(bad)


@pytest.mark.parametrize("bad", [0, -128, np.nan, np.inf])
def test_a_number_that_is_no_scale_is_refused(bad):
    with pytest.raises(ValueError, match="scale must be a number between"):
        ols.get(bad)


PARAMS = {"w": jnp.ones(2)}
TX = ols.with_loss_scale(optax.adam(1e-3))


@pytest.mark.parametrize(
    "tx",
    [
        TX,
        optax.chain(optax.clip(1.0), TX),
        optax.chain(TX, optax.scale(0.5)),
        optax.MultiSteps(TX, 2),
        optax.masked(TX, {"w": True}),
        ols.with_loss_scale(optax.MultiSteps(optax.adam(1e-3), 2)),
        optax.chain(optax.identity(), optax.chain(optax.MultiSteps(TX, 2), optax.identity())),
    ],
)
def test_finds_the_loss_scale_however_deep_in_a_state(tx):
    state = tx.init(PARAMS)
    assert ols.get_loss_scale(state) == ols.DynamicLossScale()
    assert jax.jit(lambda state: ols.get_loss_scale(state)())(state) == 2**15


def test_finds_a_fixed_one_which_has_no_leaves():
    state = optax.chain(ols.with_loss_scale(optax.sgd(1.0), 8)).init(PARAMS)
    assert ols.get_loss_scale(state) == ols.FixedLossScale(8)


def test_none_or_several_is_an_error():
    with pytest.raises(ValueError, match="exactly one loss scale in the state, found 0"):
        ols.get_loss_scale(optax.adam(1e-3).init(PARAMS))
    with pytest.raises(ValueError, match="exactly one loss scale in the state, found 2"):
        ols.get_loss_scale(optax.chain(TX, TX).init(PARAMS))
