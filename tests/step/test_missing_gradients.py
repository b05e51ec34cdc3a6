"""A parameter whose gradient is None stays, and so do its own slots of the inner state."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

PARAMS = {"w": jnp.array([1.0, -2.0]), "n": {"b": jnp.array([0.25])}}
GRADS = jax.tree.map(lambda p: 64 * (p + 1), PARAMS)
WITHOUT_W = {"w": None, "n": GRADS["n"]}
is_w = lambda params: {"w": True, "n": False}

INNER = {
    "adam": optax.adam(0.1),
    "sm3": optax.sm3(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "masked": optax.masked(optax.adam(0.1), is_w),
    "partition": optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)}, {"w": "a", "n": "b"}
    ),
    "injected": optax.inject_hyperparams(optax.adam)(0.1),
    "accumulated": optax.MultiSteps(optax.adam(0.1), 2),
    "master weights": ols.with_master_weights(optax.adam(0.1)),
}
each_inner = pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
each_door = pytest.mark.parametrize("door", ["apply_gradients", "update"])


def step_through(door, tx, grads, state, params):
    if door == "apply_gradients":
        return tx.apply_gradients(grads, state, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def slots_of(name, state):
    """The leaves of an optimizer state that belong to one parameter, by their paths."""
    leaves, _ = jax.tree.flatten_with_path(state)
    named = lambda path: any(getattr(key, "key", None) == name for key in path)
    return {jax.tree_util.keystr(path): x for path, x in leaves if named(path)}


@each_door
@each_inner
def test_its_parameter_and_slots_stay_and_the_others_move_on(inner, door):
    tx = ols.with_loss_scale(inner, ols.DynamicLossScale(64.0))
    params, state = step_through(door, tx, GRADS, tx.init(PARAMS), PARAMS)
    after, moved = step_through(door, tx, WITHOUT_W, state, params)
    chex.assert_trees_all_equal(after["w"], params["w"])
    before = slots_of("w", state.inner_state)
    assert before
    chex.assert_trees_all_equal(slots_of("w", moved.inner_state), before)
    rest = lambda s: jax.tree.leaves(s.inner_state)
    assert any((a != b).any() for a, b in zip(rest(state), rest(moved), strict=True))


def test_trained_in_turn_each_half_is_as_if_trained_alone():
    """As a GAN's generator and discriminator, through one wrapper."""
    optimizer = optax.scale_by_rss()  # no shared count: each half is on its own
    tx = ols.with_loss_scale(optimizer, 64)
    params, state = PARAMS, tx.init(PARAMS)
    alone = {name: ols.with_loss_scale(optimizer, 64) for name in PARAMS}
    each = {name: (PARAMS[name], alone[name].init(PARAMS[name])) for name in PARAMS}
    for turn in range(4):
        name = ("w", "n")[turn % 2]
        grads = {k: GRADS[k] if k == name else None for k in GRADS}
        grads = {"w": grads["w"], "n": grads["n"] or {"b": None}}
        params, state = tx.apply_gradients(grads, state, params)
        each[name] = alone[name].apply_gradients(
            GRADS[name], each[name][1], each[name][0]
        )
    for name in PARAMS:
        chex.assert_trees_all_equal(params[name], each[name][0])


@each_door
@each_inner
def test_none_for_a_whole_branch_is_none_for_each_of_its_leaves(inner, door):
    tx = ols.with_loss_scale(inner, ols.DynamicLossScale(64.0))
    params, state = step_through(door, tx, GRADS, tx.init(PARAMS), PARAMS)
    ends = [
        step_through(door, tx, {"w": GRADS["w"], "n": none}, state, params)
        for none in (None, {"b": None})
    ]
    chex.assert_trees_all_equal(*ends)
    chex.assert_trees_all_equal(ends[0][0]["n"], params["n"])


def test_none_for_the_whole_tree_leaves_all_parameters():
    tx = ols.with_master_weights(optax.adam(0.1))
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    updates, _ = tx.update(None, tx.init(params), params)
    chex.assert_trees_all_equal(optax.apply_updates(params, updates), params)


def test_a_gradient_for_a_branch_of_parameters_is_refused():
    tx = ols.with_loss_scale(optax.sgd(0.1))
    with pytest.raises(ValueError, match="must have the structure of the parameters"):
        tx.update({"w": GRADS["w"], "n": jnp.ones(1)}, tx.init(PARAMS), PARAMS)


def test_no_paths_are_named_where_only_containers_differ():
    tx = ols.with_loss_scale(optax.sgd(0.1))
    params = (jnp.ones(2),)
    with pytest.raises(ValueError, match=r"where there is no gradient\.\nGradients"):
        tx.update([jnp.ones(2)], tx.init(params), params)


@each_door
def test_a_clip_inside_sees_zeros(door):
    tx = ols.with_loss_scale(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), 1
    )
    grads = {"w": None, "n": {"b": jnp.array([3.0])}}
    params, _ = step_through(door, tx, grads, tx.init(PARAMS), PARAMS)
    chex.assert_trees_all_close(params["n"]["b"], PARAMS["n"]["b"] - 1)


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


@each_door
def test_a_node_that_refuses_none_is_trained(door):
    params = {"layer": Layer(jnp.ones(2), jnp.ones(1)), "head": jnp.ones(2)}
    for branch in ("cond", "select"):
        tx = ols.with_loss_scale(optax.adam(0.1), branch=branch)
        state = tx.init(params)
        after, _ = step_through(door, tx, params, state, params)
        assert (after["layer"].b < 1).all()
        grads = {"layer": None, "head": params["head"]}
        after, _ = step_through(door, tx, grads, state, params)
        assert (after["layer"].b == 1).all()
        assert (after["head"] < 1).all()


@each_door
def test_a_mask_may_exclude_a_node_that_refuses_none(door):
    params = {"layer": Layer(jnp.ones(2), jnp.ones(1)), "head": jnp.ones(2)}
    mask = {"layer": False, "head": True}
    tx = ols.with_loss_scale(optax.sgd(1.0), 4, mask=mask)
    grads = {"layer": params["layer"], "head": jnp.full(2, 2.0)}
    after, state = step_through(door, tx, grads, tx.init(params), params)
    assert state.should_apply
    assert (after["layer"].w == 0).all()
    assert (after["head"] == 0.5).all()


def test_a_skipped_step_without_a_gradient_changes_nothing():
    tx = ols.with_loss_scale(optax.adam(0.1))
    state = tx.init(PARAMS)
    grads = {"w": None, "n": {"b": jnp.array([jnp.inf])}}
    params, after = jax.jit(tx.apply_gradients)(grads, state, PARAMS)
    chex.assert_trees_all_equal(params, PARAMS)
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    assert not after.should_apply


def test_the_float0_gradient_of_an_integer_counts_as_missing():
    params = {"w": jnp.array([1.0]), "steps": jnp.array([3])}
    tx = ols.with_loss_scale(optax.sgd(0.5), 8)
    loss_fn = lambda p: jnp.sum(p["w"] ** 2)
    state = tx.init(params)
    grads = ols.value_and_scaled_grad(loss_fn, state, allow_int=True)(params)[1]
    assert grads["steps"].dtype == jax.dtypes.float0
    for door in ("apply_gradients", "update"):
        after, _ = step_through(door, tx, grads, state, params)
        chex.assert_trees_all_equal(
            after, {"w": jnp.array([0.0]), "steps": jnp.array([3])}
        )


@pytest.mark.parametrize(
    "inner", [optax.sgd(0.5), optax.adamw(0.5)], ids=["sgd", "adamw"]
)
def test_a_prng_key_among_the_parameters_stays(inner):
    params = {"w": jnp.array([1.0]), "key": jax.random.key(3)}
    tx = ols.with_loss_scale(inner)
    grads = {"w": jnp.array([4.0]), "key": None}
    after, state = jax.jit(tx.apply_gradients)(grads, tx.init(params), params)
    np.testing.assert_array_equal(
        jax.random.key_data(after["key"]), jax.random.key_data(params["key"])
    )
    assert after["w"] < 1
    assert state.should_apply


def test_an_inner_state_that_cannot_be_told_apart_is_refused():
    init = lambda params: jnp.concatenate(jax.tree.leaves(params))
    inner = optax.GradientTransformation(
        init, lambda updates, state, params=None: (updates, state)
    )
    tx = ols.with_loss_scale(inner)
    with pytest.raises(Exception, match="concatenate"):
        tx.apply_gradients(WITHOUT_W, tx.init(PARAMS), PARAMS)


def test_with_lookahead_it_stays_in_both_trees():
    tx = ols.with_loss_scale(optax.lookahead(optax.sgd(0.1, momentum=0.9), 2, 0.5), 1)
    params = optax.LookaheadParams.init_synced(PARAMS)
    state = tx.init(params)
    for _ in range(3):
        params, state = tx.apply_gradients(GRADS, state, params)
    after, _ = tx.apply_gradients(WITHOUT_W, state, params)
    chex.assert_trees_all_equal(
        (after.fast["w"], after.slow["w"]), (params.fast["w"], params.slow["w"])
    )
    assert (after.fast["n"]["b"] != params.fast["n"]["b"]).all()


@pytest.mark.parametrize("door", ["apply_gradients", "update"])
def test_an_integer_beside_a_clip_stays(door):
    """JAX's gradient of an integer is a float0; a clip multiplies what stands in for it."""
    params = {"w": jnp.ones(3), "n": jnp.arange(2)}
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    tx = ols.with_loss_scale(inner, 8)
    state = tx.init(params)
    loss_fn = lambda p: jnp.sum(p["w"] ** 2)
    gradient = ols.value_and_scaled_grad(loss_fn, state, allow_int=True)
    _, grads = gradient(params)
    if door == "apply_gradients":
        after, state = jax.jit(tx.apply_gradients)(grads, state, params)
    else:
        updates, state = tx.update(grads, state, params)
        after = optax.apply_updates(params, updates)
    assert state.should_apply
    np.testing.assert_array_equal(after["n"], params["n"])
    assert after["n"].dtype == params["n"].dtype
    assert (after["w"] < 1).all()
