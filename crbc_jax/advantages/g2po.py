"""G2PO: values of anchors from visits, compared at the anchor and over all edges."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from crbc_jax.kernels.returns import (
    anchor_advantages,
    at_rows,
    group_advantages,
    has_company,
    normalize,
    penalize_invalid,
    rows_ahead,
    set_sums,
    steps_to_end,
    trajectory_totals,
)
from crbc_jax.types import Scalar, TransitionBatch


@functools.partial(jax.jit, static_argnames=("stat_weighting", "normalization"))
def g2po_advantages(
    batch: TransitionBatch,
    *,
    discount: Scalar = 0.95,
    success_reward: Scalar = 10.0,
    step_weight: Scalar = 1.0,
    normalization: str = "mean_std",
    stat_weighting: str = "trajectories",
    invalid_action_penalty: Scalar = 0.1,
) -> Float[Array, "groups rows"]:
    """A^E + step_weight * (A^NC + A^EC) (arXiv 2606.22995).

    An anchor's value is the mean over its visits of discount^(steps left, this one
    counted) * return. A^NC normalises the value of the next anchor, minus the step's
    penalty, among the visits of the anchor; A^EC normalises next value minus own
    value over all rows of the group. The next value of a last step is
    `success_reward`, or 0 on failure. The published code knows success by a return
    of exactly 10 and so takes every success of a step-reward environment for a
    failure; here it is the environment's flag. Uses all rewards of an episode.

    Args:
        batch: rows of all groups.
        discount: per environment step (a constant in the published code).
        success_reward: value of success, in reward units.
        step_weight: factor of A^NC + A^EC.
        normalization: "mean_std" or "mean", of all parts.
        stat_weighting: of A^E, as in GRPO.
        invalid_action_penalty: reward units an invalid step.
    """
    episode = group_advantages(
        batch,
        stat_weighting=stat_weighting,
        normalization=normalization,
        invalid_action_penalty=invalid_action_penalty,
    )
    returns = trajectory_totals(batch.reward, batch)
    left = (steps_to_end(batch) + 1).astype(returns.dtype)
    visit = jnp.asarray(discount, returns.dtype) ** left * returns
    value = _anchor_means(visit, batch)
    final = jnp.where(batch.success, jnp.asarray(success_reward, value.dtype), 0)
    next_value = jnp.where(batch.is_last, final, rows_ahead(value, 1))
    node = anchor_advantages(
        penalize_invalid(next_value, batch, invalid_action_penalty),
        batch,
        normalization=normalization,
    )
    edge = normalize(next_value - value, batch.mask, normalization=normalization)
    edge = jnp.where(batch.mask & has_company(batch), edge, 0)
    return episode + step_weight * (node + edge)


def _anchor_means(values, batch):
    values = jnp.where(batch.mask, values, 0)
    count = set_sums(batch.mask.astype(values.dtype), batch.source, batch.num_anchors)
    total = set_sums(values, batch.source, batch.num_anchors)
    return at_rows(total / jnp.maximum(count, 1), batch.source)
