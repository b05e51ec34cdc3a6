"""`python -m optax_lossscale.demo`: train in float16 with and without loss scaling."""

import argparse
import pathlib
import sys
import tempfile
from typing import NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of two; exit code 2."""
        self.exit(2, f"error: {message}\n")


def _int_at_least(least: int):
    def number(text: str) -> int:
        if not text.lstrip("+-").isdecimal() or not least <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"needs an integer of at least {least}, got {text!r}")
        return int(text)

    return number


def _writable_folder(path: str) -> pathlib.Path:
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return folder


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns its exit code."""
    parser = _Parser(prog="python -m optax_lossscale.demo", description=__doc__)
    parser.add_argument("--steps", type=_int_at_least(1), default=400, help="of each run (400)")
    parser.add_argument("--data", metavar="FILE", help="text to train on (Python's own source)")
    parser.add_argument("--out", metavar="DIR", default="demo_results", help="for the picture")
    parser.add_argument("--seed", type=_int_at_least(0), default=0, help="of all runs (0)")
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
    if runs:
        print(_report.table(runs))
        print(f"Picture: {_report.picture(runs, folder)}")
    return 0 if len(runs) == len(_training.RUNS) else 130


if __name__ == "__main__":
    sys.exit(main())
