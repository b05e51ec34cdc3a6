"""The lines that `diagnose` names, of planted faults and of losses that 16 bits spoil."""

import inspect

import jax
import jax.numpy as jnp
import models
import numpy as np
import planted
import pytest
from models import F16, F32, half, normal, square
from pairs import product, quick

import optax_lossscale as ols


def named(report):
    """The first two suspects, and the products that are named with them."""
    return [row for x in report.suspects[:2] for row in (x, *x.products)]


def finds_planted(model, path, turn, kind):
    report = ols.diagnose(*planted.with_fault(model, path, turn, kind))
    name = planted.key_of(path[-1])
    return any(planted.is_at(row, name, turn) for row in named(report))


@quick("model", [*planted.MODELS], "rnn")
def test_planted_faults_are_the_first_or_second_suspect(model):
    faults = [*planted.faults(model)]
    missed = [fault for fault in faults if not finds_planted(model, *fault)]
    assert len(missed) <= len(faults) / 10, missed


FEW = ("small_difference_of_large_numbers", "value_below_the_range", "saturated gate")


@quick("make", models.SPOILED, *FEW)
def test_the_line_that_16_bits_spoil_is_the_first_or_second_suspect(make):
    line = f"models.py:{models.line_at_fault(make)} "
    assert any(line in row.line for row in named(ols.diagnose(*make())))


@quick("model", models.HEALTHY, "attention", "batch norm", "lstm")
def test_a_sound_model_has_no_suspect(model):
    report = ols.diagnose(*model())
    assert report.suspects == ()
    assert report.loss_error < 0.01
    assert report.error < 0.01
    assert report.largest_error.error < 0.05


# As 0.4.0 found them, and a search: exponents of two.
SCALES = {
    "deep": 17,
    "embedding": 14,
    "sparse embedding": 15,
    "attention": 18,
    "graph": 17,
    "lstm": 15,
    "stack": 13,
    "gate": 12,
    "rotary": 12,
}


@quick("model", {model: model for model in SCALES}, "deep", "embedding", "gate")
def test_the_scale_that_fits_is_two_bits_below_the_largest(model):
    report = ols.diagnose(*models.HEALTHY[model]())
    assert report.initial_scale == 2.0 ** SCALES[model]
    assert report.overflow.is_backward


def test_what_is_lost_is_what_becomes_zero():
    loss_fn, params, *batch = models.deep(6)
    report = ols.diagnose(loss_fn, params, *batch)
    grads = jax.grad(loss_fn)(params, *batch)
    for name, grad in enumerate(grads):
        # A ReLU makes more zeros, in float32, too.
        n_lost = report.gradients[str(name)].lost_unscaled * np.count_nonzero(grad)
        assert n_lost <= np.sum(np.asarray(grad) == 0)
    assert max(x.lost_unscaled for x in report.gradients.values()) < 0.005
    assert report.error < 0.005


# --- which of several lines, and which iteration ---


def overflowing(c, w):
    """Only where the weights are large."""
    return jnp.tanh(c @ w) * w[0, 0] * w[0, 0]


BODIES = {
    "jit": jax.jit(overflowing),
    "cond": lambda c, w: jax.lax.cond(c[0, 0] > 100, lambda c, w: c, overflowing, c, w),
}


@product(reverse={"forward": False, "reverse": True}, body=BODIES)
def test_in_a_scan_over_layers_the_iteration_is_named(body, reverse):
    def loss_fn(params, x):
        step = lambda c, w: (body(c, w), c.sum())
        y, sums = jax.lax.scan(step, x.astype(F16), half(params), reverse=reverse)
        return square(y) + jnp.mean(sums.astype(F32)) * 1e-3

    layers = normal(6, 8, 8, scale=0.3).at[:, 0, 0].set(1.0).at[3, 0, 0].set(3e3)
    suspect = ols.diagnose(loss_fn, layers, normal(4, 8, scale=1)).suspects[0]
    line = overflowing.__code__.co_firstlineno + 2
    assert suspect.cause == "overflows"
    assert f"test_suspects.py:{line} " in suspect.line
    assert suspect.iterations == (3,)
    assert "iteration 3" in str(suspect)


def test_a_while_loop_is_followed():
    def loss_fn(w, x):
        body = lambda state: (state[0] + 1, state[1] * F16(20))
        _, gain = jax.lax.while_loop(lambda state: state[0] < 5, body, (0, F16(1)))
        return square(x.astype(F16) @ w.astype(F16)) * gain.astype(F32)

    report = ols.diagnose(loss_fn, normal(8, 8), normal(4, 8))
    suspect = report.suspects[0]
    assert suspect.iterations == (3,)  # 20 to the fourth is above 65504
    assert f":{loss_fn.__code__.co_firstlineno + 1} " in suspect.line


def test_what_is_infinite_in_float32_too_is_said():
    def loss_fn(w, x):
        y = x.astype(F16) @ w.astype(F16)
        return jnp.sum(jnp.log(y * 0).astype(F32))

    report = ols.diagnose(loss_fn, normal(8, 8), normal(4, 8))
    suspect = report.suspects[0]
    assert suspect.operation == "log"
    assert not suspect.is_finite_in_float32
    page = str(report)
    assert "not finite, in float32, too: log at" in page
    assert "Gradients: not finite, in float32, too, in ." in page
    assert "Loss scale: none makes all finite" in page


def line_after(function, text):
    """The line of a function in which a text stands, as in a row."""
    lines, first = inspect.getsourcelines(function)
    return f".py:{first + next(n for n, x in enumerate(lines) if text in x)} "


@pytest.mark.parametrize("hold", [lambda f: f, jax.checkpoint, jax.jit])
def test_the_line_inside_of_a_scan_is_named_under_autocast(hold):
    def loss_fn(w, xs):
        def step(h, x):
            h = h @ w
            return jnp.log(h - x), None

        h, _ = jax.lax.scan(hold(step), jnp.ones(2), xs)
        return h.sum()

    report = ols.diagnose(loss_fn, jnp.eye(2), jnp.full((3, 2), 2.0))
    assert report.is_autocast
    assert report.suspects[0].operation == "log"
    assert line_after(loss_fn, "jnp.log") in report.suspects[0].line


def test_an_overflow_is_named_after_a_value_that_is_off():
    def loss_fn(w, x):
        difference = ((w * x).astype(F16) + F16(100)) - F16(100)  # a few percent off
        return jnp.log(jnp.exp(difference * 100)).astype(F32).mean()

    report = ols.diagnose(loss_fn, jnp.ones(16), jnp.linspace(0.1, 0.5, 16))
    assert [x.operation for x in report.suspects[:2]] == ["exp", "sub"]
    assert report.suspects[0].is_finite_in_float32


def test_what_follows_from_a_value_that_has_vanished_is_no_suspect():
    def loss_fn(w, x):
        small = (w * x).astype(F16)
        return jnp.log(small.astype(F32)).mean()

    report = ols.diagnose(loss_fn, jnp.ones(16), jnp.full(16, 1e-9))
    assert [(x.operation, x.cause) for x in report.suspects] == [
        ("convert_element_type", "vanishes")
    ]


def test_few_elements_that_have_vanished_are_named_as_what_made_an_infinity():
    def loss_fn(w, x):
        p = jax.nn.softmax(x.astype(F16) @ w.astype(F16))
        return -jnp.mean(jnp.log(p.astype(F32)[:, 0]))

    report = ols.diagnose(loss_fn, jnp.eye(2) * 20, jnp.array([[1.0, 0], [0, 1.0]]))
    suspect = report.suspects[0]
    assert suspect.operation == "log"
    assert line_after(loss_fn, "softmax") in suspect.products[0].line
    assert suspect.products[0].lost > 0


def test_infinities_that_were_there_before_do_not_hide_what_cancels():
    def loss_fn(w, x):
        large = jnp.where(x > 0.2, -jnp.inf, w * x + 100).astype(F16)
        return jnp.where(jnp.isinf(large), 0, large - F16(100)).astype(F32).sum()

    report = ols.diagnose(loss_fn, jnp.ones(16), jnp.linspace(1e-3, 0.5, 16))
    suspect = report.suspects[0]
    assert suspect.cause == "cancels"
    assert suspect.is_finite_in_float32


def test_the_scale_that_fits_is_lowered_until_16_bits_are_finite_at_it():
    def loss_fn(
        params, x
    ):  # float32's gradient of the bias is 0, but sums on the way are not
        y = (x.astype(F16) @ params["w"].astype(F16) + params["b"].astype(F16)).astype(
            F32
        )
        return y[:512].mean() - y[512:].mean()

    params = {"w": normal(4, 1), "b": jnp.zeros(1)}
    report = ols.diagnose(loss_fn, params, normal(1024, 4, scale=1))
    assert all(np.isfinite(x.error) for x in report.gradients.values())
    assert report.initial_scale < report.overflow.overflows_at / 8
    assert "; in float32's numbers, at 2**" in str(report)


def test_a_while_that_is_followed_no_further_is_said():
    def loss_fn(w, x):
        def body(carry):
            n, y = carry
            return n + 1, y + (w * x).astype(F16)

        _, y = jax.lax.while_loop(lambda c: c[0] < 1100, body, (0, x.astype(F16)))
        return jnp.mean(jax.lax.stop_gradient(y).astype(F32)) + w.sum()

    report = ols.diagnose(loss_fn, jnp.ones(8), jnp.linspace(1e-3, 2e-3, 8))
    assert [row.operation for row in report.not_compared] == ["while"]
    assert "Not compared with float32: while at" in str(report)


def test_a_mask_is_no_suspect():
    def loss_fn(w, x):
        x = x.astype(F16) @ w.astype(F16)
        masked = jnp.where(np.tri(4, dtype=bool), jnp.zeros((4, 4)), -1e9).astype(F16)
        return square(jnp.exp(masked) @ (x * x))

    report = ols.diagnose(loss_fn, jnp.full((4, 4), 100.0), jnp.ones((4, 4)))
    line = loss_fn.__code__.co_firstlineno + 3
    assert f"test_suspects.py:{line} " in report.suspects[0].line
    assert report.suspects[0].operation == "mul"


def test_of_a_pole_what_made_the_operand_is_named():
    def loss_fn(p, x):
        y = (p * x).astype(F16)
        return jnp.sum(jnp.arctanh(y).astype(F32))

    report = ols.diagnose(loss_fn, F32(0.9999), jnp.ones(1))
    line = loss_fn.__code__.co_firstlineno + 1
    assert report.suspects[0].cause == "overflows"
    assert any(f":{line} " in row.line for row in report.suspects[0].products)


def test_where_no_one_scale_fits_the_layer_is_named():
    @jax.custom_vjp
    def enlarged(x):
        return x

    enlarged.defvjp(lambda x: (x, None), lambda _, g: (g * F16(6e4) * F16(6e4),))

    def loss_fn(params, x):
        x = enlarged(x.astype(F16) @ params["w"].astype(F16))
        return square(x @ params["v"].astype(F16))

    params = {"w": normal(8, 8), "v": normal(8, 8, seed=1)}
    report = ols.diagnose(loss_fn, params, normal(4, 8, scale=1))
    line = loss_fn.__code__.co_firstlineno + 1
    assert report.suspects[0].cause == "overflows"
    assert f"test_suspects.py:{line} " in report.suspects[0].line
