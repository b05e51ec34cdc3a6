import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

LARGEST = float(np.finfo(np.float32).max)


def run(ls, finite):
    """Scales after each step of a compiled loop, and the loss scale at its end."""
    step = lambda ls, finite: (ls.adjust(finite),) * 2
    ls, history = jax.jit(lambda ls, f: jax.lax.scan(step, ls, f))(
        ls, jnp.array(finite, bool)
    )
    return list(np.asarray(history.loss_scale)), ls


def rules(ls, finite):
    """The same by the documented rules, in plain Python."""
    scale, counter, left = np.float32(ls.initial_scale), 0, ls.hysteresis
    lowest, highest = (
        None if x is None else np.float32(x) for x in (ls.min_scale, ls.max_scale)
    )

    def times(factor):
        """The scale times a factor; itself where there is no bound, and float32 cannot hold it."""
        with np.errstate(over="ignore"):
            product = np.float32(np.float64(scale) * factor)
        if lowest is not None:
            product = max(product, lowest)
        if highest is not None:
            product = min(product, highest)
        return product if np.finfo(np.float32).tiny <= product <= LARGEST else scale

    scales = []
    for ok in finite:
        if ok:
            counter += 1
            if ls.hysteresis_refill == "finite":
                left = ls.hysteresis
            if counter == ls.growth_interval:
                counter, left = 0, ls.hysteresis
                scale = times(ls.growth_factor)
        else:
            counter = 0
            if left > 1:
                left -= 1
            else:
                scale = times(ls.backoff_factor)
                left = ls.hysteresis if ls.hysteresis_refill == "rescale" else 1
        scales.append(scale)
    return scales


configs = st.fixed_dictionaries(
    {
        "initial_scale": st.sampled_from([1.0, 1.5, 1000.0, 2.0**15, 1e38]),
        "growth_interval": st.integers(1, 5),
        "growth_factor": st.sampled_from([1.0, 1.1, 1.5, 2.0, 3.0, 1000.0]),
        "backoff_factor": st.sampled_from([1.0, 0.8, 0.5, 0.3, 1 / 3, 0.1]),
        "min_scale": st.sampled_from([None, 2.0**-126, 0.01, 1.0]),
        "max_scale": st.sampled_from([None, 2e38, LARGEST]),
        "hysteresis": st.integers(1, 4),
        "hysteresis_refill": st.sampled_from(["growth", "rescale", "finite"]),
    }
)


@hypothesis.given(configs, st.lists(st.booleans(), min_size=40, max_size=40))
def test_follows_its_documented_rules(config, finite):
    ls = ols.DynamicLossScale(**config)
    assert run(ls, finite)[0] == rules(ls, finite)


def test_the_default_is_tensorflows_rule():
    scales, _ = run(
        ols.DynamicLossScale(), [True] * 4000 + [False] * 20 + [True] * 1999
    )
    assert scales[1998:2000] == [2**15, 2**16]
    assert scales[3999] == 2**17
    assert scales[4000:4003] == [2**16, 2**15, 2**14]
    assert scales[4019:] == [1] * 2000


def test_one_overflow_starts_the_run_anew():
    ls = ols.DynamicLossScale(initial_scale=8, growth_interval=3)
    assert run(ls, [1, 1, 0, 1, 1, 1])[0] == [8, 8, 4, 4, 4, 8]


def test_hysteresis_tolerates_overflows_before_backing_off():
    ls = ols.DynamicLossScale(initial_scale=1024, growth_interval=2, hysteresis=3)
    assert run(ls, [0, 0, 0, 0])[0] == [1024, 1024, 512, 256]


@pytest.mark.parametrize(
    ("refill", "expected"),
    [
        ("growth", [1024, 1024, 512, 256, 128, 128, 256, 256, 128]),
        ("rescale", [1024, 1024, 512, 512, 256, 256, 512, 512, 256]),
        ("finite", [1024, 1024, 1024, 512, 256, 256, 512, 512, 256]),
    ],
)
def test_hysteresis_refills_when_it_was_told_to(refill, expected):
    ls = ols.DynamicLossScale(
        initial_scale=1024, growth_interval=2, hysteresis=2, hysteresis_refill=refill
    )
    assert run(ls, [0, 1, 0, 0, 0, 1, 1, 0, 0])[0] == expected


@pytest.mark.parametrize("max_scale", [16, 20.0])
def test_it_grows_to_its_cap_and_not_beyond(max_scale):
    ls = ols.DynamicLossScale(8, growth_interval=1, max_scale=max_scale)
    scales, _ = run(ls, [True, True, True])
    assert scales == [16, max_scale, max_scale]


def test_it_falls_to_its_floor_and_not_below():
    ls = ols.DynamicLossScale(100.0, backoff_factor=0.1, min_scale=3.0)
    assert run(ls, [0, 0, 0])[0] == [10, 3, 3]


def test_without_bounds_a_change_that_float32_cannot_hold_does_not_take_place():
    ls = ols.DynamicLossScale(2.0**126, growth_interval=1, min_scale=None)
    assert run(ls, [1, 1, 0])[0] == [2.0**127, 2.0**127, 2.0**126]
    ls = ols.DynamicLossScale(2.0**-125, min_scale=None)
    scales, last = run(ls, [0, 0])
    assert scales == [2.0**-126, 2.0**-126]
    assert last.exhausted()


@pytest.mark.parametrize(
    "loss_scale",
    [
        ols.DynamicLossScale(),
        ols.HeadroomLossScale(),
        ols.presets.ToleranceLossScale(),
        ols.FixedLossScale(2),
    ],
    ids=lambda loss_scale: type(loss_scale).__name__,
)
def test_a_new_loss_scale_is_not_exhausted(loss_scale):
    assert not loss_scale.exhausted()
    ols.raise_if_stuck(loss_scale)


@pytest.mark.parametrize(("floor", "start"), [(1.0, 4.0), (None, 2.0**-124)])
def test_exhausted_at_an_overflow_that_can_lower_nothing(floor, start):
    config = {"initial_scale": start, "growth_interval": 1, "min_scale": floor}
    ls = ols.DynamicLossScale(**config, hysteresis=2, hysteresis_refill="finite")
    finite, exhausted = [0, 0, 0, 0, 1, 0, 0, 0, 1], []
    for ok in finite:
        ls = ls.adjust(bool(ok))
        exhausted.append(bool(ls.exhausted()))
    assert exhausted == [False, False, False, True, False, False, False, True, False]
    assert (
        not ols.DynamicLossScale(initial_scale=1.0, can_be_exhausted=False)
        .adjust(False)
        .exhausted()
    )


@pytest.mark.parametrize("max_scale", [None, LARGEST])
@pytest.mark.parametrize("factor", [2.0, 3.0, 1.1])
def test_scale_stays_finite_and_positive(max_scale, factor):
    ls = ols.DynamicLossScale(
        initial_scale=1.0,
        growth_interval=1,
        growth_factor=factor,
        backoff_factor=1 / factor,
        min_scale=float(np.finfo(np.float32).tiny),
        max_scale=max_scale,
    )
    up, top = run(ls, [True] * 2000)
    assert np.isfinite(up).all()
    assert up[-1] > LARGEST / (factor + 0.01)
    down, bottom = run(top, [False] * 4000)
    assert (np.array(down) >= np.finfo(np.float32).tiny).all()
    assert run(bottom, [True])[0][0] > bottom()


def backed_off(divisor, scales):
    ls = ols.DynamicLossScale(backoff_factor=1 / divisor, min_scale=2.0**-126)
    return ls.replace(loss_scale=scales).adjust(False).loss_scale


@pytest.mark.parametrize("divisor", [3.0, 1.5, 10.0, 7.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_backing_off_by_a_reciprocal_divides(divisor, compiled):
    scales = np.random.default_rng(0).uniform(1, 1e6, 300).astype(np.float32)
    f = functools.partial(backed_off, divisor)
    one, many = (jax.jit(f), jax.jit(jax.vmap(f))) if compiled else (f, jax.vmap(f))
    np.testing.assert_array_equal(many(scales), scales / np.float32(divisor))
    np.testing.assert_array_equal(
        [one(s) for s in scales[:20]], scales[:20] / np.float32(divisor)
    )


def test_counters_reach_the_int32_maximum_without_overflow():
    ls = ols.DynamicLossScale(growth_interval=2**31 - 1).replace(
        growth_counter=2**31 - 2
    )
    grown = ls.adjust(True)
    assert (grown.growth_counter, grown()) == (0, 2**16)


BAD = {
    "initial_scale": [0, -1, np.inf, np.nan, True, "x", None, 1e39, 0.5],
    "growth_interval": [0, -1, 1.0, 2.5, True, None, "x", 2**31],
    "growth_factor": [0.99, 0, -2, 1e300, np.inf, np.nan, True, "x", None],
    "backoff_factor": [0, 1.01, -0.5, np.inf, np.nan, True, "x", None],
    "min_scale": [0, -1, np.inf, np.nan, True, 1e-40, 2.0**16],
    "max_scale": [0, np.inf, np.nan, True, 1e39, 2.0**14],
    "hysteresis": [0, -1, 1.0, True, None],
    "hysteresis_refill": ["never", None, 1, True],
    "can_be_exhausted": [1, None, "yes"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(k, v) for k, vs in BAD.items() for v in vs]
)
def test_a_bad_argument_is_named_with_what_was_given(name, value):
    named = "initial_scale" if value in (2.0**16, 2.0**14) else name
    with pytest.raises(ValueError, match=f"{named} must be .*, got "):
        ols.DynamicLossScale(**{name: value})
