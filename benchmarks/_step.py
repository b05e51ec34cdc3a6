"""What loss scaling adds to a step on this machine: time, memory, time to compile."""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from benchmarks import _environment, _hlo, _measure, _table, _transformer, _ways

ADAMW = optax.adamw(1e-3)


def main(options: argparse.Namespace) -> None:
    """Prints a table for each program."""
    print(_environment.here())
    for name in options.only or TABLES:
        print("\n" + TABLES[name](name, options.quick), flush=True)


def whole_step(name: str, quick: bool) -> str:
    """A small transformer, from a batch of few tokens to new parameters.

    The model casts its parameters to float16 itself, but in the last two rows.
    """
    plain, ours = _ways.plain(ADAMW), _ways.apply_gradients(ADAMW)
    wide = _transformer.float32_loss
    steps = {
        name: (way.init, way.train(_transformer.loss))
        for name, way in _ways.ways(ADAMW).items()
    }
    steps["apply_gradients, autocast"] = ours.init, ours.train(ols.autocast(wide))
    steps["no loss scaling, float32"] = plain.init, plain.train(wide)
    init = lambda: _transformer.init(*((64, 1) if quick else (512, 4)))
    return _Steps(steps, init, _transformer.tokens(4)).table(name, quick, compiles=3)


def optimizer_step(name: str, quick: bool, *, dtype: str) -> str:
    """From given gradients to new parameters: AdamW, 32 million in 100 leaves."""
    count, shape = (4, (64, 64)) if quick else (100, (640, 512))
    leaf = np.random.default_rng(0).standard_normal(shape, np.float32)
    tree = lambda dtype: [jnp.array(leaf, dtype) for _ in range(count)]
    steps = {name: (way.init, way.step) for name, way in _ways.ways(ADAMW).items()}
    # JMP takes a minute to compile, so that is done for one of the dtypes.
    compiles = 2 if dtype == "float32" else 0
    measured = _Steps(steps, lambda: tree("float32"), tree(dtype))
    return measured.table(name, quick, compiles=compiles)


_given = lambda dtype: functools.partial(optimizer_step, dtype=dtype)
TABLES: dict[str, Callable[[str, bool], str]] = {
    "whole step": whole_step,
    "optimizer step, float32 gradients": _given("float32"),
    "optimizer step, float16 gradients": _given("float16"),
}


class _Steps:
    """Compiled ways to take a step, which donate the same parameters and state by turns.

    They share the arrays, as an array's place in memory can cost a tenth of a step.

    Args:
      steps: of each way the optimizer's `init(params)`, and `step(params, state, batch)`.
      init: draws the parameters.
      batch: what a step is taken on.
    """

    def __init__(
        self,
        steps: dict[str, tuple[Callable[..., Any], Callable[..., Any]]],
        init: Callable[[], Any],
        batch: Any,
    ):
        self.batch = batch
        self.parameter_bytes = sum(x.nbytes for x in jax.tree.leaves(init()))
        self.compile, self.programs, self.rest = {}, {}, {}
        for name, (init_state, step) in steps.items():
            params = init()
            carry = params, init_state(params)
            of = jax.eval_shape(lambda x: x, (*carry, batch))
            self.compile[name] = functools.partial(_compiled, step, of)
            self.programs[name] = self.compile[name]()
            self._put(name, carry)

    def take(self, name: str) -> Any:
        """Takes a step in this way."""
        treedef, scalars = self.rest[name]
        arrays = iter(self.arrays)
        leaves = [next(arrays) if x is None else x for x in scalars]
        params, state, *loss = self.programs[name](
            *jax.tree.unflatten(treedef, leaves), self.batch
        )
        self._put(name, (params, state))
        return params, state, loss

    def _put(self, name: str, carry: tuple[Any, Any]) -> None:
        """Lays the arrays where all ways find them, and the way's own scalars aside."""
        leaves, treedef = jax.tree.flatten(carry)
        self.arrays = [x for x in leaves if x.ndim]
        self.rest[name] = treedef, [None if x.ndim else x for x in leaves]

    def table(self, title: str, quick: bool, *, compiles: int = 0) -> str:
        """Runs all of them by turns, and compiles them again so many times."""
        cases = {name: functools.partial(self.take, name) for name in self.programs}
        times = _measure.alternate(cases, 2 if quick else 40)
        temporary = {k: _hlo.of(p).temp_bytes for k, p in self.programs.items()}
        base, *_ = temporary.values()
        rows = {}
        for name, (seconds, ratio, (low, high)) in times.items():
            extra = round(100 * (temporary[name] - base) / self.parameter_bytes)
            rows[name] = [f"{ratio:.2f} ({low:.2f} to {high:.2f})"]
            rows[name] += [f"{1000 * seconds:.1f}", f"{extra}%"]
        columns = [title, "time", "ms", "extra memory"]
        if compiles:
            columns.append("s to compile")
            compiled = _measure.compiling(self.compile, 2 if quick else compiles)
            for name, time in compiled.items():
                rows[name].append(f"{time.seconds:.1f}")
        return _table.markdown(columns, rows)


def _compiled(step: Callable[..., Any], args: tuple[Any, ...]) -> jax.stages.Compiled:
    return jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
