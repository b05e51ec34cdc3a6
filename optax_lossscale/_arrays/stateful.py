"""The base class of loss scales and skip rules: a frozen dataclass that is a pytree.

A subclass has two kinds of fields::

    class Counting(LossScale):
        limit: int = 10                          # configuration
        overflows: jax.Array = state_field(0)    # state

*Configuration* never changes. The constructor accepts it, `__post_init__` checks it,
and `get_config` returns it as a dict. It is part of the tree's structure, so it is
static under `jit`. *State* changes from step to step. Its arrays are the leaves of the
tree, and `replace` returns a copy with new ones.
"""

import abc
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike

from optax_lossscale._arrays.checks import check_concrete, shown
from optax_lossscale._arrays.precision import T, dtype_of

_DTYPE_OF_PYTHON_NUMBER = {bool: np.bool_, int: np.int32, float: np.float32}


def state_field(
    default: Any = dataclasses.MISSING, *, init: Literal[False] = False
) -> Any:
    """Declares state: an array field of a `LossScale` or skip rule that steps change.

    A compiled step receives the array and returns it, a checkpoint contains it, and
    `replace` returns a copy with a new value of it. A field that is declared without
    `state_field` is configuration: a constant of the compiled step, which `replace`
    refuses to change.

    Args:
      default: the initial value. A bool, int or float becomes a bool, int32 or float32
        scalar. Any other number or array is copied to an array with the dtype that
        `jnp.asarray` would choose. Without a default, `__post_init__` must set the
        field.
      init: leave it at its default, which tells type checkers that the constructor has
        no argument for the field.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> class Counting(ols.LossScale):
      ...     overflows: jax.Array = ols.state_field(0)
      ...
      ...     def adjust(self, grads_finite):
      ...         overflowed = jnp.logical_not(grads_finite)
      ...         return self.replace(overflows=self.overflows + overflowed)
      >>> ls, _ = Counting().update({"w": jnp.array(jnp.inf)})
      >>> print(ls.overflows, ls.overflows.dtype)
      1 int32
    """
    metadata = {"is_state": True}
    if default is dataclasses.MISSING:
        return dataclasses.field(init=False, metadata=metadata)
    # All instances share a NumPy value: it is strongly typed and cannot be donated. A
    # JAX array would start a backend, which must not happen before
    # `jax.distributed.initialize`.
    array = np.array(default, _DTYPE_OF_PYTHON_NUMBER.get(type(default)))
    array = array.astype(dtype_of(array))
    array.setflags(write=False)
    value = array[()]  # a NumPy scalar if the array has no dimensions
    return dataclasses.field(
        default_factory=lambda: value, init=False, metadata=metadata
    )


@dataclass_transform(
    frozen_default=True, field_specifiers=(dataclasses.field, state_field)
)
@dataclasses.dataclass(frozen=True, eq=False)
class Stateful(abc.ABC):
    """The base class of loss scales and skip rules.

    Two instances are equal if they have the same class, configuration and state. `==`
    waits for the device, or raises a `TypeError` if the state is traced.
    """

    _kind: ClassVar[str]  # "loss scale" or "skip rule", for errors
    _state_names: ClassVar[list[str]]
    _static_names: ClassVar[list[str]]  # of the configuration

    def __init_subclass__(cls, **kwargs: Any):
        """Makes a subclass a frozen dataclass and registers it as a pytree."""
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        # `jax.tree_util.register_dataclass` would call the constructor, with its checks.
        fields = dataclasses.fields(cls)
        cls._state_names = [f.name for f in fields if "is_state" in f.metadata]
        cls._static_names = [f.name for f in fields if "is_state" not in f.metadata]
        jax.tree_util.register_pytree_with_keys(
            cls, cls._flatten_with_keys, cls._unflatten
        )

    def __post_init__(self):  # noqa: B027
        """Checks the configuration; a subclass that overrides this must call it."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stateful):
            return NotImplemented
        if jax.tree.structure(self) != jax.tree.structure(other):
            return False
        check_concrete("==", (self, other))
        return jax.tree.all(jax.tree.map(np.array_equal, self, other))

    def __hash__(self) -> int:
        # The state is left out, because arrays and tracers are not hashable.
        return hash((type(self), self._configuration()))

    def __repr__(self) -> str:
        names = [f.name for f in dataclasses.fields(self) if f.name[0] != "_"]
        listed = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({listed})"

    def _set(self, **values: Any) -> None:
        """Sets fields although the class is frozen; for an instance being created."""
        vars(self).update(values)

    def _check(self, name: str, check: Callable[..., Any], *allowed: Any) -> None:
        """Checks a field of configuration, and stores what the check returns."""
        self._set(**{name: check(name, getattr(self, name), *allowed)})

    def replace(self, **state: ArrayLike) -> Self:
        """Returns a copy with new values of some state fields.

        Numbers and arrays are cast to the dtypes of the old values, so that the step is
        not compiled again. A name that is not a state field is a `TypeError`.
        """
        unknown = sorted(set(state) - set(self._state_names))
        if unknown:
            known = ", ".join(self._state_names) or "none"
            raise TypeError(
                f"{type(self).__name__} has no state {', '.join(unknown)}; its state "
                f"fields are {known}. For another configuration, construct a new one"
            )
        new = copy.copy(self)
        for name, value in state.items():
            new._set(**{name: jnp.asarray(value, dtype_of(getattr(self, name)))})
        return new

    def get_config(self) -> dict[str, Any]:
        """Returns the class name and the configuration, as a dict for `from_config`.

        It does not contain the state. It can be stored as JSON if the values of the
        configuration can, as those of this library's classes.
        """
        fields = dataclasses.fields(self)
        config = {f.name: getattr(self, f.name) for f in fields if f.init}
        return {"class_name": _config_name(type(self)), "config": config}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Builds the loss scale or skip rule that a dict from `get_config` describes.

        Args:
          config: `{"class_name": …, "config": {…}}`, with the name of this class or of
            a subclass. If several classes have the name, the last one defined is built.

        Raises:
          ValueError: if `config` is malformed, the class is unknown, or a key of the
            inner dict is unknown or missing.

        Example:
          >>> import optax_lossscale as ols
          >>> config = {"class_name": "FixedLossScale", "config": {"scale": 128.0}}
          >>> ols.LossScale.from_config(config)
          FixedLossScale(128.0)
        """
        classes = [c for c in _family(cls) if not inspect.isabstract(c)]
        class_of_name = {_config_name(c): c for c in classes}
        match config:
            case {"class_name": str(name), "config": arguments, **rest} if (
                name in class_of_name and not rest
            ):
                return _construct(class_of_name[name], arguments)
        raise ValueError(
            f"a {cls._kind}'s config must be a dict with the keys 'class_name' and "
            f"'config', as from get_config(), got {shown(config)}. The known "
            f"classes are {', '.join(sorted(class_of_name))}. Import the module that "
            "defines yours first"
        )

    def _configuration(self) -> tuple[tuple[str, Any], ...]:
        return tuple((name, getattr(self, name)) for name in self._static_names)

    def _flatten_with_keys(self) -> tuple[Any, Any]:
        state = [(GetAttrKey(name), getattr(self, name)) for name in self._state_names]
        return state, self._configuration()

    @classmethod
    def _unflatten(cls, configuration: Any, state: Any) -> Self:
        """Builds an instance without checks, as JAX passes placeholders, too."""
        self = cls.__new__(cls)  # `__init__` would set the initial state
        self._set(**dict(configuration))
        self._set(**dict(zip(cls._state_names, state, strict=True)))
        return self


def choose(flag: ArrayLike, if_true: T, if_false: T) -> T:
    """Returns `if_true` if the flag is True, else `if_false`; the flag may be traced.

    Both are loss scales or both are skip rules, with the same structure.
    """
    return jax.tree.map(functools.partial(jnp.where, flag), if_true, if_false)


def _construct(cls: Callable[..., Any], config: Any) -> Any:
    """Calls `cls(**config)`, or raises a `ValueError` that lists the possible keys."""
    signature = inspect.signature(cls)
    try:
        signature.bind(**config)
    except TypeError as error:
        keys = ", ".join(signature.parameters)
        raise ValueError(
            f"the config of {cls.__name__} must be a dict with keys among {keys}, got "
            f"{shown(config)}. Keys without a default are required"
        ) from error
    return cls(**config)


def _family(cls: type[Stateful]) -> list[type[Stateful]]:
    """Returns a class and its subclasses, at any depth, in order of definition."""
    subclasses = cls.__subclasses__()
    return [cls, *(c for subclass in subclasses for c in _family(subclass))]


def _config_name(cls: type[Stateful]) -> str:
    """Returns the name of a class in a config.

    A user's class with the name of one of ours is named with its module.
    """
    our_names = {c.__name__ for c in _family(Stateful) if _is_ours(c)}
    if cls.__name__ in our_names and not _is_ours(cls):
        return f"{cls.__module__}.{cls.__qualname__}"
    return cls.__name__


def _is_ours(cls: type[Stateful]) -> bool:
    """Whether a class is defined in this library."""
    return cls.__module__.partition(".")[0] == "optax_lossscale"
