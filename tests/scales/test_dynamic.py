import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols


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
    lowest = 2.0**-60 if ls.min_scale is None else ls.min_scale
    highest = 2.0**60 if ls.max_scale is None else ls.max_scale
    scales = []
    for ok in finite:
        if ok:
            counter += 1
            if counter == ls.growth_interval:
                counter, left = 0, ls.hysteresis
                scale = min(scale * np.float32(ls.growth_factor), np.float32(highest))
        else:
            counter = 0
            if left > 1:
                left -= 1
            else:
                scale = max(scale * np.float32(ls.backoff_factor), np.float32(lowest))
        scales.append(scale)
    return scales


configs = st.fixed_dictionaries(
    {
        "initial_scale": st.sampled_from([1.0, 1.5, 1000.0, 2.0**15, 1e18]),
        "growth_interval": st.integers(1, 5),
        "growth_factor": st.sampled_from([1.0, 1.1, 1.5, 2.0, 3.0, 1000.0]),
        "backoff_factor": st.sampled_from([1.0, 0.8, 0.5, 0.3, 1 / 3, 0.1]),
        "min_scale": st.sampled_from([None, 2.0**-60, 0.01, 1.0]),
        "max_scale": st.sampled_from([None, 1.1e18, 2.0**60]),
        "hysteresis": st.integers(1, 4),
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


def test_hysteresis_starts_over_at_growth_and_nowhere_else():
    ls = ols.DynamicLossScale(initial_scale=1024, growth_interval=2, hysteresis=2)
    expected = [1024, 1024, 512, 256, 128, 128, 256, 256, 128]
    assert run(ls, [0, 1, 0, 0, 0, 1, 1, 0, 0])[0] == expected


def test_without_bounds_of_its_own_it_stays_between_2_to_the_60th_and_its_reciprocal():
    ls = ols.DynamicLossScale(2.0**59, growth_interval=1, min_scale=None)
    assert run(ls, [1, 1, 0])[0] == [2.0**60, 2.0**60, 2.0**59]
    ls = ols.DynamicLossScale(2.0**-59, min_scale=None)
    scales, last = run(ls, [0, 0])
    assert scales == [2.0**-60, 2.0**-60]
    assert last.exhausted()


@pytest.mark.parametrize(("floor", "start"), [(1.0, 4.0), (None, 2.0**-58)])
def test_exhausted_at_an_overflow_that_can_lower_nothing(floor, start):
    ls = ols.DynamicLossScale(start, 1, min_scale=floor, hysteresis=2)
    finite, exhausted = [0, 0, 0, 0, 1, 0, 0, 0, 1], []
    for ok in finite:
        ls = ls.adjust(bool(ok))
        exhausted.append(bool(ls.exhausted()))
    assert exhausted == [False, False, False, True, False, False, False, True, False]


def test_counters_reach_the_int32_maximum_without_overflow():
    ls = ols.DynamicLossScale(growth_interval=2**31 - 1).replace(
        growth_counter=2**31 - 2
    )
    grown = ls.adjust(True)
    assert (grown.growth_counter, grown()) == (0, 2**16)


BAD = {
    "initial_scale": [0, -1, np.inf, np.nan, True, "x", None, np.ones(2), 2e18, 0.5],
    "growth_interval": [0, 1.0, 2.5, True, None, "x", 2**31],
    "growth_factor": [0.99, -2, 1e300, np.nan, True, "x", None],
    "backoff_factor": [0, 1.01, np.nan, True, "x" * 10**6, [0] * 10**5],
    "min_scale": [0, np.inf, True, 1e-19],
    "max_scale": [0, np.inf, True, 2e18],
    "hysteresis": [0, 1.0, True, None],
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_named_in_few_words_with_what_was_given(name):
    for value in BAD[name]:
        with pytest.raises(ValueError, match=f"^{name} must be .*, got ") as error:
            ols.DynamicLossScale(**{name: value})
        assert len(str(error.value)) < 600


@pytest.mark.parametrize("number", [8, np.float32(8), np.array(8), jnp.array(8.0)])
def test_a_number_may_be_an_array_of_one(number):
    assert ols.DynamicLossScale(number) == ols.DynamicLossScale(8.0)


def test_the_scale_must_start_between_its_own_bounds_which_the_error_names():
    with pytest.raises(
        ValueError, match=r"initial_scale must be .* 2\.0 and 4\.0, got"
    ):
        ols.DynamicLossScale(8.0, min_scale=2.0, max_scale=4.0)
