"""`assert_scale_invariant` accuses the wrong training steps, and no right one."""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pairs import product

import optax_lossscale as ols

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the framework's, not ours
    from flax import nnx

pytestmark = pytest.mark.filterwarnings(
    "ignore:a transformation stands before", "ignore::DeprecationWarning"
)

check = ols.testing.assert_scale_invariant


def problem(dtype):
    """A loss function of a small network, its parameters and a batch."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "in": jax.random.normal(keys[0], (8, 16)) / 3,
        "bias": jnp.zeros(16),
        "out": jax.random.normal(keys[1], (16, 2)) / 4,
    }
    batch = jax.random.normal(keys[2], (32, 8)), jax.random.normal(keys[3], (32, 2))

    def loss_fn(params, batch):
        x, y = batch
        p = jax.tree.map(lambda p: p.astype(dtype), params)
        prediction = jnp.tanh(x.astype(dtype) @ p["in"] + p["bias"]) @ p["out"]
        return jnp.mean((prediction - y).astype(jnp.float32) ** 2)

    return loss_fn, params, batch


def norm_of(grads):
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))


# --- wrong steps and right ones ---


def step_of(around=lambda tx: tx, given="dynamic", differentiate=None, change=None):
    """A maker of a transformation and a step, of a loss function and an optimizer.

    Args:
      around: what is made of the wrapped optimizer.
      given: its loss scale.
      differentiate: in place of `value_and_scaled_grad`.
      change: of the gradients, with the state, before the update.
    """

    def make(loss_fn, inner):
        tx = around(ols.with_loss_scale(inner, given))

        def step(params, state, batch):
            of = differentiate or ols.value_and_scaled_grad
            loss, grads = of(loss_fn, state)(params, batch)
            grads = change(grads, state) if change else grads
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        return tx, step

    return make


def unscaled(loss_fn, state):
    return jax.value_and_grad(loss_fn)


def scaled_twice(loss_fn, state):
    """Although Adam's epsilon makes a small parameter follow the reciprocal."""
    scaled = lambda *args: 2.0**-10 * state.loss_scale.scale(loss_fn(*args))
    return ols.value_and_scaled_grad(scaled, state)


def normalized(grads, state):
    """Where all gradients underflow, they are 0 divided by 0, and the step is skipped."""
    norm = optax.tree.norm(grads)
    return state.loss_scale.scale(jax.tree.map(lambda g: g / norm, grads))


def a_norm_of_scaled_gradients(loss_fn, inner):
    tx = ols.with_loss_scale(inner)

    def step(params, state, batch):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
        logged = {"loss": loss, "norm": norm_of(grads)}
        return *tx.apply_gradients(grads, state, params), logged

    return tx, step


def minimize(loss_fn, inner):
    tx = ols.with_loss_scale(inner)

    def step(params, state, batch):
        with_aux = lambda *args: (loss_fn(*args), optax.tree.norm(params))
        loss, params, state = tx.minimize(with_aux, state, params, batch, has_aux=True)
        return params, state, loss

    return tx, step


MISTAKES = {
    "forgotten scaling": step_of(differentiate=unscaled),
    "an older loss scale": step_of(
        differentiate=lambda loss_fn, state: ols.value_and_scaled_grad(loss_fn, 2.0**15)
    ),
    "unscaled by hand": step_of(
        change=lambda grads, state: state.loss_scale.unscale(grads)
    ),
    "scaled twice": step_of(differentiate=scaled_twice),
    "clip outside": step_of(lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx)),
    "momentum outside": step_of(lambda tx: optax.chain(optax.trace(0.9), tx)),
    "norm of scaled gradients": a_norm_of_scaled_gradients,
}
RIGHT = {
    "normalized gradients": step_of(change=normalized),
    "minimize": minimize,
    "a chain around": step_of(lambda tx: optax.chain(tx, optax.scale(0.5))),
    "multi steps": lambda loss_fn, inner: step_of()(
        loss_fn, optax.MultiSteps(inner, 2)
    ),
    "headroom": step_of(given="headroom"),
}
SAID = {
    "norm of scaled gradients": "result[2]['norm']",
    "momentum outside": "result[1][0].trace",
}
PROBLEMS = {
    "sgd": (optax.sgd(0.1), jnp.float16),
    "adam": (optax.adam(1e-3), jnp.float16),
    "float32": (optax.sgd(0.1), jnp.float32),
}


@product(name=[*MISTAKES], given=PROBLEMS)
def test_a_mistake_is_found(name, given):
    inner, dtype = given
    loss_fn, params, batch = problem(dtype)
    tx, step = MISTAKES[name](loss_fn, inner)
    with pytest.raises(AssertionError, match="depends on the loss scale") as error:
        check(jax.jit(step), params, tx.init(params), batch)
    said = str(error.value)
    assert "value_and_scaled_grad(loss_fn, state) inside the step" in said
    assert SAID.get(name, "") in said
    assert "result[0]" not in said or name != "norm of scaled gradients"


@product(make=RIGHT, given={name: PROBLEMS[name] for name in ("sgd", "adam")})
def test_a_right_step_is_not_accused(make, given):
    inner, dtype = given
    loss_fn, params, batch = problem(dtype)
    tx, step = make(loss_fn, inner)
    step = jax.jit(step, donate_argnums=(0, 1))
    state = tx.init(params)
    for _ in range(2):  # in a window of MultiSteps, and at its end
        check(step, params, state, batch)
        params, state, *_ = step(params, state, batch)


def test_a_mistake_at_the_end_of_a_window_is_found():
    loss_fn, params, batch = problem(jnp.float32)
    accumulating = optax.MultiSteps(optax.sgd(0.1), 2)
    clipped = step_of(lambda tx: optax.chain(optax.clip(1e-3), tx))
    tx, step = clipped(loss_fn, accumulating)
    step = jax.jit(step)
    params, state, _ = step(params, tx.init(params), batch)
    with pytest.raises(AssertionError, match=r"gradient_norm"):
        check(step, params, state, batch)


# --- how the step is written ---

PARAMS = {"w": jnp.array([0.5, -1.0, 2.0])}
X = jnp.array([[1.0, 2.0, 3.0], [-0.3, 0.4, 0.1]])
TX = ols.with_loss_scale(optax.adam(1e-2))


def small_loss(params, x):
    return jnp.mean((x @ params["w"] - 1) ** 2)


def small_step(params, state, x, right=True):
    used = state if right else 1.0
    loss, grads = ols.value_and_scaled_grad(small_loss, used)(params, x)
    return *TX.apply_gradients(grads, state, params), loss


def test_the_step_is_traced_once():
    step = jax.jit(chex.assert_max_traces(small_step, n=1), donate_argnums=(0, 1))
    check(step, PARAMS, TX.init(PARAMS), X)


def test_a_step_may_change_its_arguments_in_place():
    def step(trainer, x, right):
        now = trainer["params"], trainer["state"], x, right
        trainer["params"], trainer["state"], loss = small_step(*now)
        return loss

    trainer = {"params": PARAMS, "state": TX.init(PARAMS)}
    check(step, trainer, X, True)
    with pytest.raises(AssertionError, match=r"args\[0\]\['state'\].inner_state"):
        check(step, trainer, X, False)
    assert trainer["params"] is PARAMS


def test_steps_of_which_one_overflows_are_not_compared():
    loss_fn, params, batch = problem(jnp.float16)
    tx = ols.with_loss_scale(optax.sgd(0.1))

    @jax.jit
    def steps(params, state, batch):
        def step(carry, _):
            loss, params, state = tx.minimize(loss_fn, carry[1], carry[0], batch)
            return (params, state), loss

        return jax.lax.scan(step, (params, state), length=3)

    check(steps, params, tx.init(params), batch)


@jax.jit
def by_hand(params, state, loss_scale, right):
    """A step without the wrapper, whose scale may adapt before it unscales."""
    _, grads = ols.value_and_scaled_grad(small_loss, loss_scale)(params, X)
    new_scale, finite = loss_scale.update(loss_scale.unscale(grads))
    used = new_scale.replace(loss_scale=jnp.where(right, loss_scale(), new_scale()))
    updates, new_state = optax.sgd(0.1).update(used.unscale(grads), state, params)
    new = optax.apply_updates(params, updates), new_state
    return *optax.tree.where(finite, new, (params, state)), new_scale


def test_a_step_without_the_wrapper():
    arguments = PARAMS, optax.sgd(0.1).init(PARAMS), ols.DynamicLossScale()
    check(by_hand, *arguments, True)
    with pytest.raises(
        AssertionError, match=r"result\[0\](.|\n)*before the scale adap"
    ):
        check(by_hand, *arguments, False)


@pytest.mark.parametrize("right", [True, False])
def test_variables_of_nnx_that_are_aliases_count_once(right):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ols.with_loss_scale(optax.sgd(0.1)), wrt=nnx.Param)
    model.tied = model.kernel

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            loss = jnp.mean((model(x) - 1) ** 2)
            return ols.scale_gradient(loss, optimizer) if right else loss

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    if right:
        check(step, model, optimizer, X)
        return
    with pytest.raises(AssertionError, match=r"args\[0\]\.bias") as error:
        check(step, model, optimizer, X)
    assert "tied" not in str(error.value)


def test_a_step_that_draws_its_own_numbers_is_no_function_of_its_arguments():
    tx = ols.with_loss_scale(optax.sgd(0.1))
    generator = np.random.default_rng(0)

    def step(params, state, x):
        noisy = x + generator.standard_normal(x.shape)
        return tx.minimize(small_loss, state, params, noisy)[1:]

    def check_often():  # by chance, what is compared first is not accused
        for _ in range(9):
            check(step, PARAMS, tx.init(PARAMS), X)

    with pytest.raises(AssertionError, match="run again with the same arguments"):
        check_often()


# --- what depends on the scale, and what does not ---


def largest_logs(grads):
    return {k: jnp.log2(jnp.abs(g).max()) for k, g in grads.items()}


LOGS = {
    "log": lambda grads: jnp.log(norm_of(grads)),
    "logs of the largest": largest_logs,
    "exponent": lambda grads: jnp.frexp(norm_of(grads))[1],
    "clip factor": lambda grads: jnp.minimum(1, 1 / norm_of(grads)),
    "edges": lambda grads: jnp.histogram(grads["in"].astype(jnp.float32))[1],
    "flag": lambda grads: norm_of(grads) > 1,
}


@functools.cache
def logging_step():
    """A step, with its arguments, that logs what depends on the scale and what does not."""
    loss_fn, params, batch = problem(jnp.float16)
    tx = ols.with_loss_scale(optax.adam(1e-3))

    @jax.jit
    def step(params, state, batch):
        loss, scaled = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
        before, unscaled = state.loss_scale, state.loss_scale.unscale(scaled)
        params, state = tx.apply_gradients(scaled, state, params)
        right = {name: log(unscaled) for name, log in LOGS.items()} | {
            "zeros": jax.tree.map(lambda g: jnp.mean(g == 0), scaled),
            "divided": norm_of(scaled) / before(),
            "finite": ols.all_finite(scaled),
            "applied": state.should_apply,
            "metrics": {f"train/{k}": x for k, x in ols.metrics(state).items()},
        }
        wrong = {name: log(scaled) for name, log in LOGS.items()}
        wrong["metrics"] = ols.metrics(state) | {"gradient_norm": norm_of(scaled)}
        return params, state, {"loss": loss, **right}, wrong

    return step, (params, tx.init(params), batch)


@pytest.mark.parametrize("name", [*LOGS, "metrics"])
def test_what_is_logged_of_scaled_gradients_is_found(name):
    step, arguments = logging_step()
    ignored = [f"result[3]['{other}']" for other in {*LOGS, "metrics"} - {name}]
    if name == "flag":  # its threshold is crossed at none of the scales tried
        check(step, *arguments, ignore=ignored)
        return
    with pytest.raises(AssertionError) as error:
        check(step, *arguments, ignore=ignored)
    assert f"result[3]['{name}']" in str(error.value)
    assert "result[2]" not in str(error.value)


def test_what_is_logged_of_unscaled_gradients_is_not_accused():
    step, arguments = logging_step()
    check(step, *arguments, ignore="result[3]")


@pytest.mark.parametrize("inner", [optax.lars(0.1), optax.sign_sgd(0.01)])
def test_forgotten_scaling_is_found_under_optimizers_that_hide_it(inner):
    tx, step = step_of(differentiate=unscaled)(small_loss, inner)
    with pytest.raises(AssertionError, match="value_and_scaled_grad"):
        check(jax.jit(step), PARAMS, tx.init(PARAMS), X)


def test_parts_of_different_sizes_in_float16_are_not_accused():
    """Of which one underflows at loss scales at which the other does not."""
    loss_fn, params, batch = problem(jnp.float16)
    params = {"a": params, "b": jax.tree.map(lambda p: 1.1 * p, params)}
    both = lambda p, batch: loss_fn(p["a"], batch) + 2.0**-10 * loss_fn(p["b"], batch)
    tx, step = step_of()(both, optax.sign_sgd(1e-3))
    check(jax.jit(step), params, tx.init(params), batch)


def test_a_backward_pass_that_is_not_linear_is_found():
    layer = jax.custom_vjp(lambda x: x)
    layer.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))
    loss_fn = lambda params, x: jnp.mean(layer(x @ params["w"]) ** 2)
    tx, step = step_of()(loss_fn, optax.adam(1e-2))
    with pytest.raises(AssertionError, match="custom_vjp"):
        check(jax.jit(step), PARAMS, tx.init(PARAMS), X)


def test_a_cast_to_8_bits_in_the_loss_is_not_accused():
    def loss_fn(params, x):
        y = (x @ params["w"]).astype(jnp.float8_e4m3fn)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    tx, step = step_of()(loss_fn, optax.adam(1e-2))
    check(jax.jit(step), PARAMS, tx.init(PARAMS), X)


def test_a_state_that_is_infinite_from_the_start_is_not_accused():
    inner = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau())
    tx = ols.with_loss_scale(inner)
    loss_fn, params, batch = problem(jnp.float16)
    step = jax.jit(lambda params, state: tx.minimize(loss_fn, state, params, batch)[1:])
    state = tx.init(params)
    assert jnp.isinf(state.inner_state[1].best_value)
    check(step, params, state)
    ols.testing.assert_survives_overflow(step, params, state)


# --- steps at which nothing can be compared ---


def with_nan_to_num(tx, loss_fn, state, params, batch):
    _, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
    return tx.apply_gradients(jax.tree.map(jnp.nan_to_num, grads), state, params)


def with_a_state_made_anew(tx, loss_fn, state, params, batch):
    return tx.minimize(loss_fn, tx.init(params), params, batch)[1:]


def with_a_scale_that_always_overflows(tx, loss_fn, state, params, batch):
    _, grads = ols.value_and_scaled_grad(loss_fn, 2.0**60)(params, batch)
    return tx.apply_gradients(grads, state, params)


@pytest.mark.parametrize(
    ("minimize", "said"),
    [
        (with_nan_to_num, "nan_to_num"),
        (with_a_state_made_anew, "the state that the step is given"),
        (with_a_scale_that_always_overflows, "skipped at every loss scale tried"),
    ],
)
def test_a_step_that_is_never_or_always_skipped_is_found(minimize, said):
    loss_fn, params, batch = problem(jnp.float16)
    tx = ols.with_loss_scale(optax.adamw(1e-2), ols.DynamicLossScale(2.0**8))
    _, params, state = tx.minimize(loss_fn, tx.init(params), params, batch)
    step = jax.jit(lambda params, state: minimize(tx, loss_fn, state, params, batch))
    with pytest.raises(AssertionError, match=said):
        check(step, params, state)


def test_gradients_that_are_all_zero_show_nothing():
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    with pytest.raises(AssertionError, match="gradients that are all zero"):
        check(jax.jit(small_step), zeros, TX.init(zeros), jnp.zeros_like(X))
