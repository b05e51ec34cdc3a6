import copy
import dataclasses
import json
import pickle
import subprocess
import sys
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols


class Cautious(ols.LossScale):
    """A user's strategy: an option and a counter of its own."""

    patience: int = 3
    quiet_steps: jax.Array = ols.state_field(0)
    smoothed: jax.Array = ols.state_field(0.0)

    def adjust(self, grads_finite):
        quiet = jnp.where(grads_finite, self.quiet_steps + 1, 0)
        grows = quiet >= self.patience
        factor = jnp.where(grads_finite, jnp.where(grows, 2.0, 1.0), 0.5)
        return self.replace(
            loss_scale=self() * factor,
            quiet_steps=jnp.where(grows, 0, quiet),
            smoothed=0.9 * self.smoothed + 0.1 * grads_finite,
        )


ALL = [
    ols.FixedLossScale(128),
    ols.DynamicLossScale(initial_scale=1024, growth_interval=2),
    ols.HeadroomLossScale(initial_scale=1024),
    Cautious(initial_scale=1024.0, patience=2),
]
each = pytest.mark.parametrize("ls", ALL, ids=lambda ls: type(ls).__name__)


@each
def test_call_gives_a_float32_scalar(ls):
    for value in (ls(), jax.jit(lambda: ls())(), jax.jit(lambda ls: ls())(ls)):
        assert isinstance(value, jax.Array)
        chex.assert_shape(value, ())
        assert value.dtype == jnp.float32
        assert not value.weak_type
        assert value == ls.initial_scale


@each
def test_is_frozen(ls):
    with pytest.raises(dataclasses.FrozenInstanceError):
        ls.loss_scale = 3.0


@each
def test_state_is_strongly_typed_and_stays_so(ls):
    adjust = jax.jit(lambda ls, finite: ls.adjust(finite))
    after = ls
    for finite in (True, True, False, True, True):
        after = adjust(after, finite)
        chex.assert_trees_all_equal_shapes_and_dtypes(
            after, jax.tree.map(jnp.asarray, ls)
        )
    for leaf in jax.tree.leaves(after):
        assert leaf.dtype in (jnp.float32, jnp.int32, jnp.bool_)
        assert not leaf.weak_type


@each
def test_survives_flattening_whole(ls):
    back = jax.tree.unflatten(jax.tree.structure(ls), jax.tree.leaves(ls))
    assert back == ls
    assert jax.tree.structure(back) == jax.tree.structure(ls)
    assert jax.jit(lambda ls: ls)(ls).get_config() == ls.get_config()
    assert pickle.loads(pickle.dumps(ls)) == ls
    assert copy.deepcopy(ls) == ls


@each
def test_nothing_is_validated_at_unflatten(ls):
    for placeholder in (object(), None, jnp.nan, jnp.ones((3,))):
        jax.tree.map(lambda x, placeholder=placeholder: placeholder, ls)


def test_leaves_are_named_after_their_fields():
    paths = [
        jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_leaves_with_path(ALL[1])
    ]
    assert paths == [
        ".loss_scale",
        ".growth_counter",
        ".hysteresis_left",
        "._exhausted",
    ]


@each
def test_config_round_trip_through_json(ls):
    config = json.loads(json.dumps(ls.get_config()))
    for back in (
        ols.LossScale.from_config(config),
        type(ls).from_config(config),
    ):
        assert back == ls
        assert type(back) is type(ls)


def test_config_is_the_configuration_and_not_the_state():
    ls = ols.DynamicLossScale(
        initial_scale=np.float32(1024), growth_interval=np.int64(2)
    )
    assert ls.adjust(False).get_config() == ls.get_config()
    assert json.loads(json.dumps(ls.get_config()))["config"]["initial_scale"] == 1024


@pytest.mark.parametrize(
    "config",
    [
        {},
        "DynamicLossScale",
        {"class_name": "DynamicLossScale"},
        {"class_name": "LossScale", "config": {}},
        {"class_name": "Nonesuch", "config": {}},
        {"class_name": "DynamicLossScale", "config": None},
        {"class_name": "DynamicLossScale", "config": {"growth": 2}},
        {"class_name": "DynamicLossScale", "config": {"growth_interval": 0}},
        {"class_name": "FixedLossScale", "config": {"initial_scale": 2}},
        {"class_name": "DynamicLossScale", "config": {}, "more": 1},
        {"class_name": [], "config": {}},
    ],
)
def test_a_config_that_no_get_config_made_is_refused(config):
    with pytest.raises(ValueError, match=r"config|named|growth_interval"):
        ols.LossScale.from_config(config)


def test_a_class_makes_only_its_own_kind_from_a_config():
    with pytest.raises(
        ValueError, match=r"'FixedLossScale'.* The known classes are Dyn"
    ):
        ols.DynamicLossScale.from_config(ols.FixedLossScale(1).get_config())


def test_a_class_under_the_name_of_one_of_ours_goes_by_its_module_too():
    class DynamicLossScale(ols.LossScale):
        def adjust(self, grads_finite):
            return self.replace(loss_scale=self() * 2)

    class Renamed(ols.DynamicLossScale):
        pass

    # as `class DynamicLossScale(ols.DynamicLossScale)`
    Renamed.__name__ = "DynamicLossScale"
    ours = ols.DynamicLossScale().get_config()
    assert type(ols.LossScale.from_config(ours)) is ols.DynamicLossScale
    assert type(ols.DynamicLossScale.from_config(ours)) is ols.DynamicLossScale
    for theirs in (DynamicLossScale(8.0), Renamed(8.0)):
        config = json.loads(json.dumps(theirs.get_config()))
        assert config["class_name"].startswith(f"{__name__}.test_a_class_under")
        assert ols.LossScale.from_config(config) == theirs


def test_the_last_class_of_a_name_has_it():
    def define(factor):
        class Redefined(ols.LossScale):
            def adjust(self, grads_finite):
                return self.replace(loss_scale=self() * factor)

        return Redefined

    first, last = define(1), define(2)
    assert type(ols.LossScale.from_config(first().get_config())) is last


def test_adjust_is_what_a_strategy_must_write():
    with pytest.raises(TypeError, match="adjust"):
        ols.LossScale()


def test_a_strategy_of_ones_own_follows_its_rule_in_a_scan():
    ls = Cautious(initial_scale=8.0, patience=2)
    _, scales = jax.lax.scan(
        lambda ls, finite: (ls.adjust(finite), ls.adjust(finite)()),
        ls,
        jnp.array([True, True, True, False, True, True]),
    )
    np.testing.assert_array_equal(scales, [8, 16, 16, 8, 8, 16])


def test_a_state_field_may_be_an_array_of_any_shape_and_dtype():
    class Remembering(ols.LossScale):
        last: jax.Array = ols.state_field(jnp.zeros(3))
        seen: jax.Array = ols.state_field(np.float16(2))

        def adjust(self, grads_finite):
            return self.replace(last=jnp.roll(self.last, 1).at[0].set(grads_finite))

    ls = Remembering().adjust(True)
    np.testing.assert_array_equal(ls.last, [1, 0, 0])
    assert (ls.last.dtype, ls.seen.dtype) == (jnp.float32, jnp.float16)


def test_state_is_no_argument_of_the_constructor_whatever_init_says():
    class Counting(ols.LossScale):
        steps: jax.Array = ols.state_field(0, init=True)

        def adjust(self, grads_finite):
            return self.replace(steps=self.steps + 1)

    with pytest.raises(TypeError, match="steps"):
        Counting(steps=3)
    assert Counting().get_config()["config"] == {"initial_scale": 2.0**15}


def test_replace_keeps_dtypes_and_knows_its_fields():
    ls = Cautious().replace(quiet_steps=2.0, smoothed=1)
    assert (ls.quiet_steps.dtype, ls.smoothed.dtype) == (jnp.int32, jnp.float32)
    with pytest.raises(
        TypeError, match="no state patience; its state fields are loss_scale"
    ):
        ls.replace(patience=4)


@pytest.mark.parametrize(
    "bad", [0, -1, np.inf, -np.inf, np.nan, True, "8", None, 1e39, 1e-39, 10**400]
)
def test_an_initial_scale_that_is_no_positive_finite_number_is_refused(bad):
    with pytest.raises(
        ValueError, match=r"initial_scale must be a number between .* got "
    ):
        Cautious(initial_scale=bad)


def test_a_subclass_with_another_default_keeps_the_check():
    class Slow(ols.DynamicLossScale):
        initial_scale: float = 2.0**10
        growth_interval: int = 5000

    assert (Slow()(), Slow().growth_interval) == (2**10, 5000)
    for name in ("initial_scale", "growth_interval"):
        with pytest.raises(ValueError, match=f"{name} must be .* got 0"):
            Slow(**{name: 0})


def test_construction_needs_no_backend(tmp_path):
    """A module may build its optimizer before jax.distributed.initialize."""
    code = (
        "import jax, optax, optax_lossscale as ols\n"
        "ols.with_loss_scale(optax.adam(1e-3))\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # an error after the first computation\n"
        "assert jax.device_count() == 3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


# scale and unscale


TREE = {
    "f16": jnp.array([1.0, 2.0], jnp.float16),
    "bf16": jnp.array(3.0, jnp.bfloat16),
    "f32": jnp.array([[0.5]]),
    "f8": jnp.array([1.0], jnp.float8_e4m3fn),
    "c64": jnp.array(1 + 2j, jnp.complex64),
    "int": jnp.arange(2),
    "bool": jnp.array(True),
    "none": None,
    "float0": np.zeros(2, jax.dtypes.float0),
    "numpy": np.array([4.0], np.float16),
    "python": 0.25,
}


@each
@pytest.mark.parametrize("method", ["scale", "unscale"])
def test_floats_are_scaled_in_float32_or_wider_and_all_else_passes_through(ls, method):
    factor = ls.initial_scale if method == "scale" else 1 / ls.initial_scale
    out = getattr(ls, method)(TREE)
    assert jax.tree.structure(out) == jax.tree.structure(TREE)
    for name in ("int", "bool", "none", "float0"):
        assert out[name] is TREE[name]
    for name in ("f16", "bf16", "f32", "f8", "numpy", "python"):
        assert out[name].dtype == jnp.float32
        assert not out[name].weak_type
        np.testing.assert_array_equal(
            out[name], np.float32(TREE[name]) * np.float32(factor)
        )
    assert out["c64"] == (1 + 2j) * factor


def test_float64_keeps_its_precision():
    with jax.enable_x64(True):
        x = jnp.array(1 / 3, jnp.float64)
        out = ols.FixedLossScale(128).unscale(
            ols.FixedLossScale(64).scale([x, jnp.array(1j)])
        )
        assert [o.dtype for o in out] == [jnp.float64, jnp.complex128]
        assert out[0] == x / 2
        third = ols.DynamicLossScale(initial_scale=3.0)
        np.testing.assert_allclose(third.unscale(third.scale(x)), x, rtol=1e-15)


@pytest.mark.parametrize(
    ("scale", "x"),
    [
        (scale, x)
        for scale in (2.0**60, 1000.0, 0.1, 2.0**-60)
        for x in (1.0, 2.0**125, 1e38, 1e-10)
        if 2.0**-126 <= x / scale <= 3.4e38
    ],
)
def test_no_scale_is_too_large_or_small_to_unscale_by(scale, x):
    ls = ols.DynamicLossScale(initial_scale=scale, min_scale=scale)
    unscaled = jax.jit(lambda ls, x: ls.unscale(x))(ls, jnp.full((100,), x))
    np.testing.assert_allclose(unscaled, x / scale, rtol=3e-7)


@pytest.mark.parametrize("log2", [-60, -20, -1, 0, 1, 15, 24, 60])
def test_powers_of_two_unscale_exactly(log2):
    ls = ols.DynamicLossScale(initial_scale=2.0**log2, min_scale=None)
    g = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    scaled = jax.jit(lambda ls, g: ls.scale(g))(ls, g)
    np.testing.assert_array_equal(jax.jit(lambda ls, g: ls.unscale(g))(ls, scaled), g)


def test_unscaling_float16_does_not_underflow_again():
    smallest = jnp.array([2.0**-24], jnp.float16)
    assert ols.FixedLossScale(2**15).unscale(smallest) == 2.0**-39


# update


@each
def test_update_looks_at_the_gradients(ls):
    new, should_apply = ls.update({"w": jnp.ones(3), "b": None})
    assert should_apply
    new, should_apply = ls.update({"w": jnp.array([1.0, jnp.nan]), "b": None})
    if isinstance(ls, ols.FixedLossScale):
        assert should_apply is True
        assert new == ls
    else:
        assert not should_apply
        assert new() < ls()
        chex.assert_trees_all_close(new, jax.tree.map(jnp.asarray, ls.adjust(False)))


@each
def test_update_compiles_once_and_evaluates_abstractly(ls):
    grads = {"w": jnp.ones(3)}

    @jax.jit
    @chex.assert_max_traces(n=1)
    def update(ls, grads):
        return ls.update(grads)

    after = ls
    for _ in range(4):
        after, _ = update(after, grads)
    shapes, _ = jax.eval_shape(lambda ls: (ls.update(grads)[0], 0), ls)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, after)


def test_a_population_under_vmap_adapts_each_by_its_own_gradients():
    ls = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 3), ALL[1])
    grads = jnp.array([[1.0], [jnp.inf], [2.0]])
    ls, should_apply = jax.vmap(lambda ls, g: ls.update(g))(ls, grads)
    np.testing.assert_array_equal(should_apply, [True, False, True])
    np.testing.assert_array_equal(ls.loss_scale, [1024, 512, 1024])


OURS = [ls for ls in ALL if not isinstance(ls, Cautious)]


@pytest.mark.parametrize("ls", OURS, ids=repr)
def test_a_step_needs_no_implicit_promotion(ls):
    """Real or complex, under `jax.numpy_dtype_promotion("strict")`."""
    grads = {"w": jnp.ones(2), "half": jnp.ones(2, jnp.float16)}
    grads["complex"] = jnp.ones(2, jnp.complex64)
    with jax.numpy_dtype_promotion("strict"):
        scaled = jax.jit(type(ls).scale)(ls, grads)
        unscaled = jax.jit(type(ls).unscale)(ls, scaled)
        new, _ = jax.jit(type(ls).update)(ls, unscaled)
        jax.jit(type(ls).adjust)(new, True)
    assert unscaled["complex"].dtype == jnp.complex64
    assert all(jnp.all(x == 1) for x in jax.tree.leaves(unscaled))


@pytest.mark.parametrize(
    "bad",
    [0, -1.0, float("nan"), float("inf"), 1e39],
)
def test_no_scale_can_be_set_that_none_may_start_with(bad):
    with pytest.raises(ValueError, match="loss_scale must be a number between"):
        Cautious().replace(loss_scale=bad)
    assert Cautious().replace(loss_scale=8)() == 8
    assert Cautious().replace(loss_scale=np.float32(8))() == 8
    assert Cautious().replace(loss_scale=jnp.bfloat16(8))() == 8


def test_state_of_64_bits_is_one_of_32_from_the_first_step_on():
    class Wide(ols.LossScale):
        sums: jax.Array = ols.state_field(np.zeros(2))

        def adjust(self, grads_finite):
            return self.replace(sums=self.sums + 1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Wide().adjust(True).sums.dtype == jnp.float32


class Wild(ols.LossScale):
    """Leaves every range."""

    factor: float = 1e30

    def adjust(self, grads_finite):
        return self.replace(loss_scale=self.loss_scale * self.factor)


@pytest.mark.parametrize(
    ("factor", "bound"), [(1e30, 2.0**60), (1e-30, 2.0**-60)], ids=["up", "down"]
)
def test_a_scale_beyond_the_bounds_is_brought_back(factor, bound):
    ls = Wild(factor=factor)
    updated, _ = ls.update(jnp.ones(2))
    assert updated() == bound
    params = jnp.ones(2)
    for skip in ("nonfinite", None):
        tx = ols.with_loss_scale(optax.adam(0.1), ls, skip=skip)
        state = tx.init(params)
        step = jax.jit(lambda s, p, tx=tx: tx.minimize(lambda p: jnp.sum(p**2), s, p))
        for _ in range(3):
            _, params, state = step(state, params)
            assert state.should_apply
            assert state.loss_scale() == bound
    assert jnp.isfinite(params).all()
