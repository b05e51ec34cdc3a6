"""What a page says where numbers alone mislead: masks, choices, kernels and loops."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback, pallas

import optax_lossscale as ols
from optax_lossscale._diagnosis import old_dtypes

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
FREQUENCIES = np.linspace(5.0, 7.77, 8, dtype=np.float16)
POSITIONS = jnp.arange(1024.0, 1040.0)


def line_of(function, after):
    """`test_verdicts.py:12 ` of a line so many after that of the function's head."""
    return f"test_verdicts.py:{function.__code__.co_firstlineno + after} "


def test_a_mask_before_what_overflows_does_not_make_it_infinite_in_float32():
    mask = np.tri(4, dtype=bool)

    def loss_fn(w, x):
        scores = jnp.where(mask, x * w.astype(F16), -jnp.inf)
        large = scores * F16(2000)
        return jnp.mean(jax.nn.softmax(large.astype(F32), -1)[:, 0] * x[:, 0])

    x = jnp.linspace(50, 100, 16).astype(F16).reshape(4, 4)
    found = ols.diagnose(loss_fn, jnp.ones(()), x)
    assert np.isfinite(found.loss_in_float32)
    assert "in float32 either" not in found.verdict
    assert line_of(loss_fn, 2) in found.verdict


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_numbers_that_float64_alone_holds_make_no_warning():
    def loss_fn(w, x):
        large = jnp.exp(jnp.minimum(lax.stop_gradient(w) * x, 200))
        finite = jnp.where(large > 1e30, 0, large)
        rounded = w.astype(F16) + F16(1000) - F16(1000)
        return jnp.mean(jnp.tanh(finite)) * 1e-3 + jnp.mean(rounded.astype(F32))

    found = ols.diagnose(loss_fn, jnp.linspace(0.1, 1, 64), jnp.linspace(1, 300, 64))
    assert found.off["the loss"] < 0.05


def added_up(total, x):
    return total + (x * F16(2) + F16(100)).astype(F32), None


def by_scan(w, positions):
    phases = jnp.sin(positions[:, None].astype(F16) * FREQUENCIES)
    return jnp.mean(lax.scan(added_up, jnp.zeros(8), phases)[0] * w)


def by_python(w, positions):
    total = jnp.zeros(8)
    for phases in jnp.sin(positions[:, None].astype(F16) * FREQUENCIES):
        total, _ = added_up(total, phases)
    return jnp.mean(total * w)


@pytest.mark.parametrize("loss_fn", [by_scan, by_python])
def test_an_intermediate_value_is_wrong_whatever_loop_reads_it(loss_fn):
    found = ols.diagnose(loss_fn, jnp.ones(8), POSITIONS)
    assert "wrong intermediate values" in found.verdict
    share = f"{found.wrong[0].off:.1%}"
    assert f"an intermediate value  {share} of its elements are off  " in str(found)


def by_callback(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(
        lambda x: np.asarray(x) * np.float16(0.5), shape, x, vmap_method="broadcast_all"
    )


def by_pallas(x):
    def halve(x, out):
        out[...] = x[...] * F16(0.5)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(halve, shape, interpret=True)(x)


def in_rounds(kernel, x):
    return lax.scan(lambda c, _: (kernel(c), c), x, None, 4)[1]


def while_large(kernel, x):
    return jax.vmap(lambda x: lax.while_loop(lambda c: c > 0.3, kernel, x))(x)


@pytest.mark.parametrize(
    ("loop", "kernel"),
    [(in_rounds, by_callback), (in_rounds, by_pallas), (while_large, by_callback)],
)
def test_a_loop_may_carry_what_a_kernel_computes(loop, kernel):
    def loss_fn(w, x):
        return jnp.mean(w * loop(kernel, x).astype(F32))

    found = ols.diagnose(loss_fn, jnp.ones(()), jnp.array([1.0, 2.0, 0.1], F16))
    assert found.not_compared
    assert found.loss == found.loss_in_float32


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize(
    "stacks_inside", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_what_a_loop_stacks_may_cross_the_border_of_a_shard_map(stacks_inside):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def stacked(x):
        return lax.scan(lambda c, x: (c, x * F16(2)), 0.0, x)[1]

    def summed(x):
        return lax.scan(lambda c, x: (c + x, None), jnp.zeros_like(x[0]), x)[0][None]

    def loss_fn(w, x):
        each = jax.shard_map(
            stacked if stacks_inside else summed,
            mesh=mesh,
            in_specs=jax.P("i"),
            out_specs=jax.P("i"),
            check_vma=False,
        )
        x = w.astype(F16) * x
        x = summed(each(x)) if stacks_inside else each(stacked(x))
        return jnp.sum(x.astype(F32))

    found = ols.diagnose(loss_fn, jnp.ones(8), jnp.linspace(0.1, 1, 8).astype(F16))
    assert found.verdict.startswith("float16 is fine")
    assert found.loss_in_float32 == pytest.approx(8.8, rel=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_a_shard_map_may_be_inside_of_another():
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 1), ("a", "b"), axis_types=(auto, auto))

    def inner(x):
        c, ys = lax.scan(lambda c, x: (c + x, c * x), jnp.zeros_like(x[0]), x)
        return lax.psum(c, "b") + lax.cond(ys[0, 0] > 0, jnp.sin, jnp.cos, ys[1])

    def outer(x):
        each = jax.shard_map(
            inner,
            in_specs=jax.P(None, "b"),
            out_specs=jax.P(),
            axis_names={"b"},
            check_vma=False,
        )
        return each(x) * F16(2)

    def loss_fn(w, x):
        each = jax.shard_map(
            outer,
            mesh=mesh,
            in_specs=jax.P("a"),
            out_specs=jax.P("a"),
            axis_names={"a"},
            check_vma=False,
        )
        return jnp.sum(each(w.astype(x.dtype) * x).astype(F32) ** 2)

    args = jnp.ones((6, 4)), jnp.linspace(0.1, 1, 24).reshape(6, 4).astype(F16)
    found = ols.diagnose(loss_fn, *args)
    assert found.loss == jax.jit(loss_fn)(*args)
    assert found.verdict.startswith("float16 is fine")
    assert 0 < found.off["."] < 0.01
    assert any(row.iterations for row in found.table.rows)


def test_gradients_in_float64_alone_do_not_overflow():
    with jax.enable_x64(True):
        found = ols.diagnose(lambda w: jnp.sum(w**2), jnp.ones(3, np.float64))
    assert found.overflow is None
    assert found.verdict.startswith("Nothing is computed in 16 bits")


def test_what_is_mostly_in_float32_is_not_said_to_be_hardly_in_16_bits():
    def loss_fn(params, x):
        y = jnp.tanh(x.astype(F16) @ params["a"].astype(F16))
        return square(y @ params["b"])

    params = {"a": jnp.eye(32), "b": jnp.eye(32)}
    found = ols.diagnose(loss_fn, params, jnp.full((8, 32), 0.1))
    assert found.verdict.startswith("Less than half is computed in 16 bits: 60.0% of")


def test_products_that_are_to_be_in_float32_do_not_count_as_widened():
    def loss_fn(params, x):
        wide = jnp.matmul(x, params["a"], precision="highest")
        mixed = x[:1, :4].astype(F16) @ params["b"]
        return square(wide) + square(mixed)

    params = {"a": jnp.eye(32), "b": jnp.eye(4)}
    found = ols.diagnose(loss_fn, params, jnp.full((8, 32), 0.1))
    assert found.dtypes.shares[np.dtype(F32)] > 0.8
    assert "16 bits:" not in found.verdict


def test_every_dtype_that_is_fine_is_named():
    def loss_fn(params, x):
        y = (x.astype(BF16) @ params["a"].astype(BF16)).astype(F16)
        return square(y @ params["b"].astype(F16))

    params = {"a": jnp.eye(8), "b": jnp.eye(8)}
    found = ols.diagnose(loss_fn, params, jnp.full((4, 8), 0.5))
    assert found.verdict.startswith("bfloat16 and float16 are fine as they are")


def test_a_difference_of_equal_numbers_is_no_underflow():
    def loss_fn(w, target):
        apart = w.astype(F16) - target.astype(F16)
        return jnp.mean(jnp.square(apart).astype(F32))

    w = jnp.linspace(1, 2, 64).astype(F16).astype(F32)
    nearly_met = jnp.where(jnp.arange(64) % 4 == 0, 1e-4, 1.0)
    found = ols.diagnose(loss_fn, w, w + nearly_met)
    assert not any("scale fits" in verdict for verdict in [found.verdict])
    assert found.underflow == {}


@pytest.mark.parametrize("gradient", [2.0**-20, 1.1e-6])
def test_a_small_gradient_in_float32_is_not_lost_to_float16(gradient):
    def loss_fn(params, x):
        y = params["half"].astype(F16) * x
        return jnp.mean(y.astype(F32)) + jnp.sum(params["single"]) * gradient

    params = {"half": jnp.ones(8), "single": jnp.ones(8)}
    found = ols.diagnose(loss_fn, params, jnp.ones(8, F16))
    assert found.underflow == {}
    assert found.verdict.startswith("float16 is fine")


def test_an_exponential_does_not_saturate_at_large_values():
    def loss_fn(params, x):
        first = jnp.exp(x * params["v"].astype(F16))
        return square(jnp.exp(x * params["w"].astype(F16)) - first)

    params = {"w": F32(1), "v": F32(1.0004)}
    found = ols.diagnose(loss_fn, params, jnp.linspace(2, 3, 64).astype(F16))
    assert found.wrong
    assert all(one.how != "saturates" for one in found.wrong)


def test_a_sigmoid_at_both_limits_saturates():
    def loss_fn(w, x):
        gate = jax.nn.sigmoid(x.astype(F16) * w.astype(F16))
        return -jnp.mean(jnp.log(1 - gate).astype(F32))

    found = ols.diagnose(loss_fn, jnp.ones(()), jnp.linspace(-20, 9, 64))
    assert found.wrong[0].how == "saturates"
    assert line_of(loss_fn, 1) in found.verdict


PASSED_ON = {
    "clipped": lambda y: jnp.clip(y, 1e-7, 1 - 1e-7),
    "widened and squared": lambda y: y.astype(F32) ** 2,
    "squared": lambda y: y * y,
}


@pytest.mark.parametrize("pass_on", PASSED_ON.values(), ids=PASSED_ON)
def test_a_limit_that_is_passed_on_is_that_of_the_function_that_has_it(pass_on):
    def loss_fn(w, x):
        y = jnp.tanh(x.astype(F16) * w.astype(F16))
        return -jnp.mean(jnp.log(1 - pass_on(y).astype(F32)))

    found = ols.diagnose(loss_fn, jnp.ones(()), jnp.linspace(0.1, 6, 64))
    assert found.wrong[0].how == "saturates"
    assert line_of(loss_fn, 1) in found.verdict


def test_a_difference_in_float32_that_is_0_is_not_said_to_vanish():
    def loss_fn(w, x):
        y = (1 / (1 + jnp.exp(-x * w))).astype(F16)
        return -jnp.mean(jnp.log(1 - y.astype(F32)))

    found = ols.diagnose(loss_fn, jnp.ones(()), jnp.linspace(0.1, 12, 64))
    assert found.wrong[0].how == "cancels"
    assert line_of(loss_fn, 1) in found.advice[0]


@pytest.mark.parametrize("cast_back", [True, False])
def test_what_is_off_a_little_in_each_round_is_named_where_it_is_rounded(cast_back):
    def loss_fn(w, x, rewards):
        def step(c, reward):
            discounted = F32(0.999) * c.astype(F32)
            if cast_back:
                c = (reward + discounted).astype(BF16)
            else:
                c = reward.astype(BF16) + discounted.astype(BF16)
            return c, c

        _, returns = lax.scan(step, jnp.zeros(16, BF16), rewards)
        return square(x.astype(BF16) @ w.astype(BF16) - returns)

    rewards = 0.1 + 0.01 * np.random.default_rng(0).normal(size=(400, 16))
    x = np.random.default_rng(1).normal(size=(400, 16, 8))
    found = ols.diagnose(loss_fn, jnp.ones(8) / 3, F32(x), F32(rewards))
    (place,) = {one.place for one in found.wrong[:1]}
    assert place.dtype == BF16
    assert line_of(loss_fn, 4 if cast_back else 6) in place.source
    assert found.wrong[0].how == ("rounds" if cast_back else "stagnates")


@pytest.mark.parametrize(
    ("wide", "dtype", "size"), [(F16, jnp.float8_e4m3fn, 10.0), (BF16, F16, 300.0)]
)
def test_a_cast_to_a_dtype_of_less_range_overflows(wide, dtype, size):
    def loss_fn(w, x):
        y = x.astype(wide) * w.astype(wide)
        y = y.astype(dtype)
        return square(y.astype(F32) / 300)

    found = ols.diagnose(loss_fn, jnp.full(8, size), jnp.linspace(1, 300, 8))
    assert found.wrong[0].place.primitive == "convert_element_type"
    assert line_of(loss_fn, 2) in found.wrong[0].place.source


def test_what_is_at_its_limit_in_float32_too_does_not_saturate():
    def loss_fn(params, x):
        first = jnp.tanh(x * params["v"].astype(F16))
        return square(jnp.tanh(x * params["w"].astype(F16)) - first)

    x = jnp.concatenate([jnp.full(1, 20.0), jnp.linspace(0.1, 0.3, 63)])
    params = {"w": F32(1), "v": F32(1.003)}
    found = ols.diagnose(loss_fn, params, x.astype(F16))
    assert found.wrong
    assert all(one.how != "saturates" for one in found.wrong)


def square(x):
    return jnp.mean(x.astype(F32) ** 2)


def test_a_floor_that_is_0_in_float32_alone_does_not_vanish():
    def loss_fn(params, x):
        whole = jnp.floor(x.astype(F16)).astype(F32)
        return jnp.mean(params["w"] * whole) + 1 + jnp.mean(params["v"])

    params = {"w": jnp.ones(4), "v": jnp.ones(4)}
    found = ols.diagnose(loss_fn, params, jnp.full(4, 0.99999))
    (of_w, of_loss) = sorted(found.wrong, key=lambda one: one.name == "the loss")
    assert of_w.how != "vanishes"
    assert of_loss.how != "vanishes"
    assert "not finite" not in str(found)
    assert of_w.off == 1.0


def test_a_parameter_may_have_the_name_of_an_intermediate_value():
    @jax.custom_vjp
    def rounded(x):
        return x

    def backward(x, cotangent):
        wave = jnp.sin(x.astype(F16) * F16(1000)).astype(F32)
        return (cotangent.astype(F32) * wave,)

    rounded.defvjp(lambda x: (x, x), backward)

    def loss_fn(params, x):
        w = params["an intermediate value"]
        return jnp.mean(rounded(w * x)) + 1 + 0 * jnp.sum(w.astype(F16))

    params = {"an intermediate value": jnp.linspace(1, 2, 64)}
    found = ols.diagnose(loss_fn, params, jnp.full(64, 1.1))
    assert "gives wrong gradients" in found.verdict
    assert found.wrong[0].name == "an intermediate value (argument 0)"


def test_a_loss_that_is_constant_is_right():
    def loss_fn(w, x):
        return F32(3) + 0 * lax.stop_gradient(jnp.sum(w.astype(F16) * x)) * 0

    for function in (loss_fn, lambda w, x: (w.astype(F16) * x, F32(3))[1]):
        found = ols.diagnose(function, jnp.ones(4), jnp.ones(4, F16))
        assert "rounding" not in found.verdict
        assert found.off["the loss"] == 0.0


@pytest.mark.parametrize("name", ["block", "body", "cond", "while", "my layer", "a:b"])
def test_a_scope_of_the_users_may_have_any_name(name):
    def loss_fn(w, x):
        with jax.named_scope(name):
            y = w.astype(F16) * x * F16(3e4)
        return jnp.mean(y.astype(F32))

    found = ols.diagnose(loss_fn, jnp.full(4, 10.0), jnp.ones(4, F16))
    assert found.wrong[0].place.layer == name


def test_the_names_that_jax_gives_to_loops_are_no_layers():
    def loss_fn(w, x):
        def body(c, w):
            c = lax.cond(c.sum() > 0, lambda c: c * w.astype(F16), lambda c: c, c)
            return c * F16(300), None

        with jax.named_scope("block"):
            return jnp.mean(lax.scan(jax.checkpoint(body), x, w)[0].astype(F32))

    found = ols.diagnose(loss_fn, jnp.ones((3, 4)), jnp.ones(4, F16))
    assert {row.layer for row in found.table.rows if "cond" in row.layer} == set()
    assert found.wrong[0].place.layer == "block"


def test_a_choice_has_a_row_of_its_own_magnitudes():
    def loss_fn(w, x):
        values, indices = lax.top_k(x * w.astype(F16), 2)
        return jnp.mean(values.astype(F32)) + 0 * indices.sum()

    found = ols.diagnose(loss_fn, jnp.ones(()), jnp.arange(8, dtype=F16) * 100)
    largest = {
        str(row.dtype): row.largest
        for row in found.table.rows
        if row.primitive == "top_k"
    }
    assert largest == {"float16": 700.0, "int32": 0.0}


def test_results_of_one_dtype_have_a_row_each():
    def loss_fn(w, x):
        keys, values = lax.sort((x * w.astype(F16), x * F16(3)), num_keys=1)
        return jnp.mean((keys + values).astype(F32))

    found = ols.diagnose(loss_fn, jnp.ones(()), jnp.arange(8, dtype=F16) + 1)
    rows = [row.largest for row in found.table.rows if row.primitive == "sort"]
    assert rows[:2] == [8.0, 24.0]


def test_a_round_without_a_layer_begins_its_cell():
    def loss_fn(w, x):
        total, _ = lax.scan(lambda c, x: (c + jnp.sin(x), None), F16(0), x)
        return jnp.mean(w) * total.astype(F32)

    table = str(ols.diagnose(loss_fn, jnp.ones(4), jnp.ones(4, F16)).table)
    assert ", 0" not in table


def test_gradients_that_are_off_at_1_alone_ask_for_a_scale():
    def loss_fn(params, x):
        """The cotangent is subnormal, and so rounds, but no gradient is lost."""
        y = x.astype(F16) @ params["w"].astype(F16)
        return 2.8e-3 * jnp.mean(y.astype(F32))

    params = {"w": jnp.ones((8, 4))}
    x = jnp.linspace(0.5, 1.5, 2**17).reshape(-1, 8)
    found = ols.diagnose(loss_fn, params, x)
    assert found.underflow == {}
    assert found.off["w"] < 0.05 < found.off_unscaled["w"]
    assert re.fullmatch(
        r"Without a loss scale of about 2\*\*\d+, the gradient of w differs from "
        r"float32 by \d+\.\d%\.",
        found.verdict,
    )
    assert found.advice[0].startswith("Wrap the optimizer")

    state = ols.with_loss_scale(optax.sgd(0.1), ols.FixedLossScale(1)).init(params)
    found = ols.diagnose(loss_fn, params, x, opt_state=state)
    assert found.verdict == "Gradients underflow at your loss scale of 1."


def test_rows_of_a_table_that_no_one_looks_up_hide_no_underflow():
    def loss_fn(w, x):
        rows = w.astype(F16)[jnp.arange(8)]
        return jnp.mean((rows * x).astype(F32)) * 2e-6

    found = ols.diagnose(loss_fn, jnp.ones((4000, 4)), jnp.ones((8, 1), F16))
    assert found.underflow["all"].lost == 1.0
    assert found.verdict.startswith("Without a loss scale, float16 loses 100.0%")


def test_a_cast_before_what_needs_digits_is_named():
    def loss_fn(w, days):
        days = days.astype(F16)
        phases = days * F16(0.9)
        return jnp.mean(jnp.cos(phases).astype(F32) * w)

    found = ols.diagnose(loss_fn, jnp.ones(64), 19000 + jnp.arange(64.0))
    assert "cos at " in found.verdict
    assert line_of(loss_fn, 1) in found.advice[0]


@pytest.mark.slow
def test_biases_that_are_normalized_away_need_no_scale_beside_others_that_do_not():
    def loss_fn(params, x):
        for layer in params[:-1]:
            x = x.astype(F16) @ layer["w"].astype(F16) + layer["b"].astype(F16)
            x = x.astype(F32)
            x = jax.nn.relu((x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5))
        out = x.astype(F16) @ params[-1]["w"].astype(F16) + params[-1]["b"].astype(F16)
        return jnp.mean((out.astype(F32) - 1) ** 2)

    def drawn(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape)

    sizes = [16, 32, 4]
    params = [
        {"w": drawn(n, a, b) / a**0.5, "b": jnp.zeros(b)}
        for n, (a, b) in enumerate(itertools.pairwise(sizes))
    ]
    found = ols.diagnose(loss_fn, params, drawn(9, 32, 16))
    assert "0/b" not in found.off
    assert "scale fits" not in found.verdict
    assert all(group.left < 0.01 for group in found.underflow.values())


# --- `dtype_report` ---


def split_after(x, w):
    return [part @ w for part in jnp.split(x.astype(F32), 3, axis=1)]


def called_after(x, w):
    return jax.jit(jnp.matmul)(x.astype(F32), w)


@pytest.mark.parametrize(
    ("function", "rows", "widened"), [(split_after, 4, 3), (called_after, 12, 1)]
)
def test_an_operand_that_was_widened_far_away_is_known(function, rows, widened):
    report = old_dtypes.dtype_report(
        function, jnp.ones((4, 12), F16), jnp.ones((rows, 4))
    )
    assert sum(p.count for p in report.products if p.is_widened) == widened


@pytest.mark.parametrize("dtype", [F16, F32])
def test_what_runs_once_is_said_to_be_the_same_in_float32(dtype):
    def loss_fn(w, x):
        read = io_callback(lambda: np.ones(8, dtype), jax.ShapeDtypeStruct((8,), dtype))
        return jnp.mean((w.astype(F16) * x).astype(F32) * read)

    found = ols.diagnose(loss_fn, jnp.ones(8), jnp.ones(8, F16))
    ((operation, line),) = found.not_compared
    assert operation == "io_callback"
    page = " ".join(str(found).split())
    expected = (
        f"Not compared with float32: io_callback at {line}, which runs once, and gives "
        "float32 the same results."
    )
    assert expected in page


@pytest.mark.parametrize(
    ("number", "what_it_does"), [(np.inf, "overflows"), (np.nan, "is undefined")]
)
def test_what_a_callback_in_float32_makes_infinite_is_so_in_float32(
    number, what_it_does
):
    def loss_fn(w, x):
        like = jax.ShapeDtypeStruct((8,), F32)
        read = io_callback(lambda: np.full(8, number, np.float32), like)
        return jnp.mean((w.astype(F16) * x).astype(F32) + read)

    found = ols.diagnose(loss_fn, jnp.ones(8), jnp.ones(8, F16))
    assert found.wrong[0].is_in_float32
    assert found.wrong[0].how == what_it_does
    assert found.verdict.startswith(
        "No loss scale helps: the loss is not finite in float32 either"
    )
    assert "Pass float32 to io_callback" not in str(found)


def test_an_overflow_that_a_callback_passes_on_is_found():
    def loss_fn(w, x):
        y = (lax.stop_gradient(w).astype(F16) * x).astype(F32)
        y = io_callback(lambda y: y, jax.ShapeDtypeStruct(y.shape, F32), y)
        return jnp.mean(y) + jnp.mean(w)

    found = ols.diagnose(loss_fn, jnp.full(8, 1e3), jnp.full(8, 1e3, F16))
    assert found.wrong[0].how == "overflows"
    assert found.wrong[0].place.primitive == "mul"
    assert "in float32 either" not in found.verdict


def test_what_a_kernel_makes_infinite_is_not_said_to_be_so_in_float32():
    def large(x):
        return jax.pure_callback(
            lambda x: np.full_like(x, np.inf), jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )

    def loss_fn(w, x):
        y = large(lax.stop_gradient(x * w))
        return jnp.mean(y.astype(F32)) + jnp.mean(w.astype(F32))

    found = ols.diagnose(loss_fn, jnp.ones(4, F16), jnp.ones(4, F16))
    assert found.wrong[0].how == "is a kernel"
    assert "in float32" not in found.verdict


def test_gradients_that_a_kernel_makes_infinite_are_not_said_to_be_finite_in_float32():
    @jax.custom_vjp
    def spoiled(x):
        return x

    def backward(_, cotangent):
        like = jax.ShapeDtypeStruct(cotangent.shape, cotangent.dtype)
        return (jax.pure_callback(lambda x: np.full_like(x, np.inf), like, cotangent),)

    spoiled.defvjp(lambda x: (x, None), backward)

    def loss_fn(w, x):
        return jnp.mean(spoiled(w * x).astype(F32))

    found = ols.diagnose(loss_fn, jnp.ones(4, F16), jnp.ones(4, F16))
    assert found.wrong[0].how == "is a kernel"
    assert found.verdict.startswith("The gradient of . is not finite at any loss scale")
    assert "in float32" not in found.verdict


def test_a_number_beside_the_parameters_is_no_parameter_and_widens_nothing():
    """As the rate of a dropout, in modules whose floats are leaves."""

    def loss_fn(params, x):
        y = x @ params["w"] * params["scale"]
        assert y.dtype == F16
        return jnp.mean(y.astype(F32)) if params["scale"] > 0 else F32(0)

    params = {"w": jnp.ones((16, 16), F16), "scale": 300.0}
    found = ols.diagnose(loss_fn, params, jnp.full((4, 16), 30, F16))
    assert np.isinf(found.loss)
    assert np.isfinite(found.loss_in_float32)
    assert found.wrong[0].how == "overflows"


@pytest.mark.parametrize(
    ("scale", "is_fine"), [(2.0**-20, False), (1.0, True), (2.0**8, True)]
)
def test_a_loss_scale_at_which_nothing_is_lost_is_fine(scale, is_fine):
    def loss_fn(w, x):
        return jnp.mean((x @ w).astype(F32)) * 16

    w = jnp.ones((16, 16), F16)
    state = ols.with_loss_scale(optax.sgd(0.1), ols.FixedLossScale(scale)).init(w)
    found = ols.diagnose(loss_fn, w, jnp.ones((4, 16), F16), opt_state=state)
    assert (found.advice == ["Nothing."]) == is_fine


# --- what cancels ---


def log_probabilities(params, tokens):
    hidden = jax.nn.gelu(params["embed"][tokens[:, :-1]] @ params["w"])
    logits = jax.nn.log_softmax(hidden @ params["out"])
    return jnp.take_along_axis(logits, tokens[:, 1:, None], 2)[..., 0]


def first_step(params, tokens, advantages, old):
    """Of a policy whose ratios are 1, and whose advantages add up to 0."""
    ratio = jnp.exp(log_probabilities(params, tokens) - old)
    bounded = jnp.clip(ratio, 0.8, 1.2)
    return -jnp.minimum(ratio * advantages, bounded * advantages).mean()


def preferred(params, tokens, advantages, old):
    """Pairs of answers, of which a policy that is as it was prefers none."""
    change = (log_probabilities(params, tokens) - old).sum(1)
    return -jax.nn.log_sigmoid(0.1 * (change[::2] - change[1::2])).mean()


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [first_step, preferred])
def test_differences_that_are_0_but_for_rounding_are_fine(loss_fn):
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "embed": jax.random.normal(keys[0], (40, 32)) / 2,
        "w": jax.random.normal(keys[1], (32, 32)) / 6,
        "out": jax.random.normal(keys[2], (32, 40)) / 6,
    }
    tokens = jax.random.randint(keys[3], (32, 17), 0, 40)
    rewards = jax.random.normal(keys[4], (4, 8))
    apart = rewards - rewards.mean(1, keepdims=True)
    advantages = (apart / (rewards.std(1, keepdims=True) + 1e-4)).reshape(32, 1)
    old = ols.autocast(log_probabilities)(params, tokens)
    found = ols.diagnose(loss_fn, params, tokens, advantages, old)
    assert found.wrong == ()
    assert max(found.off.values()) < 0.01
    assert found.advice == ["Wrap the optimizer: with_loss_scale(optimizer)."]


@pytest.mark.slow
def test_most_gradients_that_float32_does_not_determine_are_not_fine():
    """A variance as E[x²] - E[x]² far from 0, in float32."""

    def loss_fn(params, x):
        h = x.astype(F16) @ params["w"].astype(F16) + params["b"].astype(F16)
        h = h.astype(F32)
        mean = h.mean(0)
        variance = jnp.maximum((h * h).mean(0) - mean**2, 0)
        y = (h - mean) * lax.rsqrt(variance + 1e-5)
        z = x.astype(F16) @ params["v"].astype(F16)
        return square(jnp.tanh(y)) / 100 + square(jnp.tanh(z))

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w": jax.random.normal(keys[0], (16, 8)) / 4,
        "b": jnp.full(8, 600.0),
        "v": jax.random.normal(keys[1], (16, 4)) / 4,
    }
    found = ols.diagnose(loss_fn, params, jax.random.normal(keys[2], (64, 16)) / 2)
    assert found.wrong == ()
    assert found.undetermined == ("b", "w")
    assert found.verdict.startswith("Float32 itself does not determine 2 of 3 grad")
    assert found.advice != ["Nothing."]
    assert "apart from 2 that float32 does not determine." in " ".join(
        str(found).split()
    )


def test_a_gradient_that_float32_does_not_determine_is_not_blamed_on_a_clip():
    """A softmax whose sum has a square out of the range of float32."""
    x, y, w = (
        jax.random.normal(jax.random.key(seed), shape)
        for seed, shape in enumerate([(64, 16), (64, 4), (16, 4)])
    )

    def loss_fn(w, x, y):
        e = jnp.exp(x @ w)
        return square(e / e.sum(1, keepdims=True) - y)

    found = ols.diagnose(loss_fn, 6.8 * w, x, y)
    assert found.wrong == ()
    assert found.undetermined == (".",)


@pytest.mark.slow
def test_gradients_that_float32_gives_roughly_are_wrong_if_16_bits_are_far_worse():
    """A variance as E[x²] - E[x]² far from 0, in float32."""
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 8, dtype=F16, rngs=rngs)
            self.norm = nnx.BatchNorm(8, dtype=F16, rngs=rngs)
            self.out = nnx.Linear(8, 2, dtype=F16, rngs=rngs)
            self.linear.bias[...] = jnp.full(8, 800.0)

        def __call__(self, x):
            return self.out(jnp.tanh(self.norm(self.linear(x))))

    x = jax.random.normal(jax.random.key(2), (64, 16)) / 2
    found = ols.diagnose(lambda model, x: square(model(x) - 1), Model(nnx.Rngs(0)), x)
    assert found.verdict.startswith("float16 gives wrong gradients")


def root_mean_square(params, x):
    h = x.astype(F16) @ params["w"].astype(F16)
    return square(h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-8))


def masked(params, x):
    h = x.astype(F16) @ params["w"].astype(F16)
    is_kept = jnp.ones((8, 8), F16)
    return square(jax.nn.softmax(h + (1 - is_kept) * -1e9))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("loss_fn", [root_mean_square, masked])
def test_a_constant_that_float16_rounds_to_0_or_infinity_is_named(loss_fn):
    w = jax.random.normal(jax.random.key(0), (8, 8))
    x = jax.random.normal(jax.random.key(1), (8, 8)).at[3].set(0)
    (advice,) = ols.diagnose(loss_fn, {"w": w}, x).advice
    n = 2 if loss_fn is root_mean_square else 3
    constant = advice[advice.index("A constant at ") :]
    assert line_of(loss_fn, n) in constant
    assert "write it as a float32 array" in constant


def test_widened_products_of_several_dtypes_are_counted_together():
    def loss_fn(params, x):
        first = x.astype(F16) @ params["small"].astype(np.float64)
        return jnp.mean(first**2) + jnp.mean((x.astype(F16) @ params["large"]) ** 2)

    params = {"small": jnp.full((16, 4), 0.1), "large": jnp.full((16, 256), 0.1)}
    with jax.enable_x64(True):
        found = ols.diagnose(loss_fn, params, jnp.full((8, 16), 0.1))
    assert "of the multiplications are in float64 and float32" in found.verdict


def test_an_empty_batch_has_no_share_of_widened_products():
    def loss_fn(w, x):
        half = w.astype(F16) * F16(2)
        return jnp.sum(x.astype(F16) @ w) + jnp.sum(half.astype(F32))

    found = ols.diagnose(loss_fn, jnp.ones((4, 2)), jnp.ones((0, 4)))
    assert found.verdict.startswith("float16 is fine as it is")
