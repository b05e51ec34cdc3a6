"""Rescaling inside a model, against one loss scale for all of it.

`python -m benchmarks rescaling` writes docs/rescaling.json, a page of tables and its pictures.
"""

import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import optax_lossscale as ols
from benchmarks import _rescaling_report as report
from benchmarks._deep import MODELS, NOTHING, Boundaries, Model
from optax_lossscale import experimental, presets

SEEDS = (0, 1, 2)
EVERY = 20  # steps from one look at all gradients to the next
SCALES = [2.0**k for k in range(0, 27, 3)]
INTERVAL = (
    25  # of the dynamic scale: a fraction of these short runs, as 2000 steps are of long ones
)
MARGIN = 16  # of rescaled blocks and of a rescaled model: what the last table recommends
MARGINS = (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20)
CHECKED = presets.tensorflow_contrib_fixed  # fixed, but a step that overflows is skipped


class Case(NamedTuple):
    """A model, and the dtype of the cotangents between its blocks, if not that of activations."""

    model: str
    cotangents: Any = None

    @property
    def name(self) -> str:
        """What the tables call it."""
        return f"{self.model}, {self.cotangents}" if self.cotangents else self.model


CASES = [
    Case("chain of 1.5 bits a block"),
    Case("chain of 0.9 bits a block", "float8_e5m2"),
    Case("residual network without normalization"),
    Case("residual network without normalization", "float8_e4m3fn"),
    Case("recurrent network, 500 steps"),
    Case("transformer with LayerScale"),
    Case("demo's transformer"),
    Case("demo's transformer", "float8_e5m2"),
    Case("demo's transformer", "float8_e4m3fn"),
]


@jax.custom_vjp
def _times_in_backward(tree: Any, factor: jax.Array) -> Any:
    return tree


_times_in_backward.defvjp(
    lambda tree, factor: (tree, factor),
    lambda factor, grads: (jax.tree.map(lambda g: g * factor, grads), jnp.zeros_like(factor)),
)


def _rounding(dtype: Any) -> Boundaries:
    """Each block's cotangent rounded as it comes: all that a global loss scale can do."""

    @jax.custom_vjp
    def rounded(x):
        return x

    round_trip = lambda g: g.astype(dtype).astype(g.dtype)
    rounded.defvjp(lambda x: (x, None), lambda _, g: (jax.tree.map(round_trip, g),))
    return NOTHING._replace(block=lambda block: lambda *args: rounded(block(*args)))


def _rescaled(cotangents: Any, margin: int = MARGIN) -> Boundaries:
    block = functools.partial(experimental.rescale, margin=margin, cotangent_dtype=cotangents)
    return Boundaries(experimental.enter, block, experimental.leave)


def _with_margin(bits: jax.Array) -> Boundaries:
    """Rescaled blocks whose margin may be traced, so that one compilation serves for all.

    They take and return float32, so that nothing is rounded or overflows where the margin is
    put in and taken out again.
    """

    def wrapped(block):
        def shifted(params, x, *args):
            params, bits = params
            up, down = jnp.exp2(bits), jnp.exp2(-bits)
            params, x = _times_in_backward((params, x), up)
            narrow = jax.tree.map(lambda x: x.astype(jnp.float16), x)
            y = block(params, narrow, *args).astype(jnp.float32)
            return _times_in_backward(y, down)

        rescaled = experimental.rescale(shifted, margin=0)
        return lambda params, h, *args: rescaled((params, bits), h, *args)

    return Boundaries(
        lambda x: experimental.enter(x.astype(jnp.float32)), wrapped, experimental.leave
    )


def _whole_with_margin(forward: Callable[..., Any], bits: jax.Array) -> Callable[..., Any]:
    def shifted(both, x):
        params, bits = both
        y = forward(_times_in_backward(params, jnp.exp2(bits)), x)
        return _times_in_backward(y, jnp.exp2(-bits))

    rescaled = experimental.rescale_model(shifted, margin=0)
    return lambda params, x: rescaled((params, bits), x)


def _loss(model: Model, dtype: Any, boundaries: Boundaries = NOTHING, whole: Any = None):
    """The loss of parameters and a batch, of a model that computes in a dtype."""
    forward = lambda params, x: model.forward(params, x, dtype, boundaries)
    forward = whole(forward) if whole else forward
    return lambda params, batch: model.loss(forward(params, batch[0]), batch[1])


def _flushed(grads: Any, wide: Any) -> jax.Array:
    """The share of all gradients that are zero, and are not in float32."""
    zeros = jax.tree.map(lambda g, w: jnp.sum((g == 0) & (w != 0)), grads, wide)
    return optax.tree.sum(zeros) / optax.tree.size(wide)


def _keys(seed: jax.Array, steps: int) -> jax.Array:
    return jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), steps)


class Run(NamedTuple):
    """What was recorded.

    Attributes:
      loss: the true one of each step; (…, seeds, steps).
      skipped: whether it was; (…, seeds, steps).
      flushed: the share of gradients that are zero and are not in float32, of every `EVERY`-th
        step; (…, seeds, steps / EVERY).
      scale: the loss scale after the last step; (…, seeds).
    """

    loss: Any
    skipped: Any
    flushed: Any
    scale: Any


def train(
    model: Model,
    loss_fn: Callable[..., Any],
    loss_scale: ols.LossScale | None,
    steps: int,
    scales: list[float] | None = None,
) -> Run:
    """Trains with every seed, and at every one of `scales`, if they are given, from there."""
    wide_loss = _loss(model, jnp.float32)
    tx = ols.with_loss_scale(model.optimizer, loss_scale)

    def step(carry, key):
        params, state, *_ = carry
        loss, grads = ols.value_and_grad(loss_fn, state)(params, model.batch(key))
        new, state = tx.apply_gradients(grads, state, params)
        return (new, state, params, grads), (loss, jnp.logical_not(state.should_apply))

    def several(carry, keys):
        carry, record = jax.lax.scan(step, carry, keys)
        _, _, before, grads = carry
        wide = jax.grad(wide_loss)(before, model.batch(keys[-1]))
        return carry, (*record, _flushed(grads, wide))

    def run(scale, seed):
        params = model.init(jax.random.key(seed))
        state = tx.init(params)
        if scales is not None:
            state = state._replace(loss_scale=state.loss_scale.replace(loss_scale=scale))
        keys = _keys(seed, steps).reshape(-1, EVERY)
        carry, (loss, skipped, flushed) = jax.lax.scan(
            several, (params, state, params, params), keys
        )
        return Run(loss.ravel(), skipped.ravel(), flushed, carry[1].loss_scale())

    # In a loop: of 16 of the demo's transformers under vmap on CPU, those that overflowed spoilt
    # others, without any loss scaling too.
    seeds = jnp.array(SEEDS)
    each = lambda scale: jax.lax.map(lambda seed: run(scale, seed), seeds)
    every = jnp.array(scales or [1.0], jnp.float32)
    found = jax.device_get(jax.jit(lambda: jax.lax.map(each, every))())
    return found if scales else jax.tree.map(lambda x: x[0], found)


def margins(model: Model, steps: int, whole: bool) -> tuple[Any, Any]:
    """What each margin would do at each step of a training in float32.

    Returns:
      Whether the step overflows; (steps, margins). The share of gradients flushed to zero,
      nan where it does; (steps, margins).
    """
    wide_loss = _loss(model, jnp.float32)

    def narrow(params, batch, bits):
        if whole:
            loss = _loss(model, jnp.float16, whole=lambda f: _whole_with_margin(f, bits))
        else:
            loss = _loss(model, jnp.float16, _with_margin(bits))
        return jax.grad(loss)(params, batch)

    @jax.jit
    def run():
        def step(carry, key):
            params, state = carry
            batch = model.batch(key)
            wide = jax.grad(wide_loss)(params, batch)

            def one(bits):
                grads = narrow(params, batch, bits)
                finite = ols.all_finite(grads)
                return ~finite, jnp.where(finite, _flushed(grads, wide), jnp.nan)

            record = jax.lax.map(one, jnp.array(MARGINS, jnp.float32))
            updates, state = model.optimizer.update(wide, state, params)
            return (optax.apply_updates(params, updates), state), record

        params = model.init(jax.random.key(SEEDS[0]))
        carry = params, model.optimizer.init(params)
        return jax.lax.scan(step, carry, _keys(jnp.array(SEEDS[0]), steps))[1]

    return jax.device_get(run())


def _ways(case: Case) -> dict[str, tuple[Callable[..., Any], Any]]:
    """What is compared: a loss function, and the loss scale around it."""
    model = MODELS[case.model]
    around = _rounding(case.cotangents) if case.cotangents else NOTHING
    narrow = _loss(model, jnp.float16, around)
    ways = {
        report.FLOAT32: (_loss(model, jnp.float32), None),
        report.FIXED: (narrow, CHECKED(1)),
        report.DYNAMIC: (narrow, ols.DynamicLossScale(growth_interval=INTERVAL)),
        report.HEADROOM: (narrow, ols.get("headroom")),
        report.BLOCKS: (_loss(model, jnp.float16, _rescaled(case.cotangents)), CHECKED(1)),
    }
    if not case.cotangents:  # which a whole model has at its end alone
        whole = functools.partial(experimental.rescale_model, margin=MARGIN)
        ways[report.WHOLE] = _loss(model, jnp.float16, whole=whole), CHECKED(1)
    return ways


def _final(run: Run) -> np.ndarray:
    last = max(1, run.loss.shape[-1] // 10)
    return run.loss[..., -last:].mean(-1)


def compare(case: Case, steps: int, progress: tqdm) -> dict[str, Any]:
    """One case: every way with every seed."""
    found: dict[str, Any] = {"name": case.name, "steps": steps, "ways": {}}
    for way, (loss_fn, loss_scale) in _ways(case).items():
        scales = SCALES if way == report.FIXED else None
        run = train(MODELS[case.model], loss_fn, loss_scale, steps, scales)
        if scales:
            finals = np.where(np.isnan(_final(run)), np.inf, _final(run))
            found["fixed"] = finals.tolist()
            best = finals.mean(-1).argmin()
            run = jax.tree.map(lambda x, best=best: x[best], run)
        curve = run.loss.mean(0)
        found["ways"][way] = {
            "loss": _final(run).tolist(),
            "skipped": run.skipped.mean(-1).tolist(),
            "flushed": float(run.flushed.mean()),
            "scale": float(run.scale[0]),
            "curve": curve.reshape(-1, EVERY // 2).mean(-1).tolist(),
        }
        progress.update()
    return found


def _margins_of(name: str, steps: int, progress: tqdm) -> list[dict[str, Any]]:
    rows = []
    for what, whole in (("blocks", False), ("whole", True)):
        overflows, flushed = margins(MODELS[name], steps, whole)
        kept = np.where(overflows, 0, flushed).sum(0) / np.maximum((~overflows).sum(0), 1)
        none = overflows.all(0)
        rows.append(
            {
                "model": name,
                "what": what,
                "overflows": overflows.mean(0).tolist(),
                "flushed": [None if n else float(f) for n, f in zip(none, kept, strict=True)],
            }
        )
        progress.update()
    return rows


def trained(name: str, steps: int, bits: int) -> dict[str, Any]:
    """What a training with rescaled blocks comes to at a margin."""
    loss_fn = _loss(MODELS[name], jnp.float16, _rescaled(None, bits))
    run = train(MODELS[name], loss_fn, CHECKED(1), steps)
    finals, skipped = _final(run).tolist(), run.skipped.mean(-1).tolist()
    return {"margin": bits, "loss": finals, "skipped": skipped}


def exponents(name: str, scale: float, steps: int) -> dict[str, Any]:
    """The largest cotangent at each block's end, at one scale for all and with rescaled blocks.

    Args:
      name: of the model.
      scale: the one for all.
      steps: how long it was trained in float32 before.
    """
    model = MODELS[name]
    wide_loss = _loss(model, jnp.float32)

    def step(carry, key):
        params, state = carry
        grads = jax.grad(wide_loss)(params, model.batch(key))
        updates, state = model.optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    start = model.init(jax.random.key(SEEDS[0]))
    *keys, last = _keys(jnp.array(SEEDS[0]), steps + 1)
    train_all = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys)[0][0])
    params = train_all((start, model.optimizer.init(start)), jnp.stack(keys))
    batch = model.batch(last)
    blocks = len(jax.tree.leaves(params["blocks"])[0])
    probes = {
        "first": ols.diagnosis.probe(),
        "blocks": ols.diagnosis.probe(blocks),
        "last": ols.diagnosis.probe(),
    }

    def tapped(boundaries):
        def wrapped(block):
            with_tap = lambda both, x: ols.diagnosis.tap(block(both[0], x), both[1])
            return boundaries.block(with_tap)

        return boundaries._replace(block=wrapped)

    def largest(boundaries):
        loss = _loss(model, jnp.float16, tapped(boundaries))

        def of_both(probes):
            pairs = {k: (params[k], probes[k]) if k in probes else params[k] for k in params}
            return loss(pairs, batch) * scale

        found = jax.jit(jax.grad(of_both))(probes)
        return [
            float(x)
            for k in ("first", "blocks", "last")
            for x in np.atleast_1d(found[k].cotangent.largest)
        ]

    return {"model": name, "before": largest(NOTHING), "after": largest(_rescaled(None))}


NARROWEST = "residual network without normalization"  # the one that needs the largest margin
DRAWN = (
    "chain of 1.5 bits a block",
    "residual network without normalization",
    "transformer with LayerScale",
    "demo's transformer",
)


def measure(quick: bool, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything; with `quick` a few steps of the first cases alone."""
    start = time.perf_counter()
    cases = CASES[:1] if quick else CASES
    models = dict.fromkeys(case.model for case in cases)
    steps = lambda name: 2 * EVERY if quick else MODELS[name].steps
    with tqdm(total=sum(len(_ways(c)) for c in cases) + 2 * len(models), desc="runs") as progress:
        compared = [compare(case, steps(case.model), progress) for case in cases]
        of_margins = [
            row for name in models for row in _margins_of(name, steps(name) // 2, progress)
        ]
    best = {case["name"]: case["ways"][report.FIXED]["scale"] for case in compared}
    drawn = DRAWN[:1] if quick else DRAWN
    return {
        "machine": machine,
        "seeds": SEEDS,
        "scales": SCALES,
        "interval": INTERVAL,
        "margin": MARGIN,
        "margin_bits": MARGINS,
        "cases": compared,
        "margins": of_margins,
        "trained": [trained(NARROWEST, steps(NARROWEST), bits) for bits in (12, 14, MARGIN)],
        "exponents": [exponents(name, best[name], steps(name) // 2) for name in drawn],
        "minutes": (time.perf_counter() - start) / 60,
    }


def main(quick: bool, only_report: bool, out: pathlib.Path, machine: dict[str, Any]) -> None:
    """Measures, unless only the report is asked for, and writes the page and the pictures."""
    out.mkdir(parents=True, exist_ok=True)
    results = out / "rescaling.json"
    if not only_report:
        results.write_text(json.dumps(measure(quick, machine), indent=1) + "\n")
    found = json.loads(results.read_text())
    report.draw(found, out)
    (out / "rescaling.md").write_text(report.page(found))
    print(report.page(found))
