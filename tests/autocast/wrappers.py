"""What holds a function of parameters and an array, and gives what the function does."""

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.sharding import AxisType


def in_vmap(fun):
    """Row by row."""
    return jax.vmap(lambda p, x: fun(p, x[None])[0], (None, 0))


def in_map(fun):
    return lambda p, x: lax.map(lambda row: fun(p, row[None])[0], x)


def in_scan(fun):
    """Over layers, of which there is one."""

    def of(p, x):
        stacked = jax.tree.map(lambda leaf: leaf[None], p)
        return lax.scan(lambda _, p: (0, fun(p, x)), 0, stacked)[1][0]

    return of


def in_cond(fun):
    """By a condition on the parameters: one on the input would be a reader of it."""
    is_true = lambda p: jnp.ravel(jax.tree.leaves(p)[-1])[0] < 9
    return lambda p, x: lax.cond(is_true(p), fun, lambda p, x: x, p, x)


def in_switch(fun):
    return lambda p, x: lax.switch(jnp.int32(x[0, 0] < 9), [lambda p, x: x, fun], p, x)


def in_fori_loop(fun):
    """Of one round, which begins with other numbers."""
    body = lambda p, x: lambda _, __: fun(p, x)
    return lambda p, x: lax.fori_loop(0, 1, body(p, x), jnp.zeros_like(x))


def in_while_loop(fun):
    """Over a count, which carries the input too."""

    def of(p, x):
        step = lambda state: (state[0] + 1, state[1], fun(p, state[1]))
        start = 0, x, jnp.zeros_like(x)
        return lax.while_loop(lambda state: state[0] < 1, step, start)[2]

    return of


def in_custom_jvp(fun):
    """With its own derivative."""
    custom = jax.custom_jvp(fun)
    custom.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
    return custom


def in_custom_vjp(fun):
    custom = jax.custom_vjp(fun)
    custom.defvjp(lambda *args: jax.vjp(fun, *args), lambda pull, ct: pull(ct))
    return custom


def in_shard_map(fun):
    """Over one device."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fun, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))


WRAPPERS = {
    "jit": lambda fun: jax.jit(lambda p, x: fun(p, x)),
    "vmap": in_vmap,
    "map": in_map,
    "checkpoint": lambda fun: jax.checkpoint(lambda p, x: fun(p, x)),
    "scan": in_scan,
    "cond": in_cond,
    "switch": in_switch,
    "fori_loop": in_fori_loop,
    "while_loop": in_while_loop,
    "custom_jvp": in_custom_jvp,
    "custom_vjp": in_custom_vjp,
    "shard_map": in_shard_map,
    "checkpoint in cond in scan": lambda fun: in_scan(in_cond(jax.checkpoint(fun))),
}
