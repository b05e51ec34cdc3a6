"""One page that says what 16 bits do to a model, and what to do about it."""

import contextlib
import pathlib
import pickle
import re
import runpy

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from pairs import one_in, product, quick

import optax_lossscale as ols

F16, F32 = jnp.float16, jnp.float32
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 8)), jnp.float16)
W = {name: jnp.eye(8) for name in ("q", "k", "v")}
CAUSAL = np.tri(6, dtype=bool)


def attention(params, x, *, size=1.0, loss=1.0, mask=None):
    """The scores are as large as one likes, and what is masked is -inf."""
    p = jax.tree.map(lambda w: w.astype(jnp.float16), params)
    scores = (x @ p["q"]) @ (x @ p["k"]).mT * jnp.asarray(size, jnp.float16)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    out = jax.nn.softmax(scores) @ (x @ p["v"])
    return jnp.mean(out.astype(jnp.float32) ** 2) * loss


def normal(*shape, scale=1.0, seed=0):
    numbers = np.random.default_rng([seed, *shape]).normal(size=shape)
    return jnp.asarray(numbers * scale, F32)


def square(x):
    return jnp.mean(x.astype(F32) ** 2)


def line_of(function, after):
    """`test_diagnose.py:12 ` of a line so many after that of the function's head."""
    return f"test_diagnose.py:{function.__code__.co_firstlineno + after} "


def test_a_healthy_model_is_fine_as_it_is():
    loss_fn = lambda w, x: jnp.sum((w.astype(jnp.float16) * x).astype(jnp.float32))
    diagnosis = ols.diagnose(loss_fn, jnp.ones(3), 1.0)
    assert diagnosis.verdict.startswith(
        "float16 is fine as it is, without a loss scale"
    )
    assert diagnosis.advice == ["Nothing."]
    assert diagnosis.underflow == {}
    assert "What to do:\n- Nothing." in str(diagnosis)


@pytest.mark.parametrize("mask", [None, CAUSAL])
def test_a_small_loss_loses_gradients_without_a_scale(mask):
    diagnosis = ols.diagnose(attention, W, X, loss=2.0**-14, mask=mask)
    assert re.fullmatch(
        r"Without a loss scale, float16 loses \S+% of the gradients to underflow\.",
        diagnosis.verdict,
    )
    assert np.log2(diagnosis.initial_scale.scale) == 29
    (advice,) = diagnosis.advice
    assert advice in (
        "Wrap the optimizer: with_loss_scale(optimizer).",
        "Wrap the optimizer: with_loss_scale(optimizer, "
        "DynamicLossScale(initial_scale=2.0**29)).",
    )
    name, worst = next(iter(diagnosis.underflow.items()))
    assert name == "all"
    assert worst.lost > 0.1
    assert 0 < worst.bits <= 29


def test_scores_that_overflow_are_named():
    diagnosis = ols.diagnose(attention, W, X, size=2.0**14)
    assert diagnosis.verdict.startswith("The loss is nan at any loss scale")
    assert "(in float32, it is " in diagnosis.verdict
    assert diagnosis.initial_scale is None
    place = diagnosis.wrong[0].place
    assert line_of(attention, 3) in place.source
    assert place.layer == "k, q"
    assert place.source in diagnosis.advice[0]


def test_a_row_that_is_masked_whole_is_told():
    mask = CAUSAL & (np.arange(6) != 0)  # the first sees itself alone
    diagnosis = ols.diagnose(attention, W, X, mask=mask)
    assert "sub at " in diagnosis.verdict
    assert line_of(attention, 6) in diagnosis.verdict
    assert any("masks finite" in advice for advice in diagnosis.advice)


@jax.custom_vjp
def steep(x):
    return x


steep.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.asarray(2**15, g.dtype),))


def two_layers(params, x):
    p = jax.tree.map(lambda w: w.astype(jnp.float16), params)
    x = x * p["first"]
    x = steep(x) * p["second"]
    return jnp.mean(x.astype(jnp.float32)) * 2.0**-8


def test_where_no_one_scale_fits_the_layer_is_named():
    params = {"first": jnp.ones(8), "second": jnp.ones(8)}
    x = jnp.asarray(2.0 ** -np.arange(0, 8), jnp.float16)
    x = jnp.where(jnp.arange(8) < 4, x, 2.0**-16)
    diagnosis = ols.diagnose(two_layers, params, x)
    assert diagnosis.verdict.startswith("No single loss scale fits: at 2**")
    assert line_of(two_layers, 3) in diagnosis.overflow.source
    assert diagnosis.advice[0].startswith("Compute mul at ")


@jax.custom_vjp
def squared_behind(x):
    return x


squared_behind.defvjp(lambda x: (x, None), lambda _, g: (g + 0 * (g * g),))


def test_a_verdict_names_the_scale_at_which_gradients_were_compared():
    """The scale that fits may be smaller, if the backward pass is not linear."""

    def loss_fn(w, x):
        y = squared_behind(w.astype(jnp.float16)).astype(jnp.float32)
        return jnp.sum(y * x)

    x = jnp.asarray([2.0**5.5, 2.0**-27, 2.0**-27])
    diagnosis = ols.diagnose(loss_fn, jnp.ones(3), x)
    assert diagnosis.initial_scale.scale < diagnosis.scale == 4
    assert diagnosis.verdict.startswith("No single loss scale fits: at 2**2, ")


def test_a_wrong_gradient_is_told_with_the_scale_at_which_it_was_compared():
    def loss_fn(params, x):
        y = squared_behind(params["w"].astype(jnp.float16)).astype(jnp.float32)
        phase = params["v"].astype(jnp.float16) * jnp.float16(1000)
        return jnp.sum(y * x) + jnp.sum(jnp.sin(phase.astype(jnp.float32)))

    params = {"w": jnp.ones(2), "v": jnp.linspace(1.0, 2.0, 64)}
    x = jnp.asarray([2.0**5.5, 2.0**-27])
    diagnosis = ols.diagnose(loss_fn, params, x)
    assert diagnosis.initial_scale.scale < diagnosis.scale == 4
    assert ", even at a loss scale of 2**2, because " in diagnosis.verdict


def test_gradients_that_are_finite_at_no_scale():
    loss_fn = lambda w, x: jnp.sum(jnp.sqrt(w["w"] * x))
    diagnosis = ols.diagnose(loss_fn, {"w": jnp.zeros(3)}, 1.0)
    assert diagnosis.verdict.startswith(
        "No loss scale helps: the gradient of w is not finite in float32 either"
    )
    assert line_of(loss_fn, 0) in diagnosis.verdict
    assert diagnosis.wrong[0].name == "w"
    assert diagnosis.advice[0].startswith("Keep the arguments of roots")


def test_a_loss_so_large_that_its_gradients_overflow():
    diagnosis = ols.diagnose(attention, W, X, loss=2.0**20)
    assert diagnosis.verdict.startswith("Without a loss scale of about 2**-")
    exponent = np.log2(diagnosis.initial_scale.scale)
    bounds = f"initial_scale=2.0**{exponent:.0f}, min_scale=2.0**{exponent - 16:.0f})"
    # and a larger batch later does not end the training
    assert bounds in diagnosis.advice[0]


# --- what it is called with ---


def test_of_float32_it_says_what_autocast_would_make_of_it():
    w, x = normal(8, 8), normal(4, 8)
    loss_fn = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    found, cast = ols.diagnose(loss_fn, w, x), ols.diagnose(ols.autocast(loss_fn), w, x)
    assert found.is_autocast
    assert not cast.is_autocast
    page = " ".join(str(found).split())
    assert page.startswith(
        "The loss function computes in float32, so this report is about "
        "autocast(loss_fn), which computes in float16"
    )
    assert (found.verdict, found.off) == (cast.verdict, cast.off)
    elementwise = ols.diagnose(lambda w, x: jnp.sum((w * x) ** 2), jnp.ones(3), 1.0)
    assert elementwise.verdict.startswith(
        "Nothing is computed in 16 bits, and autocast would not change that."
    )


def test_says_why_autocast_would_narrow_nothing():
    loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
    args = normal(8, 8), normal(4, 8)
    with jax.default_matmul_precision("highest"):
        found = ols.diagnose(loss_fn, *args)
    assert found.verdict.startswith(
        "Nothing is computed in 16 bits, and autocast would not change that."
    )
    assert "products at this jax_default_matmul_precision" in found.advice[0]

    def with_solver(w, x):
        weights, start = jax.lax.stop_gradient((w, x))
        goes_on = lambda carry: jnp.max(carry) > 0.1
        step = lambda carry: carry @ weights / 100
        return jnp.mean(w) * jnp.sum(jax.lax.while_loop(goes_on, step, start))

    found = ols.diagnose(with_solver, *args)
    assert "a loop that waits for a number" in found.advice[0]
    # the user chose this precision, so there is nothing to change
    chosen = lambda w, x: jnp.mean(jnp.matmul(x, w, precision="highest"))
    assert ols.diagnose(chosen, *args).advice == ["Nothing."]


def test_traces_the_loss_function_once():
    counted = chex.assert_max_traces(attention, n=1)
    ols.diagnose(counted, W, X, loss=2.0**-14)


def test_takes_aux_keyword_arguments_and_parameters_of_any_kind():
    def with_aux(params, x, key, activation, *, size):
        assert isinstance(size, float)
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        return attention(
            params["w"], activation(jnp.where(keep, x, 0)), size=size
        ), "any aux"

    params = {"w": W, "steps": jnp.int32(3), "none": None, "key": jax.random.key(1)}
    key = jax.random.key(0)
    found = ols.diagnose(with_aux, params, X, key, jnp.tanh, has_aux=True, size=1.0)
    assert found.off.keys() == {"the loss", "w/q", "w/k", "w/v"}


@pytest.mark.slow
def test_takes_modules_of_frameworks():
    nnx = pytest.importorskip("flax.nnx")
    eqx = pytest.importorskip("equinox")
    x = normal(16, 8)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    found = ols.diagnose(lambda model, x: square(model(x) - 1), Model(nnx.Rngs(0)), x)
    assert "linear/kernel" in found.off
    mlp = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
    found = ols.diagnose(lambda mlp, x: square(jax.vmap(mlp)(x)), mlp, x)
    assert found.wrong == ()
    assert "layers/0/weight" in found.off


@pytest.mark.parametrize("compiled", [lambda fun: fun, jax.jit])
def test_a_loss_that_scales_its_own_gradient_counts_as_if_it_did_not(compiled):
    loss_fn = lambda w, x: square(x @ w.astype(F16))
    scaled = compiled(lambda w, x: ols.scale_gradient(loss_fn(w, x), 2.0**10))
    inputs = normal(8, 8), normal(4, 8).astype(F16)
    assert (
        ols.diagnose(scaled, *inputs).initial_scale
        == ols.diagnose(loss_fn, *inputs).initial_scale
    )


@pytest.mark.slow
def test_the_loss_scale_in_a_state_is_compared_and_none_is_advised():
    w, x = normal(8, 8), normal(4, 8)
    loss_fn = lambda w, x: jnp.mean((x @ w) ** 2) * 1e-4
    at = lambda scale: ols.diagnose(
        loss_fn, w, x, opt_state=ols.with_loss_scale(optax.sgd(0.1), scale).init(w)
    )
    fine = at("dynamic")
    fits = f"2**{np.log2(fine.initial_scale.scale):.0f}"
    assert fine.loss_scale == 2.0**15
    assert fine.verdict == "float16 is fine, and so is a loss scale of 2**15."
    assert "yours is 2**15" in str(fine)
    assert at(2.0**40).verdict == "Gradients overflow at your loss scale of 2**40."
    assert at(2.0).verdict == "Gradients underflow at your loss scale of 2**1."
    assert at(2.0).is_scale_fixed
    assert at(2.0).advice == [f"Set the loss scale to {fits}."]
    adapts = at(ols.DynamicLossScale(initial_scale=2.0))
    assert not adapts.is_scale_fixed
    assert adapts.verdict == at(2.0).verdict
    assert adapts.advice == [f"Let the loss scale adapt, or start at {fits}."]
    assert not any(
        "Wrap" in advice for s in ("dynamic", 2.0**40, 2.0) for advice in at(s).advice
    )


def test_a_float16_argument_is_read_exactly():
    x = jnp.asarray([0.1, 0.2, 0.3], F16)
    found = ols.diagnose(lambda w, x: jnp.sum(w * x.astype(F32)), jnp.ones(3), x)
    assert found.loss_in_float32 == np.float32(x.astype(F32).sum())


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
def test_works_where_transfers_are_disallowed(guard):
    params, x = jax.device_put((normal(8, 8), normal(4, 8)))
    loss_fn = ols.autocast(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
    with jax.transfer_guard(guard):
        assert ols.diagnose(loss_fn, params, x).wrong == ()


def test_works_where_nans_are_an_error():
    loss_fn = lambda w: jnp.sum(jnp.log(w.astype(F16)).astype(F32))
    with jax.debug_nans(True), jax.debug_infs(True):
        assert "log at " in ols.diagnose(loss_fn, jnp.zeros(3)).verdict


def test_works_with_float64():
    with jax.enable_x64(True):
        w, x = jnp.ones((8, 8), jnp.float64), jnp.ones((4, 8), jnp.float64)
        found = ols.diagnose(lambda w, x: jnp.mean((x @ w.astype(F16)) ** 2), w, x)
        assert found.wrong == ()
        assert found.loss_dtype == np.float64


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(TypeError, match="the loss must be a scalar"):
        ols.diagnose(lambda w: w, jnp.ones(3))
    with pytest.raises(TypeError, match="must return a pair"):
        ols.diagnose(lambda w: (w**2).sum(), jnp.ones(2), has_aux=True)


# --- losses that 16 bits spoil without an infinity ---


def distance(params, x):
    """Squared, as |a|² - 2ab + |b|²."""
    a = jnp.tanh(x @ params["w"])
    b = a + 0.01 * jnp.tanh(x @ params["v"])
    return jnp.mean((a**2).sum(1) - 2 * jnp.diag(a @ b.T) + (b**2).sum(1))


def phases(params, x):
    """sin(positions @ frequencies)."""
    return square(jnp.sin(x @ params["frequencies"]) @ params["w"])


def residual(params, x):
    """A small difference of large numbers."""
    return square(x @ params["w"] - x.sum(-1, keepdims=True))


def forces(params, x):
    """The derivative of a small energy."""
    energy = lambda x: jnp.sum(jnp.tanh(x @ params["w"]) @ params["v"]) * 1e-7
    return square(jax.grad(energy)(x) * 1e7 - x)


def attack(params, x):
    """A step along the sign of a derivative."""
    inner = lambda x: jnp.mean((jnp.tanh(x @ params["w"]) - x) ** 2) / 2**13
    return square(jnp.tanh((x + jnp.sign(jax.grad(inner)(x))) @ params["w"]) - x)


def gram(params, x):
    """The factor of a matrix that is barely positive definite."""
    y = x @ params["w"]
    factor = jnp.linalg.cholesky(y @ y.T + 1e-4 * jnp.eye(len(x)))
    return jnp.sum(jnp.log(jnp.diag(factor)))


def variance(params, x):
    """As E[y²] - E[y]², in 16 bits."""
    y = (x @ params["w"]).astype(F16) + F16(30)
    return jnp.sum((y * y).mean(0).astype(F32) - (y.mean(0) ** 2).astype(F32))


def total(params, x):
    """A long sum in 16 bits."""
    add = lambda i, s: s + (x[i, 0] ** 2 * params["w"][0, 0] ** 2 + 1).astype(F16)
    return lax.fori_loop(0, len(x), add, jnp.zeros((), F16)).astype(F32)


def vanishing(params, x):
    """A value below the range of 16 bits."""
    y = jnp.exp(-((x @ params["w"]) ** 2) - 18).astype(F16)
    return square(y.astype(F32) * 1e8)


def indices(params, x):
    """Indices that went through 16 bits."""
    rows = (2500 + jnp.arange(len(x))).astype(F16).astype(jnp.int32)
    return square(params["table"][rows].astype(F16) @ params["w"].astype(F16))


def spoiled(name):
    x = normal(64, 8)
    return {
        "distance": (distance, {"w": normal(8, 256), "v": normal(8, 256, seed=1)}, x),
        "phases": (
            phases,
            {"frequencies": normal(8, 8, scale=500), "w": normal(8, 4)},
            x,
        ),
        "residual": (residual, {"w": 1 + normal(8, 1, scale=1e-4)}, 10 + x),
        "forces": (forces, {"w": normal(8, 16), "v": normal(16, 1)}, x),
        "attack": (attack, {"w": normal(8, 8, scale=0.3)}, x),
        "gram": (gram, {"w": normal(8, 4)}, x),
        "variance": (variance, {"w": normal(8, 8, scale=0.02)}, x),
        "total": (total, {"w": normal(8, 8)}, normal(6000, 8)),
        "vanishing": (vanishing, {"w": normal(8, 8, scale=0.1)}, x),
        "indices": (indices, {"table": normal(3000, 8), "w": normal(8, 8)}, x),
    }[name]


# What the page names, and how many lines after the head of the function it is.
SPOILED = {
    "distance": ("cancels", 4),
    "phases": ("amplifies", 2),
    "residual": ("cancels", 2),
    "forces": ("vanishes", 2),
    "attack": ("vanishes", 2),
    "gram": ("is undefined", None),
    "variance": ("cancels", 3),
    "total": ("stagnates", 2),
    "vanishing": ("vanishes", 2),
    "indices": (None, 2),
}


@quick(
    "name",
    [*SPOILED],
    *("phases", "residual", "variance", "vanishing", "indices"),
)
def test_a_loss_that_16_bits_spoil_is_not_called_fine_and_its_line_is_named(name):
    function, params, x = spoiled(name)
    how, line = SPOILED[name]
    found = ols.diagnose(ols.autocast(function), params, x)
    assert " is fine" not in found.verdict
    places = [found.wrong[0].place] if how else list(found.choices)
    if how:
        assert found.wrong[0].how == how
    if line:
        assert line_of(function, line) in places[0].source
    assert found.advice


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this jax has no refs")
def test_a_ref_is_refused_with_its_line():
    def loss_fn(w, x):
        total = jax.new_ref(jnp.float32(0))
        total[...] += jnp.sum(x @ w)
        return total[...]

    line = loss_fn.__code__.co_firstlineno + 1
    with pytest.raises(TypeError, match=rf"a jax.Ref.*test_diagnose.py:{line} "):
        ols.diagnose(loss_fn, normal(8, 8), normal(4, 8))


def test_of_products_that_cancel_the_advice_is_to_keep_them_and_helps():
    function, params, x = spoiled("residual")
    [advice] = [
        a for a in ols.diagnose(ols.autocast(function), params, x).advice if "Keep" in a
    ]
    assert line_of(function, 2) in advice
    assert "under autocast, by precision=jax.lax.Precision.HIGHEST" in advice
    kept = lambda params, x: square(
        jnp.dot(x, params["w"], precision="highest") - x.sum(-1, keepdims=True)
    )
    assert ols.diagnose(ols.autocast(kept), params, x).wrong == ()


def test_of_a_derivative_inside_it_says_to_scale_its_own_loss():
    for name in ("forces", "attack"):
        function, params, x = spoiled(name)
        found = ols.diagnose(ols.autocast(function), params, x)
        assert "Scale the inner loss by a fixed number" in found.advice[0]
        assert not any("Keep the product" in advice for advice in found.advice)


def test_choices_that_float32_makes_otherwise_are_said():
    function, params, x = spoiled("indices")
    found = ols.diagnose(function, params, x)
    (choice,) = found.choices
    assert choice.count == 64
    assert 0.3 < choice.differing < 0.7  # every second index
    assert found.verdict.startswith("Float32 chooses differently at ")
    assert line_of(indices, 2) in found.verdict
    page = " ".join(str(found).split())
    assert re.search(r" differs from float32 in \d+\.\d% of its 64 choices\.", page)


def test_few_choices_that_change_a_gradient_much_are_no_fine():
    """Of 400 examples, the 15 at the hinge make the gradient."""
    w, x = normal(8, scale=0.3), normal(400, 8)
    margin = jnp.where(jnp.arange(400) < 15, 4, 14) + x @ w

    def loss_fn(w, x):
        y = x.astype(F16) @ w.astype(F16) + F16(4)
        return jnp.sum(jax.nn.relu(y.astype(F32) - margin + 1e-4)) + 1

    found = ols.diagnose(loss_fn, w, x)
    assert found.verdict.startswith("Float32 chooses differently at ")
    assert line_of(loss_fn, 2) in found.verdict
    assert " ".join(str(found).split()).count(" differs from float32 in ") == 1


PICKS = {
    "slice": lambda y: y[60:62],
    "gather": lambda y: y[jnp.array([61, 62])],
    "dynamic slice": lambda y: lax.dynamic_slice(y, (60,), (2,)),
    "least": jnp.min,
}


@product(dtype={"float16": F16, "float32": F32}, pick=[*PICKS])
def test_the_line_of_what_is_picked_is_named_and_not_that_of_picking(pick, dtype):
    def loss_fn(w, x):
        y = (x.astype(F16) * w.astype(F16)) ** 2
        picked = PICKS[pick](y.astype(dtype))
        return jnp.sum(jnp.log(picked.astype(F32) + 1e-12))

    found = ols.diagnose(loss_fn, jnp.ones(64), jnp.ones(64).at[60:].set(1e-4))
    assert {one.how for one in found.wrong} == {"vanishes"}
    assert all(line_of(loss_fn, 1) in one.place.source for one in found.wrong)


def test_a_sigmoid_that_is_rounded_to_1_is_named_and_not_the_logarithm():
    def loss_fn(w, x):
        y = jax.nn.sigmoid(x.astype(F16) @ w.astype(F16))
        return -jnp.mean(jnp.log(1 - y + F16(1e-8)).astype(F32))

    found = ols.diagnose(loss_fn, normal(8, 1), normal(64, 8))
    assert found.wrong[0].name == "the loss"
    assert found.wrong[0].how == "saturates"
    assert line_of(loss_fn, 1) in found.wrong[0].place.source


@pytest.mark.parametrize(
    "function", [lax.erf_inv, jnp.arctanh, lambda x: jnp.log1p(-x)]
)
def test_a_pole_at_what_an_operand_is_rounded_to_is_no_overflow(function):
    def loss_fn(p, x):
        y = (p * x).astype(F16)
        return jnp.sum(function(y).astype(F32))

    found = ols.diagnose(loss_fn, F32(0.9999), jnp.ones(1))
    assert found.wrong[0].how == "is undefined"
    assert "and its operands in float32" in found.advice[0]


# --- programs of all kinds ---


def steps_of(body, **how):
    """A loss over layers in a scan, in 16 bits."""

    def loss_fn(params, x):
        def step(c, w):
            return body(c, w), c.sum()

        y, sums = lax.scan(step, x.astype(F16), params.astype(F16), **how)
        return square(y) + jnp.mean(sums.astype(F32)) * 1e-3

    return loss_fn


def overflowing(c, w):
    """Only where the weights are large."""
    return jnp.tanh(c @ w) * w[0, 0] * w[0, 0]


LAYERS = normal(6, 8, 8, scale=0.3).at[:, 0, 0].set(1.0)
BODIES = {
    "scan": overflowing,
    "remat": jax.checkpoint(overflowing),
    "jit": jax.jit(overflowing),
    "cond": lambda c, w: lax.cond(c[0, 0] > 100, lambda c, w: c, overflowing, c, w),
    "scan in a scan": lambda c, w: lax.scan(
        lambda c, i: (jnp.where(i == 1, overflowing(c, w), c), None), c, jnp.arange(2)
    )[0],
}


@product(reverse={"forward": False, "reverse": True}, body=BODIES)
def test_in_a_scan_over_layers_the_iteration_is_named(body, reverse):
    faulty = LAYERS.at[3, 0, 0].set(3e3)
    found = ols.diagnose(steps_of(body, reverse=reverse), faulty, normal(4, 8))
    place = found.wrong[0].place
    assert found.wrong[0].how == "overflows"
    assert line_of(overflowing, 2) in place.source
    assert place.iterations[0] == 3
    assert "iteration 3" in str(place)
    healthy = ols.diagnose(steps_of(body, reverse=reverse), LAYERS, normal(4, 8))
    assert healthy.wrong == ()


LAYERS_ALIKE = {
    "a number": (lambda x, y: x * 2 + y, lambda x, y: x * 3 + y),
    "the order of operands": (lambda x, y: x - y, lambda x, y: y - x),
    "an axis": (lambda x, y: x + y.sum(0), lambda x, y: x + y.sum(1)),
    "a shape": (lambda x, y: x[:4].sum() + y, lambda x, y: x[:3].sum() + y),
    "what is read twice": (lambda x, y: x * x + y, lambda x, y: x * y + x),
}


@one_in(2, "differ_in", [*LAYERS_ALIKE])
def test_layers_that_differ_in_little_are_not_taken_for_one(differ_in):
    """Though what is compiled for one serves for all that are alike."""
    first, second = LAYERS_ALIKE[differ_in]

    def loss_fn(w, x):
        x = x.astype(F16)
        for layer in (first, second, first):
            x = jnp.tanh(layer(x, x.T.astype(F16)) @ w.astype(F16))
        return square(x - 1)

    w, x = normal(8, 8, scale=0.3), normal(8, 8)
    found = ols.diagnose(loss_fn, w, x)
    assert found.wrong == ()
    assert found.loss == pytest.approx(float(loss_fn(w, x)), rel=1e-3)
    assert found.loss_in_float32 == pytest.approx(found.loss, rel=1e-2)


def test_a_while_loop_is_followed():
    def loss_fn(w, x):
        body = lambda state: (state[0] + 1, state[1] * F16(20))
        _, gain = lax.while_loop(lambda state: state[0] < 5, body, (0, F16(1)))
        return square(x.astype(F16) @ w.astype(F16)) * gain.astype(F32)

    found = ols.diagnose(loss_fn, normal(8, 8), normal(4, 8))
    assert found.wrong[0].place.iterations == (3,)  # 20 to the fourth is above 65504
    assert line_of(loss_fn, 1) in found.wrong[0].place.source


def devices_mesh():
    return jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))


@pytest.mark.slow
@pytest.mark.parametrize("device", [0, 2])
def test_each_device_follows_the_branch_that_it_chooses(device):
    def large(y):
        return y * F16(3e3) * F16(3e3)

    def each(w, x):
        y = x.astype(F16) @ w.astype(F16)
        y = lax.cond(lax.axis_index("d") == device, large, lambda y: y * F16(2), y)
        return lax.pmean(square(y), "d")

    loss_fn = jax.shard_map(
        each, mesh=devices_mesh(), in_specs=(P(), P("d")), out_specs=P()
    )
    found = ols.diagnose(loss_fn, normal(8, 8), normal(2 * jax.device_count(), 8))
    assert line_of(large, 1) in found.wrong[0].place.source
    # the other branch
    assert any(line_of(each, 2) in row.source for row in found.table.rows)


@pytest.mark.slow
def test_the_branches_of_several_devices_are_joined():
    def each(w, x):
        y = x @ w.astype(F16)
        y = lax.cond(x[0, 0] > 0, lambda y: y * F16(2), lambda y: y * F16(-3), y)
        return lax.pmean(square(y), "d")

    loss_fn = jax.shard_map(
        each, mesh=devices_mesh(), in_specs=(P(), P("d")), out_specs=P()
    )
    params = normal(8, 8)
    x = normal(2 * jax.device_count(), 8).astype(F16)
    found = ols.diagnose(loss_fn, params, x)
    assert found.loss == pytest.approx(float(loss_fn(params, x)), rel=1e-3)
    assert found.loss_in_float32 == pytest.approx(found.loss, rel=1e-2)
    assert found.wrong == ()


ENDED = {
    "after some rounds": [3.0, 1.5, 1.3],
    "before the first": [400.0, 1.5, 1.3],
    "of a batch of batches": [[3.0, 400.0], [1.5, 1.3]],
}


@pytest.mark.parametrize("case", ENDED)
@pytest.mark.parametrize(
    "on_devices", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_what_has_left_a_loop_is_not_noted(case, on_devices):
    starts = jnp.asarray(ENDED[case], F16)

    def squared(x):
        return lax.while_loop(lambda x: x < 300, lambda x: x * x, x)

    each = squared
    for _ in range(starts.ndim):
        each = jax.vmap(each)
    if on_devices:
        starts = jnp.tile(starts, (jax.device_count(),) + (1,) * (starts.ndim - 1))
        each = jax.shard_map(
            each, mesh=devices_mesh(), in_specs=P("d"), out_specs=P("d")
        )

    def loss_fn(w):
        return square(w.astype(F16)) * jnp.mean(each(starts).astype(F32))

    found = ols.diagnose(loss_fn, normal(8))
    rows = [row for row in found.table.rows if line_of(squared, 1) in row.source]
    assert rows
    assert max(row.error for row in rows) < 0.01  # another round would overflow
    assert found.wrong == ()


@pytest.mark.slow
@pytest.mark.parametrize("gain", [1.0, 3e3])
def test_a_loss_over_several_devices(gain):
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))

    def each(w, x):
        y = x.astype(F16) @ w.astype(F16)
        y = y * F16(gain) * F16(gain)
        return lax.pmean(square(y), "d")

    loss_fn = jax.shard_map(each, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    found = ols.diagnose(loss_fn, normal(8, 8), normal(2 * jax.device_count(), 8))
    assert bool(found.wrong) == (gain > 1)
    if found.wrong:
        assert line_of(each, 2) in found.wrong[0].place.source


# --- the page, the table and the picture ---


def test_parameters_named_as_the_page_names_others_are_told_apart():
    params = {"all": jnp.ones(64), "the loss": jnp.ones(8)}

    def loss_fn(params):
        y, z = (params[name].astype(F16) for name in ("all", "the loss"))
        return jnp.mean(y.astype(F32)) * 1e-4 + jnp.mean(z.astype(F32))

    found = ols.diagnose(loss_fn, params)
    assert list(found.underflow) == ["all", "all (argument *)"]
    assert found.underflow["all"].lost == pytest.approx(64 / 72)
    assert found.off.keys() == {
        "the loss",
        "all (argument 0)",
        "the loss (argument 1)",
    }


def test_a_report_can_be_pickled_and_copied():
    def loss_fn(w, x):
        return square(lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0])

    report = ols.diagnose(ols.autocast(loss_fn), normal(8, 8), normal(4, 8))
    copied = pickle.loads(pickle.dumps(report))
    assert str(copied) == str(report)
    assert str(copied.table) == str(report.table)


def test_the_page_is_short():
    params = {chr(97 + i): w for i, w in enumerate([jnp.eye(8)] * 20)}

    def loss_fn(params, x):
        x = sum(x @ w.astype(jnp.float16) for w in params.values())
        return jnp.mean(x.astype(jnp.float32) ** 2) * 2.0**-20

    page = str(ols.diagnose(loss_fn, params, X)).splitlines()
    assert max(map(len, page)) <= 100
    assert len(page) <= 20
    assert any(line.strip() == "and 13 more" for line in page)


def test_the_table_has_a_row_for_each_equation_with_its_line_and_layer():
    table = ols.diagnose(attention, W, X, size=2.0**6).table
    products = [
        row
        for row in table.rows
        if row.primitive == "dot_general" and not row.is_backward
    ]
    assert [row.layer for row in products][:2] == ["q", "k"]
    assert line_of(attention, 3) in products[0].source
    assert products[0].dtype == F16
    assert products[0].error < 1e-3
    scores = (X.astype(F32) @ W["q"]) @ (X.astype(F32) @ W["k"]).mT
    assert products[2].largest == pytest.approx(float(jnp.abs(scores).max()), rel=1e-3)
    assert len(str(table).splitlines()) == len(table.rows) + 1


def test_the_picture_shades_what_float16_does_not_hold():
    pytest.importorskip("matplotlib").use("agg")
    axes = ols.diagnose(attention, W, X).plot()
    assert axes.get_yscale() == "log"
    low, high = axes.get_ylim()
    assert low < 2.0**-24
    assert high > 65504
    assert len(axes.patches) == 2
    assert ols.diagnose(attention, W, X).plot(axes) is axes


@pytest.mark.slow
def test_the_page_of_the_demo_is_the_documentations(capsys):
    root = pathlib.Path(__file__).parents[2]
    runpy.run_path(str(root / "docs/diagnose_demo.py"), run_name="__main__")
    dtypes, verdict, *_ = capsys.readouterr().out.splitlines()
    document = (root / "docs/diagnosis.md").read_text()
    share = re.compile(r"(\d+\.\d)% of the gradients")
    lost, on_the_page = (share.search(text)[1] for text in (verdict, document))
    # which each JAX computes anew
    assert float(lost) == pytest.approx(float(on_the_page), abs=1)
    shown = verdict.replace(lost, on_the_page)
    assert f"```text\n{dtypes}\n{shown}\n" in document


def test_what_is_returned_beside_the_loss_is_looked_at():
    def loss_fn(w, x, size):
        y = x.astype(jnp.float16) @ w.astype(jnp.float16)
        statistics = {"square": jnp.mean((size * y) ** 2, axis=0)}
        return jnp.mean(y.astype(jnp.float32) ** 2), statistics

    x = jax.random.normal(jax.random.key(0), (64, 8))
    w = jax.random.normal(jax.random.key(1), (8, 8)) / 3
    found = ols.diagnose(loss_fn, w, x, jnp.float16(300), has_aux=True)
    (wrong,) = found.wrong
    assert (wrong.name, wrong.how) == ("an intermediate value", "overflows")
    assert "integer_pow" in found.verdict
    assert not ols.diagnose(loss_fn, w, x, jnp.float16(3), has_aux=True).wrong


def layer(w, x):
    return x.astype(F16) @ w.astype(F16)


def over_devices(w, x):
    def each(w, x):
        x, _ = lax.scan(
            lambda x, w: (jnp.tanh(layer(w, x)), None), x, jnp.stack([w, w])
        )
        x = lax.cond(lax.axis_index("d") == 0, jnp.sin, lambda x: 2 * x, x)
        return lax.pmean(square(x), "d")

    x = x.astype(F16)
    return jax.shard_map(each, in_specs=(P(), P("d")), out_specs=P())(w, x)


def two_layers_in_auto_axes(w, x):
    layers = jax.sharding.auto_axes(
        lambda w, x: layer(w, jnp.tanh(layer(w, x))), out_sharding=P("d")
    )
    return square(layers(w, x))


PLACED = {
    "in auto_axes": two_layers_in_auto_axes,
    "by the compiler": lambda w, x: square(layer(w, x)),
    "in a loop": lambda w, x: square(
        lax.fori_loop(0, 3, lambda _, y: layer(w, y), x.astype(F16))
    ),
    "by shard_map": over_devices,
    "with a mask": lambda w, x: square(
        lax.scan(
            lambda y, row: (jnp.where(y > row, y, 0), y), layer(w, x), layer(w, w)
        )[1]
    ),
    "of a lookup": lambda w, x: square(
        w.astype(F16).at[jnp.argmax(x, -1)].get(out_sharding=P("d")) * x
    ),
}


@pytest.mark.parametrize("in_context", [True, False])
@quick("loss_fn", PLACED, "with a mask", "of a lookup", "in auto_axes")
def test_arrays_may_be_placed_along_explicit_axes(loss_fn, in_context):
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("d",), axis_types=(AxisType.Explicit,))
    w = jax.device_put(normal(8, 8) / 3, jax.NamedSharding(mesh, P()))
    x = jax.device_put(normal(2 * n, 8), jax.NamedSharding(mesh, P("d")))
    with jax.set_mesh(mesh):
        loss = float(jax.jit(loss_fn)(w, x))
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        found = ols.diagnose(loss_fn, w, x)
    assert found.loss == pytest.approx(loss, rel=1e-2)
    assert found.wrong == ()
