"""The calls in docs/migrating.md make the scales that other systems had, run for run."""

import doctest
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

TESTS = pathlib.Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
CELLS = re.compile(r"^\| (.*?) \| `(.*?)` \| `(.*?)` \|", re.MULTILINE)
ROWS = {
    name: calls for name, *calls in CELLS.findall((DOCS / "migrating.md").read_text())
}

# The row of each file of recorded runs, and what the original's arguments default to.
ORIGINALS = {
    "pytorch": (
        "PyTorch",
        {
            "init_scale": 2.0**16,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
        },
    ),
    "flax": (
        "Flax",
        {
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "scale": 2.0**16,
            "minimum_scale": None,
        },
    ),
    "jmp": (
        "JMP",
        {"loss_scale": 2.0**15, "period": 2000, "factor": 2, "min_loss_scale": 1.0},
    ),
    "mpx": (
        "MPX",
        {"loss_scaling": 2.0**15, "period": 2000, "factor": 2, "min_loss_scaling": 1.0},
    ),
    "keras": ("Keras 3", {"initial_scale": 2.0**15, "dynamic_growth_steps": 2000}),
    "tf_keras": ("tf.keras", {"initial_scale": 2.0**15, "dynamic_growth_steps": 2000}),
    "tensorflow_dynamic": (
        "TensorFlow, `DynamicLossScale`",
        {"initial_loss_scale": 2.0**15, "increment_period": 2000, "multiplier": 2.0},
    ),
    "tensorflow_fixed": ("TensorFlow, `FixedLossScale`", {"loss_scale_value": 128}),
    "megatron": (
        "Megatron-LM",
        {
            "initial_scale": 2.0**32,
            "min_scale": 1.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 1000,
            "hysteresis": 2,
        },
    ),
    "deepspeed": (
        "DeepSpeed",
        {
            "init_scale": 2.0**32,
            "scale_factor": 2.0,
            "scale_window": 1000,
            "min_scale": 1,
            "delayed_shift": 1,
        },
    ),
    "apex": (
        "Apex",
        {
            "init_scale": 2.0**16,
            "scale_window": 2000,
            "min_loss_scale": None,
            "max_loss_scale": 2.0**24,
        },
    ),
}
RUNS = {
    f"{path.stem}-{i}": json.loads(line)
    for path in sorted((TESTS / "traces").glob("*.jsonl"))
    for i, line in enumerate(path.read_text().splitlines())
}
NO_CALL = {
    "starts above 2**60": [
        *["flax-10", "jmp-3", "jmp-4", "jmp-7", "jmp-8", "jmp-10", "pytorch-4"],
        *["pytorch-5", "pytorch-8", "tensorflow_contrib_exponential-9"],
        *["tensorflow_dynamic-3", "tensorflow_dynamic-4", "tensorflow_dynamic-8"],
    ],
    "refills at every finite step": [
        f"deepspeed-{i}" for i in (0, 1, 2, 5, 7, 8, 13, 14, 23)
    ],
}


def expressed():
    """The runs that a call can repeat; of each system, the first three are quick."""
    left_out = {name for names in NO_CALL.values() for name in names}
    return [
        pytest.param(name, id=name, marks=[pytest.mark.slow] * (name[-2:] > "-2"))
        for name in RUNS
        if name not in left_out
    ]


def called(call, arguments):
    return eval(call, vars(ols) | arguments)


def from_the_page(name):
    """The loss scale that the page's table, or its class, makes for a recorded run."""
    system, config = name.rpartition("-")[0], RUNS[name]["config"]
    if system == "tensorflow_contrib_exponential":
        namespace = {}
        page = (DOCS / "loss_scales.md").read_text()
        for example in doctest.DocTestParser().get_examples(page):
            exec(example.source, namespace)
        start = config["init_loss_scale"]
        config = {k: v for k, v in config.items() if k != "init_loss_scale"}
        return namespace["ExponentialUpdate"](initial_scale=start, **config)
    row, defaults = ORIGINALS[system]
    return called(ROWS[row][1], defaults | config)


def bits(text):
    return np.array([c == "1" for c in text])


@jax.jit
def replayed(ls, finite):
    def step(ls, finite):
        ls, should_apply = ls.update({"w": jnp.where(finite, 1.0, jnp.inf)})
        return ls, (ls(), should_apply, ls.exhausted())

    return jax.lax.scan(step, ls, finite)[1]


def test_each_row_of_the_page_has_a_test():
    assert set(ROWS) == {row for row, _ in ORIGINALS.values()}
    assert len(RUNS) == 133


@pytest.mark.parametrize("system", ORIGINALS)
def test_both_calls_of_a_row_agree(system):
    row, defaults = ORIGINALS[system]
    with_defaults, with_arguments = ROWS[row]
    assert called(with_defaults, {}) == called(with_arguments, defaults)


@pytest.mark.parametrize("name", expressed())
def test_scales_and_decisions_are_the_recorded_ones(name):
    run = RUNS[name]
    ls = from_the_page(name)
    scale, applied, exhausted = jax.device_get(replayed(ls, bits(run["finite"])))
    recorded = np.array(run["scale"], np.float32)
    outside = (recorded < 2.0**-60) | (recorded > 2.0**60)
    n = int(np.argmax([*outside, True]))  # steps before the recorded scale leaves these
    assert n >= 9
    # The reciprocal of 3 or 1.5 is rounded to float32 here, and the originals divide.
    divisors = {"multiplier", "factor"} & set(run["config"])
    rounds = any(np.frexp(run["config"][name])[0] != 0.5 for name in divisors)
    rtol = 1e-5 if rounds else 0
    np.testing.assert_allclose(scale[:n], recorded[:n], rtol=rtol)
    np.testing.assert_array_equal(applied[:n], bits(run["apply"])[:n])
    if run["config"].get("raise_error_at_min_scale"):
        assert not exhausted[:n].any()
    if run.get("raises_at_end"):
        assert exhausted[-1]


@pytest.mark.parametrize("name", NO_CALL["starts above 2**60"])
def test_a_run_that_starts_above_the_bounds_is_refused(name):
    with pytest.raises(ValueError, match=r"initial_scale must be .* 2\*\*60"):
        from_the_page(name)


def test_with_consecutive_hysteresis_deepspeed_refills_at_every_finite_step():
    differs = []
    for name in NO_CALL["refills at every finite step"]:
        assert RUNS[name]["config"]["consecutive_hysteresis"]
        scale, *_ = replayed(from_the_page(name), bits(RUNS[name]["finite"]))
        differs.append(not np.array_equal(scale, RUNS[name]["scale"]))
    assert any(differs)


@pytest.mark.parametrize("name", ["keras-0", "keras-3", "tf_keras-0", "tf_keras-4"])
def test_parameters_are_the_recorded_ones(name):
    """Each gradient is 0.125 times the scale; the inner optimizer is SGD(1.0)."""
    run = RUNS[name]
    tx = ols.with_loss_scale(optax.sgd(1.0), from_the_page(name))

    def step(carry, finite):
        param, state = carry
        grad = jnp.where(finite, 0.125 * state.loss_scale(), jnp.nan)
        param, state = tx.apply_gradients(grad, state, param)
        return (param, state), param

    start = (jnp.zeros(()), tx.init(jnp.zeros(())))
    scan = jax.jit(lambda start, finite: jax.lax.scan(step, start, finite))
    _, params = scan(start, bits(run["finite"]))
    np.testing.assert_array_equal(params, np.array(run["param"], np.float32))


def test_apex_follows_its_published_rule():
    row, defaults = ORIGINALS["apex"]
    config = {"init_scale": 2.0**23, "scale_window": 2, "min_loss_scale": 2.0**22}
    ls = called(ROWS[row][1], defaults | config)
    scale, *_ = replayed(ls, np.array([1, 1, 1, 1, 0, 0, 0, 1, 1], bool))
    np.testing.assert_array_equal(np.log2(scale), [23, 24, 24, 24, 23, 22, 22, 22, 23])
    high = called(ROWS[row][1], defaults | {"init_scale": 2.0**30})
    assert high() == 2.0**24
