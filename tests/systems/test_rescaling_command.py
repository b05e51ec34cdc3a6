"""`python -m benchmarks rescaling`: what it compares, and that it writes what the page shows."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import _rescaling
from benchmarks._deep import MODELS
from optax_lossscale import experimental

CHAIN = MODELS["chain of 1.5 bits a block"]


def test_a_traced_margin_gives_the_gradients_of_the_margin_itself():
    params = CHAIN.init(jax.random.key(0))
    batch = CHAIN.batch(jax.random.key(1))

    def grads(boundaries):
        return jax.grad(_rescaling._loss(CHAIN, jnp.float16, boundaries))(params, batch)

    def with_margin(bits):
        block = lambda block: experimental.rescale(block, margin=bits)
        return _rescaling.Boundaries(experimental.enter, block, experimental.leave)

    traced = jax.jit(lambda bits: grads(_rescaling._with_margin(bits)))
    finite = []
    for bits in (2, 16):
        expected = jax.jit(lambda bits=bits: grads(with_margin(bits)))()
        jax.tree.map(np.testing.assert_array_equal, traced(jnp.float32(bits)), expected)
        finite.append(all(jnp.isfinite(g).all() for g in jax.tree.leaves(expected)))
    assert finite == [False, True]


@pytest.mark.slow
def test_the_quick_command_shows_the_rescue_of_the_chain(tmp_path, monkeypatch, capsys):
    arguments = ["benchmarks", "rescaling", "--quick", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    command.main()
    found = json.loads((tmp_path / "rescaling.json").read_text())
    (chain,) = found["cases"]
    loss = {way: np.mean(of_way["loss"]) for way, of_way in chain["ways"].items()}
    assert abs(loss["rescaled blocks"] - loss["float32"]) < 0.01
    assert min(loss["best fixed"], loss["dynamic"], loss["headroom"]) > loss["float32"] + 0.05
    pictures = {"rescaling_losses.png", "rescaling_exponents.png"}
    assert pictures < {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "rescaling.md").read_text() in capsys.readouterr().out

    before = (tmp_path / "rescaling.md").read_text()
    (tmp_path / "rescaling.md").unlink()
    monkeypatch.setattr(sys, "argv", [*arguments, "--report"])
    command.main()
    assert (tmp_path / "rescaling.md").read_text() == before
