"""`minimize`: the loss, its gradients and the step in one call."""

import functools
import warnings

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the framework's, not ours
    from flax import nnx

PARAMS = {"w": jnp.array([1.0, -2.0])}
TX = ols.with_loss_scale(optax.sgd(0.1))
STATE = TX.init(PARAMS)


def loss_fn(params, x=1.0):
    return jnp.sum((params["w"] * x) ** 2)


def test_is_the_gradient_and_the_step():
    loss, params, state = jax.jit(functools.partial(TX.minimize, loss_fn))(
        STATE, PARAMS, 2.0
    )
    expected, scaled_grads = ols.value_and_scaled_grad(loss_fn, STATE)(PARAMS, 2.0)
    assert loss == expected == 20
    step = TX.apply_gradients(scaled_grads, STATE, PARAMS, value=loss)
    chex.assert_trees_all_close((params, state), step, rtol=1e-6)


@pytest.mark.parametrize("name", ["state", "params", "loss_fn", "self", "value", "x"])
def test_a_function_may_have_keywords_of_any_name_that_is_not_an_option(name):
    own = lambda p, **kwargs: loss_fn(p, kwargs[name])
    assert TX.minimize(own, STATE, PARAMS, **{name: 2.0})[0] == 20


def test_aux_comes_back_beside_the_loss():
    with_aux = lambda p, x: (loss_fn(p, x), {"x": x})
    minimize = jax.jit(functools.partial(TX.minimize, with_aux, has_aux=True))
    (loss, aux), _, state = minimize(STATE, PARAMS, 2.0)
    assert (loss, aux["x"], state.should_apply) == (20, 2, True)
    _, params, state = minimize(state, PARAMS, jnp.nan)
    chex.assert_trees_all_equal(params, PARAMS)
    assert not state.should_apply


def test_integers_among_the_parameters_stay():
    params = PARAMS | {"n": jnp.arange(3)}
    _, after, state = TX.minimize(loss_fn, TX.init(params), params)
    assert state.should_apply
    assert after["n"].tolist() == [0, 1, 2]
    assert (after["w"] != params["w"]).all()


X, Y = jnp.linspace(-1, 1, 32).reshape(8, 4), jnp.ones((8, 2))


def takes_steps(of_params, params):
    """Whether the loss falls in two steps of `minimize`, with all products in float16."""

    def step(params, state, x, y):
        loss = lambda params, x, y: jnp.mean((of_params(params)(x) - y) ** 2)
        return TX.minimize(ols.autocast(loss), state, params, x, y)

    state = TX.init(params)
    ols.testing.assert_computes_in(step, jnp.float16, params, state, X, Y)
    first, params, state = jax.jit(step)(params, state, X, Y)
    second, params, _ = jax.jit(step)(params, state, X, Y)
    return params, second < first


def test_the_arrays_of_an_equinox_model():
    model = eqx.nn.MLP(4, 2, width_size=8, depth=1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    model_of = lambda params: jax.vmap(eqx.combine(params, static))
    trained, falls = takes_steps(model_of, params)
    assert falls
    assert isinstance(eqx.combine(trained, static), eqx.nn.MLP)
    said = r"eqx\.partition\(model, eqx\.is_inexact_array\)"
    with pytest.raises(TypeError, match=said):
        TX.minimize(lambda model: jnp.mean(jax.vmap(model)(X)), STATE, model)


def test_the_parameters_of_an_nnx_module():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    model_of = lambda params: nnx.merge(graphdef, params, rest)
    trained, falls = takes_steps(model_of, params)
    assert falls
    nnx.update(model, trained)
    with pytest.raises(TypeError, match=r"nnx\.split\(model, nnx\.Param, \.\.\.\)"):
        TX.minimize(lambda model: jnp.mean(model(X)), STATE, model)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    for state in (optimizer, optimizer.opt_state):
        said = r"nnx\.Optimizer .*optimizer\.update\(model, scaled"
        with pytest.raises(TypeError, match=said):
            TX.minimize(loss_fn, state, trained)
