import functools
import itertools
import re

import chex
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
from pairs import product

import optax_lossscale as ols
from optax_lossscale._arrays.finite import largest, norm_and_all_finite
from optax_lossscale._arrays.replicas import on_all_replicas, reduce_replicas

FLOAT8 = [
    jnp.float8_e3m4,
    jnp.float8_e4m3,
    jnp.float8_e4m3b11fnuz,
    jnp.float8_e4m3fn,
    jnp.float8_e4m3fnuz,
    jnp.float8_e5m2,
    jnp.float8_e5m2fnuz,
]
DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.complex64, *FLOAT8]
QUICK_ON_CPU = [jnp.float32, jnp.complex64, jnp.float8_e4m3fn]
SIZES = [1, 2, 7, 64, 1_000, 65_537, 1_000_003, 4_194_304]


def not_finite(dtype):
    """The NaNs and infinities that the dtype has."""
    values = [np.nan, np.inf, -np.inf]
    if dtype == jnp.complex64:
        values += [complex(0, np.nan), complex(0, np.inf), complex(np.inf, np.nan)]
    values = [np.asarray(v, dtype) for v in values]
    with np.errstate(invalid="ignore"):
        return [v for v in values if not np.isfinite(v.astype(np.complex64))]


PLATFORMS = ["cpu", "cuda", "tpu"]
each_platform = pytest.mark.parametrize("platform", PLATFORMS)


@functools.cache
def check_of(platform):
    """What is known of a tree, as that platform finds it."""
    checks = lambda x: (ols.all_finite(x), largest(x), norm_and_all_finite(x))
    return lowered_for(platform, checks, compiler_options=AS_USERS_DO)


def each_case(*names, sizes=(7,)):
    """All dtypes in all sizes, of which few are quick; on other platforms than CPU in one size."""
    cases = []
    for platform, dtype, size in itertools.product(PLATFORMS, DTYPES, sizes):
        if platform == "cpu" or size == 7:
            values, words = (
                (platform, dtype, size),
                (platform, jnp.dtype(dtype).name, str(size)),
            )
            is_quick = dtype == jnp.float16 and size <= 65_537
            is_quick |= platform == "cpu" and size == 7 and dtype in QUICK_ON_CPU
            marks, n = () if is_quick else pytest.mark.slow, len(names)
            cases.append(pytest.param(*values[:n], marks=marks, id="-".join(words[:n])))
    return pytest.mark.parametrize(names, cases)


@each_case("platform", "dtype", "size", sizes=SIZES)
def test_finds_what_is_planted_anywhere(platform, dtype, size):
    check = check_of(platform)
    rng = np.random.default_rng(size)
    x = np.clip(rng.normal(size=size), -4, 4).astype(dtype)
    edges = {0, 1, 2, size // 2, size - 3, size - 2, size - 1} & set(range(size))
    positions = sorted(edges | {int(i) for i in rng.integers(0, size, 10)})
    with jax.enable_x64(True):
        assert check(jnp.array(x))[0]
        for bad in not_finite(dtype):
            for i in positions:
                kept = x[i]
                x[i] = bad
                finite, amax, (norm, also_finite) = check(jnp.array(x))
                assert not finite, f"{bad} at {i} of {size} missed"
                assert not also_finite, f"{bad} at {i} of {size} missed beside the norm"
                assert not np.isfinite(norm)
                assert amax == jnp.inf, f"{bad} at {i} of {size} missed by its size"
                x[i] = kept
        for i in positions:
            kept = x[i]
            x[i] = -8
            finite, amax, _ = check(jnp.array(x))
            assert finite
            assert amax == 8, f"the largest at {i} of {size} missed"
            x[i] = kept


@each_case("platform", "dtype")
def test_finds_what_is_planted_in_any_of_leaves_that_look_alike(platform, dtype):
    check = check_of(platform)
    leaves = np.full((70, 5), jnp.finfo(dtype).max, dtype)
    with jax.enable_x64(True):
        assert check([*leaves])[0], "large numbers are finite, however many"
        for i, bad in itertools.product((0, 1, 34, 69), not_finite(dtype)):
            leaves[i, 3] = bad
            finite, amax, (norm, also_finite) = check([*leaves])
            assert not finite, f"{bad} in leaf {i} missed"
            assert not also_finite, f"{bad} in leaf {i} missed beside the norm"
            assert not np.isfinite(norm)
            assert amax == jnp.inf, f"{bad} in leaf {i} missed by its size"
            leaves[i, 3] = 1
        for i in (0, 33, 69):
            leaves[:] = 1
            leaves[i, 2] = -8
            _, amax, (norm, _) = check([*leaves])
            assert amax == 8, f"the largest in leaf {i} missed"
            np.testing.assert_allclose(norm, np.sqrt(349 + 64), rtol=1e-6)


@each_case("platform", "dtype")
def test_what_is_odd_but_finite_is_finite(platform, dtype):
    with jax.enable_x64(True):
        info = jnp.finfo(dtype)
        extremes = [info.max, info.min, info.tiny, info.smallest_subnormal, -0.0, 0.0]
        x = jnp.asarray(np.asarray(extremes, dtype))
        assert x.dtype == dtype
        finite, amax, (_, also_finite) = check_of(platform)(jnp.tile(x, 1000))
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
    finite, amax, (norm, also_finite) = check_of(platform)([x])
    assert finite == also_finite == np.isfinite(x).all()
    expected = abs(x).max(initial=0) if finite else np.inf
    np.testing.assert_array_equal(amax, np.float32(expected))
    if finite:
        np.testing.assert_allclose(
            norm, np.linalg.norm(x.astype(np.float64)), rtol=1e-5
        )


@each_platform
def test_finds_a_nan_at_every_position_of_a_small_tree(platform):
    check = check_of(platform)
    tree = {
        "a": jnp.ones((3, 2)),
        "b": [jnp.ones(()), None, jnp.ones((0,))],
        "c": jnp.ones(5),
    }
    leaves, treedef = jax.tree.flatten(tree)
    for k, leaf in enumerate(leaves):
        for i in range(leaf.size):
            planted = [
                *leaves[:k],
                leaf.reshape(-1).at[i].set(jnp.nan),
                *leaves[k + 1 :],
            ]
            assert not check(jax.tree.unflatten(treedef, planted))[0]


def test_ignores_what_is_not_a_float():
    float0 = np.zeros(3, jax.dtypes.float0)
    key = jax.random.key(0)
    tree = {
        "none": None,
        "int": jnp.arange(3),
        "bool": True,
        "float0": float0,
        "key": key,
    }
    assert ols.all_finite(tree)
    assert not ols.all_finite(tree | {"float": np.nan})
    assert largest(tree) == 0
    assert largest(tree | {"float": -2.5, "complex": jnp.array([1 - 3j])}) == 3


@pytest.mark.parametrize("tree", [{}, (), None, [None], {"a": jnp.ones((0, 3))}])
def test_a_tree_without_numbers_is_finite(tree):
    flag = ols.all_finite(tree)
    chex.assert_shape(flag, ())
    assert flag.dtype == bool
    assert flag
    amax = largest(tree)
    assert (amax.shape, amax.dtype, amax) == ((), jnp.float32, 0)


@each_platform
def test_evaluates_abstractly_and_under_vmap(platform):
    shape = jax.eval_shape(
        ols.all_finite, {"w": jax.ShapeDtypeStruct((3, 4), jnp.float16)}
    )
    assert (shape.shape, shape.dtype) == ((), bool)
    mapped = lambda f, x: lowered_for(platform, jax.vmap(f))(jnp.array(x))
    members = [[1.0, -2.0], [jnp.inf, 0.0], [3.0, jnp.nan]]
    np.testing.assert_array_equal(mapped(ols.all_finite, members), [True, False, False])
    np.testing.assert_array_equal(mapped(largest, members), [2, np.inf, np.inf])
    norms, flags = mapped(norm_and_all_finite, [[3.0, -4.0], [jnp.inf, 0], [1, 0]])
    np.testing.assert_allclose(norms, [5, np.inf, 1])
    np.testing.assert_array_equal(flags, [True, False, True])


@pytest.mark.parametrize(
    "shapes",
    [
        [()],
        [(3,), (0, 4), ()],
        [(65_536,), (65_537,)],
        [(256, 768), (1000, 131), (7, 3, 50_000)],
        [(18_000_003,)],
        pytest.param([(32, 1_048_576)], marks=pytest.mark.slow),
    ],
    ids=str,
)
@each_platform
def test_the_norm_is_right_of_leaves_of_any_size(platform, shapes):
    """A few running sums take all of a leaf on a CPU, so the norm of a large one is rough."""
    rng = np.random.default_rng(0)
    tree = [rng.uniform(0.5, 1.5, shape).astype(np.float32) for shape in shapes]
    expected = np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in tree))
    measured = lowered_for(platform, norm_and_all_finite, compiler_options=AS_USERS_DO)
    norm, finite = measured([*tree, None, 7])
    assert (norm.dtype, norm.shape, bool(finite)) == (jnp.float32, (), True)
    is_rough = platform == "cpu" and max(x.size for x in tree) > 2**20
    np.testing.assert_allclose(norm, expected, rtol=3e-3 if is_rough else 1e-5)


@pytest.mark.about_cpus
@pytest.mark.parametrize("size", [1_000_003, 2 * 500_009, 3 * 2**18], ids=str)
def test_the_norm_takes_no_memory_of_the_size_of_a_leaf(size):
    """A size that no length of a row divides, as a prime number, is no exception."""
    leaf = jax.ShapeDtypeStruct((size,), jnp.float32)
    compiled = jax.jit(norm_and_all_finite).lower(leaf).compile(AS_USERS_DO)
    assert compiled.memory_analysis().temp_size_in_bytes < size / 100


@each_platform
def test_squares_that_are_more_than_float32_holds_make_the_norm_infinite_and_nothing_else(
    platform,
):
    measured = lowered_for(platform, norm_and_all_finite)
    norm, finite = measured({"w": jnp.array([2.0**70, 1.0])})
    assert norm == jnp.inf
    assert finite
    norm, finite = measured({})
    assert (norm, bool(finite)) == (0, True)
    norm, _ = measured({"complex": jnp.array([3 + 4j]), "half": jnp.float16(12)})
    assert norm == 13


@product(
    axis_type={str(axis): axis for axis in (AxisType.Auto, AxisType.Explicit)},
    dtype=["float16", "bfloat16", "float32", "complex64"],
)
def test_finds_what_is_planted_in_sharded_arrays(dtype, axis_type):
    check = check_of("cpu")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    for spec in (P(), P("data"), P(None, "data")):
        sharding = NamedSharding(mesh, spec)
        x = np.ones((8, 12), dtype)
        finite, amax, (norm, also_finite) = check([jax.device_put(x, sharding)])
        assert finite
        assert also_finite
        assert amax == 1
        assert norm == pytest.approx(96**0.5)
        for bad in not_finite(dtype):
            for i in range(8):  # in every shard of rows, and of columns
                planted = x.copy()
                planted[i, 5 * i % 12] = bad
                finite, amax, (_, also_finite) = check(
                    [jax.device_put(planted, sharding)]
                )
                assert not finite
                assert not also_finite
                assert amax == jnp.inf


@pytest.mark.about_cpus
@pytest.mark.parametrize("check", [ols.all_finite, largest])
def test_devices_exchange_results_and_no_leaves_where_only_in_shardings_places_them(
    check,
):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    shardings = [NamedSharding(mesh, spec) for spec in (P("data"), P(None, "data"))]
    leaves = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * len(shardings)
    lowered = jax.jit(check, in_shardings=(shardings,)).lower(leaves)
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    program = lowered.compile().as_text()
    sent = re.findall(rf" = (.*?) (?:{kinds})(?:-start)?\(", program)
    assert sent
    for lengths in re.findall(r"\w\[([\d,]+)\]", " ".join(sent)):
        assert np.prod([int(n) for n in lengths.split(",")]) <= 4


@pytest.mark.parametrize("no_axis", [None, ()])
def test_without_an_axis_a_flag_is_left_as_it_is(no_axis):
    flag = jnp.array(True)
    assert on_all_replicas(flag, no_axis) is flag


@pytest.mark.parametrize("map_", ["shard_map", "vmap"])
def test_an_axis_named_twice_is_refused(map_):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    check = lambda x: on_all_replicas(ols.all_finite(x), ("data", "data"))
    mapped = {
        "shard_map": jax.shard_map(check, mesh=mesh, in_specs=P("data"), out_specs=P()),
        "vmap": jax.vmap(check, axis_name="data"),
    }
    with pytest.raises(ValueError, match="nor a tuple of such axes without repetition"):
        jax.jit(mapped[map_])(jnp.ones(4))


def test_an_error_of_a_reduction_is_not_blamed_on_the_axis():
    def fails(x, axis_name):
        raise ValueError("out of memory")

    reduced = jax.vmap(lambda x: reduce_replicas(fails, x, "data"), axis_name="data")
    with pytest.raises(ValueError, match=r"^out of memory"):
        reduced(jnp.ones(4))
