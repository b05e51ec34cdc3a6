"""The plan for a program, as it is printed."""

import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import optax_lossscale as ols
from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.facts import Casting
from optax_lossscale._autocast.plan import plan_for
from optax_lossscale._programs.versions import name_of

F16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
FLOAT16 = Casting(F16)
W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def planned(function, *args, given=F32, how=FLOAT16):
    """The plan for a function of a parameter and of other arrays."""
    kinds = (Kind.PARAMETER, *[Kind.FLOAT32] * (len(args) - 1))
    traced = jax.make_jaxpr(function, axis_env=[("devices", 2)])(*args)
    return plan_for(traced, [args[0].astype(given), *args[1:]], kinds, how)


def lines(function, *args, **options):
    """The lines of a plan as it is printed, without those of the program."""
    text = str(planned(function, *args, **options))
    return [line.partition("  # ")[0] for line in text.splitlines()]


def test_products_run_in_16_bits_and_what_lies_between_is_an_island():
    assert lines(lambda w, x: jnp.sum(jnp.exp(x @ w) @ w), W, X) == [
        "takes w:f32, x:f32",
        "run: dot_general (x:f16, w:f16) -> 2:f16",
        "island: exp (2:f16) -> 3:f16",
        "run: dot_general (3:f16, w:f16) -> 4:f16",
        "island: reduce_sum (4:f16) -> 5:f32",
        "gives 5:f32",
    ]


def test_what_is_moved_without_a_cast_is_shown_as_it_is_stored():
    """As a transpose, whose result the product then casts."""
    assert lines(lambda w, x: x @ w.T, W, X)[1:3] == [
        "run: transpose (w:f32) -> 2:f32",
        "run: dot_general (x:f16, 2:f16) -> 3:f16",
    ]


def test_a_sum_with_a_product_is_stored_in_16_bits():
    """And comes first, for the rest of its island to read it as it is stored."""
    assert lines(lambda w, x: (h := x @ w + x @ w.T) + jnp.exp(h @ w), W, X)[3:6] == [
        "run: dot_general (x:f16, 3:f16) -> 4:f16",
        "island: add (2:f16, 4:f16) -> 5:f16",
        "run: dot_general (5:f16, w:f16) -> 6:f16",
    ]


def test_what_is_only_moved_is_not_recomputed():
    """As its derivative needs none of its numbers."""
    joined = lambda w, x: (
        jnp.concatenate([x @ w, (x @ w.T).reshape(8, 4).T[jnp.array([0, 2])]]) @ w
    )
    moved = [line for line in lines(joined, W, X) if "concatenate" in line]
    assert len(moved) == 1
    assert moved[0].startswith("run: ")
    assert not any(line.startswith("island") for line in lines(joined, W, X))


def test_the_levels_of_an_associative_scan_are_not_recomputed():
    """As each is another pass over memory."""
    summed = lambda w, x: lax.associative_scan(jnp.add, jnp.exp(x @ w)) @ w
    assert not any(line.startswith("island") for line in lines(summed, W, X))
    assert any(line.startswith("run: exp") for line in lines(summed, W, X))


def test_what_is_cheap_is_repeated_where_it_is_read():
    def masked(w, x):
        mask = jnp.broadcast_to(x[:, :1] > 0, x.shape)
        h = jnp.where(mask, x @ w, 0)
        return jnp.where(mask, jnp.exp(h) @ w, 0)

    masks = [line for line in lines(masked, W, X) if " select_n " in line]
    assert len(masks) == 2
    assert all(line.startswith("island: broadcast_in_dim") for line in masks)


def test_a_token_is_shown_without_a_dtype():
    def fun(w, x):
        inner = lambda token, y: (lax.after_all(token), y @ w)[1]
        return jax.checkpoint(inner)(lax.create_token(x), x @ w)

    text = lines(fun, W, X)
    assert "run: create_token () -> 2:token" in text
    assert any(line.startswith("  takes") and ":token" in line for line in text)


def test_of_a_scan_over_layers_the_plan_of_a_layer_is_shown_inside():
    def layers(ws, x):
        x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w) @ w, None), x @ ws[0], ws)
        return x + jnp.tanh(x) @ ws[0] @ ws[1]

    text = lines(layers, jnp.stack([W, W]), X)
    (scan,) = (i for i, line in enumerate(text) if line.startswith("run: scan"))
    assert text[scan + 1] == "  takes x:f16, w:f32"
    assert text[scan].endswith(":f16")
    # What no product depends on is not rounded, although each layer takes 16 bits.
    text = lines(
        lambda ws, x: lax.scan(lambda x, w: (x + jnp.sin(x) @ w, None), x @ ws[0], ws)[
            0
        ],
        jnp.stack([W, W]),
        X,
    )
    (scan,) = (i for i, line in enumerate(text) if line.startswith("run: scan"))
    assert text[scan + 1] == "  takes x:f16, w:f32"
    assert text[scan].endswith(":f32")


def test_what_a_loop_waits_for_has_no_plan():
    def fun(w, x):
        return lax.while_loop(lambda x: x.sum() > 1e-3, lambda x: x @ w / 2, x)

    assert lines(fun, W, X)[1:-1] == ["run: while (w:f32, x:f32) -> 2:f32"]


def test_what_nobody_reads_is_no_region():
    assert not any(line.endswith("-> ") for line in lines(unread, W, X))


def unread(w, x):
    h = x @ w
    jnp.sum(jnp.tanh(h))
    return h @ w


def test_a_plan_is_a_pure_function_of_the_program():
    fun = lambda w, x: jnp.sum(jax.nn.softmax(x @ w + x) @ w)
    again = lambda w, x: fun(w, x)
    assert planned(fun, W, X) is not planned(again, W, X)
    assert str(planned(fun, W, X)) == str(planned(again, W, X))
    assert str(planned(fun, W, X, given=F16)).startswith("takes w:f16, x:f32")


def test_positions_are_counted_once_more_where_they_are_read():
    """Rather than stored: `iota` reads nothing."""
    turned = lambda w, x: jnp.sum(jnp.sin(x @ w + jnp.arange(8.0)) @ w)
    assert [line for line in lines(turned, W, X) if "island: iota" in line]


def keeping(fun, *args):
    """What each island keeps, by the operations that make it."""
    made = planned(fun, *args)
    return [
        [name_of(s.eqn) for s in p.equations if s.eqn.outvars[0] in p.kept_reductions]
        for p in made.regions
        if p.is_recomputed
    ]


def test_sums_are_kept_that_would_take_another_pass():
    """As those of a cross-entropy, after which nothing large is written."""
    loss = lambda w, x: jnp.mean(jax.nn.logsumexp(x @ w, -1))
    assert keeping(loss, jnp.ones((8, 64)), X) == [["reduce_max", "reduce_sum"]]


def test_over_columns_they_are_kept_too():
    """A batch norm's, whose kernel ends before that of the numbers that it normalizes begins."""
    norm = lambda h: (h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-6)
    assert keeping(lambda w, x: norm(x @ w) @ w, W, jnp.ones((64, 8))) == [
        ["reduce_sum"] * 3
    ]


def test_sums_over_rows_that_are_written_next_are_taken_again():
    assert keeping(lambda w, x: jax.nn.softmax(x @ w) @ w.T, jnp.ones((8, 64)), X) == [
        []
    ]


def stored_in(fun, *args):
    """The dtypes in which regions store what is as large as the last argument."""
    made = planned(fun, *args)
    size = args[-1].size
    return {
        str(dtype)
        for region in made.regions
        for v, dtype in region.stores.items()
        if v.aval.size == size
    }


NORMS = {
    "layer norm": lambda h: (
        (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1)[:, None] + 1e-6)
    ),
    "batch norm": lambda h: (
        (h - h.mean(0)) * lax.rsqrt((h**2).mean(0) - h.mean(0) ** 2 + 1e-6)
    ),
    "standardize": jax.nn.standardize,
    "over devices": lambda h: (
        h * lax.rsqrt(lax.pmean((h**2).mean(0), "devices") + 1e-6)
    ),
    "by a norm": lambda h: h / jnp.linalg.norm(h, axis=-1, keepdims=True),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_stream_of_normalized_numbers_is_stored_in_16_bits(norm):
    def layers(w, x):
        x = norm(x @ w)
        for _ in range(2):
            x = jax.nn.relu(x + norm(x @ w))
        return x @ w

    assert stored_in(layers, W, jnp.ones((4, 8))) == {"float16"}


@pytest.mark.parametrize(
    "widen",
    [
        lambda h: h * jnp.sum(h**2, -1, keepdims=True),
        lambda h: h - jnp.sum(h, -1, keepdims=True),
        lambda h: h / jnp.sum(h, -1, keepdims=True),
        lambda h: h * jnp.sqrt(jnp.mean(h**2, -1, keepdims=True)),
        lambda h: h * lax.rsqrt(jnp.exp(h)),
        lambda h: h * lax.rsqrt(jnp.mean(jnp.exp(h[:2]) ** 2)),
    ],
)
def test_what_may_leave_the_range_is_stored_in_float32(widen):
    def layers(w, x):
        x = widen(x @ w)
        return (x + x @ w) @ w + x

    assert "float32" in stored_in(layers, W, jnp.ones((4, 8)))


def test_a_plan_of_a_users_function_says_its_lines():
    def block(w, x):
        h = jax.nn.gelu(x @ w)
        return jnp.sum(h @ w)

    text = str(ols.autocast(block).plan(W, X))
    assert text.splitlines()[1].startswith(
        "run: dot_general (x:f16, w:f16) -> 2:f16  # "
    )
    first = block.__code__.co_firstlineno
    for n in (1, 2):
        assert f"test_plan.py:{first + n} (block)" in text


def test_arguments_are_called_as_in_the_users_function():
    def block(params, *, x):
        return jnp.sum(x @ params["up"] @ params["down"])

    text = str(ols.autocast(block).plan({"up": W, "down": W}, x=X))
    assert text.startswith("takes params['down']:f32, params['up']:f32, x:f32")
    assert "dot_general (x:f16, params['up']:f16) -> 3:f16" in text


def test_several_programs_of_one_operation_are_told_apart():
    branching = lambda w, x: lax.cond(
        x[0, 0] > 0, lambda x: x @ w, lambda x: x @ w @ w, x
    )
    text = lines(branching, W, X)
    ends = [i for i, line in enumerate(text) if line.startswith("  gives")]
    assert [len([line for line in part if "dot_general" in line])
            for part in (text[: ends[0]], text[ends[0] :])] == [2, 1]  # fmt: skip


def test_what_is_given_in_float32_is_stored_so_and_rounded_by_a_product():
    both = lambda w, x: ((h := jnp.exp(x @ w)), h @ w)
    assert "island: exp (2:f16) -> 3:f32" in lines(both, W, X)
    assert "run: dot_general (3:f16, w:f16) -> 4:f16" in lines(both, W, X)


def test_what_jax_adds_has_no_line():
    counted = lambda w, x: lax.fori_loop(0, 3, lambda i, x: x @ w, x)
    text = str(ols.autocast(counted).plan(W, X))
    assert "run: add" in text
    assert "unknown" not in text


def test_a_plan_that_calls_share_is_shown_once():
    function = jax.jit(lambda w, x: jnp.tanh(x @ w) @ w + x)
    for _ in range(20):
        function = jax.jit(lambda w, x, inner=function: inner(w, inner(w, x)))
    text = str(ols.autocast(function).plan(W, X))
    assert len(text.splitlines()) < 2000
    assert "as above" in text


def test_a_plan_changes_no_module():
    nnx = pytest.importorskip("flax.nnx")
    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    before = nnx.state(norm)
    ols.autocast(lambda norm, w, x: norm(x @ w).sum()).plan(norm, W, X)
    for x, y in zip(
        jax.tree.leaves(before), jax.tree.leaves(nnx.state(norm)), strict=True
    ):
        assert (x == y).all()


def test_a_plan_takes_instructions_in_proportion_to_the_layers():
    def instructions(n):
        def fun(w, x):
            for i in range(n):
                x = jnp.tanh(x @ w) * (1 + 1e-3 * i) + jax.nn.sigmoid(x)
            return x

        program = jax.make_jaxpr(fun)(W, X)
        kinds = (Kind.PARAMETER, Kind.FLOAT32)
        return executed(lambda: plan_for(program, [W, X], kinds, FLOAT16))

    assert instructions(160) < 9 * instructions(20)


def executed(function):
    """How many instructions of Python's a call executes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
