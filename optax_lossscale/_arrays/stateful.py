"""The base class of loss scales and skip rules: a frozen dataclass that is a pytree.

A subclass has two kinds of fields::

    class Counting(LossScale):
        limit: int = 10                          # configuration
        overflows: jax.Array = state_field(0)    # state

*Configuration* never changes. The constructor accepts and checks it, and `get_config`
returns it as a dict. It is part of the tree's structure, so it is static under `jit`.
*State* changes from step to step. Its arrays are the leaves of the tree, and `replace`
returns a copy with new ones.

A subclass needs no decorator: `__init_subclass__` makes it a dataclass and registers it
with JAX.
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

from optax_lossscale._arrays import messages, validation
from optax_lossscale._arrays.flax_serialization import register_with_flax
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
        field, as it must for a typed PRNG key.
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
    # All instances share a read-only NumPy value, because it is strongly typed and
    # cannot be donated. A JAX array would start a backend when it is created, which
    # must not happen before `jax.distributed.initialize`.
    dtype = _DTYPE_OF_PYTHON_NUMBER.get(type(default))
    array = np.array(default, dtype)
    array = array.astype(dtype_of(array))
    array.setflags(write=False)
    value = array[()]  # a NumPy scalar if the array has no dimensions
    return dataclasses.field(
        default_factory=lambda: value, init=False, metadata=metadata
    )


def checked(
    check: validation.Check, *, default: Any = dataclasses.MISSING, **allowed: Any
) -> Any:
    """Declares a field of configuration with a check, which `__post_init__` calls.

    The other keywords are passed to the check, as in
    `checked(validation.int_between, least=0, most=24)`. If a subclass declares the
    field again without a check, for example with another default, the field keeps this
    check.
    """
    metadata = {"check": functools.partial(check, **allowed)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(
    frozen_default=True, field_specifiers=(dataclasses.field, state_field, checked)
)
@dataclasses.dataclass(frozen=True, eq=False)
class Stateful(abc.ABC):
    """The base class of loss scales and skip rules.

    Two instances are equal if they have the same class, configuration and state. `==`
    compares the state only if class and configuration are equal. It then waits for the
    device, or raises a `TypeError` if the state is traced.

    Attributes:
      _kind: "loss scale" or "skip rule", for errors.
      _state_names: the names of the state fields, in order.
      _static_names: the names of the configuration fields, in order.
      _checks: the check of each configuration field that has one, by its name.
      _state_checks: the checks of Python numbers and NumPy scalars that are passed to
        `replace`, by the name of the state field.
      _classes: all subclasses, in order of definition; one list for all of them.
    """

    _kind: ClassVar[str]
    _state_names: ClassVar[list[str]]
    _static_names: ClassVar[list[str]]
    _checks: ClassVar[dict[str, validation.Check]] = {}
    _state_checks: ClassVar[dict[str, validation.Check]] = {}
    _classes: ClassVar[list[type[Self]]] = []

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        register_with_flax(cls)  # Flax may have been imported after the class.
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any):
        """Makes a subclass a frozen dataclass and registers it as a pytree."""
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        cls._classes.append(cls)
        cls._list_fields()
        jax.tree_util.register_pytree_with_keys(
            cls, cls._flatten_with_keys, cls._unflatten, cls._flatten
        )

    @classmethod
    def _list_fields(cls) -> None:
        """Lists the names of state and configuration, and the configuration's checks.

        `_checks` begins as a copy of the base class's, so a field that is declared
        again without a check keeps its check.
        """
        cls._state_names = []
        cls._static_names = []
        cls._checks = dict(cls._checks)
        for field in dataclasses.fields(cls):
            if "is_state" in field.metadata:
                cls._state_names.append(field.name)
            else:
                cls._static_names.append(field.name)
            if "check" in field.metadata:
                cls._checks[field.name] = field.metadata["check"]

    def __post_init__(self):
        """Checks the configuration; a subclass that overrides this must call it."""
        for name, check in self._checks.items():
            value = check(name, getattr(self, name))
            self._set(**{name: value})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stateful):
            return NotImplemented
        if jax.tree.structure(self) != jax.tree.structure(other):
            return False
        validation.check_concrete("==", (self, other))
        are_equal = jax.tree.map(np.array_equal, self, other)
        return jax.tree.all(are_equal)

    def __hash__(self) -> int:
        # The state is left out, because arrays and tracers are not hashable.
        return hash((type(self), self._configuration()))

    def __repr__(self) -> str:
        values = []
        for field in dataclasses.fields(self):
            if not field.name.startswith("_"):
                values.append(f"{field.name}={getattr(self, field.name)!r}")
        listed = ", ".join(values)
        return f"{type(self).__name__}({listed})"

    def _set(self, **values: Any) -> None:
        """Sets fields although the class is frozen; for an instance being created."""
        vars(self).update(values)

    def replace(self, **state: ArrayLike) -> Self:
        """Returns a copy with new values of some state fields.

        The new values are cast to the dtypes of the old ones, so that the step is not
        compiled again.

        Args:
          **state: the new values by field name. They may be numbers or arrays, also
            traced ones. Their shapes are not checked.

        Returns:
          The copy. All other fields are unchanged.

        Raises:
          TypeError: for a name that is not a state field.
          ValueError: for a Python number or NumPy scalar that the field does not
            allow, such as a `loss_scale` of 0; arrays are not checked.
        """
        unknown = sorted(set(state) - set(self._state_names))
        if unknown:
            known = ", ".join(self._state_names) or "none"
            raise TypeError(
                f"{type(self).__name__} has no state {', '.join(unknown)}; its state "
                f"fields are {known}. For another configuration, construct a new one"
            )
        for name, check in self._state_checks.items():
            value = state.get(name)
            # Reading an array would wait for the device.
            if isinstance(value, (int, float, np.generic)):
                check(name, value)
        arrays = {}
        for name, value in state.items():
            old_dtype = dtype_of(getattr(self, name))
            arrays[name] = jnp.asarray(value, old_dtype)
        new = copy.copy(self)
        new._set(**arrays)
        return new

    def get_config(self) -> dict[str, Any]:
        """Returns the class name and the configuration, as a dict for `from_config`.

        The dict does not contain the state.

        Returns:
          A dict with the keys "class_name" and "config". It can be stored as JSON for a
          class of this library, and for a class of your own if its field values can be.
        """
        config = {}
        for field in dataclasses.fields(self):
            if field.init:
                config[field.name] = getattr(self, field.name)
        return {"class_name": _config_name(type(self)), "config": config}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Builds the loss scale or skip rule that a dict from `get_config` describes.

        Args:
          config: `{"class_name": …, "config": {…}}`, with the name of this class or of
            a subclass. If several classes have the name, the last one defined is built.
            If your class has the name of a class of this library, put its module before
            the name, as in `my_module.DynamicLossScale`. `get_config` does so.

        Returns:
          An instance of that class, in its initial state.

        Raises:
          ValueError: if `config` is malformed, or the class is unknown.
          ValueError: if a key of the inner dict is unknown or missing.

        Example:
          >>> import optax_lossscale as ols
          >>> config = {"class_name": "FixedLossScale", "config": {"scale": 128.0}}
          >>> ols.LossScale.from_config(config)
          FixedLossScale(128.0)
        """
        class_of_name = {}
        for subclass in cls._classes:
            if issubclass(subclass, cls) and not inspect.isabstract(subclass):
                class_of_name[_config_name(subclass)] = subclass
        match config:
            case {"class_name": str(name), "config": arguments, **rest} if (
                name in class_of_name and not rest
            ):
                return construct(class_of_name[name], arguments)
        names = ", ".join(sorted(class_of_name))
        raise ValueError(
            f"a {cls._kind}'s config must be a dict with the keys 'class_name' and "
            f"'config', as from get_config(), got {messages.shown(config)}. The known "
            f"classes are {names}. Import the module that defines yours first"
        )

    def _configuration(self) -> tuple[tuple[str, Any], ...]:
        """Returns the names and values of the configuration fields."""
        return tuple((name, getattr(self, name)) for name in self._static_names)

    def _flatten(self) -> tuple[Any, Any]:
        """Returns the state and the configuration, faster than with keys."""
        state = [getattr(self, name) for name in self._state_names]
        return state, self._configuration()

    def _flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the state, as leaves with keys, and the configuration."""
        state, configuration = self._flatten()
        keys = map(GetAttrKey, self._state_names)
        return list(zip(keys, state, strict=True)), configuration

    @classmethod
    def _unflatten(cls, configuration: Any, state: Any) -> Self:
        """Builds an instance without checks, as JAX passes placeholders, too."""
        self = cls.__new__(cls)  # `__init__` would set the initial state
        state_by_name = dict(zip(cls._state_names, state, strict=True))
        self._set(**dict(configuration), **state_by_name)
        return self


def construct(cls: Callable[..., Any], config: Any) -> Any:
    """Calls `cls(**config)`, or raises a `ValueError` that lists the possible keys."""
    signature = inspect.signature(cls)
    try:
        signature.bind(**config)
    except TypeError as error:
        keys = ", ".join(signature.parameters)
        raise ValueError(
            f"the config of {cls.__name__} must be a dict with keys among {keys}, got "
            f"{messages.shown(config)}. Keys without a default are required"
        ) from error
    return cls(**config)


def check_successor(new: Any, old: Stateful, method: str) -> None:
    """Raises a `TypeError` unless `new` may replace `old` in the state of a step.

    A user's `method` has returned `new`. It must have the class and configuration of
    `old`, and state of the same shapes. Dtypes are not checked.
    """
    leaves, structure = jax.tree.flatten(new)
    old_leaves, old_structure = jax.tree.flatten(old)
    shapes = list(map(np.shape, leaves))
    old_shapes = list(map(np.shape, old_leaves))
    if structure != old_structure or shapes != old_shapes:
        raise TypeError(
            f"the {old._kind} that {type(old).__name__}.{method} returns must have the "
            "class and configuration of the old one, and state of the same shapes. "
            f"Make it with self.replace(…). Got {messages.shown(new)}"
        )


def choose(flag: ArrayLike, if_true: T, if_false: T) -> T:
    """Returns `if_true` if the flag is True, else `if_false`; the flag may be traced.

    Both are loss scales or both are skip rules, with the same structure. Each leaf is
    chosen by `jnp.where`.
    """
    choose_leaf = functools.partial(jnp.where, flag)
    return jax.tree.map(choose_leaf, if_true, if_false)


def as_flag(flag: Any, owner: Stateful, method: str) -> jax.Array:
    """Converts the flag that a user's `method` of `owner` returned to a bool, shape ().

    Raises a `TypeError` if the flag has axes.
    """
    flag = jnp.asarray(flag, bool)
    if flag.shape:
        raise TypeError(
            f"{method} of {type(owner).__name__} must return one flag for the step, of "
            f"shape (), got shape {flag.shape}. Reduce it with jnp.all"
        )
    return flag


def _config_name(cls: type[Stateful]) -> str:
    """Returns the name of a class in a config.

    If a user's class has the name of one of ours, the name begins with its module.
    """
    our_names = {c.__name__ for c in Stateful._classes if _is_ours(c)}
    if cls.__name__ in our_names and not _is_ours(cls):
        return f"{cls.__module__}.{cls.__qualname__}"
    return cls.__name__


def _is_ours(cls: type[Stateful]) -> bool:
    """Whether a class is defined in this library."""
    package = cls.__module__.partition(".")[0]
    return package == "optax_lossscale"
