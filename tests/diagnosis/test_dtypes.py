"""What a program computes in which dtype, counted in what JAX traced of it."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import optax_lossscale as ols

F16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
SOURCE = pathlib.Path(__file__).read_text().splitlines()
FILE = pathlib.Path(__file__).name
report = ols.dtype_report


def line(marker):
    """The line of this file that ends in a comment with this marker."""
    (number,) = (n for n, text in enumerate(SOURCE, 1) if text.endswith(f"# {marker}"))
    return f"{FILE}:{number}"


def lines(operations):
    """Where in this file they were made."""
    return [re.search(rf"{FILE}:\d+", one.source).group() for one in operations]


def array(*shape, dtype=jnp.float16):
    return jax.ShapeDtypeStruct(shape, dtype)


def multiplications(fun, *args):
    return sum(product.multiplications for product in report(fun, *args).products)


def compilers(fun, *args):
    """The multiplications that XLA counts, each with its addition."""
    return jax.jit(fun).lower(*args).cost_analysis()["flops"] / 2


# --- how many multiplications ---


@given(
    st.lists(st.integers(2, 5), min_size=6, max_size=6),
    st.sampled_from(
        ["ij,jk->ik", "bij,bjk->bik", "bhqd,bhkd->bhqk", "bij,kj->bik", "ij,j->i"]
    ),
)
def test_a_product_takes_the_multiplications_that_the_compiler_counts(sizes, formula):
    size = dict(zip(sorted(set(formula) - set(",->")), sizes, strict=False))
    operands = formula.partition("->")[0].split(",")
    args = [array(*(size[axis] for axis in axes), dtype=F32) for axes in operands]
    fun = functools.partial(jnp.einsum, formula)
    assert multiplications(fun, *args) == compilers(fun, *args)


CONVOLUTIONS = {
    "plain": {},
    "strided": {"window_strides": (2, 1)},
    "dilated": {"rhs_dilation": (2, 2)},
    "of groups of features": {"feature_group_count": 2},
    "of groups of a batch": {"batch_group_count": 2},
}


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_convolution_takes_the_multiplications_that_the_compiler_counts(options):
    options = {"window_strides": (1, 1), "padding": "VALID"} | options
    x, kernel = array(2, 4, 9, 8, dtype=F32), array(6, 4, 3, 2, dtype=F32)
    if "feature_group_count" in options:
        kernel = array(6, 2, 3, 2, dtype=F32)
    fun = functools.partial(lax.conv_general_dilated, **options)
    assert multiplications(fun, x, kernel) == compilers(fun, x, kernel)


def test_the_backward_pass_of_a_product_or_convolution_takes_twice_the_multiplications():
    dense = lambda x, w: jnp.sum(x @ w)
    conv = lambda x, k: jnp.sum(lax.conv(x, k, (2, 2), "VALID"))
    for fun, args in [
        (dense, (array(5, 4), array(4, 3))),
        (conv, (array(2, 3, 9, 9), array(4, 3, 3, 3))),
    ]:
        forward = multiplications(fun, *args)
        both = multiplications(jax.value_and_grad(fun, (0, 1)), *args)
        assert both == pytest.approx(3 * forward, rel=0.3)  # at the edges of a stride


def test_a_ragged_product_takes_each_row_times_one_group():
    fun = lambda x, w, sizes: jnp.sum(lax.ragged_dot(x, w, sizes))
    args = array(8, 4), array(2, 4, 3), array(2, dtype=jnp.int32)
    assert multiplications(fun, *args) == 8 * 4 * 3
    assert multiplications(jax.value_and_grad(fun, (0, 1)), *args) == 3 * 8 * 4 * 3


W, X = array(4, 4), array(2, 4)
ONE = 2 * 4 * 4  # multiplications of X @ W


def scanned(w, x):
    return lax.scan(lambda x, _: (x @ w, None), x, length=7)[0]


def in_a_cond(w, x):
    return lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.tanh(x @ w))


def in_a_while(w, x):
    return lax.while_loop(lambda c: jnp.all(c < 9), lambda c: c @ w, x)  # while


@jax.custom_vjp
def custom(w, x):
    return x @ w


custom.defvjp(
    lambda w, x: (custom(w, x), (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T)
)


def solved(w, x):
    product = lambda v: w @ v
    return lax.custom_linear_solve(product, x[0], lambda f, b: f(b), symmetric=True)


def over_devices(w, x):
    mesh = Mesh(jax.devices(), "d")
    specs = {
        "in_specs": (PartitionSpec(), PartitionSpec()),
        "out_specs": PartitionSpec(),
    }
    return jax.shard_map(lambda w, x: x @ w, mesh=mesh, **specs)(w, x)


def recomputed(w, x):
    return jax.grad(lambda w: jnp.sum(jax.checkpoint(lambda: jnp.sin(x @ w))()))(w)


INSIDE = {
    "jit": (jax.jit(lambda w, x: x @ w), ONE),
    "vmap": (jax.vmap(lambda w, x: x @ w, (None, 0)), ONE),
    "scan": (scanned, 7 * ONE),
    "cond": (in_a_cond, 2 * ONE),
    "while": (in_a_while, ONE),
    "fori": (lambda w, x: lax.fori_loop(0, 5, lambda _, x: x @ w, x), 5 * ONE),
    "custom_vjp": (custom, ONE),
    "its backward pass": (
        jax.grad(lambda w, x: jnp.sum(custom(w, x)), (0, 1)),
        3 * ONE,
    ),
    "remat": (recomputed, 3 * ONE),
    "solve": (solved, 4 * 4),
    "shard_map": (over_devices, 4 * ONE),
    "pmap": (lambda w, x: jax.pmap(lambda x: x @ w)(jnp.stack([x, x])), 2 * ONE),
}


@pytest.mark.parametrize(("fun", "expected"), INSIDE.values(), ids=INSIDE)
def test_it_looks_into_all_that_jax_traces(fun, expected):
    assert multiplications(fun, W, X) == expected


# --- programs that run several times ---


def call_tree(depth):
    """A function that calls another twice, which calls another twice, and so on."""
    function = jax.jit(lambda w, x: jnp.tanh(x @ w))
    for _ in range(depth):
        function = jax.jit(lambda w, x, inner=function: inner(w, inner(w, x)))
    return function


def test_each_shared_program_is_gone_through_once():
    """Of programs that each call the one before twice, some would take years otherwise."""
    (product,) = report(call_tree(60), array(4, 4), array(4, 4)).products
    assert product.count == 2**60
    assert product.multiplications == 2**60 * 4**3
    assert FILE in product.source


# --- in which dtype ---


def test_the_shares_are_those_of_the_multiplications():
    def fun(w, x):
        return lax.scan(lambda x, _: (x @ w, None), x, length=3)[0].astype(
            F32
        ) @ w.astype(F32)

    found = report(fun, W, X)
    assert found.shares == {F16: 0.75, F32: 0.25}
    assert list(found.shares) == [F16, F32]
    assert [p.count for p in found.products] == [1, 1]


def test_the_widest_operand_counts_and_not_the_result():
    wide = functools.partial(lax.dot, preferred_element_type=jnp.float32)
    assert report(wide, X, W).shares == {F16: 1.0}
    assert report(wide, X, array(4, 4, dtype=F32)).shares == {F32: 1.0}


def test_a_precision_is_a_choice_unless_all_products_have_it():
    x = array(4, 4, dtype=F32)
    exact = functools.partial(lax.dot, precision=lax.DotAlgorithmPreset.F32_F32_F32)
    assert report(exact, x, x).products[0].by_choice
    with jax.default_matmul_precision("highest"):
        assert not report(jnp.matmul, x, x).products[0].by_choice


# --- the lines that made it ---


@jax.jit
def helper(w, x):
    return jnp.dot(x, w)  # in a function that is compiled once


def test_a_line_in_a_function_that_is_called_twice_is_named_once():
    found = report(lambda w, x: helper(w, helper(w, x)), W, X)
    assert lines(found.products) == [line("in a function that is compiled once")]
    assert found.products[0].count == 2


def test_products_that_jax_compiles_but_once_are_those_of_the_lines_that_call_it():
    def fun(w, x):
        x = jnp.einsum("ij,jk->ik", x, w)  # the first
        x = jax.nn.gelu(x)
        return jnp.einsum("ij,jk->ik", x, w)  # the second

    assert set(lines(report(fun, W, X).products)) == {
        line("the first"),
        line("the second"),
    }


def test_the_backward_pass_is_of_the_line_of_the_forward_pass():
    def loss(w, x):
        y = x @ w  # forward and backward
        return jnp.sum(y.astype(F32))

    (product,) = report(jax.value_and_grad(loss), W, X).products
    assert lines([product]) == [line("forward and backward")]
    assert product.count == 2


def test_the_line_is_the_users_where_optax_calls_him():
    def fun(params, x):
        loss = lambda params: jnp.sum((x @ params).astype(F32))  # under optax
        tx = optax.lbfgs()
        state = tx.init(params)
        value, grad = optax.value_and_grad_from_state(loss)(params, state=state)
        extra = {"value": value, "grad": grad, "value_fn": loss}
        updates, _ = tx.update(grad, state, params, **extra)  # of optax
        return optax.apply_updates(params, updates)

    products = report(fun, array(4, dtype=F32), array(2, 4, dtype=F32)).products
    by_choice = lambda of: {p.by_choice for p in products if lines([p]) == [line(of)]}
    assert set(lines(products)) == {line("under optax"), line("of optax")}
    assert (by_choice("under optax"), by_choice("of optax")) == ({False}, {True})


# --- what it takes and how it reads ---


def test_it_runs_nothing_and_keeps_what_the_function_donates():
    def fun(w, x):
        jax.debug.callback(lambda: pytest.fail("it ran"))
        return x @ w

    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    report(jax.jit(fun, donate_argnums=(0, 1)), w, x)
    assert not w.is_deleted()
    assert not x.is_deleted()


def test_what_is_no_array_is_passed_on_as_it_is():
    def fun(params, name, times, *, mode, key, half):
        assert (name, times, mode) == ("w", 2, print)
        return [
            params[name] @ (half * jax.random.normal(key, (4,))) for _ in range(times)
        ]

    params = {"w": np.ones((3, 4), np.float32), "b": None, "note": "text"}
    options = {"mode": print, "key": jax.random.key(0), "half": np.float16(0.5)}
    found = report(fun, params, "w", 2, **options)
    assert found.products[0].count == 2


def test_an_empty_report_reads_as_one():
    found = report(lambda x: x + 1, X)
    assert found.products == ()
    assert found.shares == {}
    assert str(found) == "Matrix products and convolutions: none"


def test_the_text_has_the_largest_first_and_never_loses_a_line_number():
    def model(w, x):
        y = jnp.tanh(x @ w)  # half
        return y.astype(F32) @ w.astype(F32)[:, :1]  # single

    text = str(report(model, W, X))
    expected = f"""\
Matrix products and convolutions:
  80.0% of the multiplications in float16
  20.0% of the multiplications in float32
by line:
  float16  80.0%  1 dot_general  {line("half")} (model)
  float32  20.0%  1 dot_general  {line("single")} (model)"""
    assert re.sub(r"(?m)\S*/(?=test_dtypes.py)", "", text) == expected


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="fun must be a function"):
        report(W, X)


def test_a_length_that_an_export_leaves_open_counts_1024():
    (n,) = jax.export.symbolic_shape("n")
    halves = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float16)

    def fun(x, w, kernel):
        image = lax.conv_general_dilated(x[None, None], kernel, (1, 1), "SAME")
        return x @ w, x.T @ x, image

    found = ols.dtype_report(fun, halves(n, 4), halves(4, 2), halves(1, 1, 3, 3))
    sizes = {one.primitive: one.multiplications for one in found.products}
    assert sizes["conv_general_dilated"] == 9 * 4 * 1024
    assert sizes["dot_general"] == (4 * 2 + 4 * 4) * 1024
