"""The second pass of autocast by itself: what is done with a value after it is made."""

import jax
import jax.numpy as jnp
import pytest
from against_float32 import normal
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.facts import stored_dtype
from optax_lossscale._autocast.uses import BOTH, NEITHER, Use, depths, uses
from optax_lossscale._programs.flat import flat
from optax_lossscale._programs.versions import name_of

W = normal(0, 4, 4)
X = normal(1, 3, 4)
FEEDS_PRODUCT, LIVE_ACROSS = Use.FEEDS_PRODUCT, Use.LIVE_ACROSS


def use_of(operation, fun, result=NEITHER):
    """What is done with the result of the first of a function's operations with a name."""
    program = jax.make_jaxpr(fun, axis_env=[("devices", 2)])(W, X)
    after = uses(program, (result,))
    return next(
        after[eqn.outvars[0]] for eqn in flat(program).eqns if name_of(eqn) == operation
    )


@pytest.mark.parametrize(
    ("use", "operation", "fun"),
    [
        (NEITHER, "sin", lambda w, x: (jnp.sin(x), x @ w)[1]),
        (FEEDS_PRODUCT, "dot_general", lambda w, x: x @ w @ w),
        (FEEDS_PRODUCT, "exp", lambda w, x: jnp.exp(x @ w) @ w),
        (NEITHER, "dot_general", lambda w, x: jnp.sum(x @ w)),
        (FEEDS_PRODUCT, "dot_general", lambda w, x: jnp.exp(x @ w) @ w),
        (NEITHER, "tanh", lambda w, x: jnp.tanh(x @ w) + x @ w),
        # It is read again once a product has been computed from it, by itself or after
        # a `tanh`.
        (BOTH, "exp", lambda w, x: (h := jnp.exp(x @ w)) + h @ w),
        (BOTH, "dot_general", lambda w, x: (h := x @ w) + h @ w),
        (BOTH, "dot_general", lambda w, x: (h := jnp.tanh(x @ w)) + h @ w),
        # A name may be kept.
        (LIVE_ACROSS, "dot_general", lambda w, x: checkpoint_name(x @ w, "h")),
    ],
)
def test_a_use_is_what_is_done_with_a_value_afterwards(use, operation, fun):
    assert use_of(operation, fun) == use
    assert use_of(operation, jax.jit(fun)) == use


@pytest.mark.parametrize(
    ("use", "fun"),
    [
        (FEEDS_PRODUCT, lambda w, h: jax.checkpoint(lambda h: h @ w)(h)),
        (FEEDS_PRODUCT, lambda w, h: jax.checkpoint(lambda h: jnp.sin(h) @ w)(h)),
        (
            FEEDS_PRODUCT,
            lambda w, h: lax.cond(w[0, 0] > 0, lambda h: h @ w, lambda h: h @ w @ w, h),
        ),
        (
            FEEDS_PRODUCT,
            lambda w, h: lax.cond(
                w[0, 0] > 0, lambda h: h @ w, lambda h: jnp.sin(h), h
            ),
        ),
        (
            BOTH,
            lambda w, h: lax.scan(lambda h, w: (h + jnp.sin(h) @ w, None), h, w[None])[
                0
            ],
        ),
        # It waits in a branch for what is multiplied beside it.
        (
            BOTH,
            lambda w, h: lax.cond(w[0, 0] > 0, lambda h: h + h @ w, lambda h: h @ w, h),
        ),
    ],
)
def test_what_is_done_inside_of_an_operation_is_done_with_its_operand(use, fun):
    assert use_of("dot_general", lambda w, x: fun(w, x @ w)) == use


def test_what_is_done_with_the_result_is_done_with_what_only_moves_into_it():
    for result in (NEITHER, FEEDS_PRODUCT, LIVE_ACROSS, BOTH):
        assert use_of("dot_general", lambda w, x: (x @ w).T, result) == result


def depths_of(fun):
    """How many products came before each result of a function."""
    program = jax.make_jaxpr(fun)(W, X)
    depth = depths(flat(program))
    return [depth[i] for i in flat(program).outs]


def test_a_depth_is_how_many_products_came_before_at_most():
    assert depths_of(lambda w, x: (x, x @ w, x + x @ w @ w)) == [0, 1, 2]
    two = lambda x, w: (x @ w @ w, None)
    assert depths_of(lambda w, x: jax.checkpoint(lambda x: two(x, w)[0])(x) @ w) == [2]
    assert depths_of(lambda w, x: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x)) == [
        1
    ]


@pytest.mark.parametrize(
    ("kind", "use", "is_low"),
    [
        (Kind.NARROWED, NEITHER, True),
        (Kind.SUM, BOTH, True),
        (Kind.SUM, FEEDS_PRODUCT, False),
        (Kind.SUM, LIVE_ACROSS, False),
        (Kind.NEAR, BOTH, False),
        (Kind.PARAMETER, BOTH, False),
        (Kind.FLOAT32, BOTH, False),
    ],
)
def test_what_is_stored_in_16_bits_follows_from_a_kind_and_a_use(kind, use, is_low):
    low = jnp.dtype("float16")
    stored = stored_dtype(X, kind, use, low)
    assert stored == ("float16" if is_low else "float32")
    assert stored_dtype(X.astype("int32"), kind, use, low) == "int32"
