"""A diffusion model in float16 with Equinox, and an average of its parameters.

It learns to draw disks and squares, which the program makes itself, by rectified flow: the model
is trained to predict the velocity from an image to noise, and draws by following it back. It draws
with a moving average of its parameters, which the optimizer does not know: `ols.where_applied`
keeps the old average when a step is skipped.

    python examples/diffusion.py

It takes a minute on two CPU cores, and prints four of its drawings at the end, after

    step 2000: loss 0.230, scale 2^16, skipped 0
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols

SIDE, PATCH, WIDTH, BLOCKS, BATCH = 16, 4, 64, 3, 32
PATCHES = (SIDE // PATCH) ** 2


class Block(eqx.Module):
    """An MLP over the patches, and one over the channels of each patch."""

    norms: list[eqx.nn.LayerNorm]
    over_patches: eqx.nn.MLP
    over_channels: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm((PATCHES, WIDTH)) for _ in range(2)]
        self.over_patches = eqx.nn.MLP(
            PATCHES, PATCHES, 2 * PATCHES, 1, jax.nn.gelu, key=keys[0]
        )
        self.over_channels = eqx.nn.MLP(
            WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=keys[1]
        )

    def __call__(self, x):
        """From shape (PATCHES, WIDTH) to the same."""
        x += jax.vmap(self.over_patches, 1, 1)(self.norms[0](x))
        return x + jax.vmap(self.over_channels)(self.norms[1](x))


class Mixer(eqx.Module):
    """An MLP-Mixer: it sees an image as patches, and mixes alternately over and within them."""

    embed: eqx.nn.Linear
    embed_time: eqx.nn.Linear
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, BLOCKS + 3)
        self.embed = eqx.nn.Linear(PATCH**2, WIDTH, key=keys[0])
        self.embed_time = eqx.nn.Linear(16, WIDTH, key=keys[1])
        self.blocks = [Block(key) for key in keys[3:]]
        self.head = eqx.nn.Linear(WIDTH, PATCH**2, key=keys[2])

    def __call__(self, image, time):
        """The velocity, float32 of shape (SIDE, SIDE), at an image of which `time` is noise."""
        waves = jnp.cos(jnp.pi * time * jnp.arange(16))
        patches = image.reshape(SIDE // PATCH, PATCH, SIDE // PATCH, PATCH).swapaxes(
            1, 2
        )
        x = jax.vmap(self.embed)(patches.reshape(PATCHES, PATCH**2))
        x += self.embed_time(waves)
        for block in self.blocks:
            x = block(x)
        x = jax.vmap(self.head)(x).reshape(SIDE // PATCH, SIDE // PATCH, PATCH, PATCH)
        return x.swapaxes(1, 2).reshape(SIDE, SIDE)


def draw_images(key):
    """Disks and squares, from -1 outside to 1 within: float32, shape (BATCH, SIDE, SIDE)."""
    keys = jax.random.split(key, 3)
    is_disk = jax.random.bernoulli(keys[0], shape=(BATCH, 1, 1))
    center = jax.random.uniform(keys[1], (2, BATCH, 1, 1), minval=5, maxval=SIDE - 6)
    radius = jax.random.uniform(keys[2], (BATCH, 1, 1), minval=2, maxval=5)
    x, y = jnp.abs(jnp.indices((SIDE, SIDE))[:, None] - center)
    return jnp.clip(
        radius - jnp.where(is_disk, jnp.hypot(x, y), jnp.maximum(x, y)), -1, 1
    )


def diffusion_loss(model, key):
    """The squared error of the velocity from images to noise; a float32 scalar."""
    keys = jax.random.split(key, 3)
    images = draw_images(keys[0])
    noise = jax.random.normal(keys[1], images.shape)
    time = jax.random.uniform(keys[2], (BATCH, 1, 1))
    velocity = jax.vmap(model)((1 - time) * images + time * noise, time[:, 0, 0])
    return jnp.mean((velocity - (noise - images)) ** 2)


def make_train_step():
    """The optimizer, and the compiled training step."""
    tx = ols.with_loss_scale(optax.adamw(2e-3))

    @eqx.filter_jit(donate="all")
    def train_step(model, average, state, key):
        params, static = eqx.partition(model, eqx.is_inexact_array)
        loss_fn = lambda params: diffusion_loss(eqx.combine(params, static), key)
        loss, scaled_grads = ols.value_and_scaled_grad(ols.autocast(loss_fn), state)(
            params
        )
        params, state = tx.apply_gradients(scaled_grads, state, params, value=loss)
        moved = optax.incremental_update(params, average, step_size=0.01)
        average = ols.where_applied(state, moved, average)
        return (
            eqx.combine(params, static),
            average,
            state,
            {"loss": loss} | ols.metrics(state),
        )

    return tx, train_step


@eqx.filter_jit
def sample(model, key, steps=50):
    """Images from noise, by Euler's method: shape (BATCH, SIDE, SIDE)."""

    def step(i, images):
        return images - jax.vmap(model, (0, None))(images, 1 - i / steps) / steps

    return jax.lax.fori_loop(
        0, steps, step, jax.random.normal(key, (BATCH, SIDE, SIDE))
    )


def main(steps=2000):
    """Trains for a number of steps; returns the samples, the state and what was logged."""
    model = Mixer(jax.random.key(0))
    tx, train_step = make_train_step()
    params, static = eqx.partition(model, eqx.is_inexact_array)
    state, average = tx.init(params), jax.tree.map(jnp.copy, params)
    logged = []
    for step, key in enumerate(jax.random.split(jax.random.key(1), steps)):
        model, average, state, metrics = train_step(model, average, state, key)
        logged.append(metrics)
        if (step + 1) % 200 == 0:
            loss = sum(metrics["loss"] for metrics in logged[-200:]) / 200
            print(
                f"step {step + 1}: loss {loss:.3f}, "
                f"scale 2^{metrics['log2_loss_scale']:g}, skipped {metrics['skipped_steps']}"
            )
    images = sample(eqx.combine(average, static), jax.random.key(2))
    for row in jnp.concatenate(images[:4], axis=1):
        print("".join(".+#"[int(level)] for level in jnp.clip(1.5 * row + 1.5, 0, 2)))
    return images, state, jax.device_get(logged)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    main(parser.parse_args().steps)
