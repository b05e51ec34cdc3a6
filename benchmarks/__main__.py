"""Measures everything and writes the tables, the charts and the numbers.

python -m benchmarks                 # what it costs on this machine: 25 minutes on two cores
python -m benchmarks --quick         # small sizes, to see that it runs
python -m benchmarks accelerators    # the same, compiled for GPUs and TPUs but not run
python -m benchmarks autocast        # models under autocast, compiled likewise; 10 minutes
python -m benchmarks policies        # loss scales side by side; 27 minutes
python -m benchmarks skips           # the tables of docs/benchmarks/skips.md; 15 minutes

With a GPU the first runs there, with models in 16 bits besides: `python -m benchmarks --out DIR`.
Each writes all its numbers to a file beside its page: results.json, or a CSV file.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jaxlib
import optax
from tqdm import tqdm

import optax_lossscale as ols
from benchmarks import _accelerators, _autocast, _policies, _report, _sections, _skips, _tables


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")


def _run(section: str, quick: bool) -> list[dict[str, Any]]:
    if section != "devices" or jax.device_count() > 1:
        return _sections.SECTIONS[section](quick)
    # Simulated devices share the cores' threads, which would disturb the other sections.
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks", "--only", section, "--out", folder]
        command += ["--quick"] if quick else []
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads((pathlib.Path(folder) / "results.json").read_text())[section]


def _machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "optax": optax.__version__,
        "optax_lossscale": ols.__version__,
        "python": platform.python_version(),
    }


def main():
    """Runs the sections and writes what they found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    what = ["here", "accelerators", "autocast", "policies", "skips"]
    parser.add_argument("what", nargs="?", default="here", choices=what)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--out", help="where the results go; default: docs/benchmarks")
    parser.add_argument("--only", nargs="+", help="sections to run anew; default: all")
    parser.add_argument("--report", action="store_true", help="redraw from the results alone")
    options = parser.parse_args()
    if options.what == "skips":
        _skips.main(options.quick, report=options.report)
        return

    out = pathlib.Path(options.out or "docs/benchmarks")
    out.mkdir(parents=True, exist_ok=True)
    if options.what == "policies":
        _policies.main(options.quick, out, options.report)
        return
    if options.what in ("accelerators", "autocast"):
        csv = out / f"{options.what}.csv"
        if options.what == "autocast":
            module, measure = _autocast, _autocast.measure
        else:
            steps = options.only or _accelerators.STEPS
            module = _accelerators
            before = _tables.read(csv) if options.only else {}
            measure = lambda: before | module.tables(module.measure(options.quick, steps))
        if not options.report:
            _tables.write(csv, measure())
        page = module.page(_tables.read(csv))
        csv.with_suffix(".md").write_text(page)
        print(page)
        return
    results = out / "results.json"
    if not options.report:
        before = results.exists() and options.only
        found = json.loads(results.read_text()) if before else {}
        found |= {"machine": _machine()}
        for name in tqdm(options.only or _sections.SECTIONS, desc="sections"):
            found[name] = _run(name, options.quick)
            results.write_text(json.dumps(found, indent=1) + "\n")
    found = json.loads(results.read_text())
    _report.draw(found, out)
    (out / "README.md").write_text(_report.page(found))
    print(_report.page(found))


if __name__ == "__main__":
    main()
