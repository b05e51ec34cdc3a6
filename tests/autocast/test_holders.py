"""autocast of what holds functions: modules, loops, branches, custom rules, devices."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_float32 import (
    assert_as_in_float32,
    assert_close,
    assert_computes_in,
    normal,
    products,
)
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback, pallas
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the frameworks', not ours
    import equinox as eqx
    from flax import linen as nn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

F16 = jnp.float16
W = normal(1, 8, 8, scale=8**-0.5)
V = normal(2, 8, 8, scale=8**-0.5)
X = normal(0, 4, 8)
PARAMS = {"w": W, "v": V}


def block(p, x):
    """Two products, with what needs float32 between them."""
    h = x @ p["w"]
    h = h * lax.rsqrt(jnp.mean((300 * h) ** 2, -1, keepdims=True) + 1e-6) * 300
    return jax.nn.softmax(h) @ p["v"]


def squared(f):
    """A loss of a function."""
    return lambda p, x: jnp.mean((f(p, x) - 1) ** 2)


def holds(f, **options):
    """Holds the loss of a function and its gradients to those in float32."""
    assert_as_in_float32(squared(f), PARAMS, X, **options)


def scanned(body):
    step = lambda p: lambda c, _: (body(p, c), jnp.sum(c))
    return lambda p, x: lax.scan(step(p), x, None, length=3)[0]


# --- modules of Equinox and Linen; tests/autocast/test_nnx.py has those of NNX ---


class Net(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    mlp: eqx.nn.MLP  # which has functions for leaves
    name: str = eqx.field(static=True, default="net")

    def __init__(self, key):
        self.linear = eqx.nn.Linear(8, 8, use_bias=False, key=key)
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
        self.mlp = eqx.nn.MLP(8, 4, 8, 1, jax.nn.gelu, key=key)

    def __call__(self, x, state):
        x, state = self.norm(self.linear(x), state)
        return self.mlp(x), state


def test_equinox_modules_and_their_state():
    def loss_fn(model, state, x):
        axes = {"in_axes": (0, None), "out_axes": (0, None)}
        y, state = jax.vmap(model, axis_name="batch", **axes)(x, state)
        return jnp.mean((y - 1) ** 2), state

    results = []
    for cast in (loss_fn, ols.autocast(loss_fn)):
        model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
        step = eqx.filter_jit(eqx.filter_value_and_grad(cast, has_aux=True))
        (loss, new), grads = step(model, state, X)
        results.append((loss, jax.tree.leaves(new), jax.tree.leaves(grads)))
        assert isinstance(new, eqx.nn.State)
    assert_close(results[1], results[0], 0.01)


def test_a_linen_model_with_statistics_and_rngs():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = nn.BatchNorm(use_running_average=False)
            x = nn.relu(norm(nn.Dense(8, use_bias=False)(x)))
            return nn.Dense(4)(nn.Dropout(0.5, deterministic=False)(x))

    model, keys = Layers(), {name: jax.random.key(0) for name in ("params", "dropout")}
    variables = model.init(keys, X)

    def loss_fn(params, stats, x, key):
        given = {"params": params, "batch_stats": stats}
        y, new = model.apply(given, x, rngs={"dropout": key}, mutable=["batch_stats"])
        return jnp.mean((y - 1) ** 2), new

    args = variables["params"], variables["batch_stats"], X, jax.random.key(1)
    run = lambda f: jax.value_and_grad(f, has_aux=True)(*args)
    assert_close(run(ols.autocast(loss_fn)), run(loss_fn), 0.01)


# --- jit, loops, branches ---


def test_jit_inside_with_static_and_donated_arguments():
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)
    power = jax.jit(lambda x, how: x**2 if how == "square" else x, static_argnums=1)
    inner = jax.jit(block)
    holds(jax.jit(lambda p, x: power(inner(p, inner(p, donated(x * 1))), "square")))


POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("h"),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_remat_with_policies(policy):
    def named(p, x):
        h = checkpoint_name(x @ p["w"], "h")
        return jnp.exp(jnp.sin(h)) @ p["v"]

    holds(scanned(jax.checkpoint(named, policy=policy)))


def test_a_scan_carries_and_gives_what_it_did():
    """Integers, booleans, None, and a sum that the user has in bfloat16 himself."""

    def fun(p, x):
        def step(c, t):
            n, flag, x, none, total = c
            total += (total.astype(jnp.float32) * 1e-6 @ p["w"]).astype(jnp.bfloat16)
            c = n + 100_003, ~flag, block(p, x), none, total
            return c, (x[0], n, {"even": flag})

        start = 0, True, x, None, jnp.full_like(x, 1e6, "bfloat16")
        return lax.scan(step, start, jnp.arange(4), reverse=True)

    assert_close(ols.autocast(fun)(PARAMS, X), fun(PARAMS, X), 0.01)


def test_a_loop_with_a_count_computes_in_16_bits():
    def fun(p, x):
        step = lambda s: (s[0] + 1, block(p, s[1]))
        return lax.while_loop(lambda s: s[0] < 3, step, (0, x))

    cast = ols.autocast(fun)
    assert_close(cast(PARAMS, X), fun(PARAMS, X), 0.01)
    assert products(cast, PARAMS, X) == {"float16": 2}


@pytest.mark.filterwarnings("ignore:autocast leaves every")
def test_a_loop_that_waits_until_numbers_converge_stays_in_float32():
    """The condition reads integers alone, but one of them says that a number converged."""

    def fun(a, v):
        def step(state):
            n, _, v = state
            u = a @ v
            u /= jnp.linalg.norm(u)
            return n + 1, (jnp.linalg.norm(u - v) < 1e-6).astype(int), u

        return lax.while_loop(lambda s: (s[1] == 0) & (s[0] < 2000), step, (0, 0, v))

    a, v = jax.random.uniform(jax.random.key(0), (8, 8)), jnp.full((8, 1), 8**-0.5)
    assert fun(a, v)[0] < 20
    assert_close(ols.autocast(fun)(a, v), fun(a, v), 1e-6)


def of_each_row(p, x):
    branch = lambda r: lax.cond(r[0] > 0, lambda r: r @ p["w"], jnp.exp, r)
    return jax.vmap(branch)(x)


BRANCHES = {
    "cond": lambda p, x: lax.cond(x[0, 0] > 0, block, lambda p, x: x, p, x),
    "switch": lambda p, x: lax.switch(x.shape[0], [lambda p, x: x, block], p, x),
    "closures": lambda p, x: lax.cond(x.sum() > 9, lambda: x @ p["w"], lambda: x + 1),
    "vmap": of_each_row,
    "platform": lambda p, x: lax.platform_dependent(
        x, cpu=lambda x: block(p, x), default=lambda x: x @ p["v"]
    ),
}


@pytest.mark.parametrize("fun", BRANCHES.values(), ids=BRANCHES)
def test_conditionals(fun):
    holds(fun)


def test_a_kernel_for_another_platform_need_not_compile_for_this_one():
    shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)

    def kernel(x, out):
        out[...] = jnp.sin(x[...])

    def fun(p, x):
        kernel_of = pallas.pallas_call(kernel, out_shape=shape)
        on_a_tpu = lambda x: kernel_of(x @ p["w"])
        return lax.platform_dependent(
            x, tpu=on_a_tpu, default=lambda x: jnp.sin(x @ p["w"])
        )

    assert_close(jax.jit(ols.autocast(fun))(PARAMS, X), fun(PARAMS, X), 0.01)


# --- custom rules ---


def tripled_jvp():
    @jax.custom_jvp
    def f(x, w):
        return jnp.tanh(x @ w)

    @f.defjvp
    def rule(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return f(x, w), 3 * (dx @ w) + 2 * (x @ dw)

    return f


def tripled_vjp():
    @jax.custom_vjp
    def f(x, w):
        return jnp.exp(x @ w)

    def backward(saved, ct):
        return 5 * (ct @ saved[1].T), 7 * (saved[0].T @ ct)

    f.defvjp(lambda x, w: (f(x, w), (x, w)), backward)
    return f


@pytest.mark.parametrize("make", [tripled_jvp, tripled_vjp])
def test_custom_derivatives_are_the_users(make):
    f = make()
    fun = lambda p, x: f(f(x, p["w"]), p["v"])
    holds(fun)
    holds(scanned(lambda p, x: f(x, p["w"]) / 3))
    holds(jax.checkpoint(fun))


def test_each_pass_of_a_custom_vjp_runs_once():
    ran = []

    @jax.custom_vjp
    def f(x, w):
        return x @ w

    def forward(x, w):
        y = jnp.tanh(x @ w)
        jax.debug.callback(lambda y: ran.append("forward"), y)
        return y, (x, w, y)

    def backward(saved, ct):
        jax.debug.callback(lambda ct: ran.append("backward"), ct)
        x, w, y = saved
        ct = ct * (1 - y**2)
        return ct @ w.T, x.T @ ct

    f.defvjp(forward, backward)
    loss = squared(scanned(lambda p, x: f(x, p["w"])))
    counts = []
    for cast in (loss, ols.autocast(loss)):
        ran.clear()
        jax.block_until_ready(jax.jit(jax.grad(cast))(PARAMS, X))
        jax.effects_barrier()
        counts.append((ran.count("forward"), ran.count("backward")))
    assert counts == [(3, 3), (3, 3)]


def test_a_backward_pass_that_is_not_linear_sees_the_whole_cotangent():
    """It is never computed again, with a part of the cotangent."""
    normalized = jax.custom_vjp(lambda x: x)
    normalized.defvjp(lambda x: (x, None), lambda _, ct: (ct / jnp.linalg.norm(ct),))

    def read_twice(p, x):
        y = jnp.tanh(normalized(jnp.exp(-jnp.square(x @ p["w"]))))
        return jnp.sum(y @ p["v"]) + 3 * jnp.sum(y * jnp.exp(y))

    for fun in (read_twice, jax.jit(read_twice), jax.checkpoint(read_twice)):
        exact, cast = (jax.grad(f)(PARAMS, X)["w"] for f in (fun, ols.autocast(fun)))
        norms = map(jnp.linalg.norm, (cast, exact))
        np.testing.assert_allclose(*norms, rtol=0.02)


def by_custom_gradient(p, x):
    clipped = jax.custom_gradient(lambda x: (x, lambda ct: jnp.clip(ct, -1e9, 1e9) * 2))
    return clipped(x @ p["w"]) @ p["v"]


def with_static_arguments(p, x):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
    def called(f, x, n):
        return f(x) * n

    backward = lambda f, n, x, ct: (jax.vjp(f, x)[1](ct * n)[0],)
    called.defvjp(lambda f, x, n: (f(x) * n, x), backward)
    return called(jnp.sin, x @ p["w"], 3) @ p["v"]


def with_integers_and_a_key(p, x):
    @jax.custom_vjp
    def picked(x, i, key):
        return x[i] * jax.random.normal(key, x.shape)

    def forward(x, i, key):
        return picked(x, i, key), (jax.random.normal(key, x.shape), i)

    def backward(saved, ct):
        noise, i = saved
        return jnp.zeros_like(ct).at[i].add(ct * noise), None, None

    picked.defvjp(forward, backward)
    return picked(x @ p["w"], jnp.array([2, 0, 1, 3]), jax.random.key(0)) @ p["v"]


def mapped_and_closing_over_an_array(p, x):
    """JAX counts what it closes over among its arguments then."""
    f = jax.custom_vjp(lambda x: jnp.sin(x @ V))
    f.defvjp(lambda x: (f(x), x), lambda x, ct: ((ct * jnp.cos(x @ V)) @ V.T,))
    return jax.vmap(f)(x @ p["w"])


def with_masks_indices_and_keys(p, x):
    """Results that have no gradient."""

    def several(x, w):
        y = x @ w
        return y, y > 0, jnp.argmax(y, -1), jax.random.key(3)

    f = jax.custom_vjp(several)
    backward = lambda saved, cts: (2 * cts[0] @ saved[1].T, saved[0].T @ cts[0])
    f.defvjp(lambda x, w: (several(x, w), (x, w)), backward)
    y, mask, best, key = f(x, p["w"])
    y = jnp.where(mask, y, 0) + jax.random.normal(key, y.shape)
    return jnp.take_along_axis(y, best[:, None], 1) * y @ p["v"]


@pytest.mark.parametrize(
    "fun",
    [
        by_custom_gradient,
        with_static_arguments,
        with_integers_and_a_key,
        mapped_and_closing_over_an_array,
        with_masks_indices_and_keys,
    ],
)
def test_custom_derivatives_of_every_make(fun):
    holds(fun)


def test_products_that_stand_in_a_backward_pass_alone_are_in_16_bits():
    """As of quantized training, whose products are of integers in the forward pass."""

    def quantized(x):
        scale = jnp.max(jnp.abs(x)) / 127
        return jnp.round(x / scale).astype(jnp.int8), scale

    @jax.custom_vjp
    def f(x, w):
        (a, s), (b, t) = quantized(x), quantized(w)
        return lax.dot(a, b, preferred_element_type=jnp.int32).astype("f") * s * t

    def backward(saved, ct):
        x, w = (a.astype(jnp.float32) * s for a, s in saved)
        return ct @ w.T, x.T @ ct

    f.defvjp(lambda x, w: (f(x, w), (quantized(x), quantized(w))), backward)
    for fun in (lambda p, x: f(x, p["w"]), scanned(lambda p, x: f(x, p["w"]) / 3)):
        loss = squared(fun)
        step = jax.jit(jax.value_and_grad(ols.autocast(loss), (0, 1)))
        exact = jax.value_and_grad(loss, (0, 1))(PARAMS, X)
        assert_close(step(PARAMS, X), exact, 0.02)
        assert products(step, PARAMS, X).keys() == {"int8", "float16"}


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this jax has no refs")
def test_a_backward_pass_may_write_to_a_ref():
    """As gradients are logged, since a pass that is only differentiated returns no more."""

    @jax.custom_vjp
    def logged(ref, x):
        return x @ V

    def backward(ref, ct):
        ref[...] += jnp.abs(ct).sum()
        return None, ct @ V.T

    logged.defvjp(lambda ref, x: (logged(ref, x), ref), backward)
    loss_fn = lambda p, ref: jnp.mean(jnp.square(logged(ref, jnp.tanh(X @ p["w"]))))
    written = []
    for fun in (loss_fn, ols.autocast(loss_fn)):
        ref = jax.new_ref(jnp.float32(0))
        grads = jax.grad(fun)(PARAMS, ref)
        written.append((grads["w"], jnp.float32(ref[...])))
    assert written[0][1] > 0
    assert_close(*written, 0.005)


@pytest.mark.filterwarnings("ignore:autocast leaves every")
def test_a_rule_is_told_which_arguments_are_differentiated():
    """By `symbolic_zeros`."""
    seen = []

    @jax.custom_vjp
    def f(x, w):
        return x @ w

    def forward(x, w):
        seen.append((x.perturbed, w.perturbed))
        return x.value @ w.value, (x.value, w.value)

    backward = lambda s, ct: (ct @ s[1].T, s[0].T @ ct)
    f.defvjp(forward, backward, symbolic_zeros=True)
    fun = squared(lambda p, x: f(x, p["w"]))
    for argnums in (0, 1):
        seen.clear()
        exact = jax.grad(fun, argnums)(PARAMS, X)
        expected = list(seen)
        cast = jax.grad(ols.autocast(fun), argnums)(PARAMS, X)
        assert_close(cast, exact, 0.005)
        assert set(seen[len(expected) :]) >= set(expected) > set()


def test_custom_batching():
    @jax.custom_batching.custom_vmap
    def f(x, w):
        return x @ w

    @f.def_vmap
    def rule(size, batched, x, w):
        assert batched == [True, False]
        return jnp.einsum("nd,de->ne", x, w), True

    fun = lambda p, x: jnp.tanh(jax.vmap(f, (0, None))(x, p["w"]))
    assert_close(ols.autocast(fun)(PARAMS, X), fun(PARAMS, X), 0.005)


def root(p, x):
    f = lambda z: z - 0.5 * jnp.tanh(z @ p["w"]) - x
    loop = lambda step, y: lax.fori_loop(0, 30, lambda i, z: step(z), y)
    solve = lambda f, z: loop(lambda z: z - f(z), z)
    tangent_solve = lambda g, y: loop(lambda v: v - (g(v) - y), y)
    return lax.custom_root(f, jnp.zeros_like(x), solve, tangent_solve)


def matrix(p):
    return jnp.eye(8) * 2 + 0.3 * (p["w"] + p["w"].T)


SOLVERS = {
    "solve": lambda p, x: jnp.linalg.solve(matrix(p), x.T),
    "cg": lambda p, x: jax.scipy.sparse.linalg.cg(
        lambda v: matrix(p) @ v, x[0], tol=1e-6
    )[0],
}
if jax.__version_info__ >= (0, 9):  # before, it has no gradient in float32 either
    SOLVERS["root"] = root


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast leaves every")
@pytest.mark.parametrize("fun", SOLVERS.values(), ids=SOLVERS)
def test_linear_solvers_and_roots_stay_in_float32(fun):
    run = lambda f: jax.jit(jax.value_and_grad(f))(PARAMS, X)
    assert_close(run(ols.autocast(squared(fun))), run(squared(fun)), 0.005)


# --- differentiation of every kind ---


def test_forward_mode_and_a_second_derivative():
    loss = squared(block)
    tangents = jax.tree.map(jnp.ones_like, (PARAMS, X))
    along = jax.jit(
        lambda f: jax.jvp(jax.grad(f), (PARAMS, X), tangents), static_argnums=0
    )
    assert_close(along(ols.autocast(loss)), along(loss), 0.01)


def test_gradients_inside_of_loops_with_remat():
    """There JAX holds the forward pass of the loop inside in a call of its own."""

    def twice(f):
        return lambda w, x: lax.scan(lambda c, _: (f(w, c), None), x, length=2)[0]

    def pulled_back(w, x):
        y, pull = jax.vjp(twice(jax.checkpoint(twice(lambda w, x: x @ w))), w, x)
        return jnp.mean(pull(y)[0])

    assert_computes_in(F16, ols.autocast(pulled_back), W, X)
    assert_as_in_float32(pulled_back, W, X)


def test_of_nested_autocasts_the_inner_one_decides():
    inner = ols.autocast(block, jnp.bfloat16)
    outer = ols.autocast(lambda p, x: inner(p, x) @ p["w"])
    assert products(outer, PARAMS, X) == {"bfloat16": 2, "float16": 1}
    assert outer(PARAMS, X).dtype == jnp.float32


# --- devices ---


def mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((4,), ("data",), axis_types=(axis_type,))


@pytest.mark.slow
def test_pmap_and_collectives():
    def loss(p, x):
        x = block(p, x)
        h = x - lax.pmean(x.mean(0), "i")
        return lax.pmean(jnp.mean(lax.psum(h, "i") ** 2), "i")

    spread = jax.tree.map(lambda p: jnp.stack([p] * 4), PARAMS), normal(5, 4, 3, 8)
    run = lambda f: jax.pmap(jax.value_and_grad(f), axis_name="i")(*spread)
    assert_close(run(ols.autocast(loss)), run(loss), 0.01)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_inside_and_around(check_vma):
    def local(p, x):
        return lax.psum(jnp.mean((block(p, x) - 1) ** 2), "data") / 4

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    shard = functools.partial(jax.shard_map, mesh=mesh(), **specs)
    assert_as_in_float32(shard(local), PARAMS, X)
    if check_vma:
        run = lambda f: jax.jit(shard(f))(PARAMS, X)
        assert_close(run(ols.autocast(local)), run(local), 0.005)


def test_a_gradient_through_a_checkpoint_inside_of_shard_map():
    local = jax.checkpoint(lambda p, x: lax.pmean(jnp.mean(block(p, x) ** 2), "data"))
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    grad = jax.grad(jax.shard_map(local, mesh=mesh(), **specs))
    assert_close(jax.jit(ols.autocast(grad))(PARAMS, X), jax.jit(grad)(PARAMS, X), 0.01)


@pytest.mark.parametrize(
    "axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
def test_shardings_are_kept(axis_type):
    m = mesh(axis_type)
    sharding = NamedSharding(m, P("data"))

    def fun(p, x):
        h = x @ p["w"]
        if axis_type == AxisType.Auto:
            h = lax.with_sharding_constraint(h, sharding)
        return jax.nn.softmax(h) @ p["v"]

    with jax.set_mesh(m):
        p = jax.device_put(PARAMS, NamedSharding(m, P()))
        x = jax.device_put(X, sharding)
        exact, cast = jax.jit(fun)(p, x), jax.jit(ols.autocast(fun))(p, x)
        assert cast.sharding.is_equivalent_to(exact.sharding, cast.ndim)
        assert_close(cast, exact, 0.005)
        grads = jax.jit(jax.grad(ols.autocast(squared(fun))))(p, x)
        assert_close(grads, jax.jit(jax.grad(squared(fun)))(p, x), 0.01)


def test_jit_inside_with_shardings():
    place = NamedSharding(mesh(), P("data"))
    inner = jax.jit(lambda x: x + 1, in_shardings=place, out_shardings=place)
    fun = lambda p, x: inner(x @ p["w"]) @ p["v"]
    run = lambda f: jax.jit(f)(PARAMS, X)
    assert_close(run(ols.autocast(fun)), run(fun), 0.005)


# --- effects ---


def test_callbacks_are_called_as_often_in_order_and_with_float32():
    def fun(log, p, x):
        def note(n, x):
            if n != 1:  # what is logged is in no order with what is called
                log.append((int(n), x.dtype, float(x.sum())))

        h = x @ p["w"]
        io_callback(note, None, 0, h, ordered=True)
        jax.debug.callback(note, 1, jnp.exp(h), ordered=True)

        def step(c, i):
            io_callback(note, None, 2 + i, c, ordered=True)
            return jnp.tanh(c @ p["v"]), None

        h, _ = lax.scan(step, h, jnp.arange(3))
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        scale = jax.pure_callback(lambda x: np.float32(x.max()), shape, h)
        return h * lax.stop_gradient(scale)

    for jit in (jax.jit, lambda f: f):
        logs = [], []
        exact = jit(functools.partial(fun, logs[0]))(PARAMS, X)
        cast = jit(ols.autocast(functools.partial(fun, logs[1])))(PARAMS, X)
        jax.effects_barrier()
        assert_close(cast, exact, 0.005)
        assert [n for n, _, _ in logs[1]] == [0, 2, 3, 4]
        assert [d for _, d, _ in logs[1]] == [d for _, d, _ in logs[0]]
        sums = [[s for *_, s in log] for log in logs]
        np.testing.assert_allclose(*sums, rtol=0.05, atol=0.05)


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this jax has no refs")
def test_references_that_are_given_or_made_inside():
    def fun(p, x, seen):
        total = jax.new_ref(jnp.zeros((4, 8)))

        def step(i, _):
            total[...] += x @ p["w"] * i
            return 0

        lax.fori_loop(0, 3, step, 0)
        seen[...] += jnp.sum(total[...] ** 2)
        return jnp.exp(total[...]) @ p["v"]

    results = []
    for f in (fun, ols.autocast(fun)):
        seen = jax.new_ref(jnp.float32(1))
        results.append((jax.jit(f)(PARAMS, X, seen), seen[...]))
    assert_close(results[1], results[0], 0.005)


# --- errors ---


def test_errors_are_jaxs_own():
    def fun(p, x):
        return jnp.log(x @ p["w"] - 1e4)

    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.block_until_ready(jax.jit(ols.autocast(fun))(PARAMS, X))
    with pytest.raises(TypeError, match="contracting"):
        ols.autocast(lambda p, x: x @ p["w"][:3])(PARAMS, X)
