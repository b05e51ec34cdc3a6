"""autocast of functions of Flax NNX objects, which change in place as they do in float32."""

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
from pairs import one_in

import optax_lossscale as ols

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the framework's, not ours
    from flax import nnx
    from flax.errors import TraceContextError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

F16 = jnp.float16
X = normal(0, 4, 8)


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


def loss_of(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def numbers(tree):
    """What is in a tree of modules and variables, under its names."""
    is_key = lambda x: (
        isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    )
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    leaves = [(p, jax.random.key_data(x) if is_key(x) else x) for p, x in leaves]
    return {jax.tree_util.keystr(path): x for path, x in leaves}


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_statistics_streams_and_counters_change_with_the_loss_scale_in_or_outside(
    inside,
):
    def step(cast, model, x):
        scaled = lambda f: lambda m, x: ols.scale_gradient(f(m, x), 1024.0)
        loss_fn = cast(scaled(loss_of)) if inside else scaled(cast(loss_of))
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        return loss, nnx.to_pure_dict(grads)

    results = []
    for cast in (lambda f: f, ols.autocast):
        model = Model()
        run = nnx.jit(functools.partial(step, cast))
        results.append(([run(model, X * n) for n in (1.0, 2.0)], numbers(model)))
    assert_close(results[1], results[0], 0.01)
    assert model.calls[...] == 2
    assert_computes_in(F16, functools.partial(step, ols.autocast), Model(), X)


# Each changes what it is given, and some return objects.


def moving_average(given, x):
    """Of the loss, beside the model."""
    loss = loss_of(given["model"], x)
    given["average"][...] = 0.9 * given["average"][...] + 0.1 * loss
    return loss


def a_part_beside_the_whole(model, mean, x):
    loss = loss_of(model, x) + jnp.sum(mean[...])
    mean[...] *= 2
    return loss, model.norm.mean[...]


def modules_as_results(actor, critic, x):
    made = nnx.Linear(8, 8, rngs=nnx.Rngs(3))
    made.kernel[...] = 2 * actor.first.kernel[...]
    loss = critic(actor(made(x))).mean()
    return loss, {"all": (actor, critic), "part": actor.norm.mean, "made": [made, made]}


def other_variables_after(model, x):
    """What was sown is taken out again, and one replaces another."""
    model.sow(nnx.Intermediate, "seen", model.first(x))
    found = nnx.pop(model, nnx.Intermediate)
    model.calls = nnx.Variable(jnp.sum(x, 0))
    model.more = nnx.Param(x @ model.first.kernel[...])
    return loss_of(model, x), found, nnx.state(model, nnx.BatchStat)


def trees_in_variables(tree, streams, x):
    old = tree.value
    tree.value = {"sum": old["sum"] + x[0], "calls": old["calls"] + 1}
    return jax.random.normal(streams.noise(), (3,)) * old["sum"][0]


def optimizer(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
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
    a_part_beside_the_whole: model_and_its_mean,
    modules_as_results: lambda: (Model(0), Model(1)),
    other_variables_after: lambda: (Model(),),
    trees_in_variables: lambda: (
        nnx.Variable({"sum": jnp.zeros(8), "calls": 0}),
        nnx.Rngs(0, noise=1),
    ),
    optimizer: model_and_its_optimizer,
}


def the_same_objects(tree):
    """Where each module and variable of a tree is, if it is there more than once."""
    places = {}
    is_object = lambda x: isinstance(x, (nnx.Variable, nnx.Pytree))
    for path, top in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_object):
        for inner, x in nnx.iter_graph(top) if is_object(top) else ():
            if is_object(x):
                place = jax.tree_util.keystr(path), inner
                places.setdefault(id(x), []).append(place)
    return sorted(str(found) for found in places.values() if len(found) > 1)


@one_in(2, "fun", {fun.__name__: fun for fun in CHANGES})
def test_objects_change_and_come_back_as_without_autocast(fun):
    """Wherever they are in arguments and results, twice in a row."""
    results = []
    for cast in (fun, ols.autocast(fun)):
        args, found = CHANGES[fun](), []
        for _ in range(2):
            out = nnx.jit(cast)(*args, X)
            found.append((numbers(out), numbers(args), the_same_objects((args, out))))
        results.append(found)
    for cast, exact in zip(*reversed(results), strict=True):
        assert_close(cast[:2], exact[:2], 0.01)
        assert cast[2] == exact[2]


class Target(nnx.Module):
    def __init__(self, seed):
        self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(seed))

    def __call__(self, x):
        return nnx.tanh(self.first(x))


def test_a_module_from_outside_of_a_transformation_may_be_read():
    """As a target network; it may not change there, and need not."""
    distance = lambda model, target, x: jnp.mean((model(x) - target(x)) ** 2)
    first = lambda model, x: jnp.sum(model.first(x))

    def results(cast):
        model, target = Target(0), Target(1)
        loss, grads = nnx.value_and_grad(lambda m: cast(distance)(m, target, X))(model)
        each = jax.vmap(lambda x: cast(first)(target, x))(X)
        graph, params, rest = nnx.split(Model(), nnx.Param, ...)
        of_params = lambda params: cast(first)(nnx.merge(graph, params, rest), X)
        merged = jax.jit(jax.grad(of_params))(params)
        return loss, *map(nnx.to_pure_dict, (grads, merged)), each, numbers(target)

    assert_close(results(ols.autocast), results(lambda f: f), 0.01)


@pytest.mark.parametrize("how", ["model", "method", "closed over", "from around"])
def test_modules_that_change_and_are_no_arguments_are_refused(how):
    model = Model()
    cast = {
        "model": lambda: ols.autocast(model)(X),
        "method": lambda: ols.autocast(model.__call__)(X),
        "closed over": lambda: ols.autocast(lambda x: model(x))(X),
        "from around": lambda: jax.jit(lambda x: ols.autocast(loss_of)(model, x))(X),
    }[how]
    with pytest.raises(TraceContextError) as refused:
        cast()
    assert how == "from around" or "docs/frameworks.md" in refused.value.__notes__[-1]
    assert np.isfinite(model(X)).all()  # it is what it was


def test_a_module_that_is_called_and_does_not_change_is_a_function():
    """As at evaluation: its parameters are no arguments."""
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu)
    cast = ols.autocast(lambda x: model(x))
    assert_close(cast(X), model(X), 0.005)
    assert products(cast, X) == {"float16": 1}


@pytest.mark.skipif(
    not hasattr(nnx.Variable, "ref"), reason="this Flax has other references"
)
def test_what_is_written_to_a_reference_in_a_variable_is_kept():
    def counter(seen, x):
        seen[...] += x.mean(0)

    total = nnx.Variable(jnp.zeros(8), ref=True)
    for run in (lambda f: f, nnx.jit):
        run(ols.autocast(counter))(total, X)
    np.testing.assert_allclose(total[...], 2 * X.mean(0), rtol=1e-6)


def test_a_step_keeps_no_old_parameter_alive():
    model, freed = Model(), []
    for _ in range(3):
        nnx.grad(ols.autocast(loss_of))(model, X)
        param = jax.tree.leaves(nnx.state(model, nnx.Param))[0]
        weakref.finalize(param, freed.append, 1)
        del param
        nnx.update(model, jax.tree.map(lambda x: x + 1, nnx.state(model, nnx.Param)))
    gc.collect()
    assert len(freed) >= 3


def test_a_step_leaks_no_tracer():
    with jax.checking_leaks():
        step = nnx.jit(nnx.value_and_grad(ols.autocast(loss_of)))
        assert np.isfinite(step(Model(), X)[0])


def test_layers_that_nnx_itself_maps_and_scans():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
        return nnx.Linear(8, 8, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def forward(x, layer):
        return nnx.tanh(layer(x))

    graph, state = nnx.split(stack(nnx.Rngs(0)))
    loss = lambda state, x: jnp.mean((forward(x, nnx.merge(graph, state)) - 1) ** 2)
    assert_as_in_float32(loss, state, X)


def test_errors_name_the_users_function_and_the_variables():
    def decides(x, model):
        return x if model(x)[0, 0] > 0 else x + 1

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    said = r"function decides at .*arguments x, model.*kernel"
    with pytest.raises(jax.errors.TracerBoolConversionError, match=said):
        ols.autocast(decides)(X, model=model)
