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
X = jax.random.normal(jax.random.key(0), (8, 3)) + 1
OVERFLOW = X.at[0].set(jnp.inf)


class Model(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.linear(x))


def adam_of(model, wrt=nnx.Param):
    return nnx.Optimizer(model, ols.with_loss_scale(optax.adam(1e-2)), wrt=wrt)


def statistics(model):
    return nnx.clone(nnx.state(model, nnx.BatchStat))


def skipped_state():
    tx, params = ols.with_loss_scale(optax.sgd(0.1)), jnp.ones(2)
    return tx.update(jnp.full(2, jnp.inf), tx.init(params), params)[1]


@nnx.jit
def nnx_step(model, optimizer, x):
    def loss_fn(model):
        return ols.scale_gradient(jnp.mean((model(x) - 1) ** 2), optimizer)

    before = statistics(model)
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads, value=loss)
    nnx.update(model, ols.where_applied(optimizer, statistics(model), before))
    return loss


def test_nnx_batch_statistics_move_as_without_loss_scaling_and_survive_an_overflow():
    model, plain = Model(), Model()
    optimizer = adam_of(model)
    nnx_step(model, optimizer, X)
    plain(X)
    chex.assert_trees_all_close(model.norm.mean[...], plain.norm.mean[...], rtol=1e-6)
    before = np.asarray(model.norm.mean[...])
    nnx_step(model, optimizer, OVERFLOW)
    np.testing.assert_array_equal(model.norm.mean[...], before)
    assert optimizer.opt_state.skipped_steps[...] == 1


def test_variables_that_changed_in_place_are_no_old_ones():
    model = Model()
    before = nnx.state(model, nnx.BatchStat)
    model(X)
    with pytest.raises(ValueError, match=r"before the step: old = nnx.clone"):
        ols.where_applied(skipped_state(), nnx.state(model, nnx.BatchStat), before)


def test_an_nnx_state_comes_back_as_one_with_variables_of_its_own():
    """As a carry of `lax.scan` needs it, and whoever merges it into a model."""
    model = Model()
    old = statistics(model)
    model(X)
    kept = jax.jit(ols.where_applied)(skipped_state(), statistics(model), old)
    assert jax.tree.structure(kept) == jax.tree.structure(old)
    variables = jax.tree.leaves(kept, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert {*map(type, variables)} == {nnx.BatchStat}
    nnx.update(model, kept)
    expected = nnx.to_pure_dict(old)
    chex.assert_trees_all_equal(nnx.to_pure_dict(statistics(model)), expected)


def test_an_nnx_optimizer_is_read_as_it_is_and_gives_plain_arrays():
    model = Model()
    optimizer = adam_of(model)
    for holder in (optimizer, optimizer.opt_state):
        metrics = ols.metrics(holder)
        assert all(isinstance(x, jax.Array) for x in metrics.values())
        ols.raise_if_stuck(holder)
        assert ols.value_and_scaled_grad(lambda x: 2 * x, holder)(1.0)[1] == 2.0**16
    for _ in range(2):
        nnx_step(model, optimizer, OVERFLOW)
    assert ols.metrics(optimizer)["skipped_steps"] == 2
    with pytest.raises(ols.LossScaleError, match="in a row: 2"):
        ols.raise_if_stuck(optimizer, max_consecutive_skips=1)


def test_an_nnx_module_given_to_value_and_scaled_grad_is_sent_to_scale_gradient():
    differentiate = ols.value_and_scaled_grad
    with pytest.raises(TypeError, match=r"Model is an nnx.Module.*scale_gradient"):
        differentiate(lambda model: jnp.mean(model(X)), LS)(Model())
    loss_fn = lambda x, tree: tree["model"](x).mean()
    with pytest.raises(TypeError, match="scale_gradient"):
        differentiate(loss_fn, LS, argnums=(0, -1))(X, {"model": Model()})
    # Its state is a tree of arrays, and only what is differentiated matters.
    model = Model()
    model.eval()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    differentiate(lambda params: nnx.merge(graph, params, rest)(X).mean(), LS)(params)
    differentiate(lambda x, model: model(x).mean(), LS)(X, model)


def test_a_model_may_share_the_optimizers_loss_scale():
    """For a trainer that calls `loss_fn(model, …)` alone, and updates by itself."""
    model = nnx.Linear(3, 2, dtype=jnp.float16, rngs=nnx.Rngs(0))
    model.loss_scale = nnx.data(
        jax.tree.map(lambda x: nnx.Variable(jnp.asarray(x)), ols.DynamicLossScale())
    )
    optimizer = adam_of(model)
    with pytest.raises(ValueError, match="found 2"):
        ols.get_loss_scale((model, optimizer))
    model.loss_scale = nnx.data(optimizer.opt_state.loss_scale)
    assert ols.get_loss_scale((model, optimizer))() == 2.0**15

    def loss_fn(model, x):
        loss = 1e-6 * jnp.mean((model(x) - 1).astype(jnp.float32) ** 2)
        return ols.scale_gradient(loss, model.loss_scale)

    @nnx.jit(donate_argnames="optimizer")
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return loss

    before = np.asarray(model.kernel[...])
    assert step(model, optimizer, X) < 1e-4
    assert (model.kernel[...] != before).any()
    step(model, optimizer, 1e6 * X)
    assert not ols.metrics(optimizer)["should_apply"]
    assert model.loss_scale.loss_scale[...] == 2.0**14


def test_a_lora_trains_its_adapters_alone():
    model = nnx.LoRALinear(3, 2, lora_rank=2, rngs=nnx.Rngs(0))
    optimizer = adam_of(model, wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            return ols.scale_gradient(jnp.mean((model(x) - 1) ** 2), optimizer)

        adapters = nnx.DiffState(0, nnx.LoRAParam)
        differentiate = nnx.value_and_grad(ols.autocast(loss_fn), argnums=adapters)
        loss, scaled_grads = differentiate(model)
        optimizer.update(model, scaled_grads, value=loss)
        return loss

    kernel = model.kernel[...]
    losses = [step(model, optimizer, X) for _ in range(20)]
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(model.kernel[...], kernel)


def test_a_train_state_is_read_as_it_is():
    params = {"w": jnp.ones(2)}
    tx = ols.with_loss_scale(optax.sgd(0.1))
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    assert ols.metrics(state)["loss_scale"] == 2.0**15
    ols.raise_if_stuck(state)
    state = state.apply_gradients(grads={"w": jnp.full(2, jnp.inf)})
    assert ols.where_applied(state, 1.0, 2.0) == 2.0


def test_equinox_batch_statistics():
    _, old = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    new = jax.tree.map(lambda x: x + 1, old)
    kept = ols.where_applied(skipped_state(), new, old)
    chex.assert_trees_all_equal(jax.tree.leaves(kept), jax.tree.leaves(old))


def test_an_equinox_module_with_leaves_that_are_no_arrays_is_filtered_first():
    model = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0))
    tx = ols.with_loss_scale(optax.sgd(0.1))
    said = r"leaf at activation is <.*eqx.filter_value_and_grad.*scale_gradient"
    with pytest.raises(TypeError, match=said):
        ols.value_and_scaled_grad(lambda model: model(X[0]), LS)(model)
    said = r"call tx\.init\(eqx\.filter\(model, eqx\.is_inexact_array\)\)$"
    with pytest.raises(TypeError, match=said):
        tx.init(model)
    params = eqx.filter(model, eqx.is_inexact_array)
    state = tx.init(params)
    scaled_loss = lambda model: ols.scale_gradient(model(X[0]), state)
    _, grads = eqx.filter_value_and_grad(scaled_loss)(model)
    _, state = tx.apply_gradients(grads, state, params)
    assert state.should_apply
