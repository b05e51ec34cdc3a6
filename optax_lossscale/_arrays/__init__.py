"""The foundation: arrays and pytrees, and what all classes share.

Start with `precision.py`, which defines two words that the whole package uses of
leaves: *inexact* and *narrow*.

- `precision.py`: which leaves loss scaling applies to and in which dtypes.
- `finite.py`: whether a pytree is finite, its norm and its largest element.
- `replicas.py`: reductions over the replicas of a `pmap` or `shard_map`.
- `stateful.py`: the base class of loss scales and skip rules.
- `checks.py`: checks of arguments, and what errors and warnings are made of.
- `rounding.py`: float32 arrays split into a 16-bit array and the rest.
- `variables.py`: the variables of Flax NNX and the arrays in them.
- `contexts.py`: settings that are part of JAX's cache keys.
"""
