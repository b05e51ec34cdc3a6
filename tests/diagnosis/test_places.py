"""In which order places ran, and which of them is named, from hand-made records."""

from collections import OrderedDict

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols


def of(nans, gradient_nans=0.0, infinities=0.0, size=8.0, positive=0.0):
    """A record, or a stack of records, of so many numbers that are not finite."""
    nans, gradient_nans, infinities, size, positive = np.broadcast_arrays(
        nans, gradient_nans, infinities, size, positive
    )
    empty = ols.diagnosis.probe(nans.shape).value
    value = empty._replace(
        size=size, nans=nans, infinities=infinities, positive_infinities=positive
    )
    gradient = empty._replace(size=size, nans=gradient_nans)
    return ols.diagnosis.Probe(value, gradient)


FINE = of(0.0)


def from_turn(first, n=5):
    """A loop whose values are NaN from a turn on."""
    return of((np.arange(n) >= first) * 1.0)


def up_to_turn(last, n=5):
    """A loop whose gradients are NaN from a turn back."""
    return of(np.zeros(n), (np.arange(n) <= last) * 1.0)


def first(taps, loss=np.nan, grads=None):
    leaves = {} if grads is None else ols.diagnosis.nonfinite_leaves(grads)
    return ols.diagnosis.explain(leaves, taps=taps, loss=loss).suspects[0].name


CONTAINERS = {
    "list": lambda a, b: ([a, b], ("0", "1")),
    "tuple": lambda a, b: ((a, b), ("0", "1")),
    "OrderedDict": lambda a, b: (OrderedDict(b=a, a=b), ("b", "a")),
    "dict": lambda a, b: ({"tap_1": a, "tap_2": b}, ("tap_1", "tap_2")),
    "NamedTuple": lambda a, b: (optax.EmaState(count=a, ema=b), ("count", "ema")),
}


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_stacks_of_one_length_in_one_container_are_turns_of_one_loop(container):
    taps, (attn, mlp) = container(from_turn(2), from_turn(2))
    assert first(taps) == f"{attn}/2"
    taps, _ = container(from_turn(3), from_turn(2))
    assert first(taps) == f"{mlp}/2"
    taps, _ = container(up_to_turn(2), up_to_turn(1))
    assert first(taps, loss=1.0) == f"{mlp}/2"
    taps, _ = container(up_to_turn(2), up_to_turn(2))
    assert first(taps, loss=1.0) == f"{attn}/3"


def test_a_container_for_each_tells_loops_of_one_length_apart():
    """An encoder and a decoder of the same depth."""
    layers = lambda stack: OrderedDict(attn=stack, mlp=stack)
    healthy, bad_throughout = layers(from_turn(5)), layers(from_turn(0))
    taps = OrderedDict(encoder=layers(from_turn(3)), decoder=bad_throughout)
    assert first(taps) == "encoder/attn/3"
    taps = OrderedDict(encoder=healthy, decoder=layers(from_turn(3)))
    assert first(taps) == "decoder/attn/3"
    assert first([[from_turn(1)], [from_turn(0)]]) == "0/0/1"
    assert first([from_turn(1), from_turn(0)]) == "1/0"


def test_a_container_beside_a_stack_is_in_the_same_loop():
    attn = OrderedDict(scores=from_turn(3), out=from_turn(3))
    assert first(OrderedDict(attn=attn, mlp=from_turn(2))) == "mlp/2"


def test_loops_in_loops():
    """The layers of a recurrent net, each over its steps and then something once a layer."""
    layer = of(np.array([0.0, 1]))
    early, late = of(np.array([[0.0, 0, 0], [0, 1, 1]])), of(np.array([[0.0, 0, 0], [0, 0, 1]]))
    steps = lambda a, b: OrderedDict(a=a, b=b)
    assert first(OrderedDict(steps=steps(early, early), layer=layer)) == "steps/a/1/1"
    assert first(OrderedDict(steps=steps(late, early), layer=layer)) == "steps/b/1/1"
    second = of(np.array([[0.0] * 3, [1] * 3]))
    assert first(OrderedDict(steps=steps(second, second), layer=of(np.ones(2)))) == "layer/0"


def test_where_loss_and_gradients_are_finite_nothing_is_a_suspect():
    leaves = ols.diagnosis.nonfinite_leaves({"w": jnp.ones(2)})
    taps = [of(0, infinities=3, positive=1), of(3, gradient_nans=3), of(0, infinities=8)]
    assert ols.diagnosis.explain(leaves, taps=taps, loss=1.0).suspects == []
    assert ols.diagnosis.explain(leaves, taps=taps).suspects == []
    assert ols.diagnosis.explain(leaves, taps=taps, loss=np.nan).suspects[0].name == "0"


GRADS = {"w": jnp.array([1.0, jnp.nan])}
MASK, OVERFLOW = of(0, infinities=3), of(0, infinities=3, positive=1)


def test_infinities_that_leave_the_loss_finite_are_no_fault():
    assert first([OVERFLOW, FINE], loss=1.0, grads=GRADS) == "w"
    assert first([OVERFLOW, of(1)], loss=1.0, grads=GRADS) == "1"
    assert first([OVERFLOW, FINE], loss=np.inf) == "0"
    assert first([FINE, of(0, infinities=8)]) == "1"  # all of them: no mask leaves nothing


def test_negative_infinities_of_some_numbers_may_be_a_masks():
    """What it puts there is no fault."""
    for at_fault in (of(5), of(0, infinities=3, positive=3), of(0, infinities=8)):
        assert first([FINE, MASK, FINE, MASK, at_fault]) == "4"
    leaves = ols.diagnosis.nonfinite_leaves(GRADS)
    for taps, name in (([FINE, MASK, of(5)], "2"), ([FINE, MASK], "the loss")):
        assert ols.diagnosis.explain(leaves, taps=taps, loss=np.nan).suspects[0].name == name


def experts(faulty=None):
    """Evidence of a fault on the way back through one of four experts."""
    weights = [{"w1": jnp.ones(4), "w2": jnp.ones(4)} for _ in range(4)]
    if faulty is not None:
        weights[faulty]["w1"] = jnp.array([1.0, jnp.inf, 1, 1])
    grads = {"in": jnp.array([1.0, jnp.nan]), "ex": weights, "out": {"w": jnp.ones(4)}}
    taps = OrderedDict([("in", of(0, 1)), ("ex", [FINE] * 4), ("out", FINE)])
    return ols.diagnosis.explain(
        ols.diagnosis.nonfinite_leaves(grads), taps=taps, loss=1.0
    ).suspects[0]


@pytest.mark.parametrize("faulty", range(4))
def test_a_branch_is_named_by_its_own_gradients(faulty):
    suspect = experts(faulty)
    assert suspect.name == f"ex/{faulty}"
    assert suspect.finding == "0 inf and 1 NaN of 8 in the gradient that it passes to in"


def test_where_nothing_decides_between_branches_it_is_the_first():
    assert experts().name == "ex/0"


def test_a_place_of_which_nothing_is_known_is_not_passed_over():
    """As the scores of an attention, whose parameters come after them on the way back."""
    grads = {"in": jnp.array([jnp.nan]), "attn": {"qkv": jnp.array([jnp.inf, 1.0])}}
    taps = OrderedDict([("in", of(0, 1)), ("scores", FINE), ("attn", FINE)])
    assert first(taps, loss=1.0, grads=grads) == "scores"
    grads["scores"] = jnp.ones(2)
    assert first(taps, loss=1.0, grads=grads) == "attn"


def test_before_all_taps_the_gradients_are_all_there_is():
    leaves = ols.diagnosis.nonfinite_leaves({"stem": jnp.array([jnp.nan, 1]), "w": jnp.ones(3)})
    (suspect,) = ols.diagnosis.explain(leaves, taps=[FINE, FINE], loss=1.0).suspects
    assert suspect == ("stem", "0 inf and 1 NaN of 2 in its gradient")


def test_the_report_fits_a_terminal():
    name = "a_rather_long_name_of_a_module/and_of_a_layer_in_it/and_of_its_parameter"
    leaves = ols.diagnosis.nonfinite_leaves({name: jnp.array([jnp.nan, 1]), "w": jnp.ones(3)})
    taps = OrderedDict({f"{name}_{i}": of(0, gradient_nans=i < 2) for i in range(4)})
    text = str(ols.diagnosis.explain(leaves, taps=taps, loss=1.0))
    assert max(map(len, text.splitlines())) <= 100
