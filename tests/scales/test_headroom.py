"""`HeadroomLossScale`, held to its docstring, and what it trains."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols


def oracle(bound, event, *, margin=1, memory=512, min_scale=1.0):
    """The rule of the docstring in plain Python: `(bound, scale)` after a step."""
    bound = np.float32(bound)
    floor = math.ceil(math.log2(min_scale))
    top = 16 - margin - floor
    if event == "overflow":
        bound = min(bound + 1, top + 1)
    elif event == 0:
        bound = min(bound, top)
    else:
        fallen = bound - np.float32(1 / memory)
        bound = np.clip(max(math.frexp(event)[1], fallen), 16 - margin - 60, top)
    return float(bound), 2.0 ** max(math.floor(16 - margin - bound), floor)


EVENTS = st.lists(
    st.sampled_from(["overflow", 0.0, 1.0, 2.0**-20, 3e-7, 1000.0, 7e4, 1e30, 1e-40]),
    max_size=40,
)


@hypothesis.given(
    EVENTS, st.sampled_from([(15, 1, 512, 1.0), (0, 0, 2, 2**-20), (30, 8, 1, 3.0)])
)
def test_follows_the_documented_rule(events, options):
    exponent, margin, memory, min_scale = options
    ls = ols.HeadroomLossScale(2.0**exponent, margin, memory, min_scale)
    bound = 16 - margin - exponent
    update = jax.jit(ls.__class__.update)
    assert ls() == 2.0**exponent
    for event in events:
        grads = {"w": jnp.array([0, np.nan if event == "overflow" else -event])}
        ls, finite = update(ls, grads)
        options = {"margin": margin, "memory": memory, "min_scale": min_scale}
        # XLA flushes subnormal gradients to zero.
        seen = 0.0 if event == 1e-40 else event
        bound, scale = oracle(bound, seen, **options)
        assert bool(finite) == (event != "overflow")
        np.testing.assert_allclose(ls.bound, bound, rtol=1e-6)
        assert ls() == scale


def test_a_larger_gradient_is_followed_at_once_and_a_smaller_one_a_bit_in_memory_steps():
    ls, _ = ols.HeadroomLossScale(memory=8).update(jnp.array(2.0**8))
    assert ls() == 2.0**6
    for _ in range(8):
        ls, _ = ls.update(jnp.array(2.0**-8))
    assert ls() == 2.0**7


def test_zeros_say_nothing():
    ls = ols.HeadroomLossScale(memory=1)
    after, should_apply = ls.update({"w": jnp.zeros(3), "b": None})
    assert should_apply
    assert after == ls


@pytest.mark.parametrize(
    ("start", "floor", "exponent"),
    [(3.0, 1.0, 1), (2**-60, 2**-60, -60), (3.0, 3.0, 2)],
)
def test_starts_with_a_power_of_two_at_most_the_given_unless_a_floor_forbids_it(
    start, floor, exponent
):
    assert ols.HeadroomLossScale(start, min_scale=floor)() == 2.0**exponent


def test_from_the_flag_alone_it_halves_and_doubles_every_memory_steps():
    ls = ols.HeadroomLossScale(memory=4)
    ls = ls.adjust(False)
    assert ls() == 2.0**14
    for expected in (14, 14, 14, 15, 15):
        ls = ls.adjust(True)
        assert ls() == 2.0**expected


def test_exhausted_while_the_last_step_overflowed_at_the_floor():
    ls = ols.HeadroomLossScale(2.0)
    assert not ls.exhausted()
    after = [ls := ls.adjust(finite) for finite in (False, False, False, True, False)]
    assert [bool(ls.exhausted()) for ls in after] == [False, True, True, False, True]
    assert all(ls() == 1 for ls in after)
    assert not after[2].update(jnp.zeros(3))[0].exhausted()
    assert not ls.update(jnp.array(1e30))[0].exhausted()  # finite, however large


@pytest.mark.parametrize("how", ["pmap", "shard_map"])
def test_replicas_follow_the_largest_of_all(how):
    update = lambda x: ols.HeadroomLossScale().update(x, axis_name="i")[0]()[None]
    if how == "pmap":
        mapped = jax.pmap(update, axis_name="i")
    else:
        mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
        mapped = jax.shard_map(update, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    scales = mapped(jnp.array([1.0, 64.0]))
    assert np.ravel(scales).tolist() == [2.0**8] * 2


def test_networks_in_turn_are_both_trained():
    """The recipe for several losses, with losses that differ by 2**24."""
    tx = ols.with_loss_scale(optax.adam(1e-3), "headroom")
    x = jnp.linspace(0.1, 1, 8)

    def loss_fn(moving, resting, weight):
        product = moving.astype(jnp.float16) * x.astype(jnp.float16)
        return weight * jnp.mean((product.astype(jnp.float32) - resting) ** 2)

    def turn_of(moves, rests, weight):
        def step(params, state):
            grad = ols.value_and_scaled_grad(loss_fn, state)
            _, grads = grad(params[moves], params[rests], weight)
            both = {moves: grads, rests: None}
            params, state = tx.apply_gradients(both, state, params)
            return (params, state), state.should_apply & (grads != 0).all()

        return step

    turns = [turn_of("d", "g", 2.0**12), turn_of("g", "d", 2.0**-12)]
    step = lambda carry, turn: jax.lax.switch(turn, turns, *carry)
    params = {"d": jnp.ones(8), "g": jnp.full(8, 2.0)}
    carry = (params, tx.init(params))
    _, trained = jax.lax.scan(step, carry, jnp.arange(800) % 2)
    assert trained[0::2].sum() >= 380
    assert trained[1::2].sum() >= 380
