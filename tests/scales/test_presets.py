import inspect
import json
import subprocess
import sys
import warnings

import chex
import flax.training.dynamic_scale
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pairs import product

import optax_lossscale as ols
from optax_lossscale import presets

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import jmp

REQUIRED = {
    "tensorflow_fixed": {"loss_scale_value": 128.0},
    "tensorflow_contrib_fixed": {"loss_scale": 128.0},
    "tensorflow_contrib_exponential": {
        "init_loss_scale": 2.0**15,
        "incr_every_n_steps": 1000,
    },
    "jmp": {"loss_scale": 2.0**15},
    "mpx": {"loss_scaling": 2.0**15},
    "megatron": {
        "initial_scale": 2.0**32,
        "min_scale": 1.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
        "hysteresis": 2,
    },
}
# As the owners' constructors have them, as far as they are about the loss scale.
SIGNATURES = {
    "tensorflow_dynamic": "initial_loss_scale=32768.0, increment_period=2000, multiplier=2.0",
    "tensorflow_fixed": "loss_scale_value",
    "tensorflow_contrib_fixed": "loss_scale",
    "tensorflow_contrib_exponential": "init_loss_scale, incr_every_n_steps, "
    "decr_every_n_nan_or_inf=2, incr_ratio=2.0, decr_ratio=0.8",
    "tf_keras": "dynamic=True, initial_scale=None, dynamic_growth_steps=None",
    "keras": "initial_scale=32768.0, dynamic_growth_steps=2000",
    "pytorch": "init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, "
    "enabled=True",
    "flax": "growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, fin_steps=0, "
    "scale=65536.0, minimum_scale=1.1754943508222875e-38",
    "jmp": "loss_scale, counter=0, period=2000, factor=2, min_loss_scale=1.0",
    "mpx": "loss_scaling, min_loss_scaling=1.0, factor=2, period=2000, counter=0",
    "megatron": "initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, "
    "hysteresis",
    "deepspeed": "init_scale=4294967296.0, scale_factor=2.0, scale_window=1000, min_scale=1, "
    "delayed_shift=1, consecutive_hysteresis=False, raise_error_at_min_scale=True",
    "fairseq": "init_scale=32768.0, scale_factor=2.0, scale_window=2000, tolerance=0.0, "
    "threshold=None, min_loss_scale=0.0001",
    "openseq2seq_logmax": "scale_min=1.0, scale_max=16777216.0, log_max=16.0, beta1=0.99, "
    "beta2=0.999, overflow_std_dev=3.09",
    "apex": "loss_scale='dynamic', init_scale=65536.0, scale_factor=2.0, scale_window=2000, "
    "min_loss_scale=None, max_loss_scale=16777216.0",
}
each = pytest.mark.parametrize("name", SIGNATURES)


def arguments_of(function):
    """As they are written, without their types."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))[1:-1]


def default(name):
    return ols.get({"preset": name} | REQUIRED.get(name, {}))


@each
def test_a_preset_is_found_by_name_and_documents_each_argument(name):
    function = getattr(presets, name)
    assert default(name) == function(**REQUIRED.get(name, {}))
    assert ">>> from optax_lossscale import presets" in function.__doc__
    for argument in inspect.signature(function).parameters:
        assert f"      {argument}: " in inspect.getsource(function)


def test_an_unknown_name_or_argument_is_answered_with_the_known():
    with pytest.raises(
        ValueError, match=r"no preset is named 'torch'; there are .*pytorch"
    ):
        ols.get({"preset": "torch"})
    with pytest.raises(ValueError, match="keys among init_scale, growth_factor"):
        ols.get({"preset": "pytorch", "initial_scale": 1.0})
    for other in ("get", "_floor", "Literal", 3):
        with pytest.raises(ValueError, match="no preset is named"):
            ols.get({"preset": other})


UNUSED = {("apex", "scale_factor"), ("tf_keras", "dynamic_growth_steps")}


@each
def test_a_wrong_argument_is_named_as_the_user_named_it(name):
    function = getattr(presets, name)
    for argument in inspect.signature(function).parameters:
        if (name, argument) not in UNUSED:
            arguments = REQUIRED.get(name, {}) | {argument: "wrong"}
            with pytest.raises(ValueError, match=f"^{argument}(,.*)? must be"):
                function(**arguments)


def test_an_error_about_two_arguments_names_both_as_the_user_did():
    said = "loss_scale must be at least min_loss_scale=2.0, got 1.0"
    with pytest.raises(ValueError, match=said):
        presets.jmp(1.0, min_loss_scale=2.0)
    with pytest.raises(ValueError, match="scale_min must be"):
        presets.openseq2seq_logmax(scale_min=4.0, scale_max=2.0)


def test_an_error_repeats_the_value_as_it_was_given():
    with pytest.raises(ValueError, match=r"^init_scale must be .*'initial_scale'$"):
        presets.pytorch("initial_scale")


@pytest.mark.parametrize("bounds", [(2.0**-10, 0.5), (1.0, 2.0), (4.0, 8.0)])
def test_logmax_starts_at_1_or_the_bound_next_to_it(bounds):
    ls = presets.openseq2seq_logmax(*bounds)
    assert ls() == np.clip(1.0, *bounds)


@each
def test_config_round_trip_through_json(name):
    ls = default(name)
    assert ols.LossScale.from_config(json.loads(json.dumps(ls.get_config()))) == ls
    assert ols.get(json.loads(json.dumps(ls.get_config()))) == ls


@each
def test_one_trace_over_a_loop(name):
    update = jax.jit(chex.assert_max_traces(lambda ls, g: (ls.update(g)[0], 0), n=1))
    ls = default(name)
    for g in (1.0, np.inf, 2.0, np.nan, 3.0):
        ls, _ = update(ls, jnp.full(3, g))


def test_names_order_and_defaults_are_the_references():
    functions = inspect.getmembers(presets, inspect.isfunction)
    public = {name: f for name, f in functions if f.__module__ == presets.__name__}
    found = {name: arguments_of(f) for name, f in public.items() if name[0] != "_"}
    assert found == SIGNATURES
    assert presets.tensorflow_dynamic() == ols.DynamicLossScale() == presets.tf_keras()


def test_off_or_fixed_is_a_fixed_scale():
    assert presets.pytorch(enabled=False) == ols.FixedLossScale(1)
    assert presets.tf_keras(dynamic=False, initial_scale=8) == ols.FixedLossScale(8)
    assert presets.apex(128.0) == ols.FixedLossScale(128)


def test_takes_arrays_where_the_reference_takes_them():
    zero = jnp.zeros((), jnp.int32)
    assert presets.jmp(jnp.asarray(8.0), zero) == presets.jmp(8.0)
    assert presets.mpx(jnp.float32(8), jnp.float32(1), counter=zero) == presets.mpx(8.0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dynamic": False},
        {"dynamic": False, "initial_scale": 2, "dynamic_growth_steps": 3},
    ],
)
def test_tf_keras_fixed_needs_a_scale_and_nothing_else(arguments):
    with pytest.raises(ValueError, match="with dynamic=False, pass initial_scale"):
        presets.tf_keras(**arguments)


def scales(ls, finite):
    step = lambda ls, ok: (ls.adjust(ok), ls.adjust(ok)())
    return np.asarray(jax.jit(lambda ls, f: jax.lax.scan(step, ls, f)[1])(ls, finite))


def test_apex_follows_its_published_rule():
    ls = presets.apex(
        init_scale=2.0**23, scale_window=2, min_loss_scale=2.0**22, scale_factor=9
    )
    finite = np.array([1, 1, 1, 1, 0, 0, 0, 1, 1], bool)
    expected = 2.0 ** np.array([23, 24, 24, 24, 23, 22, 22, 22, 23])
    np.testing.assert_array_equal(scales(ls, finite), expected)
    assert presets.apex(init_scale=2.0**30)() == 2.0**24
    assert scales(presets.apex(init_scale=1.0), np.zeros(3, bool))[-1] == 2.0**-3


def test_tensorflow_contrib_fixed_skips_at_an_unchanged_scale():
    tx = ols.with_loss_scale(optax.sgd(1.0), presets.tensorflow_contrib_fixed(128.0))
    params, state = jnp.ones(2), tx.init(jnp.ones(2))
    for grads in (jnp.array([1.0, jnp.inf]), jnp.array([jnp.nan, 1.0])):
        params, state = tx.apply_gradients(grads, state, params)
    np.testing.assert_array_equal(params, [1.0, 1.0])
    assert (state.loss_scale(), state.skipped_steps) == (128, 2)
    ols.raise_if_stuck(state)  # a fixed scale is never exhausted
    assert (
        scales(presets.tensorflow_contrib_fixed(3.0), np.arange(9000) % 7 > 2) == 3
    ).all()


STARTED = {
    "flax": {"fin_steps": 3, "growth_interval": 5},
    "jmp": {"loss_scale": 8.0, "counter": 3, "period": 6},
    "mpx": {"loss_scaling": 8.0, "counter": 3, "period": 6},
}


@pytest.mark.parametrize("name", STARTED)
def test_a_starting_count_is_restored_from_the_config(name):
    ls = ols.get({"preset": name, **STARTED[name]})
    restored = ols.get(json.loads(json.dumps(ls.get_config())))
    assert restored == ls
    assert restored.growth_counter == 3
    np.testing.assert_array_equal(
        scales(restored, np.ones(3, bool)), ls() * np.array([1, 1, 2])
    )


def test_no_preset_wakes_a_backend():
    arguments = {
        name: REQUIRED.get(name, {}) | STARTED.get(name, {}) for name in SIGNATURES
    }
    code = (
        "import jax, optax_lossscale as ols\n"
        f"for name, arguments in {arguments!r}.items():\n"
        "    ols.get({'preset': name, **arguments}).get_config()\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # an error after the first computation\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def apex_update_scale_hysteresis(
    scale, growth_factor, backoff_factor, interval, hysteresis
):
    """Apex's kernel of that name, by its published rule: one step, with a state of three."""
    state = [np.float32(scale), 0, hysteresis]

    def step(found_inf):
        scale, growth_tracker, hysteresis_tracker = state
        if found_inf:
            growth_tracker, hysteresis_tracker = 0, hysteresis_tracker - 1
            scale = scale * backoff_factor if hysteresis_tracker <= 0 else scale
        else:
            growth_tracker, hysteresis_tracker = growth_tracker + 1, hysteresis
            if growth_tracker == interval:
                growth_tracker, scale = 0, scale * growth_factor
        state[:] = np.float32(scale), growth_tracker, hysteresis_tracker
        return state[0]

    return step


@product(
    scale={"1": 1.0, "1024": 1024.0, "65536": 65536.0},
    growth_factor={"1": 1.0, "2": 2.0, "4": 4.0},
    hysteresis={"1": 1, "2": 2, "5": 5},
)
def test_hysteresis_by_consecutive_overflows_is_that_of_apexs_kernel(
    scale, growth_factor, hysteresis
):
    rng = np.random.default_rng(0)
    finite = np.concatenate([rng.random(40) < share for share in (0.9, 0.5, 0.1, 0.95)])
    step = apex_update_scale_hysteresis(scale, growth_factor, 0.5, 4, hysteresis)
    expected = np.array([step(not ok) for ok in finite])
    assert (expected > np.finfo(np.float32).tiny).all()
    ls = ols.DynamicLossScale(
        initial_scale=scale,
        growth_factor=growth_factor,
        growth_interval=4,
        hysteresis=hysteresis,
        hysteresis_refill="finite",
        min_scale=None,
    )
    np.testing.assert_array_equal(scales(ls, finite), expected)


# Live, side by side

factors = st.sampled_from([1.5, 2.0, 3.0, 1.1, 10.0])
sequences = st.lists(st.booleans(), min_size=50, max_size=50).map(np.array)


@pytest.mark.slow
@hypothesis.given(
    factors,
    st.sampled_from([0.5, 0.25, 0.3, 0.9]),
    st.integers(1, 6),
    st.sampled_from([1.0, 65536.0, 1000.0, 1e38]),
    st.sampled_from([float(np.finfo(np.float32).tiny), 1.0, 2.0**-10]),
    sequences,
)
def test_flax_scales_equal_the_installed_references(
    growth_factor, backoff_factor, interval, scale, minimum, finite
):
    arguments = {
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": interval,
        "scale": scale,
        "minimum_scale": minimum,
    }

    def step(reference, ok):
        loss_fn = lambda x: x * jnp.where(ok, 1.0, jnp.inf)
        reference, is_finite, _, _ = reference.value_and_grad(loss_fn)(
            jnp.float32(1e-30)
        )
        return reference, (reference.scale, is_finite)

    reference = flax.training.dynamic_scale.DynamicScale(**arguments)
    reference = reference.replace(scale=jnp.float32(scale), fin_steps=jnp.int32(0))
    theirs, decisions = jax.jit(lambda r, f: jax.lax.scan(step, r, f)[1])(
        reference, finite
    )
    np.testing.assert_array_equal(decisions, finite)
    np.testing.assert_array_equal(scales(presets.flax(**arguments), finite), theirs)


@pytest.mark.slow
@hypothesis.given(
    st.integers(1, 6), factors, st.sampled_from([1.0, 2.0**15, 1000.0, 1e38]), sequences
)
def test_jmp_scales_equal_the_installed_references(period, factor, scale, finite):
    reference = jmp.DynamicLossScale(
        jnp.float32(scale), jnp.int32(0), period=period, factor=factor
    )
    step = lambda r, ok: (r.adjust(ok), r.adjust(ok).loss_scale)
    theirs = jax.jit(lambda r, f: jax.lax.scan(step, r, f)[1])(reference, finite)
    ours = scales(presets.jmp(scale, period=period, factor=factor), finite)
    np.testing.assert_array_equal(ours, theirs)


# Never 0, inf or NaN

STEPS = 100_000
FAST = {
    "tensorflow_dynamic": {"increment_period": 1, "multiplier": 3.0},
    "tensorflow_contrib_exponential": {
        "init_loss_scale": 1000.0,
        "incr_every_n_steps": 1,
        "decr_every_n_nan_or_inf": 1,
    },
    "tf_keras": {"dynamic_growth_steps": 1},
    "keras": {"initial_scale": 1000.0, "dynamic_growth_steps": 1},
    "pytorch": {"growth_interval": 1, "growth_factor": 1.1, "backoff_factor": 0.7},
    "flax": {"growth_interval": 1, "minimum_scale": None, "growth_factor": 1e6},
    "jmp": {"loss_scale": 1000.0, "period": 1, "factor": 3, "min_loss_scale": 1e-37},
    "mpx": {"loss_scaling": 1000.0, "period": 1, "factor": 3},
    "megatron": {
        "initial_scale": 1000.0,
        "min_scale": 1e-37,
        "growth_factor": 1.7,
        "backoff_factor": 0.01,
        "growth_interval": 1,
        "hysteresis": 1,
    },
    "deepspeed": {"scale_window": 1, "scale_factor": 1.01},
    "fairseq": {"scale_window": 1, "tolerance": 0.3, "scale_factor": 3.0},
    "openseq2seq_logmax": {"beta1": 0.0, "beta2": 0.5},
    "apex": {"scale_window": 1, "max_loss_scale": 3e38, "min_loss_scale": None},
}


def adversarial_gradients():
    """Eight sequences: always and never finite, in long waves, at random; odd sizes too."""
    rng = np.random.default_rng(0)
    t = np.arange(STEPS)
    waves = [t % (2 * n) < n for n in (1, 300, 5_000)]
    finite = np.stack(
        [t >= 0, t < 0, *waves, *(rng.random((3, STEPS)) < [[0.1], [0.5], [0.99]])]
    )
    sizes = rng.choice(np.float32([0.0, 1e-45, 1e-38, 1.0, 3e38]), (8, STEPS))
    return jnp.asarray(np.where(finite, sizes, np.inf).T)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_a_hundred_thousand_steps_never_leave_the_normal_range(name):
    def step(carry, gradient):
        ls, least, most = carry
        ls, _ = ls.update(gradient)
        # A NaN stays in both.
        return (ls, jnp.minimum(least, ls()), jnp.maximum(most, ls())), None

    def run(gradients):
        ls = jax.tree.map(jnp.asarray, ols.get({"preset": name, **FAST[name]}))
        (_, least, most), _ = jax.lax.scan(step, (ls, ls(), ls()), gradients)
        return least, most

    least, most = jax.jit(jax.vmap(run, in_axes=1))(adversarial_gradients())
    assert (least >= np.finfo(np.float32).tiny).all()
    assert np.isfinite(most).all()
    assert (most > least).any()


# A user's own strategy, in the manner of tf.contrib's LossScaleManager


class EverySecondOverflow(ols.LossScale):
    """Backs off at every second overflow, and remembers how often it grew."""

    incr_every_n_steps: int = 2
    num_good_steps: jax.Array = ols.state_field(0)
    num_bad_steps: jax.Array = ols.state_field(0)
    growths: jax.Array = ols.state_field(0)

    def adjust(self, grads_finite):
        good = jnp.where(grads_finite, self.num_good_steps + 1, 0)
        bad = self.num_bad_steps + jnp.where(grads_finite, 0, 1)
        grows, backs_off = good >= self.incr_every_n_steps, bad >= 2
        factor = jnp.where(grows, 2.0, jnp.where(backs_off, 0.5, 1.0))
        changed = grows | backs_off
        return self.replace(
            loss_scale=jnp.maximum(1.0, self() * factor),
            num_good_steps=jnp.where(changed, 0, good),
            num_bad_steps=jnp.where(changed, 0, bad),
            growths=self.growths + grows,
        )


def test_a_strategy_of_ones_own_trains_and_has_a_config():
    tx = ols.with_loss_scale(optax.adam(0.1), EverySecondOverflow(initial_scale=8.0))

    @jax.jit
    def train(params, state, gradients):
        def step(carry, gradient):
            params, state = carry
            scaled = state.loss_scale.scale(gradient)
            carry = tx.apply_gradients(scaled, state, params)
            return carry, carry[1].loss_scale()

        return jax.lax.scan(step, (params, state), gradients)

    params = jnp.zeros(())
    gradients = jnp.array([1.0, 1.0, jnp.inf, 1.0, jnp.nan, 1.0, 1.0])
    (params, state), history = train(params, tx.init(params), gradients)
    np.testing.assert_array_equal(history, [8, 16, 16, 16, 8, 8, 16])
    assert state.loss_scale.growths == 2
    assert state.skipped_steps == 2
    ls = EverySecondOverflow(initial_scale=8.0, incr_every_n_steps=3)
    assert ols.get(json.loads(json.dumps(ls.get_config()))) == ls


@pytest.mark.parametrize(
    ("preset", "factor"),
    [("tensorflow_dynamic", "multiplier"), ("deepspeed", "scale_factor")],
)
def test_a_factor_whose_reciprocal_is_subnormal_is_refused_by_its_own_name(
    preset, factor
):
    with pytest.raises(
        ValueError, match=rf"^{factor} must be a number between 1 and 2\*\*126"
    ):
        getattr(presets, preset)(**{factor: 1e38})
