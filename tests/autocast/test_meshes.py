"""autocast of operations under other meshes than what is around: `auto_axes`, `explicit_axes`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from against_float32 import assert_close, normal, products
from jax.sharding import AxisType, NamedSharding, auto_axes, explicit_axes, reshard
from jax.sharding import PartitionSpec as P
from pairs import one_in
from wrappers import WRAPPERS

import optax_lossscale as ols

ROWS = P("d", None)
W = normal(1, 8, 8, scale=8**-0.5)
TABLE = normal(2, 16, 8)
X = normal(0, 8, 8)
TOKENS = np.arange(8) * 3 % 16

auto = functools.partial(auto_axes, out_sharding=ROWS)
explicit = functools.partial(explicit_axes, in_sharding=(P(), ROWS))


def layer(w, x):
    return jnp.tanh(x @ w) @ w


def looked_up(p, x):
    return p["table"].at[reshard(TOKENS, P("d"))].get(out_sharding=ROWS) @ p["w"]


def between_products(p, x):
    return auto(lambda x: jnp.exp(x) * 2)(auto(jnp.sin)(x) @ p["w"]) @ p["w"]


def a_residual_stream(p, x):
    h = x @ p["w"]
    for _ in range(2):
        h = h + auto(layer)(p["w"], h)
    return h @ p["w"]


def explicit_inside_of_auto(p, x):
    inside = lambda w, x: explicit(layer)(w, x @ w) @ w
    return auto(inside)(p["w"], x @ p["w"]) @ p["w"]


def explicit_products(p, x):
    return explicit(layer)(p["w"], x @ p["w"]) @ p["w"]


def held(name):
    """A layer in what holds it, under the other mesh."""
    return lambda p, x: auto(WRAPPERS[name](layer))(p["w"], x @ p["w"]) @ p["w"]


UNDER_EXPLICIT = {
    fun.__name__: fun
    for fun in (looked_up, between_products, a_residual_stream, explicit_inside_of_auto)
}
UNDER_EXPLICIT |= {
    name: held(name)
    for name in ("jit", "checkpoint", "scan", "cond", "custom_jvp", "custom_vjp")
}
CASES = {name: (AxisType.Explicit, fun) for name, fun in UNDER_EXPLICIT.items()}
CASES["explicit_products"] = AxisType.Auto, explicit_products


@one_in(3, "case", CASES)
def test_operations_under_another_mesh_give_what_they_give_in_float32(case):
    """The loss and its gradients, placed as without autocast, with the products in float16."""
    axis_type, fun = case
    mesh = jax.make_mesh((4,), ("d",), axis_types=(axis_type,))
    loss = lambda p, x: jnp.sum(fun(p, x) ** 2)
    step = functools.partial(jax.value_and_grad, argnums=(0, 1))
    with jax.set_mesh(mesh):
        p = jax.device_put({"w": W, "table": TABLE}, NamedSharding(mesh, P()))
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        exact = jax.jit(step(loss))(p, x)
        cast = jax.jit(step(ols.autocast(loss)))(p, x)
        assert_close(cast, exact, 0.01)
        places = lambda tree: [x.sharding for x in jax.tree.leaves(tree)]
        assert places(cast) == places(exact)
        assert products(step(ols.autocast(loss)), p, x).keys() == {"float16"}
        jax.eval_shape(ols.autocast(step(loss)), p, x)
