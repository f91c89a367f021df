"""GRPO: the trajectory's score relative to its group, on every step."""

import functools

import jax
from jaxtyping import Array, Float

from crbc_jax.kernels.returns import group_advantages
from crbc_jax.types import Scalar, TransitionBatch


@functools.partial(jax.jit, static_argnames=("stat_weighting", "normalization"))
def grpo_advantages(
    batch: TransitionBatch,
    *,
    stat_weighting: str = "trajectories",
    normalization: str = "mean_std",
    invalid_action_penalty: Scalar = 0.1,
) -> Float[Array, "groups rows"]:
    """Group-normalised scores (arXiv 2402.03300; DAPO's differ in the loss alone).

    `normalization="mean"` is Dr.GRPO (arXiv 2503.20783); `stat_weighting="steps"` is
    verl-agent's default. verl-agent's per-trajectory option takes the penalty of the
    first row alone, and it keeps the raw score in a group of one; neither is done
    here. Uses all rewards of an episode.

    Args:
        batch: rows of all groups.
        stat_weighting: "trajectories" counts each trajectory once, its score being
            its return minus the penalty for each invalid step; "steps" counts each
            row, its score being the return minus its own penalty.
        normalization: "mean_std" or "mean".
        invalid_action_penalty: reward units an invalid step.
    """
    return group_advantages(
        batch,
        stat_weighting=stat_weighting,
        normalization=normalization,
        invalid_action_penalty=invalid_action_penalty,
    )
