"""The ways to take a step: without loss scaling, with this library, and with its peers.

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
from benchmarks import _transformer

SCALE = 2.0**15
Step = Callable[..., tuple[Any, ...]]
PLAIN = "no loss scaling"
DYNAMIC = "apply_gradients, dynamic"
APPLY_IF_FINITE = "optax.apply_if_finite"
DOORS = (DYNAMIC, "update, dynamic")


class Way(NamedTuple):
    """A way to take a step, which carries `(params, state)` in the order that it donates them.

    Attributes:
      init: called as `init(params)`, returns the state.
      step: the optimizer's, `step(params, state, scaled_grads)`, returns `(params, state)`.
      train: from a loss function of `(params, *batch)` to the whole step of `(params, state,
        *batch)`, which returns `(params, state, loss)`.
    """

    init: Callable[[Any], Any]
    step: Step
    train: Callable[[Callable[..., jax.Array]], Step]


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _way(
    init: Callable[[Any], Any], step: Step, value_and_grad: Callable[..., Any]
) -> Way:
    """A way whose step takes the gradients from `value_and_grad(loss_fn, state)`."""

    def train(loss_fn):
        def train_step(params, state, *batch):
            loss, grads = value_and_grad(loss_fn, state)(params, *batch)
            return *step(params, state, grads), loss

        return train_step

    return Way(init, step, train)


def _by_hand(scale: Callable[[Any], Any]) -> Callable[..., Any]:
    """A `value_and_grad` that multiplies the loss by the state's scale."""

    def value_and_grad(loss_fn, state):
        def scaled(params, *batch):
            loss = loss_fn(params, *batch)
            return loss * scale(state), loss

        def value_and_scaled_grad(params, *batch):
            grads, loss = jax.grad(scaled, has_aux=True)(params, *batch)
            return loss, grads

        return value_and_scaled_grad

    return value_and_grad


def plain(inner: optax.GradientTransformation) -> Way:
    """The optimizer alone."""

    def step(params, state, grads):
        updates, state = inner.update(_float32(grads), state, params)
        return optax.apply_updates(params, updates), state

    return _way(inner.init, step, lambda loss_fn, state: jax.value_and_grad(loss_fn))


def apply_gradients(
    inner: optax.GradientTransformation,
    loss_scale: Any,
    **options: Any,
) -> Way:
    """This library's short way; the options are `with_loss_scale`'s."""
    tx = ols.with_loss_scale(inner, loss_scale, **options)
    step = lambda params, state, grads: tx.apply_gradients(grads, state, params)
    return _way(tx.init, step, ols.value_and_scaled_grad)


def update(
    inner: optax.GradientTransformation,
    loss_scale: Any,
    **options: Any,
) -> Way:
    """This library as any other Optax transformation."""
    tx = ols.with_loss_scale(inner, loss_scale, **options)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return _way(tx.init, step, ols.value_and_scaled_grad)


def flax(inner: optax.GradientTransformation) -> Way:
    """Flax's `DynamicScale`, with the selects of its examples.

    It scales and differentiates by itself, so for the optimizer step it is given a loss whose
    gradients are these.
    """

    def train(loss_fn):
        def train_step(params, state, *batch):
            scale, opt_state = state
            scale, is_finite, loss, grads = scale.value_and_grad(loss_fn)(
                params, *batch
            )
            updates, new_opt_state = inner.update(grads, opt_state, params)
            select = functools.partial(jnp.where, is_finite)
            new_params = optax.apply_updates(params, updates)
            params = jax.tree.map(select, new_params, params)
            return params, (scale, jax.tree.map(select, new_opt_state, opt_state)), loss

        return train_step

    def step(params, state, grads):
        inner_product = lambda params: optax.tree.vdot(params, _float32(grads))
        return train(inner_product)(params, state)[:2]

    strong = lambda tree: jax.tree.map(
        lambda x: jnp.asarray(x, jnp.asarray(x).dtype), tree
    )
    init = lambda params: (strong(DynamicScale(scale=SCALE)), inner.init(params))
    return Way(init, step, train)


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

    # The class checks its fields whenever it is unflattened, which `jit(…).lower` does
    # with placeholders; so the step carries the fields.
    init = lambda params: ((jnp.float32(SCALE), jnp.int32(0)), inner.init(params))
    return _way(init, step, _by_hand(lambda state: state[0][0]))


def apply_if_finite(inner: optax.GradientTransformation) -> Way:
    """Optax's own, after unscaling; its scale stays as it is."""
    tx = optax.apply_if_finite(optax.chain(optax.scale(1 / SCALE), inner), 10**6)
    return _way(tx.init, plain(tx).step, _by_hand(lambda state: SCALE))


def cond(inner: optax.GradientTransformation) -> Way:
    """A conditional around the bare step, and nothing else: its scale stays as it is."""

    def step(params, state, grads):
        unscaled = jax.tree.map(lambda g: g.astype(jnp.float32) / SCALE, grads)
        is_finite = jnp.array(
            [jnp.isfinite(g).all() for g in jax.tree.leaves(unscaled)]
        ).all()
        skip = lambda params, state, _: (params, state)
        return jax.lax.cond(is_finite, plain(inner).step, skip, params, state, unscaled)

    return _way(inner.init, step, _by_hand(lambda state: SCALE))


def where(inner: optax.GradientTransformation) -> Way:
    """What people write by hand."""

    def step(params, state, grads):
        scale, good_steps, opt_state = state
        unscaled = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        is_finite = jnp.array(
            [jnp.isfinite(g).all() for g in jax.tree.leaves(unscaled)]
        ).all()
        updates, new_opt_state = inner.update(unscaled, opt_state, params)
        select = lambda new, old: jnp.where(is_finite, new, old)
        params = jax.tree.map(select, optax.apply_updates(params, updates), params)
        opt_state = jax.tree.map(select, new_opt_state, opt_state)
        grow = is_finite & (good_steps == 1999)
        scale = jnp.where(is_finite, jnp.where(grow, scale * 2, scale), scale / 2)
        return params, (
            scale,
            jnp.where(is_finite & ~grow, good_steps + 1, 0),
            opt_state,
        )

    init = lambda params: (jnp.float32(SCALE), jnp.int32(0), inner.init(params))
    return _way(init, step, _by_hand(lambda state: state[0]))


def ours(inner: optax.GradientTransformation) -> dict[str, Way]:
    """The plain optimizer and this library's ways."""
    return {
        PLAIN: plain(inner),
        DYNAMIC: apply_gradients(inner, "dynamic"),
        "apply_gradients, fixed": apply_gradients(inner, 128),
        "apply_gradients, fixed, skip=None": apply_gradients(inner, 128, skip=None),
        "apply_gradients, None, skip=None": apply_gradients(inner, None, skip=None),
        "update, dynamic": update(inner, "dynamic"),
    }


def whole(inner: optax.GradientTransformation) -> dict[str, Way]:
    """The ways to take a whole step of a model that casts its parameters itself."""
    return {
        PLAIN: plain(inner),
        DYNAMIC: apply_gradients(inner, "dynamic"),
        "update, dynamic": update(inner, "dynamic"),
    } | peers(inner)


def in_float16(
    inner: optax.GradientTransformation,
) -> dict[str, tuple[Way, Callable[..., Any]]]:
    """Whole steps of one model that compute in float16 in other ways, each with its loss."""
    dynamic = apply_gradients(inner, "dynamic")
    autocast_loss = ols.autocast(_transformer.float32_loss)
    return {
        PLAIN: (plain(inner), _transformer.float32_loss),
        "by hand": (dynamic, _transformer.loss),
        "autocast": (dynamic, autocast_loss),
    }


def branches(inner: optax.GradientTransformation) -> dict[str, Way]:
    """The plain optimizer, this library's ways under either branch, and the others."""
    doors = {"apply_gradients": apply_gradients, "update": update}
    ways = {PLAIN: plain(inner)}
    for name, door in doors.items():
        ways[name] = door(inner, "dynamic")
    for name, door in doors.items():
        ways[f'{name}, branch="cond"'] = door(inner, "dynamic", branch="cond")
    return ways | peers(inner)


def peers(inner: optax.GradientTransformation) -> dict[str, Way]:
    """The others."""
    return {
        "Flax DynamicScale": flax(inner),
        "JMP": jmp_(inner),
        APPLY_IF_FINITE: apply_if_finite(inner),
        "jnp.where by hand": where(inner),
    }
