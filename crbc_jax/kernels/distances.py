"""Transitions of a batch -> steps to success from every anchor, over observed edges."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from crbc_jax.kernels.returns import at_rows, set_minima, shift_rows
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
    target_known = batch.mask & (batch.target >= 0) & (batch.target < batch.num_anchors)
    links = _links(batch)

    def target_distances(distances):
        known = jnp.where(target_known, at_rows(distances, batch.target), unreachable)
        return jnp.where(reaches_success, 0, known)

    def sweep(carry):
        distances, _ = carry
        rows = jnp.where(batch.mask, target_distances(distances) + 1, unreachable)
        rows = jnp.minimum(rows, at_rows(distances, batch.source))
        for offset, linked in links:
            ahead = shift_rows(rows, offset) + offset
            rows = jnp.where(linked, jnp.minimum(rows, ahead), rows)
        rows = jnp.where(batch.mask, rows, unreachable)
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


def _links(batch):
    """Offsets 1, 2, 4, ... and the rows from which that many edges join up."""
    linked = (
        batch.mask
        & ~batch.is_last
        & shift_rows(batch.mask, 1, fill=False)
        & (batch.target == shift_rows(batch.source, 1, fill=-1))
    )
    links, offset = [], 1
    while offset < batch.mask.shape[1]:
        links.append((offset, linked))
        linked = linked & shift_rows(linked, offset, fill=False)
        offset *= 2
    return links
