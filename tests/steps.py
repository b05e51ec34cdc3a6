"""The two ways to take a step with gradients that are at hand."""

import optax
import pytest


def by_apply_gradients(tx):
    return tx.apply_gradients


def by_update(tx):
    def step(grads, state, params, **extra_args):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return step


WAYS = {"apply_gradients": by_apply_gradients, "update": by_update}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
each_branch = pytest.mark.parametrize("branch", [None, "cond", "select"])
