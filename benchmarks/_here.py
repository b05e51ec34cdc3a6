"""What loss scaling costs on this machine: `python -m benchmarks`."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax
from tqdm import tqdm

from benchmarks import _machine, _report, _sections


def main(options: argparse.Namespace) -> None:
    """Runs the sections, and writes the numbers, the charts and the page."""
    out = pathlib.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.json"
    if not options.report:
        _measure(options, results)
    found = json.loads(results.read_text())
    _report.draw(found, out)
    (out / "README.md").write_text(_report.page(found))
    print(_report.page(found))


def _measure(options: argparse.Namespace, results: pathlib.Path) -> None:
    before = results.exists() and options.only
    found = json.loads(results.read_text()) if before else {}
    found |= {"machine": _machine.describe()}
    for name in tqdm(options.only or _sections.SECTIONS, desc="sections"):
        found[name] = _run(name, options.quick)
        results.write_text(json.dumps(found, indent=1) + "\n")


def _run(section: str, quick: bool) -> list[dict[str, Any]]:
    if section != "devices" or jax.device_count() > 1:
        return _sections.SECTIONS[section](quick)
    # Simulated devices share the cores' threads, which would disturb the other
    # sections.
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks",
            "--only",
            section,
            "--out",
            folder,
        ]
        command += ["--quick"] if quick else []
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads((pathlib.Path(folder) / "results.json").read_text())[section]
