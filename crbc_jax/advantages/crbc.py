"""CRBC: group advantage of the trajectory plus closure credit of the action."""

import functools

import jax
from jaxtyping import Array, Float

from crbc_jax.kernels.closure import closure_credit
from crbc_jax.kernels.groups import in_chunks
from crbc_jax.kernels.returns import group_advantages
from crbc_jax.types import Scalar, TransitionBatch


@functools.partial(jax.jit, static_argnames=("depth", "stat_weighting"))
def crbc_advantages(
    batch: TransitionBatch,
    *,
    beta: Scalar = 0.98,
    depth: int = -1,
    sigma_min: Scalar = 0.1,
    group_weight: Scalar = 1.0,
    step_weight: Scalar = 5.0,
    stat_weighting: str = "trajectories",
    invalid_action_penalty: Scalar = 0.1,
) -> Float[Array, "groups rows"]:
    """A = group_weight * A^G + step_weight * A^S (eq. 14 of arXiv 2609.35082).

    A^S is the closure credit of eq. 13, shared by all visits of an (anchor, action);
    it is 0 where an anchor saw one action only, and throughout a group whose system
    could not be solved. Nothing is normalised after the sum. The penalty of invalid
    actions enters A^G alone: the process has no intermediate reward.

    Args:
        beta: discount a transition, in (0, 1].
        depth: Bellman backups of the Monte-Carlo values; -1 is the full closure.
        sigma_min: floor of the credit's scale.
        group_weight, step_weight: of the two parts.
        stat_weighting: "trajectories" is eq. 3, each trajectory counting once;
            "steps" is verl-agent's default, which the paper's runs most likely used.
        invalid_action_penalty: reward units an invalid step.
    """

    def advantages(batch):
        group = group_advantages(
            batch,
            stat_weighting=stat_weighting,
            normalization="mean_std",
            invalid_action_penalty=invalid_action_penalty,
        )
        step = closure_credit(batch, beta=beta, depth=depth, sigma_min=sigma_min)
        return group_weight * group + step_weight * step.credit

    return in_chunks(advantages, batch)
