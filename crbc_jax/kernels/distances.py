"""Transitions of a batch -> steps to success from every anchor, over observed edges."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from crbc_jax.kernels.returns import (
    at_rows,
    num_doublings,
    rows_ahead,
    set_minima,
    steps_until,
)
from crbc_jax.types import TransitionBatch


def success_distances(
    batch: TransitionBatch,
) -> tuple[
    Int[Array, "groups anchors"], Int[Array, "groups rows"], Bool[Array, "groups 1"]
]:
    """Finds the fewest observed transitions from each anchor to success.

    Every row is an edge of cost 1 from its anchor to its target; the last row of a
    successful trajectory leads to success. Shortest paths follow trajectories and
    change over between them at shared anchors. One sweep takes the best row of each
    anchor and carries it back along whole trajectories, so that the number of sweeps
    is the largest number of changes on a shortest path, not its length. The loop
    ends when nothing changes, and the result is exact.

    Returns:
        The distance of each anchor, and that of each row's target; where success
        cannot be reached, the largest finite distance of the group plus 1 (as in
        GraphGPO's code; 1 in a group without success). Last, whether the group has a
        success at all.
    """
    num_groups, num_rows = batch.mask.shape
    unreachable = jnp.int32(num_rows + batch.num_anchors)  # Beyond any distance.
    reaches_success = batch.mask & batch.is_last & batch.success
    edges_left = steps_until(~_joins_next(batch))

    def target_distances(distances):
        return jnp.where(reaches_success, 0, at_rows(distances, batch.target))

    def carry_back(k, rows):
        ahead = rows_ahead(rows, 1 << k) + (1 << k)
        return jnp.where(edges_left >= (1 << k), jnp.minimum(rows, ahead), rows)

    def sweep(carry):
        distances, _ = carry
        rows = jnp.where(batch.mask, target_distances(distances) + 1, unreachable)
        rows = jnp.minimum(rows, at_rows(distances, batch.source))
        rows = jax.lax.fori_loop(0, num_doublings(rows), carry_back, rows)
        shorter = jnp.minimum(
            distances, set_minima(rows, batch.source, batch.num_anchors, unreachable)
        )
        return shorter, jnp.any(shorter != distances)

    start = jnp.full((num_groups, batch.num_anchors), unreachable)
    distances, _ = jax.lax.while_loop(lambda c: c[1], sweep, (start, jnp.bool_(True)))
    targets = target_distances(distances)
    finite = jnp.where(distances < unreachable, distances, 0)
    beyond = jnp.max(finite, axis=1, keepdims=True) + 1
    return (
        jnp.minimum(distances, beyond),
        jnp.minimum(targets, beyond),
        jnp.any(reaches_success, axis=1, keepdims=True),
    )


def _joins_next(batch: TransitionBatch) -> Bool[Array, "groups rows"]:
    """Whether the next row is of the same trajectory and starts where this one led."""
    same = batch.mask & ~batch.is_last
    return same & (batch.target == rows_ahead(batch.source, 1))
