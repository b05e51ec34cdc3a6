"""What is differentiated is cast first, and its gradients come in that dtype."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": jnp.linspace(0.0, 0.5, 3)}
X = jnp.linspace(-1.0, 2.0, 8).reshape(4, 2)
LS = ols.DynamicLossScale(1024.0)


def loss_fn(params, x):
    y = x.astype(params["w"].dtype) @ params["w"] + params["b"]
    return jnp.mean(y.astype(jnp.float32) ** 2)


@pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"]
)
def test_gradients_are_those_with_respect_to_the_cast_parameters(dtype):
    loss, grads = ols.value_and_scaled_grad(loss_fn, LS, grad_dtype=dtype)(PARAMS, X)
    cast = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    expected_loss, expected = ols.value_and_scaled_grad(loss_fn, LS)(cast, X)
    chex.assert_trees_all_equal(loss, expected_loss)
    chex.assert_trees_all_equal(grads, expected)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}
    chex.assert_trees_all_equal(
        ols.value_and_scaled_grad(loss_fn, LS, grad_dtype=dtype)(PARAMS, X)[1], grads
    )


def test_only_wider_floats_among_what_is_differentiated_are_cast():
    seen = {}

    def note(params, other, scale):
        seen.update(
            jax.tree.map(lambda x: jnp.asarray(x).dtype, {**params, "other": other})
        )
        return jnp.real(params["c"]).astype(jnp.float32) * scale

    params = {
        "w": jnp.float32(1),
        "half": jnp.float16(1),
        "byte": jnp.asarray(1, jnp.float8_e5m2),
        "c": jnp.complex64(1),
        "n": jnp.int32(1),
    }
    gradient = ols.value_and_scaled_grad(
        note, LS, (0, -1), grad_dtype=jnp.float16, allow_int=True
    )
    _, (grads, scale_grad) = gradient(params, jnp.float32(1), jnp.float32(2))
    names = ["w", "half", "byte", "c", "n", "other"]
    expected = ["float16", "float16", "float8_e5m2", "complex64", "int32", "float32"]
    assert [str(seen[name]) for name in names] == expected
    assert scale_grad.dtype == jnp.float16
    assert grads["w"].dtype == jnp.float16


def test_minimize_takes_the_step_of_value_and_grad():
    tx = ols.with_loss_scale(optax.adam(0.1), LS)
    state = tx.init(PARAMS)
    loss, params, after = tx.minimize(loss_fn, state, PARAMS, X, grad_dtype=jnp.float16)
    value, grads = ols.value_and_scaled_grad(loss_fn, state, grad_dtype=jnp.float16)(
        PARAMS, X
    )
    expected = tx.apply_gradients(grads, state, PARAMS, value=value)
    chex.assert_trees_all_equal((loss, (params, after)), (value, expected))
    chex.assert_trees_all_equal_dtypes(params, PARAMS)


@pytest.mark.about_cpus
def test_on_cpu_the_gradients_of_a_whole_step_take_half_the_memory():
    n, width = 8, 256
    params = [jnp.ones((width, width)) for _ in range(n)]
    tx = ols.with_loss_scale(optax.adamw(1e-3))

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w.astype(jnp.float16))
        return jnp.mean(x.astype(jnp.float32))

    def temporary(grad_dtype):
        def step(params, state, x):
            differentiate = ols.value_and_scaled_grad(
                loss_fn, state, grad_dtype=grad_dtype
            )
            loss, grads = differentiate(params, x)
            return *tx.apply_gradients(grads, state, params), loss

        x = jnp.ones((4, width), jnp.float16)
        step = jax.jit(step, donate_argnums=(0, 1))
        memory = step.lower(params, tx.init(params), x).compile().memory_analysis()
        return memory.temp_size_in_bytes / (4 * n * width**2)

    assert temporary(jnp.float16) < 1.2 < 1.8 < temporary(None)


@pytest.mark.parametrize("dtype", [jnp.int8, "flaot16", np.int32, bool, jnp.complex64])
def test_what_is_no_floating_point_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match="grad_dtype must be a floating-point dtype"):
        ols.value_and_scaled_grad(loss_fn, LS, grad_dtype=dtype)


PAIR = {"w": PARAMS["w"], "layers": [PARAMS["b"], {"scale": jnp.ones(3)}]}


def pair_loss(params, x, shift=0.0):
    y = x @ params["w"] + params["layers"][0] * params["layers"][1]["scale"] + shift
    return jnp.mean(y.astype(jnp.float32) ** 2)


def dtypes(tree):
    return [str(x.dtype) for x in jax.tree.leaves(tree)]  # of PAIR: b, scale, w


@pytest.mark.parametrize(
    ("grad_dtype", "expected"),
    [
        ({"w": jnp.float16, "layers": None}, ["float32", "float32", "float16"]),
        ({"w": None, "layers": "bfloat16"}, ["bfloat16", "bfloat16", "float32"]),
        (
            {"w": np.dtype("float16"), "layers": [jnp.bfloat16, {"scale": None}]},
            ["bfloat16", "float32", "float16"],
        ),
        (
            lambda params: {"w": jnp.float16, "layers": None},
            ["float32", "float32", "float16"],
        ),
        (
            lambda params: jax.tree.map(
                lambda p: jnp.float16 if p.ndim > 1 else None, params
            ),
            ["float32", "float32", "float16"],
        ),
        (lambda params: jnp.float16, ["float16"] * 3),
        (lambda params: None, ["float32"] * 3),
        (None, ["float32"] * 3),
    ],
)
def test_by_leaf_as_a_prefix_or_a_function(grad_dtype, expected):
    grads = ols.value_and_scaled_grad(pair_loss, LS, grad_dtype=grad_dtype)(PAIR, X)[1]
    assert dtypes(grads) == expected
    assert jax.tree.structure(grads) == jax.tree.structure(PAIR)


def test_the_last_argument_of_a_function_of_one():
    loss_fn = lambda params: jnp.sum(params["w"].astype(jnp.float32))
    grads = ols.value_and_scaled_grad(loss_fn, LS, argnums=-1, grad_dtype=jnp.float16)(
        PARAMS
    )[1]
    assert set(dtypes(grads)) == {"float16"}


def test_of_several_arguments_it_is_a_prefix_of_their_tuple():
    differentiate = lambda grad_dtype: ols.value_and_scaled_grad(
        pair_loss, LS, (-1, 0), grad_dtype=grad_dtype
    )(PAIR, X, jnp.ones(3))[1]
    assert dtypes(differentiate((None, jnp.float16))) == ["float32"] + ["float16"] * 3
    by_leaf = ("bfloat16", {"w": None, "layers": jnp.float16})
    assert dtypes(differentiate(by_leaf)) == [
        "bfloat16",
        "float16",
        "float16",
        "float32",
    ]
    assert dtypes(differentiate(lambda arguments: (jnp.float16, None)))[0] == "float16"
    with pytest.raises(ValueError, match="the prefix pytree"):
        differentiate([jnp.float16, None])
    (grad,) = ols.value_and_scaled_grad(pair_loss, LS, (2,), grad_dtype=(jnp.float16,))(
        PAIR, X, jnp.ones(3)
    )[1]
    assert grad.dtype == jnp.float16


def test_by_leaf_under_minimize_and_jit():
    tx = ols.with_loss_scale(optax.sgd(0.1), LS)
    seen = []

    @jax.jit
    def step(params, state, x):
        def noting(params, x):
            seen.extend(dtypes(params))
            return pair_loss(params, x)

        return tx.minimize(
            noting, state, params, x, grad_dtype={"w": jnp.float16, "layers": None}
        )

    _, params, _ = step(PAIR, tx.init(PAIR), X)
    assert seen == ["float32", "float32", "float16"]
    chex.assert_trees_all_equal_dtypes(params, PAIR)


def test_a_parameter_that_is_none_stays_none():
    params = {"w": jnp.ones(3), "frozen": None}
    loss = lambda params: jnp.sum(params["w"].astype(jnp.float32))
    for grad_dtype in [jnp.float16, {"w": jnp.float16, "frozen": None}]:
        grads = ols.value_and_scaled_grad(loss, LS, grad_dtype=grad_dtype)(params)[1]
        assert grads["w"].dtype == jnp.float16
        assert grads["frozen"] is None


@pytest.mark.parametrize(
    "grad_dtype",
    [{"w": jnp.float16, "layers": jnp.int8}, {"w": True}, [None, "flaot16"], 3],
    ids=["integers", "a bool", "misspelt", "a number"],
)
def test_a_tree_with_other_leaves_is_refused(grad_dtype):
    with pytest.raises(ValueError, match="grad_dtype must be a floating-point dtype"):
        ols.value_and_scaled_grad(pair_loss, LS, grad_dtype=grad_dtype)
    with pytest.raises(ValueError, match="grad_dtype must be a floating-point dtype"):
        ols.value_and_scaled_grad(pair_loss, LS, grad_dtype=lambda params: grad_dtype)(
            PAIR, X
        )


@pytest.mark.parametrize("wrap", [lambda tree: tree, lambda tree: lambda params: tree])
def test_a_tree_that_is_no_prefix_is_refused(wrap):
    differentiate = ols.value_and_scaled_grad(
        pair_loss, LS, grad_dtype=wrap({"w": jnp.float16})
    )
    with pytest.raises(ValueError, match="the prefix pytree"):
        differentiate(PAIR, X)
