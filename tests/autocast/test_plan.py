"""The plan for a program, as it is printed."""

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._autocast.kinds import Kind
from optax_lossscale._autocast.plan import Casting
from optax_lossscale._autocast.planner import plan

F16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def planned(function, *args, given=F32):
    """The plan for a function of a parameter and of other arrays."""
    takes = [given, *[F32] * (len(args) - 1)]
    kinds = [Kind.PARAMETER, *[Kind.FLOAT32] * (len(args) - 1)]
    return plan(jax.make_jaxpr(function)(*args), takes, kinds, Casting(F16))


def lines(function, *args, **options):
    return str(planned(function, *args, **options)).splitlines()


def test_products_run_in_16_bits_and_what_lies_between_is_an_island():
    assert lines(lambda w, x: jnp.sum(jnp.exp(x @ w) @ w), W, X) == [
        "takes 0:f32, 1:f32",
        "run: dot_general (1:f16, 0:f16) -> 2:f16",
        "island: exp (2) -> 3:f16",
        "run: dot_general (3:f16, 0:f16) -> 4:f16",
        "island: reduce_sum (4) -> 5:f32",
        "gives 5:f32",
    ]


def test_a_sum_with_a_product_is_kept_in_16_bits():
    """And comes first, for the rest of its island to read it as it is kept."""
    assert lines(lambda w, x: (h := x @ w + x @ w.T) + jnp.exp(h @ w), W, X)[3:6] == [
        "run: dot_general (1:f16, 3:f16) -> 4:f16",
        "island: add (2, 4) -> 5:f16",
        "run: dot_general (5:f16, 0:f16) -> 6:f16",
    ]


def test_what_is_cheap_is_repeated_where_it_is_read():
    def masked(w, x):
        mask = jnp.broadcast_to(x[:, :1] > 0, x.shape)
        h = jnp.where(mask, x @ w, 0)
        return jnp.where(mask, jnp.exp(h) @ w, 0)

    repeating = [line for line in lines(masked, W, X) if "repeating" in line]
    assert len(repeating) == 2
    assert all("broadcast_in_dim" in line.split(", repeating ")[1] for line in repeating)


def test_of_a_scan_over_layers_the_plan_of_a_layer_is_shown_inside():
    def layers(ws, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w + x @ w, None), x @ ws[0], ws)[0]

    text = lines(layers, jnp.stack([W, W]), X)
    (scan,) = (i for i, line in enumerate(text) if line.startswith("run: scan"))
    assert text[scan + 1] == "  takes 0:f16, 1:f32"
    assert text[scan].endswith(":f16")


def test_what_a_loop_waits_for_is_no_part_of_a_plan():
    def fun(w, x):
        return lax.while_loop(lambda x: x.sum() > 1e-3, lambda x: x @ w / 2, x)

    assert lines(fun, W, X)[1:-1] == ["run: while (0:f32, 1:f32) -> 2:f32"]


def test_what_nobody_reads_is_no_part():
    assert not any(line.endswith("-> ") for line in lines(unread, W, X))


def unread(w, x):
    h = x @ w
    jnp.sum(jnp.tanh(h))
    return h @ w


def test_a_plan_is_a_pure_function_of_the_program():
    fun = lambda w, x: jnp.sum(jax.nn.softmax(x @ w + x) @ w)
    assert planned(fun, W, X) is not planned(fun, W, X)
    assert str(planned(fun, W, X)) == str(planned(fun, W, X))
    assert str(planned(fun, W, X, given=F16)).startswith("takes 0:f16, 1:f32")


def test_positions_are_counted_once_more_where_they_are_read():
    """Rather than kept: `iota` reads nothing."""
    turned = lambda w, x: jnp.sum(jnp.sin(x @ w + jnp.arange(8.0)) @ w)
    assert [line for line in lines(turned, W, X) if "repeating iota" in line]
