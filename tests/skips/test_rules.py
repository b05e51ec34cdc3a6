"""What holds of every skip rule, whatever it is fed, also of one's own."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import skips

RULES = {
    "spikes": skips.spikes(window=16, max_skips=3),
    "spikes, none": skips.spikes(max_skips=0),
    "threshold": skips.threshold(2.0),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
STEPS = 64

# All finite norms that float32 squares come to, and losses as wild.
LARGEST_NORM = float(np.sqrt(np.finfo(np.float32).max))
norms = st.one_of(
    st.sampled_from([0.0, 1e-40, 1e-20, 1.0, 1.001, 2.0, 100.0, LARGEST_NORM]),
    st.floats(0, LARGEST_NORM, width=32),
)
losses = st.one_of(
    st.sampled_from([0.0, -1.0, 1.0, 2.0**127, -(2.0**127)]),
    st.floats(-(2.0**127), 2.0**127, width=32),
)
repeated = lambda numbers: st.lists(
    st.tuples(numbers, st.integers(1, 20)), min_size=1, max_size=20
).map(lambda pairs: np.repeat(*zip(*pairs, strict=True))[:STEPS])  # fmt: skip


@jax.jit
def followed(rule, norms, losses):
    """The last rule, and of each step whether it is applied, whatever else the rule keeps."""

    def step(rule, measured):
        rule, should_apply = rule.update(*measured)
        leaves = [jnp.ravel(x).astype(jnp.float32) for x in jax.tree.leaves(rule)]
        return rule, (should_apply, jnp.isnan(jnp.concatenate(leaves)).any())

    return jax.lax.scan(step, rule, (norms, losses))


@each_rule
@hypothesis.given(norms=repeated(norms), losses=repeated(losses))
def test_no_rule_ever_holds_a_nan_and_each_counts_what_it_skips(rule, norms, losses):
    fill = lambda x: np.resize(x, STEPS).astype(np.float32)
    last, (applied, is_nan) = followed(rule, fill(norms), fill(losses))
    assert not is_nan.any()
    assert last.skipped_by_rule == STEPS - applied.sum()


@each_rule
def test_a_rule_decides_under_jaxs_strictest_settings(rule):
    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with strict[0], strict[1], jax.debug_nans(True):
        jax.eval_shape(lambda rule: rule.update(1.0, 1.0), rule)
        for norm in (1.0, 1.5, 0.0, *[1.0] * 6, 100.0):
            rule, should_apply = rule.update(norm, 1.0)
    assert should_apply == (getattr(rule, "max_skips", 1) == 0)


def test_a_norm_of_the_threshold_itself_is_applied():
    rule = skips.threshold(2.0)
    assert rule.update(2.0)[1]
    assert not rule.update(np.nextafter(np.float32(2), np.float32(100)))[1]


MISTAKEN = {
    "no rule": (
        lambda self, norm, value: norm < 10.0,
        r"Own must return \(rule, should_apply\)",
    ),
    "a flag a number": (
        lambda self, norm, value: (self, jnp.array([True, False])),
        "one flag for the step",
    ),
    "another rule": (
        lambda self, norm, value: (skips.threshold(1.0), True),
        r"Own\.decide returns .*self\.replace\(…\)",
    ),
    "another shape": (
        lambda self, norm, value: (self.replace(seen=jnp.ones(3)), True),
        r"Own\.decide returns .* of the same shapes",
    ),
}


@pytest.mark.parametrize(("decide", "said"), MISTAKEN.values(), ids=MISTAKEN)
def test_a_decision_of_another_form_is_refused(decide, said):
    class Own(skips.SkipRule):
        seen: jax.Array = ols.state_field(0.0)

        def decide(self, norm, value):
            return decide(self, norm, value)

    with pytest.raises(TypeError, match=said):
        Own().update(1.0)
