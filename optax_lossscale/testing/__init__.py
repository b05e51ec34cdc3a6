from optax_lossscale.testing._loss_scales import (
    assert_scale_invariant,
    assert_survives_overflow,
)
