"""autocast of what holds functions: modules, transformations, loops, custom rules, devices."""

import contextlib
import functools
import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
from jax.experimental import pallas
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import one_in, quick

import optax_lossscale as ols

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the frameworks', not ours
    import equinox as eqx
    from flax import linen as nn
    from flax import nnx
    from flax.errors import TraceContextError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

F16 = jnp.float16
W = normal(1, 8, 8, scale=8**-0.5)
V = normal(2, 8, 8, scale=8**-0.5)
X = normal(0, 4, 8)


def params():
    return {"w": jnp.asarray(W), "v": jnp.asarray(V)}


def block(p, x):
    """Two products, with what needs float32 between them."""
    h = x @ p["w"]
    h = h * lax.rsqrt(jnp.mean((300 * h) ** 2, -1, keepdims=True) + 1e-6) * 300
    return jax.nn.softmax(h) @ p["v"]


def squared(f):
    """A loss of a function."""
    return lambda p, x: jnp.mean((f(p, x) - 1) ** 2)


def holds(f, *args, **options):
    assert_as_in_float32(squared(f), *(args or (params(), X)), **options)


# --- Flax NNX ---


class Model(nnx.Module):
    """Statistics, a stream of random numbers, and one layer under two names."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.last = nnx.Linear(8, 8, rngs=rngs)
        self.again = self.last
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        x = nnx.relu(self.norm(self.first(x)))
        return self.again(nnx.tanh(self.last(self.dropout(x))))


def nnx_loss(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def changed(model):
    """What is no parameter, without random keys."""
    state = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, state)


def params_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_nnx_modules_change_as_in_float32(inside):
    """Statistics, streams, counters and shared layers, with the loss scale in or outside."""
    loss_scale = ols.FixedLossScale(1024)

    def step(loss_fn, model, x, loss_scale):
        if inside:
            scaled = loss_fn(
                lambda model, x: ols.scale_gradient(nnx_loss(model, x), loss_scale)
            )
        else:
            scaled = lambda m, x: ols.scale_gradient(
                loss_fn(nnx_loss)(m, x), loss_scale
            )
        loss, grads = nnx.value_and_grad(scaled)(model, x)
        return loss, nnx.to_pure_dict(grads)

    results = []
    for loss_fn in (lambda f: f, ols.autocast):
        model = Model()
        run = nnx.jit(functools.partial(step, loss_fn))
        outs = [run(model, X * n, loss_scale) for n in (1.0, 2.0)]
        results.append((outs, changed(model)))
    assert_close(results[1], results[0], 0.01)
    assert int(results[1][1]["calls"]) == 2
    fun = lambda model, x: step(ols.autocast, model, x, loss_scale)
    assert_computes_in(F16, fun, Model(), X)


@pytest.mark.slow
def test_nnx_modules_may_be_anywhere_in_the_arguments():
    def loss_fn(models, x, *, other):
        return (
            nnx_loss(models["a"][0], x) + nnx_loss(other, x) + nnx_loss(models["b"], x)
        )

    results = []
    for loss in (loss_fn, ols.autocast(loss_fn)):
        model, other = Model(0), Model(1)
        loss = loss({"a": [model], "b": model}, X, other=other)  # the same one twice
        results.append((loss, changed(model), changed(other)))
    assert_close(results[1], results[0], 0.01)
    assert int(results[1][1]["calls"]) == 2


class Remembering(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.seen = nnx.data(None)

    def __call__(self, x):
        y = self.linear(x)
        self.seen = nnx.Cache(y)
        return y


def test_nnx_variables_that_are_made_inside_are_kept():
    results = []
    for loss in (nnx_loss, ols.autocast(nnx_loss)):
        model = Remembering()
        loss(model, X)
        results.append(jax.tree.leaves(nnx.state(model, nnx.Cache)))
    assert len(results[0]) == 1
    assert_close(results[1], results[0], 0.005)


def moving_average(given, x):
    """Of the loss, beside the model."""
    loss = nnx_loss(given["model"], x)
    given["average"][...] = 0.9 * given["average"][...] + 0.1 * loss
    return loss


def counter(seen, x):
    seen[...] += x.mean(0)
    return jnp.sum(seen[...])


def a_part_beside_the_whole(model, mean, x):
    loss = nnx_loss(model, x) + jnp.sum(mean[...])
    mean[...] *= 2
    return loss, model.norm.mean[...]


def modules_as_results(actor, critic, x):
    made = nnx.Linear(8, 8, rngs=nnx.Rngs(3))
    made.kernel[...] = 2 * actor.first.kernel[...]
    loss = critic(actor(made(x))).mean()
    return loss, {
        "all": (actor, critic),
        "part": actor.norm.mean,
        "made": made,
        "same": made,
    }


def metrics(model, metrics, x):
    y = model(x)
    metrics.update(loss=jnp.mean(y**2), logits=y, labels=jnp.arange(4))
    return metrics.compute()


def other_variables_after(model, x):
    """What was sown is taken out again, and one replaces another."""
    model.sow(nnx.Intermediate, "seen", model.first(x))
    found = nnx.pop(model, nnx.Intermediate)
    model.calls = nnx.Variable(jnp.sum(x, 0))
    model.more = nnx.Param(x @ model.first.kernel[...])
    return nnx_loss(model, x), found, nnx.state(model, nnx.BatchStat)


def trees_in_variables(tree, streams, x):
    old = tree.value
    tree.value = {"sum": old["sum"] + x[0], "calls": old["calls"] + 1}
    return jax.random.normal(streams.noise(), (3,)) * old["sum"][0]


def optimizer(model, optimizer, x):
    loss, grads = nnx.value_and_grad(nnx_loss)(model, x)
    optimizer.update(model, grads)
    return loss


def model_and_its_mean():
    model = Model()
    return model, model.norm.mean


def model_and_its_optimizer():
    model = Model()
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


CHANGES = {
    moving_average: lambda: (
        {"model": Model(), "average": nnx.Variable(jnp.zeros(()))},
    ),
    counter: lambda: (nnx.Variable(jnp.zeros(8)),),
    a_part_beside_the_whole: model_and_its_mean,
    modules_as_results: lambda: (Model(0), Model(1)),
    metrics: lambda: (Model(), nnx.MultiMetric(loss=nnx.metrics.Average("loss"))),
    other_variables_after: lambda: (Model(),),
    trees_in_variables: lambda: (
        nnx.Variable({"sum": jnp.zeros(8), "calls": 0}),
        nnx.Rngs(0, noise=1),
    ),
    optimizer: model_and_its_optimizer,
}


def numbers(tree):
    """What is in a tree of modules and variables, under its names."""
    is_key = lambda x: (
        isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    )
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    leaves = [(p, jax.random.key_data(x) if is_key(x) else x) for p, x in leaves]
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def the_same_objects(tree):
    """Where each module and variable of a tree is, if it is there more than once."""
    places = {}
    is_object = lambda x: isinstance(x, (nnx.Variable, nnx.Pytree))
    for path, top in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_object):
        if is_object(top):
            for inner, x in nnx.iter_graph(top):
                if is_object(x):
                    places.setdefault(id(x), []).append(
                        (jax.tree_util.keystr(path), inner)
                    )
    return sorted(str(found) for found in places.values() if len(found) > 1)


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(False, id="eager", marks=pytest.mark.slow),
        pytest.param(True, id="jit"),
    ],
)
@one_in(2, "fun", {fun.__name__: fun for fun in CHANGES})
def test_nnx_objects_change_and_come_back_as_without_autocast(fun, compiled):
    """Variables and modules, wherever they are in arguments and results, twice in a row."""
    results = []
    for cast in (fun, ols.autocast(fun)):
        args, found = CHANGES[fun](), []
        for _ in range(2):
            with contextlib.nullcontext() if compiled else jax.checking_leaks():
                out = (nnx.jit(cast) if compiled else cast)(*args, X)
            found += [numbers(out), numbers(args), the_same_objects((args, out))]
        results.append(found)
    for cast, exact in zip(results[1], results[0], strict=True):
        assert_close(cast, exact, 0.01) if isinstance(cast, dict) else None
        assert isinstance(cast, dict) or cast == exact


def test_nnx_modules_that_are_returned_beside_a_loss_that_is_differentiated():
    def loss_fn(given, x):
        return moving_average(given, x), given["model"]

    results = []
    for loss in (loss_fn, ols.autocast(loss_fn)):
        given = CHANGES[moving_average]()[0]
        step = nnx.jit(nnx.value_and_grad(loss, has_aux=True))
        (value, model), grads = step(given, X)
        assert model is given["model"]
        results.append((value, numbers(grads), numbers(given)))
    assert_close(results[1], results[0], 0.01)


class Target(nnx.Module):
    def __init__(self, seed):
        self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(seed))

    def __call__(self, x):
        return nnx.tanh(self.first(x))


def test_nnx_modules_that_a_function_around_took_from_outside():
    """As a target network; they may not change there, and need not."""
    distance = lambda model, target, x: jnp.mean((model(x) - target(x)) ** 2)
    first = lambda model, x: jnp.sum(model.first(x))

    def results(cast):
        model, target = Target(0), Target(1)
        loss, grads = nnx.value_and_grad(lambda m: cast(distance)(m, target, X))(model)
        each = jax.vmap(lambda x: cast(first)(target, x))(X)
        graph, params, rest = nnx.split(Model(), nnx.Param, ...)
        of_params = lambda params: cast(first)(nnx.merge(graph, params, rest), X)
        merged = jax.jit(jax.grad(of_params))(params)
        return loss, *map(nnx.to_pure_dict, (grads, merged)), each, params_of(target)

    assert_close(results(ols.autocast), results(lambda f: f), 0.01)


@pytest.mark.parametrize("how", ["model", "method", "closed over", "from around"])
def test_nnx_modules_that_change_and_are_no_arguments_are_refused(how):
    model = Model()
    cast = {
        "model": lambda: ols.autocast(model)(X),
        "method": lambda: ols.autocast(model.__call__)(X),
        "closed over": lambda: ols.autocast(lambda x: model(x))(X),
        "from around": lambda: jax.jit(lambda x: ols.autocast(nnx_loss)(model, x))(X),
    }[how]
    with pytest.raises(TraceContextError) as refused:
        cast()
    assert how == "from around" or "docs/frameworks.md" in refused.value.__notes__[-1]
    assert np.isfinite(model(X)).all()  # it is what it was


@pytest.mark.skipif(
    not hasattr(nnx.Variable, "ref"), reason="this Flax has other references"
)
def test_what_is_written_to_a_reference_in_an_nnx_variable_is_kept():
    total = nnx.Variable(jnp.zeros(8), ref=True)
    for run in (lambda f: f, nnx.jit):
        run(ols.autocast(counter))(total, X)
    np.testing.assert_allclose(total[...], 2 * X.mean(0), rtol=1e-6)


def test_nnx_parameters_that_are_set_inside_are_kept():
    def fun(model, x):
        y = model(x)
        model.bias[...] = jnp.ones(8)
        return y

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    ols.autocast(fun)(model, X)
    np.testing.assert_array_equal(model.bias[...], np.ones(8))


def test_an_nnx_step_leaves_the_modules_types_and_dtypes():
    model = Model()
    kinds = lambda: [(x.shape, x.dtype) for x in jax.tree.leaves(nnx.state(model))]
    before = kinds()
    ols.autocast(nnx_loss)(model, X)
    assert kinds() == before
    assert model.again is model.last


def test_a_module_that_is_called_is_a_function():
    """As at evaluation: its parameters are no arguments."""
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu)
    assert_close(ols.autocast(lambda x: model(x))(X), model(X), 0.005)
    assert products(ols.autocast(lambda x: model(x)), X) == {"float16": 1}


def test_an_nnx_step_keeps_no_old_parameter_alive():
    model, freed = Model(), []
    for _ in range(3):
        nnx.grad(ols.autocast(nnx_loss))(model, X)
        param = jax.tree.leaves(nnx.state(model, nnx.Param))[0]
        weakref.finalize(param, freed.append, 1)
        del param
        nnx.update(model, jax.tree.map(lambda x: x + 1, nnx.state(model, nnx.Param)))
    gc.collect()
    assert len(freed) >= 3


def test_an_nnx_step_leaks_no_tracer():
    with jax.checking_leaks():
        step = nnx.jit(nnx.value_and_grad(ols.autocast(nnx_loss)))
        assert np.isfinite(step(Model(), X)[0])


class Stack(nnx.Module):
    """Layers that are mapped and scanned by NNX's own transformations."""

    def __init__(self):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(8, 8, rngs=rngs)

        self.layers = make(nnx.Rngs(0))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def forward(x, layer):
            return nnx.tanh(layer(x))

        return forward(x, self.layers)


def test_nnx_transformations_inside():
    graph, state = nnx.split(Stack())
    assert_as_in_float32(
        lambda state, x: jnp.mean((nnx.merge(graph, state)(x) - 1) ** 2),
        state,
        X,
    )


@pytest.mark.slow
def test_an_nnx_training_step_in_full():
    """With nnx.Optimizer, as in the documentation."""

    def losses(autocast):
        model = Model()
        tx = ols.with_loss_scale(
            optax.adam(1e-2), ols.DynamicLossScale(initial_scale=1024)
        )
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            def loss_fn(model):
                return ols.scale_gradient(nnx_loss(model, x), optimizer.opt_state)

            loss, grads = nnx.value_and_grad(autocast(loss_fn))(model)
            optimizer.update(model, grads)
            return loss

        return [step(model, optimizer, X) for _ in range(10)]

    np.testing.assert_allclose(losses(ols.autocast), losses(lambda f: f), rtol=0.02)


# --- Equinox, Linen ---


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


def eqx_loss(model, state, x):
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    y, state = batched(x, state)
    return jnp.mean((y - 1) ** 2), state


@pytest.mark.parametrize(
    "compiled", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_equinox_modules_and_their_state(compiled):
    results = []
    for loss_fn in (eqx_loss, ols.autocast(eqx_loss)):
        model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))

        def scaled(model, state, x, loss_fn=loss_fn):
            loss, state = loss_fn(model, state, x)
            return ols.scale_gradient(loss, ols.FixedLossScale(256)), state

        step = eqx.filter_value_and_grad(scaled, has_aux=True)
        (loss, new), grads = (eqx.filter_jit(step) if compiled else step)(
            model, state, X
        )
        results.append((loss, jax.tree.leaves(new), jax.tree.leaves(grads)))
        assert isinstance(new, eqx.nn.State)
    assert_close(results[1], results[0], 0.01)


def test_a_linen_model_with_statistics_and_rngs():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train)(
                nn.Dense(8, use_bias=False)(x)
            )
            return nn.Dense(4)(nn.Dropout(0.5, deterministic=not train)(nn.relu(x)))

    model = Layers()
    variables = model.init(jax.random.key(0), X, False)

    def loss_fn(params, stats, x, key, train):
        y, new = model.apply(
            {"params": params, "batch_stats": stats}, x, train, rngs={"dropout": key},
            mutable=["batch_stats"],
        )  # fmt: skip
        return jnp.mean((y - 1) ** 2), new

    args = (variables["params"], variables["batch_stats"], X, jax.random.key(1), True)
    exact = jax.value_and_grad(loss_fn, has_aux=True)(*args)
    cast = jax.value_and_grad(ols.autocast(loss_fn), has_aux=True)(*args)
    assert_close(cast, exact, 0.01)


# --- jit, loops, branches ---


def test_jit_around_and_inside():
    holds(jax.jit(block))
    holds(jax.jit(lambda p, x: jax.jit(block)(p, block(p, x)), inline=True))
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)
    holds(lambda p, x: block(p, donated(x * 1)))
    static = jax.jit(
        lambda p, x, how: block(p, x) if how == "twice" else x, static_argnums=2
    )
    holds(lambda p, x: static(p, x, "twice"))


def test_donated_arguments_of_a_step():
    @functools.partial(jax.jit, donate_argnums=0)
    def step(p, x):
        loss, grads = jax.value_and_grad(ols.autocast(squared(block)))(p, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), loss

    p = params()
    for _ in range(3):
        old = p
        p, _ = step(p, X)
        assert old["w"].is_deleted()
    assert p["w"].dtype == jnp.float32


def scanned(body):
    return lambda p, x: lax.scan(
        lambda c, _: (body(p, c), jnp.sum(c)), x, None, length=3
    )[0]


POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("h"),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_remat_with_policies(policy):
    def named(p, x):
        h = checkpoint_name(x @ p["w"], "h")
        return jnp.exp(jnp.sin(h)) @ p["v"]

    f = jax.checkpoint(named, policy=POLICIES[policy])
    holds(scanned(f))


def test_remat_saves_no_more_than_in_float32():
    """What a policy saves is still what it says, and in 16 bits if it was."""
    body = jax.checkpoint(block, policy=jax.checkpoint_policies.nothing_saveable)
    loss = squared(lambda p, x: body(p, body(p, x)))
    size = lambda f: sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.vjp(f, params(), X)[1])
    )
    assert size(ols.autocast(loss)) <= 1.1 * size(loss)


def test_a_scan_carries_what_it_carried():
    """Dtypes and structures of carry and outputs, integers and booleans among them."""

    def fun(p, x):
        def step(c, t):
            n, flag, x, none = c
            return (n + 1, ~flag, block(p, x), none), (x[0], n, {"even": flag})

        return lax.scan(step, (0, True, x, None), jnp.arange(4), reverse=True)

    outs, exact = ols.autocast(fun)(params(), X), fun(params(), X)
    assert_close(outs, exact, 0.01)


def test_while_loops():
    def fun(p, x):
        rounds, y = lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, block(p, s[1])), (0, x)
        )
        return rounds, y

    cast = ols.autocast(fun)
    assert_close(cast(params(), X), fun(params(), X), 0.01)
    assert products(cast, params(), X) == {"float16": 2}


@pytest.mark.filterwarnings("ignore:autocast leaves every")
def test_a_fixed_point_is_found_as_in_float32():
    """Products that are rounded to 16 bits may never come within 1e-6 of each other."""

    def fun(p, x):
        def step(state):
            n, z, _ = state
            new = jnp.tanh(z @ p["w"] * 0.9 + x)
            return n + 1, new, jnp.max(jnp.abs(new - z))

        n, z, error = lax.while_loop(
            lambda s: (s[2] > 1e-6) & (s[0] < 500),
            step,
            (0, jnp.zeros_like(x), jnp.float32(1)),
        )
        return n, z, error

    n, z, _ = fun(params(), X)
    cast_n, cast_z, _ = ols.autocast(fun)(params(), X)
    assert n < 100
    assert cast_n < 2 * n
    assert_close(cast_z, z, 0.005)


@pytest.mark.filterwarnings("ignore:autocast leaves every")
def test_a_loop_that_waits_for_a_flag_of_its_body_ends():
    """The condition reads integers alone, but one of them says that a number converged."""

    def fun(a, v):
        def step(state):
            n, _, v = state
            u = a @ v
            u /= jnp.linalg.norm(u)
            return n + 1, (jnp.linalg.norm(u - v) < 1e-6).astype(int), u

        return lax.while_loop(lambda s: (s[1] == 0) & (s[0] < 2000), step, (0, 0, v))

    for seed in range(4):
        a = jax.random.uniform(jax.random.key(seed), (8, 8))
        v = jnp.full((8, 1), 8**-0.5)
        assert fun(a, v)[0] < 20
        assert_close(ols.autocast(fun)(a, v), fun(a, v), 1e-6)


def test_what_a_scan_carries_in_another_dtype_stays_in_it():
    """Of integers, and of streams that the user has in bfloat16 himself."""

    def body(carry, w):
        x, a, b, y = carry
        y += (y.astype(jnp.float32) * 1e-6 @ w).astype(jnp.bfloat16)
        return (x @ w * (a % 7 + b % 5).astype(x.dtype), b, a, y), None

    def fun(p, x):
        first = x, p["a"], p["b"], p["y"]
        (x, a, b, y), _ = lax.scan(body, first, p["layers"])
        return (x + y) @ p["layers"][0], a, b, y

    of_params = {
        "layers": jnp.stack([params()["w"]] * 3),
        "a": jnp.asarray(100003),
        "b": jnp.asarray(70001),
        "y": jnp.full_like(X, 1e6, "bfloat16"),
    }
    _, a, b, y = ols.autocast(fun)(of_params, X)
    _, exact_a, exact_b, exact_y = fun(of_params, X)
    assert (a, b) == (exact_a, exact_b)
    assert_close(y, exact_y, 0.01)


@pytest.mark.slow
def test_newtons_iteration_converges():
    """Square roots of a matrix by products: what is refined round by round."""

    def fun(p, x):
        a = jnp.eye(8) + 0.3 * jnp.sin(p["w"] + p["w"].T)
        scale = jnp.linalg.norm(a)

        def step(_, yz):
            y, z = yz
            t = 0.5 * (3 * jnp.eye(8) - z @ y)
            return y @ t, t @ z

        y, _ = lax.fori_loop(0, 12, step, (a / scale, jnp.eye(8)))
        return x @ y * jnp.sqrt(scale)

    holds(fun, within=0.02)


def test_an_integrator_with_small_steps():
    """The time, and what is added to the state, are smaller than float16's digits."""

    def fun(p, x):
        def step(carry, _):
            t, y = carry
            return (t + 1e-3, y + 1e-3 * (jnp.tanh(y @ p["w"]) - y * t)), None

        return lax.scan(step, (0.0, x @ p["v"]), None, length=1000)[0][1]

    holds(fun)


def test_conditionals():
    holds(lambda p, x: lax.cond(x[0, 0] > 0, block, lambda p, x: x, p, x))
    plain = lambda p, x: x
    holds(
        lambda p, x: lax.switch(
            x.shape[0], [plain, lambda p, x: x @ p["w"], block], p, x
        )
    )
    holds(
        lambda p, x: lax.cond(x.sum() > 1e9, lambda: x @ p["w"], lambda: x * 1e-5 + 1)
    )
    holds(
        lambda p, x: jax.vmap(
            lambda r: lax.cond(r[0] > 0, lambda r: r @ p["w"], jnp.exp, r)
        )(x)
    )
    holds(
        lambda p, x: lax.platform_dependent(
            x, cpu=lambda x: block(p, x), default=lambda x: x @ p["v"]
        )
    )


def test_a_branch_for_another_platform_need_not_compile_for_this_one():
    """As the kernel for a TPU that a model uses there."""
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)

    def kernel(x, out):
        out[...] = jnp.sin(x[...])

    def fun(w, x):
        on_a_tpu = lambda x: pallas.pallas_call(kernel, out_shape=shape)(x @ w)
        return lax.platform_dependent(x, tpu=on_a_tpu, default=lambda x: jnp.sin(x @ w))

    w, x = normal(0, 4, 4), normal(1, 4, 4)
    assert_close(jax.jit(ols.autocast(fun))(w, x), fun(w, x), 0.01)


def test_a_token_may_stand_beside_a_product():
    def fun(w, x):
        lax.after_all(lax.create_token(x))
        return x @ w

    w, x = normal(0, 4, 4), normal(1, 4, 4)
    assert_close(jax.jit(ols.autocast(fun))(w, x), fun(w, x), 0.01)


@pytest.mark.slow
def test_maps_and_associative_scans():
    holds(lambda p, x: jax.vmap(block, (None, 0))(p, x[:, None])[:, 0])
    holds(lambda p, x: lax.map(lambda r: block(p, r[None])[0], x, batch_size=2))
    combine = lambda a, b: (a[0] @ b[0], a[1] @ b[0] + b[1])
    holds(
        lambda p, x: lax.associative_scan(
            jax.vmap(combine), (jnp.tile(p["w"], (4, 1, 1)) / 2, x[:, None])
        )[1][:, 0]
    )


# --- custom rules ---


def test_custom_derivatives_are_the_users():
    @jax.custom_jvp
    def f(x, w):
        return jnp.tanh(x @ w)

    @f.defjvp
    def rule(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return f(x, w), 3 * (dx @ w) + 2 * (x @ dw)

    @jax.custom_vjp
    def g(x, w):
        return jnp.exp(x @ w)

    def bwd(saved, ct):
        return 5 * (ct @ saved[1].T), 7 * (saved[0].T @ ct)

    g.defvjp(lambda x, w: (g(x, w), (x, w)), bwd)

    for rule_of in (f, g):
        fun = lambda p, x, f=rule_of: f(f(x, p["w"]), p["v"])
        holds(fun)
        holds(scanned(lambda p, x, f=rule_of: f(x, p["w"]) / 3))
        holds(jax.checkpoint(fun))


def test_each_pass_of_a_custom_vjp_runs_once():
    """The forward pass is the original's, which saves what it likes for the backward pass."""
    ran = []

    @jax.custom_vjp
    def f(x, w):
        return x @ w

    def forward(x, w):
        jax.debug.callback(lambda: ran.append("forward"))
        y = jnp.tanh(x @ w)
        return y, (x, w, y)

    def backward(saved, ct):
        jax.debug.callback(lambda: ran.append("backward"))
        x, w, y = saved
        ct = ct * (1 - y**2)
        return ct @ w.T, x.T @ ct

    f.defvjp(forward, backward)
    for fun in (lambda p, x: f(x, p["w"]), scanned(lambda p, x: f(x, p["w"]))):
        counts = []
        for cast in (lambda f: f, ols.autocast):
            step = jax.jit(jax.grad(cast(squared(fun))))
            # Without autocast, those that nothing reads may be among these.
            n_products = sum(products(step, params(), X).values())
            ran.clear()
            jax.block_until_ready(step(params(), X))
            jax.effects_barrier()
            counts.append((n_products, ran.count("forward"), ran.count("backward")))
        exact, narrow = counts
        assert narrow[0] <= exact[0]
        assert narrow[1:] == exact[1:]


def test_a_backward_pass_that_is_not_linear_sees_the_whole_cotangent():
    """It is never computed again, with a part of the cotangent."""

    @jax.custom_vjp
    def normalized(x):
        return x

    normalized.defvjp(lambda x: (x, None), lambda _, ct: (ct / jnp.linalg.norm(ct),))

    def read_twice(p, x):
        y = jnp.tanh(normalized(jnp.exp(-jnp.square(x @ p["w"]))))
        return jnp.sum(y @ p["v"]) + 3 * jnp.sum(y * jnp.exp(y))

    for fun in (read_twice, jax.jit(read_twice), jax.checkpoint(read_twice)):
        of_w = jax.jit(jax.grad(fun))(params(), X)["w"]
        cast = jax.jit(jax.grad(ols.autocast(fun)))(params(), X)["w"]
        np.testing.assert_allclose(
            jnp.linalg.norm(cast), jnp.linalg.norm(of_w), rtol=0.02
        )


def test_a_custom_jvp_that_sums_many_tangents():
    """JAX transposes the rule, and what is named in it would have no transpose."""

    @jax.custom_jvp
    def f(x, w):
        return jax.nn.relu(x @ w).mean(0)

    @f.defjvp
    def rule(primals, tangents):
        y, dy = jax.jvp(lambda x, w: jax.nn.relu(x @ w).mean(0), primals, tangents)
        return y, 1.5 * dy

    holds(lambda p, x: f(jnp.tile(x, (16, 1)) @ p["w"], p["w"]) @ p["v"])


@pytest.mark.slow
def test_a_custom_vjp_whose_forward_pass_jax_optimizes():
    @jax.custom_vjp
    def f(w, x):
        return jnp.sin(x @ w)

    def forward(w, x):
        return f(w, x), (w, x, jnp.cos(x @ w))

    def backward(saved, g):
        w, x, slope = saved
        return x.T @ (g * slope), (g * slope) @ w.T

    f.defvjp(forward, backward, optimize_remat=True)
    loss = lambda w, x: jnp.mean(f(w, x) ** 2)
    step = jax.value_and_grad(ols.autocast(loss), (0, 1))
    assert_close(step(W, X), jax.value_and_grad(loss, (0, 1))(W, X), 0.02)
    assert products(step, W, X).keys() == {"float16"}
    large = 100 * jnp.ones((8, 8), jnp.float16)
    report = ols.diagnose(
        lambda w: jnp.mean((f(w, w) + w @ w).astype(jnp.float32)), large
    )
    assert report.loss_in_float32 == pytest.approx(8e4, rel=1e-3)


def test_custom_vjps_of_every_make():
    @jax.custom_gradient
    def clipped(x):
        return x, lambda ct: jnp.clip(ct, -1e9, 1e9) * 2

    holds(lambda p, x: clipped(x @ p["w"]) @ p["v"])

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
    def called(f, x, n):
        return f(x) * n

    called.defvjp(
        lambda f, x, n: (f(x) * n, x),
        lambda f, n, x, ct: (jax.vjp(f, x)[1](ct * n)[0],),
    )
    holds(lambda p, x: called(jnp.sin, x @ p["w"], 3) @ p["v"])

    @jax.custom_vjp
    def with_ints(x, i, key):
        return x[i] * jax.random.normal(key, x.shape)

    def fwd(x, i, key):
        return with_ints(x, i, key), (jax.random.normal(key, x.shape), i)

    def bwd(saved, ct):
        noise, i = saved
        return jnp.zeros_like(ct).at[i].add(ct * noise), None, None

    with_ints.defvjp(fwd, bwd)
    order = jnp.array([2, 0, 1, 3])
    holds(lambda p, x: with_ints(x @ p["w"], order, jax.random.key(0)) @ p["v"])

    @jax.custom_vjp
    def kept(x):
        return jnp.sin(x @ V)

    kept.defvjp(lambda x: jax.vjp(lambda x: jnp.sin(x @ V), x), lambda vjp, ct: vjp(ct))
    holds(lambda p, x: kept(x @ p["w"]))


def sorted_rows(x, w):
    """With what has no gradient among the results: a mask, indices and a random key."""
    y = x @ w
    return y, y > 0, jnp.argmax(y, -1), jax.random.key(3)


def rows_vjp():
    f = jax.custom_vjp(sorted_rows)
    backward = lambda saved, cts: (2 * cts[0] @ saved[1].T, saved[0].T @ cts[0])
    f.defvjp(lambda x, w: (sorted_rows(x, w), (x, w)), backward)
    return f


def rows_jvp():
    f = jax.custom_jvp(sorted_rows)

    @f.defjvp
    def rule(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        outs = f(x, w)
        zeros = [np.zeros(y.shape, jax.dtypes.float0) for y in outs[1:]]
        return outs, (2 * dx @ w + x @ dw, *zeros)

    return f


@quick("make", {"rows_vjp": rows_vjp, "rows_jvp": rows_jvp}, "rows_vjp")
def test_custom_derivatives_of_functions_that_also_give_masks_indices_and_keys(make):
    f = make()

    def fun(p, x):
        y, mask, best, key = f(x, p["w"])
        y = jnp.where(mask, y, 0) + jax.random.normal(key, y.shape)
        return jnp.take_along_axis(y, best[:, None], 1) * y @ p["v"]

    holds(fun)
    holds(scanned(lambda p, x: fun(p, x) / 9))
    holds(lambda p, x: jax.vmap(lambda x: fun(p, x[None])[0])(x))


def quantized(x):
    scale = jnp.max(jnp.abs(x)) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


def int8_product():
    """Quantized training: products of integers forward, and of floats backward."""

    @jax.custom_vjp
    def f(x, w):
        (a, s), (b, t) = quantized(x), quantized(w)
        return (
            lax.dot(a, b, preferred_element_type=jnp.int32).astype(jnp.float32) * s * t
        )

    def backward(saved, ct):
        x, w = (a.astype(jnp.float32) * s for a, s in saved)
        return ct @ w.T, x.T @ ct

    f.defvjp(lambda x, w: (f(x, w), (quantized(x), quantized(w))), backward)
    return f


def no_product():
    f = jax.custom_vjp(lambda x, w: jnp.sin(x))
    forward = lambda x, w: (jnp.sin(x), (x, w))
    backward = lambda saved, ct: (ct @ saved[1].T, saved[0].T @ ct)
    f.defvjp(forward, backward)
    return f


BACKWARD = {
    "int8": int8_product,
    "none": no_product,
}


@quick("make", [*BACKWARD], "int8")
def test_products_that_stand_in_a_backward_pass_alone_are_narrowed(make):
    f, within = BACKWARD[make](), 0.02 if make == "int8" else 0.005
    direct = lambda p, x: f(x, p["w"]) + f(x, p["v"])
    for fun in (direct, jax.checkpoint(direct), scanned(lambda p, x: f(x, p["w"]) / 3)):
        loss, args = squared(fun), (params(), X)
        step = jax.jit(jax.value_and_grad(ols.autocast(loss), (0, 1)))
        assert_close(step(*args), jax.value_and_grad(loss, (0, 1))(*args), within)
        found = products(step, *args)
        assert found.pop("float16")
        assert found.keys() <= {"int8"}


def test_a_mapped_custom_vjp_that_closes_over_an_array():
    """JAX counts what it closes over among its arguments then, and refuses to differentiate it."""

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x @ V)

    f.defvjp(lambda x: (f(x), x), lambda x, ct: ((ct * jnp.cos(x @ V)) @ V.T,))
    holds(lambda p, x: jax.vmap(f)(x @ p["w"]))
    holds(lambda p, x: jax.vmap(jax.checkpoint(f))(x @ p["w"]))
    one = lambda x: lax.cond(x[0] > 0, f, jnp.exp, x)
    holds(lambda p, x: jax.vmap(one)(x @ p["w"]))


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this jax has no refs")
@pytest.mark.parametrize("multiplies", [False, True])
def test_a_backward_pass_may_write_to_a_ref(multiplies):
    """As gradients are logged, since a pass that is only differentiated returns no more."""

    @jax.custom_vjp
    def logged(ref, x):
        return x @ V if multiplies else x

    def forward(ref, x):
        return logged(ref, x), ref

    def backward(ref, ct):
        ref[...] += jnp.abs(ct).sum()
        return None, ct @ V.T if multiplies else ct

    logged.defvjp(forward, backward)
    loss_fn = lambda p, ref: jnp.mean(jnp.square(logged(ref, jnp.tanh(X @ p["w"]))))
    written = []
    for fun in (loss_fn, ols.autocast(loss_fn)):
        ref = jax.new_ref(jnp.float32(0))
        grads = jax.grad(fun)(params(), ref)
        written.append((grads["w"], jnp.float32(ref[...])))
    assert written[0][1] > 0
    assert_close(*written, 0.005)


@pytest.mark.filterwarnings("ignore:autocast leaves every")
def test_symbolic_zeros_are_as_they_were():
    seen = []

    @jax.custom_vjp
    def f(x, w):
        return x @ w

    def fwd(x, w):
        seen.append((x.perturbed, w.perturbed))
        return x.value @ w.value, (x.value, w.value)

    f.defvjp(fwd, lambda s, ct: (ct @ s[1].T, s[0].T @ ct), symbolic_zeros=True)

    @jax.custom_jvp
    def g(x, w):
        return x @ w

    def rule(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        zero = jax.custom_derivatives.SymbolicZero
        seen.append((type(dx) is not zero, type(dw) is not zero))
        out = g(x, w)
        terms = [
            0 * out if type(dx) is zero else dx @ w,
            0 * out if type(dw) is zero else x @ dw,
        ]
        return out, terms[0] + terms[1]

    g.defjvp(rule, symbolic_zeros=True)
    for h in (f, g):
        fun = squared(lambda p, x, h=h: h(x, p["w"]))
        for argnums in (0, 1):
            seen.clear()
            exact = jax.grad(fun, argnums)(params(), X)
            expected = list(seen)
            seen.clear()
            cast = jax.grad(ols.autocast(fun), argnums)(params(), X)
            assert_close(cast, exact, 0.005)
            assert expected
            assert set(seen) >= set(expected)


def test_custom_batching():
    @jax.custom_batching.custom_vmap
    def f(x, w):
        return x @ w

    @f.def_vmap
    def rule(size, batched, x, w):
        assert batched == [True, False]
        return jnp.einsum("nd,de->ne", x, w), True

    fun = lambda p, x: jnp.tanh(jax.vmap(f, (0, None))(x, p["w"]))
    assert_close(ols.autocast(fun)(params(), X), fun(params(), X), 0.005)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast leaves every")
def test_linear_solvers_and_roots():
    def same(f):  # in these, products stay in float32
        run = lambda f: jax.jit(jax.value_and_grad(squared(f)))(params(), X)
        exact = run(f)
        assert_close(run(ols.autocast(f)), exact, 0.005)

    def matrix(p):
        return jnp.eye(8) * 2 + 0.3 * (p["w"] + p["w"].T)

    same(lambda p, x: jnp.linalg.solve(matrix(p), x.T))
    same(
        lambda p, x: jax.scipy.sparse.linalg.cg(
            lambda v: matrix(p) @ v, x[0], tol=1e-6
        )[0]
    )
    same(
        lambda p, x: jax.scipy.sparse.linalg.gmres(
            lambda v: matrix(p) @ v, x[0], tol=1e-6
        )[0]
    )
    same(
        lambda p, x: jax.scipy.linalg.cho_solve(
            jax.scipy.linalg.cho_factor(matrix(p)), x.T
        )
    )

    def root(p, x):
        f = lambda z: z - 0.5 * jnp.tanh(z @ p["w"]) - x

        def solve(f, z):
            return lax.fori_loop(0, 30, lambda i, z: z - f(z), z)

        def tangent_solve(g, y):
            return lax.fori_loop(0, 30, lambda i, v: v - (g(v) - y), y)

        return lax.custom_root(f, jnp.zeros_like(x), solve, tangent_solve)

    if jax.__version_info__ >= (0, 9):  # before, it has no gradient in float32 either
        same(root)


# --- differentiation of every kind ---


def test_forward_mode_and_a_second_derivative():
    loss, p = squared(block), params()
    t = jax.tree.map(jnp.ones_like, p)
    along = lambda f: jax.jvp(jax.grad(f), (p, X), (t, jnp.zeros_like(X)))
    assert_close(
        jax.jit(lambda: along(ols.autocast(loss)))(),
        jax.jit(lambda: along(loss))(),
        0.01,
    )


@pytest.mark.slow
def test_higher_derivatives_and_forward_mode():
    loss, p = squared(block), params()
    cast = ols.autocast(loss)
    t = jax.tree.map(jnp.ones_like, p)
    assert_close(jax.jvp(lambda p: cast(p, X), (p,), (t,)),
                 jax.jvp(lambda p: loss(p, X), (p,), (t,)), 0.005)  # fmt: skip
    assert_close(jax.linearize(lambda p: cast(p, X), p)[1](t),
                 jax.linearize(lambda p: loss(p, X), p)[1](t), 0.005)  # fmt: skip
    assert_close(jax.jacfwd(cast)(p, X), jax.jacfwd(loss)(p, X), 0.005)
    assert_close(
        jax.jit(jax.hessian(cast))(p, X), jax.jit(jax.hessian(loss))(p, X), 0.01
    )
    product = lambda f: jax.grad(lambda p: jnp.vdot(jax.grad(f)(p, X)["w"], t["w"]))(p)
    assert_close(product(cast), product(loss), 0.01)
    each = lambda f: jax.vmap(jax.grad(f), (None, 0))(p, X[:, None])
    assert_close(each(cast), each(loss), 0.01)


def test_gradients_inside():
    """A penalty of gradients, as of a discriminator."""

    def loss(p, x):
        score = lambda x: jnp.sum(jnp.tanh(x @ p["w"]) @ p["v"])
        return jnp.mean((jnp.linalg.norm(jax.grad(score)(x), axis=-1) - 1) ** 2)

    assert_as_in_float32(loss, params(), X)


def test_gradients_inside_of_loops_with_remat():
    """There JAX holds the forward pass of the loop inside in a call of its own."""

    def twice(f):
        return lambda w, x: lax.scan(lambda c, _: (f(w, c), None), x, length=2)[0]

    def pulled_back(w, x):
        y, pull = jax.vjp(twice(jax.checkpoint(twice(lambda w, x: x @ w))), w, x)
        return jnp.mean(pull(y)[0])

    assert_computes_in(F16, ols.autocast(pulled_back), W, X)
    assert_as_in_float32(pulled_back, W, X)


def test_an_outer_product_and_its_derivative_are_in_float32():
    def fun(p, x):
        h = x @ p["w"]
        pairs = jnp.einsum("nd,en->ned", 300 * h, 300 * x.T)  # more than 65504
        body = jax.checkpoint(lambda h: jnp.outer(h, h[:2]))
        return jnp.log(jnp.mean(pairs**2)) + jnp.mean(jnp.tanh(body(h[0])))

    step = jax.value_and_grad(ols.autocast(fun), (0, 1))
    expected = jax.value_and_grad(fun, (0, 1))(params(), X)
    assert_close(step(params(), X), expected, 0.005)


def test_nested_autocast():
    twice = ols.autocast(ols.autocast(squared(block)))
    once = ols.autocast(squared(block))
    assert_close(jax.grad(twice)(params(), X), jax.grad(once)(params(), X), 0.002)
    inner = ols.autocast(block, jnp.bfloat16)
    outer = ols.autocast(lambda p, x: inner(p, x) @ p["w"])
    assert products(outer, params(), X) == {"bfloat16": 2, "float16": 1}
    assert outer(params(), X).dtype == jnp.float32


# --- devices ---


def mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((4,), ("data",), axis_types=(axis_type,))


@pytest.mark.slow
def test_pmap_and_collectives():
    def loss(p, x):
        x = block(p, x)
        h = x - lax.pmean(x.mean(0), "i")
        return lax.pmean(jnp.mean(lax.psum(h, "i") ** 2), "i")

    x = normal(5, 4, 3, 8)
    spread = jax.tree.map(lambda p: jnp.stack([p] * 4), params())
    run = lambda f: jax.pmap(jax.value_and_grad(f), axis_name="i")(spread, x)
    assert_close(run(ols.autocast(loss)), run(loss), 0.01)
    mapped = lambda f: jax.vmap(jax.value_and_grad(f), (None, 0), axis_name="i")(
        params(), x
    )
    assert_close(mapped(ols.autocast(loss)), mapped(loss), 0.01)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_inside_and_around(check_vma):
    m = mesh()

    def local(p, x):
        return lax.psum(jnp.mean((block(p, x) - 1) ** 2), "data") / 4

    shard = functools.partial(
        jax.shard_map,
        mesh=m,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    assert_as_in_float32(shard(local), params(), X)
    if check_vma:
        around = jax.jit(shard(ols.autocast(local)))
        assert_close(around(params(), X), jax.jit(shard(local))(params(), X), 0.005)


def test_shard_map_of_a_sharded_weight():
    m = mesh()

    def local(p, x):
        h = jax.nn.relu(x @ p["w"])  # by columns
        y = lax.psum(h @ p["v"], "data")  # by rows
        return (
            lax.all_gather(y, "data", tiled=True).mean()
            + lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)]).mean()
        )

    specs = ({"w": P(None, "data"), "v": P("data", None)}, P())
    f = jax.shard_map(local, mesh=m, in_specs=specs, out_specs=P(), check_vma=False)
    exact = jax.jit(jax.value_and_grad(f))(params(), X)
    cast = jax.value_and_grad(ols.autocast(f))
    assert_close(jax.jit(cast)(params(), X), exact, 0.005)
    assert products(cast, params(), X) == {"float16": 5}


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
        p = jax.device_put(params(), NamedSharding(m, P()))
        x = jax.device_put(X, sharding)
        exact, cast = jax.jit(fun)(p, x), jax.jit(ols.autocast(fun))(p, x)
        assert cast.sharding.is_equivalent_to(exact.sharding, cast.ndim)
        assert_close(cast, exact, 0.005)
        grads = jax.jit(jax.grad(ols.autocast(squared(fun))))(p, x)
        assert_close(grads, jax.jit(jax.grad(squared(fun)))(p, x), 0.01)


def test_outer_products_of_what_is_sharded():
    m = mesh(AxisType.Explicit)

    def fun(p, x):
        return jnp.mean(jnp.einsum("nd,e->nde", x @ p["w"], p["v"][0]) ** 2, 0)

    with jax.set_mesh(m):
        p = jax.device_put(params(), NamedSharding(m, P()))
        x = jax.device_put(X, NamedSharding(m, P("data")))
        results = [jax.jit(jax.grad(lambda p, x, f=f: f(p, x).sum()))(p, x)
                   for f in (ols.autocast(fun), fun)]  # fmt: skip
        assert_close(*results, 0.005)


def test_jit_inside_with_shardings():
    m = mesh()
    place = NamedSharding(m, P("data"))
    inner = jax.jit(lambda x: x + 1, in_shardings=place, out_shardings=place)
    fun = lambda p, x: inner(x @ p["w"]) @ p["v"]
    assert_close(
        jax.jit(ols.autocast(fun))(params(), X), jax.jit(fun)(params(), X), 0.005
    )


# --- effects ---


def test_callbacks_are_called_as_often_in_order_and_with_float32():
    from jax.experimental import io_callback

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
        scale = jax.pure_callback(
            lambda x: np.float32(x.max()), jax.ShapeDtypeStruct((), jnp.float32), h
        )
        return h * lax.stop_gradient(scale)

    for jit in (jax.jit, lambda f: f):
        logs = [], []
        exact = jit(functools.partial(fun, logs[0]))(params(), X)
        jax.effects_barrier()
        cast = jit(ols.autocast(functools.partial(fun, logs[1])))(params(), X)
        jax.effects_barrier()
        assert_close(cast, exact, 0.005)
        assert [n for n, _, _ in logs[1]] == [0, 2, 3, 4]
        assert [d for _, d, _ in logs[1]] == [d for _, d, _ in logs[0]]
        np.testing.assert_allclose(
            [s for *_, s in logs[1]], [s for *_, s in logs[0]], rtol=0.05, atol=0.05
        )


def test_debug_print_prints_once(capsys):
    def fun(p, x):
        h = x @ p["w"]
        jax.debug.print("mean {m:.1f}", m=h.mean() * 0 + 1)
        return jnp.sum(h)

    jax.jit(jax.value_and_grad(ols.autocast(fun)))(params(), X)
    jax.effects_barrier()
    assert capsys.readouterr().out == "mean 1.0\n"


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this jax has no refs")
def test_references_that_are_made_inside():
    def fun(p, x):
        total = jax.new_ref(jnp.zeros((4, 8)))

        def step(i, _):
            total[...] += x @ p["w"] * i
            return 0

        lax.fori_loop(0, 3, step, 0)
        total[0] = jnp.exp(total[1])
        return total[...] @ p["v"]

    cast = ols.autocast(fun)
    assert_close(jax.jit(cast)(params(), X), jax.jit(fun)(params(), X), 0.005)


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this jax has no refs")
def test_references_that_are_given():
    def fun(p, x, seen):
        h = x @ p["w"]
        seen[...] += jnp.sum(h**2)
        return h @ p["v"]

    results = []
    for f in (fun, ols.autocast(fun)):
        seen = jax.new_ref(jnp.float32(1))
        out = jax.jit(f)(params(), X, seen)
        results.append((out, seen[...]))
    assert_close(results[1], results[0], 0.005)


# --- this library's own ---


@pytest.mark.slow
def test_a_training_step_is_scale_invariant():
    tx = ols.with_loss_scale(optax.adam(1e-2), ols.DynamicLossScale(initial_scale=64.0))

    def step(params, state, x):
        value_and_grad = ols.value_and_scaled_grad(ols.autocast(squared(block)), state)
        loss, grads = value_and_grad(params, x)
        params, state = tx.apply_gradients(grads, state, params)
        return params, state, loss

    p = params()
    ols.testing.assert_scale_invariant(step, p, tx.init(p), X)
    ols.testing.assert_computes_in(step, F16, p, tx.init(p), X)


def test_reports_name_the_users_lines():
    def my_layer(p, x):
        return x @ p["w"]

    report = ols.dtype_report(jax.grad(ols.autocast(squared(my_layer))), params(), X)
    assert report.products
    assert all("test_holders.py" in p.source for p in report.products), report


def test_errors_name_the_users_lines():
    def fun(p, x):
        return jnp.log(x @ p["w"] - 1e4)

    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.block_until_ready(jax.jit(ols.autocast(fun))(params(), X))

    def wrong(p, x):
        return x @ p["w"][:3]

    with pytest.raises(TypeError, match="contracting"):
        ols.autocast(wrong)(params(), X)


def test_errors_name_the_users_function_and_arguments():
    def decides(p, x):
        return p["w"] if x[0, 0] > 0 else p["v"]

    def of_a_module(x, model):
        return x if model(x)[0, 0] > 0 else x + 1

    error = jax.errors.TracerBoolConversionError
    with pytest.raises(
        error, match=r"function decides at .*test_holders.*argument x\."
    ):
        ols.autocast(decides)(params(), X)
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with pytest.raises(
        error, match=r"function of_a_module at .*arguments x, model.*kernel"
    ):
        ols.autocast(of_a_module)(X, model=model)


def test_with_parameters_cast_beforehand():
    loss = squared(lambda p, x: block(p, x))
    scale = ols.FixedLossScale(1024)
    exact = jax.grad(loss)(params(), X)
    narrow = jax.tree.map(lambda p: p.astype(F16), params())
    grads = ols.value_and_scaled_grad(ols.autocast(loss), scale)(narrow, X)[1]
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(F16)}
    assert_close(scale.unscale(grads), exact, 0.01)
