"""MiGPO: how soon a step's milestone is reached, relative to the same segment."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from crbc_jax.advantages.extras import require_column
from crbc_jax.kernels.returns import (
    at_rows,
    group_advantages,
    normalize,
    penalize_invalid,
    steps_to_end,
    steps_until,
)
from crbc_jax.types import Scalar, TransitionBatch


@functools.partial(jax.jit, static_argnames=("stat_weighting", "normalization"))
def migpo_advantages(
    batch: TransitionBatch,
    *,
    discount: Scalar = 0.95,
    milestone_reward: Scalar = 10.0,
    step_weight: Scalar = 1.0,
    normalization: str = "mean_std",
    stat_weighting: str = "trajectories",
    invalid_action_penalty: Scalar = 0.1,
) -> Float[Array, "groups rows"]:
    """A^E + step_weight * A^seg, the algorithm inside BEACON (arXiv 2605.06078).

    Segment k are the steps after milestone k - 1 up to and including milestone k,
    worth milestone_reward * discount^(steps until milestone k), or 0 if it is never
    reached. A^seg normalises that, minus the step's penalty, over all rows of the
    task group in the same segment. The milestones are privileged annotations, given
    as the column `milestone_achieved`. Step rewards enter A^E alone. The peer's
    ALFWorld launcher differs from its paper: discount 0.9, step_weight 10, "mean".

    Args:
        batch: rows of all groups, with extras["milestone_achieved"], bool.
        discount: per environment step.
        milestone_reward: reward units of a milestone.
        step_weight: factor of A^seg.
        normalization: "mean_std" or "mean", of both parts.
        stat_weighting: of A^E, as in GRPO.
        invalid_action_penalty: reward units an invalid step.
    """
    episode = group_advantages(
        batch,
        stat_weighting=stat_weighting,
        normalization=normalization,
        invalid_action_penalty=invalid_action_penalty,
    )
    num_rows = batch.mask.shape[1]
    reached = batch.mask & require_column(
        batch, "milestone_achieved", "migpo", "did the step reach the next milestone?"
    ).astype(bool)
    steps = steps_until(reached)
    ahead = steps <= steps_to_end(batch)  # Else it is another trajectory's.
    power = jnp.asarray(discount, episode.dtype) ** steps.astype(episode.dtype)
    returns = jnp.where(ahead, milestone_reward * power, 0)
    before = jnp.cumsum(reached, axis=1, dtype=jnp.int32) - reached
    first_row = jnp.arange(num_rows) - jnp.where(batch.mask, batch.step, 0)
    segment = before - at_rows(before, first_row)
    step = normalize(
        penalize_invalid(returns, batch, invalid_action_penalty),
        batch.mask,
        normalization=normalization,
        ids=segment,
        num_ids=num_rows,
    )
    return episode + step_weight * jnp.where(batch.mask, step, 0)
