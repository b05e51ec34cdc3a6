"""What a benchmark runs on: versions, processor, card."""

import os
import pathlib
import platform
import subprocess
from importlib import metadata

import jax
from jax.extend import backend

import optax_lossscale as ols

# Of what decides how fast a program is. Some names go on with the version of CUDA.
_PACKAGES = (
    "jax", "jaxlib", "optax", "libtpu", "jax-cuda", "jax-rocm", "nvidia-cublas",
    "nvidia-cudnn", "nvidia-cuda-nvcc",
)  # fmt: skip
_SETTINGS = ("XLA_", "JAX_", "NVIDIA_TF32_")


def versions() -> str:
    """Of this library and of those that compile."""
    installed = {d.name.lower(): d.version for d in metadata.distributions() if d.name}
    is_one = lambda name: name in _PACKAGES[:3] or name.startswith(_PACKAGES[3:])
    found = [f"{name} {installed[name]}" for name in sorted(installed) if is_one(name)]
    return ", ".join([f"optax_lossscale {ols.__version__}", *found])


def here() -> str:
    """Versions and processor, in a line."""
    python = f"Python {platform.python_version()}"
    return f"{versions()}, {python}; {processor()}, {os.cpu_count()} cores"


def device() -> dict[str, str]:
    """What a report of a GPU begins with; asks JAX for its devices."""
    first, *_ = jax.devices()
    # The last line is CUDA's version, or ROCm's.
    runtime = backend.get_backend().platform_version.splitlines()[-1]
    settings = sorted(f"`{k}={v}`" for k, v in os.environ.items() if _is_setting(k))
    return {
        "platform": first.platform,
        "device": first.device_kind,
        "cards, drivers": cards(),
        "runtime": runtime,
        "versions, processor": here(),
        "checkout": _output("git", "describe", "--always", "--dirty", "--exclude=*"),
        "settings": ", ".join(settings),
    }


def processor() -> str:
    """Its name, as far as the system tells it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":")[1].strip() for line in lines if "model name" in line)
    return next(names, platform.processor())


def cards() -> str:
    """Name, driver, memory and power limit of NVIDIA's cards."""
    query = "--query-gpu=name,driver_version,memory.total,power.limit"
    lines = _output("nvidia-smi", query, "--format=csv,noheader").splitlines()
    return "; ".join(dict.fromkeys(lines)) or "`nvidia-smi` says nothing"


def _is_setting(name: str) -> bool:
    return name.startswith(_SETTINGS)


def _output(*command: str) -> str:
    """What a program prints, or nothing if it is not there or fails."""
    root = pathlib.Path(__file__).parents[1]
    try:
        result = subprocess.run(
            command, cwd=root, check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout.strip()
