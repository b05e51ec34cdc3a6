"""A plugin for pytest, `-p as_on_gpu`: `lax.platform_dependent` takes on a CPU what a GPU gets.

So the choices that the package makes for a GPU are executed here, inside the same conditional.
`.ci/run gpu` runs the tests of what makes such choices with it, apart from those `about_cpus`.
What asks `jax.default_backend()` is not changed, nor what JAX itself chooses by platform.
"""

from jax import lax

_platform_dependent = lax.platform_dependent


def _for_gpu(*args, default=None, **per_platform):
    per_platform["cpu"] = per_platform.get("cuda", default)
    return _platform_dependent(*args, default=default, **per_platform)


def pytest_configure():
    lax.platform_dependent = _for_gpu
