"""RTMC: Monte-Carlo action value minus state value, over the group's visits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from crbc_jax.kernels.returns import at_rows, set_minima, set_sums, steps_to_end
from crbc_jax.types import Scalar, TransitionBatch


@jax.jit
def rtmc_advantages(
    batch: TransitionBatch, *, discount: Scalar = 0.95
) -> Float[Array, "groups rows"]:
    """Q(anchor, action) - V(anchor), means of the returns after visits.

    Source: arXiv 2604.11037, known to us by summary. The return is discount^(steps
    left, this one counted) on success and 0 on failure: it reads the outcome alone,
    never step rewards. Ours: every visit counts, not the first alone, and Q is not
    smoothed, since the form of the paper's prior is unknown. This equals CRBC's
    credit at depth 0 before its gate and scale.

    Args:
        batch: rows of all groups.
        discount: per environment step.
    """
    dtype = batch.reward.dtype
    left = (steps_to_end(batch) + 1).astype(dtype)
    reward = (batch.mask & batch.success).astype(dtype)
    returns = jnp.asarray(discount, dtype) ** left * reward
    # Measured from the anchor's smallest, equal returns give exactly 0.
    smallest = set_minima(
        jnp.where(batch.mask, returns, jnp.inf),
        batch.source,
        batch.num_anchors,
        initial=jnp.inf,
    )
    returns = jnp.where(batch.mask, returns - at_rows(smallest, batch.source), 0)
    visits = batch.mask.astype(dtype)

    def mean(ids, num_ids):
        count = at_rows(set_sums(visits, ids, num_ids), ids)
        return count, at_rows(set_sums(returns, ids, num_ids), ids) / jnp.maximum(
            count, 1
        )

    anchor_count, value = mean(batch.source, batch.num_anchors)
    pair_count, action_value = mean(batch.pair, batch.num_pairs)
    compared = batch.mask & (pair_count < anchor_count)
    return jnp.where(compared, action_value - value, 0)
