"""A mistake a line, and the one error that an editor shows there.

A type checker that no longer shows it finds the comment unnecessary, which is an error.
"""

import jax.numpy as jnp
import optax

import optax_lossscale as ols


def mistakes() -> None:
    inner = optax.adamw(1e-3)
    params = {"w": jnp.ones(3)}
    ls = ols.DynamicLossScale(2.0**15, 500)
    tx = ols.with_loss_scale(inner, ls)
    state = tx.init(params)

    ols.with_loss_scale(inner, "dynamc")  # pyright: ignore[reportArgumentType]
    ols.with_loss_scale(inner, loss_scael=128)  # pyright: ignore[reportCallIssue]
    ols.with_loss_scale(inner, branch="switch")  # pyright: ignore[reportArgumentType]
    ols.with_loss_scale(inner, mask="w")  # pyright: ignore[reportArgumentType]
    ols.with_loss_scale(inner, mask={"w": 1})  # pyright: ignore[reportArgumentType]
    ols.with_loss_scale(optax.adamw)  # pyright: ignore[reportArgumentType]
    ols.autocast(jnp.sum, argnums=0)  # pyright: ignore[reportCallIssue]
    ols.DynamicLossscale()  # pyright: ignore[reportAttributeAccessIssue]
    ols.value_and_scaled_grad(jnp.sum)  # pyright: ignore[reportCallIssue]

    tx.apply_gradients(params, state)  # pyright: ignore[reportCallIssue]
    tx.apply_gradients(params, params, state)  # pyright: ignore[reportArgumentType]
    tx.update(params, params)  # pyright: ignore[reportArgumentType]
    tx.apply_gradient(params, state, params)  # pyright: ignore[reportAttributeAccessIssue]
    print(state.should_aply)  # pyright: ignore[reportAttributeAccessIssue]
    print(state.loss_scale.scael(1.0))  # pyright: ignore[reportAttributeAccessIssue]

    ols.DynamicLossScale("500")  # pyright: ignore[reportArgumentType]
    ols.DynamicLossScale(growth_interval=0.5)  # pyright: ignore[reportArgumentType]
    ols.DynamicLossScale(growth_intervall=500)  # pyright: ignore[reportCallIssue]
    ols.FixedLossScale()  # pyright: ignore[reportCallIssue]
    ls.growth_interval = 500  # pyright: ignore[reportAttributeAccessIssue]
    ls.adjust()  # pyright: ignore[reportCallIssue]
