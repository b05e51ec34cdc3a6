"""Any pytree, and anything not finite anywhere in it."""

import chex
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

FLOATS = [np.float16, np.float32, np.float64, jnp.bfloat16, np.complex64]
FLOATS += [jnp.float8_e4m3fn, jnp.float8_e5m2]
OTHERS = [np.int8, np.int32, np.uint8, np.bool_]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def arrays(draw, dtypes):
    """Numbers between -8 and 8 that every dtype holds, in any shape."""
    values = draw(hnp.arrays(np.int8, draw(SHAPES), elements=st.integers(-8, 8)))
    return values.astype(np.dtype(draw(st.sampled_from(dtypes))))


leaves = st.one_of(
    arrays(FLOATS),
    arrays(FLOATS).map(jnp.asarray),
    arrays(OTHERS),
    st.none(),
    st.floats(-8, 8, width=16),
    st.integers(-8, 8),
    st.booleans(),
    SHAPES.map(lambda shape: np.zeros(shape, jax.dtypes.float0)),
    st.builds(jax.random.key, st.just(0)),
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
loss_scales = st.sampled_from(
    [
        ols.DynamicLossScale(),
        ols.DynamicLossScale(initial_scale=3.0, growth_factor=1.5),
        ols.FixedLossScale(0.3),
        ols.HeadroomLossScale(),
    ]
)


def is_float(x):
    is_inexact = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
    return is_inexact or isinstance(x, float)


@hypothesis.given(trees, loss_scales, st.booleans())
def test_any_tree_is_scaled_and_unscaled_in_float32_or_wider(tree, ls, x64):
    with jax.enable_x64(x64):
        for result, factor in ((ls.scale(tree), ls()), (ls.unscale(tree), 1 / ls())):
            assert jax.tree.structure(result) == jax.tree.structure(tree)
            pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(result), strict=True)
            for x, y in pairs:
                if not is_float(x):
                    assert y is x
                    continue
                dtype = jnp.asarray(x).dtype
                assert y.dtype == (dtype if dtype.itemsize >= 4 else jnp.float32)
                wide = np.complex128 if np.iscomplexobj(x) else np.float64
                expected = np.asarray(x, wide) * float(factor)
                np.testing.assert_allclose(y, expected, rtol=1e-6)


@hypothesis.given(trees, loss_scales)
def test_any_finite_tree_is_applied(tree, ls):
    assert ols.all_finite(tree)
    new, should_apply = ls.update(tree)
    assert should_apply
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
    bad = [np.nan, np.inf, -np.inf] if has_inf else [np.nan]
    planted[position] = data.draw(st.sampled_from(bad))
    flat[i] = planted if planted.ndim else planted[()]
    tree = jax.tree.unflatten(treedef, flat)
    assert not ols.all_finite(tree)
    new, should_apply = ols.DynamicLossScale().update(tree)
    assert not should_apply
    assert new() == 2.0**14


TX = ols.with_loss_scale(optax.adamw(0.1), ols.DynamicLossScale(growth_interval=2))
STEP = jax.jit(TX.apply_gradients)  # compiled once for all examples


@hypothesis.given(data=st.data())
def test_no_parameter_changes_at_a_skipped_step(data):
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.float16)}
    state, expected = TX.init(params), 2.0**15
    counter = skipped = 0
    for _ in range(data.draw(st.integers(1, 6))):
        grads = jax.tree.map(np.array, params)
        bad = data.draw(st.sampled_from([None, np.nan, np.inf, -np.inf]))
        if bad is not None:
            flat = grads[data.draw(st.sampled_from(["w", "b"]))].reshape(-1)
            flat[data.draw(st.integers(0, flat.size - 1))] = bad
        after, new = STEP(grads, state, params)
        # The rules, in plain Python.
        if bad is None:
            assert (after["w"] != params["w"]).any()
            counter = (counter + 1) % 2
            expected *= 1 if counter else 2
        else:
            chex.assert_trees_all_equal(after, params)
            chex.assert_trees_all_equal(new.inner_state, state.inner_state)
            skipped, counter, expected = skipped + 1, 0, max(expected / 2, 1)
        assert (new.loss_scale(), new.skipped_steps) == (expected, skipped)
        params, state = after, new
