"""A language model in float16 with Flax NNX, and checkpoints that resume exactly.

A small transformer learns the source of the standard library, byte by byte. It is written in
float32, and computes in float16 (`ols.autocast`). Gradients are clipped inside the wrapper, where
they are unscaled. The loss scale and the skipped steps are logged (`ols.metrics`), and training
stops with an error if no loss scale would help (`ols.raise_if_stuck`).

    python examples/language_model.py

It takes 50 seconds on two CPU cores, and at the end, with Python 3.11's library, it prints

    step 300: loss 2.299, scale 2^19, skipped 1

With `--checkpoint DIR` it saves every hundredth step, and resumes from there when started again.
The loss scale is saved with the optimizer's state, so a resumed run is the same to the last bit.
"""

import argparse
import functools
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import optax_lossscale as ols

BATCH, CONTEXT, WIDTH, HEADS, BLOCKS = 16, 128, 128, 4, 2


class Block(nnx.Module):
    """Attention, and a network with one hidden layer."""

    def __init__(self, rngs):
        self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        """From shape (batch, length, WIDTH) to the same."""
        x += self.out(self.attention(self.norm1(x)))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    def attention(self, x):
        """Causal; written out, as `jax.nn.dot_product_attention` takes no float16 on a CPU."""
        q, k, v = jnp.split(self.qkv(x).reshape(*x.shape[:-1], HEADS, -1), 3, axis=-1)
        scores = (
            jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
            * q.shape[-1] ** -0.5
        )
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = nnx.softmax(jnp.where(causal, scores, -jnp.inf)).astype(x.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)


class LanguageModel(nnx.Module):
    """A decoder-only transformer."""

    def __init__(self, rngs):
        self.embedding = nnx.Embed(256, WIDTH, rngs=rngs)
        self.position = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens):
        """From bytes, int32 of shape (batch, length), to logits of the next ones."""
        x = self.embedding(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_documents():
    """The modules of the standard library, one after the other: uint8, shape (bytes,)."""
    paths = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"\0".join(path.read_bytes() for path in paths), np.uint8)


def batch(documents, step):
    """The excerpts of a step, the same whenever it is taken: int32, shape (BATCH, CONTEXT + 1)."""
    rng = np.random.default_rng(step)
    starts = rng.integers(0, len(documents) - CONTEXT, BATCH)
    return documents[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def make_train_step(graph):
    """The optimizer, and the compiled training step."""
    # Growth after 50 steps instead of 2000 shows in a short run how the scale adapts.
    adamw = optax.adamw(optax.linear_schedule(0.0, 2e-3, transition_steps=20))
    inner = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    tx = ols.with_loss_scale(inner, ols.DynamicLossScale(growth_interval=50))

    def loss_fn(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, tokens):
        loss, scaled_grads = ols.value_and_scaled_grad(ols.autocast(loss_fn), state)(
            params, tokens
        )
        params, state = tx.apply_gradients(scaled_grads, state, params, value=loss)
        return params, state, {"loss": loss} | ols.metrics(state)

    return tx, train_step


def main(steps=300, checkpoint=None):
    """Trains up to a number of steps; returns the model, the state and what was logged."""
    documents = read_documents()
    graph, params = nnx.split(LanguageModel(nnx.Rngs(0)))
    tx, train_step = make_train_step(graph)
    state = tx.init(params)

    manager = (
        ocp.CheckpointManager(pathlib.Path(checkpoint).absolute())
        if checkpoint
        else None
    )
    start = (manager and manager.latest_step()) or 0
    if start:
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, state))
        params, state = manager.restore(start, args=ocp.args.StandardRestore(like))

    logged = []
    for step in range(start, steps):
        params, state, metrics = train_step(params, state, batch(documents, step))
        logged.append(metrics)
        if (step + 1) % 20 == 0:
            ols.raise_if_stuck(state)
            print(
                f"step {step + 1}: loss {metrics['loss']:.3f}, "
                f"scale 2^{metrics['log2_loss_scale']:g}, skipped {metrics['skipped_steps']}"
            )
        if manager and ((step + 1) % 100 == 0 or step + 1 == steps):
            manager.save(step + 1, args=ocp.args.StandardSave((params, state)))
    if manager:
        manager.close()
    return nnx.merge(graph, params), state, jax.device_get(logged)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoint", metavar="DIR")
    main(**vars(parser.parse_args()))
