"""Holds a function under `autocast` to the same function in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols

# Those that a dynamic loss scale would come to: the first at which no gradient
# overflows.
EXPONENTS = (24, 18, 12, 6, 0, -6, -12, -18)


def assert_as_in_float32(
    fun, *args, argnums=(0, 1), within=0.005, dtype=jnp.float16, many=64
):
    """Holds value and gradients of `fun` under autocast to those in float32.

    Args:
      fun: a function from arrays to a float32 scalar; the first argument is the parameters.
      *args: what it is given.
      argnums: what to differentiate.
      within: the error that is allowed, relative to the largest number of each array.
      dtype: what products are to be in.
      many: how many terms make a sum one that is not to be in 16 bits.
    """
    exact = jax.jit(jax.value_and_grad(fun, argnums))(*args)
    # traced once
    step = jax.jit(scaled_value_and_grad(ols.autocast(fun, dtype), argnums))
    found = differences(at_the_largest_scale(step, *args), exact, within)
    found += other_dtypes(dtype, step, jnp.float32(1), *args, many=many)
    assert not found, "\n".join(found)


def scaled_value_and_grad(fun, argnums):
    """A function of the loss scale and arguments: the true value, and scaled gradients."""

    def scaled(scale, *args):
        value = fun(*args)
        return value * scale, value

    return jax.value_and_grad(scaled, tuple(n + 1 for n in argnums), has_aux=True)


def at_the_largest_scale(step, *args):
    """Value and unscaled gradients, at the largest loss scale at which those are finite."""
    for exponent in EXPONENTS:
        scale = jnp.float32(2.0**exponent)
        (_, value), grads = step(scale, *args)
        if all(np.isfinite(g).all() for g in jax.tree.leaves(grads)):
            break
    return value, jax.tree.map(lambda g: g / scale, grads)


def differences(actual, expected, within):
    """What differs by more than a part of the largest number of each array, or in dtype."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    found = []
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        kinds = [(jnp.shape(a), jnp.result_type(a)) for a in (x, y)]
        if kinds[0] != kinds[1]:
            found.append(f"{name} is {kinds[0]}, not {kinds[1]}")
        elif (error := relative_error(x, y)) > within:
            some = [np.ravel(a)[:6] for a in (x, y)]
            found.append(f"{name} is off by {error:.2g}: {some[0]}, not {some[1]}")
    return found


def assert_close(actual, expected, within):
    found = differences(actual, expected, within)
    assert not found, "\n".join(found)


def relative_error(x, y):
    """The largest difference, relative to the largest number; inf where one alone is finite."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.size == 0:
        return 0.0
    is_same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        difference = np.where(is_same, 0, np.abs(x - y))
    if not np.isfinite(difference).all():
        return np.inf
    size = np.abs(y[np.isfinite(y)]).max(initial=0)
    return 0.0 if difference.max() == 0 else difference.max() / max(size, 1e-30)


def equations(jaxpr):
    """All equations of a program, and those inside them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
            if is_program(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def is_program(x):
    return hasattr(getattr(x, "jaxpr", x), "eqns")


NEED_DIGITS = {
    *("cumprod", "cumsum", "exp", "exp2", "expm1", "log", "log1p", "pow"),
    *("reduce_prod", "reduce_sum"),
}


def sums_in_16_bits(fun, *args, many=64):
    """The sums of many terms, and what has another range than its operand, in 16 bits."""
    found = []
    for eqn in equations(jax.make_jaxpr(fun)(*args).jaxpr):
        if eqn.primitive.name not in NEED_DIGITS:
            continue
        operand = eqn.invars[0].aval
        axes = eqn.params.get("axes", range(operand.ndim))
        is_short = np.prod([operand.shape[n] for n in axes]) < many
        is_sum = eqn.primitive.name == "reduce_sum"
        if operand.dtype.itemsize == 2 and not (is_sum and is_short):
            found.append(eqn)
    return found


def other_dtypes(dtype, fun, *args, many=64):
    """The products that are not in a dtype, and what should not be in 16 bits and is."""
    report = ols.dtype_report(fun, *args)
    found = []
    if any(p.dtype != dtype and not p.by_choice for p in report.products):
        found.append(f"not all products are in {jnp.dtype(dtype)}:\n{report}")
    if narrow := sums_in_16_bits(fun, *args, many=many):
        found.append(f"there are sums or exponentials in 16 bits:\n{narrow}")
    return found


def assert_computes_in(dtype, fun, *args, many=64):
    found = other_dtypes(dtype, fun, *args, many=many)
    assert not found, "\n".join(found)


def products(fun, *args):
    """How many products a function computes, in each dtype."""
    found = {}
    for p in ols.dtype_report(fun, *args).products:
        found[str(p.dtype)] = found.get(str(p.dtype), 0) + p.count
    return found


@functools.cache
def normal(seed, *shape, scale=1.0):
    """Random numbers that float16 holds."""
    x = np.random.default_rng(seed).standard_normal(shape) * scale
    # no jax.Array, which a trace might leak
    return x.astype(np.float16).astype(np.float32)
