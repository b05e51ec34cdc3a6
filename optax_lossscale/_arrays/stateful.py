"""A frozen dataclass that is a pytree: configuration that is static, and state that changes."""

import abc
import copy
import dataclasses
import inspect
from typing import Any, ClassVar, Literal, Self, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.flax_serialization import register_with_flax

_DTYPES = {bool: np.bool_, int: np.int32, float: np.float32}


def state_field(
    default: Any = dataclasses.MISSING, *, init: Literal[False] = False
) -> Any:
    """Declares a field that changes from step to step: an array leaf of a `LossScale` or a rule.

    Args:
      default: its first value. A bool, int or float becomes a bool, int32 or float32
        scalar; arrays keep their dtype. Without a default, `__post_init__` sets it.
      init: not to be given. It tells type checkers that state is no argument of the
        constructor.

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
    # NumPy values: strongly typed, impossible to donate away, and made without starting
    # a JAX backend, which must not happen before `jax.distributed.initialize`.
    metadata = {state_field: True}
    if default is dataclasses.MISSING:
        return dataclasses.field(init=False, metadata=metadata)
    array = np.asarray(default, _DTYPES.get(type(default)))
    value = array[()]  # a scalar, if it has no dimensions
    return dataclasses.field(
        default_factory=lambda: value, init=False, metadata=metadata
    )


def checked(check: validation.Check, *, default: Any = dataclasses.MISSING) -> Any:
    """Declares a field that its check converts, even if a subclass declares it anew."""
    return dataclasses.field(default=default, metadata={checked: check})


@dataclass_transform(
    frozen_default=True, field_specifiers=(dataclasses.field, state_field, checked)
)
@dataclasses.dataclass(frozen=True, eq=False)
class Stateful(abc.ABC):
    """The base class of loss scales and skip rules; `==` waits for the device."""

    _kind: ClassVar[str]  # what one is called in an error
    _state_names: ClassVar[list[str]]
    _static_names: ClassVar[list[str]]
    _checks: ClassVar[dict[str, validation.Check]] = {}
    _classes: ClassVar[list[type[Self]]] = []  # all, in the order of their definition

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        register_with_flax(cls)
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        cls._classes.append(cls)
        fields = dataclasses.fields(cls)
        cls._state_names = [f.name for f in fields if state_field in f.metadata]
        cls._static_names = [f.name for f in fields if state_field not in f.metadata]
        checks = {f.name: f.metadata[checked] for f in fields if checked in f.metadata}
        cls._checks = cls._checks | checks
        jax.tree_util.register_pytree_with_keys(
            cls, cls._flatten_with_keys, cls._unflatten
        )

    def __post_init__(self):
        for name, check in self._checks.items():
            self._set(**{name: check(name, getattr(self, name))})

    def __eq__(self, other: object) -> bool:
        validation.at_hand("==", (self, other))
        if jax.tree.structure(self) != jax.tree.structure(other):
            return False
        return jax.tree.all(jax.tree.map(np.array_equal, self, other))

    def __hash__(self) -> int:
        # Without the state, as a tracer has no hash.
        return hash((type(self), self._values(self._static_names)))

    def _set(self, **values: Any) -> None:
        """Sets fields of an instance under construction, which is frozen later."""
        vars(self).update(values)

    def replace(self, **state: ArrayLike) -> Self:
        """A copy with new values of the named state fields, in the dtypes they had."""
        unknown = sorted(set(state) - set(self._state_names))
        if unknown:
            raise TypeError(
                f"{type(self).__name__} has no state {', '.join(unknown)}; its state "
                f"fields are {', '.join(self._state_names)}. For another "
                "configuration, construct a new one."
            )
        new = copy.copy(self)
        for name, value in state.items():
            dtype = getattr(self, name).dtype
            new._set(**{name: jnp.asarray(value, dtype)})
        return new

    def get_config(self) -> dict[str, Any]:
        """The class's name and its configuration, JSON-able, without the state."""
        arguments = [f.name for f in dataclasses.fields(self) if f.init]
        config = {name: getattr(self, name) for name in arguments}
        return {"class_name": _config_name(type(self)), "config": config}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The loss scale or the skip rule that `get_config` described, in its initial state.

        Args:
          config: `{"class_name": …, "config": {…}}`, naming this class or the last
            subclass defined with that name. One that shares its name with a class of
            this library is named with its module, `my_module.DynamicLossScale`.

        Raises:
          ValueError: for a malformed config, an unknown class, or an unknown or missing
            key.

        Example:
          >>> import optax_lossscale as ols
          >>> config = {"class_name": "FixedLossScale", "config": {"scale": 128.0}}
          >>> ols.LossScale.from_config(config)
          FixedLossScale(128.0)
        """
        with_config = filter(_has_config, cls._classes)
        classes = {_config_name(c): c for c in with_config if issubclass(c, cls)}
        match config:
            case {"class_name": str(name), "config": arguments, **others}:
                if name in classes and not others:
                    return validation.construct(classes[name], arguments)
        raise ValueError(
            f"a {cls._kind}'s config must be a dict with the keys 'class_name' and "
            f"'config', as from get_config(), got {validation.shown(config)}. There "
            f"are {', '.join(sorted(classes))}. Import the module that defines yours "
            "first"
        )

    def _values(self, names: list[str]) -> tuple[Any, ...]:
        """The values of some fields: the state, or the configuration."""
        return tuple(getattr(self, name) for name in names)

    def _flatten_with_keys(self) -> tuple[Any, Any]:
        """The state as leaves with their keys, and the configuration beside it."""
        keys = map(GetAttrKey, self._state_names)
        state = self._values(self._state_names)
        static = self._values(self._static_names)
        return list(zip(keys, state, strict=True)), static

    @classmethod
    def _unflatten(cls, static: Any, state: Any) -> Self:
        """An instance of any leaves, checked by nothing: JAX puts placeholders there."""
        self = cls.__new__(cls)  # `__init__` would start afresh
        names = cls._static_names + cls._state_names
        values = (*static, *state)
        vars(self).update(zip(names, values, strict=True))
        return self


def _config_name(cls: type[Stateful]) -> str:
    """What a config calls a class; the names of this library's own are taken."""
    taken = {c.__name__ for c in Stateful._classes if _is_ours(c)}
    if cls.__name__ in taken and not _is_ours(cls):
        return f"{cls.__module__}.{cls.__qualname__}"
    return cls.__name__


def _has_config(cls: type[Stateful]) -> bool:
    """Whether a config may name a class: no abstract one, and no private one of ours."""
    is_private = _is_ours(cls) and cls.__name__.startswith("_")
    return not is_private and not inspect.isabstract(cls)


def _is_ours(cls: type[Stateful]) -> bool:
    """Whether a class is one of this library's."""
    return cls.__module__.split(".")[0] == "optax_lossscale"
