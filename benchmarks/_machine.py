"""What a benchmark runs on: processor, device, driver and versions."""

import os
import pathlib
import platform
import subprocess
from importlib import metadata
from typing import Any

import jax
import jaxlib
import optax
from jax.extend import backend

import optax_lossscale as ols

ROOT = pathlib.Path(__file__).parents[1]
# What these packages are called goes on with the CUDA that they are for.
_OF_GPUS = ("jax-cuda", "jax-rocm", "nvidia-cublas", "nvidia-cudnn", "nvidia-cuda-nvcc")
_SETTINGS = ("XLA_", "JAX_", "NVIDIA_TF32_")


def describe() -> dict[str, Any]:
    """This machine, as results.json has it."""
    return {
        "processor": processor(),
        "cores": cores(),
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "optax": optax.__version__,
        "optax_lossscale": ols.__version__,
        "python": platform.python_version(),
    }


def for_report() -> dict[str, str]:
    """This machine, as a report of a GPU has it; asks JAX for its devices."""
    first, *others = jax.devices()
    library = f"optax_lossscale {ols.__version__} {commit()}".strip()
    installed = [library, f"Python {platform.python_version()}", *_versions()]
    return {
        "platform": first.platform,
        "device": first.device_kind,
        "devices": f"{1 + len(others)}, of which the first was used",
        "cards, drivers": cards(),
        "runtime": runtime(),
        "processor": f"{processor()}, {cores()} cores",
        "versions": ", ".join(installed),
        "settings": ", ".join(
            f"`{name}={value}`" for name, value in settings().items()
        ),
    }


def processor() -> str:
    """Its name, or nothing where it cannot be told."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (x.split(":")[1].strip() for x in lines if x.startswith("model name")), ""
    )


def cores() -> int:
    """How many this process may use, where the system says so, or how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def runtime() -> str:
    """The version of what runs programs on the device, such as CUDA, in JAX's words."""
    *_, last = backend.get_backend().platform_version.splitlines()
    return last


def cards() -> str:
    """Names, drivers, memory and power limits of the NVIDIA cards here, if they are known."""
    query = "--query-gpu=name,driver_version,memory.total,power.limit"
    try:
        lines = _output("nvidia-smi", query, "--format=csv,noheader").splitlines()
    except (OSError, subprocess.CalledProcessError):
        return "`nvidia-smi` says nothing"
    return "; ".join(dict.fromkeys(lines))


def commit() -> str:
    """The checkout's, marked if something was changed since, or nothing where there is no git."""
    try:
        return _output("git", "describe", "--always", "--dirty", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return ""


def settings() -> dict[str, str]:
    """The variables of the environment that change how programs are compiled and run."""
    names = sorted(name for name in os.environ if name.startswith(_SETTINGS))
    return {name: os.environ[name] for name in names}


def _versions() -> list[str]:
    """Of the installed packages that decide how fast a program is."""
    installed = {d.name.lower(): d.version for d in metadata.distributions() if d.name}
    of_gpus = sorted(name for name in installed if name.startswith(_OF_GPUS))
    return [
        f"{name} {installed[name]}" for name in ("jax", "jaxlib", "optax", *of_gpus)
    ]


def _output(*command: str) -> str:
    result = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    )
    return result.stdout.strip()
