"""A whole run on disk: each checkpoint is a folder that is complete or not there.

    workdir/checkpoints/000010/
        state/       TrainState, written by Orbax
        files/       opaque files of the caller, e.g. rollouts that wait for an update
        record.json  step, success, meta, dtype and shape of every leaf of the state,
                     size and CRC-32 of every file

A checkpoint is written to a hidden folder and renamed when all of it is on disk, so
that no moment of a kill leaves half of one under its number. Saving blocks: when
`save` returns the checkpoint is there, read back and right, and when it is not, `save`
raises. Everything random in a run is derived from counters, hence `meta` is plain
JSON and no generator state is kept. In runs of several processes all of them call
`save` and `restore`, on a workdir that they share; process 0 publishes.
"""

import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from crbc_jax.types import TrainState, UserError

_ABSENT = "<absent>"

# Settings that a resumed run may change, and why that keeps the run one run.
MAY_CHANGE = {
    "config.learner.num_updates": "only adds updates, so it may only grow",
    "config.evaluate.every": "evaluation changes no weights and has seeds of its own",
    "config.checkpoint.every": "saving changes nothing",
    "config.checkpoint.keep_last": "saving changes nothing",
    "config.env.num_workers": "samples depend on seeds alone, not on who steps them",
    "config.env.step_timeout": "only says when a hanging worker is given up",
    "config.learner.microbatch_rows": "losses are those of the whole mini-batch",
    **dict.fromkeys(
        (
            "config.rollout.vllm.python",
            "config.rollout.vllm.num_servers",
            "config.rollout.vllm.urls",
            "config.rollout.vllm.folder",
            "config.rollout.vllm.start_timeout",
            "config.rollout.vllm.request_timeout",
            "config.rollout.vllm.num_retries",
        ),
        "replies depend on weights and seeds, not on who computes them",
    ),
    "config.mesh.data": "the same sums over other devices",
    "config.mesh.fsdp": "the same sums over other devices",
    "config.mesh.tensor": "the same sums over other devices",
}
_MAY_ONLY_GROW = {"config.learner.num_updates"}


class CheckpointError(UserError):
    """A checkpoint cannot be written, read, or continued from."""


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to continue a run under other settings.

    Args:
        saved: nested JSON of what identifies the run in the workdir, such as
            `{"config": {...}, "panel": digest}`.
        now: the same of the run that is to start.

    Raises:
        CheckpointError: with both values of the first three fields that differ and
            are not in `MAY_CHANGE`.
    """
    before, after = _flatten(saved), _flatten(now)
    different = []
    for field in sorted(before.keys() | after.keys()):
        old, new = before.get(field, _ABSENT), after.get(field, _ABSENT)
        if old == new:
            continue
        grows = field not in _MAY_ONLY_GROW or new > old
        if not (field in MAY_CHANGE and _ABSENT not in (old, new) and grows):
            different.append(f"{field}: {old!r} in the workdir, {new!r} now")
    if different:
        more = f" (and {len(different) - 3} more)" if len(different) > 3 else ""
        raise CheckpointError(
            f"this workdir holds another run; {'; '.join(different[:3])}{more}. "
            "Give another --workdir, or start with the settings of the workdir; a run "
            f"that continues may change only {', '.join(sorted(MAY_CHANGE))} (num_"
            "updates upward)"
        )


class Checkpointer:
    """The checkpoints of one workdir: the last few, and the best by held-out success.

    The checkpoint that the run continued from also stays until two newer ones have
    been written and read back.

    Args:
        workdir: folder of the run; `checkpoints/` is made in it by the first save.
        keep_last: number of newest checkpoints to keep, at least 1.
    """

    def __init__(self, workdir: str | os.PathLike, *, keep_last: int):
        if keep_last < 1:
            raise ValueError(f"keep_last={keep_last}: at least 1 checkpoint must stay")
        self._folder = pathlib.Path(workdir).absolute() / "checkpoints"
        self._keep_last = keep_last
        self._resumed: int | None = None
        self._damage: dict[int, str] = {}  # Of checkpoints looked at; "" is good.

    def steps(self) -> list[int]:
        """Updates of all complete checkpoints, oldest first; damaged ones left out."""
        return [step for step in self._numbers() if not self._damage_of(step)]

    def latest(self) -> int | None:
        """The newest good checkpoint; None if the workdir has none at all.

        Raises:
            CheckpointError: if there are checkpoints and each is damaged.
        """
        numbers = self._numbers()
        for step in reversed(numbers):
            if not (damage := self._damage_of(step)):
                return step
            logging.warning("checkpoint %d is damaged (%s); skipped", step, damage)
        if numbers:
            raise CheckpointError(
                f"every checkpoint in {self._folder} is damaged, the newest because "
                f"{self._damage_of(numbers[-1])}; remove the folder to start anew"
            )
        return None

    def best(self) -> int | None:
        """The good checkpoint of highest held-out success; of equals, the newest.

        None if none was saved with a success.
        """
        successes = {step: self._record(step)["success"] for step in self.steps()}
        rated = [step for step in successes if successes[step] is not None]
        return max(rated, key=lambda step: (successes[step], step), default=None)

    def find(self, wanted: str) -> int:
        """The update that `wanted` means: "best", "latest", or its number.

        Raises:
            UserError: if there is no such checkpoint; says which there are.
        """
        steps = self.steps()
        if wanted.isdigit() and int(wanted) in steps:
            return int(wanted)
        chosen = {"best": self.best, "latest": self.latest}
        if wanted in chosen and (step := chosen[wanted]()) is not None:
            return step
        raise UserError(
            f"--checkpoint={wanted!r} is not there; use `best` (if any was evaluated), "
            f"`latest`, or one of {steps}"
        )

    def save(
        self,
        step: int,
        state: TrainState,
        meta: Mapping[str, Any],
        *,
        success: float | None = None,
        files: Sequence[pathlib.Path] = (),
    ) -> None:
        """Writes a checkpoint, reads it back, then removes those no longer needed.

        A good checkpoint of the same step stays as it is: equal steps of one run are
        equal states.

        Args:
            step: updates done; the name of the checkpoint.
            state: jax or NumPy arrays, on any mesh.
            meta: JSON values; comes back from `restore` as JSON gives it back.
            success: held-out success rate of these parameters, if evaluated.
            files: copied in under their own names; see `file`.

        Raises:
            CheckpointError: if it could not be written; names the last good one,
                which stays usable.
        """
        record = {"step": step, "success": success, "meta": dict(meta)}
        record["leaves"] = _describe(state._asdict())
        json.dumps(record)  # What is not JSON raises before anything is written.
        if step in self._numbers() and not self._damage_of(step):
            return
        writing = self._folder / f".writing-{step:06d}"
        try:
            self._write(writing, state, record, files)
            _wait_for_all(f"checkpoint {step} is published")
            self._damage.pop(step, None)
            damage = self._damage_of(step)
        except (OSError, ValueError, RuntimeError) as error:
            shutil.rmtree(writing, ignore_errors=True)
            raise CheckpointError(self._failed(step, str(error))) from error
        if damage:
            raise CheckpointError(self._failed(step, damage))
        if jax.process_index() == 0:
            self._remove_unneeded()
        _wait_for_all(f"checkpoint {step} is saved")

    def restore(
        self, step: int, target: TrainState
    ) -> tuple[TrainState, dict[str, Any]]:
        """Reads state and meta; compiles nothing.

        Args:
            step: as given to `save`.
            target: a state of the wanted structure, shapes, dtypes and shardings, of
                jax arrays or `jax.ShapeDtypeStruct`s; may be of another mesh than the
                one that was saved. A NumPy leaf comes back as NumPy.

        Raises:
            CheckpointError: if the checkpoint is not there or damaged, or naming the
                first leaf whose dtype or shape is not the target's, and both of them.
        """
        record = self._good_record(step)
        state = self._restore(step, record, target._asdict())
        self._resumed = step
        return TrainState(**state), record["meta"]

    def restore_params(self, step: int, target: Any) -> Any:
        """Reads the parameters alone, as `restore` reads the state."""
        return self._restore(step, self._good_record(step), {"params": target})[
            "params"
        ]

    def meta(self, step: int) -> dict[str, Any]:
        """The meta of a checkpoint."""
        return self._good_record(step)["meta"]

    def file(self, step: int, name: str) -> pathlib.Path | None:
        """Where a file saved with the checkpoint lies; None if it has none so named."""
        path = self._path(step) / "files" / name
        return path if path.exists() else None

    def _path(self, step: int) -> pathlib.Path:
        return self._folder / f"{step:06d}"

    def _numbers(self) -> list[int]:
        """Steps of all published checkpoints, good or damaged, oldest first."""
        if not self._folder.is_dir():
            return []
        return sorted(int(p.name) for p in self._folder.iterdir() if p.name.isdigit())

    def _record(self, step: int) -> dict[str, Any]:
        return json.loads((self._path(step) / "record.json").read_text())

    def _good_record(self, step: int) -> dict[str, Any]:
        if step not in self._numbers():
            raise CheckpointError(
                f"no checkpoint {step} in {self._folder}; there are {self.steps()}"
            )
        if damage := self._damage_of(step):
            raise CheckpointError(f"{self._path(step)} is damaged: {damage}")
        return self._record(step)

    def _damage_of(self, step: int) -> str:
        """Why a published checkpoint cannot be trusted; "" if it can."""
        if step not in self._damage:
            self._damage[step] = _damage(self._path(step))
        return self._damage[step]

    def _failed(self, step: int, reason: str) -> str:
        good = [number for number in self.steps() if number != step]
        last = f"step {good[-1]} is the last good one" if good else "there is no other"
        return (
            f"saving checkpoint {step} in {self._folder} failed: {reason}. Of the "
            f"checkpoints, {last}; mend the cause and run the same command to go on"
        )

    def _write(self, writing, state, record, files) -> None:
        """Fills the hidden folder, then renames it to its number."""
        import orbax.checkpoint as ocp

        is_first = jax.process_index() == 0
        if is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._folder.glob(".*-*"):  # Of a run that was killed.
                shutil.rmtree(leftover)
            (writing / "files").mkdir(parents=True)
        _wait_for_all(f"{writing.name} exists")
        if blind := _processes_without(writing.is_dir()):
            raise OSError(
                f"processes {blind} do not see the folder that process 0 made; "
                "--workdir must be shared by all processes"
            )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
            orbax.save(writing / "state", args=ocp.args.PyTreeSave(state._asdict()))
        if is_first:
            for path in files:
                shutil.copyfile(path, writing / "files" / pathlib.Path(path).name)
            record["files"] = {
                str(path.relative_to(writing)): _fingerprint(path)
                for path in sorted(writing.rglob("*"))
                if path.is_file()
            }
            (writing / "record.json").write_text(json.dumps(record, indent=1))
            _flush_to_disk(writing)
            final = self._path(record["step"])
            if final.exists():  # Damaged; a good one would not be written again.
                self._remove(final)
            writing.rename(final)
            _flush_to_disk(self._folder, recursive=False)

    def _remove_unneeded(self) -> None:
        good = self.steps()
        keep = set(good[-self._keep_last :]) | {self.best()}
        if self._resumed is not None:
            if sum(step > self._resumed for step in good) < 2:
                keep.add(self._resumed)
            else:
                self._resumed = None
        for step in good:
            if step not in keep:
                self._remove(self._path(step))
                del self._damage[step]

    def _remove(self, path: pathlib.Path) -> None:
        """Unpublishes first: a kill half-way must not leave a part under the number."""
        hidden = path.with_name(f".removing-{path.name}")
        path.rename(hidden)
        shutil.rmtree(hidden)

    def _restore(self, step: int, record: Mapping[str, Any], target: dict) -> dict:
        import orbax.checkpoint as ocp

        wanted = _describe(target)
        saved = {
            leaf: kind
            for leaf, kind in record["leaves"].items()
            if leaf.split("/")[0] in target
        }
        for leaf in sorted(saved.keys() | wanted.keys()):
            was, now = saved.get(leaf, _ABSENT), wanted.get(leaf, _ABSENT)
            if was != now:
                raise CheckpointError(
                    f"{leaf} is {was} in {self._path(step)} and {now} in this run; "
                    "nothing is cast or reshaped: continue with the model and settings "
                    "it was saved with"
                )
        target = jax.tree.map(_as_target, target)
        arguments = ocp.args.PyTreeRestore(
            item=target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
            return orbax.restore(self._path(step) / "state", args=arguments)


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts to dotted names; tuples and lists compare alike, as in JSON."""
    if isinstance(tree, Mapping):
        flat = {}
        for name, value in tree.items():
            flat |= _flatten(value, f"{prefix}.{name}" if prefix else str(name))
        return flat
    return {prefix: json.loads(json.dumps(tree))}


def _describe(tree: Any) -> dict[str, str]:
    """Name of each leaf -> its dtype and shape, such as `float32[3, 64]`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _as_target(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        return np.asarray(leaf)
    if leaf.sharding is None:
        raise ValueError(
            f"target leaf {leaf} has no sharding; say where it is to be restored to"
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _fingerprint(path: pathlib.Path) -> list[int]:
    """Size in bytes and CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 24):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return [size, checksum]


def _damage(checkpoint: pathlib.Path) -> str:
    """Compares every file with the record; "" if all of them are as written."""
    try:
        files = json.loads((checkpoint / "record.json").read_text())["files"]
        for name, expected in files.items():
            if (found := _fingerprint(checkpoint / name)) != expected:
                return f"{name} has [bytes, CRC-32] {found}, written were {expected}"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _flush_to_disk(folder: pathlib.Path, recursive: bool = True) -> None:
    """Makes a rename that follows safe against a power cut, too."""
    for path in [folder, *(folder.rglob("*") if recursive else ())]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _wait_for_all(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _processes_without(has: bool) -> list[int]:
    """Numbers of the processes that call this with False; all learn the same."""
    return np.flatnonzero(~multihost_utils.process_allgather(np.array([has]))).tolist()
