"""Gated-BEPO: residuals of the closure along trajectories, where states branch."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from crbc_jax.kernels.closure import MAX_RESIDUAL, solve_closure
from crbc_jax.kernels.returns import (
    at_rows,
    discounted_sums,
    group_advantages,
    normalize,
    set_minima,
)
from crbc_jax.types import Scalar, TransitionBatch

_ROUNDING = 16  # Units in the last place of 1 that a solved residual may be off.


@functools.partial(jax.jit, static_argnames=("stat_weighting", "normalization"))
def gated_bepo_advantages(
    batch: TransitionBatch,
    *,
    discount: Scalar = 0.95,
    gae_lambda: Scalar = 0.95,
    mix: Scalar = 0.5,
    normalization: str = "mean_std",
    stat_weighting: str = "trajectories",
    invalid_action_penalty: Scalar = 0.1,
) -> Float[Array, "groups rows"]:
    """Mixes episode advantage and Bellman credit where a state leads to several.

    Source: arXiv 2608.06861, of which the abstract was read. Stated there: values are
    the fixed point of mean backups under the empirical policy; residuals are
    accumulated along each trajectory by GAE; the gate takes them only at states with
    two or more distinct observed successors. Ours: all numbers; success is worth 1
    and discounted once on the last step, as in CRBC, so that residuals average to 0
    at every anchor; A^B is the accumulated residual normalised over the gated rows of
    the group; A = (1 - mix) A^E + mix A^B there and A^E elsewhere, a constant for the
    paper's adaptive mixing; the penalty enters A^E alone. Boundaries count as
    successors. Step rewards enter A^E alone.

    Args:
        batch: rows of all groups.
        discount: per transition, in (0, 1].
        gae_lambda: decay of the residuals.
        mix: share of A^B at gated rows, in [0, 1].
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
    closure = solve_closure(batch, discount)
    value = at_rows(closure.value, batch.source)
    boundary = (batch.success & batch.mask).astype(value.dtype)
    ahead = jnp.where(batch.is_last, boundary, at_rows(closure.value, batch.target))
    residual = discount * ahead - value
    # What is 0 in exact arithmetic must be 0 here, or normalising would blow it up.
    rounding = _ROUNDING * jnp.finfo(value.dtype).eps
    residual = jnp.where(jnp.abs(residual) <= rounding, 0, residual)
    accumulated = discounted_sums(residual, batch, discount * gae_lambda)

    sound = (closure.residual <= MAX_RESIDUAL)[:, None]
    gate = batch.mask & sound & _branches(batch)
    bellman = normalize(accumulated, gate, normalization=normalization)
    return jnp.where(gate, (1 - mix) * episode + mix * bellman, episode)


def _branches(batch: TransitionBatch) -> Bool[Array, "groups rows"]:
    """Whether a row's anchor has two or more distinct successors."""
    success, failure = batch.num_anchors, batch.num_anchors + 1
    successor = jnp.where(
        batch.is_last, jnp.where(batch.success, success, failure), batch.target
    )
    largest = failure + 1
    successor = jnp.where(batch.mask, successor, largest)
    low = set_minima(successor, batch.source, batch.num_anchors, largest)
    # The largest successor, as the smallest of what is left to the top.
    complement = jnp.where(batch.mask, largest - successor, largest)
    high = largest - set_minima(complement, batch.source, batch.num_anchors, largest)
    return at_rows(low, batch.source) < at_rows(high, batch.source)
