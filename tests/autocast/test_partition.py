"""The third pass of autocast by itself: a program in islands and what runs alone."""

import jax
import jax.numpy as jnp
import pytest
from against_float32 import normal
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.known import Casting, known
from optax_lossscale._autocast.partition import partition
from optax_lossscale._autocast.uses import Arguments, Use

W = normal(0, 4, 4)
X = normal(1, 3, 4)
FLOAT16, FLOAT32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)


def groups_of(fun, takes=(FLOAT32, FLOAT32)):
    """The groups of a function of a matrix and an input that is no parameter."""
    program = jax.make_jaxpr(fun, axis_env=[("devices", 2)])(W, X)
    results = (Use.WIDELY,) * len(program.out_avals)
    arguments = Arguments((Kind.PARAMETER, Kind.FLOAT32), (0, 0), results)
    return partition(known(program, takes, arguments, Casting(FLOAT16)))


def shown(groups):
    """The operations of groups in order, those of an island as one string in brackets."""
    return [
        f"[{' '.join(s.name for s in g.steps)}]" if g.is_island else g.steps[0].name
        for g in groups
    ]


@pytest.mark.parametrize(
    ("expected", "fun"),
    [
        ("dot_general [exp mul] dot_general", lambda w, x: (jnp.exp(x @ w) * 2) @ w),
        # What has nothing to do with products runs alone, before what reads it.
        ("dot_general sin [mul]", lambda w, x: x @ w * jnp.sin(x)),
        ("sin dot_general", lambda w, x: jnp.sin(x) @ w),
        # So do what costs much to compute again and what is sent.
        ("dot_general [exp] sort [neg]", lambda w, x: -jnp.sort(jnp.exp(x @ w))),
        ("dot_general [exp] cumsum [neg]", lambda w, x: -jnp.cumsum(jnp.exp(x @ w), 1)),
        (
            "dot_general [mul] ppermute dot_general",
            lambda w, x: lax.ppermute(x @ w * 2, "devices", [(0, 1)]) @ w,
        ),
        # Or what is kept for a product, under a name.
        (
            "dot_general [exp] name dot_general",
            lambda w, x: checkpoint_name(jnp.exp(x @ w), "h") @ w,
        ),
        # Two that lie between the same products are one.
        (
            "dot_general [exp sin transpose] dot_general",
            lambda w, x: jnp.exp(h := x @ w) @ jnp.sin(h).T,
        ),
        # A product that an island does not wait for does not end it.
        (
            "dot_general transpose dot_general [exp neg] dot_general",
            lambda w, x: (-jnp.exp(x @ w), x @ w.T)[0] @ w,
        ),
    ],
)
def test_an_island_is_what_lies_between_products(expected, fun):
    assert " ".join(shown(groups_of(fun))) == expected


def test_what_is_made_of_an_argument_in_16_bits_is_an_island():
    fun = lambda w, x: jnp.exp(x)
    assert shown(groups_of(fun)) == ["exp"]
    assert shown(groups_of(fun, takes=(FLOAT32, FLOAT16))) == ["[exp]"]


def test_no_group_reads_what_a_later_one_makes():
    def fun(w, x):
        h = x @ w
        y = jnp.exp(h)
        z = jnp.cumsum(y, 0) + jnp.sin(h)
        y = jnp.sort(z @ w) + y * jnp.cos(x)
        return jax.checkpoint(lambda y: jnp.tanh(y) @ w)(y) + z

    groups = groups_of(fun)
    program = jax.make_jaxpr(fun)(W, X)
    made = set()
    for group in groups:
        for step in group.steps:
            later = {i for g in groups for s in g.steps for i in s.outs} - made
            assert later.isdisjoint(step.reads)
            made.update(step.outs)
    assert sum(len(group.steps) for group in groups) >= len(program.eqns)
