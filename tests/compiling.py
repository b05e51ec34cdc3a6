"""How tests compile: most of them in a fifth of the time, without optimizing kernels; for whom.

A test of what XLA makes of a program, of its cost or of which numbers it loses, compiles that with
`compiler_options=AS_USERS_DO`. `.ci/run` compiles the slow tests so.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.export

# The names are XLA's, for its compiler of CPUs, with their defaults and what is quick.
_OPTIONS = {
    "xla_backend_optimization_level": (3, 0),
    "xla_cpu_parallel_codegen_split_count": (32, 1),
}
if jax.__version_info__ < (0, 11):  # of a flag that it does not know, XLA dies
    _OPTIONS["xla_cpu_use_fusion_emitters"] = (True, False)
AS_USERS_DO = {name: default for name, (default, _) in _OPTIONS.items()}


def compile_quickly():
    """Here and in processes started from here, unless XLA_FLAGS is set, be it to nothing."""
    flags = [f"--{name}={str(quick).lower()}" for name, (_, quick) in _OPTIONS.items()]
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))


def lowered_for(platform: str, function: Callable[..., Any], **options: Any) -> Any:
    """The function compiled here, as JAX would give it to another platform's compiler.

    Where a program depends on the platform, what runs is what "cuda" or "tpu" would run.
    """
    if platform == "cpu":
        return jax.jit(function, **options)
    checks = [jax.export.DisabledSafetyCheck.platform()]

    def call(*args, **kwargs):
        export = jax.export.export(
            jax.jit(function), platforms=[platform], disabled_checks=checks
        )
        return export(*args, **kwargs).call(*args, **kwargs)

    return jax.jit(call, **options)
