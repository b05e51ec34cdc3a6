"""The foundation: arrays and pytrees, checks, names and settings.

- `contexts.py`: settings that apply while a function is traced.
- `precision.py`: which leaves loss scaling applies to, and in which dtypes.
- `finite.py`: whether every number of a pytree is finite.
- `placement.py`: how an array lies on several devices.
- `rounding.py`: float32 numbers split into a 16-bit number and the rest.
- `variables.py`: the variables of Flax NNX, and the arrays in them.
- `stateful.py`: the base class of loss scales and skip rules.
- `flax_serialization.py`: how Flax saves and restores them.
- `validation.py`: checks of arguments.
- `messages.py`: errors and warnings in the user's words.
- `names.py`: names of leaves, layers, scales and public modules.
"""
