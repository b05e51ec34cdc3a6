"""The foundation: arrays and pytrees, checks, names and settings.

Start with `precision.py`, which defines two words that the whole package uses of
leaves: *inexact* and *narrow*.

- `contexts.py`: settings that apply while a function is traced.
- `precision.py`: which leaves loss scaling applies to and in which dtypes.
- `finite.py`: whether a pytree is finite, its norm and its largest element.
- `placement.py`: whether an array is on several devices.
- `rounding.py`: float32 arrays split into a 16-bit array and the rest.
- `variables.py`: the variables of Flax NNX and the arrays in them.
- `stateful.py`: the base class of loss scales and skip rules.
- `flax_serialization.py`: how `flax.serialization` saves and restores such instances.
- `validation.py`: checks of arguments.
- `messages.py`: errors and warnings with the user's names for arguments.
- `names.py`: names of leaves, layers, scales and public modules.
"""
