"""A frozen dataclass that is a pytree: configuration that is static, and state that changes."""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NoReturn, Self, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.flax_serialization import register_with_flax

Check = Callable[[str, Any], Any]


def state_field(
    default: Any = dataclasses.MISSING, *, init: Literal[False] = False
) -> Any:
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
    # NumPy values: strongly typed, impossible to donate away, and made without starting
    # a JAX backend, which must not happen before `jax.distributed.initialize`.
    metadata = {state_field: True}
    if default is dataclasses.MISSING:
        return dataclasses.field(init=init, metadata=metadata)
    dtype = {bool: np.bool_, int: np.int32, float: np.float32}.get(type(default))
    array = np.asarray(default, dtype)
    if not jnp.issubdtype(array.dtype, jnp.number) and array.dtype != np.bool_:
        got = validation.shown(default)
        raise TypeError(
            f"a state must start as a number or an array of numbers, got {got}"
        )
    value = array[()]  # a scalar, if it has no dimensions
    return dataclasses.field(
        default_factory=lambda: value, init=init, metadata=metadata
    )


def checked(check: Check, *, default: Any = dataclasses.MISSING) -> Any:
    """Declares a field that its check converts, even if a subclass declares it anew."""
    return dataclasses.field(default=default, metadata={checked: check})


class _Frozen:
    """Refuses every assignment to a field, and its deletion, as a frozen dataclass does."""

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


@dataclass_transform(
    frozen_default=True, field_specifiers=(dataclasses.field, state_field, checked)
)
@dataclasses.dataclass(frozen=True, eq=False)
class Stateful(_Frozen, abc.ABC):
    """The base class of loss scales and skip rules; comparing two blocks on the device."""

    _kind: ClassVar[str]  # what one is called in an error
    _state_names: ClassVar[list[str]]
    _static_names: ClassVar[list[str]]
    _checks: ClassVar[dict[str, Check]] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        register_with_flax(cls)
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _make_frozen_dataclass(cls)
        fields = dataclasses.fields(cls)
        cls._state_names = [f.name for f in fields if state_field in f.metadata]
        cls._static_names = [f.name for f in fields if state_field not in f.metadata]
        checks = {f.name: f.metadata[checked] for f in fields if checked in f.metadata}
        cls._checks = cls._checks | checks
        cls.__init__ = _complete_init(cls)
        jax.tree_util.register_pytree_with_keys(
            cls, cls._flatten_with_keys, cls._unflatten
        )

    def __post_init__(self):
        for name, check in self._checks.items():
            self._set(**{name: check(name, getattr(self, name))})

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        validation.at_hand("==", (self, other))
        leaves, structure = jax.tree.flatten(self)
        other_leaves, other_structure = jax.tree.flatten(other)
        if structure != other_structure:
            return False
        return all(map(np.array_equal, leaves, other_leaves))

    def __hash__(self) -> int:
        return hash((type(self), self._static()))  # a tracer in the state has no hash

    def _set(self, **values: Any) -> None:
        """Sets fields of an instance under construction, which is frozen later."""
        vars(self).update(values)

    def replace(self, **state: jax.typing.ArrayLike) -> Self:
        """A copy with new values of the named state fields, in the dtypes they had."""
        unknown = sorted(set(state) - set(self._state_names))
        if unknown:
            known = "it has none, as it never changes"
            if self._state_names:
                known = f"its state fields are {', '.join(self._state_names)}"
            raise TypeError(
                f"{type(self).__name__} has no state {', '.join(unknown)}; {known}. "
                "For another configuration, construct a new one."
            )
        attributes = dict(vars(self))
        for name, value in state.items():
            attributes[name] = _as_state(name, value, getattr(self, name).dtype)
        return self._with_attributes(attributes)

    def get_config(self) -> dict[str, Any]:
        """The class's name and its configuration, JSON-able, without the state."""
        config = {}
        for field in dataclasses.fields(self):
            if field.init:
                value = getattr(self, field.name)
                is_tree = dataclasses.is_dataclass(value)
                config[field.name] = dataclasses.asdict(value) if is_tree else value
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
        if not isinstance(config, dict) or set(config) != {"class_name", "config"}:
            allowed = (
                "a dict with the keys 'class_name' and 'config', as from get_config()"
            )
            validation.refuse(f"a {cls._kind}'s config", config, allowed)
        concrete = [c for c in _subclasses(cls) if not inspect.isabstract(c)]
        classes = {_config_name(c): c for c in concrete}
        name = config["class_name"]
        if not isinstance(name, str) or name not in classes:
            known = ", ".join(sorted(classes))
            raise ValueError(
                f"no {cls._kind} is named {validation.shown(name)}; there are {known}. "
                "Import the module that defines yours first."
            )
        return validation.construct(classes[name], config["config"])

    def _static(self) -> tuple[tuple[str, Any], ...]:
        """The configuration, which can be hashed and compared."""
        return tuple((name, getattr(self, name)) for name in self._static_names)

    def _flatten_with_keys(self) -> tuple[Any, Any]:
        """The state as leaves with their keys, and the configuration beside it."""
        leaves = [(GetAttrKey(name), getattr(self, name)) for name in self._state_names]
        return leaves, self._static()

    @classmethod
    def _unflatten(cls, static: Any, leaves: Any) -> Self:
        """An instance of any leaves, checked by nothing: JAX puts placeholders there."""
        state = zip(cls._state_names, leaves, strict=True)
        return cls._with_attributes([*static, *state])

    @classmethod
    def _with_attributes(cls, attributes: Any) -> Self:
        """An instance made without `__init__`, which would start afresh."""
        self = cls.__new__(cls)
        vars(self).update(attributes)
        return self


def _make_frozen_dataclass(cls: type[Stateful]) -> None:
    """Makes a class a frozen dataclass, so that its author may still decorate it as one."""
    attributes = vars(cls).items()
    declared = {k: x for k, x in attributes if isinstance(x, dataclasses.Field)}
    dataclasses.dataclass(frozen=True, eq=False)(cls)
    # A second `dataclass(frozen=True)` would refuse to replace these two; `_Frozen` has
    # others.
    del cls.__setattr__, cls.__delattr__
    # It replaces what is only inherited.
    for name in ("__eq__", "__hash__"):
        setattr(cls, name, getattr(cls, name))
    # It looks for the fields where the first has deleted them.
    for name, field in declared.items():
        if name not in vars(cls):
            setattr(cls, name, field)


def _complete_init(cls: type[Stateful]) -> Callable[..., None]:
    """The class's `__init__`, which then says what a `__post_init__` has left out."""
    init: Callable[..., None] = cls.__init__

    @functools.wraps(init)
    def complete_init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        unset = [name for name in cls._state_names if name not in vars(self)]
        if unset and type(self) is cls:
            raise TypeError(
                f"{cls.__name__} was made without its state {', '.join(unset)}. A "
                "__post_init__ must call super().__post_init__(), and set each "
                "state_field() that has no default: object.__setattr__(self, name, "
                "value)"
            )

    return complete_init


def _subclasses(cls: type[Stateful]) -> list[type[Stateful]]:
    """A class and all that derive from it, in the order of their definition."""
    subclasses = [cls]
    for child in cls.__subclasses__():
        subclasses += _subclasses(child)
    return subclasses


def _config_name(cls: type[Stateful]) -> str:
    """What a config calls a class; see `from_config`."""
    taken = {c.__name__ for c in _subclasses(Stateful) if _is_ours(c)}
    if cls.__name__ in taken and not _is_ours(cls):
        return f"{cls.__module__}.{cls.__qualname__}"
    return cls.__name__


def _is_ours(cls: type[Stateful]) -> bool:
    """Whether a class is one of this library's, whose names are taken."""
    package, *_ = cls.__module__.split(".")
    return package == "optax_lossscale"


def _as_state(name: str, value: Any, dtype: Any) -> jax.Array:
    """A new value for a state field, in its dtype."""
    try:
        return jnp.asarray(value, dtype)
    except (TypeError, ValueError) as error:
        allowed = f"an array of {dtype}"
        got = validation.shown(value)
        raise TypeError(f"the state {name} must be {allowed}, got {got}") from error
