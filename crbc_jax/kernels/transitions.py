"""Rows of a batch -> the empirical process of each group: counts, M and b.

The process walks from anchor to anchor as the group's rollouts did; success and
failure are its boundaries, worth 1 and 0. Being cut off by a time limit is failure.
Source: arXiv 2609.35082 (CRBC), section 3.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from crbc_jax.kernels.returns import at_rows, set_sums
from crbc_jax.types import Scalar, TransitionBatch


class Process(NamedTuple):
    """Rows as parts of their anchor's equation, and counts of visits by anchor."""

    weight: Float[Array, "groups rows"]  # 1 / N(source); 0 on padding.
    win: Float[Array, "groups rows"]  # 1 where success follows, else 0.
    move: Float[Array, "groups rows"]  # 1 where an anchor follows, else 0.
    visits: Float[Array, "groups anchors"]  # N(s).
    wins: Float[Array, "groups anchors"]
    moves: Float[Array, "groups anchors"]  # To any anchor.
    loops: Float[Array, "groups anchors"]  # To itself.


def empirical_process(batch: TransitionBatch) -> Process:
    """Counts visits; every visit counts, repeated ones within a rollout too (eq. 5).

    A trapped anchor's moves are left out, so that it is worth 0 at any beta.
    """
    dtype = batch.reward.dtype
    win = batch.mask & batch.is_last & batch.success
    move = batch.mask & ~batch.is_last & ~batch.is_trapped
    loop = move & (batch.target == batch.source)
    kinds = jnp.stack([batch.mask, win, move, loop], axis=-1).astype(dtype)
    counts = set_sums(kinds, batch.source, batch.num_anchors)
    visits, wins, moves, loops = jnp.moveaxis(counts, -1, 0)
    weight = jnp.where(batch.mask, 1 / at_rows(jnp.maximum(visits, 1), batch.source), 0)
    return Process(weight, kinds[..., 1], kinds[..., 2], visits, wins, moves, loops)


def values_ahead(
    value: Float[Array, "groups anchors"], batch: TransitionBatch, process: Process
) -> Float[Array, "groups rows"]:
    """Value of what follows each row: an anchor's, or a boundary's."""
    return process.win + process.move * at_rows(value, batch.target)


def backup(
    value: Float[Array, "groups anchors"],
    beta: Scalar,
    batch: TransitionBatch,
    process: Process,
) -> Float[Array, "groups anchors"]:
    """Applies the Bellman operator of the behaviour policy: b + beta M V (eq. 8)."""
    ahead = values_ahead(value, batch, process)
    return beta * set_sums(process.weight * ahead, batch.source, batch.num_anchors)
