"""`assert_computes_in`, on models as others write them, traced and never run."""

import pathlib
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the frameworks', not ours
    import equinox as eqx
    from flax import linen as nn
    from flax import nnx

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

F16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
FILE = pathlib.Path(__file__).name
SOURCE = pathlib.Path(__file__).read_text().splitlines()
TX = ols.with_loss_scale(optax.adam(1e-3))
computes_in = ols.testing.assert_computes_in


def line(marker):
    """The line of this file that ends in a comment with this marker, as a report names it."""
    (number,) = (n for n, text in enumerate(SOURCE, 1) if text.endswith(f"# {marker}"))
    return f"{FILE}:{number} "


def accused(step, *args):
    """The lines of this file that the assertion names."""
    with pytest.raises(AssertionError) as caught:
        computes_in(step, jnp.float16, *args)
    return set(re.findall(rf"{FILE}:\d+ ", str(caught.value)))


def linen(model, *inputs):
    """A training step of a Linen model that casts its parameters, and shapes of arguments."""
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]

    def step(params, state, *inputs):
        def loss_fn(params):
            params = optax.tree.cast(params, jnp.float16)
            y = model.apply({"params": params}, *inputs)
            return jnp.mean(y.astype(F32) ** 2)

        loss_value, grads = ols.value_and_scaled_grad(loss_fn, state)(params)
        return *TX.apply_gradients(grads, state, params), loss_value

    return jax.jit(step), params, jax.eval_shape(TX.init, params), *inputs


def test_modules_that_promote_compute_in_float32_though_parameters_are_cast():
    model = lambda dtype: nn.MultiHeadDotProductAttention(2, dtype=dtype)
    x = jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)
    step, *args = linen(model(None), x)
    assert set(ols.dtype_report(step, *args).shares) == {F32}
    computes_in(step, jnp.float32, *args)
    with pytest.raises(AssertionError, match="do not compute in float16"):
        computes_in(step, jnp.float16, *args)
    step, *args = linen(model(jnp.float16), x)
    computes_in(step, jnp.float16, *args)


class Conditioned(nn.Module):
    """Layers in float16, but for what follows a table of times that is not cast."""

    casts_time: bool

    @nn.compact
    def __call__(self, x, t):
        time = jnp.sin(t[:, None] * jnp.exp(-jnp.arange(8.0)))  # rightly in float32
        if self.casts_time:
            time = time.astype(x.dtype)
        x = nn.Dense(16)(x) * nn.Dense(16)(time)[:, None]  # modulation
        return nn.Dense(64)(nn.LayerNorm()(x))  # head


def test_one_wide_input_that_makes_a_model_wide_is_found():
    x = jax.ShapeDtypeStruct((2, 6, 4), jnp.float16)
    t = jax.ShapeDtypeStruct((2,), jnp.float32)
    step, *args = linen(Conditioned(casts_time=False), x, t)
    assert ols.dtype_report(step, *args).shares[F32] > 0.9
    assert accused(step, *args) == {line("modulation"), line("head")}
    step, *args = linen(Conditioned(casts_time=True), x, t)
    computes_in(step, jnp.float16, *args)


def test_the_one_wide_layer_of_an_nnx_model_is_named():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 8, dtype=jnp.float16, rngs=rngs)
            self.second = nnx.Linear(8, 2, dtype=jnp.float32, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.first(x))
            return self.second(x)  # nnx

    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    optimizer = nnx.eval_shape(
        lambda: nnx.Optimizer(Model(nnx.Rngs(0)), TX, wrt=nnx.Param)
    )

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            return ols.scale_gradient(jnp.mean(model(x).astype(F32) ** 2), optimizer)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    before = jax.tree.leaves(nnx.state((model, optimizer)))
    assert accused(step, model, optimizer, jnp.ones((3, 4))) == {line("nnx")}
    after = jax.tree.leaves(nnx.state((model, optimizer)))
    assert all(x is y for x, y in zip(before, after, strict=True))


def test_the_one_wide_layer_of_an_equinox_model_is_named():
    class Model(eqx.Module):
        first: eqx.nn.Linear
        second: eqx.nn.Linear
        activation: Any = jax.nn.relu

        def __call__(self, x):
            x = self.activation(self.first(x)).astype(jnp.float32)
            return self.second(x)  # equinox

    def make(key):
        first, second = jax.random.split(key)
        return Model(eqx.nn.Linear(4, 8, key=first), eqx.nn.Linear(8, 2, key=second))

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    state = eqx.filter_eval_shape(
        lambda: TX.init(eqx.filter(make(jax.random.key(0)), eqx.is_array))
    )
    half = lambda model: jax.tree.map(
        lambda p: p.astype(F16) if eqx.is_array(p) else p, model
    )

    @eqx.filter_jit(donate="all")
    def step(model, state, x, scale):
        @eqx.filter_value_and_grad
        def loss_fn(model):
            return ols.scale_gradient(
                scale * jnp.mean(jax.vmap(half(model))(x) ** 2), state
            )

        _, grads = loss_fn(model)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        params, new_state = TX.apply_gradients(grads, state, params)
        return eqx.combine(params, static), new_state

    x = jax.ShapeDtypeStruct((3, 4), F16)
    assert accused(step, model, state, x, 2.0) == {line("equinox")}


# --- what it says and what it lets pass ---


def weights(dtype=jnp.float16):
    return jax.ShapeDtypeStruct((4, 4), dtype)


def test_it_says_how_many_and_in_which_dtype():
    def step(w, x):
        return jnp.dot(x, jax.nn.relu(w @ w).astype(x.dtype))

    with pytest.raises(AssertionError) as caught:
        computes_in(step, jnp.float16, weights(), weights(jnp.float32))
    message = str(caught.value)
    assert message.startswith(
        "1 of 2 matrix products and convolutions do not compute in float16:"
    )
    assert "float32  50.0%  1 dot_general" in message
    assert "precision=jax.lax.Precision.HIGHEST" in message


def test_it_names_the_first_line_in_the_program():
    def step(w, x):
        x = x @ w  # small, and the first
        return jnp.tile(x, (9, 1)) @ w

    first = rf"first of them in the program is at \S*{line('small, and the first')}"
    with pytest.raises(AssertionError, match=first):
        computes_in(step, jnp.float16, weights(), weights(jnp.float32))


def test_a_product_that_asks_for_its_precision_may_be_wide():
    def step(w):
        y = (w @ w).astype(jnp.float32)
        y = jnp.dot(y, y, precision=jax.lax.Precision.HIGHEST)
        with jax.default_matmul_precision("highest"):
            return jnp.sum(y @ y)

    computes_in(jax.value_and_grad(step), jnp.float16, weights())


def test_products_of_integers_and_tables_of_positions_are_not_looked_at():
    def step(w, tokens):
        table = jnp.outer(jnp.arange(4.0), jnp.arange(4.0))
        norm = jnp.vdot(table, table)
        counts = jax.nn.one_hot(tokens, 4, dtype=jnp.int32).T @ tokens
        return (w @ w).sum() + norm + counts.sum()

    computes_in(step, jnp.float16, weights(), jnp.arange(4))


def test_float16_and_bfloat16_are_not_the_same():
    with pytest.raises(AssertionError, match="do not compute in float16"):
        computes_in(lambda w: w @ w, jnp.float16, weights(jnp.bfloat16))
    computes_in(lambda w: w @ w, jnp.bfloat16, weights(jnp.bfloat16))


def test_without_a_product_there_is_nothing_to_say():
    with pytest.raises(ValueError, match="no matrix product or convolution to check"):
        computes_in(jnp.sum, jnp.float16, weights())


def test_bad_calls_say_what_is_wrong():
    with pytest.raises(ValueError, match="dtype"):
        computes_in(lambda w: w @ w, jnp.int32, weights())
    for w in (jnp.ones((4, 4)), {"w": jnp.ones((4, 4))}):
        with pytest.raises(TypeError, match="the second argument is the dtype"):
            computes_in(lambda w: w @ w, w)
    with pytest.raises(TypeError, match="step must be a function"):
        computes_in(weights(), jnp.float16, lambda w: w)
