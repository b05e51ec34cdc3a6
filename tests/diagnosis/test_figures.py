"""What two values say of each other, as NumPy computes it of the whole arrays."""

import numpy as np
import pytest

from optax_lossscale._diagnosis.figures import compare


@pytest.mark.parametrize("size", [0, 1, 7, 100_000])
@pytest.mark.parametrize("is_complex", [False, True])
def test_figures_are_those_of_the_whole_arrays(size, is_complex):
    rng = np.random.default_rng(0)
    true = (rng.normal(size=size) * np.exp(rng.normal(size=size) * 9)).astype(
        np.float32
    )
    true[::5] = np.inf
    true[1::11] = np.nan
    if size > 7:
        true[-1] = 3e38  # the largest is in the last of several chunks
    if is_complex:
        low = true = true.astype(np.complex64)
    else:
        with np.errstate(over="ignore"):
            low = true.astype(np.float16)
    known = np.isfinite(true)
    both = known & np.isfinite(low)
    distance = np.linalg.norm(low[both] - true[both].astype(complex))
    lost = both & (low == 0) & (true != 0)
    figures = compare(low, true)
    assert figures.count == size
    assert figures.infinite == np.isinf(true).sum()
    assert figures.undefined == np.isnan(true).sum()
    assert figures.overflowed == (known & ~both).sum()
    assert figures.size == pytest.approx(np.linalg.norm(true[known].astype(complex)))
    assert figures.distance == pytest.approx(distance)
    assert figures.largest == np.abs(true[known]).max(initial=0)
    nonzero = np.count_nonzero(true[known])
    assert figures.lost == pytest.approx(lost.sum() / max(nonzero, 1))
    if figures.overflowed:
        assert figures.error == np.inf
    assert is_complex or size < 100 or 0 < figures.lost < 1
