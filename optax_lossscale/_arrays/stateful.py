"""The base class of loss scales and skip rules: a frozen dataclass that is a pytree.

Its fields are of two kinds. *Configuration*, such as a growth factor, never changes: it
is given to the constructor, checked there, and static under `jit`, part of the tree's
structure. *State*, such as a counter, changes from step to step: it is declared with
`state_field`, and its arrays are the leaves of the tree. `replace` returns a copy with
new state, and `get_config` writes the configuration as a dict.

A subclass needs no decorator, as `__init_subclass__` makes it a dataclass and registers
it with JAX.
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
    """Declares state, a field of a `LossScale` or skip rule that changes at each step.

    The field is an array, and a leaf of the pytree; `replace` changes it.

    Args:
      default: its first value. A bool, int or float becomes a bool, int32 or float32
        scalar, and anything else a copy as an array, of the dtype that `jnp.asarray`
        gives it. Without a default, `__post_init__` sets it.
      init: leave it: from its default, type checkers learn that the constructor takes
        no such argument.

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
    metadata = {"is_state": True}
    if default is dataclasses.MISSING:
        return dataclasses.field(init=False, metadata=metadata)
    # A read-only NumPy value is strongly typed and cannot be donated, so all instances
    # can share it. And to make a JAX array would start a backend, which must not happen
    # before `jax.distributed.initialize`.
    dtype = _DTYPE_OF_PYTHON_NUMBER.get(type(default))
    array = np.array(default, dtype)
    array = array.astype(dtype_of(array))
    array.setflags(write=False)
    value = array[()]  # a scalar, if it has no dimensions
    return dataclasses.field(
        default_factory=lambda: value, init=False, metadata=metadata
    )


def checked(
    check: validation.Check, *, default: Any = dataclasses.MISSING, **allowed: Any
) -> Any:
    """Declares a field of configuration, with the check that `__post_init__` applies.

    `allowed` are the keywords of the check, as in
    `checked(validation.int_between, least=0, most=24)`. The check also applies to a
    subclass that declares the field again without one.
    """
    metadata = {"check": functools.partial(check, **allowed)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(
    frozen_default=True, field_specifiers=(dataclasses.field, state_field, checked)
)
@dataclasses.dataclass(frozen=True, eq=False)
class Stateful(abc.ABC):
    """The base class of loss scales and skip rules.

    Two instances are equal if their class, configuration and state are. To compare the
    state, `==` waits for the device.
    """

    _kind: ClassVar[str]  # "loss scale" or "skip rule", for errors
    _state_names: ClassVar[list[str]]
    _static_names: ClassVar[list[str]]
    _checks: ClassVar[dict[str, validation.Check]] = {}  # of configuration
    _state_checks: ClassVar[dict[str, validation.Check]] = {}
    _classes: ClassVar[list[type[Self]]] = []  # all subclasses, as they were defined

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        register_with_flax(cls)  # which may have been imported just now
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any):
        """Makes a subclass a frozen dataclass, and registers it as a pytree."""
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        cls._classes.append(cls)
        fields = dataclasses.fields(cls)
        cls._state_names = [f.name for f in fields if "is_state" in f.metadata]
        cls._static_names = [f.name for f in fields if "is_state" not in f.metadata]
        checks = {f.name: f.metadata["check"] for f in fields if "check" in f.metadata}
        cls._checks = cls._checks | checks
        jax.tree_util.register_pytree_with_keys(
            cls, cls._flatten_with_keys, cls._unflatten
        )

    def __post_init__(self):
        """Checks the configuration; a subclass that overrides this has to call it."""
        for name, check in self._checks.items():
            value = check(name, getattr(self, name))
            self._set(**{name: value})

    def __eq__(self, other: object) -> bool:
        if jax.tree.structure(self) != jax.tree.structure(other):
            return False
        validation.check_concrete("==", (self, other))
        return jax.tree.all(jax.tree.map(np.array_equal, self, other))

    def __hash__(self) -> int:
        # The state is left out, as arrays and tracers have no hash.
        return hash((type(self), self._configuration()))

    def __repr__(self) -> str:
        names = [f.name for f in dataclasses.fields(self)]
        public = [name for name in names if not name.startswith("_")]
        values = [f"{name}={getattr(self, name)!r}" for name in public]
        listed = ", ".join(values)
        return f"{type(self).__name__}({listed})"

    def _set(self, **values: Any) -> None:
        """Sets fields of an instance that is being made, although it is frozen."""
        vars(self).update(values)

    def replace(self, **state: ArrayLike) -> Self:
        """A copy with new values of the named state fields, in the dtypes they had.

        Args:
          **state: the values by the names of the fields: numbers and arrays, which may
            be traced. Shapes are not checked.

        Returns:
          The copy, in which all else is as it was.

        Raises:
          TypeError: for a name that is no state field.
          ValueError: for a Python number that the field does not allow, such as a
            `loss_scale` of 0.
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
            if isinstance(value, (int, float)):  # checking an array would block
                check(name, value)
        arrays = {
            name: jnp.asarray(value, dtype_of(getattr(self, name)))
            for name, value in state.items()
        }
        new = copy.copy(self)
        new._set(**arrays)
        return new

    def get_config(self) -> dict[str, Any]:
        """The name of the class and its configuration, as a dict for `from_config`.

        The state is not part of it.

        Returns:
          `{"class_name": …, "config": {…}}`. For a class of this library, it fits into
          JSON; for one of your own, it does if the values of its fields do.
        """
        arguments = [f.name for f in dataclasses.fields(self) if f.init]
        config = {name: getattr(self, name) for name in arguments}
        return {"class_name": _config_name(type(self)), "config": config}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The loss scale or skip rule that a dict from `get_config` describes.

        Args:
          config: `{"class_name": …, "config": {…}}`, naming this class or the last
            subclass defined with that name. One that shares its name with a class of
            this library is named with its module, `my_module.DynamicLossScale`.

        Returns:
          An instance of that class, in its initial state.

        Raises:
          ValueError: for a malformed config, an unknown class, or an unknown or missing
            key.

        Example:
          >>> import optax_lossscale as ols
          >>> config = {"class_name": "FixedLossScale", "config": {"scale": 128.0}}
          >>> ols.LossScale.from_config(config)
          FixedLossScale(128.0)
        """
        concrete = [c for c in cls._classes if not inspect.isabstract(c)]
        class_of = {_config_name(c): c for c in concrete if issubclass(c, cls)}
        match config:
            case {"class_name": str(name), "config": arguments, **others} if not others:
                if name in class_of:
                    return construct(class_of[name], arguments)
        names = ", ".join(sorted(class_of))
        raise ValueError(
            f"a {cls._kind}'s config must be a dict with the keys 'class_name' and "
            f"'config', as from get_config(), got {messages.shown(config)}. There "
            f"are {names}. Import the module that defines yours first"
        )

    def _configuration(self) -> tuple[tuple[str, Any], ...]:
        """The names and values of the fields that are static."""
        return tuple((name, getattr(self, name)) for name in self._static_names)

    def _flatten_with_keys(self) -> tuple[Any, Any]:
        """The state as leaves with keys, and the configuration as static data."""
        state = [(GetAttrKey(name), getattr(self, name)) for name in self._state_names]
        return state, self._configuration()

    @classmethod
    def _unflatten(cls, configuration: Any, state: Any) -> Self:
        """An instance with these leaves, unchecked: JAX also passes placeholders."""
        self = cls.__new__(cls)  # as `__init__` would set the initial state
        self._set(**dict(configuration))
        self._set(**dict(zip(cls._state_names, state, strict=True)))
        return self


def construct(cls: Callable[..., Any], config: Any) -> Any:
    """`cls(**config)`, with a `ValueError` that lists the keys if one does not fit."""
    signature = inspect.signature(cls)
    try:
        signature.bind(**config)
    except TypeError as error:
        keys = ", ".join(signature.parameters)
        raise ValueError(
            f"the config of {cls.__name__} must be a dict with keys among {keys}, and "
            f"with those that have no default; got {messages.shown(config)}"
        ) from error
    return cls(**config)


def check_successor(new: Any, old: Stateful, method: str) -> None:
    """Raises a `TypeError` unless `new`, from a user's method, may replace `old`.

    It must have the class and configuration of `old`, and state of the same shapes.
    Dtypes are not checked.
    """
    is_of_its_structure = jax.tree.structure(new) == jax.tree.structure(old)
    shapes = [np.shape(x) for x in jax.tree.leaves(new)]
    old_shapes = [np.shape(x) for x in jax.tree.leaves(old)]
    if not is_of_its_structure or shapes != old_shapes:
        raise TypeError(
            f"{type(old).__name__} must adapt to a {old._kind} of its own type and "
            "configuration, with state of the same shapes: return self.replace(…) from "
            f"{method}. Got {messages.shown(new)}"
        )


def choose(flag: ArrayLike, if_true: T, if_false: T) -> T:
    """`if_true` where the flag is True, else `if_false`, leaf by leaf.

    Both are loss scales, or both skip rules, of the same structure; the flag may be
    traced.
    """
    chosen = functools.partial(jnp.where, flag)
    return jax.tree.map(chosen, if_true, if_false)


def _config_name(cls: type[Stateful]) -> str:
    """The name of a class in a config.

    A class of the user's that has the name of one of this library's is named with its
    module.
    """
    taken = {c.__name__ for c in Stateful._classes if _is_ours(c)}
    if cls.__name__ in taken and not _is_ours(cls):
        return f"{cls.__module__}.{cls.__qualname__}"
    return cls.__name__


def _is_ours(cls: type[Stateful]) -> bool:
    """Whether a class is defined in this library."""
    package = cls.__module__.partition(".")[0]
    return package == "optax_lossscale"
