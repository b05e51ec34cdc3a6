"""Ways to take a step: without loss scaling, with this library, and with others."""

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
Loss = Callable[..., jax.Array]
Step = Callable[..., tuple[Any, ...]]


class Way(NamedTuple):
    """A way to take a step.

    Attributes:
      init: called as `init(params)`, returns the state.
      step: the optimizer's, `step(params, state, scaled_grads)`, returns `(params, state)`.
      train: from a loss of `(params, *batch)` to the whole step of `(params, state, *batch)`,
        which returns `(params, state, loss)`.
    """

    init: Callable[[Any], Any]
    step: Step
    train: Callable[[Loss], Step]


def ways(inner: optax.GradientTransformation) -> dict[str, Way]:
    """Those that are compared, the first without loss scaling."""
    return {
        "no loss scaling": plain(inner),
        "apply_gradients": apply_gradients(inner),
        "update": update(inner),
        "Flax DynamicScale": flax(inner),
        "JMP": jmp_(inner),
        "optax.apply_if_finite": apply_if_finite(inner),
        "jnp.where by hand": where(inner),
    }


def plain(inner: optax.GradientTransformation) -> Way:
    """The optimizer alone."""
    bare = _by_update(inner)
    step = lambda params, state, grads: bare(params, state, _float32(grads))
    return _way(inner.init, step, lambda loss, state: jax.value_and_grad(loss))


def apply_gradients(
    inner: optax.GradientTransformation, loss_scale: Any = "dynamic", **options: Any
) -> Way:
    """This library's short way; the options are `with_loss_scale`'s."""
    tx = ols.with_loss_scale(inner, loss_scale, **options)
    step = lambda params, state, grads: tx.apply_gradients(grads, state, params)
    return _way(tx.init, step, ols.value_and_scaled_grad)


def update(
    inner: optax.GradientTransformation, loss_scale: Any = "dynamic", **options: Any
) -> Way:
    """This library as any other Optax transformation."""
    tx = ols.with_loss_scale(inner, loss_scale, **options)
    return _way(tx.init, _by_update(tx), ols.value_and_scaled_grad)


def flax(inner: optax.GradientTransformation) -> Way:
    """Flax's `DynamicScale`, with the selects of its examples.

    It scales and differentiates by itself. So the optimizer's step differentiates a loss
    whose gradients are the given ones.
    """

    def train(loss_fn):
        def train_step(params, state, *batch):
            scale, opt_state = state
            value_and_grad = scale.value_and_grad(loss_fn)
            scale, is_finite, loss, grads = value_and_grad(params, *batch)
            updates, new_opt_state = inner.update(grads, opt_state, params)
            select = functools.partial(jnp.where, is_finite)
            new_params = optax.apply_updates(params, updates)
            params = jax.tree.map(select, new_params, params)
            return params, (scale, jax.tree.map(select, new_opt_state, opt_state)), loss

        return train_step

    def step(params, state, grads):
        inner_product = lambda params: optax.tree.vdot(params, _float32(grads))
        return train(inner_product)(params, state)[:2]

    # Arrays of no weak type, for which a second step would be compiled.
    strong = lambda x: jnp.asarray(x, jnp.asarray(x).dtype)
    scale = lambda: jax.tree.map(strong, DynamicScale(scale=SCALE))
    return Way(lambda params: (scale(), inner.init(params)), step, train)


def jmp_(inner: optax.GradientTransformation) -> Way:
    """JMP, as in its README."""

    def step(params, state, grads):
        (scale, counter), opt_state = state
        loss_scale = jmp.DynamicLossScale(scale, counter)
        unscaled = loss_scale.unscale(_float32(grads))
        is_finite = jmp.all_finite(unscaled)
        updates, new_opt_state = inner.update(unscaled, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        params, opt_state = jmp.select_tree(is_finite, new, (params, opt_state))
        loss_scale = loss_scale.adjust(is_finite)
        return params, ((loss_scale.loss_scale, loss_scale.counter), opt_state)

    # The step carries the fields, as the class refuses placeholders for them.
    init = lambda params: ((jnp.float32(SCALE), jnp.int32(0)), inner.init(params))
    return _way(init, step, _by_hand(lambda state: state[0][0]))


def apply_if_finite(inner: optax.GradientTransformation) -> Way:
    """Optax's own, after unscaling by a fixed scale, as it has none itself."""
    tx = optax.apply_if_finite(optax.chain(optax.scale(1 / SCALE), inner), 10**6)
    return _way(tx.init, plain(tx).step, _by_hand(lambda state: SCALE))


def where(inner: optax.GradientTransformation) -> Way:
    """What people write by hand."""

    def step(params, state, grads):
        scale, good_steps, opt_state = state
        unscaled = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        finite = [jnp.isfinite(g).all() for g in jax.tree.leaves(unscaled)]
        is_finite = jnp.array(finite).all()
        updates, new_opt_state = inner.update(unscaled, opt_state, params)
        select = lambda new, old: jnp.where(is_finite, new, old)
        params = jax.tree.map(select, optax.apply_updates(params, updates), params)
        opt_state = jax.tree.map(select, new_opt_state, opt_state)
        grow = is_finite & (good_steps == 1999)
        good_steps = jnp.where(is_finite & ~grow, good_steps + 1, 0)
        scale = jnp.where(is_finite, jnp.where(grow, scale * 2, scale), scale / 2)
        return params, (scale, good_steps, opt_state)

    init = lambda params: (jnp.float32(SCALE), jnp.int32(0), inner.init(params))
    return _way(init, step, _by_hand(lambda state: state[0]))


def _by_update(tx: optax.GradientTransformation) -> Step:
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def _way(init: Callable[[Any], Any], step: Step, value_and_grad: Any) -> Way:
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


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
