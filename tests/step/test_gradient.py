import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}
LS = ols.DynamicLossScale(initial_scale=1024)


def loss_fn(params, x=1.0):
    return jnp.sin(params["w"] * x).sum() / 3 + params["b"] ** 2


def test_loss_is_the_functions_own_bit_for_bit():
    loss, _ = jax.jit(ols.value_and_scaled_grad(loss_fn, LS))(PARAMS)
    assert loss == jax.jit(loss_fn)(PARAMS)
    half = lambda p: loss_fn(p).astype(jnp.float16)
    loss, _ = ols.value_and_scaled_grad(half, 1024)(PARAMS)
    assert loss.dtype == jnp.float16
    assert loss == half(PARAMS)


def test_gradients_are_still_scaled():
    _, grads = ols.value_and_scaled_grad(loss_fn, LS)(PARAMS, x=2.0)
    expected = jax.tree.map(lambda g: g * 1024, jax.grad(loss_fn)(PARAMS, x=2.0))
    chex.assert_trees_all_equal(grads, expected)


def test_rescues_gradients_that_float16_flushes():
    tiny = lambda p: jnp.sum(p.astype(jnp.float16).astype(jnp.float32)) * 1e-8
    params = jnp.ones(3)
    assert (jax.grad(tiny)(params) == 0).all()
    rescued = LS.unscale(ols.value_and_scaled_grad(tiny, LS)(params)[1])
    np.testing.assert_allclose(rescued, 1e-8, rtol=1e-2)


def test_float16_loss_may_be_scaled_by_more_than_float16_holds():
    fun = lambda p: (p * p).sum()
    loss_scale = ols.FixedLossScale(2.0**20)
    assert loss_scale.scale(fun(jnp.ones(2, jnp.float16))) == 2.0**21


def test_passes_has_aux_argnums_and_further_arguments_on():
    fun = lambda x, y: (x * y, {"aux": x + y})
    value, grads = ols.value_and_scaled_grad(fun, LS, argnums=(0, 1), has_aux=True)(
        2.0, 3.0
    )
    assert value == (6.0, {"aux": 5.0})
    assert grads == (3072.0, 2048.0)
    _, g = ols.value_and_scaled_grad(lambda n: n * 1.0, LS, allow_int=True)(3)
    assert g.dtype == jax.dtypes.float0


@pytest.mark.parametrize("argnums", [(0, 0), (0, -2), (-1, 1)])
def test_an_argument_is_not_named_twice_from_the_end_either(argnums):
    with pytest.raises(ValueError, match="argnums must name each argument once"):
        ols.value_and_scaled_grad(jnp.dot, LS, argnums)(jnp.ones(2), jnp.ones(2))


def test_integers_among_the_parameters_are_refused():
    params = {"w": jnp.ones(3), "step": jnp.arange(3)}
    fun = lambda params: jnp.sum(params["w"])
    with pytest.raises(TypeError, match="got int32"):
        ols.value_and_scaled_grad(fun, LS)(params)


def test_is_named_as_the_function():
    assert ols.value_and_scaled_grad(loss_fn, LS).__name__ == "loss_fn"


@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, optax.chain, lambda tx: optax.named_chain(("scaled", tx))]
)
def test_takes_an_optimizer_state(wrap):
    state = wrap(ols.with_loss_scale(optax.sgd(0.1), LS)).init(PARAMS)
    expected = ols.value_and_scaled_grad(loss_fn, LS)(PARAMS)[1]
    chex.assert_trees_all_equal(
        ols.value_and_scaled_grad(loss_fn, state)(PARAMS)[1], expected
    )


def test_a_state_without_a_loss_scale_is_refused():
    with pytest.raises(ValueError, match="exactly one loss scale"):
        ols.value_and_scaled_grad(loss_fn, optax.sgd(0.1).init(PARAMS))


def test_what_is_no_array_is_refused_by_its_place():
    params = {"layers": [PARAMS, {"name": "last"}]}
    for refused in (
        lambda: ols.value_and_scaled_grad(lambda params: 0.0, LS)(params),
        lambda: ols.with_loss_scale(optax.sgd(0.1)).init(params),
    ):
        with pytest.raises(TypeError, match="the leaf at layers/1/name is 'last'"):
            refused()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda p: p["w"], r"got shape \(2,\); reduce it"),
        (lambda p: p["b"][None], r"shape \(1,\)"),
        (lambda p: p["b"].astype(jnp.int32), "grad requires real.*int32"),
        (lambda p: p["b"].astype(jnp.complex64), "a real number, got .*complex64"),
        (lambda p: (p["b"], {"aux": 1}), "of a pair .* has_aux=True"),
        (lambda p: (p["b"], p["b"]), "of a pair .* has_aux=True"),
        (lambda p: None, r"a real number, got None(\n|$)"),
    ],
)
def test_a_loss_that_is_no_real_scalar_is_refused(loss, said):
    with pytest.raises(TypeError, match=said):
        jax.jit(ols.value_and_scaled_grad(loss, LS))(PARAMS)


@pytest.mark.parametrize("value", [lambda p: p["b"], lambda p: (p["b"],), lambda p: p])
def test_has_aux_needs_a_pair(value):
    with pytest.raises(TypeError, match=r"must return a pair \(loss, aux\), got a "):
        ols.value_and_scaled_grad(value, LS, has_aux=True)(PARAMS)


def test_evaluates_abstractly():
    shapes = jax.eval_shape(ols.value_and_scaled_grad(loss_fn, LS), PARAMS)
    assert shapes[0].shape == ()
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes[1], PARAMS)
