"""Groups of trajectories to gzipped JSON lines and back, exactly.

One line is one trajectory: the fields of `types.Trajectory`, its steps as a list of
the fields of `types.Step`. A step may also hold `credit`, what was computed of it
(name -> number). Equal groups give equal bytes. These are the files in `rollouts/`,
and the rollouts that wait in a checkpoint.
"""

import dataclasses
import gzip
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from crbc_jax.types import Group, Step, Trajectory

_DTYPES = {"prompt_ids": np.int32, "response_ids": np.int32, "logprobs": np.float32}
_STEP_FIELDS = tuple(field.name for field in dataclasses.fields(Step))
_FIELDS = tuple(f.name for f in dataclasses.fields(Trajectory) if f.name != "steps")


def write_groups(
    path: str | os.PathLike,
    groups: Sequence[Group],
    credit: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes all trajectories of `groups`; the file appears when it is complete.

    Args:
        path: ends in .jsonl.gz; its folder is made if missing.
        groups: as collected, aborted trajectories included.
        credit: name -> one number a step, over the steps of all trajectories that
            were not aborted, in order (`graph.batch.columns_of` has the same rows).

    Raises:
        ValueError: if a column of `credit` has another length than there are steps.
    """
    path = pathlib.Path(path)
    credit = {name: np.asarray(values) for name, values in (credit or {}).items()}
    lengths = (len(t.steps) for g in groups for t in g if t.outcome != "aborted")
    num_steps = sum(lengths)
    for name, values in credit.items():
        if values.shape != (num_steps,):
            raise ValueError(
                f"credit[{name!r}] has shape {values.shape}, but the trajectories that "
                f"were not aborted have {num_steps} steps"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    with hidden.open("wb") as raw:
        # No name and no time in the header: equal groups are equal bytes.
        with gzip.GzipFile("", "wb", compresslevel=4, fileobj=raw, mtime=0) as file:
            for record in to_records(groups, credit):
                file.write(json.dumps(record).encode() + b"\n")
    hidden.replace(path)


def read_groups(path: str | os.PathLike) -> list[Group]:
    """Reads what `write_groups` wrote, without `credit`."""
    with gzip.open(path, "rt") as file:
        trajectories = [_from_record(json.loads(line)) for line in file]
    by_group = itertools.groupby(trajectories, key=lambda t: t.group)
    return [tuple(members) for _, members in by_group]


def to_records(
    groups: Sequence[Group], credit: Mapping[str, np.ndarray]
) -> Iterator[dict[str, Any]]:
    """Yields the JSON object of each trajectory; arguments as of `write_groups`."""
    row = 0
    for trajectory in itertools.chain.from_iterable(groups):
        record = {name: _plain(getattr(trajectory, name)) for name in _FIELDS}
        record["steps"] = []
        for step in trajectory.steps:
            fields = {name: _plain(getattr(step, name)) for name in _STEP_FIELDS}
            if credit and trajectory.outcome != "aborted":
                values = {name: column[row].item() for name, column in credit.items()}
                fields["credit"] = {
                    name: value if math.isfinite(value) else None
                    for name, value in values.items()
                }
                row += 1
            record["steps"].append(fields)
        yield record


def _from_record(record: Mapping[str, Any]) -> Trajectory:
    steps = []
    for fields in record["steps"]:
        values = {name: _rich(fields[name]) for name in _STEP_FIELDS}
        for name, dtype in _DTYPES.items():
            values[name] = np.array(values[name], dtype)
        steps.append(Step(**values))
    values = {name: _rich(record[name]) for name in _FIELDS}
    return Trajectory(**values, steps=tuple(steps))


def _plain(value: Any) -> Any:
    """JSON of a field; bytes become {"hex": ...}."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _rich(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
