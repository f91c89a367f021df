"""Anchors of a batch -> sets of rows that share their last few anchors."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt

from crbc_jax.types import TransitionBatch


def history_ids(
    batch: TransitionBatch, num_lengths: int
) -> list[tuple[Int[Array, "groups rows"], Bool[Array, "groups rows"]]]:
    """Names, for k = 1 .. num_lengths, the last k anchors of every row.

    Two rows share their last k + 1 anchors if they share the last k now and also did
    one row earlier. So each length is found from the one before.

    Returns:
        Per k: ids in [0, rows), equal within a group if and only if the last k anchors
        (the current one included) are; and the rows that have k anchors behind them
        in their trajectory.
    """
    mask = batch.mask
    histories = [(batch.source, mask)]
    for k in range(1, num_lengths):
        ids, exists = histories[-1]
        exists = mask & (batch.step >= k)
        histories.append((intern_pairs(ids, jnp.roll(ids, 1, axis=1), exists), exists))
    return histories


def intern_pairs(
    first: Int[Array, "groups rows"],
    second: Int[Array, "groups rows"],
    mask: Bool[Array, "groups rows"],
) -> Int[Array, "groups rows"]:
    """Numbers distinct pairs: each row gets the index of the first row equal to it.

    By hashing, with every match verified: the pairs are thrown into a table, the
    earliest row of each slot leads, rows equal to their leader are settled, and the
    rest try another hash. Each round settles at least the leaders, so it ends, and
    the result does not depend on the hash. Sorting takes ten times as long on CPU.
    Rows outside the mask get their own index.
    """
    num_groups, num_rows = first.shape
    num_slots = 2 * num_rows
    row = jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32), first.shape)

    def elect(carry):
        ids, pending, salt = carry
        slot = (_hash(first, second, salt) % jnp.uint32(num_slots)).astype(jnp.int32)
        slot = jnp.where(pending, slot, num_slots)  # Dropped.
        table = jnp.full(num_slots, num_rows - 1, jnp.int32)
        table = jax.vmap(lambda s, r: table.at[s].min(r, mode="drop"))(slot, row)
        take = jax.vmap(lambda values, index: values[index])
        leader = take(table, jnp.minimum(slot, num_slots - 1))
        equal = (take(first, leader) == first) & (take(second, leader) == second)
        settled = pending & equal
        return jnp.where(settled, leader, ids), pending & ~equal, salt + 1

    ids, _, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1]), elect, (row, mask, jnp.uint32(1))
    )
    return ids


def _hash(first, second, salt) -> UInt[Array, "groups rows"]:
    """Mixes two numbers and a salt (multipliers of xxHash32 and MurmurHash3)."""
    mixed = first.astype(jnp.uint32) * jnp.uint32(2654435761)
    mixed ^= (second.astype(jnp.uint32) + salt) * jnp.uint32(2246822519)
    mixed ^= mixed >> 15
    mixed *= jnp.uint32(0x85EBCA6B) + 2 * salt
    return mixed ^ (mixed >> 13)
