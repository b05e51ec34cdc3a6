"""One page that says what float16 does to a model, and what to do about it."""

import functools
import pathlib
import re
import runpy
from collections import OrderedDict

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 8)), jnp.float16)
W = {name: jnp.eye(8) for name in ("q", "k", "v")}
OFF = {"scores": None, "weights": None, "out": None}
ON = OrderedDict((name, ols.diagnosis.probe()) for name in OFF)
CAUSAL = np.tri(6, dtype=bool)


def attention(params, x, probes=OFF, *, size=1.0, loss=1.0, mask=None):
    """The scores are as large as one likes, and what is masked is -inf."""
    p = jax.tree.map(lambda w: w.astype(jnp.float16), params)
    scores = (x @ p["q"]) @ (x @ p["k"]).mT * jnp.asarray(size, jnp.float16)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    scores = ols.diagnosis.tap(scores, probes["scores"])
    weights = ols.diagnosis.tap(jax.nn.softmax(scores), probes["weights"])
    out = ols.diagnosis.tap(weights @ (x @ p["v"]), probes["out"])
    return jnp.mean(out.astype(jnp.float32) ** 2) * loss


def diagnose(probes=ON, **kwargs):
    return ols.diagnose(attention, W, X, probes=probes, **kwargs)


def test_a_healthy_model_is_fine_as_it_is():
    loss_fn = lambda w, x: jnp.sum((w.astype(jnp.float16) * x).astype(jnp.float32))
    diagnosis = ols.diagnose(loss_fn, jnp.ones(3), 1.0)
    assert diagnosis.verdict.startswith("float16 is fine as it is, without a loss scale")
    assert diagnosis.advice == ["Nothing. A dynamic loss scale would start at 2**13."]
    assert diagnosis.underflow == {}
    assert "What to do:\n- Nothing." in str(diagnosis)


@pytest.mark.parametrize("mask", [None, CAUSAL])
def test_a_small_loss_loses_gradients_without_a_scale(mask):
    diagnosis = diagnose(loss=2.0**-14, mask=mask)
    assert re.fullmatch(
        r"Without a loss scale, float16 loses \S+% of the gradients to underflow\.",
        diagnosis.verdict,
    )
    found = ols.diagnosis.find_initial_scale(
        lambda w: attention(w, X, loss=2.0**-14, mask=mask), W
    )
    assert diagnosis.initial_scale == found
    (advice,) = diagnosis.advice
    assert f"DynamicLossScale(initial_scale=2.0**{np.log2(found.scale):.0f})" in advice
    assert diagnosis.overflow.suspects
    name, worst = next(iter(diagnosis.underflow.items()))
    assert name == "all"
    assert worst.lost > 0.1
    assert 0 < worst.bits <= np.log2(found.scale)
    assert {"q", "k", "v"} >= {n for n in diagnosis.underflow if len(n) == 1}
    assert "arriving at out" in diagnosis.underflow


def test_the_default_is_advised_up_to_where_it_suffices():
    """On both sides of both limits; another jax may underflow a bit sooner."""
    limits = {"fits": set(), "needs": set()}
    problems = [(ON, 1.0), (ON, 2.0), *((None, 2.0**-bits) for bits in (15, 16, 17, 18))]
    for probes, loss in problems:
        diagnosis = diagnose(probes, loss=loss)
        fitting = round(np.log2(diagnosis.initial_scale.scale))
        needed = max(of.bits for of in diagnosis.underflow.values())
        ours = f"with_loss_scale(optimizer, DynamicLossScale(initial_scale=2.0**{fitting}))."
        if needed <= 15 <= fitting:
            ours = "with_loss_scale(optimizer), whose initial scale of 2**15 suffices here."
        assert diagnosis.advice == [f"Wrap the optimizer: {ours}"]
        limits["fits" if probes else "needs"].add(fitting if probes else needed)
    assert limits["fits"] == {14, 15}
    assert limits["needs"] >= {15, 16}


@pytest.mark.parametrize(("tiny", "may_do_without"), [(4, True), (6, False)])
def test_a_model_that_loses_few_gradients_may_need_no_scale(tiny, may_do_without):
    x = jnp.where(jnp.arange(100) < tiny, 1e-7, 1).astype(jnp.float16)
    loss_fn = lambda w: jnp.sum((w.astype(jnp.float16) * x).astype(jnp.float32))
    [advice] = ols.diagnose(loss_fn, jnp.ones(100)).advice
    assert advice.startswith("Wrap the optimizer")
    assert ("many models need none" in advice) == may_do_without


@jax.custom_vjp
def nan_at_zero(x):
    return x


nan_at_zero.defvjp(lambda x: (x, None), lambda _, g: (g * (g / g),))


def test_gradients_that_are_finite_with_a_scale_alone():
    """And at the default's, where they are finite, only subnormal."""
    loss_fn = lambda w: jnp.mean(nan_at_zero(w.astype(jnp.float16)).astype(jnp.float32)) * 2.0**-30
    diagnosis = ols.diagnose(loss_fn, jnp.ones(4))
    assert diagnosis.verdict == (
        "float16 needs a loss scale: without one, gradients are not finite."
    )
    (advice,) = diagnosis.advice
    assert "DynamicLossScale(initial_scale=2.0**45)" in advice


@pytest.mark.slow
def test_scores_that_overflow_are_named():
    diagnosis = diagnose(size=2.0**14)
    assert diagnosis.verdict.startswith("The loss is nan at any loss scale")
    assert diagnosis.initial_scale is None
    assert diagnosis.overflow.suspects[0].name == "scores"
    assert "Compute scores in float32" in diagnosis.advice[0]
    assert "Overflow: at any scale, first at scores: " in str(diagnosis)


@pytest.mark.slow
def test_a_row_that_is_masked_whole_is_told():
    mask = CAUSAL & (np.arange(6) != 0)  # the first sees itself alone
    diagnosis = diagnose(mask=mask)
    assert re.search(
        r"infinities, in sub, at \S+test_diagnose.py:\d+ \(attention\)", diagnosis.verdict
    )
    assert any("use a finite number" in advice for advice in diagnosis.advice)
    assert diagnosis.overflow.suspects[0].name == "weights"


def test_without_probes_it_names_the_line_that_overflows():
    diagnosis = ols.diagnose(attention, W, X, size=2.0**14)
    assert diagnosis.verdict.startswith("The loss is nan at any loss scale")
    assert "in float32 it is " in diagnosis.verdict
    assert re.fullmatch(
        r"Compute what is at \S+test_diagnose.py:\d+ \(attention\) in float32, or with .*",
        diagnosis.advice[-1],
    )


@jax.custom_vjp
def steep(x):
    return x


steep.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.asarray(2**15, g.dtype),))


def two_layers(params, x, probes=None):
    p = jax.tree.map(lambda w: w.astype(jnp.float16), params)
    probes = probes or {"first": None, "second": None}
    x = ols.diagnosis.tap(x * p["first"], probes["first"])
    x = ols.diagnosis.tap(steep(x) * p["second"], probes["second"])
    return jnp.mean(x.astype(jnp.float32)) * 2.0**-8


def test_where_no_one_scale_fits_the_layer_is_named():
    params = {"first": jnp.ones(8), "second": jnp.ones(8)}
    x = jnp.asarray(2.0 ** -np.arange(0, 8), jnp.float16)
    x = jnp.where(jnp.arange(8) < 4, x, 2.0**-16)
    probes = OrderedDict(first=ols.diagnosis.probe(), second=ols.diagnosis.probe())
    diagnosis = ols.diagnose(two_layers, params, x, probes=probes)
    assert diagnosis.verdict.startswith("No single loss scale fits: at 2**")
    assert diagnosis.overflow.suspects[0].name == "second"
    assert diagnosis.advice[0].startswith("Compute second in float32")
    assert diagnosis.advice[1].startswith("Until then, wrap the optimizer")


def test_gradients_that_are_finite_at_no_scale():
    loss_fn = lambda w, x: jnp.sum(jnp.sqrt(w["w"] * x))
    diagnosis = ols.diagnose(loss_fn, {"w": jnp.zeros(3)}, 1.0)
    assert diagnosis.verdict.startswith("The gradients are not finite in float32 either")
    assert (
        "the derivative of a root at 0, at tests/diagnosis/test_diagnose.py:" in diagnosis.verdict
    )
    assert diagnosis.overflow.suspects[0].name == "w"
    assert diagnosis.advice[0].startswith("Keep the argument of the root above 0")


def test_a_loss_so_large_that_its_gradients_overflow():
    diagnosis = ols.diagnose(attention, W, X, loss=2.0**20)
    assert "needs one below 1" in diagnosis.verdict
    exponent = np.log2(diagnosis.initial_scale.scale)
    bounds = f"initial_scale=2.0**{exponent:.0f}, min_scale=2.0**{exponent - 16:.0f})"
    assert bounds in diagnosis.advice[0]  # and a larger batch later does not end the training


def test_of_float32_the_advice_is_to_ask_about_float16():
    diagnosis = ols.diagnose(lambda w, x: jnp.sum((w * x) ** 2), jnp.ones(3), 1.0)
    assert diagnosis.verdict == "Nothing is computed in float16."
    assert diagnosis.advice == ["To ask about it, pass autocast(loss_fn)."]


def test_compiles_one_program():
    counted = chex.assert_max_traces(attention, n=1)
    ols.diagnose(counted, W, X, probes=ON, loss=2.0**-14)


def test_takes_aux_and_keyword_arguments_and_parameters_of_any_kind():
    def with_aux(params, x, *, size):
        return attention(params["w"], x, size=size), "aux of any kind"

    params = {"w": W, "steps": jnp.int32(3), "none": None}
    diagnosis = ols.diagnose(with_aux, params, X, has_aux=True, size=1.0)
    assert diagnosis.initial_scale == ols.diagnose(attention, W, X).initial_scale


def test_probes_without_an_order_are_refused():
    with pytest.raises(ValueError, match="taps must be in the model's order"):
        diagnose(probes=dict(ON))


def test_the_page_fits_a_terminal_and_is_short():
    params = {f"{'a_long_name/' * 6}{chr(97 + i)}": w for i, w in enumerate([jnp.eye(8)] * 20)}

    def loss_fn(params, x):
        x = sum(x @ w.astype(jnp.float16) for w in params.values())
        return jnp.mean(x.astype(jnp.float32) ** 2) * 2.0**-20

    page = str(ols.diagnose(loss_fn, params, X)).splitlines()
    assert max(map(len, page)) <= 100
    assert len(page) <= 20
    assert any(line.strip() == "and 13 more" for line in page)


@pytest.mark.slow
def test_the_page_of_the_demo_is_the_documentations(capsys):
    root = pathlib.Path(__file__).parents[2]
    runpy.run_path(str(root / "docs/diagnose_demo.py"), run_name="__main__")
    dtypes, verdict, *_ = capsys.readouterr().out.splitlines()
    document = (root / "docs/diagnosis.md").read_text()
    share = re.compile(r"(\d+\.\d)% of the gradients")
    lost, on_the_page = (share.search(text)[1] for text in (verdict, document))
    assert float(lost) == pytest.approx(float(on_the_page), abs=1)  # which each JAX computes anew
    shown = verdict.replace(lost, on_the_page)
    assert f"```text\n{dtypes}\n{shown}\n" in document


def test_of_a_product_that_autocast_rounds_the_advice_is_to_keep_it_and_helps():
    x = 10 + jax.random.normal(jax.random.key(0), (64, 64))
    w = 1 + 1e-4 * jax.random.normal(jax.random.key(1), (64, 4))

    def loss_fn(w, x, precision=None):  # a small difference of large numbers
        return jnp.mean((jnp.dot(x, w, precision=precision) - x.sum(-1, keepdims=True)) ** 2)

    found = ols.diagnose(ols.autocast(loss_fn), w, x)
    [advice] = found.advice
    assert advice.startswith("Keep the product at ")
    assert advice.endswith("(loss_fn) in float32: precision=lax.Precision.HIGHEST.")
    kept = functools.partial(loss_fn, precision=jax.lax.Precision.HIGHEST)
    assert not ols.diagnose(ols.autocast(kept), w, x).errors
