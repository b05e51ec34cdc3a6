"""JAX's caches know of what a traced function is told."""

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols

X = jnp.eye(4)


@jax.jit
def squared(x):
    return x @ x


def test_a_function_compiled_outside_of_autocast_is_traced_anew_inside_and_stays_as_it_was():
    assert squared(X).dtype == jnp.float32
    assert set(ols.dtype_report(ols.autocast(squared), X).shares) == {
        jnp.dtype("float16")
    }
    assert set(ols.dtype_report(squared, X).shares) == {jnp.dtype("float32")}


def test_what_an_assertion_tells_metrics_ends_with_it():
    tx = ols.with_loss_scale(optax.sgd(0.1))

    @jax.jit
    def step(params, state):
        loss, params, state = tx.minimize(lambda x: jnp.sum(squared(x)), state, params)
        return params, state, loss, ols.metrics(state)

    state = tx.init(X)
    state = state._replace(loss_scale=state.loss_scale.adjust(False))
    for _ in range(2):
        assert step(X, state)[-1]["loss_scale"] == state.loss_scale()
        ols.testing.assert_scale_invariant(step, X, state)
