"""How tests compile: most of them in a fifth of the time, without optimizing kernels.

A test of what XLA makes of a program, of its cost or of which numbers it loses, compiles that with
`compiler_options=AS_USERS_DO`. `.ci/run` compiles the slow tests so.
"""

import os

import jax

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
