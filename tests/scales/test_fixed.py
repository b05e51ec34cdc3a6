import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols


def test_never_changes_and_checks_nothing():
    ls = ols.FixedLossScale(128)
    assert ls.update({"w": jnp.array([jnp.nan])}) == (ls, True)
    assert ls.update({"w": jnp.ones(2)})[1] is True
    assert ls.adjust(False) == ls


def test_has_no_state_and_is_compiled_in():
    ls = ols.FixedLossScale(scale=128)
    assert jax.tree.leaves(ls) == []
    assert repr(ls) == "FixedLossScale(128.0)"
    assert hash(ls) == hash(ols.FixedLossScale(128.0))
    assert ls != ols.FixedLossScale(64)


@pytest.mark.parametrize(
    "bad",
    [0, -1, np.inf, np.nan, True, np.True_, "8", None, [8], 2.0**61, 2.0**-61, 1j],
)
def test_what_is_no_positive_finite_number_is_refused(bad):
    with pytest.raises(ValueError, match=r"scale must be a number between .* got "):
        ols.FixedLossScale(bad)


def test_cannot_be_subclassed():
    with pytest.raises(TypeError, match="Mine cannot subclass FixedLossScale"):

        class Mine(ols.FixedLossScale):
            pass


def test_says_that_it_has_no_state_to_replace():
    with pytest.raises(
        TypeError, match=r"no state loss_scale; its state fields are none\."
    ):
        ols.FixedLossScale(8).replace(loss_scale=4)
