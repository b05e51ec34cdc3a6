"""`assert_computes_in`, on models as others write them, traced and never run."""

import functools
import pathlib
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from pairs import quick

import optax_lossscale as ols

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the frameworks', not ours
    import equinox as eqx
    import haiku as hk
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


def linen(
    model, *inputs, dtype=jnp.float16, loss=lambda y: jnp.mean(y.astype(F32) ** 2)
):
    """A training step of a Linen model that casts its parameters, and shapes of arguments."""
    variables = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    params = variables.pop("params")

    def step(params, rest, state, *inputs):
        def loss_fn(params):
            params = optax.tree.cast(params, dtype)
            y = model.apply({"params": params, **rest}, *inputs, mutable=list(rest))
            return loss(y[0] if isinstance(y, tuple) else y)

        loss_value, grads = ols.value_and_scaled_grad(loss_fn, state)(params)
        return *TX.apply_gradients(grads, state, params), loss_value

    return jax.jit(step), params, variables, jax.eval_shape(TX.init, params), *inputs


# --- an ImageNet ResNet, as Flax's example ---


class ResNetBlock(nn.Module):
    filters: int
    strides: tuple[int, int]
    dtype: Any

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, dtype=self.dtype
        )
        y = nn.relu(norm()(conv(self.filters, (3, 3), self.strides)(x)))
        y = norm()(conv(self.filters, (3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv(self.filters, (1, 1), self.strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.max_pool(x, (3, 3), (2, 2))
        for i in range(2):
            x = ResNetBlock(8 * 2**i, (1 + i, 1 + i), self.dtype)(x)
        return nn.Dense(10, dtype=self.dtype)(jnp.mean(x, (1, 2)))


IMAGES = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)

# --- a language model, as lm1b, and a translation model, as WMT ---


class Transformer(nn.Module):
    dtype: Any = jnp.float32
    decodes: bool = False

    @nn.compact
    def __call__(self, tokens, source=None):
        x = nn.Embed(32, 16, dtype=self.dtype)(tokens)
        encoded = None
        if self.decodes:
            encoded = Transformer(self.dtype)(source)
        x = x + self.param("positions", nn.initializers.normal(), (1, 8, 16))
        mask = nn.make_causal_mask(tokens, dtype=self.dtype)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(2, dtype=self.dtype)(y, mask=mask)
        if encoded is not None:
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(2, dtype=self.dtype)(y, encoded)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.relu(nn.Dense(32, dtype=self.dtype)(y))
        x = x + nn.Dense(16, dtype=self.dtype)(y)
        return nn.Dense(32, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


TOKENS = jax.ShapeDtypeStruct((2, 8), jnp.int32)

# --- a language model of Flax NNX, as Gemma ---


def rope(x, positions):
    """Rotary embeddings, whose table is an outer product in float32."""
    frequencies = 1e4 ** -(jnp.arange(x.shape[-1] // 2) / (x.shape[-1] // 2))
    angles = jnp.einsum("t,d->td", positions.astype(jnp.float32), frequencies)[
        :, None, :
    ]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    rotated = first * jnp.cos(angles) - second * jnp.sin(angles)
    crossed = second * jnp.cos(angles) + first * jnp.sin(angles)
    return jnp.concatenate([rotated, crossed], -1).astype(x.dtype)


class GemmaBlock(nnx.Module):
    def __init__(self, dtype, rngs):
        make = functools.partial(nnx.Param)
        key = rngs.params
        self.qkv = make(0.1 * jax.random.normal(key(), (3, 2, 16, 8)))
        self.out = make(0.1 * jax.random.normal(key(), (2, 8, 16)))
        self.norm = nnx.RMSNorm(16, dtype=dtype, rngs=rngs)
        self.gate = nnx.Linear(16, 32, use_bias=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(16, 32, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(32, 16, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        y = self.norm(x)
        q, k, v = jnp.einsum("btd,sndh->sbtnh", y, self.qkv[...].astype(y.dtype))  # qkv
        q, k = (rope(z, jnp.arange(z.shape[1])) for z in (q, k))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k)
        weights = jax.nn.softmax(logits.astype(jnp.float32)).astype(x.dtype)
        y = jnp.einsum("bnts,bsnh->btnh", weights, v)
        x = x + jnp.einsum("btnh,nhd->btd", y, self.out[...].astype(y.dtype))
        y = self.norm(x)
        return x + self.down(nnx.gelu(self.gate(y)) * self.up(y))


class Gemma(nnx.Module):
    def __init__(self, dtype, rngs):
        self.embed = nnx.Embed(32, 16, dtype=dtype, rngs=rngs)
        self.block = GemmaBlock(dtype, rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.block(self.embed(tokens)))


def gemma(dtype):
    model = nnx.eval_shape(lambda: Gemma(dtype, nnx.Rngs(0)))
    graph, params = nnx.split(model)
    state = jax.eval_shape(TX.init, params)

    @jax.jit
    def step(params, state, tokens):
        def loss_fn(params):
            half = optax.tree.cast(params, jnp.float16)
            return jnp.mean(nnx.merge(graph, half)(tokens).astype(jnp.float32) ** 2)

        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params)
        return *TX.apply_gradients(grads, state, params), loss

    return step, params, state, TOKENS


MODELS = {
    "imagenet": lambda dtype: linen(ResNet(dtype), IMAGES),
    "lm1b": lambda dtype: linen(Transformer(dtype), TOKENS),
    "wmt": lambda dtype: linen(Transformer(dtype, decodes=True), TOKENS, TOKENS),
    "gemma": gemma,
}


@quick("make", MODELS, "imagenet", "gemma")
def test_modules_that_promote_compute_nothing_in_float16_though_parameters_are_cast(
    make,
):
    step, *args = make(jnp.float32)
    assert set(ols.dtype_report(step, *args).shares) == {F32}
    computes_in(step, jnp.float32, *args)
    with pytest.raises(AssertionError, match="do not compute in float16"):
        computes_in(step, jnp.float16, *args)


@quick("make", MODELS, "imagenet", "gemma")
def test_the_same_models_in_float16_are_accused_of_nothing(make):
    step, *args = make(jnp.float16)
    computes_in(step, jnp.float16, *args)


# --- a diffusion transformer, in which every documented cast is in place ---


class DiffusionTransformer(nn.Module):
    casts_time: bool

    @nn.compact
    def __call__(self, x, t):
        angles = t[:, None] * jnp.exp(-jnp.arange(8.0))  # float32, as it should be
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        x = nn.Dense(16)(x)
        if self.casts_time:
            time = time.astype(x.dtype)
        condition = nn.Dense(16)(nn.silu(nn.Dense(16)(time)))
        modulation = nn.Dense(48)(condition)[:, None]  # modulation
        shift, scale, gate = jnp.split(modulation, 3, -1)
        y = nn.LayerNorm(use_bias=False, use_scale=False)(x) * (1 + scale) + shift
        x = x + gate * nn.MultiHeadDotProductAttention(2)(y)  # attention
        return nn.Dense(4)(x)


def diffusion_transformer(casts_time):
    x = jax.ShapeDtypeStruct((2, 6, 4), jnp.float16)
    t = jax.ShapeDtypeStruct((2,), jnp.float32)
    return linen(DiffusionTransformer(casts_time), x, t)


def test_a_diffusion_transformer_whose_time_makes_it_float32_is_found():
    step, *args = diffusion_transformer(casts_time=False)
    shares = ols.dtype_report(step, *args).shares
    assert shares[F32] > 0.9
    assert {line("modulation"), line("attention")} <= accused(step, *args)


def test_the_first_line_in_the_program_is_said_to_be_it():
    def step(w, x):
        x = x @ w  # small, and the first
        return jnp.tile(x, (9, 1)) @ w

    with pytest.raises(AssertionError) as caught:
        computes_in(step, jnp.float16, weights(), weights(jnp.float32))
    first = re.search(
        rf"The first of them in the program is at \S*({FILE}:\d+ )", str(caught.value)
    )
    assert first.group(1) == line("small, and the first")


def test_with_its_time_in_float16_it_is_accused_of_nothing():
    step, *args = diffusion_transformer(casts_time=True)
    computes_in(step, jnp.float16, *args)


# --- the other frameworks ---


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


def test_a_variable_that_an_nnx_model_holds_twice_stays_one():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(8, 4, dtype=jnp.float16, rngs=rngs)
            self.tied = self.embed.embedding
            self.first = self.second = nnx.Linear(4, 4, dtype=jnp.float16, rngs=rngs)

        def __call__(self, tokens):
            hidden = self.second(self.first(self.embed(tokens)))
            return hidden @ self.tied[...].T  # tied

    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    optimizer = nnx.eval_shape(
        lambda: nnx.Optimizer(Model(nnx.Rngs(0)), TX, wrt=nnx.Param)
    )

    @nnx.jit
    def step(model, optimizer, tokens):
        def loss_fn(model):
            return ols.scale_gradient(
                jnp.mean(model(tokens).astype(F32) ** 2), optimizer
            )

        optimizer.update(model, nnx.grad(loss_fn)(model))

    assert accused(step, model, optimizer, TOKENS) == {line("tied")}


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


def test_the_one_wide_layer_of_a_haiku_model_is_named():
    def model(x):
        x = jax.nn.relu(hk.Linear(8)(x))
        return hk.Linear(2)(x.astype(jnp.float32))  # haiku

    network = hk.without_apply_rng(hk.transform(model))
    x = jax.ShapeDtypeStruct((3, 4), F16)
    params = jax.eval_shape(network.init, jax.random.key(0), x)
    half = lambda params: optax.tree.cast(params, jnp.float16)
    loss_fn = lambda params, x: jnp.mean(network.apply(half(params), x) ** 2)
    step = ols.value_and_scaled_grad(loss_fn, 1024.0)
    assert accused(step, params, x) == {line("haiku")}


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


@pytest.mark.parametrize("how", ["argument", "context"])
def test_a_product_that_asks_for_its_precision_may_be_wide(how):
    def step(w):
        y = (w @ w).astype(jnp.float32)
        if how == "argument":
            return jnp.sum(jnp.dot(y, y, precision=jax.lax.Precision.HIGHEST))
        with jax.default_matmul_precision("highest"):
            return jnp.sum(y @ y)

    computes_in(jax.value_and_grad(step), jnp.float16, weights())


def test_a_precision_that_all_products_have_excuses_none():
    with jax.default_matmul_precision("highest"):
        assert accused(lambda w: w @ w, weights(jnp.float32))


def test_what_optax_multiplies_is_not_the_models():
    tx = ols.with_loss_scale(optax.contrib.muon(1e-3))
    params = jnp.ones((4, 4))

    def step(params, state, x):
        loss_fn = lambda p: jnp.sum((x @ p.astype(jnp.float16)).astype(jnp.float32))
        _, grads = ols.value_and_scaled_grad(loss_fn, state)(params)
        return tx.apply_gradients(grads, state, params)

    state = jax.eval_shape(tx.init, params)
    computes_in(jax.jit(step), jnp.float16, params, state, weights())
    assert accused(jax.jit(step), params, state, weights(jnp.float32))


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


def test_a_product_of_float16_and_bfloat16_is_one_in_float32():
    """JAX promotes the two to float32, in whichever order they are given."""
    half, brain = jnp.ones((4, 4), jnp.float16), jnp.ones((4, 4), jnp.bfloat16)
    for a, b in [(half, brain), (brain, half)]:
        computes_in(jnp.matmul, jnp.float32, a, b)
        for dtype in (jnp.float16, jnp.bfloat16):
            with pytest.raises(AssertionError, match="1 of 1 matrix products"):
                computes_in(jnp.matmul, dtype, a, b)
