"""The kinds of numbers, in every dtype and as another dtype would round them."""

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import optax_lossscale as ols

NARROW = [jnp.float16, jnp.bfloat16, ml_dtypes.float8_e5m2]


@functools.partial(jax.jit, static_argnums=1)
def counts(x, dtype):
    return ols.diagnosis.underflow_report({"x": x}, 1.0, dtype).leaves["x"]


@pytest.mark.parametrize("dtype", NARROW)
@hypothesis.given(st.lists(st.floats(width=32), min_size=48, max_size=48), st.data())
@hypothesis.settings(deadline=None, max_examples=60)
def test_counts_what_rounding_makes_of_numbers(dtype, numbers, data):
    """As numpy rounds, at the borders too."""
    info = ml_dtypes.finfo(dtype)
    ulp = float(info.max) - float(np.nextafter(np.array(info.max, dtype), np.array(0, dtype)))
    borders = [info.smallest_subnormal / 2, info.smallest_subnormal, info.tiny, info.max]
    borders = [float(b) for b in borders] + [float(info.max) + ulp / 2]
    borders += [
        float(np.nextafter(np.float32(b), np.float32(way))) for b in borders for way in (0, np.inf)
    ]
    numbers += data.draw(st.lists(st.sampled_from(borders), min_size=16, max_size=16))
    x = np.array(numbers, np.float32)
    x[np.abs(x) < np.finfo(np.float32).tiny] = 0  # which the processor may flush
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.abs(x.astype(dtype).astype(np.float64))
    tiny = float(info.tiny)
    summary = counts(x, dtype)
    assert summary.size == x.size
    assert summary.zeros == np.sum(rounded == 0)
    if dtype != jnp.bfloat16:  # whose subnormals are float32's
        assert summary.subnormals == np.sum((rounded > 0) & (rounded < tiny))
    assert summary.infinities == np.sum(np.isinf(rounded))
    assert summary.nans == np.sum(np.isnan(rounded))


def test_counts_every_kind_in_each_dtype_of_its_own():
    for dtype in (*NARROW, jnp.float32):
        x = jnp.array([0, 1, -2, jnp.inf, -jnp.inf, jnp.nan, jnp.finfo(dtype).max], dtype)
        summary = ols.diagnosis.nonfinite_leaves([x])["0"]
        np.testing.assert_array_equal(summary, [7, 1, 0, 2, 1, 1, np.inf])


@pytest.mark.parametrize("jit", [False, True])
def test_each_number_is_of_one_kind(jit):
    """Whether the processor takes a float32 subnormal for zero or not."""
    summarize = jax.jit(ols.diagnosis.nonfinite_leaves) if jit else ols.diagnosis.nonfinite_leaves
    summary = summarize([np.full(4, 1e-40, np.float32)])["0"]
    assert summary.zeros + summary.subnormals == 4


def test_float64_numbers_out_of_float32s_range_are_counted_as_lost():
    with jax.enable_x64(True):
        report = ols.diagnosis.underflow_report(
            [jnp.array([1e300, 1e39, 1e-60, 1.0, np.inf])], 1, "float32"
        )
    assert (report.total.infinities, report.total.zeros) == (3, 1)


def test_leaves_of_the_same_path_are_both_kept():
    leaves = ols.diagnosis.nonfinite_leaves({"a": {"b": jnp.array([jnp.nan])}, "a/b": jnp.ones(1)})
    assert sorted(leaf.nans for leaf in leaves.values()) == [0, 1]


def test_counts_do_not_stop_where_float32_ends_to_count():
    n = 2**24 + 2
    assert ols.diagnosis.nonfinite_leaves([jnp.full(n, jnp.nan, jnp.float16)])["0"].nans == n


def test_takes_more_numbers_than_int32_counts():
    chex.assert_shape(
        jax.eval_shape(
            ols.diagnosis.nonfinite_leaves, [jax.ShapeDtypeStruct((2**16, 2**16), jnp.float16)]
        )["0"],
        (),
    )
