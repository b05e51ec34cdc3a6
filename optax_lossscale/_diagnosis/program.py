"""The gradients of a loss function as it was written, and as it would be in float32."""

from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.precision import at_least_float32, dtype_of, is_inexact
from optax_lossscale._diagnosis.summary import inexact_leaves
from optax_lossscale._diagnosis.widened import evaluate, held_dtype, switching, watching
from optax_lossscale._programs.run import numbered
from optax_lossscale._programs.values import HALVES, dtype_in
from optax_lossscale._programs.walk import Equation, equations
from optax_lossscale._step.gradient import UNSCALED, loss_of, scale_gradient

# For some twenty runs, a program is compiled without optimizing its kernels, in a fifth of the
# time. Where it rounds is decided before that. The names are those of XLA's CPU compiler.
_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


class Evidence(NamedTuple):
    """The results of one run at one loss scale, on the host."""

    loss: np.ndarray  # not scaled, in its own dtype
    grads: dict[str, np.ndarray]  # of each floating-point or complex leaf under its path, scaled
    taps: Any  # what the probes recorded

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are."""
        return all(np.isfinite(x).all() for x in (self.loss, *self.grads.values()))


def gradients(loss_fn, has_aux, exponent, params, probes, args, kwargs) -> Evidence:
    """The gradients of a loss function, at a loss scale of `2**exponent`."""

    def scaled_fn(params, probes):  # not value_and_scaled_grad, which refuses modules
        given = {} if probes is None else {"probes": probes}
        with UNSCALED(True):
            loss = loss_of(loss_fn(params, *args, **given, **kwargs), has_aux)
        wide = at_least_float32(loss)  # scale_gradient would warn; the page says it
        return scale_gradient(wide, jnp.ldexp(jnp.float32(1), exponent)), jnp.asarray(loss)

    gradient = jax.grad(scaled_fn, argnums=(0, 1), has_aux=True, allow_int=True)
    (grads, taps), loss = gradient(params, probes)
    return Evidence(loss, inexact_leaves(grads), taps)


class Program:
    """The gradients of a loss function at any loss scale, as written and in float32."""

    def __init__(self, loss_fn: Callable[..., Any], has_aux: bool, *inputs: Any):
        self.inputs = inputs  # parameters, probes, and the function's arguments, also by keyword
        traced = jax.jit(partial(gradients, loss_fn, has_aux)).trace(np.int32(0), *inputs)
        self.jaxpr, self._result = traced.jaxpr, jax.tree.structure(traced.out_info)
        self.loss_dtype = jnp.dtype(traced.out_info.loss.dtype)
        places = {id(e.eqn): e for e in equations(self.jaxpr.jaxpr)}
        # Those that hold no others, in the order of their numbers.
        self.equations: list[Equation] = [places[id(eqn)] for eqn in numbered(self.jaxpr)]
        dtypes = dict.fromkeys(dtype_in(v) for e in self.equations for v in e.eqn.outvars)
        self.narrow = tuple(dtype for dtype in dtypes if dtype in HALVES)
        as_written = _compiled(traced.lower())
        # The evidence as written, at a loss scale of `2**e`, and in float32, at one of 1.
        self.at = cache(lambda e: jax.device_get(as_written(np.int32(e), *inputs)))
        in_float32 = jax.jit(lambda *leaves: evaluate(self.jaxpr, leaves))
        self._in_float32 = _compiled(in_float32.lower(*self._leaves(0)))
        self.not_widened = [self.equations[n] for n in self._in_float32.out_info[1]]
        self._under = cache(self._compiled_under)
        self.truth = self._evidence(self._in_float32(*self._leaves(0))[0])

    def moved(self, part: float, seed: int) -> Evidence:
        """In float32, with a `part` of each parameter added or subtracted at random."""
        leaves, signs = self._leaves(0), np.random.default_rng(seed)
        is_moved = [False, *map(is_inexact, jax.tree.leaves(self.inputs[0]))]
        for i in np.flatnonzero(is_moved):
            x = np.asarray(leaves[i])
            leaves[i] = _like(leaves[i], x * (1 + part * signs.choice([-1, 1], x.shape)))
        return self._evidence(self._in_float32(*leaves)[0])

    def switched(self, exponent: int, modes: np.ndarray) -> Evidence:
        """With each result rounded as its mode says."""
        return self._evidence(self._under(None)(modes, *self._leaves(exponent))[0])

    def watched(
        self, exponent: int, mode: int, healed: Collection[int] = ()
    ) -> tuple[Evidence, dict[int, int]]:
        """In one mode, with 0 for non-finite results of `healed`; and what kinds each makes."""
        is_healed = np.isin(np.arange(len(self.equations)), list(healed))
        outs, made = self._under(mode)(is_healed, *self._leaves(exponent))
        return self._evidence(outs), {n: int(m) for n, m in jax.device_get(made).items() if m}

    def _compiled_under(self, mode: int | None) -> jax.stages.Compiled:
        """The program to be watched in a mode, or to be switched if that is None."""
        rule = switching if mode is None else partial(watching, mode)
        given = np.zeros(len(self.equations), np.int32 if mode is None else bool)
        of = lambda given, *leaves: evaluate(self.jaxpr, leaves, rule(given))
        # The compiler must not drop a rounding to 16 bits and back.
        lowered = jax.jit(of).lower(given, *self._leaves(0))
        return _compiled(lowered, xla_allow_excess_precision=False)

    def _leaves(self, exponent: int) -> list[Any]:
        """The arguments of the program, 16-bit floats as float32."""
        held = lambda x: _like(x, np.asarray(x)) if dtype_of(x) in HALVES else x
        return [np.int32(exponent), *map(held, jax.tree.leaves(self.inputs))]

    def _evidence(self, outs: list[Any]) -> Evidence:
        return jax.device_get(jax.tree.unflatten(self._result, outs))


def _like(x: Any, new: np.ndarray) -> Any:
    """A new array on the devices of an old one, in the dtype in which its numbers are held."""
    new = new.astype(held_dtype(dtype_of(x)))
    is_placed = isinstance(x, jax.Array) and x.committed
    return jax.device_put(new, x.sharding) if is_placed else new


def _compiled(lowered: Any, **options: Any) -> jax.stages.Compiled:
    """A program compiled quickly rather than optimized."""
    quickly = _QUICKLY if jax.default_backend() == "cpu" else {}
    try:
        return lowered.compile({**quickly, **options})
    except jax.errors.JaxRuntimeError:  # from a version that does not know these options
        return lowered.compile(options)
