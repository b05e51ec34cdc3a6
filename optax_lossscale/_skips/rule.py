"""The abstract skip rule: skips finite steps because of their gradient norm or loss.

A step whose gradients are not finite is skipped in any case. A skip rule is for the
other steps, because gradients that are finite but far larger than usual can undo what a
model has learned. For example, `skips.megatron(10.0)` skips steps whose gradients have
a norm above 10.

The training step computes the norm and calls `update`, which asks `decide`, the method
that each rule defines, and then updates the counts that all rules have.

If a rule skipped nearly all steps, training would silently stop. One of these counts is
therefore the *skip debt*, which rises with each step that the rule skips and falls with
applied ones (`SkipRule.skip_debt`). `raise_if_stuck` raises an error if it becomes too
large.
"""

import abc
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lossscale._arrays.stateful import (
    Stateful,
    as_flag,
    check_successor,
    state_field,
)

APPLIED_PER_SKIP = 20
"""How many applied steps make up for a skipped one.

A heuristic: a rule that keeps skipping more than about 1 step in 20 is assumed to be in
error.
"""

# A debt above this stops growing, so that its int32 never wraps around.
_MAX_DEBT = 2**30


class SkipRule(Stateful):
    """Decides from a step's gradient norm and loss whether to apply the step.

    Pass it to `with_loss_scale` as `skip=rule`. The rule judges steps whose gradients,
    norm and loss are finite. All other steps are skipped anyway and do not count as
    skipped by the rule: `decide` is called for them as well, but its results are
    dropped.

    To write a rule of your own, subclass this class and define `decide`. Subclassing
    alone makes your class a frozen dataclass and a pytree. As in a `LossScale`, declare
    state with `state_field` and change it with `replace`. All other fields are
    configuration, which `get_config` saves. A rule is immutable: `update` returns a new
    one.

    Attributes:
      needs_value: whether the rule needs the step's loss; a bool, which a subclass
        sets.
      gradient_norm: the global L2 norm of the last step's unscaled gradients, or
        infinity if the step was not finite; float32, shape ().
      skipped_by_rule: how many finite steps the rule has skipped so far; int32, shape
        ().
      skip_debt: how many steps must be applied to make up for the skipped ones. Each
        step that the rule skips adds 20, and each applied step whose norm is not 0
        subtracts 1, down to 0. `decide` may set it, as `skips.spikes` does when it
        applies a spike; int32, shape ().

    Example:
      A rule that skips a step if its loss is at least twice the smallest loss so far:

      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> class Doubled(ols.skips.SkipRule):
      ...     needs_value = True
      ...     smallest: jax.Array = ols.state_field(jnp.inf)
      ...
      ...     def decide(self, norm, value):
      ...         smallest = jnp.minimum(self.smallest, value)
      ...         return self.replace(smallest=smallest), value < 2 * smallest
      >>> rule = Doubled()
      >>> for loss in (3.0, 2.0, 5.0):
      ...     rule, should_apply = rule.update(1.0, loss)
      >>> print(should_apply, rule.skipped_by_rule)
      False 1
    """

    _kind = "skip rule"
    needs_value: ClassVar[bool] = False
    gradient_norm: jax.Array = state_field(0.0)
    skipped_by_rule: jax.Array = state_field(0)
    skip_debt: jax.Array = state_field(0)

    @abc.abstractmethod
    def decide(
        self, norm: jax.Array, value: jax.Array | None
    ) -> tuple[Self, jax.Array]:
        """Decides whether to apply one step, assuming that it is finite.

        In a compiled step, both arguments are traced, so select with `jnp.where`
        instead of `if`. This method is also called for steps that are not finite, with
        a norm or a loss of NaN or infinity.

        Args:
          norm: the global L2 norm of the unscaled gradients; float32, shape ().
          value: the unscaled loss; float32, shape (). Unless the rule sets
            `needs_value`, it may be None.

        Returns:
          The new rule, with the same structure, shapes and dtypes as this one, and a
          bool of shape (), True to apply the step. Neither is used if the step is not
          finite.
        """

    def update(
        self, norm: ArrayLike, value: ArrayLike | None = None
    ) -> tuple[Self, jax.Array]:
        """Decides whether to apply one step, assuming it is finite; updates the counts.

        Args:
          norm: the global L2 norm of the unscaled gradients; shape ().
          value: the unscaled loss, shape (), or None.

        Returns:
          The new rule, and `should_apply`, a bool of shape ().

        Raises:
          ValueError: if the rule needs the loss, but `value` is None.
          TypeError: if `decide` returns a rule of another type or configuration, or
            with state of other shapes.
          TypeError: if `decide` returns a flag that does not have shape ().
        """
        norm = jnp.asarray(norm, jnp.float32)
        if value is not None:
            value = jnp.asarray(value, jnp.float32)
        elif self.needs_value:
            raise ValueError(
                f"the rule {type(self).__name__} needs the loss, but the step received "
                "none. Call apply_gradients(grads, state, params, value=loss), or pass "
                "value=loss to update"
            )
        decided, should_apply = self.decide(norm, value)
        check_successor(decided, self, "decide")
        should_apply = as_flag(should_apply, self, "decide")
        skipped = self.skipped_by_rule
        skipped = jnp.where(should_apply, skipped, optax.safe_increment(skipped))
        new = decided.replace(
            gradient_norm=norm,
            skipped_by_rule=skipped,
            skip_debt=decided._next_debt(norm, should_apply),
        )
        return new, should_apply

    def _next_debt(self, norm: jax.Array, should_apply: jax.Array) -> jax.Array:
        """Returns the debt after a step, given what `decide` set; int32, shape ()."""
        # A norm of 0 does not show that steps with other norms are applied, so it pays
        # off nothing. The norm is 0 if all gradients are 0, or so small that their
        # squares underflow, that is, below about 1e-19.
        is_nonzero = norm > 0
        payment = is_nonzero.astype(jnp.int32)
        reduced = jnp.maximum(self.skip_debt - payment, 0)
        increased = jnp.minimum(self.skip_debt, _MAX_DEBT) + APPLIED_PER_SKIP
        return jnp.where(should_apply, reduced, increased)


def with_newest(window: jax.Array, numbers: jax.Array) -> jax.Array:
    """Puts a new element at the front of each row of a window and drops the oldest.

    A window contains the last norms and losses. It has shape (2, length), with the
    newest elements first. `numbers`, the new norm and loss, has shape (2,).
    """
    newest = numbers[:, None]
    without_oldest = window[:, :-1]
    return jnp.concatenate([newest, without_oldest], axis=1)
