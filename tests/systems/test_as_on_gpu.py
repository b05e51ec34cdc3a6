"""Tests that run as on a GPU take a GPU's choices, and all others a CPU's."""

import as_on_gpu
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import optax_lossscale as ols

PARAMS = {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}


@pytest.fixture(params=["as this run is", "as on a GPU"])
def on_gpu(request, monkeypatch):
    """Whether choices by platform are a GPU's: in this run, or once the plugin is loaded."""
    if request.param == "as this run is":
        return request.config.pluginmanager.has_plugin("as_on_gpu")
    # to be restored
    monkeypatch.setattr(lax, "platform_dependent", lax.platform_dependent)
    as_on_gpu.pytest_configure()
    return True


@pytest.mark.parametrize("compiled", [False, True])
def test_cudas_choice_is_taken_or_else_the_default(compiled, on_gpu):
    named = {
        name: lambda x, name=name: x + len(name) for name in ("cpu", "tpu", "cuda")
    }
    default = lambda x: x + 100
    how = jax.jit if compiled else lambda f: f
    assert how(lambda x: lax.platform_dependent(x, **named))(0) == (4 if on_gpu else 3)
    del named["cuda"]
    choose = how(lambda x: lax.platform_dependent(x, default=default, **named))
    assert choose(0) == (100 if on_gpu else 3)


def test_a_step_is_skipped_as_on_a_gpu(on_gpu):
    """By a select: the inner optimizer runs all the same, for a step that is dropped."""
    runs = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda: runs.append(True))
        return updates, state

    tx = ols.with_loss_scale(
        optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    )
    state = tx.init(PARAMS)
    bad = jax.tree.map(lambda x: x * jnp.nan, PARAMS)
    params, state = jax.jit(tx.apply_gradients)(bad, state, PARAMS)
    jax.effects_barrier()
    assert not state.should_apply
    assert len(runs) == (1 if on_gpu else 0)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, params, PARAMS))
