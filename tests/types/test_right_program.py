"""A user's program: an editor finds no error in it, and it runs."""

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols


def test_a_right_program_runs():
    params = {"w": jnp.full((3, 2), 0.1)}
    x = jnp.ones((4, 3))

    def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tx: ols.LossScaledTransformation = ols.with_loss_scale(
        inner, ols.DynamicLossScale(2.0**15, 500)
    )

    @jax.jit
    def train_step(
        params: dict[str, jax.Array], state: ols.LossScaleState, x: jax.Array
    ):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x)
        params, state = tx.apply_gradients(grads, state, params)
        return params, state, loss

    state: ols.LossScaleState = tx.init(params)
    params, state, loss = train_step(params, state, x)
    assert bool(state.should_apply)
    assert float(loss) < 1 < float(state.loss_scale())
    loss, params, state = tx.minimize(loss_fn, state, params, x)
    for mask in (
        None,
        True,
        {"w": True},
        lambda grads: {"w": True},
        jax.tree.map(lambda _: True, params),
    ):
        masked = ols.with_loss_scale(inner, mask=mask)
        masked.update(params, masked.init(params), params)
    updates, state = tx.update(
        ols.value_and_scaled_grad(loss_fn, state)(params, x)[1],
        state,
        params,
        value=loss,
    )
    params = optax.apply_updates(params, updates)
    ols.raise_if_stuck(state)
    ols.plot.loss_scale([ols.metrics(state)], color="red").set_title("The loss scale")
    assert ols.metrics(state)["skipped_steps"] == state.skipped_steps == 0

    cast = ols.autocast(dtype=jnp.bfloat16)(loss_fn)
    assert jax.jit(cast)(params, x) < 1

    config = ols.DynamicLossScale(2.0**16, growth_interval=500).get_config()
    for loss_scale in ("dynamic", 128, 0.5, None, tx.init(params).loss_scale, config):
        chain = optax.chain(
            ols.with_loss_scale(optax.sgd(0.1), loss_scale), optax.scale(0.5)
        )
        assert float(ols.get_loss_scale(chain.init(params))()) > 0
    half = ols.with_loss_scale(
        ols.with_master_weights(inner), "dynamic", branch="select"
    )
    assert bool(half.init(params).should_apply)
    accumulating = ols.with_loss_scale(optax.MultiSteps(optax.adam(1e-3), 4))
    scaled = ols.get_loss_scale(accumulating.init(params)).scale(loss)
    assert float(scaled / loss) == ols.LossScale.from_config(config).initial_scale / 2

    class Creeping(ols.LossScale):
        rate: float = 1.01
        overflows: jax.Array = ols.state_field(0)

        def adjust(self, grads_finite: jax.typing.ArrayLike):
            factor = jnp.where(grads_finite, self.rate, 0.5)
            return self.replace(
                loss_scale=self() * factor, overflows=self.overflows + 1
            )

    creeping, should_apply = Creeping(initial_scale=1000.0, rate=1.1).update(params)
    assert bool(should_apply)
    assert int(creeping.overflows) == 1
