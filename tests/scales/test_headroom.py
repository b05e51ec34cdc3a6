import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols

LIMIT = 65520.0  # from here on float16 is infinite


@functools.partial(jax.jit, static_argnames="from_flag")
def train(ls, sizes, inner=1.0, from_flag=False):
    """Steps with these largest gradients, and inside the model so many times larger ones."""

    def step(ls, event):
        size, inner = event
        overflows = ~(size * inner * ls() < LIMIT)
        if from_flag:
            new = ls.adjust(~overflows)
        else:
            new, _ = ls.update(jnp.where(overflows, jnp.inf, size))
        return new, (jnp.log2(ls()), overflows, new.headroom)

    return jax.lax.scan(step, ls, (sizes, jnp.broadcast_to(inner, jnp.shape(sizes))))


def sizes(steps, log2=-10.0, noise=0.3, seed=0):
    rng = np.random.default_rng(seed)
    return np.exp2(np.asarray(log2) + noise * rng.normal(size=steps)).astype(np.float32)


def best(sizes, inner=1.0):
    """log2 of the largest power of two at which each step does not overflow."""
    return 16 - np.frexp(sizes * inner)[1]


@pytest.mark.parametrize("log2", [-20.0, -10.0, 0.0])
@pytest.mark.parametrize("start", [0, 10, 15, 24, 40])
def test_finds_a_good_scale_in_six_steps_from_any_start(start, log2):
    x = sizes(1000, log2)
    ls = ols.HeadroomLossScale(initial_scale=2.0**start)
    _, (log2_scale, overflows, _) = train(ls, x)
    assert np.argmax(abs(log2_scale - best(x)) <= 2) <= 6
    assert overflows[20:].sum() <= 1
    assert np.all(best(x)[20:] - log2_scale[20:] <= 5)


def test_follows_gradients_that_become_smaller_within_two_windows():
    x = sizes(1000, np.where(np.arange(1000) < 500, -5, -15))
    _, (log2_scale, overflows, _) = train(ols.HeadroomLossScale(), x)
    assert np.argmax(abs(log2_scale - best(x))[500:] <= 2) <= 151
    assert not overflows[20:].any()


def test_gradients_that_become_larger_cost_few_steps():
    x = sizes(1000, np.where(np.arange(1000) < 500, -15, -5))
    _, (log2_scale, overflows, _) = train(ols.HeadroomLossScale(), x)
    assert overflows[500:].sum() <= 2
    assert np.all(abs(log2_scale - best(x))[510:] <= 3)


def test_learns_a_ceiling_from_gradients_inside_the_model():
    x = sizes(6000)
    ls, (log2_scale, overflows, _) = train(ols.HeadroomLossScale(), x, 2.0**8)
    assert overflows[:20].sum() <= 5
    assert overflows[20:].sum() <= 6
    assert np.all(best(x, 2.0**8)[20:] - log2_scale[20:] <= 11)
    assert np.median(best(x, 2.0**8) - log2_scale) <= 4
    # And when they are no larger any more, it is given back a bit at a time.
    _, (log2_scale, _, _) = train(ls, sizes(30_000))
    assert log2_scale[-1] >= log2_scale[0] + 6


def test_a_ceiling_that_falls_later_is_found_again():
    x, inner = sizes(4000), np.where(np.arange(4000) < 1000, 1.0, 2.0**5).astype(np.float32)
    _, (log2_scale, overflows, _) = train(ols.HeadroomLossScale(), x, inner)
    assert overflows[1000:].sum() <= 15
    assert np.median(best(x, inner)[1000:] - log2_scale[1000:]) <= 5


def test_uneven_batches_make_it_cautious():
    x = sizes(6000) * np.exp2(np.random.default_rng(1).standard_t(3, 6000)).astype(np.float32)
    _, (_, overflows, _) = train(ols.HeadroomLossScale(), x)
    assert overflows.sum() <= 24


def test_a_broken_batch_costs_its_own_step():
    x = sizes(2000)
    x[1000:1006] = np.nan
    _, (log2_scale, overflows, _) = train(ols.HeadroomLossScale(), x)
    assert overflows[20:].sum() == 6
    assert np.all(abs(log2_scale[1007:] - log2_scale[999]) <= 1)


@pytest.mark.parametrize("at", range(1, 8))
def test_a_broken_batch_on_the_way_up_teaches_no_ceiling(at):
    x = sizes(200)
    x[at] = np.inf
    _, (log2_scale, overflows, _) = train(ols.HeadroomLossScale(initial_scale=1.0), x)
    assert overflows.sum() <= 2
    assert np.all(abs(log2_scale - best(sizes(200)))[20:] <= 4)


def test_broken_batches_that_recur_cost_a_few_bits_at_most():
    x = sizes(20_000)
    x[100::200] = np.nan
    _, (log2_scale, overflows, _) = train(ols.HeadroomLossScale(), x)
    assert overflows.sum() <= 120
    assert np.median(best(sizes(20_000)) - log2_scale) <= 6


def test_all_zero_gradients_teach_nothing():
    ls, _ = train(ols.HeadroomLossScale(), sizes(200))
    after, (log2_scale, overflows, _) = train(ls, np.zeros(10_000, np.float32))
    assert after() == ls()
    assert not overflows.any()
    np.testing.assert_array_equal(log2_scale, log2_scale[0])


@pytest.mark.parametrize("start", [-20, 15, 60])
def test_gradients_that_were_always_zero_raise_the_scale_so_far_and_no_further(start):
    ls = ols.HeadroomLossScale(initial_scale=2.0**start)
    ls, _ = train(ls, np.zeros(100, np.float32))
    assert ls() == 2.0 ** max(start, 24)


def test_the_headroom_is_measured():
    ls = ols.HeadroomLossScale(initial_scale=2.0**10)
    assert ls.headroom == 0
    ls, _ = ls.update({"w": jnp.array([2.0**-3, -(2.0**-7)]), "b": None})
    assert ls.headroom == 8  # 2**7 has the exponent 8: it lies below 2**8
    ls, _ = train(ls, np.full(10, 2.0**-3, np.float32))
    assert ls.headroom == 1
    assert ols.metrics(ls)["headroom"] == 1
    wider = ols.HeadroomLossScale(margin=4)
    assert train(wider, np.full(10, 2.0**-3, np.float32))[0].headroom == 4
    ls, should_apply = ls.update(jnp.array(jnp.nan))
    assert not should_apply
    assert ls.headroom == 0


@pytest.mark.parametrize("threshold", [-20, 3, 15, 29])
def test_from_the_flag_alone_it_stays_right_below_the_overflow(threshold):
    x = np.full(4000, 2.0 ** (15 - threshold), np.float32)
    ls = ols.HeadroomLossScale(initial_scale=2.0**40)
    _, (log2_scale, overflows, _) = train(ls, x, from_flag=True)
    assert overflows.sum() <= 25
    assert np.all(log2_scale[60:] >= threshold - 8)
    assert round(np.median(log2_scale)) == threshold


def test_from_the_flag_alone_it_grows_as_slowly_as_it_probes():
    ls = ols.HeadroomLossScale(initial_scale=1.0, probe_interval=10)
    _, (log2_scale, _, _) = train(ls, np.full(100, 1e-10, np.float32), from_flag=True)
    np.testing.assert_array_equal(
        np.asarray(log2_scale)[[0, 9, 10, 11, 20, 99]], [0, 0, 1, 1, 2, 9]
    )


ANY = st.sampled_from([0.0, np.nan, np.inf, -np.inf, 1.0, 1e-45, 1e-38, 3e38, 2.0**-30])


@jax.jit
def alternate(ls, gradients, flags):
    """Steps by `adjust` where the flag is set, else by `update`."""

    def step(ls, event):
        gradient, from_flag = event
        updated, should_apply = ls.update(gradient)
        by_flag = ls.adjust(jnp.isfinite(gradient))
        new = jax.tree.map(lambda a, b: jnp.where(from_flag, a, b), by_flag, updated)
        return new, (new(), should_apply)

    return jax.lax.scan(step, ls, (gradients, flags))[1]


@hypothesis.given(
    st.integers(-100, 100),
    st.sampled_from([(0, 1, 1), (24, 2, 7), (1, 50, 2000)]),
    st.lists(st.tuples(ANY, st.booleans()), min_size=40, max_size=40),
)
@hypothesis.settings(deadline=None, max_examples=50)
def test_the_scale_is_always_a_power_of_two_within_bounds(start, options, steps):
    ls = ols.HeadroomLossScale(2.0**start, *options)
    gradients, flags = (np.array(x) for x in zip(*steps, strict=True))
    scales, applied = alternate(ls, gradients.astype(np.float32), flags)
    mantissas, exponents = np.frexp(np.asarray(scales))
    assert np.all(mantissas == 0.5)
    assert np.all(abs(exponents - 1) <= 100)
    np.testing.assert_array_equal(applied, np.isfinite(gradients))


def test_a_million_adversarial_steps_leave_it_normal():
    """What overflows, and how large a gradient is, is chosen from the scale to do most harm."""

    @jax.jit
    def run(ls, key):
        def step(ls, key):
            kind, how = jax.random.split(key)
            kind, how = jax.random.randint(kind, (), 0, 5), jax.random.uniform(how)
            gradient = jnp.stack(
                [
                    jnp.inf,
                    0.0,
                    jnp.exp2(250 * how - 125),
                    65504 / ls(),
                    1e-3 / ls(),
                ]
            )[kind]
            new, _ = ls.update(gradient)
            return new, new()

        ls, scales = jax.lax.scan(step, ls, jax.random.split(key, 10**6))
        return ls, scales.min(), scales.max(), jnp.isfinite(scales).all()

    ls = ols.HeadroomLossScale(window=3, probe_interval=5)
    ls, smallest, largest, finite = run(ls, jax.random.key(0))
    assert finite
    assert 2.0**-100 <= smallest <= largest <= 2.0**100
    for leaf in jax.tree.leaves(ls.replace(_finite_steps=0))[1:]:
        assert abs(int(leaf)) < 5000
    # And it comes back from there.
    x = sizes(1000)
    _, (log2_scale, _, _) = train(ls, x)
    assert abs(log2_scale[-1] - best(x)[-1]) <= 3


def test_exhausted_where_the_lowest_scale_overflows():
    ls = ols.HeadroomLossScale(initial_scale=2.0**-96)
    ls = ls.adjust(False)
    assert ls() == 2.0**-100
    assert not ls.exhausted()
    ls = ls.adjust(False)
    assert ls.exhausted()
    for gradient in (1.0, 0.0):
        after, _ = ls.update(jnp.array(gradient))
        assert not after.exhausted()


def loss_fn(params, x):
    prediction = (x.astype(jnp.float16) * params["w"].astype(jnp.float16)).sum(-1)
    return 1e-6 * jnp.mean((prediction.astype(jnp.float32) - jnp.arange(16)) ** 2)


@pytest.mark.parametrize("way", ["apply_gradients", "update", "inside", "outside"])
def test_trains_float16_through_every_door(way):
    inner = optax.adam(3e-2)
    if way == "inside":
        tx = ols.with_loss_scale(optax.MultiSteps(inner, 2), "headroom")
    elif way == "outside":
        tx = optax.MultiSteps(ols.with_loss_scale(inner, "headroom"), 2)
        tx = tx.gradient_transformation()
    else:
        tx = ols.with_loss_scale(inner, "headroom")
    params = {"w": jnp.linspace(0.5, 2.0, 8)}
    x = jax.random.normal(jax.random.key(0), (16, 8))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state):
        loss, grads = ols.value_and_grad(loss_fn, state)(params, x)
        if way == "apply_gradients":
            return *tx.apply_gradients(grads, state, params), loss
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for _ in range(60):
        params, state, loss = step(params, state)
        losses.append(loss)
    assert losses[-1] < losses[0]
    assert ols.metrics(ols.get_loss_scale(state))["headroom"] in (1, 2)
    assert ols.get_loss_scale(state)() > 2.0**24


@pytest.mark.parametrize("way", ["pmap", "shard_map"])
def test_replicas_follow_the_largest_of_all(way):
    update = lambda ls, g: ls.update(g, axis_name="i")
    if way == "shard_map":
        mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
        update = jax.shard_map(update, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    else:
        update = jax.pmap(update, axis_name="i", in_axes=(None, 0), out_axes=None)
    ls, should_apply = update(ols.HeadroomLossScale(), jnp.array([1.0, 2.0, 0.5, 0.0]))
    assert ls == ols.HeadroomLossScale().update(jnp.array(2.0))[0]
    assert should_apply
    ls, should_apply = update(ls, jnp.array([1.0, jnp.nan, 0.5, 0.0]))
    assert not should_apply
    assert ls.headroom == 0


def test_under_sharded_jit_it_needs_no_axis():
    mesh = jax.make_mesh((4,), ("data",))
    x = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("data")))
    ls, should_apply = jax.jit(lambda x: ols.HeadroomLossScale().update(x))(x)
    assert should_apply
    assert ls == ols.HeadroomLossScale().update(jnp.arange(16.0))[0]


def test_starts_at_a_power_of_two():
    ls = ols.HeadroomLossScale(initial_scale=1000)
    assert ls() == 512
    assert ls.get_config()["config"]["initial_scale"] == 1000
    assert ols.LossScale.from_config(ls.get_config()) == ls


def test_by_name():
    assert ols.get("headroom") == ols.HeadroomLossScale()


BAD = {
    "initial_scale": [0, 2.0**101, 2.0**-101, "1"],
    "margin": [-1, 25, 1.5, True, None],
    "window": [0, 1.0],
    "probe_interval": [0, None],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in BAD.items() for v in vs])
def test_what_is_not_allowed_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got "):
        ols.HeadroomLossScale(**{name: value})
