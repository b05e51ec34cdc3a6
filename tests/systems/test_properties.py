"""Any pytree, and anything not finite anywhere in it."""

import chex
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

FLOATS = [
    np.float16,
    np.float32,
    np.float64,
    jnp.bfloat16,
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    np.complex64,
]
OTHERS = [np.int8, np.int32, np.uint8, np.bool_]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
LOSS_SCALES = [
    ols.DynamicLossScale(),
    ols.DynamicLossScale(initial_scale=3.0, growth_factor=1.5),
    ols.FixedLossScale(1),
    ols.FixedLossScale(0.3),
    ols.HeadroomLossScale(),
]


@st.composite
def arrays(draw, dtypes):
    """Numbers between -8 and 8 that every dtype holds, in any shape."""
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    shape = draw(SHAPES)
    values = draw(hnp.arrays(np.int8, shape, elements=st.integers(-8, 8)))
    return values.astype(dtype)


leaves = st.one_of(
    arrays(FLOATS),
    arrays(FLOATS).map(jnp.asarray),
    arrays(OTHERS),
    st.none(),
    st.floats(-8, 8, width=16),
    st.integers(-8, 8),
    st.booleans(),
    SHAPES.map(lambda shape: np.zeros(shape, jax.dtypes.float0)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=6,
)
any_loss_scale = st.sampled_from(LOSS_SCALES)


def is_float(x):
    return isinstance(x, float) or (
        hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
    )


def widened(x):
    """The dtype in which a leaf is scaled."""
    dtype = jnp.result_type(x)
    return dtype if dtype.itemsize >= 4 else np.dtype(np.float32)


@hypothesis.given(trees, any_loss_scale, st.booleans())
def test_any_tree_is_scaled_and_unscaled_in_float32_or_wider(tree, ls, x64):
    with jax.enable_x64(x64):
        for result, factor in ((ls.scale(tree), ls()), (ls.unscale(tree), 1 / ls())):
            assert jax.tree.structure(result) == jax.tree.structure(tree)
            for x, y in zip(
                jax.tree.leaves(tree), jax.tree.leaves(result), strict=True
            ):
                if not is_float(x):
                    assert y is x
                    continue
                assert y.dtype == widened(jnp.asarray(x))
                wide = np.asarray(
                    x, np.complex128 if np.iscomplexobj(x) else np.float64
                )
                np.testing.assert_allclose(y, wide * float(factor), rtol=1e-6)


@hypothesis.given(trees, any_loss_scale)
def test_any_finite_tree_is_applied(tree, ls):
    assert ols.all_finite(tree)
    new, should_apply = ls.update(tree)
    assert should_apply
    assert jax.tree.structure(new) == jax.tree.structure(ls)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, ls)


@hypothesis.given(trees, st.data())
def test_what_is_not_finite_is_found_wherever_it_is(tree, data):
    flat, treedef = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(flat) if is_float(x) and np.size(x)]
    hypothesis.assume(places)
    i = data.draw(st.sampled_from(places))
    planted = np.array(flat[i])
    position = tuple(data.draw(st.integers(0, n - 1)) for n in planted.shape)
    has_inf = planted.dtype != jnp.float8_e4m3fn
    planted[position] = data.draw(
        st.sampled_from([np.nan, np.inf, -np.inf] if has_inf else [np.nan])
    )
    flat[i] = planted if planted.ndim else planted[()]
    tree = jax.tree.unflatten(treedef, flat)
    assert not ols.all_finite(tree)
    ls = ols.DynamicLossScale()
    new, should_apply = ls.update(tree)
    assert not should_apply
    assert new() == ls() / 2


SKIPPING = ols.with_loss_scale(
    optax.adamw(0.1), ols.DynamicLossScale(growth_interval=2)
)
# Compiled once for all examples.
STEPS = {
    "apply_gradients": jax.jit(SKIPPING.apply_gradients),
    "update": jax.jit(SKIPPING.update),
}


@pytest.mark.parametrize("way", STEPS)
@hypothesis.given(data=st.data())
def test_no_parameter_changes_at_a_skipped_step(way, data):
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.float16)}
    state, expected = SKIPPING.init(params), 2.0**15
    counter = skipped = 0
    for _ in range(data.draw(st.integers(1, 6))):
        grads = jax.tree.map(np.array, params)
        bad = data.draw(st.sampled_from([None, np.nan, np.inf, -np.inf]))
        if bad is not None:
            name = data.draw(st.sampled_from(["w", "b"]))
            flat = grads[name].reshape(-1)
            flat[data.draw(st.integers(0, flat.size - 1))] = bad
        result, new = STEPS[way](grads, state, params)
        after = (
            result if way == "apply_gradients" else optax.apply_updates(params, result)
        )
        changed = not np.array_equal(after["w"], params["w"])
        assert changed == (bad is None)
        if bad is not None:
            chex.assert_trees_all_equal(after, params)
            chex.assert_trees_all_equal(new.inner_state, state.inner_state)
        # The rules, in plain Python.
        skipped += bad is not None
        counter = counter + 1 if bad is None else 0
        if bad is not None:
            expected = max(expected / 2, 1)
        elif counter == 2:
            expected, counter = expected * 2, 0
        assert (new.loss_scale(), new.skipped_steps) == (expected, skipped)
        params, state = after, new
