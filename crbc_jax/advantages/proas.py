"""ProAS: re-weights another method's advantages by what each action achieved."""

import inspect

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from crbc_jax.advantages.extras import require_column
from crbc_jax.kernels.returns import (
    at_rows,
    discounted_sums,
    set_sums,
    trajectory_counts,
)
from crbc_jax.types import TransitionBatch

BASE_COLUMN = "base_adv"  # As `base`: take the advantages from this extra column.


def proas_advantages(
    batch: TransitionBatch, *, base: str = "grpo", **base_options
) -> Float[Array, "groups rows"]:
    """Spares unreasonable steps praise, and weights blame by what came after.

    From a published summary; paper and code were not found. Stated there: where the
    advantage is positive, an unreasonable action gets 0; where it is negative, it is
    multiplied by a weight from the normalised future drift, the number of actions
    from the step on that do not advance. Ours: the step itself is included, weights
    have mean 1 over the trajectory, trajectories without drift and zero advantages
    stay unchanged. With a base that has `step_weight`, the rule goes to its episode
    part, and of its step part only praise of unreasonable actions is taken away.

    Args:
        batch: rows of all groups, with extras["reasonable"] and extras["advancing"]
            (bool; an advancing action is reasonable).
        base: name of the estimator, or "base_adv" for extras["base_adv"].
        **base_options: options of that estimator.
    """
    reasonable = require_column(
        batch, "reasonable", "proas", "was the action reasonable?"
    )
    advancing = require_column(
        batch, "advancing", "proas", "did the action advance a sub-goal?"
    )
    if base == BASE_COLUMN:
        column = require_column(batch, base, "proas", "the advantage to weight")
        return _reweigh(batch, reasonable, advancing, column, column)
    # The table imports this file, so it can be read only once it is complete.
    from crbc_jax.advantages import ESTIMATORS

    estimator = ESTIMATORS[base]
    total = estimator(batch, **base_options)
    episode = total
    if "step_weight" in inspect.signature(estimator).parameters:
        episode = estimator(batch, **{**base_options, "step_weight": 0.0})
    return _reweigh(batch, reasonable, advancing, total, episode)


@jax.jit
def _reweigh(
    batch: TransitionBatch,
    reasonable: Bool[Array, "groups rows"],
    advancing: Bool[Array, "groups rows"],
    total: Float[Array, "groups rows"],
    episode: Float[Array, "groups rows"],
) -> Float[Array, "groups rows"]:
    dtype = batch.reward.dtype
    total, episode = total.astype(dtype), episode.astype(dtype)
    step = total - episode
    future = discounted_sums((~advancing).astype(dtype), batch, 1.0)
    length = trajectory_counts(batch.mask, batch)
    sum_of_future = at_rows(
        set_sums(future, batch.trajectory, batch.num_trajectories), batch.trajectory
    )
    weight = jnp.where(
        sum_of_future > 0, future * length / jnp.maximum(sum_of_future, 1), 1
    )
    weighted = jnp.where(episode < 0, weight * episode, episode)
    praised = jnp.where(weighted > 0, jnp.where(reasonable, weighted, 0), weighted)
    step = jnp.where(step > 0, jnp.where(reasonable, step, 0), step)
    return jnp.where(batch.mask, praised + step, 0)
