"""Every optimizer that Optax exports, wrapped; placement, dtype and way are in the test ids, too.

Of all combinations, those that are not marked slow have every second optimizer once, and one
everywhere.
"""

import inspect
import itertools
import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import AS_USERS_DO
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import one_in, product

import optax_lossscale as ols

# Optax deprecates some of what it exports; they are wrapped as long as they are there.
pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")

LS = ols.DynamicLossScale(initial_scale=1024, growth_interval=3)
SHAPES = {"w": (8, 3), "b": (8,)}

# What an optimizer needs to be made, other than a learning rate.
ARGUMENTS = {
    "dpsgd": {"l2_norm_clip": 1.0, "noise_multiplier": 0.1, "key": 0},
    "noisy_sgd": {"key": 0},
}
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
each_optimizer = pytest.mark.parametrize("name", NAMES)
WAYS = ["apply_gradients", "update"]
COMPILED = [
    ("jit", *rest) for rest in itertools.product([jnp.float16, jnp.float32], WAYS)
]
# Where a step takes longer to compile.
ELSEWHERE = [
    (placement, *rest)
    for placement in ("eager", "sharded", "explicit", "shard_map")
    for rest in ((jnp.float16, "apply_gradients"), (jnp.float32, "update"))
]


def combinations():
    for i, name in enumerate(NAMES):
        for case in COMPILED + ELSEWHERE:
            quick = name == "adamw" or (
                i % 2 and case == COMPILED[i // 2 % len(COMPILED)]
            )
            placement, dtype, way = case
            yield pytest.param(
                *(name, *case),
                id=f"{name}-{placement}-{jnp.dtype(dtype).name}-{way}",
                marks=() if quick else pytest.mark.slow,
            )


def numbers(dtype, seed):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(s).astype(dtype) for k, s in SHAPES.items()}


def test_every_optimizer_of_optax_is_found():
    assert len(aliases()) >= 25
    assert {"adam", "adamw", "sgd", "lion", "adafactor", "lamb", "lbfgs"} <= set(
        aliases()
    )


def types(tree):
    return jax.tree.map(
        lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)), tree
    )


def placed(tree, mesh, divisible):
    """What can be divided over the mesh, by that spec; the rest replicated."""
    spec = lambda x: divisible if x.ndim and x.shape[0] % 4 == 0 else P()
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), tree)


def mean_over(axis_name):
    """The reduction of the replicas' gradients, as an inner transformation."""
    return optax.stateless(lambda grads, params: jax.lax.pmean(grads, axis_name))


def on_replicas(step, mesh):
    """The step under shard_map: what is not finite comes from one of four replicas alone."""

    def replica_step(grads, state, params, **extra_args):
        index = jax.lax.axis_index("data")
        own = lambda g: jnp.where(jnp.isfinite(g) | (index == 2), g, 1)
        return step(jax.tree.map(own, grads), state, params, **extra_args)

    def replicated(grads, state, params, **extra_args):
        one = lambda grads, state, params, extra: replica_step(
            grads, state, params, **extra
        )
        step = jax.shard_map(one, mesh=mesh, in_specs=P(), out_specs=P())
        return step(grads, state, params, extra_args)

    return replicated


@pytest.mark.parametrize(("name", "placement", "dtype", "way"), [*combinations()])
def test_a_wrapped_optimizer_keeps_types_and_placement_and_skips_an_overflow(
    name, placement, dtype, way
):
    if placement == "shard_map":
        tx = ols.with_loss_scale(
            optax.chain(mean_over("data"), make(name)), LS, axis_name="data"
        )
    else:
        tx = ols.with_loss_scale(make(name), LS)
    params = numbers(dtype, 0)
    abstract = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    # A placement for `init` and the steps: nothing, or a mesh.
    kinds = {
        "sharded": AxisType.Auto,
        "explicit": AxisType.Explicit,
        "shard_map": AxisType.Auto,
    }
    mesh = None
    place = lambda tree: jax.tree.map(jnp.array, tree)
    if placement in kinds:
        mesh = jax.make_mesh((4,), ("data",), axis_types=(kinds[placement],))
        divisible = P() if placement == "shard_map" else P("data")
        place = lambda tree: placed(tree, mesh, divisible)

    def update(grads, state, params, **extra_args):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    params = place(params)
    state = tx.init(params) if mesh is None else place(tx.init(numbers(dtype, 0)))
    chex.assert_trees_all_equal_shapes_and_dtypes(
        jax.eval_shape(tx.init, abstract), state
    )

    step = tx.apply_gradients if way == "apply_gradients" else update
    steps = [(1, 0.0), (2, np.inf), (3, 0.0)]
    if placement == "shard_map":
        step = on_replicas(step, mesh)
    if placement == "eager":  # where each step compiles anew
        steps = steps[:2]
    else:
        step = jax.jit(step)
    for seed, bad in steps:
        grads = place({k: g * 16 + bad for k, g in numbers(dtype, seed).items()})
        new, new_state = step(grads, state, params, **extra(name))
        assert types(new_state) == types(state)
        assert types(new) == types(params)
        assert bool(new_state.should_apply) == (bad == 0)
        if bad:
            chex.assert_trees_all_equal(new, params)
            chex.assert_trees_all_equal(new_state.inner_state, state.inner_state)
        if mesh:
            for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True):
                assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        params, state = new, new_state
    assert all(jnp.isfinite(p).all() for p in jax.tree.leaves(params))
    assert int(state.skipped_steps) == 1


@pytest.mark.slow
@each_optimizer
def test_a_parameter_without_a_gradient_keeps_its_slots(name):
    tx = ols.with_loss_scale(make(name), LS)
    params = jax.tree.map(jnp.array, numbers(np.float32, 0))
    step = jax.jit(tx.apply_gradients)
    grads = {k: 64 * g for k, g in numbers(np.float32, 1).items()}
    params, state = step(grads, tx.init(params), params, **extra(name))
    after, moved = step({"w": None, "b": grads["b"]}, state, params, **extra(name))
    chex.assert_trees_all_equal(after["w"], params["w"])
    of_w = lambda s: [
        x
        for path, x in jax.tree.flatten_with_path(s.inner_state)[0]
        if any(getattr(key, "key", None) == "w" for key in path)
    ]
    chex.assert_trees_all_equal(of_w(moved), of_w(state))
    assert types(moved) == types(state)


@pytest.mark.slow
@each_optimizer
def test_master_weights_round_to_the_parameters(name):
    tx = ols.with_loss_scale(ols.with_master_weights(make(name)), LS)
    params = jax.tree.map(jnp.array, numbers(np.float16, 0))

    def update(grads, state, params, **extra_args):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    for step in (jax.jit(tx.apply_gradients), jax.jit(update)):
        now, state = params, tx.init(params)
        for seed, bad in ((1, 0.0), (2, np.inf), (3, 0.0)):
            grads = {k: g * 16 + bad for k, g in numbers(np.float16, seed).items()}
            now, state = step(grads, state, now, **extra(name))
            master = state.inner_state.remainders
            rounded = jax.tree.map(lambda x: x.astype(jnp.float16), master)
            chex.assert_trees_all_equal(now, rounded)
        assert types(state) == types(tx.init(params))


# Of two programs with the same arithmetic, LLVM may fuse other multiply-adds. Up to
# this instruction set there are none.
NO_FMA = "--xla_cpu_max_isa=AVX"
compiled = pytest.param(
    "compiled",
    marks=pytest.mark.skipif(
        NO_FMA not in os.environ.get("XLA_FLAGS", ""),
        reason="run by test_compiled_without_fused_multiply_adds_each_equals_the_bare_one",
    ),
)


@pytest.mark.slow
def test_compiled_without_fused_multiply_adds_each_equals_the_bare_one():
    """Runs the compiled cases of the next test in a process without fused multiply-adds."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-m=",
        __file__,
        "-k",
        "bit_for_bit and compiled",
    ]
    run = subprocess.run(
        command, env=os.environ | {"XLA_FLAGS": NO_FMA}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert "passed" in run.stdout


@pytest.mark.parametrize("mode", ["eager", compiled])
@product(
    way={way: way for way in ("update", "apply_gradients")},
    name=NAMES,
)
def test_equals_the_bare_optimizer_bit_for_bit(name, mode, way):
    inner = make(name)
    tx = ols.with_loss_scale(inner, LS)

    def plain(grads, state, params, **extra_args):
        updates, state = inner.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    def wrapped(grads, state, params, **extra_args):
        scaled = jax.tree.map(lambda g: g * 1024, grads)
        if way == "apply_gradients":
            return tx.apply_gradients(scaled, state, params, **extra_args)
        updates, state = tx.update(scaled, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    if mode == "compiled":
        plain, wrapped = jax.jit(plain), jax.jit(wrapped)
    params = jax.tree.map(jnp.array, numbers(np.float32, 0))
    fixed = LS.replace(growth_counter=-100)  # no growth, so that 1024 stays right
    a, b = (
        (params, inner.init(params)),
        (params, tx.init(params)._replace(loss_scale=fixed)),
    )
    for seed in range(3):
        grads = jax.tree.map(jnp.array, numbers(np.float32, seed + 1))
        with jax.disable_jit(mode == "eager"):
            a = plain(grads, a[1], a[0], **extra(name))
            b = wrapped(grads, b[1], b[0], **extra(name))
    chex.assert_trees_all_equal(b[0], a[0])
    chex.assert_trees_all_equal(b[1].inner_state, a[1])


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**60], ids=["smallest", "largest"])
@one_in(8, "name", NAMES)
def test_at_either_end_of_the_scales_steps_are_those_of_the_bare_optimizer(name, scale):
    """Compiled as by users, who may close over the scale: XLA folds its reciprocal then."""
    inner = make(name)
    params = numbers(jnp.float32, 0)
    grads = numbers(jnp.float32, 1)
    scaled = jax.tree.map(lambda g: g * np.float32(scale), grads)
    updates, _ = inner.update(grads, inner.init(params), params, **extra(name))
    expected = optax.apply_updates(params, updates)
    fixed = ols.with_loss_scale(inner, scale)
    adaptive = ols.with_loss_scale(inner, ols.DynamicLossScale(scale, min_scale=None))
    closed_over = adaptive.init(params)

    def step(tx, grads, state):
        return tx.apply_gradients(grads, state, params, **extra(name))

    for run, *args in (
        (lambda grads, state: step(fixed, grads, state), scaled, fixed.init(params)),
        (lambda grads, state: step(adaptive, grads, state), scaled, closed_over),
        (lambda grads: step(adaptive, grads, closed_over), scaled),
    ):
        after, state = jax.jit(run, compiler_options=AS_USERS_DO)(*args)
        assert state.should_apply
        chex.assert_trees_all_close(after, expected, rtol=1e-4, atol=1e-6)


@one_in(8, "name", NAMES, first=3)
@pytest.mark.parametrize("branch", ["cond", "select"])
def test_finite_gradients_whose_squares_overflow_are_skipped(name, branch):
    """Or Adam's second moment is infinite for good, and every later update 0."""
    params = numbers(jnp.float32, 0)
    grads = jax.tree.map(lambda g: g * 1024, numbers(jnp.float32, 1))
    huge = grads | {"b": grads["b"] + np.float32(1e25)}
    for loss_scale in (LS, None):
        tx = ols.with_loss_scale(make(name), loss_scale, branch=branch)
        step = jax.jit(tx.apply_gradients)
        after, state = step(grads, tx.init(params), params, **extra(name))
        for way in (tx.apply_gradients, tx.update):
            result, skipped = jax.jit(way)(huge, state, after, **extra(name))
            if way == tx.apply_gradients:
                chex.assert_trees_all_equal(result, after)
            chex.assert_trees_all_equal(skipped.inner_state, state.inner_state)
            chex.assert_trees_all_equal(skipped.loss_scale, state.loss_scale)
            assert not skipped.should_apply
            assert ols.metrics(skipped)["gradient_norm"] == jnp.inf
        moved, state = step(grads, skipped, after, **extra(name))
        assert state.should_apply
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(moved))


@pytest.mark.parametrize("opaque", [False, True])
def test_sam_takes_no_loss_and_steps_as_without_one(opaque):
    """`value` is for the wrapper, where the inner optimizer does not take it."""
    tx = ols.with_loss_scale(
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=opaque)
    )
    params = {"w": jnp.ones(3)}
    loss_fn = lambda params: jnp.sum(params["w"] ** 2)
    grad_fn = {"grad_fn": lambda params, i: jax.grad(loss_fn)(params)} if opaque else {}
    loss, new, state = tx.minimize(loss_fn, tx.init(params), params, extra_args=grad_fn)
    grads = ols.value_and_scaled_grad(loss_fn, tx.init(params))(params)[1]
    expected, _ = tx.apply_gradients(grads, tx.init(params), params, **grad_fn)
    chex.assert_trees_all_equal(new, expected)
    assert loss == 3.0
    assert state.should_apply
    _, state = tx.apply_gradients(grads, state, params, value=jnp.nan, **grad_fn)
    assert not state.should_apply


def test_schedule_frees_parameters_for_evaluation_are_those_of_the_inner_state():
    inner, params = optax.contrib.schedule_free_sgd(0.1), {"w": jnp.ones(3)}
    tx, grads = ols.with_loss_scale(inner, 8), {"w": jnp.full(3, 8.0)}
    params_after, state = tx.apply_gradients(grads, tx.init(params), params)
    updates, bare_state = inner.update({"w": jnp.ones(3)}, inner.init(params), params)
    expected = optax.contrib.schedule_free_eval_params(
        bare_state, optax.apply_updates(params, updates)
    )
    evaluated = optax.contrib.schedule_free_eval_params(state.inner_state, params_after)
    chex.assert_trees_all_close(evaluated, expected)
