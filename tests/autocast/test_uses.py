"""The second pass of autocast by itself: on which values a product depends."""

import jax
import jax.numpy as jnp
import pytest
from against_float32 import normal
from jax import lax

from optax_lossscale._autocast.flat import flat
from optax_lossscale._autocast.uses import multiplied

W = normal(0, 4, 4)
X = normal(1, 3, 4)


def is_multiplied(operation, fun, result=False):
    """Whether a product depends on the first of a function's operations with a name."""
    program = jax.make_jaxpr(fun, axis_env=[("devices", 2)])(W, X)
    found = multiplied(program, (result,))
    return next(
        step.outs[0] in found for step in flat(program).steps if step.name == operation
    )


@pytest.mark.parametrize(
    ("expected", "operation", "fun"),
    [
        (False, "sin", lambda w, x: (jnp.sin(x), x @ w)[1]),
        (True, "sin", lambda w, x: jnp.sin(x) @ w),
        (True, "dot_general", lambda w, x: x @ w @ w),
        (True, "dot_general", lambda w, x: jnp.exp(x @ w) @ w),
        (True, "dot_general", lambda w, x: lax.psum(jnp.sort(x @ w), "devices") @ w),
        (False, "dot_general", lambda w, x: jnp.sum(x @ w)),
        (False, "tanh", lambda w, x: jnp.tanh(x @ w) + x @ w),
    ],
)
def test_a_value_is_multiplied_if_a_product_depends_on_it(expected, operation, fun):
    assert is_multiplied(operation, fun) == expected
    assert is_multiplied(operation, jax.jit(fun)) == expected


@pytest.mark.parametrize(
    ("expected", "fun"),
    [
        (True, lambda w, h: jax.checkpoint(lambda h: jnp.sin(h) @ w)(h)),
        (False, lambda w, h: jax.checkpoint(lambda h: jnp.sin(h) + h)(h)),
        (
            True,
            lambda w, h: lax.cond(
                w[0, 0] > 0, lambda h: h @ w, lambda h: jnp.sin(h), h
            ),
        ),
        (
            True,
            lambda w, h: lax.scan(lambda h, w: (h + jnp.sin(h) @ w, None), h, w[None])[
                0
            ],
        ),
        # Of the condition of a loop no result is given on.
        (
            False,
            lambda w, h: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1]),
                                        (0, h))[1],
        ),
    ],
)  # fmt: skip
def test_so_it_is_if_one_inside_of_an_operation_does(expected, fun):
    assert is_multiplied("dot_general", lambda w, x: fun(w, x @ w)) == expected


def test_a_result_is_multiplied_if_a_product_outside_depends_on_it():
    for result in (False, True):
        for fun in (jnp.transpose, jax.checkpoint(jnp.exp)):
            of = lambda w, x, fun=fun: fun(x @ w)
            assert is_multiplied("dot_general", of, result) == result
