"""`where_applied`: other trees of a step, such as statistics, kept if it is skipped."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

PARAMS = {"w": jnp.ones(2)}
TX = ols.with_loss_scale(optax.sgd(0.1))


def state_after(gradient, tx=TX):
    _, state = tx.update({"w": jnp.full(2, gradient)}, tx.init(PARAMS), PARAMS)
    return state


APPLIED, SKIPPED = state_after(1.0), state_after(jnp.inf)


def tree_of(x):
    return {
        "float32": jnp.full((2, 3), x),
        "float16": jnp.full(3, x, jnp.float16),
        "int": jnp.int32(x),
        "numpy": np.full(2, x, np.float32),
        "number": float(x),
        "key": jax.random.key(int(x)),
        "none": None,
        "function": len,
        "empty": (),
    }


def test_takes_the_new_after_an_applied_step_and_the_old_after_a_skipped_one():
    for state, x in ((APPLIED, 1), (SKIPPED, 2)):
        kept, expected = ols.where_applied(state, tree_of(1), tree_of(2)), tree_of(x)
        assert kept.pop("function") is expected.pop("function")
        assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), kept, expected))


def test_dtypes_are_those_of_the_old_and_strong():
    new = {"a": jnp.ones(2, jnp.float16), "b": jnp.asarray(1.0), "c": 1.0}
    old = {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(()), "c": 2.0}
    kept = ols.where_applied(APPLIED, new, old)
    assert [kept[k].dtype for k in "abc"] == [jnp.float16, jnp.float32, jnp.float32]
    assert not any(x.weak_type for x in kept.values())


def test_a_nan_in_what_is_not_taken_does_not_come_through():
    assert ols.where_applied(SKIPPED, jnp.nan, jnp.float32(0.5)) == 0.5


def test_of_a_stack_of_states_each_for_itself_under_vmap_alone():
    states = jax.tree.map(lambda *x: jnp.stack(x), APPLIED, SKIPPED)
    kept = jax.vmap(ols.where_applied)(states, jnp.ones((2, 3)), jnp.zeros((2, 3)))
    chex.assert_trees_all_equal(kept, jnp.array([[1.0] * 3, [0.0] * 3]))
    with pytest.raises(ValueError, match=r"stack of shape \(2,\)"):
        ols.where_applied(states, jnp.ones(2), jnp.zeros(2))


def test_takes_whatever_holds_the_state():
    chained = optax.chain(TX, optax.identity())
    assert ols.where_applied(state_after(jnp.nan, chained), 1.0, 2.0) == 2.0
    assert ols.where_applied({"opt_state": SKIPPED}, 1.0, 2.0) == 2.0


def test_states_that_hold_no_wrappers_state_or_several_are_refused():
    for state in (ols.DynamicLossScale(), (APPLIED, APPLIED)):
        with pytest.raises(ValueError, match=r"exactly one LossScaleState, found [02]"):
            ols.where_applied(state, 1.0, 2.0)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ({"mean": jnp.ones(3), "steps": 1}, r"shape \(3,\) .* \(2,\), at mean"),
        ({"mean": jnp.ones(2), "steps": 0.5}, "float32 where old has int32, at steps"),
        ({"mean": jnp.ones(2), "steps": "x"}, "at steps"),
        ({"mean": jnp.ones(2)}, "steps"),
    ],
)
def test_another_tree_is_refused_and_where_it_differs_is_said(new, said):
    old = {"mean": jnp.zeros(2), "steps": 0}
    with pytest.raises((TypeError, ValueError), match=said):
        ols.where_applied(APPLIED, new, old)


@pytest.mark.parametrize(
    ("new", "old"),
    [(0.7, 0), (jnp.int32(2), True), (jnp.float16(5), jnp.bfloat16(1)), (1 + 2j, 1.0)],
)
def test_a_number_that_the_dtype_does_not_hold_is_refused(new, old):
    with pytest.raises(TypeError, match="which cannot represent all of its values"):
        ols.where_applied(APPLIED, {"n": new}, {"n": old})


@pytest.mark.parametrize(
    ("new", "old"),
    [(jnp.int8(5), 1), (True, 1), (5.0, jnp.bfloat16(1))],
)
def test_a_number_that_the_dtype_holds_takes_it(new, old):
    kept = ols.where_applied(APPLIED, new, old)
    assert kept == new
    assert kept.dtype == jnp.asarray(old).dtype


def test_an_average_of_16_bit_parameters_is_started_in_float32():
    params = jnp.ones(2, jnp.bfloat16)
    averaged = optax.incremental_update(params.astype(jnp.float32), params * 0, 1e-3)
    with pytest.raises(TypeError, match=r"start the average of 16-bit .* in float32"):
        ols.where_applied(APPLIED, averaged, params * 0)
    ols.where_applied(APPLIED, averaged, jnp.zeros(2))
