"""A traced program, evaluated as if it had been written in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas

from optax_lossscale._diagnosis.widened import evaluate, widely
from optax_lossscale._programs.run import numbered

F32 = jnp.float32
X = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, (4, 3)), F32)


@jax.custom_vjp
def clipped(x):
    return x * x


clipped.defvjp(lambda x: (x * x, x), lambda x, g: (jnp.clip(g, -1, 1).astype(g.dtype) * x,))


@jax.custom_jvp
def softened(x):
    return jnp.log1p(jnp.exp(x))


softened.defjvps(lambda g, y, x: g * jax.nn.sigmoid(x) * jnp.asarray(0.5, x.dtype))


def scanned(x, dtype):
    def body(carry, x):
        carry = jax.checkpoint(lambda c: jnp.tanh(c * x))(carry) + x
        return carry, carry * x

    carry, ys = lax.scan(body, jnp.zeros(3, dtype), x.astype(dtype), reverse=True, unroll=2)
    return jnp.sum(carry + ys.sum(0))


def looped(x, dtype):
    x = x.astype(dtype)
    body = lambda state: (state[0] + 1, state[1] * x + state[1])
    return jnp.sum(lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1])


def branched(x, dtype):
    x = x.astype(dtype)
    return jnp.sum(lax.cond(x[0, 0] > 1, jnp.sin, lambda x: x**3, x))


def fori(x, dtype):
    x = x.astype(dtype)
    return jnp.sum(lax.fori_loop(0, 3, lambda i, y: y * x + x[i], x))


def mapped(x, dtype):
    f = lambda x: lax.psum(jnp.sum(x.astype(dtype) ** 2), "a") * jnp.ones((), dtype)
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P())(x)


def looked_up(x, dtype):
    return jnp.sum(x.astype(dtype)[jnp.array([0, 1, 1, 3])] ** 2)


def pooled(x, dtype):
    x = lax.reduce_window(x.astype(dtype), -jnp.inf, lax.max, (2, 1), (1, 1), "VALID")
    return jnp.sum(x**2)


def drawn(x, dtype):
    del dtype  # the bits that are drawn are float16's, and stay
    u = jax.random.uniform(jax.random.key(0), x.shape, jnp.float16)
    return jnp.sum(jnp.where(u < 0.5, x, 0) * u.astype(F32))


def reduced(x, dtype):
    return jnp.sum(lax.reduce(x.astype(dtype), jnp.ones((), dtype), lax.mul, (0,)))


def multiplied(x, dtype):
    x = x.astype(dtype)
    return jnp.sum(lax.dot(x, x.T, preferred_element_type=dtype))


def iterated(x, dtype):
    return jnp.sum(x.astype(dtype) * jnp.arange(3).astype(dtype) + jnp.finfo(dtype).eps * 0)


PROGRAMS = [scanned, branched, mapped, looked_up, pooled, drawn, reduced, multiplied, iterated]
PROGRAMS += [lambda x, d: jnp.sum(clipped(x.astype(d)) + softened(x.astype(d)))]
PROGRAMS += [lambda x, d: jnp.sum(jax.jit(lambda x: jax.nn.softmax(x))(x.astype(d)) ** 2)]


def gradient(function, dtype):
    return jax.value_and_grad(lambda x: function(x, dtype).astype(F32))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("function", PROGRAMS)
def test_a_gradient_is_the_one_of_the_function_written_in_float32(function, dtype):
    jaxpr = jax.make_jaxpr(gradient(function, dtype))(X)
    outs, records = jax.jit(lambda x: evaluate(jaxpr, [x]))(X)
    expected = jax.tree.leaves(gradient(function, F32)(X))
    assert [x.dtype for x in outs] == [F32, F32]
    assert records == {}
    for x, y in zip(outs, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [looped, fori])
def test_loops_without_a_backward_pass(function):
    jaxpr = jax.make_jaxpr(lambda x: function(x, jnp.float16))(X)
    np.testing.assert_allclose(evaluate(jaxpr, [X])[0][0], function(X, F32), rtol=1e-5)


def test_arguments_and_constants_in_16_bits_are_widened():
    constant = jnp.asarray(X, jnp.float16)
    jaxpr = jax.make_jaxpr(lambda x: x * constant)(constant)
    (out,), _ = evaluate(jaxpr, [X])
    assert out.dtype == F32
    np.testing.assert_allclose(out, X * np.asarray(constant, np.float32), rtol=1e-6)


def test_a_kernel_that_cannot_be_rewritten_runs_as_it_was_written():
    def kernel(x, y):
        y[...] = x[...] * 2

    shape = jax.ShapeDtypeStruct(X.shape, jnp.float16)
    f = lambda x: pallas.pallas_call(kernel, shape, interpret=True)(x.astype(jnp.float16)) * 3
    (out,), _ = evaluate(jax.make_jaxpr(f)(X), [X])
    assert out.dtype == F32
    np.testing.assert_array_equal(out, np.asarray(X.astype(jnp.float16), np.float32) * 6)


@pytest.mark.parametrize("function", [*PROGRAMS, looped, fori])
def test_each_equation_has_a_number_under_which_its_rule_is_asked(function):
    program = function if function in (looped, fori) else None
    f = (lambda x: program(x, jnp.float16)) if program else gradient(function, jnp.float16)
    jaxpr = jax.make_jaxpr(f)(X)
    asked = {}

    def rule(number, eqn, ins):
        asked[number] = eqn
        return widely(eqn, ins), jnp.uint8(1)

    _, records = evaluate(jaxpr, [X], rule)
    assert asked == dict(enumerate(numbered(jaxpr)))
    assert records.keys() <= asked.keys()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_what_a_policy_of_a_checkpoint_saves_is_not_rounded_to_16_bits(dtype):
    policy = jax.checkpoint_policies.dots_saveable

    def function(x, dtype):
        y = 1000 * x.astype(dtype)
        saved = jax.checkpoint(lambda y: jnp.sin(y @ y.T * 2.0**-20) @ y, policy=policy)
        return jnp.sum(saved(y))

    jaxpr = jax.make_jaxpr(gradient(function, dtype))(X)  # 2e6, infinite in float16
    assert "reduce_precision" in str(jaxpr)
    outs, _ = jax.jit(lambda x: evaluate(jaxpr, [x]))(X)
    expected = jax.tree.leaves(gradient(function, F32)(X))
    for x, y in zip(outs, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4)


def test_what_is_noted_in_loops_and_branches_on_many_devices_is_gathered():
    def function(x):
        x = lax.cond(x[0] > 0, lambda x: x * 2, lambda x: jnp.sin(jnp.cos(x)), x)
        return lax.while_loop(lambda x: x[0] < 9, lambda x: x + 1, x)

    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    rule = lambda n, eqn, ins: (widely(eqn, ins), jnp.max(ins[0]).astype(F32))
    jaxpr = jax.make_jaxpr(mapped)(jnp.arange(2.0))
    (out,), records = jax.jit(lambda x: evaluate(jaxpr, [x], rule))(jnp.arange(2.0))
    np.testing.assert_array_equal(out, mapped(jnp.arange(2.0)))
    additions = [n for n, eqn in enumerate(numbered(jaxpr)) if eqn.primitive.name == "add"]
    np.testing.assert_allclose([records[n] for n in additions], [8 + np.sin(1)], rtol=1e-6)
