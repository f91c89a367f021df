"""GiGPO: the group's score, plus the step's return relative to its anchor."""

import functools

import jax
from jaxtyping import Array, Float

from crbc_jax.kernels.returns import (
    anchor_advantages,
    discounted_sums,
    group_advantages,
    penalize_invalid,
)
from crbc_jax.types import Scalar, TransitionBatch


@functools.partial(jax.jit, static_argnames=("stat_weighting", "normalization"))
def gigpo_advantages(
    batch: TransitionBatch,
    *,
    discount: Scalar = 0.95,
    step_weight: Scalar = 1.0,
    normalization: str = "mean_std",
    stat_weighting: str = "trajectories",
    invalid_action_penalty: Scalar = 0.1,
) -> Float[Array, "groups rows"]:
    """A^E + step_weight * A^S (arXiv 2505.10978).

    A^S normalises the discounted return from a step, minus its own penalty, among
    all visits of the same anchor in the group; a visit alone gets 0. Anchors match
    exactly: the peer's similarity clustering depends on the order of rows and is not
    reproduced. Uses the reward of every step.

    Args:
        batch: rows of all groups.
        discount: of the step return, per environment step.
        step_weight: factor of A^S.
        normalization: "mean_std" or "mean", of both parts.
        stat_weighting: of A^E, as in GRPO.
        invalid_action_penalty: reward units an invalid step; it is not discounted
            back to earlier steps.
    """
    episode = group_advantages(
        batch,
        stat_weighting=stat_weighting,
        normalization=normalization,
        invalid_action_penalty=invalid_action_penalty,
    )
    returns = discounted_sums(batch.reward, batch, discount)
    returns = penalize_invalid(returns, batch, invalid_action_penalty)
    step = anchor_advantages(returns, batch, normalization=normalization)
    return episode + step_weight * step
