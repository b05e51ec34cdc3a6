"""Rescaling inside a model: gradients that no single loss scale can hold, exactly."""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from compiling import AS_USERS_DO
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from optax_lossscale import experimental, presets

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the frameworks', not ours
    import equinox as eqx
    from flax import linen, nnx

FRAMEWORKS = pytest.mark.filterwarnings("ignore::DeprecationWarning")
DEPTH, WIDTH, BATCH = 12, 8, 4
same = lambda x: x
PLAIN = {"enter": same, "leave": same}
BOUNDARIES = {"enter": experimental.enter, "leave": experimental.leave}


def block(p, x):
    """In the dtype of the activations."""
    w, b = p["w"].astype(x.dtype), p["b"].astype(x.dtype)
    return x + jnp.tanh(x @ w + b)


def layer(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def shrinking(p, x):
    """A block whose gradients are 2**-3 of those that come in."""
    w, b = p["w"].astype(x.dtype), p["b"].astype(x.dtype)
    return jnp.tanh(x @ (w / 8) + b)


def parameters(depth=DEPTH, seed=0):
    w, b = jax.random.split(jax.random.key(seed))
    return {
        "w": jax.random.normal(w, (depth, WIDTH, WIDTH)) * WIDTH**-0.5,
        "b": jax.random.normal(b, (depth, WIDTH)) * 0.1,
    }


def inputs(dtype=jnp.float32):
    return jax.random.normal(jax.random.key(7), (BATCH, WIDTH)).astype(dtype)


def slice_of(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def layers(params):
    return [slice_of(params, i) for i in range(len(params["b"]))]


def loss(params, x, block, enter, leave, *, scan=True):
    x = enter(x)
    if scan:
        x, _ = lax.scan(lambda x, p: (block(p, x), None), x, params)
    else:
        for p in layers(params):
            x = block(p, x)
    return jnp.mean(leave(x).astype(jnp.float32) ** 2)


def rescaled_loss(params, x, block=shrinking, scan=True, **options):
    return loss(params, x, experimental.rescale(block, **options), **BOUNDARIES, scan=scan)


def float32_gradients(params, block=shrinking):
    return jax.grad(loss)(params, inputs(), block, **PLAIN)


def relative_error(grads, exact):
    """The worst of any layer's parameters."""

    def worst(g, e):
        error = jnp.abs(g.astype(jnp.float32) - e).reshape(len(e), -1).max(1)
        return jnp.max(error / jnp.abs(e).reshape(len(e), -1).max(1))

    return max(float(x) for x in jax.tree.leaves(jax.tree.map(worst, grads, exact)))


@pytest.mark.parametrize("block", [block, layer], ids=["residual", "plain"])
@pytest.mark.parametrize(
    ("transform", "scan"),
    [pytest.param(same, False, marks=pytest.mark.slow), (same, True), (jax.jit, True)],
    ids=["eager", "scan", "jit"],
)
def test_float32_gradients_are_bit_identical_over_many_blocks(block, transform, scan):
    params, x = parameters(), inputs()
    value_and_grad = lambda f: transform(jax.value_and_grad(f, argnums=(0, 1)))(params, x)
    exact = value_and_grad(lambda p, x: loss(p, x, block, **PLAIN, scan=scan))
    chex.assert_trees_all_equal(
        value_and_grad(lambda p, x: rescaled_loss(p, x, block, scan=scan)), exact
    )


@pytest.mark.slow
def test_float32_gradients_of_compiled_unrolled_blocks_are_bit_identical():
    # Without an addition around the product, which compilers contract with what is beside it.
    params, x = parameters(), inputs()
    grad = lambda f: jax.jit(jax.grad(f, argnums=(0, 1)))(params, x)
    chex.assert_trees_all_equal(
        grad(lambda p, x: rescaled_loss(p, x, layer, scan=False)),
        grad(lambda p, x: loss(p, x, layer, **PLAIN, scan=False)),
    )


@pytest.mark.parametrize(("transform", "scan"), [(same, False), (jax.jit, True)])
def test_float16_gradients_reach_the_first_of_many_blocks(transform, scan):
    params = parameters(8)
    exact = float32_gradients(params)
    x = inputs(jnp.float16)
    grads = transform(jax.grad(functools.partial(rescaled_loss, scan=scan)))(params, x)
    assert relative_error(grads, exact) < 0.05
    plain = jax.grad(loss)(params, x, shrinking, **PLAIN)
    assert not plain["w"][0].any()
    chex.assert_trees_all_equal_dtypes(grads, params)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["around", "inside"])
def test_rematerialization_changes_nothing(where):
    params, x = parameters(8), inputs(jnp.float16)
    rescaled = experimental.rescale(jax.checkpoint(shrinking) if where == "inside" else shrinking)
    if where == "around":
        rescaled = jax.checkpoint(rescaled)
    chex.assert_trees_all_close(
        jax.jit(jax.grad(loss))(params, x, jax.tree_util.Partial(rescaled), **PARTIALS),
        jax.jit(jax.grad(rescaled_loss))(params, x),
        rtol=1e-3,
    )


PARTIALS = {name: jax.tree_util.Partial(f) for name, f in BOUNDARIES.items()}


@pytest.mark.slow
def test_mapped_examples_have_exponents_of_their_own():
    params, x = parameters(8), inputs(jnp.float16)
    # One example's gradients are far below the others'.
    weights = jnp.array([1.0, 1.0, 2.0**-30, 1.0])

    def mean(params, loss, x):
        return jnp.mean(weights * jax.vmap(lambda x: loss(params, x))(x))

    exact = jax.grad(mean)(params, lambda p, x: loss(p, x, shrinking, **PLAIN), inputs())
    assert relative_error(jax.grad(mean)(params, rescaled_loss, x), exact) < 0.05
    each = jax.vmap(jax.grad(rescaled_loss), (None, 0))(params, x)
    exact = jax.vmap(jax.grad(lambda p, x: loss(p, x, shrinking, **PLAIN)), (None, 0))
    for i in range(BATCH):
        one, other = (slice_of(t, i) for t in (each, exact(params, inputs())))
        assert relative_error(one, other) < 0.05


@pytest.mark.slow
def test_mapped_parameters_have_gradients_of_their_own():
    params = parameters(6)
    ensemble = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p]), params)
    total = lambda e: jax.vmap(rescaled_loss, (0, None))(e, inputs(jnp.float16)).sum()
    grads = jax.grad(total)(ensemble)
    for i, factor in enumerate((1, 0.5)):
        exact = float32_gradients(optax.tree.scale(factor, params))
        assert relative_error(slice_of(grads, i), exact) < 0.05


def mesh(*names):
    sizes = (2,) * len(names)
    return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


@pytest.mark.parametrize(
    ("check_vma", "scan"), [(True, False), pytest.param(False, True, marks=pytest.mark.slow)]
)
def test_replicas_of_shard_map_agree_with_one_device(check_vma, scan):
    params = parameters(6)

    def step(params, x):
        mean = lambda p: lax.pmean(rescaled_loss(p, x, scan=scan), "data")
        return lax.pmean(jax.grad(mean)(params), "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    sharded = jax.jit(jax.shard_map(step, mesh=mesh("data"), check_vma=check_vma, **specs))
    exact = float32_gradients(params)
    grads = sharded(params, inputs(jnp.float16))
    assert relative_error(grads, exact) < 0.05


@pytest.mark.slow
def test_blocks_that_communicate_scale_alike_over_axis_name():
    params = parameters(6)

    def parallel(p, x):  # each device has half of the columns
        y = jnp.tanh(x @ (p["w"].astype(x.dtype) / 8) + p["b"].astype(x.dtype))
        return lax.all_gather(y, "model", axis=1, tiled=True)

    def grads(block, enter, leave, x):
        of_one = functools.partial(loss, block=block, enter=enter, leave=leave, scan=False)
        specs = {"w": P(None, None, "model"), "b": P(None, "model")}
        options = {"in_specs": (specs, P()), "out_specs": specs, "check_vma": False}
        grad = jax.grad(lambda p, x: of_one(p, x))
        return jax.jit(jax.shard_map(grad, mesh=mesh("model"), **options))(params, x)

    exact = grads(parallel, **PLAIN, x=inputs())
    rescaled = experimental.rescale(parallel, axis_name="model")
    assert relative_error(grads(rescaled, **BOUNDARIES, x=inputs(jnp.float16)), exact) < 0.05


def test_an_axis_name_that_is_not_there_is_explained():
    with pytest.raises(ValueError, match="no axis of a pmap or shard_map"):
        jax.grad(functools.partial(rescaled_loss, axis_name="data"))(parameters(1), inputs())


@jax.jit
@jax.grad
def scaled_gradients(params, bits):
    return rescaled_loss(params, inputs(jnp.float16)) * jnp.ldexp(jnp.float32(1), bits)


@given(st.integers(-90, 90))
@settings(deadline=None, max_examples=30)
def test_a_power_of_two_of_the_loss_comes_out_as_it_went_in(bits):
    grads, exact = (scaled_gradients(parameters(3), n) for n in (bits, 0))
    up, down = 2.0 ** (bits // 2), 2.0 ** (bits - bits // 2)
    chex.assert_trees_all_equal(grads, jax.tree.map(lambda g: g * up * down, exact))


@pytest.mark.parametrize("loss_scale", ["dynamic", "headroom", 2.0**20])
def test_every_loss_scale_works_around_it(loss_scale):
    params, x = parameters(3), inputs(jnp.float16)
    tx = ols.with_loss_scale(optax.sgd(1.0), loss_scale)
    _, new, state = tx.minimize(rescaled_loss, tx.init(params), params, x)
    assert state.should_apply
    grads = jax.grad(rescaled_loss)(params, x)
    chex.assert_trees_all_close(
        new, optax.apply_updates(params, jax.tree.map(jnp.negative, grads))
    )


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_a_gradient_that_is_not_finite_skips_the_step(bad):
    params, x = parameters(8), inputs(jnp.float16)
    tx = ols.with_loss_scale(optax.sgd(1.0))
    state = tx.init(params)
    grads = jax.grad(lambda p: rescaled_loss(p, x) * bad)(params)
    new, state = tx.apply_gradients(grads, state, params)
    assert not state.should_apply
    chex.assert_trees_all_equal(new, params)


def test_activations_of_two_uses_give_nan_and_not_a_wrong_gradient():
    params, rescaled = layers(parameters(2)), experimental.rescale(block)

    def forked(params):
        x = rescaled(params[0], experimental.enter(inputs()))
        return jnp.sum(experimental.leave(x)) + jnp.sum(experimental.leave(rescaled(params[1], x)))

    first, second = jax.grad(forked)(params)
    assert jnp.isnan(first["w"]).all()
    assert jnp.isfinite(second["w"]).all()


def test_what_a_block_closes_over_is_not_differentiated_in_silence():
    p = layers(parameters(1))[0]
    closing = lambda p: rescaled_loss(parameters(1), inputs(), lambda _, x: block(p, x))
    with pytest.raises(Exception, match=r"closed-over|unexpected tracer"):
        jax.grad(closing)(p)


@pytest.mark.slow
def test_trees_of_activations_and_integers_pass_through():
    table = jax.random.normal(jax.random.key(1), (10, WIDTH))

    def embed(table, tokens):
        return {"x": table[tokens].astype(jnp.float16), "tokens": tokens, "none": None}

    def attend(p, h, key, mask):
        kept = jax.random.bernoulli(key, 0.9, h["x"].shape) & mask[:, None]
        return h | {"x": jnp.where(kept, block(p, h["x"]), 0)}

    def total(table, p, embed, attend, enter, leave):
        tokens, key = jnp.array([1, 3, 3, 8]), jax.random.key(0)
        mask = jnp.array([True, True, False, True])
        h = attend(p, embed(table, enter(tokens)), key, mask)
        return jnp.mean(leave(h)["x"].astype(jnp.float32) ** 2) * 2.0**-12

    p = layers(parameters(1))[0]
    grad = jax.grad(total, argnums=(0, 1))
    exact = grad(table, p, lambda t, i: embed(t, i) | {"x": t[i]}, attend, **PLAIN)
    rescale = experimental.rescale
    chex.assert_trees_all_close(
        grad(table, p, rescale(embed), rescale(attend), **BOUNDARIES), exact, rtol=0.02, atol=1e-7
    )


def test_arguments_are_differentiated_like_parameters_and_keywords_are_passed_on():
    def gated(p, x, gate, *, activation):
        return activation(x * gate.astype(x.dtype) * p.astype(x.dtype))

    def total(p, gate, enter, leave, block):
        return jnp.sum(leave(block(p, enter(jnp.full(3, 2.0)), gate, activation=jnp.tanh)))

    p, gate = jnp.float32(0.5), jnp.linspace(0.1, 1, 3)
    grad = jax.grad(total, argnums=(0, 1))
    chex.assert_trees_all_equal(
        grad(p, gate, **BOUNDARIES, block=experimental.rescale(gated)),
        grad(p, gate, **PLAIN, block=gated),
    )


@pytest.mark.slow
def test_what_a_scan_slices_may_be_an_argument_or_a_keyword():
    masked = lambda p, x, gate, *, mask: block(p, x) * gate * mask

    def total(params, gates, masks, enter, leave, block):
        body = lambda x, p: (block(p[0], x, p[1], mask=p[2]), None)
        return jnp.sum(leave(lax.scan(body, enter(inputs()), (params, gates, masks))[0]))

    given = parameters(3), jnp.linspace(0.5, 1, 3), jnp.ones((3, WIDTH)) / 2
    grad = jax.grad(total, argnums=(0, 1, 2))
    chex.assert_trees_all_equal(
        grad(*given, **BOUNDARIES, block=experimental.rescale(masked)),
        grad(*given, **PLAIN, block=masked),
    )


def test_a_keyword_may_have_any_name():
    named = lambda p, x, *, activations, params: p * x * activations * params
    rescaled = experimental.rescale(named)
    y = rescaled(jnp.float32(3), experimental.enter(jnp.ones(2)), activations=2.0, params=1.0)
    chex.assert_trees_all_equal(experimental.leave(y), jnp.full(2, 6.0))
    model = experimental.rescale_model(named)
    chex.assert_trees_all_equal(
        model(jnp.float32(3), jnp.ones(2), activations=2.0, params=1.0), jnp.full(2, 6.0)
    )


@pytest.mark.slow
def test_steps_that_are_masked_out_count_as_no_use():
    valid = jnp.array([True, False, True, True])

    def total(params, enter, leave, block):
        def body(x, given):
            p, is_valid = given
            new = block(p, x)
            return jax.tree.map(lambda a, b: jnp.where(is_valid, a, b), new, x), None

        return jnp.sum(leave(lax.scan(body, enter(inputs()), (params, valid))[0]) ** 2)

    chex.assert_trees_all_equal(
        jax.grad(total)(parameters(4), **BOUNDARIES, block=experimental.rescale(block)),
        jax.grad(total)(parameters(4), **PLAIN, block=block),
    )


@pytest.mark.parametrize("factor", [0.9, 0.5, 0.1, -1.0, 2.0])
def test_arithmetic_on_activations_gives_nan_and_not_a_wrong_gradient(factor):
    def changed(p):
        x = experimental.rescale(block)(p, experimental.enter(inputs()))
        return jnp.sum(experimental.leave(jax.tree.map(lambda x: factor * x, x)))

    assert jnp.isnan(jax.grad(changed)(layers(parameters(1))[0])["w"]).all()


def test_activations_anywhere_else_are_refused():
    x, p = experimental.enter(inputs()), layers(parameters(1))[0]
    rescaled = experimental.rescale(block)
    for call in (
        lambda: experimental.enter({"x": x}),
        lambda: experimental.rescale(lambda p, x, y: x)(p, x, x),
        lambda: experimental.rescale(lambda p, x: experimental.enter(x))(p, x),
        lambda: rescaled({"p": p, "x": x}, x),
    ):
        with pytest.raises(TypeError, match="activations that are rescaled already"):
            call()


@pytest.mark.slow
def test_random_keys_and_what_is_no_array_are_passed_on():
    def noisy(p, x, key, training, kind):
        assert training is True
        assert kind == "normal"
        return x.astype(jnp.float16) * p.astype(jnp.float16) + jax.random.normal(key, x.shape)

    model = experimental.rescale_model(noisy)
    total = lambda model, p, key: jnp.sum(model(p, inputs(), key, True, "normal"))
    key = jax.random.key(0)
    for transform in (same, jax.jit):
        grad = transform(jax.grad(functools.partial(total, model)))(jnp.float32(2), key)
        chex.assert_trees_all_close(grad, jnp.sum(inputs()), rtol=0.01)
    carried = experimental.rescale(lambda p, x: {"x": p * x["x"], "key": x["key"]})
    y = carried(jnp.float32(2), experimental.enter({"x": jnp.ones(3), "key": key}))
    assert experimental.leave(y)["key"] == key


@pytest.mark.slow
def test_strict_dtype_promotion_is_kept():
    with jax.numpy_dtype_promotion("strict"):
        p = jnp.float32(0.5)
        model = experimental.rescale_model(lambda p, x: x * p.astype(jnp.float16))
        grad = jax.grad(lambda p: jnp.sum(model(p, jnp.ones(3, jnp.float16))))(p)
    assert grad == 3


def test_taps_inside_a_block_record_numbers_at_the_scale_of_the_block():
    params = parameters(8)
    tapped = lambda p, x, probe: shrinking(p, ols.diagnosis.tap(x, probe))

    def probed(params, probes, block, enter, leave):
        body = lambda x, p: (block(p[0], x, p[1]), None)
        x, _ = lax.scan(body, enter(inputs(jnp.float16)), (params, probes))
        return jnp.mean(leave(x).astype(jnp.float32) ** 2)

    grad = jax.grad(probed, argnums=(0, 1))
    _, before = grad(params, ols.diagnosis.probe(8), tapped, **PLAIN)
    grads, after = grad(params, ols.diagnosis.probe(8), experimental.rescale(tapped), **BOUNDARIES)
    assert before.cotangent.largest[0] == 0
    assert (after.cotangent.largest > 2**-6).all()
    chex.assert_trees_all_equal(after.value, before.value)
    chex.assert_trees_all_equal(grads, jax.grad(rescaled_loss)(params, inputs(jnp.float16)))


@pytest.mark.parametrize("margin", [16, 8])
def test_the_largest_cotangent_lies_the_margin_below_overflow(margin):
    tapped = lambda p, x, probe: ols.diagnosis.tap(shrinking(p, x), probe)

    def probed(probes):
        x = experimental.enter(inputs(jnp.float16))
        for p, probe in zip(layers(parameters(4)), probes, strict=True):
            x = experimental.rescale(tapped, margin=margin)(p, x, probe)
        return jnp.mean(experimental.leave(x) ** 2)

    for record in jax.grad(probed)([ols.diagnosis.probe()] * 4):
        assert 2.0 ** (15 - margin) <= record.cotangent.largest < 2.0 ** (16 - margin)


@pytest.mark.parametrize("dtype", [jnp.float8_e5m2, jnp.float8_e4m3fn])
def test_cotangents_are_rounded_to_nearest_in_the_range_of_the_narrow_dtype(dtype):
    numbers = np.float32(np.random.default_rng(0).normal(size=3000))
    cotangent = np.concatenate([numbers, numbers * 2.0**-9, numbers * 2.0**-14, [0.0]])
    cotangent = cotangent.astype(np.float32)
    rescaled = experimental.rescale(lambda p, x: x + p, cotangent_dtype=dtype)

    def total(p):
        y = experimental.leave(rescaled(p, experimental.enter(jnp.zeros(len(cotangent)))))
        return jnp.sum(y * cotangent)

    bits = jnp.finfo(dtype).maxexp - 1 - np.frexp(np.abs(cotangent).max())[1]
    nearest = np.ldexp(np.ldexp(cotangent, bits).astype(dtype).astype(np.float32), -bits)
    # Not compiled quickly: jax 0.8 then rounds to float16 on the way.
    grad = jax.jit(jax.grad(total), compiler_options=AS_USERS_DO)(jnp.zeros(len(cotangent)))
    np.testing.assert_array_equal(grad, nearest)
    assert len(np.unique(np.abs(np.asarray(grad)))) <= 2**7
    assert ml_dtypes.finfo(dtype).bits == 8


@pytest.mark.parametrize("dtype", [jnp.float8_e5m2, jnp.float8_e4m3fn])
def test_activations_in_8_bits_have_cotangents_that_fit(dtype):
    p = layers(parameters(1))[0]
    narrow = lambda p, x: block(p, x.astype(jnp.float16)).astype(dtype)
    grads = jax.grad(lambda p: rescaled_total(p, narrow))(p)
    exact = jax.grad(lambda p: jnp.sum(block(p, inputs().astype(dtype).astype(jnp.float32))))(p)
    chex.assert_tree_all_finite(grads)
    chex.assert_trees_all_close(grads, exact, rtol=0.3, atol=0.3)


def test_activations_in_8_bits_do_not_overflow_without_a_margin():
    rescaled = experimental.rescale(lambda p, x: x * p.astype(x.dtype), margin=0)
    x = experimental.enter(jnp.ones(2, jnp.float8_e4m3fn))
    total = lambda p: jnp.sum(experimental.leave(rescaled(p, x))) * 1.875
    chex.assert_trees_all_close(jax.grad(total)(jnp.ones(2)), jnp.full(2, 1.875), rtol=0.1)


def rescaled_total(p, block):
    x = experimental.enter(inputs().astype(jnp.float8_e5m2))
    return jnp.sum(experimental.leave(experimental.rescale(block)(p, x)))


def test_a_whole_model_has_unscaled_gradients_without_any_state():
    params = layers(parameters(3))

    def forward(params, x, *, scale=1.0):
        x = x.astype(jnp.float16)
        for p in params:
            x = block(p, x)
        return x * scale

    def small_loss(params, forward):
        return jnp.mean(forward(params, inputs(), scale=0.5).astype(jnp.float32)) * 2.0**-24

    exact = jax.grad(small_loss)(params, lambda p, x, scale: scale * loop32(p, x))
    grads = jax.jit(jax.grad(lambda p: small_loss(p, experimental.rescale_model(forward))))(params)
    chex.assert_trees_all_close(grads, exact, rtol=0.05, atol=1e-11)
    assert not jax.grad(small_loss)(params, forward)[0]["w"].any()


def loop32(params, x):
    for p in params:
        x = block(p, x)
    return x


def test_a_whole_model_that_overflows_is_skipped_by_the_fixed_scale_that_checks():
    forward = lambda w, x: (w.astype(jnp.float16) * jnp.float16(2.0**10)) * x
    tx = ols.with_loss_scale(optax.sgd(1.0), presets.tensorflow_contrib_fixed(1))
    w, x = jnp.float32(2.0**-8), jnp.ones(3, jnp.float16)
    state = tx.init(w)
    for margin, applied in ((0, False), (12, True)):
        model = experimental.rescale_model(forward, margin=margin)
        grads = jax.grad(lambda w: jnp.sum(model(w, x)))(w)  # noqa: B023
        _, state = tx.apply_gradients(grads, state, w)
        assert bool(state.should_apply) is applied


@pytest.mark.slow
def test_hessian_vector_products_go_through():
    params, x = parameters(3), inputs()
    product = lambda loss: jax.jvp(jax.grad(loss), (params,), (params,))[1]
    chex.assert_trees_all_close(
        product(lambda p: rescaled_loss(p, x, block)),
        product(lambda p: loss(p, x, block, **PLAIN)),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.slow
def test_compiled_programs_grow_linearly_with_the_blocks():
    def lines(depth):
        grad = jax.jit(jax.grad(functools.partial(rescaled_loss, block=block, scan=False)))
        return len(grad.lower(parameters(depth), inputs()).compile().as_text().splitlines())

    two, four, eight = map(lines, (2, 4, 8))
    assert eight - four < 2.5 * (four - two)


def test_one_trace_serves_all_steps():
    params = parameters(3)
    step = jax.jit(chex.assert_max_traces(lambda p, x: jax.grad(rescaled_loss)(p, x), n=1))
    for _ in range(3):
        params = jax.tree.map(jnp.subtract, params, step(params, inputs(jnp.float16)))


@FRAMEWORKS
def test_blocks_of_flax_nnx():
    layer = nnx.Linear(WIDTH, WIDTH, dtype=jnp.float16, rngs=nnx.Rngs(0))

    def total(layer, rescaled):
        graph, state = nnx.split(layer)
        run = experimental.rescale(lambda state, x: nnx.merge(graph, state)(x))
        y = run(state, experimental.enter(inputs(jnp.float16))) if rescaled else layer(inputs())
        y = experimental.leave(y) if rescaled else y
        return jnp.sum(y.astype(jnp.float32)) * 2.0**-20

    exact = nnx.grad(total)(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), False)
    grads = nnx.grad(total)(layer, True)
    chex.assert_trees_all_close(
        jax.tree.leaves(grads), jax.tree.leaves(exact), rtol=0.01, atol=1e-9
    )


@pytest.mark.slow
@FRAMEWORKS
def test_blocks_of_flax_linen():
    layer = linen.Dense(WIDTH, dtype=jnp.float16)
    params = layer.init(jax.random.key(0), inputs())
    total = lambda p, run: jnp.sum(run(p)) * 2.0**-20
    rescaled = experimental.rescale(layer.apply)
    run = lambda p: experimental.leave(rescaled(p, experimental.enter(inputs())))
    exact = jax.grad(total)(params, lambda p: linen.Dense(WIDTH).apply(p, inputs()))
    chex.assert_trees_all_close(jax.grad(total)(params, run), exact, rtol=0.01, atol=1e-9)


@pytest.mark.slow
@FRAMEWORKS
def test_blocks_of_equinox_with_all_that_is_no_array():
    mlp = eqx.nn.MLP(WIDTH, WIDTH, 16, 1, activation=jax.nn.gelu, key=jax.random.key(0))
    rescaled = experimental.rescale(lambda mlp, x: jax.vmap(mlp)(x))

    def total(mlp, enter, leave, run):
        return jnp.sum(leave(run(mlp, enter(inputs()))))

    chex.assert_trees_all_equal(
        jax.tree.leaves(eqx.filter_grad(total)(mlp, **BOUNDARIES, run=rescaled)),
        jax.tree.leaves(eqx.filter_grad(total)(mlp, **PLAIN, run=lambda m, x: jax.vmap(m)(x))),
    )


@pytest.mark.slow
@FRAMEWORKS
def test_equinox_modules_keep_their_python_numbers():
    attention = eqx.nn.MultiheadAttention(2, WIDTH, key=jax.random.key(0))  # with a Dropout(0.0)

    def total(attention, enter, leave, run):
        return jnp.sum(leave(run(attention, enter(inputs()))))

    run = lambda attention, x: attention(x, x, x)
    chex.assert_trees_all_close(
        jax.tree.leaves(
            eqx.filter_grad(total)(attention, **BOUNDARIES, run=experimental.rescale(run))
        ),
        jax.tree.leaves(eqx.filter_grad(total)(attention, **PLAIN, run=run)),
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: experimental.rescale(7), TypeError, "block must be a function, got 7"),
        (lambda: experimental.rescale_model(None), TypeError, "must be a function, got None"),
        (lambda: experimental.rescale(block, margin=-1), ValueError, "margin must be an int"),
        (lambda: experimental.rescale(block, margin=25), ValueError, "between 0 and 24, got 25"),
        (lambda: experimental.rescale(block, margin=0.5), ValueError, "margin must be an int"),
        (
            lambda: experimental.rescale(block, cotangent_dtype=jnp.int8),
            ValueError,
            "cotangent_dtype must be None, float8_e5m2 or float8_e4m3fn, got .*int8",
        ),
        (
            lambda: experimental.rescale(block, cotangent_dtype=jnp.float16),
            ValueError,
            "must be None, float8_e5m2 or float8_e4m3fn, got .*float16",
        ),
        (
            lambda: experimental.rescale(block)(layers(parameters(1))[0], inputs()),
            TypeError,
            r"what enter\(x\) or the rescaled block before it returned, got a ",
        ),
        (lambda: experimental.leave(inputs()), TypeError, "leave takes what"),
        (
            lambda: experimental.rescale_model(lambda m, x: m(x))(
                nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), inputs()
            ),
            TypeError,
            "Linear is an nnx.Module.* nnx.split",
        ),
        (
            lambda: experimental.rescale(block)(
                {"w": jnp.ones((WIDTH, WIDTH), jnp.float16), "b": jnp.ones(WIDTH)},
                experimental.enter(inputs()),
            ),
            TypeError,
            "params/w would underflow in float16 .* keep it in float32",
        ),
    ],
)
def test_what_cannot_be_taken_is_refused_with_what_can(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_bfloat16_parameters_are_taken_as_they_have_the_range_of_float32():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters(3))
    grads = jax.grad(rescaled_loss)(params, inputs(jnp.float16))
    chex.assert_trees_all_equal_dtypes(grads, params)
    chex.assert_tree_all_finite(grads)
