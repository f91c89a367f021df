"""Scalars of a run to JSON lines and TensorBoard, progress to the terminal.

    workdir/metrics.jsonl                one line an update: {"step": 7, "loss": ...}
    workdir/events.out.tfevents.*        the same for TensorBoard, one file
    workdir/{rollouts,evals}/000007.*    of other writers; cut back here on resume

`step` counts the updates done: row 0 is the state before the first one. A row must be
written before the checkpoint of its step, or a kill between the two would lose it.
Only process 0 writes; elsewhere the same calls do nothing.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from crbc_jax.types import UserError

# Fields that depend on the machine and the process, not on the seed: rows of two runs
# are compared without them. `seconds/clock` is the Unix time of the row.
PROCESS_FIELDS = ("seconds/", "compilations")

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl in order; [] if there is none.

    A last line that a kill cut short is left out. A value that was not finite is None.

    Raises:
        UserError: naming another line that is damaged.
    """
    path = pathlib.Path(workdir) / "metrics.jsonl"
    if not path.exists():
        return []
    *lines, unfinished = path.read_text().split("\n")
    del unfinished  # "" after a whole line.
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise UserError(
                f"{path}, line {number} is damaged ({error}); remove that line and run "
                "the same command again"
            ) from error
    return rows


def comparable(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a row that two runs of equal seeds have in common, bit for bit."""
    return {k: v for k, v in row.items() if not k.startswith(PROCESS_FIELDS)}


class MetricsWriter:
    """Writes one row an update.

    Args:
        workdir: folder of the run; made if missing.
        continue_from: step of the checkpoint that the run continues from: rows,
            rollouts and evaluations of later steps are dropped, since they will come
            again. None drops all of them.

    Raises:
        UserError: if the workdir cannot be written.
    """

    def __init__(self, workdir: str | os.PathLike, *, continue_from: int | None = None):
        self._is_writer = jax.process_index() == 0
        if not self._is_writer:
            return
        self._workdir = pathlib.Path(workdir)
        self._last = -1 if continue_from is None else continue_from
        try:
            self._workdir.mkdir(parents=True, exist_ok=True)
            rows = [r for r in read_metrics(workdir) if r["step"] <= self._last]
            self._drop_later_files()
            self._lines = self._reopen_lines(rows)
            self._start_events(rows)
        except OSError as error:
            raise UserError(
                f"--workdir={str(workdir)!r} cannot be written: {error}; choose another"
            ) from error

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Appends the row of a step, and puts it on disk before it returns.

        Args:
            step: updates done; must grow from call to call.
            scalars: name -> number, of Python, NumPy or JAX.

        Raises:
            ValueError: if `step` is not later than the last one.
            UserError: if the disk is full, or a file cannot be written.
        """
        if not self._is_writer:
            return
        if step <= self._last:
            raise ValueError(
                f"step={step} was written before; the last is {self._last}"
            )
        row = {"step": step} | {name: _number(v) for name, v in scalars.items()}
        row["seconds/clock"] = time.time()
        try:
            self._lines.write(_json_line(row))
            self._lines.flush()
            self._add_events(row)
            self._events.flush()
        except OSError as error:
            raise UserError(
                f"metrics of step {step} cannot be written into {self._workdir}: "
                f"{error}; mend that and run the same command to continue"
            ) from error
        self._last = step

    def close(self) -> None:
        """Closes the files. Calling it twice is harmless."""
        if self._is_writer:
            for file in (self._lines, self._events):
                # All rows were flushed; only one that failed, and said so, can be left.
                with contextlib.suppress(OSError):
                    file.close()

    def _drop_later_files(self) -> None:
        for folder in ("rollouts", "evals"):
            for path in (self._workdir / folder).glob("[0-9]*"):
                if int(path.name.split(".")[0]) > self._last:
                    path.unlink()

    def _reopen_lines(self, rows: list[dict[str, Any]]) -> io.TextIOBase:
        path = self._workdir / "metrics.jsonl"
        kept = path.with_name(".metrics.jsonl")
        kept.write_text("".join(map(_json_line, rows)))
        kept.replace(path)  # At no moment is a kept row not on disk.
        return path.open("a")

    def _start_events(self, rows: list[dict[str, Any]]) -> None:
        """Starts one event file anew from the kept rows: one value a tag and step."""
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer import event_file_writer

        for path in self._workdir.glob("events.out.tfevents.*"):
            path.unlink()
        self._events = event_file_writer.EventFileWriter(str(self._workdir))
        # Makes a TensorBoard that watches forget what it read in the old file.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._events.add_event(
            event_pb2.Event(wall_time=time.time(), step=0, session_log=start)
        )
        for row in rows:
            self._add_events(row)
        self._events.flush()

    def _add_events(self, row: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        values = [
            summary_pb2.Summary.Value(
                tag=name, simple_value=math.nan if value is None else value
            )
            for name, value in row.items()
            if name not in ("step", "seconds/clock")
        ]
        self._events.add_event(
            event_pb2.Event(
                wall_time=row["seconds/clock"],
                step=row["step"],
                summary=summary_pb2.Summary(value=values),
            )
        )


class CompileCounter:
    """Counts, while entered, the programs that JAX gives its compiler.

    A program found in JAX's persistent cache counts too. Source: `jax.monitoring`.
    """

    def __init__(self):
        self.names: list[str] = []  # Of the compiled functions, in order.

    @property
    def count(self) -> int:
        return len(self.names)

    def __enter__(self) -> "CompileCounter":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, _seconds: float, **details: Any) -> None:
        if event == _COMPILE_EVENT:
            self.names.append(str(details.get("fun_name", "unnamed")))


@dataclasses.dataclass
class _Bar:
    """What a plain line needs to know of its bar; times of the monotonic clock."""

    rich_id: int
    total: int
    first: int  # Units that were done at `started`.
    started: float
    shown: float  # When its last line was printed.
    is_warm: bool = False  # Whether a unit was shown already.


class Progress:
    """Bars on a terminal, a plain line now and then elsewhere; on process 0 only.

    Args:
        stream: where to; standard output by default.
        line_seconds: shortest time between two plain lines of a bar, but its last
            line always comes.
    """

    def __init__(self, stream: io.TextIOBase | None = None, line_seconds: float = 5.0):
        import rich.console
        import rich.progress

        self._line_seconds = line_seconds
        self._console = rich.console.Console(
            file=stream or sys.stdout, quiet=jax.process_index() != 0, soft_wrap=True
        )
        self._bars = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(bar_width=30),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[note]}"),
            rich.progress.TextColumn("ETA"),
            rich.progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._open: dict[str, _Bar] = {}

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(self, *_) -> None:
        self._bars.stop()

    def start(self, name: str, total: int, done: int = 0) -> None:
        """Opens a bar; `done` of its `total` units were done by an earlier run."""
        now = time.monotonic()
        self._open[name] = _Bar(
            rich_id=self._bars.add_task(name, total=total, completed=done, note=""),
            total=total,
            first=done,
            started=now,
            shown=now - self._line_seconds,
        )

    def show(self, name: str, done: int, note: str = "") -> None:
        """Moves a bar on to `done` units; `note` is shown beside it."""
        bar = self._open[name]
        self._bars.update(bar.rich_id, completed=done, note=note)
        now = time.monotonic()
        if not bar.is_warm:  # The first unit compiles: it says nothing of the others.
            bar.is_warm, bar.started, bar.first = True, now, done
        is_due = now - bar.shown >= self._line_seconds or done == bar.total
        if self._console.is_terminal or not is_due:
            return
        bar.shown = now
        eta = ""
        if bar.first < done < bar.total:
            seconds_each = (now - bar.started) / (done - bar.first)
            left = round(seconds_each * (bar.total - done))
            eta = f"ETA {left // 60}:{left % 60:02}"
        parts = (f"{name} {done}/{bar.total}", note, eta)
        self.say("  ".join(part for part in parts if part))

    def finish(self, name: str, keep: bool = True) -> None:
        """Ends a bar; `keep=False` takes it off the terminal."""
        bar = self._open.pop(name)
        self._bars.stop_task(bar.rich_id)
        if not keep:
            self._bars.remove_task(bar.rich_id)

    def say(self, text: str) -> None:
        """Prints a line above the bars."""
        self._console.print(text, markup=False, highlight=False)
        self._console.file.flush()


def _number(value: Any) -> int | float | None:
    """A plain number for JSON, which has no NaN and no infinity: those are None."""
    value = np.asarray(value).item()
    if isinstance(value, int):
        return int(value)
    return float(value) if math.isfinite(value) else None


def _json_line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
