"""HGPO: step returns relative to visits that share ever longer histories."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from crbc_jax.kernels.histories import history_ids
from crbc_jax.kernels.returns import (
    at_rows,
    discounted_sums,
    group_advantages,
    normalize,
    penalize_invalid,
    set_sums,
)
from crbc_jax.types import Scalar, TransitionBatch

_EPSILON = 1e-6  # Added to the sum of weights.


@functools.partial(
    jax.jit,
    static_argnames=(
        "history_length",
        "base_group",
        "stat_weighting",
        "normalization",
    ),
)
def hgpo_advantages(
    batch: TransitionBatch,
    *,
    discount: Scalar = 0.95,
    history_length: int = 2,
    length_weight_alpha: Scalar = 1.0,
    base_group: bool = False,
    normalization: str = "mean_std",
    stat_weighting: str = "trajectories",
    invalid_action_penalty: Scalar = 0.1,
) -> Float[Array, "groups rows"]:
    """Weighted mean over nested sets of visits (arXiv 2602.22817).

    Item k = 1 .. history_length + 1 normalises the step return (as GiGPO's) among the
    rows of the task whose last k anchors agree, with the population deviation; its
    weight is (k + 1)^alpha. `base_group` adds the episode advantage as item 0.
    An item takes part where its set has differing returns. The published code takes
    those whose advantage is not 0 in floats, so that a return equal to the mean of
    its set drops out too, or does not, as the rounding falls.

    Args:
        batch: rows of all groups.
        discount: of the step return, per environment step.
        history_length: anchors before the current one that the longest set shares.
        length_weight_alpha: how much more longer histories weigh.
        base_group: include the episode advantage.
        normalization: "mean_std" or "mean", of all items.
        stat_weighting: of the episode advantage, as in GRPO.
        invalid_action_penalty: reward units an invalid step.
    """
    returns = discounted_sums(batch.reward, batch, discount)
    returns = penalize_invalid(returns, batch, invalid_action_penalty)
    items = []
    if base_group:
        episode = group_advantages(
            batch,
            stat_weighting=stat_weighting,
            normalization=normalization,
            invalid_action_penalty=invalid_action_penalty,
        )
        differs = jnp.any(episode != 0, axis=1, keepdims=True)
        items.append((0, episode, differs))
    num_rows = batch.mask.shape[1]
    histories = history_ids(batch, history_length + 1)
    for k, (ids, exists) in enumerate(histories, start=1):
        num_ids = batch.num_anchors if k == 1 else num_rows
        advantage = normalize(
            returns,
            exists,
            normalization=normalization,
            ids=ids,
            num_ids=num_ids,
            ddof=0,
        )
        advantage = jnp.where(exists, advantage, 0)
        differs = at_rows(set_sums(jnp.abs(advantage), ids, num_ids), ids) > 0
        items.append((k, advantage, differs & exists))
    weighted = jnp.zeros_like(returns)
    weights = jnp.zeros_like(returns)
    for k, advantage, differs in items:
        weight = jnp.where(differs, (k + 1.0) ** length_weight_alpha, 0)
        weighted += weight * advantage
        weights += weight
    return weighted / (weights + _EPSILON)
