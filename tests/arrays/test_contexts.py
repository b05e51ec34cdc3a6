"""JAX's caches know of what a traced function is told, and of nothing else."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols


def run(script):
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_importing_the_package_and_taking_a_step_traces_nothing_anew():
    run("""
        import jax, jax.numpy as jnp, optax
        traces = []
        @jax.jit
        def squared(x):
            traces.append(x)
            return x @ x
        squared(jnp.eye(4))
        import optax_lossscale as ols
        squared(jnp.eye(4))
        tx = ols.with_loss_scale(optax.sgd(0.1))
        step = jax.jit(lambda p, s: tx.minimize(lambda p: (p ** 2).sum(), s, p))
        step(jnp.ones(3), tx.init(jnp.ones(3)))
        squared(jnp.eye(4))
        assert len(traces) == 1
    """)


def test_a_kernel_that_is_wrapped_inside_of_autocast_is_given_16_bits():
    """Where nothing has asked for the dtype before, and none is left behind."""
    run("""
        import jax, jax.numpy as jnp
        import optax_lossscale as ols
        dtypes = []
        def kernel(x):
            dtypes.append(x.dtype)
            return x
        inner = lambda x: jax.jit(ols.cast_inputs(kernel))(x) @ x
        outer = lambda x: ols.autocast(inner)(x) + ols.cast_inputs(kernel)(x) @ x
        x = jnp.eye(4)
        jax.make_jaxpr(ols.autocast(outer, jnp.bfloat16))(x)
        assert dtypes == ["float16", "bfloat16"], dtypes
        ols.cast_inputs(kernel)(x)
        jax.jit(ols.cast_inputs(kernel))(x)
        assert dtypes[2:] == ["float32", "float32"], dtypes
    """)


def test_a_function_that_diagnose_has_traced_is_scaled_again_afterwards():
    tx = ols.with_loss_scale(optax.sgd(0.1), 8)
    state = tx.init(jnp.ones(2))
    loss_fn = jax.jit(lambda p: ols.scale_gradient(jnp.sum(p**2), state))
    ols.diagnose(loss_fn, jnp.ones(2))
    assert jax.grad(loss_fn)(jnp.ones(2))[0] == 16
