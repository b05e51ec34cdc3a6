"""What a tap records of a model's values and gradients, under every transformation."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from optax_lossscale.demo import _model, _text, _training

LAYERS, WIDTH = 5, 8
W = jnp.linspace(-0.4, 0.5, LAYERS * WIDTH * WIDTH, dtype=jnp.float16).reshape(LAYERS, WIDTH, -1)
X = jnp.linspace(-1, 1, 4 * WIDTH, dtype=jnp.float16).reshape(4, WIDTH)


def loss_fn(w, probes, x, place=ols.diagnosis.tap, remat=False):
    """A stack of layers; `place` puts a probe or what a test gives in its stead."""

    def layer(h, layer):
        w, probe = layer
        return place(jnp.tanh(h @ w), probe), None

    h, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, (w, probes))
    return jnp.sum(h.astype(jnp.float32) ** 2) * 1e-6


gradient = jax.jit(jax.grad(loss_fn, argnums=1))  # what each tap records


def cotangents(w, x):
    """The gradients at the places themselves: those of zeros added there."""
    zeros = jnp.zeros((LAYERS, *x.shape), x.dtype)
    add = lambda x, zeros: x + zeros
    return jax.grad(functools.partial(loss_fn, place=add), argnums=1)(w, zeros, x)


def numpy_summary(x):
    """The same as `Summary`, of what numpy makes of the array."""
    x = np.asarray(x)
    wide = np.abs(x.astype(np.float64))
    tiny = float(jnp.finfo(x.dtype).tiny)
    return ols.diagnosis.Summary(
        size=x.size,
        zeros=np.sum(wide == 0),
        subnormals=np.sum((wide > 0) & (wide < tiny)),
        infinities=np.sum(np.isinf(wide)),
        positive_infinities=np.sum(x == np.inf),
        nans=np.sum(np.isnan(wide)),
        largest=np.nanmax(wide),
    )


def assert_summary(actual, expected):
    for name, a, b in zip(ols.diagnosis.Summary._fields, actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_records_each_layer_of_a_scan(jit, remat):
    expected = cotangents(W, X)
    assert np.any((expected != 0) & (abs(expected) < 2**-14)), "something must underflow"
    gradient = jax.grad(functools.partial(loss_fn, remat=remat), argnums=(0, 1))
    grads, record = (jax.jit(gradient) if jit else gradient)(W, ols.diagnosis.probe(LAYERS), X)
    chex.assert_trees_all_equal(grads, jax.grad(loss_fn)(W, None, X))
    chex.assert_tree_shape_prefix(record, (LAYERS,))
    chex.assert_type(jax.tree.leaves(record), jnp.float32)
    for i in range(LAYERS):
        at = jax.tree.map(lambda x, i=i: x[i], record)
        assert_summary(at.cotangent, numpy_summary(expected[i]))
    h = X
    for i in range(LAYERS):
        h = jnp.tanh(h @ W[i])
        np.testing.assert_allclose(record.value.largest[i], abs(h).max(), rtol=1e-3)


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_counts_what_is_not_finite(bad):
    def loss_fn(x, probe):
        return jnp.sum(ols.diagnosis.tap(x, probe) * jnp.array([1.0, 0.0, bad]))

    record = jax.grad(loss_fn, argnums=1)(jnp.array([2.0, bad, 3.0]), ols.diagnosis.probe())
    for summary, finite in ((record.value, 3.0), (record.cotangent, 1.0)):
        assert (summary.nans, summary.infinities) == ((1, 0) if np.isnan(bad) else (0, 1))
        assert summary.nonfinite == 1
        assert summary.largest == (finite if np.isnan(bad) else np.inf)
        assert summary.positive_infinities == (bad == np.inf)
    assert record.cotangent.zeros == 1
    assert record.cotangent.underflow == np.float32(1 / 3)


def test_without_a_probe_the_program_is_the_untapped_one():
    untapped = functools.partial(loss_fn, place=lambda x, probe: x)
    texts = [jax.jit(jax.grad(f)).lower(W, None, X).as_text() for f in (loss_fn, untapped)]
    assert texts[0] == texts[1]


def test_a_probe_not_differentiated_costs_nothing():
    """And asked for, no memory beyond the records."""
    x = jnp.ones((4096, WIDTH), jnp.float16)  # one of them is 64 KiB
    compiled = lambda argnums, probes: (
        jax.jit(jax.grad(loss_fn, argnums)).lower(W, probes, x).compile()
    )
    off, unasked = compiled(0, None), compiled(0, ols.diagnosis.probe(LAYERS))
    assert unasked.cost_analysis() == off.cost_analysis()
    on = compiled((0, 1), ols.diagnosis.probe(LAYERS)).memory_analysis().temp_size_in_bytes
    records = sum(x.nbytes for x in jax.tree.leaves(ols.diagnosis.probe(LAYERS)))
    assert on <= off.memory_analysis().temp_size_in_bytes + 8 * records


def test_forward_mode_is_refused():
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda w: loss_fn(w, ols.diagnosis.probe(LAYERS), X), (W,), (W,))
    jax.jvp(lambda w: loss_fn(w, None, X), (W,), (W,))


def test_under_shard_map_a_replicated_probe_sees_all_replicas():
    """A replicated probe sees all replicas, one for each its own."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    whole = gradient(W, ols.diagnosis.probe(LAYERS), X)
    specs = {"mesh": mesh, "in_specs": (P(), P(), P("data")), "out_specs": P()}
    chex.assert_trees_all_close(
        jax.jit(jax.shard_map(gradient, **specs))(W, ols.diagnosis.probe(LAYERS), X),
        whole,
        rtol=1e-6,
    )

    def own(w, probe, x):
        one = jax.tree.map(lambda p: p[0], probe)
        return jax.tree.map(lambda r: r[None], gradient(w, one, x))

    each = jax.tree.map(lambda p: jnp.stack([p] * 4), ols.diagnosis.probe(LAYERS))
    for x_spec, size in ((P("data"), WIDTH), (P(), 4 * WIDTH)):
        shard_map = jax.shard_map(
            own, mesh=mesh, in_specs=(P(), P("data"), x_spec), out_specs=P("data")
        )
        record = jax.jit(shard_map)(W, each, X)
        np.testing.assert_array_equal(record.value.size, np.full((4, LAYERS), size))


def test_each_replica_records_its_own_under_pmap_and_unchecked_shard_map():
    alone = [gradient(W, ols.diagnosis.probe(LAYERS), x[None]) for x in X]
    stacked = jax.tree.map(lambda *r: jnp.stack(r), *alone)
    by_pmap = jax.pmap(gradient, in_axes=(None, None, 0))(
        W, ols.diagnosis.probe(LAYERS), X[:, None]
    )
    chex.assert_trees_all_close(by_pmap, stacked, rtol=1e-6)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    own = lambda x: jax.tree.map(lambda r: r[None], gradient(W, ols.diagnosis.probe(LAYERS), x))
    specs = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data"), "check_vma": False}
    chex.assert_trees_all_close(jax.jit(jax.shard_map(own, **specs))(X), stacked, rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_are_counted_without_gathering_them(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    arguments = place(W, P()), place(ols.diagnosis.probe(LAYERS), P()), place(X, P("data"))
    whole = gradient(W, ols.diagnosis.probe(LAYERS), X)
    chex.assert_trees_all_close(gradient(*arguments), whole, rtol=1e-6)
    assert "all-gather" not in gradient.lower(*arguments).compile().as_text()


def test_a_probe_shared_under_vmap_or_used_twice_holds_the_sum():
    shared = jax.vmap(gradient, (None, None, 0))(W, ols.diagnosis.probe(LAYERS), X)
    np.testing.assert_array_equal(shared.value.size, np.full((4, LAYERS), WIDTH))
    # The same as one tap of them all, but for the largest.
    one, none = (gradient(W, ols.diagnosis.probe(LAYERS), X), jnp.zeros(LAYERS))
    each = lambda w, probes, x: jnp.sum(jax.vmap(loss_fn, (None, None, 0))(w, probes, x))
    summed = jax.jit(jax.grad(each, argnums=1))(W, ols.diagnosis.probe(LAYERS), X)
    without_largest = lambda s: s._replace(largest=none)
    chex.assert_trees_all_equal(without_largest(summed.value), without_largest(one.value))
    chex.assert_trees_all_equal(without_largest(summed.cotangent), without_largest(one.cotangent))
    twice = lambda x, probe: ols.diagnosis.tap(2 * ols.diagnosis.tap(x, probe), probe)
    record = jax.grad(twice, argnums=1)(1.0, ols.diagnosis.probe())
    assert (record.value.size, record.value.largest) == (2, 1 + 2)


def test_is_itself_differentiable_again():
    def second(w, probes):
        return jnp.sum(jax.grad(loss_fn)(w, probes, X).astype(jnp.float32) ** 2)

    chex.assert_trees_all_equal(
        jax.grad(second)(W, ols.diagnosis.probe(LAYERS)), jax.grad(second)(W, None)
    )


def test_complex_numbers_count_as_two():
    loss_fn = lambda x, probe: jnp.sum(jnp.abs(ols.diagnosis.tap(x, probe)))
    record = jax.grad(loss_fn, argnums=1)(jnp.array([3 + 4j, 0 + 2j]), ols.diagnosis.probe())
    assert record.value.size == 4
    assert record.value.zeros == 1
    assert record.value.largest == 4


def test_what_cannot_be_tapped_is_refused():
    for x, kind in ((jnp.arange(3), "int32"), ((X, X), "tuple"), ("x", "str")):
        with pytest.raises(TypeError, match=f"array has a gradient to tap, got {kind}"):
            ols.diagnosis.tap(x, ols.diagnosis.probe())
    for probe in (False, {}, jnp.zeros(())):
        with pytest.raises(TypeError, match=r"a probe is made by probe\(\)"):
            ols.diagnosis.tap(X, probe)
    with pytest.raises(TypeError, match=r"of one place, shape \(\), got one of shape \(3,\)"):
        ols.diagnosis.tap(X, ols.diagnosis.probe(3))


def demo_loss(params, tokens, probes):
    return _model.loss(params, tokens, jnp.float16, probes) / _training.MICRO_BATCHES


@pytest.mark.parametrize("scale", [None, 2.0**15])
def test_the_demos_blocks_record_what_their_gradients_lose(scale, monkeypatch):
    """What underflows with and without loss scaling, against the gradients themselves."""
    params = _model.init(jax.random.key(0))
    tokens = next(_text.batches(np.arange(2000, dtype=np.uint8), 1, seed=0))
    gradient = ols.value_and_scaled_grad(demo_loss, ols.get(scale), argnums=2)
    _, records = jax.jit(gradient)(params, tokens, [ols.diagnosis.probe()] * _model.BLOCKS)
    lost = [float(r.cotangent.underflow) for r in records]

    zeros = jnp.zeros((_text.BATCH, _model.CONTEXT, _model.WIDTH), jnp.float16)
    monkeypatch.setattr(ols.diagnosis, "tap", lambda x, zeros: x + zeros)
    _, direct = jax.jit(gradient)(params, tokens, [zeros] * _model.BLOCKS)
    for record, cotangent in zip(records, direct, strict=True):
        assert_summary(record.cotangent, numpy_summary(cotangent))
    assert min(lost) > 0.9 if scale is None else max(lost) < 0.1
