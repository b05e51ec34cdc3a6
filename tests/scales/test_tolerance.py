import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols


def run(ls, finite):
    step = lambda ls, finite: (ls.adjust(finite),) * 2
    _, history = jax.jit(lambda ls, f: jax.lax.scan(step, ls, f))(
        ls, jnp.array(finite, bool)
    )
    return list(np.asarray(history.loss_scale)), list(np.asarray(history.exhausted()))


def rules(ls, finite):
    """The same by the documented rule, in plain Python."""
    scale, counter, steps, overflows, scales, raised = ls.initial_scale, 0, 0, 0, [], []
    for ok in finite:
        steps += 1
        exhausted = False
        if ok:
            counter += 1
            if counter == ls.growth_interval:
                counter = steps = 0
                scale *= ls.factor
        else:
            counter = 0
            overflows += 1
            if overflows / steps >= ls.tolerance:
                overflows = steps = 0
                lowered = max(scale / ls.factor, ls.threshold or 0)
                exhausted = lowered <= ls.min_scale
                scale = scale if exhausted else lowered
        scales.append(scale)
        raised.append(exhausted)
    return scales, raised


@hypothesis.given(
    st.fixed_dictionaries(
        {
            "initial_scale": st.sampled_from([2.0, 128.0, 2.0**15]),
            "growth_interval": st.integers(1, 5),
            "factor": st.sampled_from([1.0, 2.0, 4.0]),
            "tolerance": st.sampled_from([0.0, 0.05, 0.25, 1 / 3, 0.5, 1.0]),
            "threshold": st.sampled_from([None, 1.0, 0.125]),
            "min_scale": st.sampled_from([1e-4, 0.5]),
        }
    ),
    st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_follows_its_documented_rule(config, finite):
    ls = ols.presets.ToleranceLossScale(**config)
    assert run(ls, finite) == rules(ls, finite)


def test_growth_out_of_float32_is_refused():
    scales, _ = run(
        ols.presets.ToleranceLossScale(initial_scale=2.0**126, growth_interval=1),
        [1] * 4,
    )
    assert scales == [2.0**127] * 4


def test_counters_stop_at_the_int32_maximum():
    most = 2**31 - 1
    ls = ols.presets.ToleranceLossScale(tolerance=1.0).replace(
        steps=most, overflows=most - 1
    )
    assert ls.adjust(True).steps == most
    assert ls.replace(overflows=most, steps=most).adjust(False)() == 2**14


BAD = {
    "initial_scale": [0, np.nan, True, 1e-4],
    "growth_interval": [0, 1.5, True],
    "factor": [0.5, np.inf, None],
    "tolerance": [-0.1, 1.1, np.nan, True],
    "threshold": [0, -1, np.inf, "x"],
    "min_scale": [0, None, np.nan],
}


@pytest.mark.parametrize(
    ("name", "value"), [(k, v) for k, vs in BAD.items() for v in vs]
)
def test_a_bad_argument_is_named_with_what_was_given(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got "):
        ols.presets.ToleranceLossScale(**{name: value})
