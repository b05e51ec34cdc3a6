"""A fault planted in a layer is named, wherever it is."""

import functools
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict

import optax_lossscale as ols

BLOCKS, WIDTH = 12, 16
FAULTY = 7


@jax.custom_vjp
def steep(x):
    """The identity, whose gradient overflows in float16."""
    return x


steep.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.asarray(6e4, g.dtype) * 6e4,))


def block(params, x, fault):
    """A residual block in float16, with what a fault makes of it."""
    y = jnp.tanh(x @ params["in"].astype(jnp.float16))
    if fault == "forward":
        y = y * 6e4 * 6e4
    if fault == "backward":
        y = steep(y)
    return x + y @ params["out"].astype(jnp.float16)


def loss_fn(params, probes, x, fault):
    x = x.astype(jnp.float16)
    names = sorted(params["blocks"], key=lambda name: int(name.split("_")[1]))
    for i, name in enumerate(names):
        x = block(params["blocks"][name], x, fault if i == FAULTY else None)
        x = ols.diagnosis.tap(x, probes and probes[name])
    if fault == "loss":
        return jnp.mean(jnp.exp(100 * x.astype(jnp.float32)))
    if fault == "loss, backward":
        return jnp.mean(steep(x).astype(jnp.float32) ** 2)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def params():
    rng = np.random.default_rng(0)
    normal = lambda: jnp.array(rng.normal(size=(WIDTH, WIDTH)) / 8, jnp.float32)
    return {"blocks": {f"block_{i}": {"in": normal(), "out": normal()} for i in range(BLOCKS)}}


@functools.cache
def step(fault, tapped=True):
    """The evidence that a compiled step returns."""

    @jax.jit
    def evidence(params, x):
        probes = {name: ols.diagnosis.probe() for name in params["blocks"]} if tapped else None
        value_and_grad = ols.value_and_scaled_grad(loss_fn, ols.get(2.0**4), argnums=(0, 1))
        loss, (grads, records) = value_and_grad(params, probes, x, fault)
        return ols.diagnosis.nonfinite_leaves(grads), records, loss

    return evidence(params(), jnp.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH))


FAULTS = {
    "forward": f"block_{FAULTY}",
    "backward": f"block_{FAULTY}",
    "loss": "the loss",
    "loss, backward": "the loss",
}


@pytest.mark.parametrize(("fault", "place"), FAULTS.items())
def test_names_the_place_first(fault, place):
    leaves, taps, loss = step(fault)
    explanation = ols.diagnosis.explain(leaves, taps=taps, loss=loss)
    assert explanation.suspects[0].name == place
    assert f"1. {place}: " in str(explanation)


def test_without_a_fault_there_is_no_suspect():
    leaves, taps, loss = step(None)
    explanation = ols.diagnosis.explain(leaves, taps=taps, loss=loss)
    assert explanation.suspects == []
    assert str(explanation) == "All gradients are finite."


def test_says_what_was_recorded_and_no_more():
    leaves, taps, loss = step("forward")
    (suspect,) = ols.diagnosis.explain(leaves, taps=taps, loss=loss).suspects
    assert suspect.finding.endswith(f" of {8 * WIDTH} in its value")
    leaves, taps, loss = step("backward")
    (suspect,) = ols.diagnosis.explain(leaves, taps=taps, loss=loss).suspects
    assert suspect.finding.endswith(f" in the gradient that it passes to block_{FAULTY - 1}")


def test_gradients_alone_name_what_comes_before_the_fault():
    """Which come after the fault is all that they say, and what it was if it was the loss."""
    leaves, _, loss = step("backward", tapped=False)
    names = {s.name for s in ols.diagnosis.explain(leaves, loss=loss).suspects}
    assert names == {f"blocks/block_{i}/{p}" for i in range(FAULTY) for p in ("in", "out")} | {
        f"blocks/block_{FAULTY}/in"
    }
    leaves, _, loss = step("loss", tapped=False)
    assert ols.diagnosis.explain(leaves, loss=loss).suspects[0].name == "the loss"


def test_infinities_rank_before_nans_and_few_before_many():
    grads = {
        "all_nan": jnp.full(4, jnp.nan),
        "layer_10": jnp.array([1.0, jnp.nan]),
        "layer_2": jnp.array([1.0, jnp.nan]),
        "one_inf": jnp.array([1.0, 1.0, -jnp.inf]),
        "fine": jnp.ones(3),
        "none": None,
        "count": jnp.arange(3),
    }
    explanation = ols.diagnosis.explain(ols.diagnosis.nonfinite_leaves(grads))
    names = [s.name for s in explanation.suspects]
    assert names == ["one_inf", "layer_2", "layer_10", "all_nan"]
    assert explanation.summary == "4 of 5 gradients are not finite."


def test_the_report_is_short():
    grads = {f"layer_{i}": jnp.array([1.0, jnp.inf]) for i in range(40)}
    lines = str(ols.diagnosis.explain(ols.diagnosis.nonfinite_leaves(grads))).splitlines()
    assert lines[0] == "40 of 40 gradients are not finite."
    assert len(lines) == 7
    assert lines[-1] == "and 35 more."


def test_names_places_in_lists_stacks_and_ordered_trees():
    """The order is the model's: of ten layers and more, and of a stack's."""
    bad = jnp.array([0.0, 0.0, 1.0])
    stack = ols.diagnosis.probe(3)
    stack = stack._replace(value=stack.value._replace(nans=bad, size=jnp.ones(3)))
    assert ols.diagnosis.explain({}, taps={"stack": stack}).suspects[0].name == "stack/2"
    nan = ols.diagnosis.probe()._replace(
        value=ols.diagnosis.probe().value._replace(nans=jnp.ones(()), size=jnp.ones(()))
    )
    for tree, name in (
        ([ols.diagnosis.probe(), nan, nan], "1"),
        ({"layer_2": nan, "layer_10": nan}, "layer_2"),
        (FrozenDict({"layer_2": nan, "layer_10": nan}), "layer_2"),
        (OrderedDict(encoder=nan, decoder=nan), "encoder"),
        (OrderedDict(layer_10=ols.diagnosis.probe(), layer_2={"b": nan, "a": None}), "layer_2/b"),
        (optax.EmaState(count=nan, ema=[nan]), "count"),
        (nan, "."),
    ):
        assert ols.diagnosis.explain({}, taps=tree).suspects[0].name == name


@pytest.mark.parametrize(
    "wrap", [lambda taps: taps, lambda taps: [taps], lambda taps: {"a": taps}]
)
def test_a_dict_that_does_not_tell_the_order_is_refused(wrap):
    taps = wrap({"encoder": ols.diagnosis.probe(), "decoder": ols.diagnosis.probe()})
    with pytest.raises(ValueError, match=r"model's order, .*encoder.* list or an OrderedDict"):
        ols.diagnosis.explain({}, taps=taps)


def test_taps_that_recorded_nothing_say_nothing():
    """Probes whose gradient was not asked for, or in a branch that was not taken."""
    leaves, taps, loss = step("backward")
    untaken = jax.tree.map(jnp.zeros_like, taps["block_7"])
    explanation = ols.diagnosis.explain(leaves, taps=taps | {"block_7": untaken}, loss=loss)
    assert explanation.suspects[0].name == "block_8"
    explanation = ols.diagnosis.explain(leaves, taps=[ols.diagnosis.probe()] * 3)
    assert "No tap recorded anything" in str(explanation)
    assert explanation.suspects == ols.diagnosis.explain(leaves).suspects
    explanation = ols.diagnosis.explain(
        step("loss")[0], taps=[ols.diagnosis.probe()] * 3, loss=jnp.nan
    )
    assert explanation.suspects[0] == ("the loss", "it is nan")


def test_taps_that_are_no_probes_are_refused():
    leaves, _, _ = step("forward")
    with pytest.raises(
        TypeError, match=r"taps must be a tree of Probes, got a \w+ at blocks/block_0/in"
    ):
        ols.diagnosis.explain(leaves, taps=params())


def test_leaves_that_nonfinite_leaves_did_not_return_are_refused():
    leaves, taps, _ = step("forward")
    replicas = jax.tree.map(lambda x: jnp.stack([x] * 4), leaves)
    for other in (params(), [1.0], jnp.ones(3), replicas):
        with pytest.raises(TypeError, match="leaves must be what nonfinite_leaves returned"):
            ols.diagnosis.explain(other, taps=taps)
        with pytest.raises(TypeError, match="leaves must be what nonfinite_leaves returned"):
            ols.raise_if_stuck(ols.get(128), leaves=other)


def test_the_summary_counts_gradients():
    leaves, taps, loss = step("forward")
    explanation = ols.diagnosis.explain(leaves, taps=taps, loss=loss)
    assert explanation.summary == f"{2 * BLOCKS} of {2 * BLOCKS} gradients are not finite."


def test_nonfinite_leaves_counts_leaves_of_every_kind_by_path():
    tree = {"a": [np.float32("nan"), 1.0], "b": {"c": jnp.array([complex(1, np.inf)])}, "d": None}
    leaves = jax.jit(ols.diagnosis.nonfinite_leaves)(tree)
    assert {k: (v.nans, v.infinities) for k, v in leaves.items()} == {
        "a/0": (1, 0),
        "a/1": (0, 0),
        "b/c": (0, 1),
    }
