"""Prompts and replies -> token rows, several sequences a row, told apart by ids.

Host side, NumPy. A segment is a prompt and its reply, exactly as served, one after the
other. Several replies may share one prompt: each then is a branch, which sees the
prompt and itself, at the positions that it was sampled at. What a token computes is
thus the same wherever its segment lies.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

_Ndarray = Array | np.ndarray


class Rows(NamedTuple):
    """Token rows; leading axes `batch` are [rows] or [microbatches, rows]."""

    tokens: Int[_Ndarray, "*batch length"]
    positions: Int[_Ndarray, "*batch length"]  # Within the sequence, from 0.
    segment_ids: Int[_Ndarray, "*batch length"]  # From 1 in each row, 0 = padding.
    # Of a segment's replies, from 1; 0 = prompt. None where no prompt is shared.
    branch_ids: Int[_Ndarray, "*batch length"] | None
    # Slot of the token before each response token: its state predicts that token.
    response_index: Int[_Ndarray, "*batch responses"]
    response_ids: Int[_Ndarray, "*batch responses"]
    response_mask: Bool[_Ndarray, "*batch responses"]  # True = sampled by the policy.
    step_ids: Int[_Ndarray, "*batch responses"]  # Reply within the row, from 0.


class Segment(NamedTuple):
    """A prompt and the replies to it."""

    prompt_ids: Int[np.ndarray, " tokens"]  # Not empty.
    replies: Sequence[Int[np.ndarray, " tokens"]]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + sum(map(len, self.replies))


def fit(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Puts items into rows of `limit` slots, few of them: first fit, longest first.

    With items of at most `longest` slots each, every row but one holds at least
    limit // longest of them.

    Args:
        lengths: slots of each item, none above `limit`.

    Returns:
        The numbers of the items in each row.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    rows: list[list[int]] = []
    free = np.full(len(order), limit, np.int64)  # Of rows not begun too.
    for item in order.tolist():
        row = int(np.argmax(free[: len(rows) + 1] >= lengths[item]))
        if row == len(rows):
            rows.append([])
        rows[row].append(item)
        free[row] -= lengths[item]
    return rows


def fill_rows(
    rows: Sequence[Sequence[Segment]],
    *,
    num_rows: int,
    length: int,
    num_responses: int,
    has_branches: bool = False,
) -> Rows:
    """Lays the segments of each row from its slot 0; surplus rows are all padding.

    The caller sees to it that everything fits: tokens into `length`, those of replies
    into `num_responses`, rows into `num_rows`. Response slots of a row are filled from
    0 in the order of its replies. Segments of several replies need `has_branches`.
    """
    pieces, starts, segments, branches, positions = [], [], [], [], []
    replies, slots, before, first, steps = [], [], [], [], []
    for row, contents in enumerate(rows):
        slot, response, step = row * length, row * num_responses, 0
        for number, segment in enumerate(contents, start=1):
            prompt_end = slot + len(segment.prompt_ids)
            for branch, ids in enumerate((segment.prompt_ids, *segment.replies)):
                pieces.append(ids)
                starts.append(slot)
                segments.append(number)
                branches.append(branch)
                positions.append(len(segment.prompt_ids) if branch else 0)
                if branch:
                    replies.append(ids)
                    slots.append(response)
                    before.append(slot - row * length - 1)
                    first.append(prompt_end - row * length - 1)
                    steps.append(step)
                    response += len(ids)
                    step += 1
                slot += len(ids)
    counts, response_counts = (
        np.array([len(ids) for ids in part], np.int64) for part in (pieces, replies)
    )

    def lay(width, where, values, dtype=np.int32):
        array = np.zeros((num_rows, width), dtype)
        array.reshape(-1)[where] = values
        return array

    where = _ranges(starts, counts)
    where_response = _ranges(slots, response_counts)
    index = _ranges(before, response_counts)
    is_first = _ranges(np.zeros(len(replies)), response_counts) == 0
    index[is_first] = np.array(first, np.int64)[response_counts > 0]
    no_tokens = np.zeros(0, np.int32)
    branch_ids = None
    if has_branches:
        branch_ids = lay(length, where, np.repeat(branches, counts))
    return Rows(
        tokens=lay(length, where, np.concatenate([no_tokens, *pieces])),
        positions=lay(length, where, _ranges(positions, counts)),
        segment_ids=lay(length, where, np.repeat(segments, counts)),
        branch_ids=branch_ids,
        response_index=lay(num_responses, where_response, index),
        response_ids=lay(
            num_responses, where_response, np.concatenate([no_tokens, *replies])
        ),
        response_mask=lay(num_responses, where_response, True, bool),
        step_ids=lay(num_responses, where_response, np.repeat(steps, response_counts)),
    )


def split_rows(rows: Rows, num_microbatches: int) -> Rows:
    """[microbatches * rows, ...] -> [microbatches, rows, ...], in order."""
    return jax.tree.map(
        lambda leaf: leaf.reshape(num_microbatches, -1, *leaf.shape[1:]), rows
    )


def _ranges(starts, counts) -> np.ndarray:
    """Concatenates start, start + 1, ... (count of them) of each start."""
    starts = np.asarray(starts, np.int64)
    offsets = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return offsets + np.arange(len(offsets))
