"""The abstract skip rule, which judges finite steps by their gradient norm and loss.

Steps whose gradients are not finite are skipped in any case. A rule judges the others:
gradients that are finite, but far larger than usual, can undo what a model has learned.
The step measures the norm and calls `update`, which asks the rule (`decide`) and keeps
the counts that all rules have. So that a rule cannot stop training unnoticed, skipped
steps are a debt, which applied steps pay off; `raise_if_stuck` raises if it is large.
"""

import abc
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lossscale._arrays.stateful import Stateful, check_successor, state_field

APPLIED_PER_SKIP = 20  # how many applied steps pay off the debt of a skipped one
# From here on, the debt stops growing, so that its int32 never wraps around.
_MAX_DEBT = 2**30


class SkipRule(Stateful):
    """Decides from a step's gradient norm and loss whether to apply the step.

    Pass it to `with_loss_scale` as `skip=rule`. It decides about steps whose gradients,
    norm and loss are finite; all others are skipped anyway, and do not count as skipped
    by the rule. `decide` is called for these, too, but what it returns is dropped.

    A rule is immutable: `update` returns a new one. To write your own, subclass this
    class, which makes it a frozen dataclass and a pytree, and define `decide`. As in a
    `LossScale`, its state is declared with `state_field` and changed with
    `replace`, and `get_config` writes its configuration.

    Attributes:
      needs_value: whether a step must be given its loss; a class attribute.
      gradient_norm: the global L2 norm of the unscaled gradients of the last step,
        infinite if the step was not finite; float32, shape (); state.
      skipped_by_rule: the finite steps skipped so far; int32, shape (); state.
      skip_debt: grows by 20 with each finite step skipped, and falls by 1, down to 0,
        with each one applied whose norm is not 0; int32, shape (); state. `decide` may
        set it, as that of `skips.spikes` does where it applies a spike.

    Example:
      A rule that skips a step whose loss is twice the smallest so far:

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
        """Decides about one step, as if it were finite.

        Args:
          norm: the global L2 norm of the unscaled gradients; float32, shape ().
          value: the true loss, float32, shape (); or None, unless `needs_value`.

        Returns:
          The new rule, with this one's structure, shapes and dtypes; and a bool, True
          to apply the step. Neither is used if the step is not finite.
        """

    def update(
        self, norm: ArrayLike, value: ArrayLike | None = None
    ) -> tuple[Self, jax.Array]:
        """Decides about one step, as if it were finite, and updates the counts.

        Args:
          norm: the global L2 norm of the unscaled gradients; shape ().
          value: the true loss, shape (); or None.

        Returns:
          The new rule, and `should_apply`, a bool, shape ().

        Raises:
          ValueError: if the rule needs the loss, but there is none.
          TypeError: if `decide` returns a rule of another type or configuration, or
            with state of other shapes; or a flag that is not of shape ().
        """
        norm = jnp.asarray(norm, jnp.float32)
        if value is not None:
            value = jnp.asarray(value, jnp.float32)
        elif self.needs_value:
            raise ValueError(
                f"the rule {type(self).__name__} looks at the loss, but the step was "
                "given none: call apply_gradients(grads, state, params, value=loss), "
                "or update with value=loss"
            )
        decided, should_apply = self.decide(norm, value)
        check_successor(decided, self, "decide")
        should_apply = jnp.asarray(should_apply, bool)
        if should_apply.shape:
            raise TypeError(
                f"decide of {type(self).__name__} must return one flag for the step, of "
                f"shape (), got shape {should_apply.shape}: reduce it, say by jnp.all"
            )
        one_more = optax.safe_increment(self.skipped_by_rule)
        new = decided.replace(
            gradient_norm=norm,
            skipped_by_rule=jnp.where(should_apply, self.skipped_by_rule, one_more),
            skip_debt=decided._next_debt(norm, should_apply),
        )
        return new, should_apply

    def _next_debt(self, norm: jax.Array, should_apply: jax.Array) -> jax.Array:
        """The debt after a step, from the one that `decide` left; int32, shape ()."""
        # A step whose norm is 0 teaches and pays off nothing. The norm of numbers that
        # are all below about 1e-19 may be 0, too, as their squares underflow.
        is_nonzero = norm > 0
        paid_off = jnp.maximum(self.skip_debt - is_nonzero.astype(jnp.int32), 0)
        grown = jnp.minimum(self.skip_debt, _MAX_DEBT) + APPLIED_PER_SKIP
        return jnp.where(should_apply, paid_off, grown)


def with_newest(window: jax.Array, numbers: jax.Array) -> jax.Array:
    """A window with a new number at the front of each row, in place of the oldest.

    A window holds the last norms and losses that a rule has seen: its shape is
    (2, length), the newest numbers first. `numbers` has shape (2,).
    """
    newest = numbers[:, None]
    return jnp.concatenate([newest, window[:, :-1]], axis=1)
