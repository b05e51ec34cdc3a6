"""Tests that run as on a GPU take a GPU's choices, and all others a CPU's."""

import as_on_gpu
import jax
import pytest
from jax import lax


@pytest.fixture(params=["as this run is", "as on a GPU"])
def on_gpu(request, monkeypatch):
    """Whether choices by platform are a GPU's: in this run, or once the plugin is loaded."""
    if request.param == "as this run is":
        return request.config.pluginmanager.has_plugin("as_on_gpu")
    # to be restored
    monkeypatch.setattr(lax, "platform_dependent", lax.platform_dependent)
    as_on_gpu.pytest_configure()
    return True


@pytest.mark.parametrize("how", [jax.jit, lambda f: f])
def test_cudas_choice_is_taken_or_else_the_default(how, on_gpu):
    forms = {"cpu": lambda x: x + 1, "cuda": lambda x: x + 2}
    default = lambda x: x + 3
    choose = how(lambda x: lax.platform_dependent(x, **forms))
    assert choose(0) == (2 if on_gpu else 1)
    choose = how(lambda x: lax.platform_dependent(x, cpu=forms["cpu"], default=default))
    assert choose(0) == (3 if on_gpu else 1)
