"""With Flax NNX, Linen and Equinox, whose documented steps `test_documents.py` runs."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the frameworks', not ours
    import equinox as eqx
    from flax import nnx
    from flax.training.train_state import TrainState

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LS = ols.DynamicLossScale(initial_scale=1024)
X = jnp.ones((8, 3))


class Model(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.linear(x))


def skipped_state():
    tx, params = ols.with_loss_scale(optax.sgd(0.1)), jnp.ones(2)
    return tx.update(jnp.full(2, jnp.inf), tx.init(params), params)[1]


@nnx.jit
def nnx_step(model, optimizer, x):
    def loss_fn(model):
        return ols.scale_gradient(jnp.mean((model(x) - 1) ** 2), optimizer.opt_state)

    before = nnx.clone(nnx.state(model, nnx.BatchStat))
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    nnx.update(model, ols.where_applied(optimizer, nnx.state(model, nnx.BatchStat), before))
    return loss


def test_nnx_batch_statistics_move_as_without_loss_scaling_and_survive_an_overflow():
    model, plain = Model(), Model()
    optimizer = nnx.Optimizer(model, ols.with_loss_scale(optax.adam(1e-2)), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (8, 3)) + 1
    nnx_step(model, optimizer, x)
    plain(x)
    chex.assert_trees_all_close(model.norm.mean[...], plain.norm.mean[...], rtol=1e-6)
    before = np.asarray(model.norm.mean[...])
    nnx_step(model, optimizer, x.at[0].set(jnp.inf))
    np.testing.assert_array_equal(model.norm.mean[...], before)
    assert optimizer.opt_state.skipped_steps[...] == 1


def test_variables_that_changed_in_place_are_no_old_ones():
    model = Model()
    before = nnx.state(model, nnx.BatchStat)
    model(jnp.ones((8, 3)))
    with pytest.raises(ValueError, match=r"before the step: old = nnx.clone"):
        ols.where_applied(skipped_state(), nnx.state(model, nnx.BatchStat), before)


def test_an_nnx_optimizer_is_read_as_it_is_and_gives_plain_arrays():
    model = Model()
    optimizer = nnx.Optimizer(model, ols.with_loss_scale(optax.adam(1e-2)), wrt=nnx.Param)
    for holder in (optimizer, optimizer.opt_state):
        loss_scale = ols.get_loss_scale(holder)
        assert type(loss_scale) is ols.DynamicLossScale
        read = [*jax.tree.leaves(loss_scale), *ols.metrics(holder).values()]
        assert all(isinstance(x, jax.Array) for x in [*read, loss_scale.loss_scale, loss_scale()])
        ols.check(holder)
        assert ols.scale_loss(2.0, holder) == 2.0**16
    for _ in range(2):
        nnx_step(model, optimizer, jnp.full((8, 3), jnp.nan))
    assert ols.metrics(optimizer)["skipped_steps"] == 2
    with pytest.raises(ols.LossScaleError, match="in a row: 2"):
        ols.check(optimizer, max_consecutive_skips=1)


def test_a_train_state_is_read_as_it_is():
    params = {"w": jnp.ones(2)}
    tx = ols.with_loss_scale(optax.sgd(0.1))
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    assert ols.metrics(state)["loss_scale"] == 2.0**15
    ols.check(state)
    state = state.apply_gradients(grads={"w": jnp.full(2, jnp.inf)})
    assert ols.where_applied(state, 1.0, 2.0) == 2.0


def test_equinox_batch_statistics():
    _, old = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    new = jax.tree.map(lambda x: x + 1, old)
    kept = ols.where_applied(skipped_state(), new, old)
    chex.assert_trees_all_equal(jax.tree.leaves(kept), jax.tree.leaves(old))


@pytest.mark.parametrize("differentiate", [ols.value_and_grad, ols.grad])
def test_an_nnx_module_given_to_value_and_grad_is_sent_here(differentiate):
    with pytest.raises(TypeError, match=r"Model is an nnx.Module.*scale_gradient"):
        differentiate(lambda model: jnp.mean(model(X)), LS)(Model())
    with pytest.raises(TypeError, match="scale_gradient"):
        differentiate(lambda x, tree: tree["model"](X).mean(), LS, argnums=(0, -1))(
            X, {"model": Model()}
        )
    # Its state alone is a tree of arrays, and a module that is not differentiated is no matter.
    model = Model()
    model.eval()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    differentiate(lambda params: nnx.merge(graph, params, rest)(X).mean(), LS)(params)
    differentiate(lambda x, model: model(x).mean(), LS)(X, model)


def test_an_equinox_module_with_leaves_that_are_no_arrays_is_sent_here():
    model = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"no array.*eqx.filter_value_and_grad.*scale_gradient"):
        ols.value_and_grad(lambda model: model(X[0]), LS)(model)
    linear = eqx.nn.Linear(3, "scalar", key=jax.random.key(0))
    ols.value_and_grad(lambda model: model(X[0]), LS)(linear)


class Tied(nnx.Module):
    """A model that uses one parameter in two places, and draws random numbers."""

    def __init__(self):
        self.first = nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
        self.second.kernel = self.first.kernel
        self.dropout = nnx.Dropout(0.2, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.second(self.dropout(nnx.tanh(self.first(x))))


@pytest.mark.parametrize("mistake", [None, "forgotten", "older state"])
def test_a_mistake_in_a_step_that_changes_nnx_modules_in_place_is_found(mistake):
    model = Tied()
    optimizer = nnx.Optimizer(model, ols.with_loss_scale(optax.adam(1e-2)), wrt=nnx.Param)
    older = ols.get_loss_scale(optimizer)

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            loss = jnp.mean((model(x) - 1) ** 2)
            if mistake == "forgotten":
                return loss
            return ols.scale_gradient(loss, older if mistake else optimizer)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    x = jax.random.normal(jax.random.key(0), (8, 3))
    if mistake:
        with pytest.raises(
            AssertionError, match=r"2\*\*-1: args\[1\].opt_state.inner_state\[0\].mu"
        ):
            ols.testing.assert_scale_invariant(step, model, optimizer, x)
    else:
        ols.testing.assert_scale_invariant(step, model, optimizer, x)
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(model, nnx.Param)), before)
    assert optimizer.step[...] == 0


def test_diagnose_takes_modules():
    """Whose gradients `value_and_grad` refuses."""
    module = nnx.Linear(3, 8, dtype=jnp.float16, rngs=nnx.Rngs(0))
    loss_fn = lambda module, x: jnp.mean(module(x).astype(jnp.float32) ** 2) * 2.0**-18
    diagnosis = ols.diagnose(loss_fn, module, X)
    assert diagnosis.initial_scale == ols.find_initial_scale(loss_fn, module, X)
    assert any("kernel" in name for name in diagnosis.underflow)
