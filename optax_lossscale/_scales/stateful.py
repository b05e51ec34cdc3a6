"""A frozen dataclass that is a pytree: configuration that is static, and state that changes."""

import abc
import dataclasses
from typing import Any, Literal, Self, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from optax_lossscale._scales import validation
from optax_lossscale._scales.flax_serialization import register_with_flax

_IS_STATE = {"state": True}


def state_field(default: Any = dataclasses.MISSING, *, init: Literal[False] = False) -> Any:
    """Declares a field that changes from step to step: an array leaf of a `LossScale` or a rule.

    Args:
      default: its first value. A bool, int or float becomes a bool, int32 or float32
        scalar; arrays keep their dtype. Without a default, `__post_init__` sets it.
      init: False: state is no argument of the constructor.

    Returns:
      A dataclass field.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> class Counting(ols.LossScale):
      ...     overflows: jax.Array = ols.state_field(0)
      ...
      ...     def adjust(self, grads_finite):
      ...         return self.replace(overflows=self.overflows + jnp.logical_not(grads_finite))
      >>> ls, _ = Counting().update({"w": jnp.array(jnp.inf)})
      >>> print(ls.overflows, ls.overflows.dtype)
      1 int32
    """
    # NumPy values: strongly typed, impossible to donate away, and made without waking
    # a JAX backend, which a module that builds its optimizer before
    # `jax.distributed.initialize` must not do.
    if default is dataclasses.MISSING:
        return dataclasses.field(init=init, metadata=_IS_STATE)
    dtype = {bool: np.bool_, int: np.int32, float: np.float32}.get(type(default))
    array = np.asarray(default, dtype)
    if not jnp.issubdtype(array.dtype, jnp.number) and array.dtype != np.bool_:
        raise TypeError(
            f"a state starts as a number or an array of numbers, got {validation.shown(default)}"
        )
    value = array[()]  # a scalar of what has no dimensions
    return dataclasses.field(init=init, default_factory=lambda: value, metadata=_IS_STATE)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, state_field))
@dataclasses.dataclass(frozen=True, eq=False)
class Stateful(abc.ABC):  # noqa: B024 (what is abstract differs)
    """What loss scales and rules of skipping are: subclassing alone makes a class one.

    Fields are configuration, static under `jit`; a `state_field` is an array leaf. Two are equal
    if they are of one class, with equal configurations and states, which waits for the device.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        register_with_flax(cls)
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        _register(cls)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        validation.at_hand("==", (self, other))
        same = jax.tree.structure(self) == jax.tree.structure(other)
        return same and all(map(np.array_equal, jax.tree.leaves(self), jax.tree.leaves(other)))

    def __hash__(self) -> int:
        _, static = _split(type(self))  # without the state, whose hash a tracer has not
        return hash((type(self), *(getattr(self, name) for name in static)))

    def _set(self, **values: Any) -> None:
        """Sets fields of an instance under construction, which is frozen later."""
        vars(self).update(values)

    def replace(self, **state: jax.typing.ArrayLike) -> Self:
        """A copy with new values of the named state fields, in the dtypes they had."""
        names, _ = _split(type(self))
        if unknown := sorted(set(state) - set(names)):
            raise TypeError(
                f"{type(self).__name__} has no state {', '.join(unknown)}; its state fields are "
                f"{', '.join(names)}. For another configuration construct a new one."
            )
        new = {k: _as_state(k, v, getattr(self, k).dtype) for k, v in state.items()}
        return _with_attributes(type(self), vars(self) | new)

    def _to_state_dict(self) -> dict[str, Any]:
        """What `flax.serialization` saves: the state, as any checkpointer."""
        names, _ = _split(type(self))
        return {name: getattr(self, name) for name in names}

    def _from_state_dict(self, saved: Any) -> Self:
        """The same configuration, with the state that was saved."""
        names, _ = _split(type(self))
        if not isinstance(saved, dict) or set(saved) != set(names):
            found = list(saved) if isinstance(saved, dict) else saved
            raise ValueError(
                f"what is saved of a {type(self).__name__} is {names}; got "
                f"{validation.shown(found)}. Restore into one of the kind that was saved."
            )
        shapes = {name: (np.shape(saved[name]), np.shape(getattr(self, name))) for name in names}
        if other := [name for name, (there, here) in shapes.items() if there != here]:
            there, here = shapes[other[0]]
            raise ValueError(
                f"the {other[0]} that is saved of a {type(self).__name__} has shape {there}, and "
                f"here it has {here}. Restore into one of the configuration that was saved."
            )
        return self.replace(**saved)


def _split(cls: type[Stateful]) -> tuple[list[str], list[str]]:
    """The names of a class's state fields, and of its other, static fields."""
    fields = dataclasses.fields(cls)
    is_state = lambda f: f.metadata.get("state", False)
    return [f.name for f in fields if is_state(f)], [f.name for f in fields if not is_state(f)]


def _as_state(name: str, value: Any, dtype: Any) -> jax.Array:
    try:
        return jnp.asarray(value, dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the state {name} must be an array of {dtype}, got {validation.shown(value)}"
        ) from error


def _with_attributes(cls: type[Stateful], attributes: dict[str, Any]) -> Any:
    """An instance made without `__init__`, which would validate and start afresh."""
    self = cls.__new__(cls)
    vars(self).update(attributes)
    return self


def _register(cls: type[Stateful]) -> None:
    def flatten_with_keys(self):
        state, static = _split(cls)
        leaves = [(GetAttrKey(name), getattr(self, name)) for name in state]
        return leaves, tuple((name, getattr(self, name)) for name in static)

    def unflatten(static, leaves):
        state, _ = _split(cls)
        return _with_attributes(cls, dict(static) | dict(zip(state, leaves, strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
