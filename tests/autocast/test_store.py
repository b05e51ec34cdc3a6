"""The third pass of autocast by itself: what islands store, and what is recomputed."""

import jax
import jax.numpy as jnp
import pytest
from against_float32 import assert_close, normal
from jax import lax

import optax_lossscale as ols
from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.facts import Casting
from optax_lossscale._autocast.plan import plan_for
from optax_lossscale._programs.versions import name_of
from optax_lossscale._programs.walk import producers_in

W = normal(0, 8, 8)
X = normal(1, 4, 8)
FLOAT16, FLOAT32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
FLOAT16_ALONE = Casting(FLOAT16)


def regions_of(fun, w=W, x=X, how=FLOAT16_ALONE, takes=FLOAT32):
    """The islands of a function of a matrix and an input that is no parameter."""
    plan = plan_of(fun, w, x, how, takes)
    alone = ("dot_general", "ppermute", "transpose")
    return [
        region
        for region in plan.regions
        if name_of(region.equations[0].eqn) not in alone
        and not set(plan.program.ins).issuperset(region.reads)
    ]


def plan_of(fun, w=W, x=X, how=FLOAT16_ALONE, takes=FLOAT32):
    """The plan for a function of a matrix and an input that is no parameter."""
    program = jax.make_jaxpr(fun, axis_env=[("devices", 2)])(w, x)
    args = (w, jnp.asarray(x, takes))
    return plan_for(program, args, (Kind.PARAMETER, Kind.FLOAT32), how)


def stores(region):
    """What a region stores, by the operation that makes it."""
    made = producers_in([planned.eqn for planned in region.equations])
    return {name_of(made[v]): dtype for v, dtype in region.stores.items()}


@pytest.mark.parametrize(
    ("expected", "fun"),
    [
        # In 16 bits for products; in float32 for the program's results.
        ([{"exp": FLOAT16}], lambda w, x: jnp.exp(x @ w) @ w),
        ([{"exp": FLOAT32}], lambda w, x: jnp.exp(x @ w)),
        ([{"exp": FLOAT32}], lambda w, x: ((h := jnp.exp(x @ w)), h @ w)),
        # A sum with a product is rounded for all that read it.
        (
            [{"add": FLOAT16}, {"add": FLOAT32}],
            lambda w, x: (h := x @ w + x @ (w * 2)) + h @ w,
        ),
        # And comes first, if its own island reads it.
        (
            [{"add": FLOAT16}, {"sin": FLOAT16}, {"add": FLOAT32}],
            lambda w, x: (h := x @ w + x @ (w * 2)) + jnp.sin(h) @ w,
        ),
        # What is cheap is repeated, and its operand stored in its place.
        (
            [{"tanh": FLOAT16}, {"mul": FLOAT32}],
            lambda w, x: (h := jnp.tanh(x @ w)) * (h @ w),
        ),
        # What nobody reads is not stored.
        ([{"sin": FLOAT32}], lambda w, x: (h := x @ w, jnp.exp(h), jnp.sin(h))[2]),
    ],
)
def test_an_island_stores_what_others_read_in_the_dtype_in_which_they_do(expected, fun):
    assert list(map(stores, regions_of(fun))) == expected


def rounded(fun):
    """The operations of islands that round their operands, as they give 16 bits."""
    return [
        [
            name_of(planned.eqn)
            for planned in region.equations
            if FLOAT16 in planned.operand_dtypes
        ]
        for region in regions_of(fun)
    ]


@pytest.mark.parametrize(
    ("expected", "fun"),
    [
        ([[]], lambda w, x: jnp.exp(x @ w + x @ (w * 2)) @ w),
        ([["add"], []], lambda w, x: (h := x @ w + x @ (w * 2)) + h @ w),
        # Also where what is stored is chosen from it.
        (
            [["add"], []],
            lambda w, x: (h := lax.max(x @ w + x @ (w * 2), 0.0)) + h @ w,
        ),
        # What needs float32 is rounded as a whole, for products.
        ([[]], lambda w, x: (x @ w + jnp.exp(x @ w)) @ w),
        # Nothing is rounded for the results of a program alone.
        ([[]], lambda w, x: x @ w + x @ (w * 2)),
    ],
)
def test_a_sum_that_is_stored_in_16_bits_adds_rounded_numbers(expected, fun):
    assert rounded(fun) == expected


def test_what_others_read_of_an_island_is_stored_at_once():
    """Unless it reads a sum of its own, which comes first."""

    def fun(w, x):
        total = x @ w + x @ (w * 2)
        exponential = jnp.exp(x @ w)
        return total @ w, exponential @ w

    assert list(map(stores, regions_of(fun))) == [{"add": FLOAT16, "exp": FLOAT16}]


def test_what_is_sent_in_16_bits_is_stored_so_too():
    fun = lambda w, x: lax.ppermute(jnp.exp(x @ w), "devices", [(0, 1)]) @ w
    (region,) = regions_of(fun)
    assert stores(region) == {"exp": FLOAT16}


def test_what_a_sum_rounds_is_read_in_16_bits():
    """Such as the rows of a parameter with which a residual stream begins."""

    def fun(w, x):
        rows = w[:4]
        return (h := x @ w + rows) + h @ w

    total = next(
        r for r in plan_of(fun).regions if name_of(r.equations[-1].eqn) == "add"
    )
    assert list(total.reads.values()) == [FLOAT16, FLOAT16]


def test_what_nothing_reads_is_no_region_but_for_its_effects():
    def fun(w, x):
        jnp.cumsum(x)
        jax.debug.callback(lambda x: None, jnp.cumprod(x))
        return x @ w

    names = [name_of(r.equations[0].eqn) for r in plan_of(fun).regions]
    assert "cumsum" not in names
    assert names[-3:] == ["cumprod", "debug_callback", "dot_general"]


def test_no_region_reads_what_none_has_stored():
    """Such as a sum of which only a choice is stored, and a `tanh` that is repeated."""

    def fun(w, x):
        h = x @ w + x @ (w * 2)
        positive = jax.nn.relu(h)
        squashed = jnp.tanh(h)
        total = positive + squashed
        mixed = jnp.sin(total) * squashed
        return jnp.sum(squashed @ w + mixed @ w + total + positive)

    exact = jax.value_and_grad(fun, (0, 1))(W, X)
    assert_close(jax.value_and_grad(ols.autocast(fun), (0, 1))(W, X), exact, 0.02)


def repeated(fun, **options):
    """The operations that the last region of a function repeats."""
    *before, last = plan_of(fun, **options).regions
    made = {planned.eqn for region in before for planned in region.equations}
    return [name_of(planned.eqn) for planned in last.equations if planned.eqn in made]


@pytest.mark.parametrize(
    ("expected", "fun"),
    [
        (["tanh"], lambda w, x: (h := jnp.tanh(x @ w)) * (h @ w)),
        (["exp", "mul"], lambda w, x: (h := jnp.exp(x @ w) * 2) * (h @ w)),
        # A reduction is smaller than what it is made of: stored.
        ([], lambda w, x: (h := jnp.sum(jnp.exp(x @ w), 0)) * ((x @ w * h) @ w)),
        # Rows of an embedding are stored: repeated, they would be summed for each island.
        ([], lambda w, x: (h := w[jnp.arange(8)]) + jnp.sin(h) @ w),
        # What has nothing to do with products is repeated where it is cheap.
        (["sin"], lambda w, x: (h := jnp.sin(x)) @ w * h),
        ([], lambda w, x: x @ w * jnp.cumsum(x, 1)),
        # What is in 16 bits is read, although its bias takes no memory.
        ([], lambda w, x: (h := x @ w + w) + h @ w),
        # And what only one island reads is computed there.
        ([], lambda w, x: jnp.tanh(h := x @ w + w) * (h @ w)),
    ],
)
def test_what_is_cheap_and_larger_than_its_operands_is_repeated(expected, fun):
    assert repeated(fun, x=jnp.ones((8, 8))) == expected


def test_an_argument_in_16_bits_counts_as_such():
    fun = lambda w, x: (h := x @ w * x) * (h @ w)
    assert repeated(fun) == []
    assert repeated(fun, takes=FLOAT16) == ["mul"]


@pytest.mark.parametrize(
    ("is_recomputed", "fun"),
    [
        (True, lambda w, x: jnp.exp(x @ w) @ w),
        # What only moves has no number to compute.
        (False, lambda w, x: jnp.concatenate([h := x @ w, h]) @ w),
        # And a level of an associative scan is a pass over memory.
        (False, lambda w, x: lax.pad(jnp.exp(x @ w), 0.0, [(0, 0, 1), (0, 0, 0)]) @ w),
    ],
)
def test_an_island_is_recomputed_if_that_is_one_pass(is_recomputed, fun):
    assert [p.is_recomputed for p in regions_of(fun)] == [is_recomputed]
    left = FLOAT16_ALONE._replace(recomputes=False)
    assert [p.is_recomputed for p in regions_of(fun, how=left)] == [False]


def kept(fun, w, how=FLOAT16_ALONE):
    """The operations whose results the islands of a function keep for the backward pass."""
    return [
        [
            name_of(planned.eqn)
            for planned in region.equations
            if planned.eqn.outvars[0] in region.kept_reductions
        ]
        for region in regions_of(fun, w, how=how)
    ]


def test_a_reduction_is_kept_where_taking_it_again_is_another_pass():
    loss = lambda w, x: jnp.mean(jax.nn.logsumexp(x @ w, -1))
    wide = normal(2, 8, 64)
    assert kept(loss, wide) == [["reduce_max", "reduce_sum"]]
    assert kept(loss, W) == [[]]  # of 8 numbers: no pass
    # After a softmax, its rows are stored, in the kernel that sums them.
    assert kept(lambda w, x: jax.nn.softmax(x @ w) @ w.T, wide) == [[]]
    # A name has no transpose, so in rules of derivatives none is kept.
    assert kept(loss, wide, FLOAT16_ALONE._replace(keeps_reductions=False)) == [[]]
    # What its own island does not read is stored, if it is read at all.
    assert kept(lambda w, x: jnp.sum(x @ w, -1), wide) == [[]]
