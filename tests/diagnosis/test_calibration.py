import functools
import gc
import pathlib
import runpy
import weakref

import chex
import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale.demo import _model, _text


def loss_fn(w, x):
    """Its gradient, in float16, is x: scaled, it overflows above 65504 / max(x)."""
    return jnp.sum((w.astype(jnp.float16) * x).astype(jnp.float32))


@pytest.mark.parametrize("exponent", [-30, -8, 0, 7, 12])
def test_finds_the_largest_power_of_two(exponent):
    w, x = jnp.ones(3), jnp.array([0.1, 0.9, 0.5]) * 2.0**exponent
    found = ols.diagnosis.find_initial_scale(loss_fn, w, x.astype(jnp.float16), margin=1)
    at = lambda scale: ols.all_finite(
        ols.value_and_scaled_grad(loss_fn, ols.get(scale))(w, x.astype(jnp.float16))[1]
    )
    assert at(found.largest)
    assert not at(found.largest * 2)
    assert found.scale == found.largest / 2
    assert found.spare_bits == 1


def test_of_several_batches_the_least_compiled_for_once():
    counted = chex.assert_max_traces(loss_fn, n=1)
    first, *others = [(jnp.full(3, x, jnp.float16),) for x in (1.0, 64.0, 0.25)]
    found = ols.diagnosis.find_initial_scale(counted, jnp.ones(3), *first, others=others)
    assert found == ols.diagnosis.find_initial_scale(loss_fn, jnp.ones(3), *others[0])


@pytest.mark.parametrize("compiled", [lambda fun: fun, jax.jit])
def test_a_loss_that_scales_its_own_gradient_counts_as_if_it_did_not(compiled):
    """As losses do in NNX and Equinox; a compiled function was traced with the scale before."""
    scaled = compiled(lambda w, x: ols.scale_gradient(loss_fn(w, x), 2.0**10))
    arguments = jnp.ones(3), jnp.full(3, 0.5, jnp.float16)
    assert jax.grad(scaled)(*arguments).max() == 2.0**9
    for find in (ols.diagnosis.find_initial_scale, lambda *args: str(ols.diagnose(*args))):
        assert find(scaled, *arguments) == find(loss_fn, *arguments)
    assert jax.grad(scaled)(*arguments).max() == 2.0**9


def test_asks_the_function_anew_each_time():
    """Not one that it was compiled for before, nor keeps it in memory."""

    class Model:
        weight = 1.0

        def loss(self, w, x):
            return loss_fn(w, x) * self.weight

    model, x = Model(), jnp.ones(3, jnp.float16)
    before = ols.diagnosis.find_initial_scale(model.loss, jnp.ones(3), x)
    model.weight = 8.0
    assert (
        ols.diagnosis.find_initial_scale(model.loss, jnp.ones(3), x).largest == before.largest / 8
    )
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_parameters_that_are_no_floats():
    params = {"w": jnp.ones(3), "steps": jnp.int32(3), "none": None}
    found = ols.diagnosis.find_initial_scale(
        lambda p: loss_fn(p["w"], jnp.ones(3, jnp.float16)), params
    )
    assert found.largest == 2.0**15


def test_passes_arguments_on():
    def with_aux(w, x, *, weight):
        return weight * loss_fn(w, x), "aux of any kind"

    x = jnp.ones(3, jnp.float16)
    found = ols.diagnosis.find_initial_scale(with_aux, jnp.ones(3), x, has_aux=True, weight=8.0)
    assert found.largest == ols.diagnosis.find_initial_scale(loss_fn, jnp.ones(3), x).largest / 8


def test_says_what_it_found():
    found = ols.diagnosis.find_initial_scale(
        loss_fn, jnp.ones(3), jnp.ones(3, jnp.float16), margin=4
    )
    assert str(found) == "2**11, with 4 bits to spare before gradients overflow"
    wide = ols.diagnosis.find_initial_scale(lambda w: jnp.sum(w**2) * 1e-3, jnp.ones(3))
    assert "nothing overflows up to 2**126" in str(wide)


def finite_between(low, high):
    """A loss whose gradients are finite at scales from 2**low to 2**high alone."""

    @jax.custom_vjp
    def identity(w):
        return w

    def backward(_, g):
        exponent = jnp.log2(jnp.abs(g))
        return (jnp.where((exponent >= low) & (exponent <= high), g, jnp.nan),)

    identity.defvjp(lambda w: (w, None), backward)
    return lambda w: jnp.sum(identity(w))


@pytest.mark.parametrize(("low", "high"), [(14, 45), (3, 4), (77, 77), (-80, -70), (126, 126)])
def test_finds_scales_that_are_neither_small_nor_large(low, high):
    found = ols.diagnosis.find_initial_scale(finite_between(low, high), jnp.ones(3))
    assert found.largest == 2.0**high
    assert found.scale == 2.0 ** max(high - 2, low)


def test_a_scale_that_holds_for_every_batch():
    """The smallest that one needs is above the largest of another: there is none."""
    loss_fn = lambda w, x: finite_between(5, 9)(w * x)
    assert (
        ols.diagnosis.find_initial_scale(loss_fn, jnp.ones(3), 1.0, others=[(1.0,)]).largest
        == 2.0**9
    )
    shifted = lambda w, by: finite_between(5, 9)(w) if by is None else finite_between(20, 29)(w)
    with pytest.raises(ValueError, match="not finite at any loss scale"):
        ols.diagnosis.find_initial_scale(shifted, jnp.ones(3), None, others=[(1.0,)])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_loss_that_is_not_finite_is_told(bad):
    """Though its gradients are."""
    loss_fn = lambda w: jnp.sum(w) + bad
    with pytest.raises(ValueError, match=r"the loss is (nan|inf), and no loss scale can"):
        ols.diagnosis.find_initial_scale(loss_fn, jnp.ones(3))
    with pytest.raises(ValueError, match=r"the loss is (nan|inf)"):
        ols.diagnosis.find_initial_scale(
            lambda w, x: jnp.sum(w) + x, jnp.ones(3), 1.0, others=[(bad,)]
        )


def test_gradients_that_no_scale_makes_finite_are_told():
    with pytest.raises(ValueError, match=r"no loss scale can change that, .*explain"):
        ols.diagnosis.find_initial_scale(lambda w: jnp.sum(w) * jnp.nan, jnp.ones(3))
    with pytest.raises(ValueError, match=r"not finite at any loss scale .*explain"):
        ols.diagnosis.find_initial_scale(lambda w: jnp.sum(jnp.sqrt(w) * 0), jnp.zeros(3))


def test_the_margin_is_a_positive_int():
    for margin in (0, 1.5, True, None):
        with pytest.raises(ValueError, match="margin must be an int"):
            ols.diagnosis.find_initial_scale(loss_fn, jnp.ones(3), jnp.ones(3), margin=margin)


@pytest.mark.slow
def test_the_demo_skips_nothing_in_its_first_steps():
    """Whether its loss is small, or so large that TensorFlow's default start skips ten."""
    script = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "docs/initial_scales.py"))
    script["train"].__globals__["STEPS"] = 50
    tokens = next(_text.batches(_text.read(None), 1, seed=0))
    for weight in script["LOSSES"].values():
        loss_fn = functools.partial(script["loss_fn"], weight)
        found = ols.diagnosis.find_initial_scale(loss_fn, _model.init(jax.random.key(0)), tokens)
        skipped, _ = script["train"](ols.DynamicLossScale(initial_scale=found.scale), weight)
        assert skipped == 0
    skipped, _ = script["train"](ols.DynamicLossScale(), weight)
    assert skipped == 10


def test_with_has_aux_a_function_that_returns_no_pair_is_refused():
    with pytest.raises(TypeError, match=r"must return a pair \(loss, aux\), got a "):
        ols.diagnosis.find_initial_scale(lambda w: (w**2).sum(), jnp.ones(2), has_aux=True)
