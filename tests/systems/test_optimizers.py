"""Every optimizer that Optax exports, wrapped."""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import AS_USERS_DO
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from steps import WAYS

import optax_lossscale as ols

# Optax deprecates some of what it exports; they are wrapped as long as they are there.
pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")

LS = ols.DynamicLossScale(initial_scale=1024, growth_interval=10**6)
SHAPES = {"w": (8, 3), "b": (8,)}

# What an optimizer needs to be made, other than a learning rate.
ARGUMENTS = {"noisy_sgd": {"key": 0}}
# What cannot be wrapped as the others are, and why.
REASONS = {
    "dpsgd": "takes a gradient for each example, with an axis of its own",
    "lbfgs": "its line search takes a value function; tested in test_combinations.py",
}


def aliases():
    """The names of the optimizers in `optax`: functions that make a transformation."""
    exported = vars(optax).items()
    is_alias = lambda f: inspect.isfunction(f) and f.__module__ == optax.adam.__module__
    return sorted(name for name, f in exported if is_alias(f))


def make(name):
    arguments = {"learning_rate": 1e-2} | ARGUMENTS.get(name, {})
    known = inspect.signature(getattr(optax, name)).parameters
    return getattr(optax, name)(**{k: v for k, v in arguments.items() if k in known})


def extra(name):
    """The extra arguments that some take."""
    return {"value": jnp.float32(1.0)} if name == "polyak_sgd" else {}


NAMES = [name for name in aliases() if name not in REASONS]


def each_optimizer(quick):
    """All of them, of which every `quick`th is no slow test."""
    marked = [
        pytest.param(name, marks=() if i % quick == 0 else pytest.mark.slow)
        for i, name in enumerate(NAMES)
    ]
    return pytest.mark.parametrize("name", marked)


def numbers(dtype, seed, factor=1):
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(factor * rng.standard_normal(shape), dtype)
    return {name: draw(shape) for name, shape in SHAPES.items()}


def types(tree):
    of = lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False))
    return jax.tree.map(of, tree)


def test_every_optimizer_of_optax_is_found():
    assert len(NAMES) >= 25
    assert {"adam", "adamw", "sgd", "lion", "adafactor", "lamb"} <= set(NAMES)


@each_optimizer(quick=4)
def test_types_and_explicit_shardings_stay_and_an_overflow_is_skipped(name):
    """With float16 parameters on four devices."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    spec = lambda x: P("data") if x.ndim and x.shape[0] % 4 == 0 else P()
    put = lambda x: jax.device_put(x, NamedSharding(mesh, spec(x)))
    place = lambda tree: jax.tree.map(put, tree)
    tx = ols.with_loss_scale(make(name), LS)
    params = place(numbers("float16", 0))
    state = place(tx.init(numbers("float16", 0)))
    step = jax.jit(tx.apply_gradients)
    for seed, bad in [(1, 0.0), (2, np.inf), (3, 0.0)]:
        grads = jax.tree.map(lambda g: g + bad, place(numbers("float16", seed, 16)))  # noqa: B023
        new, new_state = step(grads, state, params, **extra(name))
        assert types((new, new_state)) == types((params, state))
        assert new_state.should_apply == (bad == 0)
        if bad:
            chex.assert_trees_all_equal(new, params)
            chex.assert_trees_all_equal(new_state.inner_state, state.inner_state)
        pairs = zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True)
        assert all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
        params, state = new, new_state
    assert ols.all_finite(params)


@pytest.mark.slow
@each_optimizer(quick=1)
def test_a_parameter_without_a_gradient_keeps_its_slots(name):
    tx = ols.with_loss_scale(make(name), LS)
    params, grads = numbers("float32", 0), numbers("float32", 1, 64)
    step = jax.jit(tx.apply_gradients)
    params, state = step(grads, tx.init(params), params, **extra(name))
    after, moved = step(grads | {"w": None}, state, params, **extra(name))
    chex.assert_trees_all_equal(after["w"], params["w"])
    named = lambda path: any(getattr(key, "key", None) == "w" for key in path)
    leaves = lambda s: jax.tree.leaves_with_path(s.inner_state)
    of_w = lambda s: [x for path, x in leaves(s) if named(path)]
    chex.assert_trees_all_equal(of_w(moved), of_w(state))
    assert types(moved) == types(state)


@pytest.mark.slow
@each_optimizer(quick=1)
def test_master_weights_round_to_the_parameters(name):
    tx = ols.with_loss_scale(ols.with_master_weights(make(name)), LS)
    params = numbers("float16", 0)
    state = first = tx.init(params)
    step = jax.jit(tx.apply_gradients)
    for seed in (1, 2):
        grads = numbers("float16", seed, 16)
        params, state = step(grads, state, params, **extra(name))
        weights = state.inner_state.weights(params)
        rounded = jax.tree.map(lambda x: x.astype(jnp.float16), weights)
        chex.assert_trees_all_equal(params, rounded)
    assert types(state) == types(first)


@each_optimizer(quick=2)
def test_steps_equal_the_bare_optimizers_bit_for_bit(name):
    inner = make(name)
    tx = ols.with_loss_scale(inner, LS)
    params = numbers("float32", 0)
    plain = (params, inner.init(params))
    scaled = {way: (params, tx.init(params)) for way in WAYS.values()}
    with jax.disable_jit():
        for seed in (1, 2):
            grads = numbers("float32", seed)
            updates, state = inner.update(grads, plain[1], plain[0], **extra(name))
            plain = optax.apply_updates(plain[0], updates), state
            grads = jax.tree.map(lambda g: 1024 * g, grads)
            for way, (params, state) in scaled.items():
                scaled[way] = way(tx)(grads, state, params, **extra(name))
    for params, state in scaled.values():
        chex.assert_trees_all_equal((params, state.inner_state), plain)


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**60], ids=["smallest", "largest"])
@each_optimizer(quick=8)
def test_at_either_end_of_the_scales_steps_are_those_of_the_bare_optimizer(name, scale):
    """Compiled as by users: XLA folds the reciprocal of a fixed scale with constants."""
    inner = make(name)
    params, grads = numbers("float32", 0), numbers("float32", 1)
    scaled = jax.tree.map(lambda g: g * np.float32(scale), grads)
    updates, _ = inner.update(grads, inner.init(params), params, **extra(name))
    expected = optax.apply_updates(params, updates)
    dynamic = ols.DynamicLossScale(scale, min_scale=None)
    for loss_scale in (scale, dynamic):
        tx = ols.with_loss_scale(inner, loss_scale)
        step = lambda *args: tx.apply_gradients(*args, **extra(name))  # noqa: B023
        compiled = jax.jit(step, compiler_options=AS_USERS_DO)
        after, state = compiled(scaled, tx.init(params), params)
        assert state.should_apply
        chex.assert_trees_all_close(after, expected, rtol=1e-4, atol=1e-6)


def test_finite_gradients_whose_squares_overflow_are_skipped():
    """Or Adam's second moment is infinite for good, and every later update 0."""
    params, grads = numbers("float32", 0), numbers("float32", 1, 1024)
    huge = grads | {"b": grads["b"] + 1e25}
    tx = ols.with_loss_scale(optax.adam(1e-2), LS)
    step = jax.jit(tx.apply_gradients)
    after, state = step(grads, tx.init(params), params)
    result, skipped = step(huge, state, after)
    chex.assert_trees_all_equal(result, after)
    chex.assert_trees_all_equal(skipped.inner_state, state.inner_state)
    chex.assert_trees_all_equal(skipped.loss_scale, state.loss_scale)
    assert not skipped.should_apply
    assert skipped.gradient_norm == jnp.inf
    moved, _ = step(grads, skipped, after)
    assert ols.all_finite(moved)
