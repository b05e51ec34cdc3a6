"""What loss scaling and autocast cost.

python -m benchmarks step            # steps on this machine: ten minutes
python -m benchmarks accelerators    # the same, compiled for GPUs and TPUs
python -m benchmarks autocast        # models in 16 bits, compiled likewise
python -m benchmarks gpu             # a report of your GPU, to send: ten minutes at most

Each prints its tables in Markdown. What is compiled is also written to a CSV file, a line a
program, as soon as it is there.
"""

import argparse
import importlib

# What to install for each.
EXTRAS = {
    "step": ".[benchmarks]",
    "accelerators": ".[compilers]",
    "autocast": ".[compilers]",
    "gpu": ".",
}


def main() -> None:
    """Runs a section, which is the module of that name."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("section", choices=EXTRAS)
    add("--quick", action="store_true", help="small sizes, to see that it runs")
    add("--only", nargs="+", metavar="NAME", help="these programs or models")
    add("--on", nargs="+", metavar="TARGET", help="these accelerators")
    add("--out", default="docs/benchmarks", help="folder of the CSV files")
    add("--report", action="store_true", help="print what a CSV file has")
    options = parser.parse_args()
    try:
        section = importlib.import_module(f"benchmarks._{options.section}")
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"python -m benchmarks {options.section} needs {error.name}: "
            f"pip install '{EXTRAS[options.section]}'"
        ) from None
    section.main(options)


if __name__ == "__main__":
    main()
