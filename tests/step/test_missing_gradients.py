"""A parameter whose gradient is None stays, and so do its own slots of the inner state."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from steps import each_way

import optax_lossscale as ols

PARAMS = {"w": jnp.array([1.0, -2.0]), "n": {"b": jnp.array([0.25])}}
GRADS = jax.tree.map(lambda p: 64 * (p + 1), PARAMS)
WITHOUT_W = {"w": None, "n": GRADS["n"]}

INNER = {
    "adam": optax.adam(0.1),
    "sm3": optax.sm3(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "masked": optax.masked(optax.adam(0.1), {"w": True, "n": False}),
    "partition": optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)}, {"w": "a", "n": "b"}
    ),
    "injected": optax.inject_hyperparams(optax.adam)(0.1),
    "accumulated": optax.MultiSteps(optax.adam(0.1), 2),
    "master weights": ols.with_master_weights(optax.adam(0.1)),
}
each_inner = pytest.mark.parametrize("inner", INNER.values(), ids=INNER)


def slots_of(name, state):
    """The leaves of an optimizer state that belong to one parameter."""
    leaves = jax.tree.leaves_with_path(state.inner_state)
    named = lambda path: any(getattr(key, "key", None) == name for key in path)
    return [x for path, x in leaves if named(path)]


@each_inner
def test_its_parameter_and_slots_stay_and_the_others_move_on(inner):
    tx = ols.with_loss_scale(inner, ols.DynamicLossScale(64.0))
    params, state = tx.apply_gradients(GRADS, tx.init(PARAMS), PARAMS)
    after, moved = tx.apply_gradients(WITHOUT_W, state, params)
    chex.assert_trees_all_equal(after["w"], params["w"])
    assert slots_of("w", state)
    chex.assert_trees_all_equal(slots_of("w", moved), slots_of("w", state))
    rest = lambda s: jax.tree.leaves(s.inner_state)
    assert any((a != b).any() for a, b in zip(rest(state), rest(moved), strict=True))


@each_way
def test_none_for_a_whole_branch_is_none_for_each_of_its_leaves(way):
    tx = ols.with_loss_scale(optax.adamw(0.1), ols.DynamicLossScale(64.0))
    params, state = way(tx)(GRADS, tx.init(PARAMS), PARAMS)
    ends = [
        way(tx)({"w": GRADS["w"], "n": none}, state, params)
        for none in (None, {"b": None})
    ]
    chex.assert_trees_all_equal(*ends)
    chex.assert_trees_all_equal(ends[0][0]["n"], params["n"])


def test_none_for_the_whole_tree_leaves_all_parameters():
    tx = ols.with_loss_scale(optax.adamw(0.1))
    updates, _ = tx.update(None, tx.init(PARAMS), PARAMS)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, PARAMS))


def test_trained_in_turn_each_half_is_as_if_trained_alone():
    """As a GAN's generator and discriminator, through one wrapper."""
    tx = ols.with_loss_scale(optax.scale_by_rss(), 64)  # has no count that both share
    half = lambda name, tree: {k: v if k == name else None for k, v in tree.items()}
    params, state = PARAMS, tx.init(PARAMS)
    for name in ("w", "n", "w", "n"):
        params, state = tx.apply_gradients(half(name, GRADS), state, params)
    for name in PARAMS:
        alone, state = PARAMS[name], tx.init(PARAMS[name])
        for _ in range(2):
            alone, state = tx.apply_gradients(GRADS[name], state, alone)
        chex.assert_trees_all_equal(params[name], alone)


@each_way
def test_a_clip_inside_sees_zeros(way):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = ols.with_loss_scale(inner, 1)
    grads = {"w": None, "n": {"b": jnp.array([3.0])}}
    params, _ = way(tx)(grads, tx.init(PARAMS), PARAMS)
    chex.assert_trees_all_close(params["n"]["b"], PARAMS["n"]["b"] - 1)


def test_a_skipped_step_without_a_gradient_changes_nothing():
    tx = ols.with_loss_scale(optax.adam(0.1))
    state = tx.init(PARAMS)
    grads = {"w": None, "n": {"b": jnp.array([jnp.inf])}}
    params, after = jax.jit(tx.apply_gradients)(grads, state, PARAMS)
    chex.assert_trees_all_equal(params, PARAMS)
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    assert not after.should_apply


@jax.tree_util.register_pytree_node_class
class Layer:
    """A node that refuses None for its children."""

    def __init__(self, w, b):
        if w is None or b is None:
            raise TypeError("a layer has weights and a bias")
        self.w, self.b = w, b

    def tree_flatten(self):
        return (self.w, self.b), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@each_way
def test_a_node_that_refuses_none_is_trained(way):
    params = {"layer": Layer(jnp.ones(2), jnp.ones(1)), "head": jnp.ones(2)}
    tx = ols.with_loss_scale(optax.adam(0.1))
    after, _ = way(tx)(params, tx.init(params), params)
    assert (after["layer"].b < 1).all()
    grads = {"layer": None, "head": params["head"]}
    after, _ = way(tx)(grads, tx.init(params), params)
    assert (after["layer"].b == 1).all()
    assert (after["head"] < 1).all()
    tx = ols.with_loss_scale(optax.sgd(0.1), 4, mask={"layer": False, "head": True})
    after, _ = way(tx)(params, tx.init(params), params)
    assert (after["layer"].w == 0.9).all()


@each_way
def test_the_float0_gradient_of_an_integer_counts_as_missing(way):
    """Even beside a clip, which multiplies what stands in for it."""
    params = {"w": jnp.ones(3), "n": jnp.arange(2)}
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    tx = ols.with_loss_scale(inner, 8)
    state = tx.init(params)
    loss_fn = lambda p: jnp.sum(p["w"] ** 2)
    _, grads = ols.value_and_scaled_grad(loss_fn, state, allow_int=True)(params)
    assert grads["n"].dtype == jax.dtypes.float0
    after, state = jax.jit(way(tx))(grads, state, params)
    assert state.should_apply
    chex.assert_trees_all_equal(after["n"], params["n"])
    assert (after["w"] < 1).all()


def test_a_prng_key_among_the_parameters_stays():
    params = {"w": jnp.array([1.0]), "key": jax.random.key(3)}
    tx = ols.with_loss_scale(optax.adamw(0.5))
    grads = {"w": jnp.array([4.0]), "key": None}
    after, state = jax.jit(tx.apply_gradients)(grads, tx.init(params), params)
    assert (after["key"] == params["key"]).all()
    assert after["w"] < 1
    assert state.should_apply


def test_with_lookahead_it_stays_in_both_trees():
    tx = ols.with_loss_scale(optax.lookahead(optax.sgd(0.1, momentum=0.9), 2, 0.5), 1)
    params = optax.LookaheadParams.init_synced(PARAMS)
    state = tx.init(params)
    for _ in range(3):
        params, state = tx.apply_gradients(GRADS, state, params)
    after, _ = tx.apply_gradients(WITHOUT_W, state, params)
    of_w = lambda both: (both.fast["w"], both.slow["w"])
    chex.assert_trees_all_equal(of_w(after), of_w(params))
    assert (after.fast["n"]["b"] != params.fast["n"]["b"]).all()
