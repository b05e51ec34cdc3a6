"""Measures what mixed precision and loss scaling cost.

python -m benchmarks gpu             # a report of your GPU, to send: ten minutes at most
python -m benchmarks                 # all that it costs on this machine: 25 minutes on two cores
python -m benchmarks --quick         # small sizes, to see that it runs
python -m benchmarks accelerators    # the same, compiled for GPUs and TPUs but not run
python -m benchmarks autocast        # models under autocast, compiled likewise; 10 minutes

The first needs nothing but the library, and prints its report. The others need extras, and write
all their numbers to a file beside a page of docs/benchmarks: results.json, or a CSV file.
"""

import argparse
import importlib

# What each needs to be installed, as pip calls it.
COMMANDS = {
    "here": ".[benchmarks]",
    "gpu": ".",
    "accelerators": ".[compilers]",
    "autocast": ".[compilers]",
}


def main() -> None:
    """Runs what is asked for, which is the module of that name."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", default="here", choices=COMMANDS)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument(
        "--out",
        default="docs/benchmarks",
        help="where the results go; default: %(default)s",
    )
    parser.add_argument("--only", nargs="+", help="sections to run anew; default: all")
    parser.add_argument(
        "--report", action="store_true", help="redraw from the results alone"
    )
    options = parser.parse_args()
    try:
        command = importlib.import_module(f"benchmarks._{options.what}")
    except ModuleNotFoundError as error:
        needed = COMMANDS[options.what]
        raise SystemExit(
            f"python -m benchmarks {options.what} needs {error.name}: pip install '{needed}'"
        ) from None
    command.main(options)


if __name__ == "__main__":
    main()
