"""What each rule of `autocast` buys: models compiled without it, over the same with it."""

import argparse
import contextlib
import multiprocessing
import pathlib
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

from tqdm import tqdm

from benchmarks import _accelerators, _autocast, _models, _tables, _targets
from benchmarks._tables import Table
from optax_lossscale._autocast import classify, region, store

LEAST = 0.02  # of a difference that is shown
TARGET = _targets.H100


class Rule(NamedTuple):
    """A rule of `autocast`, and what it is without: another value for a name in a module."""

    where: Any
    name: str
    without: Any


def _nothing(*_: Any) -> frozenset[int]:
    return frozenset()


def _no(*_: Any) -> bool:
    return False


def _undivided(_facts: Any, _island: Any, stored: Any) -> list[Any]:
    """What a whole island stores, by one region."""
    return [list(stored)] if stored else []


RULES = {
    "some reductions are kept": Rule(region, "kept_reductions", _nothing),
    "a sum that is read here too comes first": Rule(store, "_divided", _undivided),
    "what only moves, or spaces, is not recomputed": Rule(
        region, "is_worth_recomputing", lambda eqns: True
    ),
    "what is cheap is repeated": Rule(store, "_repeated", lambda *_: {}),
    "what is normalized is of order 1": Rule(classify, "is_normalized", _no),
    "what is sent, or has a name, is in 16 bits": Rule(region, "_moves_rounded", _no),
    "sums in 16 bits are of rounded numbers": Rule(region, "_is_of_one_shape", _no),
}
_WITH = ""  # all rules


def main(options: argparse.Namespace) -> None:
    """Writes the table and the page; or the page alone, from the table that is there."""
    csv = pathlib.Path(options.out) / "rules.csv"
    _tables.publish(csv, page, None if options.report else measure)


def measure() -> dict[str, Table]:
    """Compiles every model with all rules, and without each."""
    _accelerators.refuse_missing_compilers()
    cases = [(rule, model) for model in _models.MODELS for rule in (_WITH, *RULES)]
    # Each in a process of its own, as compilers remember what they have compiled.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as pool:
        costs = tqdm(pool.map(_costs, cases), desc="programs", total=len(cases))
        found = dict(zip(cases, costs, strict=True))
    tables: dict[str, Table] = {"versions": _accelerators.versions()}
    for rule in RULES:
        tables[rule] = {}
        for model in _models.MODELS:
            memory, moved = found[rule, model]
            memory_with, moved_with = found[_WITH, model]
            tables[rule][model] = {
                "memory": f"{memory / memory_with:.2f}",
                "moved": f"{moved / moved_with:.2f}",
            }
    return tables


def _costs(case: tuple[str, str]) -> tuple[int, int]:
    """The temporary memory and the bytes moved of a model without a rule."""
    rule, model = case
    with contextlib.nullcontext() if rule == _WITH else mock.patch.object(*RULES[rule]):
        of_model = _models.MODELS[model](_models.left)
        program = _autocast.compiled(of_model, _models.left, TARGET)
    return program.temp_bytes, program.bytes_moved


def page(found: dict[str, Table]) -> str:
    """The page: for each rule, the models in which it makes a difference."""
    made_with = ", ".join(
        f"{name} {it}" for name, it in found["versions"]["run"].items()
    )
    body = [[rule, _differs(found[rule])] for rule in found if rule != "versions"]
    table = _tables.markdown(["without", "memory / moved"], body)
    text = pathlib.Path(__file__).with_name("_rules_page.txt").read_text()
    return text.format(table, made_with=made_with)


def _differs(of_rule: Table) -> str:
    """The models in which a rule makes a difference, each with its ratios."""
    cells = []
    for model, ratios in of_rule.items():
        numbers = [ratios["memory"], ratios["moved"]]
        if any(abs(float(number) - 1) >= LEAST for number in numbers):
            cells.append(f"{model} {' / '.join(numbers)}")
    return "; ".join(cells) or "nothing"
