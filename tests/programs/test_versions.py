"""Each place where versions of JAX differ: what fails here has moved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optax_lossscale._arrays.replicas import varying_axes
from optax_lossscale._programs import versions

X = jnp.arange(4.0)


def equation(function, *args):
    (eqn,) = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return eqn


def test_open_jaxpr_and_constants():
    array = jnp.arange(3.0)
    closed = jax.make_jaxpr(lambda x: x * array)(array)
    jaxpr = versions.open_jaxpr(closed)
    assert versions.open_jaxpr(jaxpr) is jaxpr
    assert len(jaxpr.constvars) == len(versions.constants(closed)) == 1


def test_is_program():
    closed = jax.make_jaxpr(jnp.sin)(1.0)
    assert versions.is_program(closed)
    assert versions.is_program(closed.jaxpr)
    assert not versions.is_program(X)


def test_params_and_name_of_a_root():
    solve = lambda f, z: lax.fori_loop(0, 9, lambda _, z: z - f(z), z)
    tangent = lambda g, y: y / g(1.0)
    eqn = equation(lambda x: lax.custom_root(lambda z: z - x, x, solve, tangent), 1.0)
    assert versions.name_of(eqn) in ("custom_jvp_call", "CustomRoot")
    assert any(map(versions.is_program, versions.params_of(eqn).values()))


@pytest.mark.parametrize(
    "function", [jnp.sin, lax.cumsum, jax.jit(jnp.exp), jax.nn.relu]
)
def test_bind(function):
    eqn = equation(function, X)
    (out,) = versions.bind(eqn, [X])
    np.testing.assert_array_equal(out, function(X))


def test_bind_in_a_mesh():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        lambda x: x * 2, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a")
    )
    eqn = equation(mapped, X)
    np.testing.assert_array_equal(
        jax.jit(lambda x: versions.bind(eqn, [x]))(X)[0], X * 2
    )
    assert versions.mapped_axes(eqn) == ("a",)


def test_scan_sizes():
    eqn = equation(
        lambda y, c, x: lax.scan(lambda c, x: (c * x * y, x), c, x), 2.0, 1.0, X
    )
    assert versions.scan_sizes(eqn) == (1, 1)


def test_varying_axes():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    seen = []

    def look(x, y):
        seen.extend([varying_axes(x), varying_axes(y)])
        return x

    in_specs = (jax.P("a"), jax.P())
    jax.make_jaxpr(
        jax.shard_map(look, mesh=mesh, in_specs=in_specs, out_specs=jax.P("a"))
    )(X, X)
    assert [set(axes) for axes in seen] == [{"a"}, set()]
