"""Skip rules: which steps to skip although their gradients and loss are finite.

Start with `rule.py`, which defines the base class and explains what a rule is for. The
other files define rules, which `optax_lossscale/skips.py` makes public: the simplest in
`threshold.py`, and the recommended one in `spikes.py`.
"""
