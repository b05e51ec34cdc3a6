"""What is computed in 16 bits, read from the jaxpr: the three rules, each on small programs."""

import jax
import jax.numpy as jnp
import pytest
from against_float32 import equations, normal
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from optax_lossscale._autocast.narrow import narrow

F16 = jnp.dtype(jnp.float16)
W, X = normal(0, 4, 4), normal(1, 3, 4)


def narrowed(fun, *args):
    """The equations of a function that is narrowed, with the dtypes of their results."""
    program = jax.make_jaxpr(fun)(*args)
    jaxpr = jax.make_jaxpr(narrow(program, F16))(list(args))
    eqns = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.outvars]
    short = lambda dtype: str(dtype).replace("float", "f")
    return [f"{e.primitive.name}:{short(e.outvars[0].aval.dtype)}" for e in eqns]


CAST, WIDENED = "convert_element_type:f16", "convert_element_type:f32"


def test_a_product_takes_and_gives_16_bits_and_all_else_is_as_traced():
    assert narrowed(lambda w, x: jnp.exp(x @ w) + w[:3], W, X) == [
        *[CAST, CAST, "dot_general:f16", WIDENED, "exp:f32"],
        *["slice:f32", "add:f32"],
    ]


def test_what_several_products_read_is_cast_once():
    found = narrowed(lambda w, x: (x @ w, x @ w.T), W, X)
    assert found.count(CAST) == 3  # w, its transpose, and x


def test_the_result_of_a_product_is_moved_in_16_bits():
    assert narrowed(lambda w, x: (x @ w).T @ x, W, X) == [
        *[CAST, CAST, "dot_general:f16", "transpose:f16", "dot_general:f16", WIDENED]
    ]


def test_what_goes_to_a_product_alone_is_sent_in_16_bits():
    named = lambda x: checkpoint_name(x, "x")
    assert "name:f16" in narrowed(lambda w, x: named(x) @ w, W, X)
    assert "name:f32" in narrowed(lambda w, x: (lambda y: (y @ w, y))(named(x)), W, X)


def residual(w, x):
    """A sum that a product reads and another sum, after a product."""
    h = jnp.tanh(x @ w)
    return jnp.tanh(h + h @ w)


def test_a_residual_sum_reads_what_the_product_reads():
    found = narrowed(residual, W, X)
    of_h = found[found.index("tanh:f32") :]
    assert of_h == [
        *["tanh:f32", CAST, "dot_general:f16"],  # h is rounded once
        *[WIDENED, WIDENED, "add:f32", "tanh:f32"],  # for the sum as well
    ]


@pytest.mark.parametrize(
    ("widened", "fun"),
    [
        (1, lambda w, x: x + x @ w),  # it depends on no product
        (2, lambda w, x: (lambda h: h * (h @ w))(jnp.tanh(x @ w))),  # no sum
        (2, lambda w, x: (lambda h: (h + h @ w, h))(jnp.tanh(x @ w))),  # a result
        (2, lambda w, x: (lambda h: (h + h @ w, jnp.exp(h)))(jnp.tanh(x @ w))),
    ],
)
def test_what_others_read_or_no_product_made_is_not_rounded_in_a_sum(widened, fun):
    """All that is cast back to float32 are the results of products."""
    assert narrowed(fun, W, X).count(WIDENED) == widened


def test_what_a_loop_carries_is_as_traced():
    step = lambda h, _: (h + 1e-4 * jnp.tanh(h @ W), None)
    fun = lambda x: lax.scan(step, x, length=4)[0]
    (carried,) = [
        eqn.outvars[0].aval.dtype
        for eqn in equations(
            jax.make_jaxpr(narrow(jax.make_jaxpr(fun)(X), F16))([X]).jaxpr
        )
        if eqn.primitive.name == "scan"
    ]
    assert carried == jnp.float32


def test_what_a_loop_begins_with_is_not_rounded():
    step = lambda w: lambda h, _: (h + h @ w, None)
    fun = lambda w, x: lax.scan(step(w), jnp.tanh(x @ w), length=4)[0]
    found = narrowed(fun, W, X)
    assert found[: found.index("scan:f32")].count(WIDENED) == 1  # before the tanh
