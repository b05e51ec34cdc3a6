"""What `diagnose` takes, and what its report holds: the page, the table, the plot."""

import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback, pallas
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from models import F16, F32, half, normal, square
from pairs import product

import optax_lossscale as ols

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 8)), F16)
W = {name: jnp.eye(8) for name in ("q", "k", "v")}


def attention(params, x, *, size=1.0, loss=1.0):
    """The scores are as large as one likes."""
    p = half(params)
    scores = (x @ p["q"]) @ (x @ p["k"]).mT * jnp.asarray(size, F16)
    return square(jax.nn.softmax(scores) @ (x @ p["v"])) * loss


# --- what it takes ---


def test_a_loss_in_float32_is_run_as_autocast_makes_it():
    loss_fn = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    inputs = normal(8, 8), normal(4, 8)
    report = ols.diagnose(loss_fn, *inputs)
    by_hand = ols.diagnose(ols.autocast(loss_fn), *inputs)
    assert report.is_autocast
    assert not by_hand.is_autocast
    assert ", as autocast makes it" in str(report).splitlines()[0]
    assert report.gradients == by_hand.gradients


def test_traces_a_loss_in_16_bits_once():
    counted = chex.assert_max_traces(attention, n=1)
    ols.diagnose(counted, W, X)


def test_takes_aux_keyword_arguments_and_parameters_of_any_kind():
    def with_aux(params, x, key, activation, *, size):
        assert isinstance(size, float)
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        x = activation(jnp.where(keep, x, 0))
        return attention(params["w"], x, size=size), "any aux"

    params = {"w": W, "steps": jnp.int32(3), "none": None, "key": jax.random.key(1)}
    key = jax.random.key(0)
    report = ols.diagnose(with_aux, params, X, key, jnp.tanh, has_aux=True, size=1.0)
    assert report.gradients.keys() == {"w/q", "w/k", "w/v"}


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

    model = Model(nnx.Rngs(0))
    report = ols.diagnose(lambda model, x: square(model(x) - 1), model, x)
    assert "linear/kernel" in report.gradients
    mlp = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
    report = ols.diagnose(lambda mlp, x: square(jax.vmap(mlp)(x)), mlp, x)
    assert report.suspects == ()
    assert "layers/0/weight" in report.gradients


@pytest.mark.parametrize("compiled", [lambda fun: fun, jax.jit])
def test_a_loss_that_scales_its_own_gradient_counts_as_if_it_did_not(compiled):
    loss_fn = lambda w, x: square(x @ w.astype(F16))
    scaled = compiled(lambda w, x: ols.scale_gradient(loss_fn(w, x), 2.0**10))
    inputs = normal(8, 8), normal(4, 8).astype(F16)
    expected = ols.diagnose(loss_fn, *inputs).initial_scale
    assert ols.diagnose(scaled, *inputs).initial_scale == expected


def test_the_loss_scale_in_a_state_is_shown():
    w, x = normal(8, 8), normal(4, 8)
    loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
    state = ols.with_loss_scale(optax.sgd(0.1), 2.0**10).init(w)
    report = ols.diagnose(loss_fn, w, x, opt_state=state)
    assert report.loss_scale == 2.0**10
    assert "the optimizer's state has 2**10" in " ".join(str(report).split())


def test_works_where_transfers_are_disallowed():
    params, x = jax.device_put((normal(8, 8), normal(4, 8)))
    loss_fn = ols.autocast(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
    with jax.transfer_guard("disallow_explicit"):
        assert ols.diagnose(loss_fn, params, x).suspects == ()


def test_works_where_nans_are_an_error():
    loss_fn = lambda w: jnp.sum(jnp.log(w.astype(F16)).astype(F32))
    with jax.debug_nans(True), jax.debug_infs(True):
        assert ols.diagnose(loss_fn, jnp.zeros(3)).suspects[0].operation == "log"


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(TypeError, match="the loss must be a scalar"):
        ols.diagnose(lambda w: w, jnp.ones(3))
    with pytest.raises(TypeError, match="must return a pair"):
        ols.diagnose(lambda w: (w**2).sum(), jnp.ones(2), has_aux=True)


def test_parameters_without_floats_are_refused():
    for params in ({}, None, jnp.arange(3)):
        with pytest.raises(ValueError, match="params must hold a floating-point array"):
            ols.diagnose(lambda params, x: jnp.sum(x), params, jnp.ones(3))


def test_a_state_without_a_loss_scale_is_refused():
    state = optax.adam(0.1).init(jnp.ones(3))
    with pytest.raises(
        ValueError, match="exactly one loss scale in the state, found 0"
    ):
        ols.diagnose(jnp.sum, jnp.ones(3), opt_state=state)


def test_shapes_are_refused():
    with pytest.raises(TypeError, match="give it arrays, not a ShapeDtypeStruct"):
        ols.diagnose(lambda w: jnp.sum(w), jax.ShapeDtypeStruct((3,), F32))


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this jax has no refs")
def test_a_ref_is_refused_with_its_line():
    def loss_fn(w, x):
        total = jax.new_ref(jnp.float32(0))
        total[...] += jnp.sum(x @ w)
        return total[...]

    line = loss_fn.__code__.co_firstlineno + 1
    with pytest.raises(TypeError, match=rf"a jax.Ref.*test_diagnose.py:{line} "):
        ols.diagnose(loss_fn, normal(8, 8), normal(4, 8))


# --- programs of all kinds ---


def test_what_jumps_follows_the_program():
    """Numbers that 16 bits do not tell apart: float32 would choose others."""

    def loss_fn(w, x):
        y = x.astype(F16) * w.astype(F16) + F16(100)
        top, _ = lax.top_k(y, 2)
        pooled = lax.reduce_window(y, -jnp.inf, lax.max, (2,), (2,), "VALID")
        chosen = jnp.sort(y)[:2] * jnp.sign(y[:2] - F16(50))
        return jnp.sum((top + chosen + jnp.round(y[:2]) + pooled[:2]).astype(F32))

    report = ols.diagnose(loss_fn, 1 + normal(64, scale=1e-3), jnp.full(64, 1e-2))
    assert report.suspects == ()
    assert report.error < 0.01


LAYERS_ALIKE = {
    "a number": (lambda x, y: x * 2 + y, lambda x, y: x * 3 + y),
    "the order of operands": (lambda x, y: x - y, lambda x, y: y - x),
    "an axis": (lambda x, y: x + y.sum(0), lambda x, y: x + y.sum(1)),
    "a shape": (lambda x, y: x[:4].sum() + y, lambda x, y: x[:3].sum() + y),
}


@pytest.mark.parametrize("functions", LAYERS_ALIKE.values(), ids=LAYERS_ALIKE)
def test_layers_that_differ_in_little_are_not_taken_for_one(functions):
    """Though what is compiled for one serves for all that are alike."""
    first, second = functions

    def loss_fn(w, x):
        x = x.astype(F16)
        for layer in (first, second, first):
            x = jnp.tanh(layer(x, x.T.astype(F16)) @ w.astype(F16))
        return square(x - 1)

    w, x = normal(8, 8, scale=0.3), normal(8, 8)
    report = ols.diagnose(loss_fn, w, x)
    assert report.loss == pytest.approx(float(loss_fn(w, x)), rel=1e-3)
    assert report.loss_in_float32 == pytest.approx(report.loss, rel=1e-2)


def test_no_iterations_are_none():
    def loss_fn(w, x):
        _, ys = lax.scan(lambda c, row: (c + row.sum(), row * 2), 0.0, x[:0])
        return square(x @ w) + jnp.sum(ys)

    assert ols.diagnose(loss_fn, normal(8, 8), normal(4, 8)).suspects == ()


def over_devices(w, x):
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
    each = lambda w, x: lax.pmean(square(x.astype(F16) @ w.astype(F16)), "d")
    return jax.shard_map(each, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())(w, x)


def in_a_kernel(w, x):
    def kernel(x, y):
        y[...] = x[...] * 2

    like = jax.ShapeDtypeStruct(x.shape, F16)
    y = pallas.pallas_call(kernel, like, interpret=True)(x.astype(F16))
    return square(y @ w.astype(F16))


def of_a_callback(w, x):
    like = jax.ShapeDtypeStruct((8,), F16)
    read = io_callback(lambda: np.ones(8, np.float16), like)
    return square(x.astype(F16) @ w.astype(F16) * read)


NOT_COMPARED = {
    "shard_map": over_devices,
    "pallas_call": in_a_kernel,
    "io_callback": of_a_callback,
}


@pytest.mark.parametrize("operation", NOT_COMPARED)
def test_what_is_not_compared_is_said(operation):
    loss_fn = NOT_COMPARED[operation]
    inputs = normal(8, 8), normal(2 * jax.device_count(), 8, scale=1)
    report = ols.diagnose(loss_fn, *inputs)
    assert report.not_compared[0].operation == operation
    assert f"Not compared with float32: {operation} at " in str(report)
    assert report.loss == pytest.approx(float(loss_fn(*inputs)), rel=1e-2)
    assert report.gradients["."].size > 0


# --- the report ---


def test_what_is_not_finite_among_the_arguments_is_said():
    loss_fn = lambda w, x: jnp.sum((w.astype(F16) * x).astype(F32))
    report = ols.diagnose(loss_fn, jnp.ones(3), jnp.full(3, jnp.nan, F16))
    assert report.not_finite == ("args/0",)
    assert "Not finite as given: args/0" in str(report)


@product(
    scale={"1": 1.0, "2**-10": 2.0**-10},
    dtype={"float16": F16, "bfloat16": jnp.bfloat16},
)
def test_gradients_are_those_of_float32(scale, dtype):
    loss_fn = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2) * scale
    w, x = normal(8, 8), normal(16, 8, scale=1)
    report = ols.diagnose(ols.autocast(loss_fn, dtype), w, x)
    grads = jax.grad(loss_fn)(w, x)
    figures = report.gradients["."]
    assert figures.size == pytest.approx(float(jnp.linalg.norm(grads)), rel=1e-2)
    assert figures.error == report.error < 0.02
    assert report.loss_in_float32 == pytest.approx(float(loss_fn(w, x)), rel=1e-5)
    assert (report.overflow is None) == (dtype is jnp.bfloat16)
    if dtype is jnp.bfloat16:
        assert report.initial_scale == 1


def test_a_small_loss_loses_gradients_without_a_scale():
    report = ols.diagnose(attention, W, X, loss=2.0**-22)
    assert report.gradients["v"].lost_unscaled > 0.9
    assert report.gradients["v"].lost == 0
    heading, *rows = [line.split() for line in str(report).splitlines()[-4:]]
    exponent = int(np.log2(report.initial_scale))
    assert heading == ["Lost", "at", "1", "at", f"2**{exponent}"]
    assert {name for name, *_ in rows} == {"q", "k", "v"}
    assert {lost for *_, lost in rows} == {"0.0%"}


def test_a_report_can_be_pickled_and_copied():
    def loss_fn(w, x):
        return square(lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0])

    report = ols.diagnose(ols.autocast(loss_fn), normal(8, 8), normal(4, 8))
    copied = pickle.loads(pickle.dumps(report))
    assert str(copied) == str(report)
    assert [*map(str, copied.table)] == [*map(str, report.table)]


def test_the_page_is_a_screen():
    params = {chr(97 + i): w for i, w in enumerate([jnp.eye(8)] * 20)}

    def loss_fn(params, x):
        for w in params.values():
            x = x @ w.astype(F16) * F16(300)
        return square(x) * 2.0**-40

    page = str(ols.diagnose(loss_fn, params, X)).splitlines()
    assert max(map(len, page)) <= 110
    assert len(page) <= 40


def test_the_table_has_a_row_for_each_equation_with_its_line_and_layer():
    report = ols.diagnose(attention, W, X)
    rows = [x for x in report.table if x.operation == "dot_general"]
    rows = [row for row in rows if not row.is_backward]
    line = attention.__code__.co_firstlineno + 3
    assert [row.layer for row in rows][:2] == ["q", "k"]
    assert f"test_diagnose.py:{line} " in rows[0].line
    assert rows[0].dtype == F16
    assert 0 < rows[2].error < 1e-3
    scores = (X.astype(F32) @ W["q"]) @ (X.astype(F32) @ W["k"]).mT
    assert rows[2].largest == pytest.approx(float(jnp.abs(scores).max()), rel=1e-3)
    assert str(rows[0]).startswith("dot_general at ")


def test_the_plot_shades_what_float16_does_not_hold():
    pytest.importorskip("matplotlib").use("agg")
    report = ols.diagnose(attention, W, X)
    axes = report.plot()
    low, high = axes.get_ylim()
    assert axes.get_yscale() == "log"
    assert low < 2.0**-25
    assert high > 65520
    assert len(axes.patches) == 2
    assert report.plot(axes) is axes
