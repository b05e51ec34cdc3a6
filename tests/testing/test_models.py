"""Right models in float16 are accused of nothing, at ten seeds each."""

import pytest
from pairs import quick
from trained_models import MODELS

import optax_lossscale as ols


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_trains_in_float16_is_not_accused(name, seed):
    step, arguments = MODELS[name](seed)
    ols.testing.assert_scale_invariant(step, *arguments)


@quick("name", [*MODELS], "attention", "bfloat16 resnet")
def test_a_model_that_trains_in_float16_survives_an_overflow(name):
    step, arguments = MODELS[name](0)
    ols.testing.assert_survives_overflow(step, *arguments)
