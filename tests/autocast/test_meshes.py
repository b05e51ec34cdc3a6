"""autocast of operations under other meshes than what is around: `auto_axes`, `explicit_axes`."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from against_float32 import assert_close, normal, products
from jax import lax
from jax.sharding import AxisType, NamedSharding, auto_axes, explicit_axes, reshard
from jax.sharding import PartitionSpec as P
from pairs import one_in

import optax_lossscale as ols

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the frameworks', not ours
    from flax import nnx

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


def looked_up_by_flax(p, x):
    embed = nnx.Embed(16, 8, rngs=nnx.Rngs(0))
    embed.embedding[...] = p["table"]
    return embed(reshard(TOKENS, P("d")), out_sharding=ROWS) @ p["w"]


def before_a_product(p, x):
    return auto(jnp.sin)(x) @ p["w"]


def after_a_product(p, x):
    return auto(lambda x: jnp.exp(x) * 2)(x @ p["w"])


def a_product_after_another(p, x):
    return auto(lambda w, x: x @ w)(p["w"], jnp.tanh(x @ p["w"]))


def an_outer_product(p, x):
    outer = lambda p, x: jnp.einsum("nd,e->nde", x @ p["w"], p["table"][0]).sum(-1)
    return auto(outer)(p, x @ p["w"])


def a_logsumexp_over_many(p, x):
    wide = lambda w, x: x + jax.nn.logsumexp(x @ jnp.tile(w, (1, 32)), -1)[:, None]
    return auto(wide)(p["w"], x @ p["w"]) @ p["w"]


def a_residual_stream(p, x):
    h = x @ p["w"]
    for _ in range(2):
        h = h + auto(layer)(p["w"], h)
    return h @ p["w"]


def a_scan(p, x):
    layers = lambda w, x: lax.scan(lambda x, _: (layer(w, x), None), x, length=2)[0]
    return auto(layers)(p["w"], x @ p["w"]) @ p["w"]


def a_branch(p, x):
    branch = lambda w, x: lax.cond(w[0, 0] > 0, lambda x: layer(w, x), lambda x: x, x)
    return auto(branch)(p["w"], x @ p["w"]) @ p["w"]


def a_checkpoint(p, x):
    return jax.checkpoint(auto(layer))(p["w"], x @ p["w"]) @ p["w"]


def a_jit(p, x):
    return jax.jit(auto(layer))(p["w"], x @ p["w"]) @ p["w"]


def a_custom_derivative(p, x):
    custom = jax.custom_vjp(layer)
    custom.defvjp(functools.partial(jax.vjp, layer), lambda pull, ct: pull(ct))
    return auto(custom)(p["w"], x @ p["w"]) @ p["w"]


def another_custom_derivative(p, x):
    custom = jax.custom_jvp(layer)
    custom.defjvp(functools.partial(jax.jvp, layer))
    return auto(custom)(p["w"], x @ p["w"]) @ p["w"]


def a_gradient_inside(p, x):
    return jax.grad(lambda x: jnp.sum(auto(layer)(p["w"], x)))(x) @ p["w"]


def explicit_inside_of_auto(p, x):
    inside = lambda w, x: explicit(layer)(w, x @ w) @ w
    return auto(inside)(p["w"], x @ p["w"]) @ p["w"]


def explicit_between_products(p, x):
    return explicit(lambda w, x: jnp.exp(x))(p["w"], x @ p["w"]) @ p["w"]


def explicit_products(p, x):
    return explicit(layer)(p["w"], x @ p["w"]) @ p["w"]


UNDER_EXPLICIT = [
    looked_up,
    before_a_product,
    after_a_product,
    a_product_after_another,
    an_outer_product,
    a_logsumexp_over_many,
    a_residual_stream,
    a_scan,
    a_branch,
    a_checkpoint,
    a_jit,
    a_custom_derivative,
    another_custom_derivative,
    a_gradient_inside,
    explicit_inside_of_auto,
]
# as in newer Flax
if "out_sharding" in inspect.signature(nnx.Embed.__call__).parameters:
    UNDER_EXPLICIT.append(looked_up_by_flax)
UNDER_AUTO = [explicit_between_products, explicit_products]
CASES = {fun.__name__: (AxisType.Explicit, fun) for fun in UNDER_EXPLICIT}
CASES |= {fun.__name__: (AxisType.Auto, fun) for fun in UNDER_AUTO}


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
        # A product that sums nothing stays in float32.
        dtypes = {"float16", "float32"} if fun is an_outer_product else {"float16"}
        assert products(step(ols.autocast(loss)), p, x).keys() == dtypes
        jax.eval_shape(ols.autocast(step(loss)), p, x)
