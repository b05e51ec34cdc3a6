"""`raise_if_stuck`: when it raises, and whom it blames."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

PARAMS = jnp.ones(2)
NAN = jnp.full(2, jnp.nan)
SPIKE = 5 * PARAMS


def after(tx, *grads):
    state = tx.init(PARAMS)
    for g in grads:
        _, state = tx.update(g, state, PARAMS)
    return state


def scaled(initial_scale):
    return ols.with_loss_scale(optax.sgd(0.1), ols.DynamicLossScale(initial_scale))


def ruled(norm=2.0):
    return ols.with_loss_scale(optax.sgd(0.1), None, skip=ols.skips.threshold(norm))


def test_passes_while_there_is_something_to_lower():
    assert ols.raise_if_stuck(after(scaled(4.0), NAN, NAN)) is None


@pytest.mark.parametrize("wrap", [lambda tx: tx, optax.chain])
def test_raises_when_exhausted(wrap):
    tx = wrap(scaled(2.0))
    said = r"scale of 1, .*min_scale.* in a row: 2\..* run print\(ols\.diagnose\("
    with pytest.raises(ols.LossScaleError, match=said):
        ols.raise_if_stuck(after(tx, NAN, NAN))
    ols.raise_if_stuck(after(tx, NAN, NAN, PARAMS))


def test_raises_at_too_many_skips():
    state = after(scaled(2.0**15), NAN, NAN, NAN)
    ols.raise_if_stuck(state, max_consecutive_skips=3)
    said = r"scale is 4096\. .* in a row: 3\..* run print\(ols\.diagnose\("
    with pytest.raises(ols.LossScaleError, match=said) as raised:
        ols.raise_if_stuck(state, max_consecutive_skips=2)
    assert "min_scale" not in str(raised.value)


def test_raises_when_the_loss_stays_nan():
    tx = ols.with_loss_scale(optax.sgd(0.1))
    state = tx.init(PARAMS)
    for _ in range(4):
        _, state = tx.update(PARAMS, state, PARAMS, value=jnp.nan)
    with pytest.raises(ols.LossScaleError, match=r"losses were not finite.* row: 4"):
        ols.raise_if_stuck(state, max_consecutive_skips=3)


def test_a_loss_scale_alone_is_checked_without_counts():
    ls = ols.DynamicLossScale(initial_scale=1.0)
    ols.raise_if_stuck(ls)
    said = "overflowed at a loss scale of 1, which cannot"
    with pytest.raises(ols.LossScaleError, match=said):
        ols.raise_if_stuck(ls.adjust(False))
    ols.raise_if_stuck(ols.FixedLossScale(1).adjust(False))


@pytest.mark.parametrize(("every", "stuck"), [(2, True), (10, False), (30, False)])
def test_a_rule_that_skips_much_is_seen_though_never_in_a_row(every, stuck):
    tx = ruled()

    def step(state, i):
        norm = jnp.where(i % every == 0, 5.0, 1.0)
        return tx.update(norm, state, jnp.ones(()))[1], None

    state = tx.init(jnp.ones(()))
    state, _ = jax.lax.scan(step, state, jnp.arange(300))
    if stuck:
        said = r"has skipped 150 steps, .* skip_debt is 2850, above 20 \* max_"
        with pytest.raises(ols.LossScaleError, match=said):
            ols.raise_if_stuck(state)
    else:
        ols.raise_if_stuck(state)


BLAMED = {
    "the rule alone": (4 * [SPIKE], "^ThresholdSkipRule has skipped 4 steps.*of 7.07"),
    "the rule, before an overflow": (
        [*4 * [SPIKE], NAN],
        "^ThresholdSkipRule has skipped 4 steps.* norm of inf",
    ),
    "both": (
        [*3 * [NAN], *3 * [SPIKE]],
        "not finite.*, or ThresholdSkipRule .* norm of 7.07",
    ),
    "numbers that are not finite": (4 * [NAN], r"^gradients, .* not finite\. The loss"),
    "a norm that float32 does not hold": (4 * [1e25 * PARAMS], "norm .* norm of inf"),
}


@pytest.mark.parametrize(("grads", "said"), BLAMED.values(), ids=BLAMED)
def test_whoever_skipped_the_steps_is_named(grads, said):
    with pytest.raises(ols.LossScaleError, match=said):
        ols.raise_if_stuck(after(ruled(), *grads), max_consecutive_skips=3)


@pytest.mark.parametrize("loss_scale", ["dynamic", 128])
def test_of_many_models_it_says_to_take_one(loss_scale):
    tx = ols.with_loss_scale(optax.sgd(0.1), loss_scale)
    states = jax.vmap(tx.init)(jnp.ones((3, 2)))
    with pytest.raises(ValueError, match=r"shape \(3,\)\. Pass the state of one model"):
        ols.raise_if_stuck(states)
    ols.raise_if_stuck(jax.tree.map(lambda x: x[0], states))
