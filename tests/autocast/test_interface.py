"""What `autocast` may be given, and that what comes out is of the kind that it was."""

import collections
import dataclasses
import functools
import inspect

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_float32 import assert_close, equations, normal, products
from flax import nnx
from jax import lax
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
        "sum": h.sum(),
        "integer": jnp.argmax(h, -1),
        "boolean": h > 0,
        "none": None,
        "number": 1.5,
        "text": "text",
        "pair": Pair(h[0], (h.max(), [])),
        "numpy": np.arange(3),
        "weak": jnp.asarray(2.0) * 3,
        "half": h.astype(F16),
        "brain": h.astype(BF16),
        "complex": h + 1j,
        "key": jax.random.key(0),
        "empty": h[:0],
        "constant": jnp.ones(3),
        "function": len,
        "type": jnp.float32,
    }


@pytest.mark.parametrize("jit", [False, True])
def test_results_are_of_the_kinds_that_they_were(jit):
    without = ("text", "function", "type") if jit else ()

    def fun(p, x):
        return {k: v for k, v in of_every_kind(p, x).items() if k not in without}

    run = jax.jit if jit else lambda f: f
    cast, exact = run(ols.autocast(fun))(P, jnp.asarray(X)), run(fun)(P, jnp.asarray(X))
    np.testing.assert_array_equal(cast.pop("numpy"), exact.pop("numpy"))
    assert jax.tree.structure(cast) == jax.tree.structure(exact)
    assert kinds(cast) == kinds(exact)
    assert_close(cast["activation"], exact["activation"], 0.005)
    np.testing.assert_array_equal(cast["parameter"], P["b"])
    np.testing.assert_array_equal(cast["input"], X)


def test_shapes_are_known_without_a_run():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (P, X))
    assert jax.eval_shape(ols.autocast(layer), *shapes) == jax.eval_shape(
        layer, *shapes
    )


def test_a_parameter_or_input_that_is_returned_is_not_rounded():
    x = jnp.float32([1 + 2.0**-20, 1e6, 1e-9])
    p, y = ols.autocast(lambda p, x: (p["w"], x))({"w": x}, x * 3)
    np.testing.assert_array_equal(p, x)
    np.testing.assert_array_equal(y, x * 3)


def test_the_function_keeps_its_name_and_documentation():
    def loss_fn(p, x):
        """A loss."""

    cast = ols.autocast(loss_fn)
    assert (cast.__name__, cast.__doc__) == ("loss_fn", "A loss.")


def test_a_function_without_arrays_or_products_is_itself():
    assert ols.autocast(lambda: 3)() == 3
    assert ols.autocast(lambda a, b: (b, a))("a", b=None) == (None, "a")
    np.testing.assert_array_equal(ols.autocast(jnp.exp)(X), jnp.exp(X))


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


def test_python_numbers_numpy_arrays_and_scalars():
    fun = lambda p, x, n, m: x @ p * n + m
    exact = fun(jnp.asarray(W), jnp.asarray(X), 2.0, 1)
    for args in [
        (W, X, 2.0, 1),
        (W.astype(np.float64), X.astype(np.float64), np.float64(2), np.int64(1)),
        (W, X, np.float32(2), np.int8(1)),
        (jnp.asarray(W), X, jnp.float32(2), True),
    ]:
        out = ols.autocast(fun)(*args)
        assert out.dtype == F32
        assert_close(out, exact, 0.005)


def test_what_is_differentiated_may_be_numbers():
    fun = lambda p, x, n: jnp.sum(x @ p["w"] * n + p["c"])
    args = ({"w": W, "c": 0.5}, X, 3.0)
    exact = jax.grad(fun, (0, 1, 2))(*args)
    assert_close(jax.grad(ols.autocast(fun), (0, 1, 2))(*args), exact, 0.005)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_arguments_in_16_bits(dtype):
    """The batch, as from a loader, or the parameters: computed as if they were in float32."""
    w, x = jnp.asarray(W, dtype), jnp.asarray(X, dtype)
    fun = lambda p, x: jnp.mean(jnp.exp(jnp.tanh(x @ p["w"]) + p["b"]))
    for args in [
        ({**P, "w": w}, X),
        (P, x),
        ({**P, "w": w}, x),
        ({"w": w, "b": w[0]}, x),
    ]:
        wide = jax.tree.map(lambda a: jnp.asarray(a, F32), args)
        loss, grads = jax.jit(jax.value_and_grad(fun))(*wide)
        cast_loss, cast_grads = jax.jit(jax.value_and_grad(ols.autocast(fun)))(*args)
        assert_close(jnp.float32(cast_loss), loss, 0.01)
        dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
        assert dtypes(cast_grads) == dtypes(args[0])
        assert_close(jax.tree.map(jnp.float32, cast_grads), grads, 0.01)


def test_a_batch_in_16_bits_overflows_in_nothing():
    x = jnp.full((4, 8), 300.0, F16)
    fun = lambda p, x: jnp.mean(x.astype(F32) ** 2) + jnp.sum(x @ p["w"])
    assert_close(ols.autocast(fun)(P, x), fun(P, x), 0.005)


def test_keys_and_integers_are_as_they_were():
    def fun(p, key, ids, table):
        noise = jax.random.normal(key, (4, 8))
        kept = jax.random.bernoulli(key, 0.5, (4, 8))
        return jnp.where(kept, table[ids] @ p["w"], noise), noise, kept, ids * 70_000

    ids, table = jnp.array([1, 0, 3, 2]), jnp.asarray(X)
    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        cast, exact = ols.autocast(fun)(P, key, ids, table), fun(P, key, ids, table)
        assert_close(cast[0], exact[0], 0.005)
        for a, b in zip(cast[1:], exact[1:], strict=True):
            np.testing.assert_array_equal(a, b)


def test_arrays_of_no_size_and_no_axes():
    fun = lambda p, x: (
        x[:0] @ p["w"],
        jnp.dot(x[0, 0], p["b"][0]),
        x[:, :0] @ p["w"][:0],
    )
    assert_close(ols.autocast(fun)(P, X), fun(P, X), 0.005)


def test_trees_of_every_make():
    @jax.tree_util.register_dataclass
    @functools.partial(dataclasses.dataclass, frozen=True)
    class Weights:
        w: jax.Array
        name: str = dataclasses.field(metadata={"static": True}, default="x")

    fun = lambda p, x: (x @ p[0].w, p[1].a @ p[0].w, p[2])
    p = (Weights(jnp.asarray(W)), Pair(X, None), None)
    cast = ols.autocast(fun)
    assert_close(cast(p, X), fun(p, X), 0.005)
    grads = jax.grad(lambda p, x: sum(y.sum() for y in cast(p, x)[:2]))(p, X)
    assert isinstance(grads[0], Weights)


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


def bias_only(x, bias):
    return jnp.tanh(x @ W + bias) @ W


def test_parameters_may_be_given_by_keyword():
    assert_close(
        ols.autocast(lambda **given: bias_only(**given))(x=X, bias=P["b"]),
        bias_only(X, P["b"]),
        0.005,
    )
    assert_close(ols.autocast(bias_only)(X, bias=P["b"]), bias_only(X, P["b"]), 0.005)
    assert_close(ols.autocast(bias_only)(x=X, bias=P["b"]), bias_only(X, P["b"]), 0.005)


def test_without_a_function_it_decorates_one():
    @ols.autocast(dtype=jnp.bfloat16)
    def product(x):
        return x @ x.T

    assert dict(ols.dtype_report(product, X).shares) == {jnp.dtype(jnp.bfloat16): 1.0}
    with pytest.raises(ValueError, match="dtype"):
        ols.autocast(dtype=jnp.float32)(product)


def test_it_is_no_context():
    refused = pytest.raises(TypeError, match=r"wraps a function.*autocast\(loss_fn\)")
    with refused, ols.autocast(dtype=jnp.bfloat16):
        pass


@pytest.mark.parametrize("fun", [None, 3, "fun", {"w": 1}])
def test_what_is_no_function_is_refused(fun):
    with pytest.raises(TypeError, match="fun"):
        ols.autocast(fun)


# --- dtype ---


@pytest.mark.parametrize(
    "dtype", [F16, "float16", np.float16, np.dtype("f2"), BF16, "bfloat16"]
)
def test_dtypes_under_any_name(dtype):
    cast = ols.autocast(layer, dtype)
    assert products(cast, P, X) == {jnp.dtype(dtype).name: 1}
    assert_close(cast(P, X), layer(P, X), 0.02)


@pytest.mark.parametrize(
    "dtype", [jnp.int8, bool, "float61", jnp.complex64, None, object]
)
def test_dtypes_that_are_none_of_floats_are_refused(dtype):
    with pytest.raises((ValueError, TypeError), match="dtype"):
        ols.autocast(layer, dtype)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "float8_e4m3fn", "float64"])
def test_other_names_are_told_the_right_ones(dtype):
    with pytest.raises(ValueError, match="must be float16 or bfloat16, got"):
        ols.autocast(layer, dtype)


def test_float32_changes_nothing_or_is_refused():
    try:
        cast = ols.autocast(layer, F32)
    except ValueError as error:
        assert "dtype" in str(error)  # noqa: PT017
    else:
        np.testing.assert_array_equal(cast(P, X), layer(P, X))


# --- what is explicit stays ---


def test_explicit_precision_stays():
    def fun(p, x):
        a = jnp.dot(x, p["w"], precision="highest")
        b = jnp.dot(a, p["w"], precision=jax.lax.Precision.HIGHEST)
        with jax.default_matmul_precision("highest"):
            c = jax.jit(jnp.matmul)(b, p["w"])
        return jnp.dot(c, p["w"]), a, c

    cast = ols.autocast(fun)
    assert products(cast, P, X) == {"float32": 3, "float16": 1}
    _, a, c = cast(P, X)
    np.testing.assert_allclose(a, fun(P, X)[1], rtol=1e-6)
    np.testing.assert_allclose(c, fun(P, X)[2], rtol=1e-5, atol=1e-6)
    grads = jax.grad(lambda p: cast(p, X)[0].sum())
    assert products(grads, P)["float32"] >= 5


@pytest.mark.filterwarnings("ignore:autocast leaves every")
@pytest.mark.parametrize("precision", ["highest", "float32"])
def test_a_default_precision_around_all_keeps_all(precision):
    with jax.default_matmul_precision(precision):
        assert products(ols.autocast(layer), P, X) == {"float32": 1}


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
        (
            solved,
            "symbolic zeros .*inside it, for example on the function that is passed to a solver",
        ),
        (lambda w, x: jnp.round(x).astype(jnp.int32) @ w, "int32 .*cast the batch"),
    ],
)
def test_it_warns_once_where_every_product_is_left_in_float32(fun, text):
    with pytest.warns(UserWarning, match=text) as found:
        jax.jit(ols.autocast(fun))(P["w"], X)
    (one,) = found
    assert one.filename == __file__
    ols.autocast(lambda w, x: fun(w, x) @ w)(P["w"], X)
    with pytest.warns(UserWarning, match=text):
        products(ols.autocast(fun), P["w"], X)


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
        ols.autocast(lambda w, x: jnp.dot(x, w, precision="highest"))(W, batch)


def test_the_remedy_for_a_solver_narrows():
    inside = lambda w, x: lax.while_loop(
        lambda x: x.sum() > 1e-3,
        lambda x: ols.autocast(jnp.matmul)(x, w) / 2,
        x,
    )
    assert products(inside, P["w"], X) == {"float16": 1}


@pytest.mark.parametrize("precision", ["highest", "float32"])
def test_it_warns_where_the_default_precision_keeps_all(precision):
    with (
        jax.default_matmul_precision(precision),
        pytest.warns(UserWarning, match="'default'"),
    ):
        jax.jit(ols.autocast(layer))(P, X)


def test_it_does_not_warn_at_a_default_precision_of_which_no_product_is_left():
    with jax.default_matmul_precision("highest"):
        asked = ols.autocast(
            lambda w, x: lax.dot(x, w, precision=lax.Precision.DEFAULT)
        )
        assert products(asked, P["w"], X) == {"float16": 1}
        ols.autocast(lambda w, x: jnp.exp(x) + w[0])(P["w"], X)


def test_it_does_not_warn_where_products_asked_or_there_are_none():
    ols.autocast(lambda x: jnp.dot(x, x, precision="highest"))(P["w"])
    ols.autocast(jnp.exp)(P["w"])


@pytest.mark.parametrize("precision", ["default", "high", "tensorfloat32", "bfloat16"])
def test_a_lower_default_precision_keeps_nothing(precision):
    with jax.default_matmul_precision(precision):
        fun = lambda p, x: x @ p["w"]
        found = products(lambda p, x: ols.autocast(fun)(p, x), P, X)
        assert found == {"float16": 1}


def test_explicit_16_bit_and_integer_products_stay():
    def fun(p, x):
        brain = (x.astype(BF16) @ p["w"].astype(BF16)).astype(F32)
        ints = (jnp.round(x).astype(jnp.int32) @ jnp.ones((8, 8), jnp.int32)).astype(
            F32
        )
        mixed = x.astype(BF16) @ p["w"]
        compl = ((x + 1j) @ p["w"]).real
        return (brain + ints + mixed + compl) @ p["w"]

    cast = ols.autocast(fun)
    assert_close(cast(P, X), fun(P, X), 0.02)
    found = products(cast, P, X)
    assert found["bfloat16"] == 1
    assert found["complex64"] == 1
    assert found["int32"] == 1


@pytest.mark.filterwarnings("ignore:autocast leaves every")
@pytest.mark.parametrize(("dtype", "count"), [("int32", 100_000), ("int8", 100)])
def test_integers_beside_float32_stay_and_say_so(dtype, count):
    fun = lambda w, n: (
        jnp.matmul(n, w, preferred_element_type=jnp.float32).sum(1) @ w[0]
    )
    w, counts = normal(0, 8, 8), jnp.full((8, 8), count, dtype)
    cast = ols.autocast(lambda w, n: jnp.sum(fun(w, n)))
    assert "float16" not in products(jax.grad(cast), w, counts)
    chex.assert_trees_all_close(cast(w, counts), jnp.sum(fun(w, counts)), rtol=1e-6)


def test_float64_stays():
    with jax.enable_x64(True):
        w, x = jnp.asarray(W, jnp.float64), jnp.asarray(X, jnp.float64)
        w32, x32 = jnp.asarray(W, F32), jnp.asarray(X, F32)

        def fun(p, x):
            a = jnp.exp(x @ p["wide"])
            b = jnp.tanh(x.astype(F32) @ p["w"])
            return a + b, a, b, jnp.sum(a), 1.0 * b

        p = {"wide": w, "w": w32}
        cast, exact = ols.autocast(fun)(p, x), fun(p, x)
        assert kinds(cast) == kinds(exact)
        np.testing.assert_array_equal(cast[1], exact[1])
        assert_close(cast[0], exact[0], 0.005)
        assert products(ols.autocast(fun), p, x) == {"float64": 1, "float16": 1}
        grads = jax.grad(lambda p: ols.autocast(fun)(p, x)[0].sum())(p)
        assert grads["wide"].dtype == jnp.float64
        counted = ols.autocast(lambda w, x: (x @ w, jnp.arange(3), jnp.float64(1) / 3))
        assert kinds(counted(w32, x32)) == kinds(
            (x32 @ w32, jnp.arange(3), jnp.float64(1) / 3)
        )


def test_preferred_element_types_are_kept():
    """What a product gives is of the dtype that was asked for, whatever it takes."""
    fun = lambda p, x: (
        jnp.dot(x, p["w"], preferred_element_type=F32),
        jax.lax.dot(x.astype(BF16), p["w"].astype(BF16), preferred_element_type=F32),
        jnp.einsum(
            "nd,de->ne", x.astype(BF16), p["w"].astype(BF16), preferred_element_type=F32
        ),
    )
    cast, exact = ols.autocast(fun)(P, X), fun(P, X)
    assert kinds(cast) == kinds(exact)
    assert_close(cast, exact, 0.005)
    np.testing.assert_array_equal(cast[1:], exact[1:])


def test_a_stream_that_is_cast_by_hand_stays_in_16_bits():
    """As a transformer's with norms before its layers, which no product reads."""

    def stream(dtype):
        def fun(w, x):
            x = (x @ w).astype(dtype)
            for _ in range(3):
                x = x + (jax.nn.standardize(x.astype(F32)) @ w).astype(dtype)
            return jnp.mean(x.astype(F32) ** 2)

        jaxpr = jax.make_jaxpr(ols.autocast(fun))(W, X).jaxpr
        sums = [e for e in equations(jaxpr) if e.primitive.name == "add"]
        return [
            str(e.outvars[0].aval.dtype) for e in sums if e.outvars[0].aval.size > 8
        ]

    assert set(stream(F16)) == {"float16"}
    assert set(stream(F32)) == {"float32"}
    fun = lambda w, x: jnp.tanh((x @ w).astype(F16) + F16(1)).astype(F32)
    assert products(ols.autocast(fun), W, X) == {"float16": 1}


# --- what surrounds it ---


def test_errors_of_the_function_come_through():
    class Mine(Exception):  # noqa: N818
        pass

    def fun(p, x):
        raise Mine("here")

    with pytest.raises(Mine, match="here"):
        ols.autocast(fun)(P, X)


def test_nothing_leaks_and_nothing_is_traced_twice():
    traces = []

    def fun(p, x):
        traces.append(1)
        return layer(p, x).sum()

    with jax.checking_leaks():
        step = jax.jit(jax.grad(ols.autocast(fun)))
        step(P, X)
        once = len(traces)
        step(P, X)
    assert once <= 2
    assert len(traces) == once


def test_in_a_step_that_is_exported():
    from jax import export

    step = jax.jit(jax.grad(ols.autocast(lambda p, x: layer(p, x).sum())))
    exported = export.export(step)(P, X)
    assert_close(export.deserialize(exported.serialize()).call(P, X), step(P, X), 1e-6)


def test_symbolic_shapes():
    from jax import export

    (n,) = export.symbolic_shape("n")
    shapes = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), P),
        jax.ShapeDtypeStruct((n, 8), F32),
    )
    exported = export.export(
        jax.jit(ols.autocast(lambda p, x: jax.nn.softmax(layer(p, x))))
    )(*shapes)
    assert_close(exported.call(P, X), jax.nn.softmax(layer(P, X)), 0.005)

    def attention(p, x):  # compares sizes: those of scores and of what they are made of
        h = layer(p, x)
        return jnp.mean(jax.nn.softmax(h @ h.T) @ h)

    step = jax.jit(jax.grad(ols.autocast(attention)))
    assert_close(
        export.export(step)(*shapes).call(P, X), jax.grad(attention)(P, X), 0.005
    )


def test_within_other_functions_that_are_cast_by_hand():
    """An argument in 16 bits because the caller made it so widens nothing either."""
    half = jax.tree.map(lambda x: x.astype(F16), P)
    fun = lambda p, x: layer(p, jax.nn.relu(layer(p, x)))
    assert products(ols.autocast(fun), half, X) == {"float16": 2}


# --- what is no function ---


@pytest.mark.parametrize("given", ["cuda", 3, jnp.dtype(F16), {"w": 1}])
def test_what_is_no_function_is_refused_by_the_decorator(given):
    for wrap in (ols.autocast, ols.autocast(), ols.autocast(dtype=BF16)):
        with pytest.raises(TypeError, match=r"fun must be a function"):
            wrap(given)


def test_its_signature_shows_no_sentinel():
    shown = str(inspect.signature(ols.autocast))
    assert shown.startswith("(fun: collections.abc.Callable[..., ")
    assert "empty" not in shown
    assert "object at 0x" not in shown


def test_a_mean_of_complex_numbers_has_a_gradient():
    """It would be kept for the backward pass, where JAX rounds what is kept."""

    def loss_fn(w, x):
        angles = x @ w
        mean = jnp.mean(jax.lax.complex(jnp.cos(angles), jnp.sin(angles)), 0)
        return jnp.mean(jnp.abs(mean) ** 2)

    w = jax.random.normal(jax.random.key(0), (8, 16))
    x = jax.random.normal(jax.random.key(1), (64, 8))
    grad = jax.jit(jax.grad(ols.autocast(loss_fn)))(w, x)
    expected = jax.jit(jax.grad(loss_fn))(w, x)
    assert jnp.linalg.norm(grad - expected) < 0.01 * jnp.linalg.norm(expected)


def test_a_scan_over_an_axis_that_an_export_leaves_open():
    from jax import export

    def summed(w, x):
        add = lambda total, row: (total + jnp.tanh(row @ w), None)
        return jax.lax.scan(add, jnp.zeros(x.shape[1]), x)[0]

    (n,) = export.symbolic_shape("n")
    w, x = jnp.eye(4), jnp.ones((3, 4))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 4), (n, 4))]
    exported = export.export(jax.jit(ols.autocast(summed)))(*shapes)
    assert_close(exported.call(w, x), summed(w, x), 0.005)


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
    value_and_grad = lambda f: jax.jit(jax.value_and_grad(f, has_aux=True))
    exact = value_and_grad(fun)(w, x)
    assert_close(value_and_grad(ols.autocast(fun))(w, x), exact, 0.02)
    assert ols.diagnose(lambda w, x: fun(w, x)[0], w, x).suspects == ()
