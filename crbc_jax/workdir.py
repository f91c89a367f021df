"""The folder of one run: whose it is, its checkpoints, evaluations and rollouts."""

import fcntl
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import TextIO

import jax
import numpy as np
from ml_collections import ConfigDict

from crbc_jax import distributed
from crbc_jax.checkpoint import Checkpointer, check_same_run
from crbc_jax.config import default_config
from crbc_jax.evaluate import EvalResult
from crbc_jax.trajectories import read_groups, write_groups
from crbc_jax.types import Group, TrainState, UserError

_AHEAD = "ahead.jsonl.gz"  # Rollouts collected ahead of their update.


def read_config(workdir: pathlib.Path) -> ConfigDict:
    """The config that a run was started with.

    Raises:
        UserError: if there is no run in the workdir.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(
            f"--workdir={str(workdir)!r} holds no run: {path} is missing; train one "
            "with experiments/run.py, or give the workdir of one"
        )
    try:
        config = ConfigDict(json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is not the config of a run: {error}") from error
    if missing := sorted(set(default_config()) - set(config)):
        raise UserError(f"{path} is not the config of a run: it lacks {missing}")
    return config


class Workdir:
    """What a run keeps on disk, besides its metrics.

    Of several processes, which share the folder, the first one writes; all call it.

    Args:
        path: made if missing; must be empty or hold this very run.
        config: of the run; stored in config.json.
        digests: of the task lists, by split.

    Raises:
        UserError: if the folder holds something else, with what differs.
    """

    def __init__(
        self, path: pathlib.Path, config: ConfigDict, digests: Mapping[str, str]
    ):
        self._path = path
        self._panel = digests["eval"]
        self._temperature = config.evaluate.temperature
        self._identity = {
            "config": json.loads(config.to_json()),
            "tasks": dict(digests),
        }
        self._check_owner()
        distributed.check_equal(self._identity, "config, tasks or --workdir")
        self._is_writer = jax.process_index() == 0
        self._checkpoints = Checkpointer(path, keep_last=config.checkpoint.keep_last)
        if not self._is_writer:
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--workdir={str(path)!r} cannot be made: {error}; choose another"
            ) from error
        self._lock = _lock(path)
        _write_whole(path / "run.json", json.dumps(self._identity, indent=1))
        _write_whole(path / "config.json", config.to_json(indent=1))

    def restore(self, target: TrainState) -> tuple[int, TrainState, list[Group]] | None:
        """Reads the newest good checkpoint: update, state, rollouts collected ahead.

        None if there is none.
        """
        step = self._checkpoints.latest()
        if step is None:
            return None
        check_same_run(self._checkpoints.meta(step)["identity"], self._identity)
        state, _ = self._checkpoints.restore(step, target)
        ahead = self._checkpoints.file(step, _AHEAD)
        return step, state, read_groups(ahead) if ahead else []

    def save(
        self,
        update: int,
        state: TrainState,
        *,
        success: float | None = None,
        ahead: Sequence[Group] = (),
    ) -> None:
        """Writes a checkpoint of everything that the run needs to go on exactly.

        Args:
            update: updates done.
            state: after them.
            success: held-out success rate, if these parameters were evaluated.
            ahead: groups that were collected ahead of their update.
        """
        meta = {"identity": self._identity}
        with tempfile.TemporaryDirectory() as folder:
            files = []
            if ahead:
                files.append(pathlib.Path(folder) / _AHEAD)
                write_groups(files[0], ahead)
            self._checkpoints.save(update, state, meta, success=success, files=files)

    def write_rollouts(
        self, update: int, groups: Sequence[Group], credit: Mapping[str, np.ndarray]
    ) -> pathlib.Path:
        """Writes the groups that an update trains on, with what was computed of them.

        Args:
            update: updates done once these are trained on.
            groups, credit: as of `trajectories.write_groups`.
        """
        path = self._path / "rollouts" / f"{update:06d}.jsonl.gz"
        if self._is_writer:
            write_groups(path, groups, credit)
        return path

    def write_evaluation(self, update: int, result: EvalResult) -> None:
        """Writes evals/UPDATE.json, which the report and `summary` read."""
        if not self._is_writer:
            return
        path = self._path / "evals" / f"{update:06d}.json"
        record = result.to_json() | {
            "update": update,
            "temperature": self._temperature,
            "panel": self._panel,
        }
        path.parent.mkdir(exist_ok=True)
        _write_whole(path, json.dumps(record, indent=1))

    def summary(self) -> str:
        """Held-out success before and after, with intervals."""
        paths = sorted((self._path / "evals").glob("[0-9]*.json"))
        if not paths:
            return "no evaluation is left in the workdir"
        evaluations = [json.loads(path.read_text()) for path in paths]
        lines = []
        for word, evaluation in zip(
            ("before", "after"), (evaluations[0], evaluations[-1]), strict=True
        ):
            share = evaluation["overall"]
            lines.append(
                f"held-out success {word:>6}: {share['rate']:.3f} "
                f"[{share['low']:.3f}, {share['high']:.3f}] at update "
                f"{evaluation['update']}, {share['trials']}/{evaluation['num_tasks']} "
                "tasks"
            )
        return "\n".join(lines)

    def _check_owner(self) -> None:
        """Writes nothing into a folder that is not this run's."""
        record = self._path / "run.json"
        if record.exists():
            try:
                saved = json.loads(record.read_text())
            except ValueError as error:
                raise UserError(
                    f"{record} is damaged ({error}); write into it what meta.identity "
                    "of a checkpoints/*/record.json says, or choose another --workdir"
                ) from error
            check_same_run(saved, self._identity)
        elif self._path.exists() and {p.name for p in self._path.iterdir()} - {
            _hidden(record).name,  # Of a run that was killed as it began.
            ".lock",
        }:
            raise UserError(
                f"--workdir={str(self._path)!r} is not empty and holds no run; "
                "choose another folder, or a new one"
            )


def _lock(path: pathlib.Path) -> TextIO:
    """Keeps other processes out for as long as the returned file is open.

    Raises:
        UserError: if another process trains in the folder.
    """
    file = (path / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(
            f"--workdir={str(path)!r} is in use by process {file.read() or 'unknown'}; "
            "wait for it, stop it, or choose another folder"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file so that no moment of a kill leaves half of it."""
    hidden = _hidden(path)
    hidden.write_text(text)
    hidden.replace(path)


def _hidden(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}")
