import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

PARAMS = jnp.ones(2)
NAN = jnp.full(2, jnp.nan)


def after(tx, *grads):
    state = tx.init(PARAMS)
    for g in grads:
        _, state = tx.update(g, state, PARAMS)
    return state


def test_passes_while_there_is_something_to_lower():
    tx = ols.with_loss_scale(optax.sgd(0.1), ols.DynamicLossScale(initial_scale=4.0))
    assert ols.raise_if_stuck(after(tx, NAN, NAN)) is None


@pytest.mark.parametrize("wrap", [lambda tx: tx, optax.chain])
def test_raises_when_exhausted(wrap):
    tx = wrap(
        ols.with_loss_scale(optax.sgd(0.1), ols.DynamicLossScale(initial_scale=2.0))
    )
    with pytest.raises(
        ols.LossScaleError, match=r"scale of 1, .*min_scale.* in a row: 2\."
    ):
        ols.raise_if_stuck(after(tx, NAN, NAN))
    ols.raise_if_stuck(after(tx, NAN, NAN, PARAMS))


def test_raises_at_too_many_skips():
    tx = ols.with_loss_scale(optax.sgd(0.1), ols.DynamicLossScale())
    state = after(tx, NAN, NAN, NAN)
    ols.raise_if_stuck(state, max_consecutive_skips=3)
    with pytest.raises(ols.LossScaleError, match=r"scale is 4096\. .* in a row: 3\."):
        ols.raise_if_stuck(state, max_consecutive_skips=2)


@pytest.mark.parametrize(
    ("every", "steps", "stuck"), [(2, 300, True), (10, 300, False), (30, 3000, False)]
)
def test_a_rule_that_skips_much_is_seen_though_never_in_a_row(every, steps, stuck):
    """Every second step, and every thirtieth."""
    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=ols.skips.threshold(2.0))

    def step(state, i):
        norm = jnp.where(i % every == 0, 5.0, 1.0)
        return tx.update(norm, state, jnp.ones(()))[1], None

    state, _ = jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(steps)))(
        tx.init(jnp.ones(()))
    )
    assert state.skipped_steps == steps // every
    if stuck:
        with pytest.raises(
            ols.LossScaleError,
            match=r"has skipped 150 steps, .* skip_debt is 2850, above 20 \* max_",
        ):
            ols.raise_if_stuck(state)
    else:
        ols.raise_if_stuck(state)


def test_a_loss_scale_alone_is_checked_without_counts():
    ls = ols.DynamicLossScale(initial_scale=1.0)
    ols.raise_if_stuck(ls)
    with pytest.raises(
        ols.LossScaleError, match=r"overflowed at a loss scale of 1, which cannot"
    ):
        ols.raise_if_stuck(ls.adjust(False))
    ols.raise_if_stuck(ols.FixedLossScale(1).adjust(False))


def test_it_says_to_diagnose_and_speaks_of_the_floor_only_there():
    tx = ols.with_loss_scale(optax.sgd(0.1), ols.DynamicLossScale())
    run = r"run print\(ols\.diagnose\(loss_fn, params, batch\)\)"
    with pytest.raises(ols.LossScaleError, match=run) as above:
        ols.raise_if_stuck(after(tx, NAN, NAN), max_consecutive_skips=1)
    assert "min_scale" not in str(above.value)
    tx = ols.with_loss_scale(optax.sgd(0.1), ols.DynamicLossScale(initial_scale=1.0))
    with pytest.raises(ols.LossScaleError, match=run) as floor:
        ols.raise_if_stuck(after(tx, NAN))
    assert "min_scale" in str(floor.value)


def test_one_skip_of_a_rule_after_many_overflows_is_not_laid_to_the_rule():
    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=ols.skips.threshold(2.0))
    state = after(tx, NAN, NAN, NAN, 5 * PARAMS)
    assert state.skip_rule.skipped_by_rule == 1
    ols.raise_if_stuck(state, max_consecutive_skips=4)
    with pytest.raises(ols.LossScaleError, match=r"not finite.* in a row: 4\."):
        ols.raise_if_stuck(state, max_consecutive_skips=3)


def test_overflows_and_spikes_in_a_row_are_both_named():
    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=ols.skips.threshold(2.0))
    state = after(tx, *[NAN] * 3, *[5 * PARAMS] * 3)
    with pytest.raises(
        ols.LossScaleError,
        match=r"not finite.*, or ThresholdSkipRule .* norm of 7\.07",
    ):
        ols.raise_if_stuck(state, max_consecutive_skips=5)


def test_a_rule_that_skipped_nothing_is_neither_blamed_nor_restarted():
    tx = ols.with_loss_scale(optax.sgd(0.1), skip=ols.skips.threshold(1.0))
    with pytest.raises(ols.LossScaleError, match="not finite") as error:
        ols.raise_if_stuck(after(tx, *[NAN] * 4), max_consecutive_skips=3)
    assert "ThresholdSkipRule" not in str(error.value)
    assert "restart the rule" not in str(error.value)


def test_skips_in_a_row_by_a_rule_alone_are_laid_to_it():
    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=ols.skips.threshold(2.0))
    state = after(tx, *[5 * PARAMS] * 4)
    with pytest.raises(ols.LossScaleError, match="ThresholdSkipRule has skipped"):
        ols.raise_if_stuck(state, max_consecutive_skips=3)


def test_a_state_without_a_loss_scale_is_refused():
    with pytest.raises(ValueError, match="exactly one loss scale"):
        ols.raise_if_stuck(optax.sgd(0.1).init(PARAMS))


def test_a_limit_that_is_no_positive_int_is_refused():
    with pytest.raises(ValueError, match="max_consecutive_skips must be an int"):
        ols.raise_if_stuck(ols.FixedLossScale(1), max_consecutive_skips=0)


@pytest.mark.parametrize("loss_scale", ["dynamic", 128])
def test_of_many_models_it_says_to_take_one(loss_scale):
    tx = ols.with_loss_scale(optax.sgd(0.1), loss_scale)
    states = jax.vmap(tx.init)(jnp.ones((3, 2)))
    with pytest.raises(ValueError, match=r"shape \(3,\)\. Pass the state of one model"):
        ols.raise_if_stuck(states)
    ols.raise_if_stuck(jax.tree.map(lambda x: x[0], states))


def test_a_rule_that_skipped_most_is_named_though_the_last_step_overflowed():
    tx = ols.with_loss_scale(optax.sgd(0.1), skip=ols.skips.threshold(1.0))
    state = after(tx, *[jnp.full(2, 2.0**20)] * 4, jnp.full(2, jnp.inf))
    with pytest.raises(
        ols.LossScaleError,
        match=r"ThresholdSkipRule has skipped 4 steps,.* norm of inf\. .*diagnose",
    ):
        ols.raise_if_stuck(state, max_consecutive_skips=3)


@pytest.mark.parametrize("skip", ["nonfinite", ols.skips.threshold(1.0)])
def test_norms_that_float32_does_not_hold_are_named(skip):
    tx = ols.with_loss_scale(optax.sgd(0.1), None, skip=skip)
    state = after(tx, *[1e25 * PARAMS] * 4)
    with pytest.raises(ols.LossScaleError, match=r"their norm .* norm of inf"):
        ols.raise_if_stuck(state, max_consecutive_skips=3)
