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
    import orbax.checkpoint as ocp
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
    nnx.update(
        model, ols.where_applied(optimizer, nnx.state(model, nnx.BatchStat), before)
    )
    return loss


def test_nnx_batch_statistics_move_as_without_loss_scaling_and_survive_an_overflow():
    model, plain = Model(), Model()
    optimizer = nnx.Optimizer(
        model, ols.with_loss_scale(optax.adam(1e-2)), wrt=nnx.Param
    )
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
    optimizer = nnx.Optimizer(
        model, ols.with_loss_scale(optax.adam(1e-2)), wrt=nnx.Param
    )
    for holder in (optimizer, optimizer.opt_state):
        loss_scale = ols.get_loss_scale(holder)
        assert type(loss_scale) is ols.DynamicLossScale
        read = [*jax.tree.leaves(loss_scale), *ols.metrics(holder).values()]
        assert all(
            isinstance(x, jax.Array)
            for x in [*read, loss_scale.loss_scale, loss_scale()]
        )
        ols.raise_if_stuck(holder)
        assert ols.value_and_scaled_grad(lambda x: 2 * x, holder)(1.0)[1] == 2.0**16
    for _ in range(2):
        nnx_step(model, optimizer, jnp.full((8, 3), jnp.nan))
    assert ols.metrics(optimizer)["skipped_steps"] == 2
    with pytest.raises(ols.LossScaleError, match="in a row: 2"):
        ols.raise_if_stuck(optimizer, max_consecutive_skips=1)


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


def test_an_nnx_module_given_to_value_and_scaled_grad_is_sent_here():
    differentiate = ols.value_and_scaled_grad
    with pytest.raises(TypeError, match=r"Model is an nnx.Module.*scale_gradient"):
        differentiate(lambda model: jnp.mean(model(X)), LS)(Model())
    with pytest.raises(TypeError, match="scale_gradient"):
        differentiate(lambda x, tree: tree["model"](X).mean(), LS, argnums=(0, -1))(
            X, {"model": Model()}
        )
    # Its state alone is a tree of arrays, and a module that is not differentiated is no
    # matter.
    model = Model()
    model.eval()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    differentiate(lambda params: nnx.merge(graph, params, rest)(X).mean(), LS)(params)
    differentiate(lambda x, model: model(x).mean(), LS)(X, model)


def test_an_equinox_module_with_leaves_that_are_no_arrays_is_sent_here():
    model = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0))
    said = r"leaf at activation is <.*eqx.filter_value_and_grad.*scale_gradient"
    with pytest.raises(TypeError, match=said):
        ols.value_and_scaled_grad(lambda model: model(X[0]), LS)(model)
    linear = eqx.nn.Linear(3, "scalar", key=jax.random.key(0))
    ols.value_and_scaled_grad(lambda model: model(X[0]), LS)(linear)


def test_init_says_how_to_filter_an_equinox_module():
    model = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0))
    tx = ols.with_loss_scale(optax.sgd(0.1))
    with pytest.raises(TypeError, match="params must be a tree of arrays") as error:
        tx.init(model)
    remedy = "call tx.init(eqx.filter(model, eqx.is_inexact_array))"
    assert str(error.value).endswith(remedy)
    assert "differentiate" not in str(error.value)
    params = eqx.filter(model, eqx.is_inexact_array)
    state = tx.init(params)
    differentiate = eqx.filter_value_and_grad(
        lambda model: ols.scale_gradient(model(X[0]), state)
    )
    _, grads = differentiate(model)
    _, state = tx.apply_gradients(grads, state, params)
    assert state.should_apply


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
    optimizer = nnx.Optimizer(
        model, ols.with_loss_scale(optax.adam(1e-2)), wrt=nnx.Param
    )
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
            AssertionError, match=r"args\[1\].opt_state.inner_state\[0\].mu"
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
    assert diagnosis.initial_scale > 2**15
    assert diagnosis.gradients["kernel"].size > 0


def stats_of(model):
    return nnx.clone(nnx.state(model, nnx.BatchStat))


@pytest.mark.parametrize("gradient", [1.0, jnp.inf])
def test_an_nnx_state_comes_back_as_one_with_variables_of_its_own(gradient):
    """As a carry of `lax.scan` needs it, and whoever merges it into a model."""
    model = Model()
    graph, rest = nnx.split(model, ...)
    old = stats_of(model)
    model(X)
    new = stats_of(model)
    tx = ols.with_loss_scale(optax.sgd(0.1))

    def step(carry, gradient):
        state, old = carry
        _, state = tx.update(gradient, state)
        kept = ols.where_applied(state, new, old)
        return (state, kept), None

    (_, kept), _ = jax.lax.scan(
        step, (tx.init(jnp.ones(())), old), jnp.array([gradient])
    )
    assert jax.tree.structure(kept) == jax.tree.structure(old)
    assert isinstance(kept, nnx.State)
    variables = jax.tree.leaves(kept, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert all(type(x) is nnx.BatchStat for x in variables)
    expected = new if gradient == 1.0 else old
    chex.assert_trees_all_equal(nnx.to_pure_dict(kept), nnx.to_pure_dict(expected))
    nnx.update(model, kept)
    np.testing.assert_array_equal(
        nnx.merge(graph, nnx.merge_state(rest, kept)).norm.mean[...],
        model.norm.mean[...],
    )


class Trainer:
    """In the shape of Tunix's `PeftTrainer`, which differentiates and restores by itself."""

    def __init__(self, model, tx, loss_fn, directory):
        self.model, self.loss_fn, self.directory = model, loss_fn, directory
        self.optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        self.checkpointer = ocp.PyTreeCheckpointer()
        if directory.exists():
            for part, path in self.parts():
                target = nnx.state(part)
                args = ocp.checkpoint_utils.construct_restore_args(target)
                nnx.update(
                    part, self.checkpointer.restore(path, target, restore_args=args)
                )
        self.train_step = nnx.jit(self._train_step, donate_argnames="optimizer")

    def parts(self):
        return (
            (self.model, self.directory / "model"),
            (self.optimizer, self.directory / "optimizer"),
        )

    def save(self):
        for part, path in self.parts():
            self.checkpointer.save(path, nnx.state(part))

    def _train_step(self, model, optimizer, inputs):
        grad_fn = nnx.value_and_grad(self.loss_fn, has_aux=True)
        (loss, aux), grads = grad_fn(model, **inputs)
        grad_norm = optax.global_norm(grads)
        optimizer.update(model, grads)
        return loss, aux, grad_norm


def trainer_loss_fn(model, x, y):
    prediction = model(x)
    loss = 1e-6 * jnp.mean((prediction - y).astype(jnp.float32) ** 2)
    return ols.scale_gradient(loss, model.loss_scale), prediction


def trainer_of(directory, seed=0, shared=True):
    """As docs/integrations.md has it."""
    model = nnx.Linear(3, 2, dtype=jnp.float16, rngs=nnx.Rngs(seed))
    loss_scale = ols.DynamicLossScale(growth_interval=2)
    model.loss_scale = nnx.data(
        jax.tree.map(lambda x: nnx.Variable(jnp.asarray(x)), loss_scale)
    )
    tx = ols.with_loss_scale(optax.adam(1e-2), loss_scale)
    trainer = Trainer(model, tx, trainer_loss_fn, directory)
    if shared:
        model.loss_scale = nnx.data(trainer.optimizer.opt_state.loss_scale)
    return trainer


INPUTS = {"x": jnp.ones((4, 3)), "y": jnp.ones((4, 2))}


def trained(trainer, steps, inputs=INPUTS):
    for _ in range(steps):
        loss, _, scaled_norm = trainer.train_step(
            trainer.model, trainer.optimizer, inputs
        )
    return loss, scaled_norm


def test_a_model_that_shares_the_optimizers_loss_scale_trains_through_overflow_and_checkpoint(
    tmp_path,
):
    trainer = trainer_of(tmp_path / "checkpoint")
    trained(trainer, 4)
    assert trainer.model.loss_scale.loss_scale[...] == 2.0**17
    trained(trainer, 1, INPUTS | {"x": jnp.full((4, 3), 1e6)})
    assert not ols.metrics(trainer.optimizer)["should_apply"]
    assert trainer.model.loss_scale.loss_scale[...] == 2.0**16
    trainer.save()

    resumed = trainer_of(tmp_path / "checkpoint", seed=1)
    assert (
        ols.get_loss_scale(resumed.model)()
        == ols.get_loss_scale(resumed.optimizer)()
        == 2.0**16
    )
    for one in (trainer, resumed):
        loss, scaled_norm = trained(one, 3)
        assert one.model.loss_scale.loss_scale[...] == 2.0**17
        assert 0 < loss < 1e-4 < scaled_norm
    np.testing.assert_array_equal(resumed.model.kernel[...], trainer.model.kernel[...])


def test_a_loss_scale_that_two_modules_share_is_one(tmp_path):
    trainer = trainer_of(tmp_path / "none")
    both = (trainer.model, trainer.optimizer)
    assert ols.get_loss_scale(both)() == 2.0**15
    assert ols.metrics(both)["loss_scale"] == 2.0**15
    apart = trainer_of(tmp_path / "none", shared=False)
    with pytest.raises(ValueError, match="found 2"):
        ols.get_loss_scale((apart.model, apart.optimizer))


def test_a_lora_trains_its_adapters_alone():
    model = nnx.LoRALinear(3, 2, lora_rank=2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, ols.with_loss_scale(optax.adam(1e-2), LS), wrt=nnx.LoRAParam
    )

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            return ols.scale_gradient(jnp.mean((model(x) - 1) ** 2), optimizer)

        adapters = nnx.DiffState(0, nnx.LoRAParam)
        loss, scaled_grads = nnx.value_and_grad(
            ols.autocast(loss_fn), argnums=adapters
        )(model)
        optimizer.update(model, scaled_grads, value=loss)
        return loss

    kernel = model.kernel[...]
    losses = [step(model, optimizer, X) for _ in range(20)]
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(model.kernel[...], kernel)
