"""GraphGPO: how near to success a step leads, over the group's observed graph."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from crbc_jax.kernels.distances import success_distances
from crbc_jax.kernels.returns import (
    anchor_advantages,
    at_rows,
    group_advantages,
    penalize_invalid,
)
from crbc_jax.types import Scalar, TransitionBatch


@functools.partial(
    jax.jit,
    static_argnames=("normalize_distance", "stat_weighting", "normalization"),
)
def graphgpo_advantages(
    batch: TransitionBatch,
    *,
    discount: Scalar = 0.1,
    normalize_distance: bool = False,
    success_reward: Scalar = 10.0,
    step_weight: Scalar = 1.0,
    episode_weight: Scalar = 1.0,
    normalization: str = "mean_std",
    stat_weighting: str = "trajectories",
    invalid_action_penalty: Scalar = 0.1,
) -> Float[Array, "groups rows"]:
    """episode_weight * A^E + step_weight * A^S (arXiv 2605.26684).

    A^S normalises success_reward * discount^d(next anchor), d the fewest observed
    transitions to success, minus the step's penalty, among the visits of its anchor.
    This is the published code; the paper's eq. 4 has one more factor of discount.
    Success is the environment's own flag, where the code tests the return for > 0.
    In a group without success no distance says anything, and A^S is 0; the code
    normalises what the penalty leaves. Step rewards enter A^E alone.

    Args:
        batch: rows of all groups.
        discount: per transition; 0.1 (ALFWorld), 0.2 (WebShop), 0.8 (Sokoban).
        normalize_distance: use d(next) - d(current) + 1, 0 on a shortest path.
        success_reward: scale of the step return, in reward units.
        step_weight: factor of A^S.
        episode_weight: factor of A^E.
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
    anchors, targets, has_success = success_distances(batch)
    exponent = targets
    if normalize_distance:
        exponent = targets - at_rows(anchors, batch.source) + 1
    power = jnp.asarray(discount, episode.dtype) ** exponent.astype(episode.dtype)
    returns = penalize_invalid(success_reward * power, batch, invalid_action_penalty)
    step = anchor_advantages(returns, batch, normalization=normalization)
    step = jnp.where(has_success, step, 0)
    return episode_weight * episode + step_weight * step
