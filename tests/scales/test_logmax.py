import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

# Of a loss scale after gradients that are all as large: the spread is the root of a
# difference that is rounded, and compilers contract it as they like.
ROUNDED = 2**-8


def rules(ls, log2_amax):
    """log2 of the scale by the documented rule, in plain Python, and the error of float32."""
    average = lambda xs, decay: (
        sum(x * decay ** (len(xs) - 1 - i) for i, x in enumerate(xs))
        / sum(decay**i for i in range(len(xs)))
    )
    log2_scales, errors, xs = [], [], []
    for log2 in log2_amax:
        xs.append(2.0**ls.log_max if log2 is None else float(log2))
        square = average([x * x for x in xs], ls.beta2)
        spread = max(square - average(xs, ls.beta2) ** 2, 0) ** 0.5
        mean = average(xs, ls.beta1)
        log2_scale = 16 - mean - ls.overflow_std_dev * spread
        log2_scales.append(
            np.clip(log2_scale, np.log2(ls.min_scale), np.log2(ls.max_scale))
        )
        # A spread is the root of a difference of numbers as large as `square`.
        errors.append(
            1e-3 + 1e-5 * abs(mean) + ls.overflow_std_dev * (1e-5 * square) ** 0.5
        )
    return np.array(log2_scales), np.array(errors)


@hypothesis.given(
    st.fixed_dictionaries(
        {
            "initial_scale": st.sampled_from([1.0, 128.0]),
            "min_scale": st.sampled_from([1.0, 2.0**-10]),
            "max_scale": st.sampled_from([2.0**10, 2.0**24, 2.0**60]),
            "log_max": st.sampled_from([-3.0, 2.0, 5.0, 16.0]),
            "beta1": st.sampled_from([0.0, 0.5, 0.9, 0.99]),
            "beta2": st.sampled_from([0.0, 0.5, 0.9, 0.999]),
            "overflow_std_dev": st.sampled_from([0.0, 1.0, 3.09]),
        }
    ),
    st.lists(st.none() | st.integers(-100, 100), min_size=30, max_size=30),
)
def test_follows_its_documented_rule(config, log2_amax):
    ls = ols.presets.LogMaxLossScale(**config)
    amax = jnp.array([np.inf if x is None else 2.0**x for x in log2_amax], jnp.float32)
    run = jax.jit(
        lambda ls, xs: jax.lax.scan(lambda ls, x: (ls.update(x)[0],) * 2, ls, xs)
    )
    _, history = run(ls, amax)
    expected, error = rules(ls, log2_amax)
    np.testing.assert_array_less(abs(np.log2(history.loss_scale) - expected), error)


def test_puts_the_largest_gradient_below_the_cutoff():
    """Constant gradients have no spread: the scale takes them to 2**16."""
    ls = ols.presets.LogMaxLossScale()
    for _ in range(5):
        ls, should_apply = ls.update({"a": jnp.array([2.0**-3, -(2.0**-2)]), "b": None})
    assert should_apply
    np.testing.assert_allclose(ls(), 2.0**18, rtol=1e-2)


@pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64]
)
def test_finds_the_largest_and_what_is_not_finite_anywhere(dtype):
    rng = np.random.default_rng(0)
    update = jax.jit(lambda x: ols.presets.LogMaxLossScale(max_scale=2.0**30).update(x))
    for size in (1, 7, 1000, 100_003):
        for i in {0, size // 2, size - 1, int(rng.integers(size))}:
            x = np.clip(rng.normal(size=size), -3, 3).astype(dtype)
            x[i] = -8.0
            ls, finite = update(jnp.asarray(x))
            assert finite
            np.testing.assert_allclose(ls(), 2.0**13, rtol=ROUNDED)
            for bad in (np.nan, np.inf, -np.inf):
                x[i] = bad
                ls, finite = update(jnp.asarray(x))
                assert not finite
                assert ls() == 1


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 3e38])
def test_extreme_gradients_leave_a_finite_scale(amax):
    ls = ols.presets.LogMaxLossScale()
    update = jax.jit(ols.LossScale.update)
    for _ in range(10):
        ls, should_apply = update(ls, jnp.array([amax]))
        assert should_apply
        assert 1 <= ls() <= 2.0**24
    for _ in range(400):
        ls, _ = update(ls, jnp.array([1.0]))
    assert 1 <= ls() <= 2.0**24


def test_extreme_options_leave_a_finite_scale():
    ls = ols.presets.LogMaxLossScale(
        log_max=60.0, beta1=0.9999999, beta2=0.0, overflow_std_dev=1e6
    )
    for gradient in (1.0, jnp.inf, 0.0, jnp.nan, 3e38, 1.0, 1.0):
        ls, _ = ls.update(jnp.array(gradient))
        assert 1 <= ls() <= 2.0**24


def test_adjust_stays_at_a_finite_step_and_falls_at_an_overflow():
    ls = ols.presets.LogMaxLossScale(initial_scale=1024.0)
    assert ls.adjust(True) == ls
    assert ls.adjust(False)() == 1


def test_replicas_share_the_largest_gradient():
    update = lambda g: ols.presets.LogMaxLossScale().update(g, axis_name="i")
    ls, finite = jax.pmap(update, axis_name="i")(jnp.array([1.0, 4.0, 2.0, 0.5]))
    np.testing.assert_allclose(ls.loss_scale, 2.0**14, rtol=ROUNDED)
    assert len(set(ls.loss_scale.tolist())) == 1
    assert finite.all()
    _, finite = jax.pmap(update, axis_name="i")(jnp.array([1.0, jnp.nan, 2.0, 0.5]))
    assert not finite.any()


def test_an_optimizer_unscales_by_the_scale_before_the_gradient():
    tx = ols.with_loss_scale(
        optax.sgd(1.0), ols.presets.LogMaxLossScale(initial_scale=256.0)
    )
    params, state = jax.jit(tx.apply_gradients)(
        jnp.array([512.0]), tx.init(jnp.zeros(1)), jnp.zeros(1)
    )
    assert params == -2
    np.testing.assert_allclose(state.loss_scale(), 2.0**15, rtol=ROUNDED)


BAD = {
    "initial_scale": [0, 2.0**25, True],
    "min_scale": [0, 2.0, None],
    "max_scale": [np.inf, 0.5],
    "log_max": [np.nan, None, 61.0, 1e4],
    "beta1": [1.0, 1 - 1e-12, -0.1, None],
    "beta2": [1.0, np.nan],
    "overflow_std_dev": [-1, np.inf, 1e39],
}


@pytest.mark.parametrize(
    ("name", "value"), [(k, v) for k, vs in BAD.items() for v in vs]
)
def test_a_bad_argument_is_named_with_what_was_given(name, value):
    named = "initial_scale" if value in (2.0, 0.5) else name
    with pytest.raises(ValueError, match=f"{named} must be .*, got "):
        ols.presets.LogMaxLossScale(**{name: value})
