"""Changes a file in one place after the other, and names the changes that no quick test notices.

    python tests/mutants.py                                  # some of each file in `TESTS`
    python tests/mutants.py _scales/dynamic.py --number 40   # more of one

A fixed seed draws the changes. None is ever on the disk: it is compiled in place of the file in a
fork of this process, which has imported all that takes long, and has computed nothing yet.
"""

import argparse
import ast
import importlib
import os
import pathlib
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader

import pytest

ROOT = pathlib.Path(__file__).parents[1]
IMPORTED = (
    "jax jax.export optax chex hypothesis.extra.numpy flax.nnx orbax.checkpoint jmp"
)
OPTIONS = ["-x", "-n0", "-p", "no:cacheprovider", "--hypothesis-profile=ci"]
# of what is imported before
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
TESTS = {
    "_arrays/finite.py": "arrays/test_finite.py",
    "_scales/dynamic.py": "scales/test_dynamic.py",
    "_scales/loss_scale.py": "scales/test_loss_scale.py systems/test_devices.py",
    "_step/decision.py": "step/test_value.py step/test_skip.py systems/test_devices.py",
}
# Changes that change nothing but speed: how their line begins, and how they do.
SAME = {
    ("if should_apply is True:", "True -> False"),
}


def either_way(pairs: str) -> dict[str, str]:
    return {
        a: b
        for pair in pairs.split(", ")
        for a, b in (pair.split(), pair.split()[::-1])
    }


OPERATORS = either_way(
    "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or, BitAnd BitOr, Add Sub, Mult Div"
)
NAMES = either_way(
    "min max, minimum maximum, pmin pmax, pmean psum, any all, bitwise_and bitwise_or, "
    "reduce_and reduce_or, add sub, float32 float16"
)
LEFT_OUT = {
    "on_all_replicas",
    "optimization_barrier",
    "abs",
    "sqrt",
    "clip",
    "at_least_float32",
}


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""
    other = lambda op: getattr(ast, OPERATORS[type(op).__name__])()
    match node:
        case ast.Compare(left, [op], right):
            yield ast.Compare(left, [other(op)], right)
        case ast.BinOp(left, op, right) if type(op).__name__ in OPERATORS:
            yield ast.BinOp(left, other(op), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(other(op), values)
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Name(name, context) if name in NAMES:
            yield ast.Name(NAMES[name], context)
        case ast.Attribute(value, name, context) if name in NAMES:
            yield ast.Attribute(value, NAMES[name], context)
        case ast.Call(ast.Attribute(_, name) | ast.Name(name), args, keywords):
            if name == "where":
                yield ast.Call(node.func, [args[0], *args[:0:-1]], keywords)
            if name in LEFT_OUT:
                yield args[0]
            for k in keywords:
                if k.arg not in (None, "strict"):
                    yield ast.Call(
                        node.func, args, [other for other in keywords if other is not k]
                    )


def mutants(source: str) -> Iterator[tuple[str, str, str]]:
    """Each change of a program: its line, the change in words, and the program with it."""
    tree, lines = ast.parse(source), source.splitlines()
    for holder, field, node in places(tree):
        for new in changed(node):
            replace(holder, field, node, new)
            words = f"{ast.unparse(node)} -> {ast.unparse(new)}"
            line = lines[node.lineno - 1].strip()
            yield line, words, ast.unparse(ast.fix_missing_locations(tree))
            replace(holder, field, new, node)


def places(holder: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Each node below one, but for types and messages, with what holds it."""
    for field, value in ast.iter_fields(holder):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for node in list(value) if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not isinstance(
                node, ast.Raise | ast.JoinedStr
            ):
                yield holder, field, node
                yield from places(node)


def replace(holder: ast.AST, field: str, old: ast.AST, new: ast.AST) -> None:
    value = getattr(holder, field)
    if isinstance(value, list):
        value[value.index(old)] = new
    else:
        setattr(holder, field, new)


def passes(path: pathlib.Path, source: str, tests: list[str], limit: int) -> bool:
    """Whether the tests pass with this program in the place of a file, within `limit` seconds."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    signal.alarm(limit)  # ends the fork
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    get_code = SourceFileLoader.get_code
    SourceFileLoader.get_code = lambda self, name: (
        compile(source, path, "exec")
        if self.path == str(path)
        else get_code(self, name)
    )
    os._exit(pytest.main([*OPTIONS, *tests]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", nargs="*", default=TESTS, help="files of the package in TESTS"
    )
    parser.add_argument(
        "--number", type=int, default=10, help="of changes of each file"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore")
    for name in IMPORTED.split():
        importlib.import_module(name)
    unnoticed = 0
    for name in options.files:
        path, tests = (
            ROOT / "optax_lossscale" / name,
            [f"tests/{t}" for t in TESTS[name].split()],
        )
        source, start = path.read_text(), time.monotonic()
        if not passes(path, source, tests, 600):
            sys.exit(f"{name}: its tests fail without a change")
        limit = int(3 * (time.monotonic() - start)) + 60
        drawn = random.Random(options.seed).sample([*mutants(source)], options.number)
        for line, words, mutant in drawn:
            if any(
                line.startswith(start) and words.startswith(same)
                for start, same in SAME
            ):
                continue
            passed = passes(path, mutant, tests, limit)
            unnoticed += passed
            print(
                "NOT NOTICED" if passed else "noticed",
                f"{name}, {line}: {words}",
                flush=True,
            )
    sys.exit(f"{unnoticed} not noticed by any quick test" if unnoticed else 0)


if __name__ == "__main__":
    main()
