"""Trains a transformer in float32, and in float16 with and without loss scaling."""

import argparse
import pathlib
import sys
import tempfile
from functools import partial


def _int_from(least: int, text: str) -> int:
    """An option's number, from `least` to the largest int32."""
    most = 2**31 - 1
    if text.lstrip("+-").isdecimal() and least <= int(text) <= most:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"needs an integer from {least} to {most}, got {text!r}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m optax_lossscale.demo",
        description=__doc__,
        usage=argparse.SUPPRESS,  # so that an error is one line
    )
    option = parser.add_argument
    option(
        "--steps",
        type=partial(_int_from, 1),
        default=400,
        help="of each run (default: 400)",
    )
    option(
        "--data",
        metavar="FILE",
        help="text (default: Python's standard library's source)",
    )
    option(
        "--out", metavar="DIR", default="demo_results", help="(default: demo_results)"
    )
    option(
        "--seed", type=partial(_int_from, 0), default=0, help="of all runs (default: 0)"
    )
    options = parser.parse_args(arguments)
    try:
        from optax_lossscale.demo import _report, _text, _training
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is missing: pip install 'optax_lossscale[demo]'")
    try:
        text = _text.read(options.data)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    folder = pathlib.Path(options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        parser.error(f"--out {folder} is not a folder to write to: {error.strerror}")

    print(_training.SETTING)
    runs = {}
    try:
        for name in _training.RUNS:
            runs[name] = _training.train(name, text, options.steps, options.seed)
    except KeyboardInterrupt:
        print(f"Interrupted: {len(runs)} of {len(_training.RUNS)} runs were finished.")
    if runs:
        print(_report.table(runs), _training.CAUSE, sep="\n")
        print(f"Picture: {_report.picture(runs, folder)}")
    return 0 if len(runs) == len(_training.RUNS) else 130


if __name__ == "__main__":
    sys.exit(main())
