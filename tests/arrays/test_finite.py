"""Whether every element is finite, how large the largest is, and the norm, on any platform."""

import functools
import itertools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import AS_USERS_DO, lowered_for
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from optax_lossscale._arrays.finite import largest, norm_and_all_finite
from optax_lossscale._arrays.replicas import reduce_replicas

PLATFORMS = ["cpu", "cuda", "tpu"]
QUICK = ["float16", "float32", "complex64", "float8_e4m3fn"]
SLOW = ["bfloat16", "float64", "float8_e5m2", "float8_e4m3fnuz"]
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
each_platform = pytest.mark.parametrize("platform", PLATFORMS)
each_dtype = pytest.mark.parametrize("dtype", [*QUICK, *map(slow, SLOW)])


def not_finite(dtype):
    """The NaNs and infinities that the dtype has."""
    values = [np.nan, np.inf, -np.inf]
    if dtype == "complex64":
        values += [complex(0, np.nan), complex(0, np.inf), complex(np.inf, np.nan)]
    values = [np.asarray(v, jnp.dtype(dtype)) for v in values]
    with np.errstate(invalid="ignore"):
        return [v for v in values if not np.isfinite(v.astype(np.complex64))]


@functools.cache
def check_of(platform):
    checks = lambda x: (ols.all_finite(x), largest(x), *norm_and_all_finite(x))
    return lowered_for(platform, checks, compiler_options=AS_USERS_DO)


def assert_not_finite(found):
    finite, amax, norm, also_finite = found
    assert not finite
    assert not also_finite
    assert amax == norm == jnp.inf


@pytest.mark.parametrize("size", [1, 7, 1_000, 65_537, slow(1_000_003), slow(2**22)])
def test_finds_what_is_planted_anywhere_in_leaves_of_any_size(size):
    x = np.clip(np.random.default_rng(0).normal(size=size), -4, 4).astype(np.float16)
    for i in {0, 1, size // 2, size - 2, size - 1} & set(range(size)):
        for bad in not_finite("float16"):
            planted = x.copy()
            planted[i] = bad
            assert_not_finite(check_of("cpu")(planted))
        planted[i] = -8
        finite, amax, *_ = check_of("cpu")(planted)
        assert finite
        assert amax == 8


@each_platform
@each_dtype
def test_finds_what_is_planted_in_any_of_many_leaves(platform, dtype):
    check = check_of(platform)
    leaves = np.full((20, 5), jnp.finfo(dtype).max, dtype)
    with jax.enable_x64(True):
        assert check([*leaves])[0], "large numbers are finite, however many"
        for i, bad in itertools.product((0, 9, 19), not_finite(dtype)):
            planted = leaves.copy()
            planted[i, 3] = bad
            assert_not_finite(check([*planted]))
        leaves[:] = 1
        leaves[9, 2] = -8
        finite, amax, norm, _ = check([*leaves])
        assert finite
        assert amax == 8
        np.testing.assert_allclose(norm, np.sqrt(99 + 64), rtol=1e-6)


@each_platform
@each_dtype
def test_what_is_odd_but_finite_is_finite(platform, dtype):
    with jax.enable_x64(True):
        info = jnp.finfo(dtype)
        odd = [info.max, info.min, info.tiny, info.smallest_subnormal, -0.0, 0.0]
        x = jnp.asarray(np.asarray(odd, jnp.dtype(dtype)))
        finite, amax, _, also_finite = check_of(platform)(x)
        assert finite
        assert also_finite  # though the norm may not be
        assert amax == min(float(info.max), float(np.finfo(np.float32).max))
        assert amax.dtype == jnp.float32


@hypothesis.given(
    st.sampled_from(PLATFORMS),
    hnp.arrays(
        st.sampled_from([np.float16, np.float32]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9),
        elements=st.floats(width=16),
    ),
)
def test_agrees_with_numpy(platform, x):
    finite, amax, norm, also_finite = check_of(platform)([x])
    assert finite == also_finite == np.isfinite(x).all()
    expected = abs(x).max(initial=0) if finite else np.inf
    np.testing.assert_array_equal(amax, np.float32(expected))
    if finite:
        wide = np.linalg.norm(x.astype(np.float64))
        np.testing.assert_allclose(norm, wide, rtol=1e-5)


def test_ignores_what_is_not_a_float():
    tree = {
        "none": None,
        "int": jnp.arange(3),
        "bool": True,
        "float0": np.zeros(3, jax.dtypes.float0),
        "key": jax.random.key(0),
    }
    assert ols.all_finite(tree)
    assert not ols.all_finite(tree | {"float": np.nan})
    assert largest(tree) == 0
    assert largest(tree | {"float": -2.5, "complex": jnp.array([1 - 3j])}) == 3


@pytest.mark.parametrize("tree", [{}, None, [None], {"a": jnp.ones((0, 3))}])
def test_a_tree_without_numbers_is_finite(tree):
    flag, amax = ols.all_finite(tree), largest(tree)
    assert (flag.shape, flag.dtype, bool(flag)) == ((), bool, True)
    assert (amax.shape, amax.dtype, float(amax)) == ((), jnp.float32, 0)


@each_platform
def test_under_vmap_each_member_is_checked_for_itself(platform):
    check = lambda x: (ols.all_finite(x), largest(x), *norm_and_all_finite(x))
    members = jnp.array([[3.0, -4.0], [jnp.inf, 0.0], [3.0, jnp.nan]])
    found = np.stack(lowered_for(platform, jax.vmap(check))(members))
    flags = [True, False, False]
    for result, expected in zip(
        found, [flags, [4, np.inf, np.inf], [5, np.inf, np.inf], flags], strict=True
    ):
        np.testing.assert_allclose(result, expected)


# The norm


@pytest.mark.parametrize(
    "shapes",
    [[()], [(3,), (0, 4), ()], [(256, 768), (1000, 131)], slow([(18_000_003,)])],
    ids=str,
)
@each_platform
def test_the_norm_is_right_of_leaves_of_any_size(platform, shapes):
    """On a CPU, a few running sums take all of a large leaf, so its norm is rough."""
    rng = np.random.default_rng(0)
    tree = [rng.uniform(0.5, 1.5, shape).astype(np.float32) for shape in shapes]
    expected = np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in tree))
    *_, norm, finite = check_of(platform)([*tree, None, 7])
    assert (norm.dtype, norm.shape, bool(finite)) == (jnp.float32, (), True)
    is_rough = platform == "cpu" and max(x.size for x in tree) > 2**20
    np.testing.assert_allclose(norm, expected, rtol=3e-3 if is_rough else 1e-5)


@each_platform
def test_squares_that_are_more_than_float32_holds_make_the_norm_infinite(platform):
    *_, norm, finite = check_of(platform)({"w": jnp.array([2.0**70, 1.0])})
    assert norm == jnp.inf
    assert finite


# Several devices


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data")], ids=str)
def test_finds_what_is_planted_in_sharded_arrays(spec, axis_type):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    place = lambda x: jax.device_put(x, NamedSharding(mesh, spec))
    x = np.ones((8, 12), np.float32)
    finite, amax, norm, _ = check_of("cpu")([place(x)])
    assert (bool(finite), float(amax)) == (True, 1)
    assert norm == pytest.approx(96**0.5)
    for i in range(0, 8, 2):  # in every shard of rows, and of columns
        planted = x.copy()
        planted[i, 5 * i % 12] = np.nan
        assert_not_finite(check_of("cpu")([place(planted)]))


def test_an_error_of_a_reduction_is_not_blamed_on_the_axis():
    def fails(x, axis_name):
        raise ValueError("out of memory")

    reduced = jax.vmap(lambda x: reduce_replicas(fails, x, "data"), axis_name="data")
    with pytest.raises(ValueError, match=r"^out of memory"):
        reduced(jnp.ones(4))
