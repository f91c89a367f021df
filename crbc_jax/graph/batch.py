"""Columns of environment steps -> TransitionBatch: the one door to the device.

In front of it data is ragged and lives in Python and NumPy; behind it everything is a
pure function of arrays of a few fixed sizes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from crbc_jax.graph.anchors import number_within
from crbc_jax.graph.columns import (
    OPTIONAL,
    REQUIRED,
    Columns,
    check_trajectories,
    read_columns,
)
from crbc_jax.graph.reduction import find_trapped, reduce_chains
from crbc_jax.types import Group, TransitionBatch

_ROWS = (128, 512)  # Smallest buckets of a group's rows; then powers of two.
_MIN_TRAJECTORIES = 16
# As many groups as that are padded in, unless the rows are many: usual batches then
# differ in two numbers of rows alone.
_MIN_GROUPS, _MIN_CELLS = 16, 8192


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """Where each input row went.

    Attributes:
        position: index of each input row in a flattened [groups, rows] array.
        group_ids: the caller's id of each group, in the order of the batch.
    """

    position: np.ndarray
    group_ids: list[Any]

    def unpad(self, values: Any) -> np.ndarray:
        """Reads a [groups, rows] array back, one value an input row."""
        return np.asarray(values).reshape(-1)[self.position]


def columns_of(groups: Sequence[Group]) -> dict[str, list]:
    """Trajectories -> columns, one row a step, in order.

    Aborted trajectories are left out: they say nothing of the policy.
    """
    columns = {name: [] for name in (*REQUIRED, *OPTIONAL, "response_len")}
    for group in groups:
        for trajectory in group:
            if trajectory.outcome == "aborted":
                continue
            anchors = [step.anchor for step in trajectory.steps]
            for number, step in enumerate(trajectory.steps):
                columns["group_id"].append(trajectory.group)
                columns["traj_id"].append((trajectory.group, trajectory.rollout))
                columns["step"].append(number)
                columns["reward"].append(step.reward)
                columns["success"].append(trajectory.success)
                columns["action"].append(step.action)
                columns["is_action_valid"].append(step.is_action_valid)
                columns["response_len"].append(len(step.response_ids))
            columns["anchor"] += anchors
            columns["next_anchor"] += [*anchors[1:], trajectory.final_anchor]
    return columns


def build_batch(columns: Columns) -> tuple[TransitionBatch, RowOrder]:
    """Interns, sorts and pads the rows of a batch.

    Args:
        columns: of equal length, one row an environment step, in any order (see
            REQUIRED in graph/columns.py; OPTIONAL and EXTRAS may be absent).
            `success` is the trajectory's outcome, the same on all its rows. Absent
            `next_anchor` is the anchor of the trajectory's next row, and of a last
            row its own.

    Returns:
        The batch, of NumPy arrays, and where each row is in it.

    Raises:
        ColumnError: naming column, row and remedy.
    """
    table = read_columns(columns)
    group, trajectory, step = table["group"], table["trajectory"], table["step"]
    order = np.lexsort((step, trajectory, group))
    check_trajectories(group, trajectory, step, table["success"], order)
    group, trajectory, step = group[order], trajectory[order], step[order]

    num_groups = int(group[-1]) + 1
    counts = np.bincount(group)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    row = np.arange(len(group)) - starts[group]
    is_last = np.append(trajectory[1:] != trajectory[:-1], True)

    source_code = table["anchor"][order]
    target_code = (
        np.where(is_last, source_code, np.roll(source_code, -1))
        if table["next_anchor"] is None
        else table["next_anchor"][order]
    )
    both, num_anchors = number_within(
        np.concatenate([group, group]), np.concatenate([source_code, target_code])
    )
    source, target = np.split(both, 2)
    pair, _ = number_within(
        group, source * (int(table["action"].max()) + 1) + table["action"][order]
    )
    local_trajectory, num_trajectories = number_within(group, trajectory)

    shape = _shape(num_groups, max(int(counts.max()), num_anchors))
    at = group * shape[1] + row

    def pad(values, dtype):
        padded = np.zeros(shape, dtype)
        padded.reshape(-1)[at] = values
        return padded

    arrays = {
        "source": pad(source, np.int32),
        "pair": pad(pair, np.int32),
        "target": pad(target, np.int32),
        "trajectory": pad(local_trajectory, np.int32),
        "step": pad(step, np.int32),
        "is_last": pad(is_last, np.bool_),
        "reward": pad(table["reward"][order], np.float64),
        "success": pad(table["success"][order], np.bool_),
        "is_action_valid": pad(table["is_action_valid"][order], np.bool_),
        "mask": pad(np.True_, np.bool_),
    }
    # Rows that are followed by the anchor they say they lead to trap nobody.
    may_trap = np.any((target[:-1] != source[1:]) & ~is_last[:-1])
    batch = TransitionBatch(
        **arrays,
        **_structure(arrays, bool(may_trap)),
        extras={
            name: pad(values[order], values.dtype)
            for name, values in table["extras"].items()
        },
        num_anchors=shape[1],
        num_pairs=shape[1],
        num_trajectories=max(_MIN_TRAJECTORIES, _bucket(num_trajectories)),
    )
    position = np.empty(len(at), np.int64)
    position[order] = at
    return batch, RowOrder(position, table["group_ids"])


def _structure(arrays: Mapping[str, np.ndarray], may_trap: bool) -> dict[str, Any]:
    """Fields of the batch that describe the closure's linear system."""
    source, target, mask = arrays["source"], arrays["target"], arrays["mask"]
    is_trapped = np.zeros(source.shape, bool)
    if may_trap:
        anchors = find_trapped(source, target, mask, arrays["is_last"])
        is_trapped = mask & np.take_along_axis(anchors, source, axis=1)
    is_inner = mask & ~arrays["is_last"] & ~is_trapped
    chains = reduce_chains(source, target, mask, is_inner)
    return {"is_trapped": is_trapped, **chains._asdict()}


def _shape(num_groups: int, num_rows: int) -> tuple[int, int]:
    """Groups and rows after padding: few shapes, so few compilations."""
    rows = next((size for size in _ROWS if size >= num_rows), _bucket(num_rows))
    smallest = min(_MIN_GROUPS, max(1, _MIN_CELLS // rows))
    return max(smallest, _bucket(num_groups)), rows


def _bucket(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
