"""Reinforcement learning in float16, in plain JAX: a cart learns to balance a pole.

An advantage actor-critic on CartPole, which is written out below. One small network acts and
learns in float16. A training step is a rollout and an update learned from it, and fifty of them
run as one compiled `lax.scan`, with the loss scale in its carry.

    python examples/policy_gradient.py

It takes 13 seconds on two CPU cores. The return is an episode's length, 500 at most; at the end:

    step 500: mean return 500, scale 2^14, skipped 1
"""

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.nn.initializers import orthogonal

import optax_lossscale as ols

# side by side; steps of a rollout; of an episode, at most
CARTS, LENGTH, LIMIT = 64, 32, 500
DISCOUNT, LAMBDA = 0.99, 0.95


class Carts(NamedTuple):
    """Carts on a track, with a pole on each."""

    body: jax.Array  # place, speed, angle and spin: float32, shape (4, CARTS)
    time: jax.Array  # steps since the episode began: float32, shape (CARTS,)


def reset(key):
    """Carts almost at rest, with poles almost upright."""
    return Carts(
        jax.random.uniform(key, (4, CARTS), minval=-0.05, maxval=0.05), jnp.zeros(CARTS)
    )


def push(carts, action):
    """The carts 0.02 s after a push to the left (0) or to the right (1), and which have failed."""
    _, speed, angle, spin = carts.body
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    pull = (20.0 * action - 10.0 + 0.05 * spin**2 * sin) / 1.1
    turn = (9.8 * sin - cos * pull) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    rates = jnp.stack([speed, pull - 0.05 * turn * cos / 1.1, spin, turn])
    body = carts.body + 0.02 * rates
    return Carts(body, carts.time + 1), (jnp.abs(body[0]) > 2.4) | (
        jnp.abs(body[2]) > 0.2095
    )


def init(key):
    """The network's weights and biases, layer by layer, in float32."""
    layer = lambda key, gain, *shape: (
        orthogonal(gain)(key, shape),
        jnp.zeros(shape[1]),
    )
    keys = jax.random.split(key, 3)
    return [
        layer(keys[0], 1.4, 4, 64),
        layer(keys[1], 1.4, 64, 64),
        layer(keys[2], 0.1, 64, 3),
    ]


@ols.autocast
def network(params, carts):
    """The log-probabilities of both actions and the return to expect, for acting and learning."""
    *hidden, last = params
    x = carts.body.swapaxes(-1, -2)
    for w, b in hidden:
        x = jnp.tanh(x @ w + b)
    out = x @ last[0] + last[1]
    return jax.nn.log_softmax(out[..., :2]), out[..., 2]


def rollout(params, carts, key):
    """Acts for LENGTH steps: the carts then, and what happened, with a leading axis of time."""

    def step(carts, key):
        keys = jax.random.split(key)
        log_probs, value = network(params, carts)
        action = jax.random.categorical(keys[0], log_probs)
        moved, failed = push(carts, action)
        over = failed | (moved.time == LIMIT)
        happened = {"carts": carts, "action": action, "value": value, "over": over}
        select = lambda new, old: jnp.where(over, new, old)
        return jax.tree.map(select, reset(keys[1]), moved), happened

    return jax.lax.scan(step, carts, jax.random.split(key, LENGTH))


def advantages(happened, value):
    """Generalized advantage estimation, backwards from the value where the rollout ended."""

    def step(carry, now):
        advantage, next_value = carry
        goes_on = 1.0 - now["over"]
        surprise = 1.0 + DISCOUNT * goes_on * next_value - now["value"]
        advantage = surprise + DISCOUNT * LAMBDA * goes_on * advantage
        return (advantage, now["value"]), advantage

    return jax.lax.scan(step, (jnp.zeros(CARTS), value), happened, reverse=True)[1]


def actor_critic_loss(params, happened, advantage):
    """The loss of the policy, of its entropy and of the value; a float32 scalar."""
    log_probs, value = network(params, happened["carts"])
    taken = jnp.take_along_axis(log_probs, happened["action"][..., None], axis=-1)[
        ..., 0
    ]
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    error = happened["value"] + advantage - value
    return jnp.mean(-taken * advantage - 0.01 * entropy + 0.01 * error**2)


def make_train_step(steps):
    """The optimizer, and the training step: a rollout, and an update learned from it."""
    adam = optax.adam(optax.linear_schedule(1e-2, 0.0, steps))
    tx = ols.with_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), adam))

    def train_step(carry, key):
        params, state, carts = carry
        carts, happened = rollout(params, carts, key)
        advantage = advantages(happened, network(params, carts)[1])
        differentiate = ols.value_and_scaled_grad(actor_critic_loss, state)
        loss, scaled_grads = differentiate(params, happened, advantage)
        params, state = tx.apply_gradients(scaled_grads, state, params, value=loss)
        # at its end, the return
        over, time = happened["over"], happened["carts"].time + 1
        metrics = {"return": jnp.sum(over * time), "episodes": jnp.sum(over)}
        return (params, state, carts), metrics | ols.metrics(state)

    return tx, train_step


def main(steps=500, seed=0):
    """Trains for a number of steps; returns the mean return in every 50, and the state."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params, carts = init(keys[0]), reset(keys[1])
    tx, train_step = make_train_step(steps)
    state = tx.init(params)
    train_steps = jax.jit(
        lambda *args: jax.lax.scan(train_step, *args), donate_argnums=0
    )

    returns, keys = [], jax.random.split(keys[2], steps)
    for i in range(0, steps, 50):
        (params, state, carts), metrics = train_steps(
            (params, state, carts), keys[i : i + 50]
        )
        ols.raise_if_stuck(state)
        returns.append(float(metrics["return"].sum() / metrics["episodes"].sum()))
        print(
            f"step {min(i + 50, steps)}: mean return {returns[-1]:.0f}, "
            f"scale 2^{metrics['log2_loss_scale'][-1]:g}, skipped {state.skipped_steps}"
        )
    return returns, state


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    main(parser.parse_args().steps)
