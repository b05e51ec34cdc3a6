"""The ways to take an optimizer step: none, this library's, and the peers'.

Each is a pair of functions, `init(params)` and `step(params, state, scaled_grads)`, the second
of which returns `(params, state)`: what a training step carries, in the order it donates it.
Each peer is used as its own documentation shows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale

import optax_lossscale as ols

SCALE = 2.0**15
PLAIN = "no loss scaling"
DYNAMIC = "apply_gradients, dynamic"


class Way(NamedTuple):
    """A way to take a step."""

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def plain(inner: optax.GradientTransformation) -> Way:
    """The optimizer alone."""

    def step(params, state, grads):
        updates, state = inner.update(_float32(grads), state, params)
        return optax.apply_updates(params, updates), state

    return Way(inner.init, step)


def apply_gradients(inner: optax.GradientTransformation, loss_scale: Any) -> Way:
    """This library's short way."""
    tx = ols.with_loss_scale(inner, loss_scale)
    return Way(tx.init, lambda params, state, grads: tx.apply_gradients(grads, state, params))


def update(inner: optax.GradientTransformation, loss_scale: Any) -> Way:
    """This library as any other Optax transformation."""
    tx = ols.with_loss_scale(inner, loss_scale)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Way(tx.init, step)


def flax(inner: optax.GradientTransformation) -> Way:
    """Flax's `DynamicScale`, with the selects of its examples.

    It scales and differentiates by itself, so it is given a loss whose gradients are these.
    """

    def step(params, state, grads):
        scale, opt_state = state
        inner_product = lambda params: optax.tree.vdot(params, _float32(grads))
        scale, is_finite, _, unscaled = scale.value_and_grad(inner_product)(params)
        updates, new_opt_state = inner.update(unscaled, opt_state, params)
        select = functools.partial(jnp.where, is_finite)
        new_params = optax.apply_updates(params, updates)
        params = jax.tree.map(select, new_params, params)
        return params, (scale, jax.tree.map(select, new_opt_state, opt_state))

    strong = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.asarray(x).dtype), tree)
    return Way(lambda params: (strong(DynamicScale(scale=SCALE)), inner.init(params)), step)


def jmp_(inner: optax.GradientTransformation) -> Way:
    """JMP, as in its README."""

    def step(params, state, grads):
        (scale, counter), opt_state = state
        loss_scale = jmp.DynamicLossScale(scale, counter)
        unscaled = loss_scale.unscale(_float32(grads))
        is_finite = jmp.all_finite(unscaled)
        updates, new_opt_state = inner.update(unscaled, opt_state, params)
        new = (optax.apply_updates(params, updates), new_opt_state)
        params, opt_state = jmp.select_tree(is_finite, new, (params, opt_state))
        loss_scale = loss_scale.adjust(is_finite)
        return params, ((loss_scale.loss_scale, loss_scale.counter), opt_state)

    # The class checks its fields whenever it is unflattened, which `jit(…).lower` does with
    # placeholders; so the step carries the fields.
    return Way(lambda p: ((jnp.float32(SCALE), jnp.int32(0)), inner.init(p)), step)


def apply_if_finite(inner: optax.GradientTransformation) -> Way:
    """Optax's own, after unscaling; its scale stays as it is."""
    tx = optax.apply_if_finite(optax.chain(optax.scale(1 / SCALE), inner), 10**6)
    return plain(tx)


def where(inner: optax.GradientTransformation) -> Way:
    """What people write by hand."""

    def step(params, state, grads):
        scale, good_steps, opt_state = state
        unscaled = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        is_finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(unscaled)]).all()
        updates, new_opt_state = inner.update(unscaled, opt_state, params)
        select = lambda new, old: jnp.where(is_finite, new, old)
        params = jax.tree.map(select, optax.apply_updates(params, updates), params)
        opt_state = jax.tree.map(select, new_opt_state, opt_state)
        grow = is_finite & (good_steps == 1999)
        scale = jnp.where(is_finite, jnp.where(grow, scale * 2, scale), scale / 2)
        return params, (scale, jnp.where(is_finite & ~grow, good_steps + 1, 0), opt_state)

    return Way(lambda p: (jnp.float32(SCALE), jnp.int32(0), inner.init(p)), step)


def ours(inner: optax.GradientTransformation) -> dict[str, Way]:
    """The plain optimizer and this library's ways."""
    return {
        PLAIN: plain(inner),
        DYNAMIC: apply_gradients(inner, "dynamic"),
        "apply_gradients, fixed": apply_gradients(inner, 128),
        "apply_gradients, None": apply_gradients(inner, None),
        "update, dynamic": update(inner, "dynamic"),
    }


def peers(inner: optax.GradientTransformation) -> dict[str, Way]:
    """The others."""
    return {
        "Flax DynamicScale": flax(inner),
        "JMP": jmp_(inner),
        "optax.apply_if_finite": apply_if_finite(inner),
        "jnp.where by hand": where(inner),
    }
