"""Random programs under autocast: `python tests/autocast/programs.py --minutes 60` runs more."""

import jax.numpy as jnp
import pytest
from against_float32 import scaled_value_and_grad
from pairs import one_in
from programs import HARMLESS, program, sensitivity, tried

SEEDS = range(1000, 1015)


@one_in(8, "seed", {str(seed): seed for seed in SEEDS}, first=1)
def test_a_random_program_computes_what_it_does_in_float32(seed):
    finding = tried(program(seed))
    assert finding.kind in HARMLESS, f"{program(seed)}\n{finding.kind}: {finding.text}"


@pytest.mark.slow
def test_most_random_programs_say_something():
    kinds = [tried(program(seed), autocast=lambda f: f).kind for seed in SEEDS]
    assert kinds.count("dtype") >= 0.5 * len(SEEDS), kinds


def test_the_sensitivity_of_a_product_is_what_float16_rounds():
    step = scaled_value_and_grad(lambda p, x: jnp.sum(jnp.tanh(x @ p)), (0, 1))
    w, x = jnp.eye(3)[::-1] / 3, jnp.arange(1.0, 7).reshape(2, 3)
    found = sensitivity(step, 1.0, w, x)
    assert all(2.0**-14 < error < 2.0**-9 for error in found.values()), found
