"""Losses on many devices, whose casts to 16 bits are made by hand or left to autocast.

Each is a function of a cast and of a mesh with one axis, `data`, and gives a loss of a weight and
of rows, both square.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.sharding import Mesh, NamedSharding

from benchmarks._models import Cast, Model

Loss: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


def _norm(h: jax.Array) -> jax.Array:
    h = h.astype(jnp.float32)
    return h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)


def _mean_square(y: jax.Array) -> jax.Array:
    return jnp.mean(y.astype(jnp.float32) ** 2)


def mapped(of_each: Loss, mesh: Mesh, weight: Any = None) -> Loss:
    """The mean over the devices, of a weight that each has whole, or its part of."""
    mean = lambda w, x: lax.pmean(of_each(w, x), mesh.axis_names)
    specs = {"in_specs": (weight or P(), P(mesh.axis_names)), "out_specs": P()}
    return jax.shard_map(mean, mesh=mesh, **specs)


def gathered_weight(cast: Cast, mesh: Mesh) -> Loss:
    """As in FSDP."""

    def of_each(w, x):
        return _mean_square(cast(x) @ lax.all_gather(cast(w), "data", tiled=True))

    return mapped(of_each, mesh, P("data"))


def gathered_sequence(cast: Cast, mesh: Mesh) -> Loss:
    """As in Megatron's sequence parallelism."""

    def of_each(w, x):
        h = cast(_norm(cast(x) @ cast(w)))
        return _mean_square(lax.all_gather(h, "data", tiled=True) @ cast(w))

    return mapped(of_each, mesh)


def ring(cast: Cast, mesh: Mesh) -> Loss:
    """As in ring attention."""
    count = mesh.size

    def of_each(w, x):
        q, k, total = cast(x) @ cast(w), cast(_norm(cast(x) @ cast(w))), 0
        for _ in range(count):
            total += _mean_square(q @ k.T)
            k = lax.ppermute(k, "data", [(i, (i + 1) % count) for i in range(count)])
        return total

    return mapped(of_each, mesh)


def exchanged_heads(cast: Cast, mesh: Mesh) -> Loss:
    """As Ulysses does."""

    def of_each(w, x):
        h = cast(_norm(cast(x) @ cast(w)))
        q = lax.all_to_all(h, "data", 1, 0, tiled=True)
        return _mean_square(q @ q.T)

    return mapped(of_each, mesh)


def constrained(cast: Cast, mesh: Mesh) -> Loss:
    """A weight that the compiler is told to gather."""

    def loss(w, x):
        w = lax.with_sharding_constraint(cast(w), NamedSharding(mesh, P()))
        return _mean_square(cast(x) @ w)

    return loss


LOSSES: dict[str, Callable[[Cast, Mesh], Loss]] = {
    "weights gathered, as in FSDP": gathered_weight,
    "weights under a sharding constraint": constrained,
    "a sequence gathered, as in Megatron": gathered_sequence,
    "a ring, as in ring attention": ring,
    "heads exchanged, as in Ulysses": exchanged_heads,
}


def gathered_model(model: Model, cast: Cast, mesh: Mesh) -> Callable[..., jax.Array]:
    """A model's loss, of which each device has a part of every parameter and of the batch."""

    def of_each(params, *batch):
        gather = lambda w: lax.all_gather(cast(w), "data", tiled=True)
        return lax.pmean(model.loss(jax.tree.map(gather, params), *batch), "data")

    specs = {"in_specs": P("data"), "out_specs": P()}
    return jax.shard_map(of_each, mesh=mesh, **specs)
