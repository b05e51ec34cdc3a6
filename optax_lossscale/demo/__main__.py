"""Trains a transformer in float32, and in float16 with and without loss scaling."""

import argparse
import pathlib
import sys
import tempfile
from typing import NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of two; exit code 2."""
        self.exit(2, f"error: {message} (--help explains)\n")


def _int_from(least: int):
    def number(text: str) -> int:
        most = 2**31 - 1
        if not text.lstrip("+-").isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"needs an integer from {least} to {most}, got {text!r}"
            )
        return int(text)

    return number


def _writable_folder(path: str) -> pathlib.Path:
    folder = pathlib.Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ValueError(f"--out {path} is no folder to write to: {error.strerror}") from error


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns its exit code."""
    parser = _Parser(prog="python -m optax_lossscale.demo", description=__doc__)
    parser.add_argument(
        "--steps", type=_int_from(1), default=400, help="steps of each run (default: 400)"
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="the text to train on (default: the source of Python's standard library)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        default="demo_results",
        help="the folder to put the picture in (default: demo_results)",
    )
    parser.add_argument(
        "--seed", type=_int_from(0), default=0, help="random seed of all runs (default: 0)"
    )
    options = parser.parse_args(arguments)
    try:
        from tqdm import tqdm

        from optax_lossscale.demo import _report, _text, _training
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is missing: pip install 'optax_lossscale[demo]'")
    try:
        text = _text.read(options.data)
        folder = _writable_folder(options.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))

    print(_training.SETTING)
    runs = []
    try:
        for name in _training.RUNS:
            with tqdm(total=options.steps, desc=f"{name:24}", unit="step") as bar:

                def progress(loss, loss_scale, bar=bar):
                    bar.update()
                    if bar.n % 10 == 0 or bar.n == bar.total:  # reading them waits for the device
                        bar.set_postfix(loss=f"{loss:.3f}", scale=f"{loss_scale:g}")

                runs.append(_training.train(name, text, options.steps, options.seed, progress))
    except KeyboardInterrupt:
        print(f"Interrupted: {len(runs)} of {len(_training.RUNS)} runs were finished.")
        if not runs:
            print("There is nothing to show yet.")
    if runs:
        print(_report.table(runs))
        print(f"Picture: {_report.picture(runs, folder)}")
    return 0 if len(runs) == len(_training.RUNS) else 130


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the first run
        sys.exit(130)
