"""In which order places ran, and which of them is the beginning, from hand-made records."""

from collections import OrderedDict

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols


def of(nans, gradient_nans=0.0, infinities=0.0, size=8.0):
    """A record, or a stack of records, of so many numbers that are not finite."""
    nans, gradient_nans, infinities, size = np.broadcast_arrays(
        nans, gradient_nans, infinities, size
    )
    empty = ols.diagnosis.probe(nans.shape).value
    value = empty._replace(size=size, nans=nans, infinities=infinities)
    return ols.diagnosis.Probe(value, empty._replace(size=size, nans=gradient_nans))


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
    assert first(OrderedDict(a=early, b=early, layer=layer)) == "a/1/1"
    assert first(OrderedDict(a=late, b=early, layer=layer)) == "b/1/1"
    second = of(np.array([[0.0] * 3, [1] * 3]))
    assert first(OrderedDict(a=second, b=second, layer=of(np.ones(2)))) == "layer/0"


def test_where_loss_and_gradients_are_finite_nothing_is_a_suspect():
    leaves = ols.diagnosis.nonfinite_leaves({"w": jnp.ones(2)})
    taps = [of(0, infinities=3), of(3, gradient_nans=3), of(0, infinities=8)]
    assert ols.diagnosis.explain(leaves, taps=taps, loss=1.0).suspects == []
    assert ols.diagnosis.explain(leaves, taps=taps).suspects == []
    assert ols.diagnosis.explain(leaves, taps=taps, loss=np.nan).suspects[0].name == "0"


def test_infinities_that_go_no_further_are_no_beginning():
    infinite, nan, grads = of(0, infinities=3), of(5), {"w": jnp.array([1.0, jnp.nan])}
    assert first([infinite, FINE], loss=1.0, grads=grads) == "w"
    assert first([infinite, nan], loss=1.0, grads=grads) == "1"
    assert first([infinite, FINE, of(1, size=5.0)]) == "2"
    assert first([FINE, infinite, of(1, size=5.0)]) == "1"
    assert first([FINE, infinite], loss=np.inf) == "1"
    assert first([of(1, size=3.0), FINE], loss=1.0, grads=grads) == "0"
    # Records of single numbers, too, and in the middle of a list.
    one = [of(0, size=1.0), of(0, infinities=1, size=1.0), of(0, size=1.0), of(1, size=1.0)]
    assert first(one) == "3"
    assert first(one[:3]) == "the loss"
    assert first([FINE, infinite, FINE, of(1, size=5.0)]) == "3"
    nothing_else = of(0, infinities=8)
    assert first([FINE, nothing_else, FINE, of(1, size=5.0)]) == "1"


def test_the_mask_of_every_layer_is_no_suspect():
    mask, masked_nan, nan = of(0, infinities=3), of(5, infinities=3), of(5, size=5.0)
    for bad in range(3):
        layers = [(mask, FINE)] * bad + [(mask, nan)] + [(masked_nan, nan)] * (2 - bad)
        taps = [OrderedDict(scores=scores, out=out) for scores, out in layers]
        assert first(taps) == f"{bad}/out"
    overflows = of(0, infinities=4)
    taps = [
        OrderedDict(scores=scores, out=out) for scores, out in [(mask, FINE), (overflows, nan)]
    ]
    assert first(taps) == "1/scores"


def test_infinities_that_branches_add_to_each_other_are_the_first_ones():
    infinite = of(0, infinities=2)
    assert first(OrderedDict(mean=infinite, variance=FINE, z=infinite)) == "mean"


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
    if faulty:  # else the order of the places names it, too
        assert f"1 inf and 0 NaN of 4 in the gradient of its own ex/{faulty}/w1" in suspect.finding
        assert "between in and out, in one of ex/0, ex/1, ex/2, ex/3" in suspect.finding


@pytest.mark.parametrize(
    "names", [("w_mean", "b_mean"), ("mean/w", "mean/b"), ("mean_w", "mean_b")]
)
def test_the_parameters_of_a_place_go_by_its_name(names):
    grads = {"in": jnp.array([1.0, jnp.nan]), "variance": {"w": jnp.ones(4)}}
    grads |= {names[0]: jnp.array([1.0, jnp.inf]), names[1]: jnp.ones(2)}
    taps = OrderedDict([("in", of(0, 1)), ("variance", FINE), ("mean", FINE), ("z", FINE)])
    assert first(taps, loss=1.0, grads=grads) == "mean"


def test_branches_that_are_one_stack_are_not_told_apart():
    """By `vmap` over experts, or the first turn of a loop: stacked parameters cannot tell."""
    grads = {"in": jnp.array([jnp.nan]), "ex": jnp.array([[1.0, 1], [1, 1], [1, jnp.inf]])}
    taps = OrderedDict([("in", of(0, 1)), ("ex", of(np.zeros(3))), ("out", FINE)])
    explanation = ols.diagnosis.explain(ols.diagnosis.nonfinite_leaves(grads), taps=taps, loss=1.0)
    assert "between in and out, in one of ex/0, ex/1, ex/2" in explanation.suspects[0].finding


def test_where_nothing_decides_between_branches_it_says_so():
    suspect = experts()
    assert suspect.name == "ex/0"
    assert "between in and out, in one of ex/0, ex/1, ex/2, ex/3" in suspect.finding


def test_the_first_place_of_all_is_named_by_its_own_gradients():
    grads = {"stem": {"w": jnp.array([jnp.nan, 1])}, "w": jnp.ones(3)}
    assert first(OrderedDict(stem=FINE, rest=FINE), loss=1.0, grads=grads) == "stem"


def test_before_all_taps_the_gradients_are_all_there_is():
    leaves = ols.diagnosis.nonfinite_leaves({"stem": jnp.array([jnp.nan, 1]), "w": jnp.ones(3)})
    (suspect,) = ols.diagnosis.explain(leaves, taps=[FINE, FINE], loss=1.0).suspects
    assert suspect == (
        "stem",
        "0 inf and 1 NaN of 2 in its gradient; those at the taps are finite",
    )


def test_the_report_fits_a_terminal():
    name = "a_rather_long_name_of_a_module/and_of_a_layer_in_it/and_of_its_parameter"
    leaves = ols.diagnosis.nonfinite_leaves({name: jnp.array([jnp.nan, 1]), "w": jnp.ones(3)})
    taps = OrderedDict({f"{name}_{i}": of(0, gradient_nans=i < 2) for i in range(4)})
    text = str(ols.diagnosis.explain(leaves, taps=taps, loss=1.0))
    assert max(map(len, text.splitlines())) <= 100
