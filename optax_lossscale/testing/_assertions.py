"""Three assertions about a training step: two that run it, and one that traces it.

Scaling by a power of two is exact. So between two loss scales at which nothing
underflows or overflows, whatever does not depend on the loss scale agrees to the last
bits, which `assert_scale_invariant` compares. At an infinite loss scale, all gradients
overflow, and `assert_survives_overflow` sees what the skipped step leaves behind.
`assert_computes_in` reads the products in the `dtype_report` of the step.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optax_lossscale._arrays import checks
from optax_lossscale._arrays.precision import is_inexact_leaf
from optax_lossscale._diagnosis.dtypes import dtype_report
from optax_lossscale._step.state import loss_scale_states_in
from optax_lossscale.testing._run import (
    Outcome,
    adapting_in,
    float_arrays_in,
    is_equal,
    listed,
    run,
)

# The highest loss scale tried is 2**40: the squares of gradients stay finite in float32
_HIGHEST = 40
_LOWEST = -24
# How many octaves lie between the loss scales tried, until the step is applied
_STRIDE = 4
# How many octaves lie between the two that are compared
_OCTAVES = 2
# What lowers a loss scale so little that what depends on it hardly changes, while all is
# rounded anew. This shows what is nothing but rounding, such as the gradient of a bias
# before a batch norm, or of an attention's keys. It has 8 digits, as bfloat16 has.
_BARELY_LOWER = 1 - 2.0**-8


def assert_scale_invariant(
    step: Callable[..., Any],
    /,
    *args: Any,
    carry: Mapping[int, int] | None = None,
    ignore: str | Collection[str] = (),
    rtol: float = 2e-5,
) -> None:
    """Raises if anything that a training step computes depends on the loss scale.

    A correct step multiplies the loss by the loss scale and divides the gradients by
    it. Scaling by a power of two is exact, so its results agree to the last bits at all
    loss scales between underflow and overflow. In a wrong step, the two do not cancel.
    Training may not reveal this, because Adam hides the size of gradients.

    The step is run at the highest loss scale at which it is applied, two octaves
    below, where the scale is also about to grow, and at an infinite one: 4 to 20 runs
    on copies of its arguments, and 9 for most models in float16. A toy configuration
    will do: that takes milliseconds, besides the seconds to compile the step once.
    What differs is not accused if it does so as much at 255/256 of the highest scale:
    a gradient that is zero in theory is nothing but rounding.

    Of what the step hands on, its change is compared; of anything else, its value. Loss
    scales are left out, and so is what `metrics` says of them in a dict that has
    `log2_loss_scale`, perhaps with a prefix. It does not find a threshold on scaled
    gradients that no scale tried crosses (a flag, a histogram), nor what is added to
    scaled gradients and vanishes beside them. Two loss scales are set alike: to find
    that they are swapped, let the step close over one of the states. A leaf whose
    gradients underflow even at the highest scale is accused: name it in `ignore`.

    Args:
      step: the training step, best compiled. It returns its new state or changes it in
        place, and may donate its arguments. Bind keyword arguments before.
      *args: its arguments, with a loss scale that adapts.
      carry: `{argument: result}`, which result is the new value of which argument, by
        position. By default, that in its place, if structure and shapes agree.
      ignore: names of results that may depend on the loss scale, as in the error, or
        how they begin: `"result[2]['scale']"`, or `"result[2]"` for all of it.
      rtol: by how much a leaf may differ, in the 2-norm, if it is not rounding. Nothing
        else differs by as much in float16 models from an MLP to a ResNet.

    Raises:
      AssertionError: if something depends on the loss scale, devices drift apart, the
        step is never or always skipped, or its state does not come back.
      ValueError: if no loss scale adapts, or `carry` or `ignore` does not fit.
      TypeError: if `step` is not a function, or the arguments are traced.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scale(optax.adam(1e-3))
      >>> loss_fn = lambda params, x: jnp.mean((x @ params) ** 2)
      >>> @jax.jit
      ... def wrong(params, state, x):
      ...     loss, scaled_grads = jax.value_and_grad(loss_fn)(params, x)
      ...     return *tx.apply_gradients(scaled_grads, state, params), loss
      >>> params, x = jnp.ones(3), jnp.ones((2, 3))
      >>> ols.testing.assert_scale_invariant(wrong, params, tx.init(params), x)
      Traceback (most recent call last):
          ...
      AssertionError: the step depends on the loss scale...
    """
    run_at = _runner("assert_scale_invariant", step, args, carry, ignore)
    checks.number("rtol", rtol, 0, 1)
    if not adapting_in(args):
        raise ValueError(
            "no loss scale among the step's arguments adapts, so none can be varied. "
            "Test the step with one that does: with_loss_scale(optimizer, 'dynamic'). "
            "In bfloat16, without a loss scale, a step needs no such test"
        )
    for exponent in range(_HIGHEST, _LOWEST - 1, -_STRIDE):
        highest = run_at(2.0**exponent)
        if highest.was_applied:
            break
    else:
        raise AssertionError(_ALWAYS_SKIPPED)
    norms = jax.device_get([x.gradient_norm for x in highest.states])
    if any(norm is not None and not np.any(norm) for norm in norms):
        raise AssertionError(_ZERO.format(exponent=exponent))
    lower = run_at(2.0 ** (exponent - _OCTAVES), before_growth=True)
    wrong = {
        name: difference
        for name, difference in _differences(highest, lower).items()
        if not difference <= rtol
    }
    if wrong:
        rounding = _differences(highest, run_at(2.0**exponent * _BARELY_LOWER))
        wrong = {name: x for name, x in wrong.items() if not x <= rounding[name]}
    if wrong:
        again = _differences(highest, run_at(2.0**exponent))
        random = [name for name in wrong if not again[name] <= rtol]
        if random:
            raise AssertionError(_RANDOM.format(names=listed(random)))
        names = listed(f"{name} by {x:.2g}" for name, x in wrong.items())
        raise AssertionError(
            _DEPENDS.format(lower=exponent - _OCTAVES, higher=exponent, names=names)
        )
    # Some optimizers hide the size of gradients, so that nothing changes.
    if run_at(np.inf).was_applied:
        raise AssertionError(_APPLIED.format(cause="an overflow"))


def assert_survives_overflow(
    step: Callable[..., Any],
    /,
    *args: Any,
    carry: Mapping[int, int] | None = None,
    ignore: str | Collection[str] = (),
    nan_in: int | None = None,
) -> None:
    """Raises if a step that is skipped changes what it hands on to the next step.

    At an infinite loss scale, all gradients overflow. A correct step is then skipped:
    what it hands on is what it was given, the skip is counted, and the loss scale is
    finite again. With `nan_in`, the same must hold for a NaN in that argument. Every
    float that is handed on is compared, and every integer in the state of the wrapped
    optimizer, but no others, which may be counters of calls or keys.

    The step is run twice, or three times with `nan_in`, on copies of its arguments: in
    the first run at a loss scale of 1. A toy configuration will do: that takes
    milliseconds, besides the seconds to compile the step once.

    Under `pmap` and `shard_map`, what is the same on all devices must stay so in each
    run. That devices decide alone shows only with `nan_in`. It takes two devices.

    It does not find a schedule outside the wrapper that moves on, an average that
    begins as a copy of the parameters, or a momentum outside that begins at zero: test
    with the arguments of a later step.

    Args:
      step: the training step, compiled or not. It returns its new state or changes it
        in place, and may donate its arguments. Bind keyword arguments before.
      *args: its arguments. Without a loss scale that adapts, `nan_in` is needed.
      carry: `{argument: result}`, which result is the new value of which argument, by
        position. By default, that in its place, if structure and shapes agree.
      ignore: names of results that a skipped step may change, as in the error, or how
        they begin: `"result[2]['mean']"`, or `"result[2]"` for all of it.
      nan_in: the position of an argument to put a NaN in, usually that of the batch; of
        the parameters, if the batch holds tokens.

    Raises:
      AssertionError: if the step is not skipped or leaves something behind, devices
        drift apart, or its state does not come back.
      ValueError: if no loss scale adapts and there is no `nan_in`, the state is not
        handed on, or `carry`, `ignore` or `nan_in` does not fit.
      TypeError: if `step` is not a function, or the arguments are traced.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scale(optax.adam(1e-3))
      >>> loss_fn = lambda params, x: jnp.mean((x @ params) ** 2)
      >>> @jax.jit
      ... def wrong(params, state, mean, x):
      ...     loss, params, state = tx.minimize(loss_fn, state, params, x)
      ...     return params, state, 0.9 * mean + 0.1 * jnp.mean(x), loss
      >>> params, mean, x = jnp.ones(3), jnp.zeros(()), jnp.ones((2, 3))
      >>> ols.testing.assert_survives_overflow(wrong, params, tx.init(params), mean, x)
      Traceback (most recent call last):
          ...
      AssertionError: an overflow changed it...

      The error names `result[2]`, the mean. In its place, a correct step returns
      `ols.where_applied(state, 0.9 * mean + 0.1 * jnp.mean(x), mean)`.
    """
    run_at = _runner("assert_survives_overflow", step, args, carry, ignore)
    adapts = bool(adapting_in(args))
    if not adapts and nan_in is None:
        raise ValueError(
            "no loss scale among the step's arguments adapts, so none can be set to "
            "infinity. Say which argument to put a NaN in, usually the batch: nan_in=2"
        )
    places = range(len(args)) if type(nan_in) is int else ()
    if nan_in is not None and not (nan_in in places and float_arrays_in(args[nan_in])):
        raise ValueError(
            f"nan_in={nan_in} names no argument with floats. It is the position of one "
            "of the step's arguments, from 0 on, such as that of the batch"
        )
    applied = run_at(1.0)
    with_state = {i for i, x in enumerate(args) if loss_scale_states_in(x)}
    if not (applied.before or ignore) or not with_state <= applied.handed_on:
        raise ValueError(_NOT_HANDED_ON)
    if adapts:
        overflow = run_at(np.inf)
        _check_kept(overflow, "an overflow")
        is_same = all(map(is_equal, overflow.scales, applied.scales))
        if is_same or not np.all(np.isfinite(np.concatenate(overflow.scales, None))):
            raise AssertionError(_NOT_ADAPTED)
    if nan_in is not None:
        _check_kept(run_at(1.0, nan_in=nan_in), f"a NaN in argument {nan_in}")


def assert_computes_in(
    step: Callable[..., Any], dtype: DTypeLike, /, *args: Any, **kwargs: Any
) -> None:
    """Raises if matrix products or convolutions do not compute in a given dtype.

    A model whose parameters are cast to float16 may still compute in float32: a single
    float32 input is enough, and only the time that a step takes reveals it. Put this
    assertion into your tests, so that they fail when a new layer or input widens the
    products that follow. The step is traced, but neither compiled nor run, so shapes
    are enough.

    The assertion checks every product that `dtype_report` lists, except:

    - products of integers,
    - products in Optax's own optimizers, such as Muon, and
    - products that are meant to stay wide, because their `precision` is
      `jax.lax.Precision.HIGHEST` or an algorithm, or because your code computes them
      under `jax.default_matmul_precision("highest")`. Such a default does not count if
      you call the assertion itself under it, because it would exempt every product.

    Args:
      step: the training step, compiled or not, or any other function that JAX can
        trace, such as one that only computes the model's gradients.
      dtype: the floating-point dtype to compute in, such as `jnp.float16`.
      *args: the step's arguments: arrays, a `jax.ShapeDtypeStruct` in place of any
        array, or trees and modules of these. Other objects are passed on unchanged.
      **kwargs: the step's keyword arguments, likewise.

    Raises:
      AssertionError: if products or convolutions do not compute in `dtype`. The error
        names the lines of your code that compute them, with the share of the
        multiplications that each computes.
      ValueError: if there are no products to check.
      ValueError: if `dtype` is not a floating-point dtype.
      TypeError: if `step` is not a function, or `dtype` was left out.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> half = jnp.ones((4, 2), jnp.float16)
      >>> x = jnp.ones((8, 4))
      >>> def step(weights, x):
      ...     return jax.grad(lambda weights: jnp.sum(x @ weights))(weights)
      >>> ols.testing.assert_computes_in(step, jnp.float16, half, x.astype(jnp.float16))
      >>> ols.testing.assert_computes_in(step, jnp.float16, half, x)
      Traceback (most recent call last):
          ...
      AssertionError: 2 of 2 matrix products and convolutions do not compute in...
    """
    checks.check_function("step", step)
    # An array has a dtype, too, but is an argument of the step.
    if not isinstance(dtype, (str, type, np.dtype)):
        raise TypeError(
            "the second argument is the dtype to compute in, got "
            f"{checks.shown(dtype)}. Write "
            "assert_computes_in(train_step, jnp.float16, params, state, batch)"
        )
    dtype = checks.floating_dtype("dtype", dtype)
    report = dtype_report(step, *args, **kwargs)
    # Products of integers, and those of another dtype by choice, are not checked.
    checked = [
        product
        for product in report.products
        if product.dtype == dtype
        or (jnp.issubdtype(product.dtype, jnp.inexact) and not product.by_choice)
    ]
    if not checked:
        raise ValueError(
            "there is no matrix product or convolution to check: pass the training "
            "step, or the function that computes its gradients. dtype_report says\n"
            f"{report}"
        )
    wrong = [product for product in checked if product.dtype != dtype]
    if wrong:
        message = _WRONG.format(
            number=sum(product.count for product in wrong),
            total=sum(product.count for product in checked),
            dtype=dtype,
            rows="\n".join(report.rows_of(wrong)),
            source=wrong[0].source,
        )
        raise AssertionError(message)


def _runner(
    name: str, step: Any, args: tuple[Any, ...], carry: Any, ignore: Any
) -> Callable[..., Outcome]:
    """Returns `run` for the arguments of an assertion, if they are of their kinds."""
    checks.check_function("the first argument is the training step and", step)
    checks.check_concrete(name, args)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args)):
        raise TypeError(f"{name} runs the step: pass arrays, not a ShapeDtypeStruct")
    positions = carry.items() if isinstance(carry, Mapping) else [(carry,)]
    if carry is not None and not all(type(n) is int for x in positions for n in x):
        checks.refuse("carry", carry, "a dict {argument: result} of two positions")
    names = [ignore] if isinstance(ignore, str) else ignore
    if not isinstance(names, Collection) or not all(
        isinstance(x, str) and x for x in names
    ):
        checks.refuse("ignore", ignore, "a name of a result, or a list of names")
    return functools.partial(run, step, args, carry, tuple(names))


def _differences(x: Outcome, y: Outcome) -> dict[str, float]:
    """Returns the relative differences between two runs, by the names of arrays.

    Of what is handed on, only its change by the step counts. Numbers are equal if they
    are neighbors in their dtype, as rounding may part them.
    """
    differences = {}
    for name in sorted(x.values.keys() & y.values.keys()):
        value = x.values[name]
        if not is_inexact_leaf(value):
            differences[name] = float(not is_equal(value, y.values[name]))
            continue
        eps = float(jnp.finfo(value.dtype).eps)
        a = value.astype(np.complex128)
        b = y.values[name].astype(np.complex128)
        is_off = ~np.isclose(a, b, rtol=eps, atol=0, equal_nan=True)
        with np.errstate(invalid="ignore"):
            off = np.linalg.norm((a - b)[is_off])
            change = np.nan_to_num(a - x.before.get(name, 0), posinf=0, neginf=0)
        size = np.linalg.norm(change)
        differences[name] = float(off / size) if size else float(np.any(is_off))
    return differences


def _check_kept(outcome: Outcome, cause: str) -> None:
    """Raises an `AssertionError` if a step is applied, or changes what it hands on."""
    if outcome.states and outcome.was_applied:
        raise AssertionError(_APPLIED.format(cause=cause))
    changed = [
        name
        for name, old in outcome.before.items()
        if not is_equal(outcome.values[name], old)
    ]
    if changed:
        raise AssertionError(_CHANGED.format(cause=cause, names=listed(changed)))


_ALWAYS_SKIPPED = f"""\
the step is skipped at every loss scale tried, from 2**{_HIGHEST} to 2**{_LOWEST}.
Either its gradients are multiplied by a scale other than that of the state that it is
given, such as an older one: use value_and_scaled_grad(loss_fn, state) inside the step.
Or there is a NaN in the arguments, the loss or the model: diagnose(loss_fn, params,
batch) says where."""
_ZERO = """\
at a loss scale of 2**{exponent}, the step is applied with gradients that are all zero.
Pass arguments at which the loss has gradients. Do not call nan_to_num on gradients."""
_DEPENDS = """\
the step depends on the loss scale.
Between 2**{lower} and 2**{higher}, these change, relative to their size:
{names}
The loss is to be multiplied by the loss scale, and the gradients divided by it once.
- Compute them with value_and_scaled_grad(loss_fn, state) inside the step, or from
  scale_gradient(loss, state), with the state that the step is given.
- Leave it to the optimizer to divide by the scale, before the scale adapts.
- Put what depends on the size of gradients, such as a clip, inside:
  with_loss_scale(optax.chain(clip, …)).
- To log a norm, return ols.metrics(state), or unscale the gradients first:
  get_loss_scale(state).unscale(scaled_grads).
- In a custom_vjp, divide by the loss scale first, and multiply by it afterwards.
- If a result stands for an argument in another place, say so: carry={{argument: result}}.
- If something may depend on the loss scale, name it in ignore=."""
_RANDOM = """\
the step gives other results when it is run again with the same arguments:
{names}
Pass what it draws at random, or reads from an iterator, as an argument."""
_APPLIED = """\
the step is applied despite {cause}, or does not count that it is skipped.
- Compute the gradients with value_and_scaled_grad(loss_fn, state) inside the step, or
  from scale_gradient(loss, state), with the state that the step is given.
- Do not call nan_to_num on gradients, and leave out skip=None.
- Return the new state as it is, not the old one or one put together from both.
- If gradients do not depend on a NaN put in, or are all zero, pass other arguments."""
_CHANGED = """\
{cause} changed it: what the step hands on is not what was given:
{names}
- Of a result outside the optimizer, keep the old value if the step was skipped:
  new = ols.where_applied(state, new, old), with the state after the step.
- Put what is chained after the wrapper inside: with_loss_scale(optax.chain(…)).
- In a step of your own, keep parameters and optimizer state, or call tx.minimize.
- If it is no new value of the argument in its place, say which is:
  carry={{argument: result}}, as in carry={{0: 0, 1: 1}}."""
_NOT_ADAPTED = """\
the step does not adapt its loss scale.
After an overflow it comes back as it was given, or as it always is.
- Return the state that the optimizer returned.
- As value=, pass the loss that is not scaled: a loss that is not finite adapts nothing.
- If the loss is not finite anyway, pass other arguments: diagnose says where."""
_NOT_HANDED_ON = """\
the state, or all that it trains, is not handed on: no result has the structure and
shapes of the argument in its place. Say which result stands for which argument:
carry={argument: result}, as in carry={0: 1, 1: 2} for a step that takes (params, state,
batch) and returns (loss, params, state). A step that returns a dict or a list of these
is to return a tuple, and an object that is no pytree is to be taken apart"""
_WRONG = """\
{number} of {total} matrix products and convolutions do not compute in {dtype}:
{rows}
The first of them in the program is at {source}.
A product computes in the wider dtype of its two operands, or in float32 if one operand
is float16 and the other is bfloat16.
- Call the loss function through ols.autocast, which computes the products of a float32
  model in 16 bits.
- Or cast both operands to {dtype}, or give the module dtype=jnp.{dtype}.
- To keep a product wide, compute it with precision=jax.lax.Precision.HIGHEST or under
  jax.default_matmul_precision("highest")."""
