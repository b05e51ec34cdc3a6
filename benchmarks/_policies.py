"""Loss scales side by side, on recorded gradients and in training.

`python -m benchmarks policies` writes docs/benchmarks/policies.csv, and from it policies.md, and
the picture.
"""

import argparse
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt
from tqdm import tqdm

import optax_lossscale as ols
from benchmarks import _hostile, _replay, _tables
from benchmarks._recording import Recording, record
from benchmarks._tables import Table
from benchmarks._tasks import REPORTED, Task, in_float16
from optax_lossscale import presets
from optax_lossscale._arrays.finite import largest

HEADROOM = "headroom"
DEFAULTS = {
    "tensorflow_fixed, 2^15": presets.tensorflow_fixed(2.0**15),
    "tensorflow_dynamic": presets.tensorflow_dynamic(),
    "tensorflow_contrib_exponential": presets.tensorflow_contrib_exponential(
        2.0**15, 2000
    ),
    "tf_keras": presets.tf_keras(),
    "keras": presets.keras(),
    "pytorch": presets.pytorch(),
    "flax": presets.flax(),
    "jmp": presets.jmp(2.0**15),
    "mpx": presets.mpx(2.0**15),
    "megatron": presets.megatron(2.0**32, 1.0, 2.0, 0.5, 1000, 2),
    "deepspeed": presets.deepspeed(),
    "fairseq": presets.fairseq(),
    "openseq2seq_logmax": presets.openseq2seq_logmax(),
    "apex": presets.apex(),
}
FITTED = {
    "pytorch, interval 200": presets.pytorch(growth_interval=200),
    "pytorch, interval 50": presets.pytorch(growth_interval=50),
    "megatron, interval 200": presets.megatron(2.0**32, 1.0, 2.0, 0.5, 200, 2),
    "deepspeed, interval 200": presets.deepspeed(scale_window=200),
    "fairseq, interval 200, tolerance 5%": presets.fairseq(
        scale_window=200, tolerance=0.05
    ),
    "openseq2seq_logmax, log_max 4": presets.openseq2seq_logmax(log_max=4.0),
}
POLICIES: dict[str, ols.LossScale] = (
    {HEADROOM: ols.HeadroomLossScale()} | DEFAULTS | FITTED
)
SEEDS = (0, 1, 2)
# What the page shows of the tables; policies.csv has all of them.
SHOWN = (
    HEADROOM,
    "tensorflow_dynamic",
    "pytorch",
    "deepspeed",
    "openseq2seq_logmax",
    "tensorflow_fixed, 2^15",
)
SHOWN_SCENARIOS = (
    "as recorded",
    "from 2^0",
    "2^17 smaller",
    "learning-rate jump",
    "NaN every 200",
    "inner 2^4 larger",
)
SHOWN_STEPS = ("from 2^0", "from 2^40", "after a fall of 2^10", "skips in the first 20")
_PAGE = pathlib.Path(__file__).with_name("_policies_page.txt")
WITHIN = 5  # points of the cost of hostile sequences
SMALLER = 2.0**-17  # what the loss is multiplied by in the second training


def runs(tasks: dict[str, Task], seeds: tuple[int, ...], steps: int) -> list[Recording]:
    """The recorded gradients of every task with every seed."""
    cases = [(task, seed) for task in tasks.values() for seed in seeds]
    return [
        jax.device_get(record(*case, steps)) for case in tqdm(cases, desc="recording")
    ]


@functools.partial(jax.jit, static_argnums=(0, 2))
def train(
    task: Task, factor: jax.Array, steps: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Trains a task in float16 under every policy, with every seed, and in float32.

    Args:
      task: what to train.
      factor: multiplies the loss, and divides its gradients once they are unscaled.
      steps: how many.

    Returns:
      The mean loss of the last tenth of the steps; (policies, seeds). That of float32; (seeds,).
      The share of steps skipped; (policies, seeds).
    """
    seeds = jnp.array(SEEDS)
    shape = (len(POLICIES), len(SEEDS))

    def lane(params, state, scale, batch):
        """A step in float16: its loss and largest gradient, and the new parameters and state."""
        scaled = lambda p: in_float16(task.loss, p, batch) * factor * scale
        loss, grads = jax.value_and_grad(scaled)(params)
        grads = jax.tree.map(lambda g: g / scale, grads)
        size = largest(grads)
        grads = jax.tree.map(lambda g: g / factor, grads)
        updates, new = task.optimizer.update(grads, state, params)
        return (
            loss / (factor * scale),
            size,
            jax.tree.map(jnp.add, params, updates),
            new,
        )

    def step(carry, keys):
        narrow, wide, policies = carry
        batch = jax.vmap(task.batch)(keys)
        scale = jnp.stack([_of_each_seed(lambda ls: ls(), ls) for ls in policies])
        over_seeds = jax.vmap(lane, in_axes=(0, 0, 0, 0))
        over_policies = jax.vmap(over_seeds, in_axes=(0, 0, 0, None))
        loss, sizes, *new = over_policies(*narrow, scale, batch)
        finite = jnp.isfinite(sizes)
        keep = lambda new, old: jnp.where(
            finite.reshape(shape + (1,) * (new.ndim - 2)), new, old
        )
        narrow = jax.tree.map(keep, tuple(new), narrow)
        policies = [
            _of_each_seed(lambda ls, size: ls.update(size)[0], ls, of_policy)
            for ls, of_policy in zip(policies, sizes, strict=True)
        ]

        def in_float32(params, state, batch):
            loss, grads = jax.value_and_grad(task.loss)(params, batch, None)
            updates, state = task.optimizer.update(grads, state, params)
            return jax.tree.map(jnp.add, params, updates), state, loss

        *wide, wide_loss = jax.vmap(in_float32)(*wide, batch)
        return (narrow, tuple(wide), policies), (loss, wide_loss, ~finite)

    params = jax.vmap(lambda seed: task.init(jax.random.key(seed)))(seeds)
    wide = params, jax.vmap(task.optimizer.init)(params)
    spread = lambda x: jnp.broadcast_to(x, (shape[0], *x.shape))
    repeat = lambda x: jnp.broadcast_to(x, (len(SEEDS), *jnp.shape(x)))
    policies = [jax.tree.map(repeat, ls) for ls in POLICIES.values()]
    keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed + 1000), steps))(
        seeds
    )
    carry = jax.tree.map(spread, wide), wide, policies
    _, (loss, wide_loss, skipped) = jax.lax.scan(step, carry, keys.T)
    last = steps // 10
    return loss[-last:].mean(0), wide_loss[-last:].mean(0), skipped.mean(0)


def _of_each_seed(function: Callable[..., Any], *args: Any) -> Any:
    # a fixed scale has no arrays
    return jax.vmap(function, axis_size=len(SEEDS))(*args)


def _number(x: float) -> str:
    return f"{x:.2f}" if x < 10 else f"{x:.0f}"


def _steps(found: np.ndarray) -> str:
    """The median and the most, where -1 is never."""
    in_order = np.sort(np.where(found < 0, np.inf, found).ravel())
    text = lambda x: "never" if np.isinf(x) else f"{x:.0f}"
    median, most = text(in_order[len(in_order) // 2]), text(in_order[-1])
    return median if median == most else f"{median} to {most}"


def _places(names: list[str]) -> list[int]:
    order = [s.name for s in _replay.SCENARIOS]
    return [order.index(name) for name in names]


def _targets(outcomes: dict[str, _replay.Outcome]) -> Table:
    """What was to be reached, and what was reached."""
    ours = outcomes[HEADROOM]
    undisturbed = _places([s.name for s in _replay.UNDISTURBED])
    fall, nans = _places([_replay.FALL]), _places([_replay.NANS])
    beaten = {}
    for i, scenario in enumerate(_replay.SCENARIOS):
        skips, lost = ours.skips[i].mean(), ours.lost[i].mean()
        better = [
            name
            for name, o in outcomes.items()
            if name != HEADROOM
            and o.skips[i].mean() <= skips
            and o.lost[i].mean() < lost
        ]
        if better:
            beaten[scenario.name] = better
    elsewhere = "; ".join(f"{k}: {', '.join(v)}" for k, v in beaten.items()) or "none"
    skips, lost = ours.skips[undisturbed], ours.lost[undisturbed]
    worst = lambda x, digits: (
        f"{x.mean():.{digits}f}; the worst run {x.max():.{digits}f}"
    )
    rows = {
        "undisturbed, skips per 1,000 steps after the first 20: at most 1": worst(
            skips, 2
        ),
        "undisturbed, percent of the gradients lost: at most 0.05": worst(lost, 3),
        "undisturbed, steps to within a factor of 4 of the best scale: at most 6": _steps(
            ours.found[undisturbed]
        ),
        "the same after a fall of 2^10: at most 200": _steps(ours.found_again[fall]),
        "the same after 6 NaNs in a row: at most 200": _steps(ours.found_again[nans]),
        "what loses less with as few skips: nothing but with outliers": elsewhere,
    }
    return {name: {"measured": cell} for name, cell in rows.items()}


def _of_each_task(ours: _replay.Outcome, tasks: list[str], seeds: int) -> Table:
    """The same for each task, which shows what fell short."""
    undisturbed = _places([s.name for s in _replay.UNDISTURBED])
    fall = _places([_replay.FALL])
    table = {}
    for i, name in enumerate(tasks):
        of_task = slice(i * seeds, (i + 1) * seeds)
        of = lambda x, places, of_task=of_task: x[places][:, of_task]
        apart = abs(np.diff(ours.best[0, of_task], axis=1))
        table[name] = {
            "skips per 1,000": f"{of(ours.skips, undisturbed).mean():.2f}",
            "% lost": f"{of(ours.lost, undisturbed).mean():.3f}",
            "steps": _steps(of(ours.found, undisturbed)),
            "steps after the fall": _steps(of(ours.found_again, fall)),
            "bits between the best scales of two steps": f"{apart.mean():.1f}",
        }
    return table


def _scenarios(
    outcomes: dict[str, _replay.Outcome], scenarios: list[_replay.Scenario]
) -> Table:
    names = [s.name for s in scenarios]
    places = dict(zip(names, _places(names), strict=True))
    cell = lambda o, i: f"{_number(o.skips[i].mean())} / {_number(o.lost[i].mean())}%"
    return {
        name: {scenario: cell(o, i) for scenario, i in places.items()}
        for name, o in outcomes.items()
    }


def _found(outcomes: dict[str, _replay.Outcome]) -> Table:
    names = [s.name for s in _replay.UNDISTURBED]
    places, again = _places(names), [_replay.FALL, _replay.NANS]
    return {
        policy: {
            name: _steps(o.found[i]) for name, i in zip(names, places, strict=True)
        }
        | {
            f"after {name}": _steps(o.found_again[i])
            for name, i in zip(again, _places(again), strict=True)
        }
        | {"skips in the first 20": _number(o.early[places].mean())}
        for policy, o in outcomes.items()
    }


def _hostile_costs(costs: dict[str, np.ndarray]) -> Table:
    """The mean cost in each family, and how often that of TensorFlow or PyTorch is lower."""
    best = _best(costs)
    return {
        name: {
            family: _number(cost.mean())
            for family, cost in zip(_hostile.FAMILIES, of, strict=True)
        }
        | {
            "all": _number(of.mean()),
            f"within {WITHIN} points": f"{np.mean(of <= best + WITHIN):.0%}",
            "worst by": _number((of - best).max()),
        }
        for name, of in costs.items()
    }


def _worse(costs: dict[str, np.ndarray]) -> Table:
    """In how many sequences of each family ours falls short."""
    of = costs[HEADROOM]
    short = np.sum(of > _best(costs) + WITHIN, 1)
    found = dict(zip(_hostile.FAMILIES, short, strict=True))
    return {HEADROOM: {name: f"{n} of {of.shape[1]}" for name, n in found.items() if n}}


def _best(costs: dict[str, np.ndarray]) -> np.ndarray:
    return np.minimum(costs["tensorflow_dynamic"], costs["pytorch"])


def _trained(results: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Table:
    """Final losses, minus float32's with the same seed."""
    of_float32 = {task: f"{wide.mean():.4f}" for task, (_, wide, _) in results.items()}
    table = {"float32": of_float32 | {"skips per 1,000": ""}}
    for i, name in enumerate(POLICIES):
        cells = {}
        for task, (loss, wide, _) in results.items():
            difference = loss[i] - wide
            spread = difference.std(ddof=1) / len(SEEDS) ** 0.5
            cells[task] = f"{difference.mean():+.4f} ± {spread:.4f}"
        skipped = np.mean([skipped[i] for _, _, skipped in results.values()])
        table[name] = cells | {"skips per 1,000": f"{1000 * skipped:.1f}"}
    return table


def _draw(outcomes: dict[str, _replay.Outcome], out: pathlib.Path) -> None:
    """The scales of a few policies in a few scenarios, of the first run of each."""
    shown = {HEADROOM: "#1f6f8b", "pytorch": "#c9704c", "deepspeed": "#d8a31a",
             "openseq2seq_logmax": "#8d6a9f"}  # fmt: skip
    names = ["from 2^0", "2^17 smaller", _replay.FALL, "learning-rate jump", _replay.OUTLIERS,
             "6 NaNs in a row", "NaN every 200", "inner 2^8 larger"]  # fmt: skip
    figure, axes = plt.subplots(4, 2, figsize=(9, 9), sharex=True, layout="constrained")
    for axis, name, place in zip(axes.flat, names, _places(names), strict=True):
        best = next(iter(outcomes.values())).best[place, 0]
        axis.plot(best, color="#cccccc", lw=0.6, label="the best of each step")
        for policy, color in shown.items():
            axis.plot(
                outcomes[policy].log2_scale[place, 0], color=color, lw=1.1, label=policy
            )
        axis.set_title(name.replace("^", "**"), loc="left", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False, fontsize=7)
    figure.supxlabel("step")
    figure.supylabel("log2 of the loss scale")
    figure.savefig(out / "policies.png", dpi=130)
    plt.close(figure)


def measure(quick: bool, out: pathlib.Path) -> dict[str, Table]:
    """Records, replays and trains, and draws the picture; returns all tables."""
    start = time.perf_counter()
    steps, trained_steps = (6000, 300) if quick else (6000, 2000)
    seeds = SEEDS[:1] if quick else SEEDS
    replays = _replay.Replays(runs(REPORTED, seeds, steps))
    outcomes = {
        name: replays(ls) for name, ls in tqdm(POLICIES.items(), desc="replaying")
    }
    _draw(outcomes, out)
    hostile = _hostile.Hostile(seed=100, of_each=1 if quick else 10)
    costs = {name: hostile(ls) for name, ls in tqdm(POLICIES.items(), desc="fooling")}
    trainings = [
        {
            name: jax.device_get(train(task, jnp.float32(factor), trained_steps))
            for name, task in tqdm(REPORTED.items(), desc="training")
        }
        for factor in (1.0, SMALLER)
    ]
    about = {
        "minutes": f"{(time.perf_counter() - start) / 60:.0f}",
        "optax_lossscale": ols.__version__,
        "jax": jax.__version__,
        "sequences": str(costs[HEADROOM].size),
        "steps": str(steps),
        "seeds": str(len(seeds)),
        "trained steps": str(trained_steps),
    }
    return {
        "about": {"run": about},
        "hostile": _hostile_costs(costs),
        "hostile, worse": _worse(costs),
        "targets": _targets(outcomes),
        "tasks": _of_each_task(outcomes[HEADROOM], list(REPORTED), len(seeds)),
        "undisturbed": _scenarios(outcomes, _replay.UNDISTURBED),
        "disturbed": _scenarios(outcomes, _replay.DISTURBED),
        "steps to a good scale": _found(outcomes),
        "final losses": _trained(trainings[0]),
        "final losses, 2^17 smaller": _trained(trainings[1]),
    }


def page(tables: dict[str, Table]) -> str:
    """The page, with a few rows and columns of each table."""
    replayed = {
        name: cells | tables["disturbed"][name]
        for name, cells in tables["undisturbed"].items()
    }
    hostile = tables["hostile"]
    worse = tables["hostile, worse"].get(HEADROOM, {})
    targets = list(tables["targets"])[:-1]  # the last is too long for a page
    return _PAGE.read_text().format(
        **{
            name.replace(" ", "_"): cell
            for name, cell in tables["about"]["run"].items()
        },
        policies=len(POLICIES),
        tasks=", ".join(REPORTED),
        cost=f"{float(hostile[HEADROOM]['all']):.1f}",
        cost_dynamic=hostile["tensorflow_dynamic"]["all"],
        cost_pytorch=hostile["pytorch"]["all"],
        within=hostile[HEADROOM][f"within {WITHIN} points"],
        worse="; ".join(f"{name}: {of}" for name, of in worse.items()) or "none",
        hostile=_tables.show("cost, %", hostile, SHOWN),
        replayed=_tables.show("skips / lost", replayed, SHOWN, SHOWN_SCENARIOS),
        found=_tables.show(
            "steps", tables["steps to a good scale"], SHOWN, SHOWN_STEPS
        ),
        targets=_tables.show("target", tables["targets"], targets),
        plain=_tables.show("final loss", tables["final losses"], ("float32", *SHOWN)),
    )


def main(options: argparse.Namespace) -> None:
    """Writes the tables and the page; or the page alone, from the tables that are there."""
    out = pathlib.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    csv = out / "policies.csv"
    if not options.report:
        _tables.write(csv, measure(options.quick, out))
    _tables.write_page(csv, page)
