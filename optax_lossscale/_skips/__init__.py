"""Skip rules: which steps to skip although their gradients and loss are finite.

`rule.py` defines the base class, and explains what a rule is for. The other files
define rules, which `optax_lossscale/skips.py` makes public.
"""
