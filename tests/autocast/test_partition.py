"""The division of a program into islands and the equations between them."""

import jax
import jax.numpy as jnp
import pytest
from against_float32 import normal
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.facts import Casting, facts_of
from optax_lossscale._autocast.partition import partition
from optax_lossscale._autocast.store import island_roots
from optax_lossscale._autocast.uses import NEITHER
from optax_lossscale._programs.values import variables
from optax_lossscale._programs.versions import name_of

W = normal(0, 4, 4)
X = normal(1, 3, 4)
FLOAT16, FLOAT32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)


def parts_of(fun, takes=(FLOAT32, FLOAT32), kind=Kind.FLOAT32):
    """The parts of a function of a matrix and an input that is no parameter."""
    program = jax.make_jaxpr(fun, axis_env=[("devices", 2)])(W, X)
    results = (NEITHER,) * len(program.out_avals)
    kinds = (Kind.PARAMETER, kind)
    facts = facts_of(program, takes, kinds, results, Casting(FLOAT16))
    return partition(facts.program.eqns, island_roots(facts))


def shown(parts):
    """The operations of a program in order, those of an island in brackets."""
    return [
        f"[{' '.join(map(name_of, part))}]" if isinstance(part, list) else name_of(part)
        for part in parts
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
        # What moves it on to a product is an island again.
        (
            "dot_general [mul] ppermute [transpose] dot_general",
            lambda w, x: lax.ppermute(x @ w * 2, "devices", [(0, 1)]).T @ x,
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
    assert " ".join(shown(parts_of(fun))) == expected


def test_what_is_made_of_an_argument_in_16_bits_is_an_island():
    fun = lambda w, x: jnp.exp(x)
    assert shown(parts_of(fun)) == ["exp"]
    assert shown(parts_of(fun, takes=(FLOAT32, FLOAT16))) == ["[exp]"]
    # So is what is made of one that is a sum with a product, whatever its dtype.
    assert shown(parts_of(fun, kind=Kind.SUM)) == ["[exp]"]


def test_what_is_made_of_a_constant_in_16_bits_is_an_island():
    low = X.astype(FLOAT16)
    assert shown(parts_of(lambda w, x: jnp.exp(low))) == ["[exp]"]
    assert shown(parts_of(lambda w, x: jnp.exp(jnp.array(X)))) == ["exp"]


def test_no_part_reads_what_a_later_one_makes():
    def fun(w, x):
        h = x @ w
        y = jnp.exp(h)
        z = jnp.cumsum(y, 0) + jnp.sin(h)
        y = jnp.sort(z @ w) + y * jnp.cos(x)
        return jax.checkpoint(lambda y: jnp.tanh(y) @ w)(y) + z

    eqns = []
    for part in parts_of(fun):
        eqns += part if isinstance(part, list) else [part]
    program = jax.make_jaxpr(fun)(W, X)
    made = set()
    for eqn in eqns:
        later = {v for e in eqns for v in e.outvars} - made
        assert later.isdisjoint(variables(eqn.invars))
        made.update(eqn.outvars)
    assert len(eqns) >= len(program.eqns)
