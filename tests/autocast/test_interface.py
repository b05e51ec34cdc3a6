"""What `autocast` may be given, what comes out, what stays as it is, and when it warns."""

import collections
import dataclasses
import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_float32 import assert_close, equations, normal, products
from flax import nnx
from jax import export, lax
from jax.extend.core import Literal

import optax_lossscale as ols

F16, F32, BF16 = jnp.float16, jnp.float32, jnp.bfloat16
W = normal(1, 8, 8, scale=8**-0.5)
X = normal(0, 4, 8)
P = {"w": jnp.asarray(W), "b": jnp.linspace(-1, 1, 8)}


def layer(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def kinds(tree):
    """Of each leaf its type, dtype and weak type."""
    kind = lambda x: (
        (x.shape, x.dtype, jax.typeof(x).weak_type) if isinstance(x, jax.Array) else x
    )
    return jax.tree.map(kind, tree)


# --- what comes out ---

Pair = collections.namedtuple("Pair", "a b")


def of_every_kind(p, x):
    h = x @ p["w"]
    return {
        "activation": h,
        "input": x,
        "parameter": p["b"],
        "integer": jnp.argmax(h, -1),
        "boolean": h > 0,
        "none": None,
        "number": 1.5,
        "pair": Pair(h[0], (h.max(), [])),
        "weak": jnp.asarray(2.0) * 3,
        "half": h.astype(F16),
        "complex": h + 1j,
        "key": jax.random.key(0),
        "empty": h[:0],
        "constant": jnp.ones(3),
        "text": "text",
        "function": len,
    }


@pytest.mark.parametrize("jit", [False, True])
def test_results_are_of_the_kinds_that_they_were(jit):
    def fun(p, x):
        found = of_every_kind(p, x)
        return {
            k: v for k, v in found.items() if not jit or k not in ("text", "function")
        }

    run = jax.jit if jit else lambda f: f
    cast, exact = run(ols.autocast(fun))(P, jnp.asarray(X)), run(fun)(P, jnp.asarray(X))
    assert kinds(cast) == kinds(exact)
    assert_close(cast["activation"], exact["activation"], 0.005)
    np.testing.assert_array_equal(cast["parameter"], P["b"])
    np.testing.assert_array_equal(cast["input"], X)


def test_a_function_without_arrays_or_products_is_itself():
    assert ols.autocast(lambda: 3)() == 3
    assert ols.autocast(lambda a, b: (b, a))("a", b=None) == (None, "a")
    np.testing.assert_array_equal(ols.autocast(jnp.exp)(X), jnp.exp(X))


def test_the_function_keeps_its_name_and_documentation():
    def loss_fn(p, x):
        """A loss."""

    cast = ols.autocast(loss_fn)
    assert (cast.__name__, cast.__doc__) == ("loss_fn", "A loss.")


# --- what goes in ---


def test_keywords_and_what_is_no_array():
    def fun(p, how, x, f=None, *, scale, names=("a",), flag=True):
        assert (how, names, flag) == ("tanh", ("a", "b"), False)
        assert isinstance(scale, float)
        return f(x @ p["w"]) * scale

    cast = ols.autocast(fun)(
        P, "tanh", x=X, f=jnp.tanh, scale=2.0, names=("a", "b"), flag=False
    )
    assert_close(cast, 2 * jnp.tanh(X @ W), 0.005)


def test_python_numbers_and_numpy_arrays_which_may_be_differentiated():
    fun = lambda w, x, n, m: jnp.sum(x @ w * n + m)
    exact = jax.value_and_grad(fun, (0, 2))(jnp.asarray(W), jnp.asarray(X), 2.0, 1)
    for args in [
        (W, X, 2.0, 1),
        (W, X, np.float32(2), np.int8(1)),
        (jnp.asarray(W), X.astype(np.float64), jnp.float32(2), True),
    ]:
        found = jax.value_and_grad(ols.autocast(fun), (0, 2))(*args)
        assert_close(found, exact, 0.005)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("which", ["weights", "batch", "all"])
def test_arguments_in_16_bits_are_computed_with_as_if_they_were_in_float32(
    which, dtype
):
    fun = lambda p, x: jnp.mean(jnp.exp(jnp.tanh(x @ p["w"]) + p["b"]) + x**2)
    half = lambda tree: jax.tree.map(lambda a: a.astype(dtype), tree)
    x = 300 * X  # the square of which is above 65504
    p = half(P) if which == "all" else {**P, "w": half(P["w"])}
    args = (P if which == "batch" else p), (x if which == "weights" else half(x))
    wide = jax.tree.map(lambda a: jnp.asarray(a, F32), args)
    loss, grads = jax.jit(jax.value_and_grad(fun))(*wide)
    cast_loss, cast_grads = jax.jit(jax.value_and_grad(ols.autocast(fun)))(*args)
    dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
    assert dtypes(cast_grads) == dtypes(args[0])
    assert_close(jnp.float32(cast_loss), loss, 0.01)
    assert_close(jax.tree.map(jnp.float32, cast_grads), grads, 0.01)


def test_keys_and_integers_are_as_they_were():
    def fun(p, key, ids, table):
        noise = jax.random.normal(key, (4, 8))
        return table[ids] @ p["w"] + noise, noise, ids * 70_000

    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        args = P, key, jnp.array([1, 0, 3, 2]), jnp.asarray(X)
        cast, exact = ols.autocast(fun)(*args), fun(*args)
        assert_close(cast[0], exact[0], 0.005)
        for a, b in zip(cast[1:], exact[1:], strict=True):
            np.testing.assert_array_equal(a, b)


def test_arrays_of_no_size_and_no_axes():
    empty = lambda p, x: (x[:0] @ p["w"], x[:, :0] @ p["w"][:0], jnp.dot(x[0, 0], x[0]))
    assert_close(ols.autocast(empty)(P, X), empty(P, X), 0.005)


def test_a_node_that_can_hold_nothing_but_arrays():
    """As Brax's counters, whose constructor makes arrays of what it is given."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Counter:
        count: jax.Array

        def __post_init__(self):
            if isinstance(self.count, int):
                self.count = jnp.uint32(self.count)

    fun = lambda w, counter, x: jnp.mean(x @ w) + counter.count
    args = W, Counter(3), X
    assert_close(jax.jit(ols.autocast(fun))(*args), fun(*args), 0.005)


# --- how it is called ---


def test_without_a_function_it_decorates_one():
    @ols.autocast(dtype=jnp.bfloat16)
    def product(x):
        return x @ x.T

    assert products(product, X) == {"bfloat16": 1}
    with pytest.raises(ValueError, match="dtype"):
        ols.autocast(dtype=jnp.float32)(product)


def test_it_is_no_context():
    refused = pytest.raises(TypeError, match=r"wraps a function.*autocast\(loss_fn\)")
    with refused, ols.autocast(dtype=jnp.bfloat16):
        pass


@pytest.mark.parametrize("given", [None, "cuda", 3, jnp.dtype(F16), {"w": 1}])
def test_what_is_no_function_is_refused(given):
    for wrap in (ols.autocast, ols.autocast(), ols.autocast(dtype=BF16)):
        with pytest.raises(TypeError, match="fun must be a function"):
            wrap(given)


def test_its_signature_shows_no_sentinel():
    shown = str(inspect.signature(ols.autocast))
    assert shown.startswith("(fun: collections.abc.Callable[..., ")
    assert "object at 0x" not in shown


@pytest.mark.parametrize("dtype", [F16, "float16", np.dtype("f2"), BF16, "bfloat16"])
def test_dtypes_under_any_name(dtype):
    cast = ols.autocast(layer, dtype)
    assert products(cast, P, X) == {jnp.dtype(dtype).name: 1}
    assert_close(cast(P, X), layer(P, X), 0.02)


@pytest.mark.parametrize(
    "dtype", [jnp.int8, "fp16", "float8_e4m3fn", F32, "float64", jnp.complex64, None]
)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="dtype must be float16 or bfloat16, got"):
        ols.autocast(layer, dtype)


# --- what is explicit stays ---


def test_explicit_precision_stays():
    def fun(p, x):
        a = jnp.dot(x, p["w"], precision="highest")
        with jax.default_matmul_precision("highest"):
            b = jax.jit(jnp.matmul)(a, p["w"])
        return jnp.dot(b, p["w"]), a, b

    cast = ols.autocast(fun)
    assert products(cast, P, X) == {"float32": 2, "float16": 1}
    for a, b in zip(cast(P, X)[1:], fun(P, X)[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    grads = jax.grad(lambda p: cast(p, X)[0].sum())
    assert products(grads, P)["float32"] >= 4  # in the backward pass, too


@pytest.mark.filterwarnings("ignore:autocast leaves every")
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("highest", "float32"), ("float32", "float32"), ("high", "float16")],
)
def test_a_default_precision_around_all_keeps_all_if_it_is_the_highest(
    precision, dtype
):
    with jax.default_matmul_precision(precision):
        assert products(ols.autocast(layer), P, X) == {dtype: 1}


@pytest.mark.filterwarnings("ignore:autocast leaves every")
def test_explicit_dtypes_stay():
    def fun(p, x):
        brain = (x.astype(BF16) @ p["w"].astype(BF16)).astype(F32)
        integers = jnp.round(x).astype(jnp.int32) @ jnp.ones((8, 8), jnp.int32)
        mixed = jnp.full((8, 8), 100_000) @ p["w"]
        return (brain + integers + ((x + 1j) @ p["w"]).real) @ p["w"] + mixed[:4]

    cast = ols.autocast(fun)
    assert_close(cast(P, X), fun(P, X), 0.02)
    assert products(cast, P, X).keys() == {
        *("bfloat16", "int32", "complex64", "float16", "float32")
    }


def test_float64_stays():
    with jax.enable_x64(True):
        fun = lambda p, x: (
            x @ p["wide"],
            jnp.tanh(x.astype(F32) @ p["w"]),
            jnp.arange(3),
        )
        p = {"wide": jnp.asarray(W, jnp.float64), "w": jnp.asarray(W, F32)}
        x = jnp.asarray(X, jnp.float64)
        cast, exact = ols.autocast(fun)(p, x), fun(p, x)
        assert kinds(cast) == kinds(exact)
        np.testing.assert_array_equal(cast[0], exact[0])
        assert products(ols.autocast(fun), p, x) == {"float64": 1, "float16": 1}


def test_a_product_gives_the_dtype_that_was_asked_for():
    def fun(p, x):
        half = x.astype(BF16), p["w"].astype(BF16)
        wide = {"preferred_element_type": F32}
        return jnp.dot(x, p["w"], **wide), lax.dot(*half, **wide)

    cast, exact = ols.autocast(fun)(P, X), fun(P, X)
    assert kinds(cast) == kinds(exact)
    assert_close(cast[0], exact[0], 0.005)
    np.testing.assert_array_equal(cast[1], exact[1])


@pytest.mark.parametrize("dtype", [F16, F32])
def test_a_stream_that_is_cast_by_hand_stays_as_it_is(dtype):
    """As a transformer's with norms before its layers, which no product reads."""

    def fun(w, x):
        x = (x @ w).astype(dtype)
        for _ in range(3):
            x = x + (jax.nn.standardize(x.astype(F32)) @ w).astype(dtype)
        return jnp.mean(x.astype(F32) ** 2)

    jaxpr = jax.make_jaxpr(ols.autocast(fun))(W, X).jaxpr
    sums = [e.outvars[0].aval for e in equations(jaxpr) if e.primitive.name == "add"]
    assert {x.dtype for x in sums if x.size > 8} == {jnp.dtype(dtype)}


# --- when it warns ---


def waits(w, x):
    return lax.while_loop(lambda x: x.sum() > 1e-3, lambda x: x @ w / 2, x)


@jax.custom_jvp
def solved(w, x):
    return x @ w


@functools.partial(solved.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    return solved(*primals), solved(*primals)


def placed(w, x):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.jit(lambda w, x: x @ w, out_shardings=place)(w, x)


@pytest.mark.parametrize(
    ("fun", "text"),
    [
        (placed, "a jit with shardings .*inside it"),
        (waits, "a loop that waits for a number .*inside it"),
        (solved, "symbolic zeros .*on the function that is passed to a solver"),
        (lambda w, x: jnp.round(x).astype(jnp.int32) @ w, "int32 .*cast the batch"),
    ],
)
def test_it_warns_once_where_every_product_is_left_in_float32(fun, text):
    with pytest.warns(UserWarning, match=text) as found:
        jax.jit(ols.autocast(fun))(P["w"], X)
    (one,) = found
    assert one.filename == __file__
    # not where one is not
    ols.autocast(lambda w, x: fun(w, x) @ w)(P["w"], X)


@pytest.mark.parametrize("jit", [eqx.filter_jit, nnx.jit])
def test_a_warning_points_to_the_users_line_and_not_into_a_framework(jit):
    fun = ols.autocast(lambda w: jnp.ones((4, len(w)), jnp.int32) @ w)
    with pytest.warns(UserWarning, match="leaves every matrix product") as found:
        jit(fun)(P["w"])
    assert {warning.filename for warning in found} == {__file__}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, jax.grad])
def test_it_warns_where_a_float64_batch_makes_every_product_float64(wrap):
    """As NumPy's default does, if `jax_enable_x64` is set."""
    with jax.enable_x64(True):
        batch = np.ones((4, 8))
        loss = wrap(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w))
        with pytest.warns(UserWarning, match="float64 .*cast the batch"):
            ols.autocast(loss)(W, batch)
        ols.autocast(loss)(W, batch.astype(np.float32))


def test_it_warns_of_a_default_precision_that_keeps_all():
    with jax.default_matmul_precision("highest"):
        with pytest.warns(UserWarning, match="'default'"):
            jax.jit(ols.autocast(layer))(P, X)
        low = functools.partial(lax.dot, precision=lax.Precision.DEFAULT)
        assert products(ols.autocast(low), X, W) == {"float16": 1}


def test_it_does_not_warn_where_products_asked_or_there_are_none():
    ols.autocast(lambda x: jnp.dot(x, x, precision="highest"))(P["w"])
    ols.autocast(jnp.exp)(P["w"])


def test_the_remedy_for_a_solver_narrows():
    body = lambda w: lambda x: ols.autocast(jnp.matmul)(x, w) / 2
    inside = lambda w, x: lax.while_loop(lambda x: x.sum() > 1e-3, body(w), x)
    assert products(inside, P["w"], X) == {"float16": 1}


# --- what surrounds it ---


def test_nothing_leaks_and_nothing_is_traced_twice():
    traces = []

    def fun(p, x):
        traces.append(1)
        return layer(p, x).sum()

    with jax.checking_leaks():
        step = jax.jit(jax.grad(ols.autocast(fun)))
        step(P, X)
        step(P, X)
    assert len(traces) == 1


def attention(p, x):  # compares sizes: those of scores and of what they are made of
    h = layer(p, x)
    return jnp.mean(jax.nn.softmax(h @ h.T) @ h)


def scanned(p, x):
    add = lambda total, row: (total + jnp.tanh(row @ p["w"]), None)
    return jnp.sum(lax.scan(add, jnp.zeros(8), x)[0])


@pytest.mark.parametrize("fun", [attention, scanned])
def test_a_step_is_exported_with_an_axis_left_open(fun):
    (n,) = export.symbolic_shape("n")
    p = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), P)
    step = jax.jit(jax.grad(ols.autocast(fun)))
    exported = export.export(step)(p, jax.ShapeDtypeStruct((n, 8), F32))
    call = export.deserialize(exported.serialize()).call
    assert_close(call(P, X), jax.grad(fun)(P, X), 0.005)


def test_a_mean_of_complex_numbers_has_a_gradient():
    """It would be kept for the backward pass, where JAX rounds what is kept."""

    def loss_fn(p, x):
        angles = x @ p["w"]
        mean = jnp.mean(lax.complex(jnp.cos(angles), jnp.sin(angles)), 0)
        return jnp.mean(jnp.abs(mean) ** 2)

    grads = [jax.jit(jax.grad(f))(P, X) for f in (ols.autocast(loss_fn), loss_fn)]
    assert_close(*grads, 0.01)


@pytest.fixture
def arrays_as_literals():
    """JAX writes the arrays that a function closes over as literals of its jaxpr."""
    name = "jax_use_simplified_jaxpr_constants"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


@pytest.mark.usefixtures("arrays_as_literals")
def test_arrays_that_jaxprs_hold_as_literals():
    w, x, shift = normal(0, 4, 4), normal(1, 3, 4), np.float32(normal(2, 4))

    def fun(w, x):
        h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ w / shift), shift), x, length=2)
        return jnp.mean((h - shift) ** 2), shift

    assert any(isinstance(v, Literal) for v in jax.make_jaxpr(fun)(w, x).jaxpr.outvars)
    value_and_grad = lambda f: jax.jit(jax.value_and_grad(f, has_aux=True))(w, x)
    assert_close(value_and_grad(ols.autocast(fun)), value_and_grad(fun), 0.02)
    assert ols.diagnose(lambda w, x: fun(w, x)[0], w, x).suspects == ()
