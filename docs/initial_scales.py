"""The demo's model for 200 steps, from different initial scales.

Prints a table, of which docs/diagnosis.md has the numbers, in about two minutes on two cores.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols
from optax_lossscale import demo

STEPS = 200
BYTES = demo.BATCH * demo.CONTEXT
# What the mean over a micro-batch is multiplied by, to make the loss that is
# differentiated.
LOSSES = {
    "mean over 1024 micro-batches": 1 / 1024,
    "sum over a micro-batch": float(BYTES),
}


def train(loss_scale, weight):
    """The skipped steps, and the mean share of gradients that are zero or subnormal."""
    inner = optax.chain(
        optax.scale(1 / weight), optax.clip_by_global_norm(1.0), optax.adamw(3e-3)
    )
    tx = ols.with_loss_scale(inner, loss_scale)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, tokens):
        grad_fn = ols.value_and_scaled_grad(functools.partial(loss_fn, weight), state)
        loss, scaled_grads = grad_fn(params, tokens)
        numbers = jnp.concatenate([g.ravel() for g in jax.tree.leaves(scaled_grads)])
        share = jnp.mean(jnp.abs(numbers) < jnp.finfo(jnp.float16).tiny)
        params, state = tx.apply_gradients(scaled_grads, state, params, value=loss)
        return params, state, share

    params = demo.init(jax.random.key(0))
    state = tx.init(params)
    shares = []
    for tokens in demo.batches(STEPS):
        params, state, share = train_step(params, state, tokens)
        shares.append(share)
    return int(state.skipped_steps), float(jnp.stack(shares).mean())


@ols.autocast
def loss_fn(weight, params, tokens):
    """The loss as it is differentiated."""
    return demo.loss(params, tokens) * weight


if __name__ == "__main__":
    tokens = demo.batches(1)[0]
    print("| loss | initial scale | | skipped | zero or subnormal in float16 |")
    print("| --- | --- | ---: | ---: | ---: |")
    for loss, weight in LOSSES.items():
        fitting = ols.diagnose(
            functools.partial(loss_fn, weight), demo.init(jax.random.key(0)), tokens
        ).initial_scale
        starts = {
            "`diagnose`": ols.DynamicLossScale(initial_scale=fitting),
            "TensorFlow": ols.DynamicLossScale(),
            "PyTorch": ols.DynamicLossScale(2.0**16, min_scale=None),
            "Flax": ols.DynamicLossScale(2.0**16, 2001, min_scale=None),
        }
        for name, loss_scale in starts.items():
            skipped, underflow = train(loss_scale, weight)
            scale = f"2^{jnp.log2(loss_scale()):g}"
            print(
                f"| {loss} | {name} | {scale} | {skipped} | {underflow:.2%} |",
                flush=True,
            )
