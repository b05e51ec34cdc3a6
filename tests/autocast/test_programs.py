"""Random programs under autocast: `python tests/autocast/programs.py --minutes 60` runs more."""

import jax
import jax.numpy as jnp
import pytest
from pairs import one_in
from programs import PRODUCTS_OF_JAX, Sensitivity, program, tried

HARMLESS = ("", "ill-conditioned", "out of range", "no program")
SEEDS = range(1000, 1005)


@one_in(2, "seed", {str(seed): seed for seed in SEEDS}, first=1)
def test_a_random_program_computes_what_it_does_in_float32(seed):
    finding = tried(program(seed))
    assert finding.kind in HARMLESS, f"{program(seed)}\n{finding.kind}: {finding.text}"


@pytest.mark.slow
@pytest.mark.parametrize("start", range(2101, 2113, 3))
def test_many_random_programs_compute_what_they_do_in_float32(start):
    for seed in range(start, start + 3):
        finding = tried(program(seed))
        assert finding.kind in HARMLESS, (
            f"{program(seed)}\n{finding.kind}: {finding.text}"
        )


@pytest.mark.slow
def test_most_random_programs_say_something():
    kinds = [tried(program(seed), autocast=lambda f: f).kind for seed in SEEDS]
    assert kinds.count("dtype") >= 0.6 * len(SEEDS), kinds


def sensitivity(fun):
    """How far a function of the parameters w and an input moves, in its gradients."""
    p, x = {"w": jnp.eye(3)[::-1] / 3}, jnp.arange(1.0, 7).reshape(2, 3)
    return Sensitivity(fun, PRODUCTS_OF_JAX, p, x).errors(1.0)["[1][0]['w']"]


def test_a_program_with_infinite_numbers_is_moved():
    """Such as those with which a maximum begins; moved, they would be NaN."""

    def fun(p, x):
        most = jax.ops.segment_max(x @ p["w"], jnp.array([0, 2]), 4)
        return jnp.sum(jnp.where(jnp.isinf(most), 0, most) ** 2)

    assert sensitivity(fun) > 1e-4


def test_what_a_program_rounds_to_16_bits_may_become_the_next_number_there():
    """A gradient in bfloat16 is off by 2**-8 where it is rounded up, and not down."""

    def fun(p, x):
        return jnp.sum(
            (x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32)
        )

    assert sensitivity(fun) > 2.0**-9
