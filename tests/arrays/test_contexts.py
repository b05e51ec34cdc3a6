"""JAX's caches know of what a traced function is told, and of nothing else."""

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp

import optax_lossscale as ols
from optax_lossscale._arrays.contexts import Context


def test_importing_the_package_and_taking_a_step_traces_nothing_anew():
    script = """
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
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_kernel_is_given_16_bits_inside_of_autocast_and_none_are_left_behind():
    dtypes = []

    def kernel(x):
        dtypes.append(x.dtype)
        return x

    inner = lambda x: jax.jit(ols.cast_inputs(kernel))(x) @ x
    outer = lambda x: ols.autocast(inner)(x) + ols.cast_inputs(kernel)(x) @ x
    x = jnp.eye(4)
    jax.make_jaxpr(ols.autocast(outer, jnp.bfloat16))(x)
    assert dtypes == ["float16", "bfloat16"]
    jax.jit(ols.cast_inputs(kernel))(x)
    assert dtypes[2:] == ["float32"]


def test_a_thread_that_makes_a_setting_leaves_the_values_of_others_alone():
    setting = Context()
    seen = []

    def make():
        setting.create()
        seen.append(setting.value)

    with setting("outer"), setting("inner"):
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        setting.create()
        assert setting.value == "inner"
    assert seen == [None]
    assert setting.value is None


def test_a_function_that_diagnose_has_traced_is_scaled_again_afterwards():
    loss_fn = jax.jit(lambda p: ols.scale_gradient(jnp.sum(p**2), 8))
    ols.diagnose(loss_fn, jnp.ones(2))
    assert jax.grad(loss_fn)(jnp.ones(2))[0] == 16
