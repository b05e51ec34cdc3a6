"""How far sums of many gradients in float16 are from those in float32."""

import numpy as np

RNG = np.random.default_rng(0)


def one_by_one(gradients: np.ndarray) -> np.ndarray:
    """The sum over the first axis as a ring of devices makes it."""
    total = gradients[0]
    for gradient in gradients[1:]:
        total = (total + gradient).astype(np.float16)
    return total


def pairwise(gradients: np.ndarray) -> np.ndarray:
    """The same as a tree of devices makes it."""
    while len(gradients) > 1:
        if len(gradients) % 2:
            gradients = np.concatenate([gradients, np.zeros_like(gradients[:1])])
        gradients = (gradients[::2] + gradients[1::2]).astype(np.float16)
    return gradients[0]


def error(sums: np.ndarray, gradients: np.ndarray) -> float:
    """Relative to the norm of the true sums."""
    true = gradients.astype(np.float64).sum(0)
    return float(np.linalg.norm(sums - true) / np.linalg.norm(true))


if __name__ == "__main__":
    for devices in (8, 1000):
        found = (1 + 10 * RNG.standard_normal((devices, 20_000))).astype(np.float16)
        for way in (one_by_one, pairwise):
            off = error(way(found).astype(np.float64), found)
            print(f"{devices} devices, {way.__name__}: {off:.2%} off")
    for times in (1000, 4096):
        found = np.full((times, 1), 0.1, np.float16)
        off = error(one_by_one(found).astype(np.float64), found)
        print(
            f"a token that occurs {times} times, each with the same gradient: {off:.0%} off"
        )
