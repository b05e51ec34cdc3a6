"""Skip rules side by side: small language models in bfloat16, with planted trouble.

`python -m benchmarks skips` writes docs/benchmarks/skips.csv, and from it the tables of skips.md.
"""

import argparse
import functools
import pathlib
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import optax_lossscale as ols
from benchmarks import _tables
from benchmarks._tables import Table
from optax_lossscale import skips
from optax_lossscale.demo import _model, _text

NOTHING = '`"nonfinite"`'
RULES: dict[str, Any] = {
    NOTHING: "nonfinite",
    "`spikes()`": skips.spikes(),
    "`olmo_core()`, `maxtext()`": skips.olmo_core(),
    "`levanter()`": skips.levanter(),
    "`axlearn`, mean": skips.axlearn(skips.drop_norm_by_grad_norm_ema(), 0.99),
    "`axlearn`, deviation": skips.axlearn(
        skips.drop_norm_by_grad_norm_stddev(min_count=100), 0.99
    ),
    "`megatron(10)`": skips.megatron(10.0),
}
WIDTH, BLOCKS, BATCH, STEPS, SEEDS = 48, 1, 8, 400, (0, 1, 2)
LEARNING_RATE, WARMUP = 3e-3, 60
PAGE = pathlib.Path("docs/benchmarks/skips.md")


class Scenario(NamedTuple):
    """What goes wrong, as data of each step.

    Attributes:
      tokens: what is trained on; int32, shape (steps, batch, context + 1).
      factor: what the loss is multiplied by; float32, shape (steps,).
      planted: whether the step should be skipped; bool, shape (steps,).
      learning_rate: its peak.
    """

    tokens: np.ndarray
    factor: np.ndarray
    planted: np.ndarray
    learning_rate: float = LEARNING_RATE


def scenarios(text: np.ndarray, steps: int, seed: int) -> dict[str, Scenario]:
    """Each kind of trouble, on the same batches."""
    rng = np.random.default_rng(seed)
    tokens = np.stack([*_text.batches(text, steps, seed)])[:, :BATCH]
    ones, never = np.ones(steps, np.float32), np.zeros(steps, bool)
    garbage = rng.integers(0, _model.BYTES, tokens.shape).astype(np.int32)
    one_byte = np.broadcast_to(
        rng.integers(0, _model.BYTES, (steps, 1, 1)), tokens.shape
    )
    at = lambda places: np.isin(np.arange(steps), places)
    early, late = (
        steps // 20,
        np.sort(rng.choice(np.arange(steps // 4, steps - steps // 10), 9, False)),
    )
    some, shard = at([early, *late]), at(np.arange(steps // 2, steps // 2 + 12))
    long_shard = at(np.arange(steps // 2, steps // 2 + 40))
    where = lambda mask, bad: np.where(mask[:, None, None], bad, tokens).astype(
        np.int32
    )
    sizes = np.exp(rng.uniform(np.log(10), np.log(1000), steps)).astype(np.float32)
    lasting = np.where(np.arange(steps) < steps // 2, 1, 30).astype(np.float32)
    return {
        "nothing": Scenario(tokens, ones, never),
        "gradients 10 to 1000 times too large, at 10 steps": Scenario(
            tokens, np.where(some, sizes, ones), some
        ),
        "batches of random bytes, at 10 steps": Scenario(
            where(some, garbage), ones, some
        ),
        "batches of one byte repeated, at 10 steps": Scenario(
            where(some, one_byte), ones, some
        ),
        "a shard of random bytes, 12 steps": Scenario(
            where(shard, garbage), ones, shard
        ),
        "a shard of random bytes, 40 steps": Scenario(
            where(long_shard, garbage), ones, long_shard
        ),
        "a loss 30 times as large, for good": Scenario(tokens, lasting, never),
        "a learning rate 10 times too high": Scenario(
            tokens, ones, never, 10 * LEARNING_RATE
        ),
    }


class Outcome(NamedTuple):
    """The outcome, with an entry for each step."""

    loss: Any
    applied: Any


@functools.partial(jax.jit, static_argnums=(0, 2))
def train(rule: str, scenario: Any, steps: int, seeds: jax.Array) -> Outcome:
    """Trains one model for each seed, in bfloat16 from float32 parameters."""
    schedule = lambda step: jnp.minimum(1.0, (step + 1) / WARMUP)

    def run(scenario, seed):
        inner = optax.chain(
            optax.adamw(schedule, weight_decay=0.0), optax.scale(scenario.learning_rate)
        )
        tx = ols.with_loss_scale(inner, None, skip=RULES[rule])
        params = _model.init(jax.random.key(seed), WIDTH, BLOCKS)

        def step(carry, batch):
            tokens, factor = batch
            cast = functools.partial(optax.tree.cast, dtype=jnp.bfloat16)
            loss_fn = lambda params: factor * _model.loss(cast(params), tokens)
            loss, params, state = tx.minimize(loss_fn, carry[1], carry[0])
            return (params, state), (loss / factor, state.should_apply)

        batches = (scenario.tokens, scenario.factor)
        _, (loss, applied) = jax.lax.scan(step, (params, tx.init(params)), batches)
        return Outcome(loss, applied)

    return jax.vmap(run)(scenario, seeds)


def _stacked(text: np.ndarray, steps: int) -> dict[str, Scenario]:
    """The scenarios of all seeds, their leaves stacked."""
    each = [scenarios(text, steps, seed) for seed in SEEDS]
    stack = lambda *xs: np.stack([np.asarray(x) for x in xs])
    return {name: jax.tree.map(stack, *(s[name] for s in each)) for name in each[0]}


class Row(NamedTuple):
    """What a rule did in a scenario, over all seeds."""

    planted: int
    caught: int
    lost: int
    loss: float


def measure(steps: int) -> dict[tuple[str, str], Row]:
    """Trains under each rule in each scenario."""
    cases = _stacked(_text.read(), steps)
    found = {}
    for rule in tqdm(RULES, desc="rules"):
        for name, scenario in cases.items():
            outcome = jax.device_get(train(rule, scenario, steps, jnp.array(SEEDS)))
            skipped = ~outcome.applied
            found[name, rule] = Row(
                int(scenario.planted.sum()),
                int((skipped & scenario.planted).sum()),
                int((skipped & ~scenario.planted).sum()),
                float(outcome.loss[:, -(steps // 10) :].mean()),
            )
    return found


def tables(found: dict[tuple[str, str], Row]) -> dict[str, Table]:
    """The final losses, the planted steps that were caught and the others that were lost."""
    names = dict.fromkeys(name for name, _ in found)
    planted = {name: found[name, NOTHING].planted for name in names}

    def each(cell: Callable[[Row], str], names: Iterable[str]) -> Table:
        return {
            name: {rule: cell(found[name, rule]) for rule in RULES} for name in names
        }

    caught = each(lambda x: str(x.caught), filter(planted.get, names))
    return {
        "final loss": each(lambda x: f"{x.loss:.3f}", names),
        "planted steps skipped": {
            name: {"planted": str(planted[name])} | row for name, row in caught.items()
        },
        "other steps skipped": each(lambda x: str(x.lost), names),
    }


def main(options: argparse.Namespace) -> None:
    """Trains, writes the tables, and those that are shown between the marks of the page."""
    csv = PAGE.with_suffix(".csv")
    if not options.report:
        start = time.perf_counter()
        found = tables(measure(60 if options.quick else STEPS))
        print(f"{(time.perf_counter() - start) / 60:.0f} minutes")
        if options.quick:
            print(
                *(_tables.show(name, table) for name, table in found.items()),
                sep="\n\n",
            )
            return
        _tables.write(csv, found)
    PAGE.write_text(with_tables(PAGE.read_text(), _tables.read(csv)))


def with_tables(page: str, found: dict[str, Table]) -> str:
    """The page, with these tables between its marks."""
    shown = ("final loss", "planted steps skipped")
    measured = "\n\n".join(_tables.show(name, found[name]) for name in shown)
    marked = re.compile(
        r"(?<=<!-- measured -->\n\n).*(?=\n\n<!-- until here -->)", re.S
    )
    return marked.sub(lambda _: measured, page)
