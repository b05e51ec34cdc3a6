"""A frozen dataclass that is a pytree: configuration that is static, and state that changes."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from optax_lossscale._scales import validation
from optax_lossscale._scales.flax_serialization import register_with_flax

Check = Callable[[str, Any], Any]


def state_field(default: Any = dataclasses.MISSING, *, init: Literal[False] = False) -> Any:
    """Declares a field that changes from step to step: an array leaf of a `LossScale` or a rule.

    Args:
      default: its first value. A bool, int or float becomes a bool, int32 or float32
        scalar; arrays keep their dtype. Without a default, `__post_init__` sets it.
      init: always False: state is not an argument of the constructor.

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
    # NumPy values: strongly typed, impossible to donate away, and made without starting a JAX
    # backend, which must not happen before `jax.distributed.initialize`.
    field = functools.partial(dataclasses.field, init=init, metadata={state_field: True})
    if default is dataclasses.MISSING:
        return field()
    dtype = {bool: np.bool_, int: np.int32, float: np.float32}.get(type(default))
    array = np.asarray(default, dtype)
    if not jnp.issubdtype(array.dtype, jnp.number) and array.dtype != np.bool_:
        got = validation.shown(default)
        raise TypeError(f"a state must start as a number or an array of numbers, got {got}")
    value = array[()]  # a scalar, if it has no dimensions
    return field(default_factory=lambda: value)


def checked(check: Check, *, default: Any = dataclasses.MISSING) -> Any:
    """Declares a field that its check converts, even if a subclass declares it anew."""
    return dataclasses.field(default=default, metadata={checked: check})


@dataclass_transform(
    frozen_default=True, field_specifiers=(dataclasses.field, state_field, checked)
)
@dataclasses.dataclass(frozen=True, eq=False)
class Stateful(abc.ABC):
    """The base class of loss scales and skip rules; `==` of two waits for the device."""

    _state_names: ClassVar[list[str]]
    _static_names: ClassVar[list[str]]
    _checks: ClassVar[dict[str, Check]] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        register_with_flax(cls)
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        fields = dataclasses.fields(cls)
        cls._state_names = [f.name for f in fields if state_field in f.metadata]
        cls._static_names = [f.name for f in fields if state_field not in f.metadata]
        checks = {f.name: f.metadata[checked] for f in fields if checked in f.metadata}
        cls._checks = cls._checks | checks
        jax.tree_util.register_pytree_with_keys(cls, cls._flatten_with_keys, cls._unflatten)

    def __post_init__(self):
        checks = self._checks.items()
        self._set(**{name: check(name, getattr(self, name)) for name, check in checks})

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        validation.at_hand("==", (self, other))
        same = jax.tree.structure(self) == jax.tree.structure(other)
        return same and all(map(np.array_equal, jax.tree.leaves(self), jax.tree.leaves(other)))

    def __hash__(self) -> int:
        return hash((type(self), self._static()))  # a tracer in the state has no hash

    def _set(self, **values: Any) -> None:
        """Sets fields of an instance under construction, which is frozen later."""
        vars(self).update(values)

    def replace(self, **state: jax.typing.ArrayLike) -> Self:
        """A copy with new values of the named state fields, in the dtypes they had."""
        if unknown := sorted(set(state) - set(self._state_names)):
            raise TypeError(
                f"{type(self).__name__} has no state {', '.join(unknown)}; its state fields are "
                f"{', '.join(self._state_names)}. For another configuration, construct a new one."
            )
        new = {k: _as_state(k, v, getattr(self, k).dtype) for k, v in state.items()}
        return self._with_attributes(vars(self) | new)

    def _static(self) -> tuple[tuple[str, Any], ...]:
        return tuple((name, getattr(self, name)) for name in self._static_names)

    def _flatten_with_keys(self) -> tuple[Any, Any]:
        leaves = [(GetAttrKey(name), getattr(self, name)) for name in self._state_names]
        return leaves, self._static()

    @classmethod
    def _unflatten(cls, static: Any, leaves: Any) -> Self:
        return cls._with_attributes([*static, *zip(cls._state_names, leaves, strict=True)])

    @classmethod
    def _with_attributes(cls, attributes: Any) -> Self:
        """An instance made without `__init__`, which would start afresh."""
        self = cls.__new__(cls)
        vars(self).update(attributes)
        return self


def _as_state(name: str, value: Any, dtype: Any) -> jax.Array:
    try:
        return jnp.asarray(value, dtype)
    except (TypeError, ValueError) as error:
        got = validation.shown(value)
        raise TypeError(f"the state {name} must be an array of {dtype}, got {got}") from error
