"""What the package needs of others at import, and that it needs no more."""

import subprocess
import sys
import textwrap

import pytest

# Before the import, each takes away something that is no promise of Optax's.
WITHOUT = {
    "a chain that is refactored": """
        chain = optax.chain
        def refactored(*args):
            tx = chain(*args)
            return optax.GradientTransformationExtraArgs(
                functools.partial(lambda init, params: init(params), tx.init),
                functools.partial(lambda update, *args, **kw: update(*args, **kw), tx.update),
            )
        optax.chain = refactored
        optax.named_chain = lambda *named: refactored(*(tx for _, tx in named))
    """,
    "the states of optimizers": """
        for module in (optax, optax.contrib):
            for name in dir(module):
                if name.endswith("State") and name not in ("OptState", "EmptyState"):
                    delattr(module, name)
    """,
    "optax.contrib": """
        del optax.contrib
        sys.modules["optax.contrib"] = None
    """,
}


@pytest.mark.parametrize("without", WITHOUT.values(), ids=WITHOUT)
def test_the_package_is_imported_and_takes_a_step_without(without):
    script = """
        import functools, sys
        import jax.numpy as jnp
        import optax
        WITHOUT
        import optax_lossscale as ols
        inner = optax.chain(optax.clip(1.0), ols.with_master_weights(optax.chain(optax.sgd(0.5))))
        tx = ols.with_loss_scale(inner, skip=ols.skips.spikes())
        params = {"w": jnp.ones(3, jnp.bfloat16)}
        state = tx.init(params)
        loss_fn = lambda p: p["w"].sum(dtype=jnp.float32)
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params)
        params, state = tx.apply_gradients(grads, state, params, value=loss)
        assert (params["w"] == 0.5).all() and ols.metrics(state)["should_apply"]
    """
    script = textwrap.dedent(script).replace("WITHOUT\n", textwrap.dedent(without))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_what_reads_programs_or_draws_is_imported_when_it_is_used():
    script = """
        import sys
        import optax_lossscale as ols
        late = ("_programs", "_autocast", "testing", "plot")
        ours = [name for name in sys.modules if name.startswith("optax_lossscale.")]
        imported = {name.split(".")[1] for name in ours}
        assert not imported.intersection(late), imported
        assert set(ols.__all__) <= set(dir(ols)) and callable(ols.autocast)
        assert "optax_lossscale._programs.operations" in sys.modules
        assert callable(ols.dtype_report) and callable(ols.testing.assert_computes_in)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)
