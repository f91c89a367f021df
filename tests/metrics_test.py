import io
import json
import os
import pathlib
import re
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from crbc_jax import metrics
from crbc_jax.metrics import CompileCounter, MetricsWriter, Progress, read_metrics
from crbc_jax.types import UserError


def read_events(workdir):
    """Tag -> list of (step, value) of the event file, unpurged as TensorBoard sees."""
    accumulator = EventAccumulator(str(workdir), purge_orphaned_data=False)
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def event_files(workdir):
    return list(pathlib.Path(workdir).rglob("events.out.tfevents*"))


def test_rows_and_events_hold_what_was_written(tmp_path):
    writer = MetricsWriter(tmp_path / "new" / "run")
    writer.write(0, {"eval/success_rate": 0.5})
    writer.write(1, {"loss": np.float32(0.1), "tokens": np.int64(3)})
    writer.write(2, {"loss": jnp.float32(np.nan), "tokens": 4, "share": float("inf")})
    rows = [metrics.comparable(row) for row in read_metrics(tmp_path / "new" / "run")]
    assert rows == [
        {"step": 0, "eval/success_rate": 0.5},
        {"step": 1, "loss": float(np.float32(0.1)), "tokens": 3},
        {"step": 2, "loss": None, "tokens": 4, "share": None},
    ]
    assert isinstance(rows[1]["tokens"], int)
    events = read_events(tmp_path / "new" / "run")
    assert events["tokens"] == [(1, 3.0), (2, 4.0)]
    assert events["loss"][0] == (1, pytest.approx(0.1))
    assert np.isnan(events["loss"][1][1])
    assert "step" not in events
    writer.close()
    writer.close()


def test_lines_are_strict_json_and_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"loss": float("nan")})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse)["loss"] is None
    writer.close()


def write_run(workdir, first, last, continue_from=None, value=0.0):
    writer = MetricsWriter(workdir, continue_from=continue_from)
    for step in range(first, last + 1):
        writer.write(step, {"loss": step + value, "seconds/update": 1.0})
        for folder, suffix in (("rollouts", "jsonl.gz"), ("evals", "json")):
            path = workdir / folder / f"{step:06d}.{suffix}"
            path.parent.mkdir(exist_ok=True)
            path.write_text(str(value))
    writer.close()


def test_resume_drops_what_comes_after_the_checkpoint(tmp_path):
    write_run(tmp_path, 1, 15)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 16, "lo')  # Killed in the middle of a line.
    write_run(tmp_path, 11, 20, continue_from=10, value=0.5)

    expected = [(s, float(s) + 0.5 * (s > 10)) for s in range(1, 21)]
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["loss"]) for row in rows] == expected
    assert read_events(tmp_path)["loss"] == expected  # One value a step.
    assert len(event_files(tmp_path)) == 1
    for folder in ("rollouts", "evals"):
        texts = {int(p.name[:6]): p.read_text() for p in (tmp_path / folder).iterdir()}
        assert texts == {s: str(0.5 * (s > 10)) for s in range(1, 21)}


def test_files_past_the_checkpoint_go_before_the_first_new_row(tmp_path):
    write_run(tmp_path, 1, 5)
    MetricsWriter(tmp_path, continue_from=3).close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert len(list((tmp_path / "rollouts").iterdir())) == 3
    MetricsWriter(tmp_path).close()  # From the very beginning.
    assert read_metrics(tmp_path) == []
    assert not list((tmp_path / "rollouts").iterdir())


def test_resumed_rows_equal_those_of_one_run_but_for_the_process(tmp_path):
    write_run(tmp_path / "one", 1, 6)
    write_run(tmp_path / "two", 1, 4)
    write_run(tmp_path / "two", 4, 6, continue_from=3)
    one, two = (
        [metrics.comparable(row) for row in read_metrics(tmp_path / name)]
        for name in ("one", "two")
    )
    assert one == two
    assert set(one[0]) == {"step", "loss"}


def test_a_step_is_written_once(tmp_path):
    writer = MetricsWriter(tmp_path, continue_from=4)
    with pytest.raises(ValueError, match="step=4 was written before"):
        writer.write(4, {})
    writer.write(5, {})
    with pytest.raises(ValueError, match="step=5"):
        writer.write(5, {})
    writer.close()


def test_unwritable_workdir_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--workdir='.*file/run' cannot be written"):
        MetricsWriter(tmp_path / "file" / "run")


def test_refused_write_names_step_and_folder(tmp_path):
    writer = MetricsWriter(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, limits[1]))
    try:
        with pytest.raises(
            UserError, match=f"metrics of step .* {re.escape(str(tmp_path))}"
        ):
            for step in range(20):
                writer.write(step, {"loss": 1.0})
        writer.close()  # Does not fail in turn, and so hide the first error.
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


TWO_PROCESSES = """
import sys
sys.path.insert(0, sys.argv[2])
import jax
jax.config.update("jax_platforms", "cpu")
process = int(sys.argv[3])
jax.distributed.initialize(sys.argv[4], num_processes=2, process_id=process)
from crbc_jax.metrics import MetricsWriter, Progress
with Progress() as progress:
    progress.start("training", 1)
    writer = MetricsWriter(sys.argv[1])
    writer.write(1, {"loss": 0.5})
    progress.show("training", 1)
    writer.close()
"""


def test_of_two_processes_one_writes(tmp_path):
    root = str(pathlib.Path(__file__).parents[1])
    address = f"localhost:{20000 + os.getpid() % 20000}"
    command = [sys.executable, "-c", TWO_PROCESSES, str(tmp_path), root]
    processes = [
        subprocess.Popen([*command, str(i), address], stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "training 1/1" in outputs[0]
    assert outputs[1] == ""
    assert len(event_files(tmp_path)) == 1
    assert [row["loss"] for row in read_metrics(tmp_path)] == [0.5]


def test_compile_counter_counts_programs_by_name():
    def cube(x):
        return x * x * x

    inputs = [np.ones(size, np.float32) for size in (3, 4)]
    with CompileCounter() as counter:
        jitted = jax.jit(cube)
        for _ in range(2):
            jitted(inputs[0])
        jitted(inputs[1])
        assert counter.count == 2
        assert all("cube" in name for name in counter.names)
    jax.jit(lambda x: x - 1)(inputs[0])
    assert counter.count == 2  # It stopped listening.


def test_the_writer_compiles_nothing(tmp_path):
    scalars = {"loss": jnp.ones(()), "x": np.float32(1)}
    with CompileCounter() as counter:
        writer = MetricsWriter(tmp_path)
        writer.write(1, scalars)
        writer.close()
    assert counter.names == []


def test_progress_off_a_terminal_is_plain_lines():
    stream = io.StringIO()
    with Progress(stream, line_seconds=0.0) as progress:
        progress.start("training", 4, done=1)
        progress.show("training", 2, "success 0.50 [0.1]")
        progress.show("training", 4, "success 0.75")
        progress.finish("training")
        progress.say("done [bold]")
    lines = stream.getvalue().splitlines()
    assert lines == [
        "training 2/4  success 0.50 [0.1]",
        "training 4/4  success 0.75",
        "done [bold]",
    ]


def test_plain_lines_are_not_too_many_but_the_last_comes():
    stream = io.StringIO()
    with Progress(stream, line_seconds=60.0) as progress:
        progress.start("evaluation", 500)
        for done in range(1, 501):
            progress.show("evaluation", done)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("evaluation 1/500")
    assert lines[1:] == ["evaluation 500/500"]


def test_progress_on_a_terminal_draws_bars(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    with Progress(stream) as progress:
        progress.start("training", 2)
        progress.start("evaluation", 9)  # Inside of the other.
        progress.show("evaluation", 9)
        progress.finish("evaluation", keep=False)
        progress.show("training", 2, "success 0.75")
        progress.finish("training")
    text = stream.getvalue()
    assert "success 0.75" in text
    assert "2/2" in text
    assert "━" in text
