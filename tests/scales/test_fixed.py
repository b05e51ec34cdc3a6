import jax
import jax.numpy as jnp
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
    with pytest.raises(TypeError, match=r"no state loss_scale; .* fields are none\."):
        ls.replace(loss_scale=4)
