"""What goes wrong in 16 bits if all of a model is cast to them, and goes right under autocast.

Each function here begins with a matrix product, whose result is in 16 bits, and goes on with what
overflows, underflows, or loses its digits there. All of it is float32 code, without a cast.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from against_float32 import assert_as_in_float32, assert_close, normal
from jax import lax
from pairs import one_in

import optax_lossscale as ols

CASES, NAMES = {}, []


def case(*, rows=16, width=32, size=1.0, parameters=(), slow=False, **options):
    """Registers a loss of activations and parameters.

    The activations are the product of an input and a weight, about `size` large. The weight is a
    permutation, so that float16 holds them exactly: a loss may be as ill-conditioned as it likes.
    The weight and `parameters` are differentiated, as is the input. `slow` are those that differ
    little from another; of the others, every third one is quick.
    """

    def register(loss):
        def fun(p, x):
            return loss(x @ p["w"], p)

        p = {"w": permutation(width), **dict(parameters)}
        x = normal(0, rows, width, scale=size)
        name = loss.__name__
        assert name not in CASES, name
        CASES[name] = (fun, p, x, options)
        is_quick = not slow and len(NAMES) % 3 == 0
        NAMES.append(pytest.param(name, marks=() if is_quick else pytest.mark.slow))
        return loss

    return register


def permutation(n):
    """A matrix that multiplies by 1 or -1 and permutes, so that nothing is rounded."""
    rng = np.random.default_rng(n)
    return np.eye(n, dtype=np.float32)[rng.permutation(n)] * rng.choice(
        [-1.0, 1.0], (n, 1)
    ).astype("f")


def through(y):
    """A number of many, that go through another product first and so are in 16 bits."""
    z = y @ permutation(y.shape[-1])
    signs = np.random.default_rng(7).choice([-1.0, 1.0], y.shape).astype(np.float32)
    return jnp.sum(z * signs) + jnp.sum(z * z) / 2


# --- norms of activations whose squares are above 65504 ---


@case(size=300.0)
def rms_norm(h, p):
    return through(h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6))


@case(size=300.0, parameters=[("scale", normal(2, 32))], slow=True)
def rms_norm_with_a_scale(h, p):
    h = h / jnp.sqrt(jnp.mean(jnp.square(h), -1, keepdims=True) + 1e-6)
    return through(h * (1 + p["scale"]))


@case(size=300.0, slow=True)
def rms_norm_by_a_product_of_two_names(h, p):
    g = h + 0.0
    return through(h / jnp.sqrt(jnp.sum(h * g, -1, keepdims=True) / h.shape[-1] + 1e-6))


@case(size=300.0)
def rms_norm_by_einsum(h, p):
    return through(h * lax.rsqrt(jnp.einsum("nd,nd->n", h, h)[:, None] / 32 + 1e-6))


@case(size=300.0, slow=True)
def rms_norm_by_vmapped_dot(h, p):
    return through(jax.vmap(lambda v: v * lax.rsqrt(v @ v / 32 + 1e-6))(h))


@case(size=300.0, parameters=[("scale", normal(2, 32)), ("bias", normal(3, 32))])
def layer_norm(h, p):
    h = h - h.mean(-1, keepdims=True)
    h = h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6)
    return through(h * p["scale"] + p["bias"])


@case(size=300.0)
def layer_norm_by_the_mean_of_squares(h, p):
    mean = h.mean(-1, keepdims=True)
    variance = (h**2).mean(-1, keepdims=True) - mean**2
    return through((h - mean) / jnp.sqrt(variance + 1e-5))


@case(size=300.0, slow=True)
def standardized(h, p):
    return through(jax.nn.standardize(h, epsilon=1e-6))


@case(size=300.0, slow=True)
def batch_norm(h, p):
    return through((h - h.mean(0)) / (h.std(0) + 1e-6))


@case(size=300.0)
def unit_vectors(h, p):
    return through(h / jnp.linalg.norm(h, axis=-1, keepdims=True))


@case(size=300.0, rows=8)
def cosine_similarity(h, p):
    a, b = h[:4], h[4:]
    norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.sum(jnp.sum(a * b, -1) / jnp.maximum(norms, 1e-8))


@case(size=300.0, rows=8, slow=True)
def cosine_similarity_by_optax(h, p):
    return jnp.sum(optax.cosine_distance(h[:4], h[4:], epsilon=1e-8))


@case(size=300.0, slow=True)
def variance(h, p):
    return jnp.sum(jnp.var(h, axis=-1, ddof=1)) / 1e4


@case(size=300.0, many=600, slow=True)
def one_norm_of_all(h, p):
    return jnp.sqrt(jnp.sum(h**2)) + jnp.max(jnp.abs(h))


@case(size=300.0, slow=True)
def clipped_by_global_norm(h, p):
    norm = optax.tree.norm({"h": h})
    return through(h * jnp.minimum(1.0, 1.0 / (norm + 1e-6)))


# --- softmax, masks, losses ---


@case(size=300.0)
def softmax_by_hand(h, p):
    e = jnp.exp(h - h.max(-1, keepdims=True))
    return through(e / e.sum(-1, keepdims=True))


@case(size=3.0, slow=True)
def softmax_without_a_maximum(h, p):
    e = jnp.exp(3 * h)
    return through(e / e.sum(-1, keepdims=True))


@case(size=300.0)
def softmax(h, p):
    return through(jax.nn.softmax(h))


@case(size=300.0, slow=True)
def log_softmax(h, p):
    return -jnp.mean(jax.nn.log_softmax(h)[jnp.arange(16), jnp.arange(16)])


@case(size=300.0)
def logsumexp(h, p):
    return jnp.mean(jax.nn.logsumexp(h, -1))


@case(size=4.0, slow=True)
def logsumexp_by_hand(h, p):
    return jnp.mean(jnp.log(jnp.sum(jnp.exp(4 * h), -1)))


@case(size=30.0, slow=True)
def cross_entropy_by_one_hot(h, p):
    return -jnp.mean(
        jnp.sum(jax.nn.one_hot(jnp.arange(16), 32) * jax.nn.log_softmax(h), -1)
    )


@case(size=30.0)
def cross_entropy_by_optax(h, p):
    losses = optax.softmax_cross_entropy_with_integer_labels(h, jnp.arange(16))
    return losses.mean()


@case(size=30.0, slow=True)
def cross_entropy_of_sigmoids_by_optax(h, p):
    return optax.sigmoid_binary_cross_entropy(h, jnp.eye(16, 32)).mean()


@case(size=5.0)
def masked_by_where(h, p):
    h = jnp.where(jnp.tri(16, 32, dtype=bool), h, -1e9)
    return through(jax.nn.softmax(h))


@case(size=5.0)
def masked_by_adding(h, p):
    return through(jax.nn.softmax(h + (1.0 - jnp.tri(16, 32)) * -1e9))


@case(size=5.0, slow=True)
def masked_by_the_least_number(h, p):
    h = jnp.where(jnp.tri(16, 32, dtype=bool), h, jnp.finfo(jnp.float32).min)
    return through(jax.nn.softmax(h))


@case(size=5.0, slow=True)
def masked_by_infinity(h, p):
    e = jnp.exp(jnp.where(jnp.tri(16, 32, dtype=bool), h, -jnp.inf))
    return through(e / e.sum(-1, keepdims=True))


@case(size=300.0)
def squared_errors_of_1e5(h, p):
    return jnp.mean((h - 1000.0) ** 2)


@case(size=300.0, parameters=[("target", jnp.full((16, 32), 500.0))], slow=True)
def squared_errors_by_optax(h, p):
    return optax.l2_loss(h, p["target"]).mean()


@case(size=300.0, slow=True)
def huber_loss(h, p):
    return optax.huber_loss(h, jnp.ones_like(h)).mean()


@case(size=30.0, slow=True)
def log_cosh_loss(h, p):
    return optax.log_cosh(h, jnp.ones_like(h)).mean()


@case(size=1.0, slow=True)
def gaussian_log_probability_of_a_small_deviation(h, p):
    return jnp.mean(0.5 * ((h - 0.5) / 1e-3) ** 2 + jnp.log(1e-3)) / 1e6


@case(size=0.7)
def divergence_of_gaussians(h, p):
    mean, log_variance = jnp.split(h * 3, 2, -1)
    return -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance)) / 16


@case(size=1.0)
def log_of_probabilities_with_a_guard(h, p):
    probabilities = jax.nn.relu(jax.nn.softmax(h * 8) - 1e-3)  # half of them are 0
    return -jnp.mean(jnp.log(probabilities + 1e-8)) / 10


@case(size=6.0)
def cross_entropy_of_clipped_sigmoids(h, p):
    q = jnp.clip(jax.nn.sigmoid(h), 1e-7, 1 - 1e-7)
    y = jnp.eye(16, 32)
    return -jnp.mean(y * jnp.log(q) + (1 - y) * jnp.log(1 - q))


@case(size=4.0)
def log_of_one_minus_sigmoid(h, p):
    return -jnp.mean(jnp.log(1 - jax.nn.sigmoid(h)))


@case(size=6.0)
def log_of_sigmoid(h, p):
    return -jnp.mean(jnp.log(jax.nn.sigmoid(h)))


@case(size=1.5)
def log_determinant_of_tanh(h, p):  # of soft actor-critic
    return -jnp.mean(jnp.log(1 - jnp.tanh(h) ** 2 + 1e-6))


@case(size=3.0)
def log_of_the_normal_distribution_by_erf(h, p):
    return -jnp.mean(jnp.log(0.5 * (1 + lax.erf(jnp.clip(h, -2, 3) / 2**0.5)) + 1e-6))


@case(size=4.0)
def entropy(h, p):
    q = jax.nn.softmax(h)
    return -jnp.mean(jnp.sum(q * jnp.log(q + 1e-9), -1))


@case(size=1.0, slow=True)
def focal_loss(h, p):
    q = jax.nn.sigmoid(h * 4)
    return -jnp.mean((1 - q) ** 2 * jnp.log(q + 1e-8))


@case(size=1.0, rows=32, slow=True)
def contrastive_loss(h, p):
    z = h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-8)
    logits = z @ z.T / 0.07
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.arange(32)
    ).mean()


# --- sums of many ---


@case(rows=3200, size=1.0)
def mean_square_of_100_000_numbers(h, p):
    return jnp.mean(h**2)


@case(rows=3200, size=1.0)
def sum_of_100_000_numbers(h, p):
    return jnp.sum(jnp.abs(h)) / 1e3


@case(rows=3200, size=1.0, slow=True)
def sum_of_100_000_numbers_in_two_axes(h, p):
    return through(jnp.abs(h).sum(0) / 1e3)


@case(rows=4096, size=100.0, slow=True)
def mean_over_a_long_axis(h, p):
    return through(jnp.mean(h + 300, axis=0) / 100)


@case(rows=4096, size=1.0, slow=True)
def cumulative_sum(h, p):
    return jnp.mean(jnp.cumsum(jnp.abs(h) + 10, axis=0)) / 1e4


@case(rows=4096, size=1.0)
def cumulative_sum_by_scan_of_activations(h, p):
    """What is carried begins with an activation, which is in 16 bits."""
    total, _ = lax.scan(lambda c, row: (c + row, None), h[0], jnp.abs(h) + 10)
    return jnp.mean(total) / 1e4


@case(rows=4096, size=1.0, slow=True)
def cumulative_sum_by_associative_scan(h, p):
    return jnp.mean(lax.associative_scan(jnp.add, jnp.abs(h) + 30, axis=0)) / 1e4


@case(rows=512, size=1.0)
def cumulative_sum_by_fori_loop(h, p):
    h = jnp.abs(h) + 300
    total = lax.fori_loop(0, 512, lambda i, c: c + h[i], h[0])
    return jnp.mean(total) / 1e4


@case(rows=64, size=0.3, slow=True)
def cumulative_product(h, p):
    return jnp.mean(jnp.cumprod(1 - h**2 / 8, axis=0))


@case(rows=2048, size=1.0, slow=True)
def average_pool(h, p):
    pooled = lax.reduce_window(h + 100, 0.0, lax.add, (1024, 1), (1024, 1), "VALID")
    return through(pooled / 1e5)


@case(rows=4096, size=1.0, slow=True)
def segments_summed(h, p):
    return through(jax.ops.segment_sum(jnp.abs(h) + 30, jnp.arange(4096) % 2, 2) / 1e5)


@case(rows=4096, size=1.0, slow=True)
def weighted_mean_with_a_large_sum(h, p):
    weights = jnp.exp(jax.nn.relu(h))
    return through(jnp.sum(weights * h, 0) / jnp.sum(weights, 0))


# --- sums of many in the backward pass alone ---


@case(rows=4096, parameters=[("bias", normal(2, 32)), ("scale", normal(3, 32))])
def bias_and_scale_of_many_rows(h, p):
    return jnp.sum(jnp.tanh(h * p["scale"] + p["bias"])) / 100


@case(rows=1)
def activations_broadcast_to_many_rows(h, p):
    return jnp.sum(jnp.tanh(jnp.broadcast_to(h, (32768, 32)) + 1)) / 100


@case(rows=2)
def activations_gathered_many_times(h, p):
    return jnp.sum(jnp.tanh(h[jnp.arange(16384) % 2] + 1)) / 100


@case(rows=2, slow=True)
def activations_repeated(h, p):
    return jnp.sum(jnp.tanh(jnp.repeat(h, 8192, axis=0) + 1)) / 100


@case(rows=2, slow=True)
def activations_tiled(h, p):
    return jnp.sum(jnp.tanh(jnp.tile(h, (8192, 1)) + 1)) / 100


@case(rows=1, slow=True)
def an_activation_added_to_many_rows(h, p):
    table = jnp.linspace(-1, 1, 8192)[:, None] * jnp.ones(32)
    return jnp.sum(jnp.tanh(h + table)) / 100


@case(rows=1)
def an_activation_used_in_every_round_of_a_scan(h, p):
    def step(c, t):
        return c + jnp.sum(jnp.tanh(h + t)), None

    return lax.scan(step, 0.0, jnp.linspace(0, 1, 4096))[0] / 100


# Its gradient is a sum over rounds in the dtype of the product's operand: a limit.
@case(rows=1, within=0.1)
def an_activation_multiplied_in_every_round_of_a_scan(h, p):
    def step(c, t):
        return jnp.tanh(jnp.abs(h) @ jnp.abs(p["w"])) * t, jnp.sum(c)

    return jnp.sum(lax.scan(step, h, jnp.linspace(0.5, 1, 1024))[1]) / 100


@case(rows=1, parameters=[("embedding", normal(2, 4, 32))])
def embeddings_of_many_tokens(h, p):
    tokens = jnp.arange(32768) % 4
    return jnp.sum(jnp.tanh(p["embedding"][tokens] + h)) / 100


@case(rows=1, parameters=[("embedding", normal(2, 4, 32))], slow=True)
def embeddings_of_many_tokens_by_a_module(h, p):
    tokens = jnp.arange(8192) % 4
    x = jnp.take(p["embedding"], tokens, axis=0)
    return jnp.sum(jax.nn.relu((x + h) @ p["w"] + 1)) / 100


@case(
    rows=8,
    size=0.1,
    parameters=[("embedding", normal(2, 16, 32, scale=0.3))],
    slow=True,
)
def tied_embeddings(h, p):
    logits = (p["embedding"][jnp.arange(8)] + h) @ p["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(8)).mean()


# --- small numbers ---


@case(size=1e-4)
def rms_norm_of_small_activations(h, p):
    return through(h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-12))


@case(size=0.0)
def rms_norm_of_zeros(h, p):
    return jnp.sum(h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)) + 1


@case(size=0.0)
def division_by_a_guard_alone(h, p):
    return jnp.sum(h / (jnp.abs(h) + 1e-8)) * 1e-9 + 1


@case(size=0.0)
def division_by_a_clipped_sum(h, p):
    return (
        jnp.sum(h / jnp.maximum(jnp.sum(jnp.abs(h), -1, keepdims=True), 1e-12)) * 1e-12
        + 1
    )


@case(size=0.0, slow=True)
def safe_norm_of_zeros(h, p):
    return jnp.sum(optax.safe_norm(h, 1e-6, axis=-1)) + 1


@case(size=1.0, parameters=[("gamma", jnp.full(32, 1e-6)), ("v", permutation(32))])
def layer_scale(h, p):
    """As ConvNeXt and CaiT begin: what is added by the block is multiplied by 1e-6."""
    return through(h + jax.nn.relu(h @ p["v"]) * p["gamma"])


@case(size=1.0, parameters=[("gamma", jnp.full((), 1e-8))])
def a_tiny_number_that_is_learned(h, p):
    return through((h * p["gamma"]) * 1e8)


@case(size=1.0, parameters=[("alpha", jnp.full((), 1e5))])
def a_huge_number_that_is_learned(h, p):
    return through((h * p["alpha"]) / 1e5)


@case(size=1e-3)
def small_factors_one_after_the_other(h, p):
    return through(h * 1e-3 * 1e-3 * 1e3 * 1e3 * 1e3)


@case(size=100.0)
def large_factors_one_after_the_other(h, p):
    return through(h * 100 * 100 / 100 / 100)


@case(size=300.0)
def divided_by_a_small_number(h, p):
    return through(h / 1e-3 * 1e-5)


@case(size=3.0)
def adam_inside(h, p):
    g = h * 1e-4
    m, v = 0.1 * g, 0.001 * g**2 + 0.999 * 1e-9
    return through((m / 0.1) / (jnp.sqrt(v / 0.001) + 1e-8))


@case(size=1.0)
def gradient_descent_inside(h, p):
    """An inner step of meta-learning: with a gradient, a moment and a small learning rate."""
    inner = lambda w: jnp.mean((h @ w - 1) ** 2)
    g = jax.grad(inner)(p["w"])
    update = 1e-3 * g / (jnp.sqrt(jnp.mean(g**2)) + 1e-8)
    return inner(p["w"] - 100 * update)


@case(size=1.0)
def running_mean_with_a_small_momentum(h, p):
    mean = jnp.full(32, 0.5)
    for row in h:
        mean = mean + 1e-3 * (row - mean)
    return through(mean)


# --- elementwise functions where they are flat or steep ---


@case(size=300.0)
def gelu(h, p):
    return through(jax.nn.gelu(h))


@case(size=300.0)
def gelu_by_erf(h, p):
    return through(jax.nn.gelu(h, approximate=False))


@case(size=300.0, slow=True)
def gelu_by_hand(h, p):
    y = 0.5 * h * (1 + jnp.tanh(0.7978845608 * (h + 0.044715 * h * h * h)))
    return through(y)


@case(size=300.0, slow=True)
def swish(h, p):
    return through(jax.nn.swish(h))


@case(size=300.0, slow=True)
def softplus(h, p):
    return through(jax.nn.softplus(h))


@case(size=300.0, slow=True)
def mish(h, p):
    return through(jax.nn.mish(h))


@case(size=300.0, slow=True)
def elu(h, p):
    return through(jax.nn.elu(h))


@case(size=300.0, slow=True)
def squared_relu(h, p):
    return jnp.mean(jax.nn.relu(h) ** 2) / 1e4


@case(size=300.0)
def gated(h, p):
    """Two activations of 300, multiplied: the product is above 65504."""
    return through(jax.nn.silu(h) * jnp.roll(h, 1, 0) / 1e4)


@case(size=0.3)
def saturated_tanh(h, p):
    return through(jnp.tanh(h + 5))


@case(size=0.3)
def saturated_sigmoid(h, p):
    return through(jax.nn.sigmoid(h + 9))


@case(size=0.3)
def saturated_erf(h, p):
    return through(lax.erf(h + 3))


@case(size=1.0)
def steep_sigmoid(h, p):
    return jnp.mean(jax.nn.sigmoid(100 * (h + 3))) * 1


@case(size=20.0, slow=True)
def powers(h, p):
    return jnp.mean(h**4) / 1e6


@case(size=20.0, slow=True)
def powers_of_a_fraction(h, p):
    return jnp.mean((jnp.abs(h) + 1) ** 3.7) / 1e6


@case(size=60.0, slow=True)
def polynomial(h, p):
    return jnp.mean(3 * h * h * h - 2 * h * h + h) / 1e6


@case(size=1.0, slow=True)
def sine_of_large_phases(h, p):
    """Fourier features of a coordinate, not of an activation."""
    phases = jnp.arange(16.0)[:, None] * jnp.exp(jnp.linspace(0, 7, 32))
    return jnp.sum(h * jnp.sin(phases) + h * jnp.cos(phases)) + 1


@case(size=1.0, rows=64, slow=True)
def rotary_embedding_at_far_positions(h, p):
    angles = (jnp.arange(64.0) + 30_000)[:, None] / 10_000 ** (jnp.arange(16) / 16)
    a, b = jnp.split(h, 2, -1)
    turned = [
        a * jnp.cos(angles) - b * jnp.sin(angles),
        b * jnp.cos(angles) + a * jnp.sin(angles),
    ]
    q = jnp.concatenate(turned, -1)
    return through(jax.nn.softmax(q @ q.T / 32**0.5))


# --- large products and what follows them ---


@case(size=12000.0)
def products_just_below_65504(h, p):
    return through(jnp.tanh(h / 1e4))


@case(size=12000.0)
def large_products_added(h, p):
    return through((h + h + h + h) / 1e5)


@case(size=12000.0, slow=True)
def large_products_doubled(h, p):
    return through(h * 8 / 1e5)


@case(size=30.0, slow=True)
def large_scores_of_attention(h, p):
    q, k, v = h, h[::-1], h / 100
    scores = q @ k.T / 32**0.5
    return through(jax.nn.softmax(scores / 100) @ v)


@case(size=3.0, slow=True)
def capped_logits(h, p):
    return through(30 * jnp.tanh(h / 30))


# --- what a product takes and something that needs float32 reads as well ---


@case(size=1.5)
def action_and_its_log_probability(h, p):
    """Of soft actor-critic: the action goes to the critic, and into its own correction."""
    action = jnp.tanh(h)
    return through(action) / 1e2 - jnp.mean(jnp.log(1 - action**2 + 1e-6))


@case(size=1.5, parameters=[("critic", permutation(32))])
def action_and_its_log_probability_after_the_critic(h, p):
    action = jnp.tanh(h)
    value = jnp.mean((jax.nn.relu(action @ p["critic"]) @ p["critic"]) ** 2)
    return value - jnp.mean(jnp.log(1 - action**2 + 1e-6))


@case(size=4.0)
def gates_and_their_cross_entropy(h, p):
    gates, target = jax.nn.sigmoid(h), jnp.eye(16, 32)
    cross = target * jnp.log(gates + 1e-9) + (1 - target) * jnp.log(1 - gates + 1e-9)
    return through(gates) / 1e2 - jnp.mean(cross)


@case(size=8.0)
def attention_and_its_entropy(h, p):
    weights = jax.nn.softmax(h)
    return through(weights) - jnp.mean(weights * jnp.log(weights))


@case(size=1.0)
def coordinates_and_their_fourier_features(h, p):
    z = 0.001 * jnp.tanh(h) + np.linspace(0, 1, 32, dtype="f")
    return through(z) / 1e2 + jnp.mean(jnp.sin(1000 * z))


# --- what crosses into another function ---


@case(size=300.0)
def large_numbers_into_remat(h, p):
    return through(jax.checkpoint(lambda y: y / 1e4)(h * jnp.roll(h, 1, 0)))


@case(size=300.0)
def large_numbers_into_remat_with_a_product(h, p):
    f = jax.checkpoint(lambda y: jax.nn.relu(y / 1e4) @ p["w"])
    return through(f(h * jnp.roll(h, 1, 0)))


@case(size=300.0)
def large_numbers_into_a_branch(h, p):
    y = h * jnp.roll(h, 1, 0)
    return through(
        lax.cond(h[0, 0] < 1e9, lambda y: (y / 1e4) @ p["w"], lambda y: y, y)
    )


@case(size=300.0, slow=True)
def large_numbers_into_a_custom_derivative(h, p):
    f = jax.custom_jvp(lambda y, w: (y / 1e4) @ w)
    f.defjvp(lambda xs, ts: jax.jvp(lambda y, w: (y / 1e4) @ w, xs, ts))
    return through(f(h * jnp.roll(h, 1, 0), p["w"]))


@case(size=300.0)
def large_numbers_into_a_scan(h, p):
    y = h * jnp.roll(h, 1, 0)
    return through(lax.scan(lambda c, y: (c, (y / 1e4) @ p["w"]), 0.0, y)[1])


@case(
    rows=1000,
    parameters=[
        ("v", normal(5, 32, 32, scale=0.1)),
        ("each", np.ones((1000, 32), "f")),
    ],
)
def small_steps_with_a_parameter_each(h, p):
    """What is multiplied in each round by itself is no parameter, and the parameter not itself."""

    def step(c, inputs):
        x, scale = inputs
        return c + 1e-3 * jnp.tanh(c @ p["v"] + x @ p["v"] + (x * scale) @ p["v"]), None

    return jnp.mean(lax.scan(step, h[0], (h, p["each"]))[0] ** 2)


EACH = ("each", normal(5, 1000, 8, 8, scale=0.3))


@case(rows=4, width=8, parameters=[EACH])
def cumulative_sum_beside_layers(h, p):
    """It begins with an activation, and no layer reads it."""

    def layer(carry, w):
        h, total = carry
        h = jnp.tanh(h @ w + 1)
        return (h, total + h), None

    return jnp.mean(lax.scan(layer, (h, h), p["each"])[0][1]) / 1e3


@case(rows=4, width=8, parameters=[EACH])
def moving_average_beside_layers(h, p):
    def layer(carry, w):
        h, average = carry
        h = jnp.tanh(h @ w)
        return (h, 0.999 * average + 0.001 * h), None

    return jnp.mean(lax.scan(layer, (h, h), p["each"])[0][1] ** 2)


PERMUTATIONS = ("each", np.stack([permutation(32)] * 3))


@case(size=300.0, parameters=[PERMUTATIONS])
def large_numbers_into_layers(h, p):
    y = h * jnp.roll(h, 1, 0)
    return through(
        lax.scan(lambda y, w: (y + (y / 1e4) @ w, None), y, p["each"])[0] / 1e4
    )


@case(size=300.0, parameters=[PERMUTATIONS])
def large_numbers_between_layers(h, p):
    """Of which one is carried a round later as another."""

    def layer(carry, w):
        a, b = carry
        z = (jnp.sqrt(1 + jnp.abs(a)) + jnp.sqrt(1 + jnp.abs(b))) @ w
        return (b, z * z * 20), None

    return sum(map(jnp.mean, lax.scan(layer, (h, h), p["each"])[0])) / 1e6


@case(parameters=[("gamma", np.full((4, 32), 1e-6, "f")), ("v", permutation(32))])
def layer_scale_by_class(h, p):
    return through(h + jax.nn.relu(h @ p["v"]) * p["gamma"][np.arange(16) % 4])


@case(parameters=[("scale", np.full((4, 32), 1e-8, "f"))])
def tiny_numbers_gathered(h, p):
    return through((h * p["scale"][np.arange(16) % 4]) * 1e8)


# --- selections ---


@case(size=10.0)
def top_k(h, p):
    values, indices = lax.top_k(h, 4)
    return jnp.sum(jax.nn.softmax(values) * jnp.take_along_axis(h, indices, -1)) / 16


@case(size=300.0, slow=True)
def maximum(h, p):
    return jnp.sum(h.max(-1)) / 1e3


@case(size=10.0)
def routed_by_top_k(h, p):
    gates, experts = lax.top_k(jax.nn.softmax(h[:, :4] / 4), 2)
    chosen = jax.nn.one_hot(experts, 4) * gates[..., None]
    load = jnp.mean(chosen.sum(1), 0)
    return jnp.sum(load**2) + jnp.mean(jax.nn.logsumexp(h[:, :4], -1) ** 2)


@case(size=1.0, slow=True)
def sorted_values(h, p):
    return jnp.sum(jnp.sort(h, -1) * jnp.linspace(-1, 1, 32))


# --- linear algebra and transforms, which stay as they are ---


@case(size=1.0, rows=64, slow=True)
def cholesky(h, p):
    covariance = jnp.matmul(h.T, h, precision="highest") / 64 + jnp.eye(32)
    return jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(covariance))))


@case(size=1.0, rows=32, slow=True)
def solution_of_a_linear_system(h, p):
    return jnp.mean(jnp.linalg.solve(h / 8 + 2 * jnp.eye(32), jnp.ones(32)) ** 2)


@case(size=1.0, rows=32, slow=True)
def log_determinant(h, p):
    return jnp.linalg.slogdet(h / 8 + 2 * jnp.eye(32))[1]


@case(size=300.0, slow=True)
def spectrum(h, p):
    return jnp.sum(jnp.log(jnp.abs(jnp.fft.rfft(h + 1)) + 1e-6)) / 100


@case(size=1.0, slow=True)
def rendering(h, p):
    """As in a neural radiance field."""
    alpha = 1 - jnp.exp(-jax.nn.relu(h) * 0.01)
    passing = jnp.cumprod(1 - alpha + 1e-10, -1)
    return jnp.sum(alpha * passing * jnp.linspace(0, 1, 32))


@case(size=1.0)
def rolled_tokens_that_attend_to_themselves(h, p):
    """What was only moved is read in float32 and, in 16 bits, by a product."""
    h = jnp.concatenate([h[:1], h[1:]])
    unit = h / (1e-3 + jnp.max(jnp.abs(h)))
    return through(jax.nn.softmax(unit @ unit.T) @ h)


@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_are_those_of_float32(name):
    fun, p, x, options = CASES[name]
    assert_as_in_float32(fun, p, x, **options)


@pytest.mark.parametrize("unit", [3e4, 1e5, 1e-3, 1e-8])
@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_sum_in_a_unit_of_its_own_is_as_in_float32(unit, is_parameter):
    """Each product is about 1, and their sum, in that unit, is nothing for float16."""

    def fun(p, x):
        u = p["unit"] if is_parameter else unit
        y = 2 * (u * (x @ p["w"])) + 2 * (u * jnp.tanh(x @ p["v"]))
        return through(jnp.tanh(y / unit)) + jnp.mean((y / unit) ** 2)

    p = {"w": permutation(32), "v": permutation(32)[::-1], "unit": jnp.float32(unit)}
    assert_as_in_float32(fun, p, normal(0, 16, 32))


def test_a_state_is_carried_in_float32_over_steps_with_a_mask_each():
    """A mask of three axes is no matrix of a layer."""
    w = jnp.eye(8) * -0.05

    def fun(w, xs, mask):
        def body(h, step):
            x, m = step
            return h + 0.005 * m * jnp.tanh(h @ w + x @ w), None

        steps = xs, mask[..., None].astype(jnp.float32)
        return lax.scan(body, jnp.full((4, 8), 8.0), steps)[0] @ w

    xs = normal(1, 400, 4, 8, scale=0.05)
    mask = jnp.ones((400, 4), bool)
    assert_close(ols.autocast(fun)(w, xs, mask), fun(w, xs, mask), 0.01)


def masked_norm(h, scale=1, bias=0):
    """Of a row that is masked whole, the variance is 0, and the quotient a million times it."""
    mask = jnp.ones((16, 1)).at[3].set(0)
    count = jnp.maximum((mask * jnp.ones_like(h)).sum(-1, keepdims=True), 1)
    mean = (h * mask).sum(-1, keepdims=True) / count
    variance = ((h - mean) ** 2 * mask).sum(-1, keepdims=True) / count
    return ((h - mean) * lax.rsqrt(variance + 1e-12) * scale + bias) * mask


NORMS_BEYOND_THE_RANGE = {
    "a row that is masked whole": masked_norm,
    "with an affine map": lambda h: masked_norm(h, scale=3, bias=1),
    "a tiny share of a norm": lambda h: jnp.log1p(
        jnp.abs(h / (1e-6 * jnp.linalg.norm(h, axis=-1, keepdims=True)))
    ),
}


@pytest.mark.parametrize(
    "norm", NORMS_BEYOND_THE_RANGE.values(), ids=NORMS_BEYOND_THE_RANGE
)
def test_a_norm_that_leaves_the_range_is_as_in_float32(norm):
    a, b = (0.2 * np.random.default_rng(n).normal(size=(32, 32)) for n in (0, 1))
    x = np.random.default_rng(2).normal(size=(16, 32)).astype(np.float32)
    p = a.astype(np.float32), b.astype(np.float32)

    def loss(p, x):
        z = norm(x @ p[0])
        return jnp.mean((z + jnp.tanh(z) @ p[1]) ** 2)

    np.testing.assert_allclose(jax.jit(ols.autocast(loss))(p, x), loss(p, x), rtol=0.01)


# --- products over one number ---


OVER_ONE_NUMBER = {
    "matmul": (lambda x, y: x[:, None] @ y[None], (8,), (4,)),
    "batched": (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (3, 4, 1), (3, 1, 5)),
    "batch last": (
        lambda x, y: jnp.einsum("ijb,jkbm->bikm", x, y),
        (4, 1, 3),
        (1, 5, 3, 2),
    ),
    "two axes": (
        lambda x, y: jnp.tensordot(x, y, ((1, 2), (1, 0))),
        (4, 1, 1),
        (1, 1, 3),
    ),
}


@one_in(2, "product", OVER_ONE_NUMBER)
def test_a_product_over_one_number_stays_in_float32(product):
    """As an outer product: it sums nothing, and is as long as its result to compute."""
    multiply, left, right = product
    x, y = normal(0, *left, scale=1000) + 0.123, normal(1, *right)
    loss = lambda x, y: jnp.sum(jnp.sin(multiply(x, y)))
    step = jax.value_and_grad(ols.autocast(loss), (0, 1))
    chex.assert_trees_all_close(
        step(x, y), jax.value_and_grad(loss, (0, 1))(x, y), rtol=1e-4, atol=1e-3
    )
    assert jnp.dtype(jnp.float16) not in ols.dtype_report(step, x, y).shares


@pytest.mark.parametrize(
    "widen",
    [
        lambda y: y - jnp.exp(jnp.mean(y)),
        lambda y: y * (lax.rsqrt(jnp.mean(y * y)) * 1e6),
        lambda y: y * 200.0 * 200.0,
        lambda y: y - jnp.maximum(jnp.mean(y), 2e5),
        lambda y: y - jnp.maximum(jnp.mean(y), jnp.exp(jnp.mean(y))),
        lambda y: y - jnp.clip(jnp.mean(y), jnp.exp(jnp.max(y)), 1e9),
        lambda y: y - (jnp.mean(y) + 2e5),
        lambda y: y - jnp.mean(y) * 200.0 * 200.0,
    ],
)
def test_a_sum_beyond_the_range_of_16_bits_is_finite(widen):
    """Past another product, before which it would be stored in 16 bits if it were in range."""

    def fun(w, x):
        z = widen(16 * x @ w) + x @ w
        return jnp.sum(jnp.log1p(jnp.abs(z + jnp.tanh(z * 1e-7) @ w)))

    w, x = jnp.eye(8), jnp.ones((4, 8))
    assert_close(ols.autocast(fun)(w, x), fun(w, x), 0.01)


def test_steps_whose_size_is_a_parameter_are_not_lost():
    """Half an ulp of the weights in float16 is more than a step."""

    def adapted(p, x):
        inner = lambda w: jnp.mean((x @ w - 1) ** 2)
        w = p["w"]
        for _ in range(8):
            w = w - p["rate"] * jax.grad(inner)(w)
        return 1e3 * (inner(w) - inner(p["w"]))

    p, x = {"w": normal(0, 8, 8), "rate": jnp.float32(1e-3)}, normal(1, 16, 8)
    step = lambda f: jax.jit(jax.value_and_grad(f))(p, x)
    assert_close(step(ols.autocast(adapted)), step(adapted), 0.05)
