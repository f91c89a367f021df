"""RLOO: the trajectory's score against the mean of the others in its group."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from crbc_jax.kernels.returns import has_company, normalize, scores
from crbc_jax.types import Scalar, TransitionBatch


@functools.partial(jax.jit, static_argnames=("stat_weighting",))
def rloo_advantages(
    batch: TransitionBatch,
    *,
    stat_weighting: str = "trajectories",
    invalid_action_penalty: Scalar = 0.1,
) -> Float[Array, "groups rows"]:
    """Leave-one-out baseline, n / (n - 1) * (score - mean) (arXiv 2402.14740).

    n counts trajectories, or rows with `stat_weighting="steps"` (verl-agent's
    default, where the factor is almost 1). A group of one trajectory gets 0 where
    verl-agent keeps the raw score. Uses all rewards of an episode.

    Args:
        batch: rows of all groups.
        stat_weighting: as in GRPO.
        invalid_action_penalty: reward units an invalid step.
    """
    score, members = scores(
        batch,
        stat_weighting=stat_weighting,
        invalid_action_penalty=invalid_action_penalty,
    )
    centred = normalize(score, members, normalization="mean")
    count = jnp.sum(members, axis=1, keepdims=True).astype(centred.dtype)
    advantage = centred * (count / jnp.maximum(count - 1, 1))
    return jnp.where(batch.mask & has_company(batch), advantage, 0)
