"""Columns as a caller has them -> arrays of numbers, or an error with its remedy.

Every error names the column, the row and the remedy.
"""

import difflib
import warnings
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from crbc_jax.graph.anchors import intern

# One row is one environment step. `success` is the outcome of the whole trajectory.
REQUIRED = (
    "group_id",
    "traj_id",
    "step",
    "anchor",
    "action",
    "reward",
    "success",
)
OPTIONAL = ("is_action_valid", "next_anchor")
# Columns of single methods, and their type.
EXTRAS = {
    "milestone_achieved": np.bool_,
    "reasonable": np.bool_,
    "advancing": np.bool_,
    "base_adv": np.float64,
    "response_len": np.int32,
}
# Of each name one value a row: a list, an array, or a column of pandas or pyarrow.
Columns = Mapping[str, Any]
_MAX_NUMBER = 1e15  # Rewards beyond lose their differences, or overflow, in float32.


class ColumnError(ValueError):
    """A column that no estimator can work with; names column, row and remedy."""


def read_columns(columns: Columns) -> dict[str, Any]:
    """Checks each column by itself, and turns it into numbers.

    Returns:
        NumPy arrays [rows]: `group`, `trajectory`, `anchor`, `next_anchor` (or None)
        and `action` as codes from 0, `step`, `reward`, `success`, `is_action_valid`;
        `extras`, a dictionary of such arrays; and `group_ids`, the id of each code.

    Raises:
        ColumnError: naming column, row and remedy.
    """
    if names := getattr(columns, "column_names", None):  # A pyarrow table.
        columns = {name: columns[name] for name in names}
    if isinstance(columns, str) or not hasattr(columns, "keys"):
        raise ColumnError(
            f"steps: {type(columns).__name__} does not map names to columns; give a "
            f"dict or a table with the columns {list(REQUIRED)}"
        )
    for name in REQUIRED:
        if name not in columns:
            raise ColumnError(
                f"column {name!r} is missing; needed are {list(REQUIRED)}, known "
                f"besides {[*OPTIONAL, *EXTRAS]}"
            )
    _warn_of_misspelt(columns)
    known = [name for name in (*REQUIRED, *OPTIONAL, *EXTRAS) if name in columns]
    for name in known:
        _check_is_column(name, columns[name])
    num_rows = len(columns["group_id"])
    if not num_rows:
        raise ColumnError("column 'group_id' has no row: nothing to credit")
    for name in known:
        if len(columns[name]) != num_rows:
            raise ColumnError(
                f"column {name!r} has {len(columns[name])} rows, 'group_id' has "
                f"{num_rows}; give one value an environment step"
            )
    group_codes = _codes("group_id", columns["group_id"])
    first_rows = np.unique(group_codes, return_index=True)[1]
    group_ids = _as_list(columns["group_id"])
    anchors = columns["anchor"]
    next_anchors = columns.get("next_anchor")
    if next_anchors is None:
        anchor, next_anchor = _codes("anchor", anchors), None
    else:
        joined = [*_as_list(anchors), *_as_list(next_anchors)]
        _check_known("anchor", joined[:num_rows])  # What follows an end may be NaN.
        _check_same_type(joined[:num_rows], joined[num_rows:])
        anchor, next_anchor = np.split(_codes("anchor", joined, check=False), 2)
    valid = columns.get("is_action_valid")
    return {
        "group": group_codes,
        "group_ids": [group_ids[row] for row in first_rows],
        "trajectory": _codes("traj_id", columns["traj_id"]),
        "step": _numbers("step", columns["step"], whole=True),
        "anchor": anchor,
        "next_anchor": next_anchor,
        "action": _codes("action", columns["action"]),
        "reward": _numbers("reward", columns["reward"]),
        "success": _flags("success", columns["success"]),
        "is_action_valid": (
            np.ones(num_rows, bool)
            if valid is None
            else _flags("is_action_valid", valid)
        ),
        "extras": {
            name: (
                _flags(name, columns[name])
                if dtype is np.bool_
                else _counts(name, columns[name])
                if dtype is np.int32
                else _numbers(name, columns[name])
            )
            for name, dtype in EXTRAS.items()
            if name in columns
        },
    }


def _warn_of_misspelt(columns: Columns) -> None:
    """Tables have columns of their own; one named nearly as ours is ours, misspelt."""
    for name in set(map(str, columns.keys())) - {*REQUIRED, *OPTIONAL, *EXTRAS}:
        near = difflib.get_close_matches(name, [*OPTIONAL, *EXTRAS], 1, cutoff=0.85)
        if near and near[0] not in columns:
            warnings.warn(
                f"column {name!r} is not read; did you mean {near[0]!r}?", stacklevel=5
            )


def _check_same_type(anchors: list, next_anchors: list) -> None:
    """Refuses strings beside bytes: no next anchor would ever equal an anchor."""
    here, ahead = (
        {kind for kind in (str, bytes) if any(isinstance(v, kind) for v in values)}
        for values in (anchors, next_anchors)
    )
    if here and ahead and here.isdisjoint(ahead):
        raise ColumnError(
            f"column 'next_anchor': {ahead.pop().__name__} never equals 'anchor', "
            f"which has {here.pop().__name__}; give both columns the same type, or "
            "leave 'next_anchor' out"
        )


def _check_is_column(name: str, values: Any) -> None:
    is_sized = hasattr(values, "__len__") and getattr(values, "ndim", 1) > 0
    if not is_sized or isinstance(values, str | bytes | Mapping | Set):
        raise ColumnError(
            f"column {name!r}: {type(values).__name__} is not a column; give a list or "
            "an array with one value an environment step"
        )


def _check_known(name: str, values: Any) -> None:
    """Refuses NaN, a table's missing value: it equals nothing, not even itself."""
    if isinstance(values, np.ndarray):
        if values.ndim > 1 or values.dtype.kind not in "fO":
            return
        values = values.tolist()
    if float not in set(map(type, values)):
        return
    for row, value in enumerate(values):
        if type(value) is float and value != value:
            raise ColumnError(
                f"column {name!r}, row {row}: NaN is not a value that rows can share; "
                "fill it in, or leave the trajectory out"
            )


def _as_list(values: Any) -> list:
    """Python objects of a list, an array, or a column of pandas or pyarrow."""
    if getattr(values, "ndim", 1) > 1:  # Of JAX or torch, too.
        values = np.asarray(values)
    if isinstance(values, np.ndarray):
        # Further axes belong to the value: frames stay arrays.
        return values.tolist() if values.ndim == 1 else list(values)
    for method in ("to_pylist", "tolist"):  # pyarrow; pandas.
        if hasattr(values, method):
            return getattr(values, method)()
    return list(values)


def _codes(name: str, values: Any, check: bool = True) -> np.ndarray:
    if not isinstance(values, np.ndarray):
        values = _as_list(values)
    if check:
        _check_known(name, values)
    try:
        return intern(values)
    except TypeError as error:
        row = next(i for i, value in enumerate(values) if not _is_hashable(value))
        raise ColumnError(
            f"column {name!r}, row {row}: {type(values[row]).__name__} is neither an "
            "array nor hashable; turn it into a string, bytes, a tuple or an array"
        ) from error


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return isinstance(value, np.ndarray)
    return True


def _numbers(name: str, values: Any, whole: bool = False) -> np.ndarray:
    """float64 [rows] of finite numbers (int64 if whole)."""
    try:
        numbers = np.asarray(_as_list(values), np.float64)
    except (TypeError, ValueError):
        numbers = np.full(len(values), np.nan)
        for row, value in enumerate(_as_list(values)):
            if isinstance(value, int | float | np.number):
                numbers[row] = value
    if numbers.ndim > 1:
        raise ColumnError(
            f"column {name!r} has the shape {list(numbers.shape)}; give one number an "
            "environment step"
        )
    wrong = ~np.isfinite(numbers) | (whole & (numbers != np.round(numbers)))
    if wrong.any():
        row = int(np.argmax(wrong))
        need = "a whole number" if whole else "a finite number"
        raise ColumnError(
            f"column {name!r}, row {row}: {_as_list(values)[row]!r} is not {need}; "
            "leave the trajectory out if it is unknown"
        )
    if (wrong := np.abs(numbers) > _MAX_NUMBER).any():
        row = int(np.argmax(wrong))
        raise ColumnError(
            f"column {name!r}, row {row}: {_as_list(values)[row]!r} is beyond "
            f"{_MAX_NUMBER:g}, too large for float32; scale it"
        )
    return numbers.astype(np.int64) if whole else numbers


def _counts(name: str, values: Any) -> np.ndarray:
    """int32 [rows], from 0."""
    numbers = _numbers(name, values, whole=True)
    wrong = (numbers < 0) | (numbers > np.iinfo(np.int32).max)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ColumnError(
            f"column {name!r}, row {row}: {numbers[row]} is not a count; give 0, 1, "
            "2, ... below 2**31"
        )
    return numbers.astype(np.int32)


def _flags(name: str, values: Any) -> np.ndarray:
    """bool [rows]; a string is no flag, since bool("False") is true."""
    flags = _as_list(values)
    if not _are_flags(flags):
        row = next(row for row, flag in enumerate(flags) if not _are_flags([flag]))
        raise ColumnError(
            f"column {name!r}, row {row}: {flags[row]!r} is neither true nor false; "
            "give True and False, or 1 and 0"
        )
    return np.asarray(flags, bool)


def _are_flags(values: list) -> bool:
    try:
        return set(values) <= {0, 1}
    except TypeError:  # Not hashable.
        return False


def check_trajectories(
    group: np.ndarray,
    trajectory: np.ndarray,
    step: np.ndarray,
    success: np.ndarray,
    order: np.ndarray,
) -> None:
    """Checks that a trajectory has one group, one outcome, and steps 0, 1, 2, ...

    Args:
        group, trajectory, step, success: one entry an input row.
        order: rows sorted by group, trajectory and step.

    Raises:
        ColumnError: naming column, row and remedy.
    """
    group, success = group[order], success[order]
    trajectory, step = trajectory[order], step[order]
    # Trajectories are sorted within groups: one id in two groups starts twice.
    starts = np.append(
        True, (trajectory[1:] != trajectory[:-1]) | (group[1:] != group[:-1])
    )
    first_seen = np.unique(trajectory[starts], return_index=True)[1]
    if len(first_seen) < starts.sum():
        again = np.ones(int(starts.sum()), bool)
        again[first_seen] = False
        row = int(order[np.flatnonzero(starts)[np.argmax(again)]])
        raise ColumnError(
            f"column 'traj_id', row {row}: this trajectory also has rows in another "
            "group; ids must be distinct over the whole batch, such as (group, rollout)"
        )
    start_of = np.maximum.accumulate(np.where(starts, np.arange(len(step)), 0))
    expected = np.arange(len(step)) - start_of
    if (step != expected).any():
        at = int(np.argmax(step != expected))
        raise ColumnError(
            f"column 'step', row {int(order[at])}: step {step[at]} where "
            f"{expected[at]} should come; the steps of a trajectory count 0, 1, 2, ... "
            "without gap or duplicate"
        )
    differs = success != success[start_of]
    if differs.any():
        row = int(order[np.argmax(differs)])
        raise ColumnError(
            f"column 'success', row {row}: differs from the trajectory's first row; it "
            "is the outcome of the whole trajectory, the same on all its rows"
        )
