"""`flax.serialization`: saved and restored, whichever was imported first."""

import subprocess
import sys
import textwrap

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

PARAMS = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(8)}
INNER = optax.adamw(1e-2)


class OverflowsCounted(ols.LossScale):
    overflows: jax.Array = ols.state_field(0)

    def adjust(self, grads_finite):
        return self.replace(overflows=self.overflows + jnp.logical_not(grads_finite))


LOSS_SCALES = {
    "dynamic": ols.DynamicLossScale(initial_scale=64, growth_interval=3, hysteresis=2),
    "fixed": ols.FixedLossScale(128),
    "a user's own": OverflowsCounted(),
}
each_kind = pytest.mark.parametrize("loss_scale", LOSS_SCALES.values(), ids=LOSS_SCALES)


def stepped(tx):
    params, state = PARAMS, tx.init(PARAMS)
    for bad in (0.0, jnp.inf, 0.0):
        grads = jax.tree.map(lambda p: p + bad, params)  # noqa: B023
        params, state = tx.apply_gradients(grads, state, params)
    return state


@each_kind
def test_bytes_restore_the_state(loss_scale):
    tx = ols.with_loss_scale(INNER, loss_scale)
    state = stepped(tx)
    restored = flax.serialization.from_bytes(
        tx.init(PARAMS), flax.serialization.to_bytes(state)
    )
    assert type(restored.loss_scale) is type(loss_scale)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(restored, state)


def test_a_restored_state_takes_a_step_without_compiling_anew():
    tx = ols.with_loss_scale(INNER)
    state = stepped(tx)
    step = jax.jit(chex.assert_max_traces(tx.apply_gradients, n=1))
    expected = step(PARAMS, state, PARAMS)
    restored = flax.serialization.from_bytes(
        tx.init(PARAMS), flax.serialization.to_bytes(state)
    )
    chex.assert_trees_all_equal(step(PARAMS, restored, PARAMS), expected)


def test_the_state_is_restored_and_the_new_configuration_holds():
    saved = flax.serialization.to_state_dict(stepped(ols.with_loss_scale(INNER)))
    changed = ols.DynamicLossScale(growth_interval=2, backoff_factor=0.25)
    restored = flax.serialization.from_state_dict(
        ols.with_loss_scale(INNER, changed).init(PARAMS), saved
    )
    assert restored.loss_scale.get_config() == changed.get_config()
    assert restored.loss_scale() == 2**14


def test_a_state_inside_other_containers():
    tx = optax.chain(optax.identity(), ols.with_loss_scale(optax.MultiSteps(INNER, 2)))
    state = {"opt": tx.init(PARAMS), "own": [OverflowsCounted().adjust(False)]}
    saved = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(jax.tree.map(jnp.zeros_like, state), saved)
    chex.assert_trees_all_equal(restored, state)
    assert isinstance(ols.get_loss_scale(restored["opt"]), ols.DynamicLossScale)


@pytest.mark.parametrize("other", [ols.FixedLossScale(8), ols.HeadroomLossScale()])
def test_another_kind_of_loss_scale_is_refused(other):
    target = ols.with_loss_scale(INNER).init(PARAMS)
    saved = flax.serialization.to_state_dict(
        ols.with_loss_scale(INNER, other).init(PARAMS)
    )
    with pytest.raises(
        ValueError, match=r"a saved DynamicLossScale must hold .*hysteresis"
    ):
        flax.serialization.from_state_dict(target, saved)


@pytest.mark.parametrize("saved", [None, 128.0, [1, 2], {}, {"loss_scale": 1.0}])
def test_what_is_no_saved_loss_scale_is_refused(saved):
    with pytest.raises(ValueError, match="a saved DynamicLossScale must hold"):
        flax.serialization.from_state_dict(ols.DynamicLossScale(), saved)


def test_a_state_of_other_shapes_is_refused():
    start = lambda window: ols.with_loss_scale(
        INNER, skip=ols.skips.spikes(window=window)
    )
    saved = flax.serialization.to_state_dict(start(64).init(PARAMS))
    with pytest.raises(
        ValueError,
        match=r"a saved SpikeSkipRule .*_last.*\(2, 128\).*got .*_last.*\(2, 64",
    ):
        flax.serialization.from_state_dict(start(128).init(PARAMS), saved)


def test_what_a_user_registers_for_a_class_of_their_own_is_kept():
    class Own(ols.LossScale):
        def adjust(self, grads_finite):
            return self

    write = lambda ls: {"scale": ls()}
    read = lambda ls, saved: ls.replace(loss_scale=saved["scale"])
    flax.serialization.register_serialization_state(Own, write, read)
    saved = flax.serialization.to_state_dict(Own(8.0))
    assert saved == {"scale": 8}
    assert flax.serialization.from_state_dict(Own(), saved)() == 8


ORDERS = {
    "Flax first": "import flax.serialization\nimport optax_lossscale as ols\nstart()\nstep()",
    "ours first": "import optax_lossscale as ols\nimport flax.serialization\nstart()\nstep()",
    "Flax last": "import optax_lossscale as ols\nstart()\nimport flax.serialization\nstep()",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_in_whichever_order_the_two_are_imported(order):
    script = """
        import sys
        import jax.numpy as jnp, optax

        def start():
            global tx, target, Own
            class Own(ols.LossScale):
                steps: object = ols.state_field(0)
                def adjust(self, grads_finite):
                    return self.replace(steps=self.steps + 1)
            tx = ols.with_loss_scale(optax.adam(1e-3), Own())
            target = tx.init(jnp.ones(3))

        def step():
            global state
            _, state = tx.apply_gradients(jnp.ones(3), target, jnp.ones(3))

        ORDER
        restored = flax.serialization.from_bytes(target, flax.serialization.to_bytes(state))
        assert type(restored.loss_scale) is Own, restored
        assert restored.loss_scale.steps == 1
    """
    script = textwrap.dedent(script).replace("ORDER", order)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.slow
def test_flax_is_not_imported_by_us():
    script = "import optax_lossscale, sys; sys.exit('flax' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_restored_before_it_is_known_to_flax_a_state_is_refused_by_the_step():
    """Where Flax is imported between the last step and what it saves or restores."""
    script = """
        import jax.numpy as jnp, optax
        import optax_lossscale as ols
        tx = ols.with_loss_scale(optax.sgd(0.1))
        target = tx.init(jnp.ones(3))
        import flax.serialization
        saved = {"scale": target.loss_scale()}
        restored = target._replace(
            loss_scale=flax.serialization.from_state_dict(target.loss_scale, saved)
        )
        try:
            tx.apply_gradients(jnp.ones(3), restored, jnp.ones(3))
        except ValueError as error:
            assert "Restore a checkpoint into what tx.init" in str(error)
        else:
            raise AssertionError
        flax.serialization.to_bytes(tx.init(jnp.ones(3)))
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120
    )
