"""The scripts of experiments/, as a user runs them: on real parts, in processes."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from crbc_jax.metrics import comparable, read_metrics

ROOT = pathlib.Path(__file__).parent.parent
# Small, with two evaluations and several checkpoints in it.
TINY = (
    "--config=configs/quickstart.py:smoke",
    "--config.env.num_eval_tasks=16",
    "--config.env.num_train_tasks=32",
    "--config.warm_start.steps=30",
    "--config.warm_start.noise_steps=0",
    "--config.learner.num_updates=4",
    "--config.evaluate.every=2",
    "--config.checkpoint.every=1",
)


# Whole processes, several in a test: slow where the machine is busy.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Of the processes: what one of them compiles, the others find."""
    cache = tmp_path_factory.mktemp("compiled")
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def script(environment, name, *arguments, **options):
    return subprocess.run(
        [sys.executable, f"experiments/{name}.py", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        **options,
    )


@pytest.fixture(scope="session")
def finished(environment, tmp_path_factory):
    """A run to the end, and what it printed."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    result = script(environment, "run", *TINY, f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    return workdir, result.stdout


def rows_of(workdir):
    return [comparable(row) for row in read_metrics(workdir)]


def test_a_run_leaves_all_that_readme_names(finished):
    workdir, output = finished
    for name in ("config.json", "metrics.jsonl", "report.html", "curves.png"):
        assert (workdir / name).stat().st_size > 0
    assert len(list(workdir.glob("events.out.tfevents.*"))) == 1
    assert [p.name[:6] for p in sorted(workdir.glob("rollouts/*"))] == [
        f"{update:06d}" for update in range(1, 5)
    ]
    assert "149,824 parameters" in output.split("warm start")[0]  # The plan is first.
    assert "held-out success before" in output and "report.html" in output


def test_a_run_logs_what_the_issue_of_a_run_is_judged_by(finished):
    rows = read_metrics(finished[0])
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/success_rate" in row] == [0, 2, 4]
    assert {
        "learner/loss",
        "learner/entropy",
        "learner/clip_fraction",
        "learner/policy_kl",
        "learner/grad_norm",
        "credit/residual",
        "credit/zero_variance_groups",
        "credit/singleton_share",
        "rollout/invalid_share",
        "rollout/success_rate",
        "seconds/rollout",
        "seconds/update",
    } <= rows[1].keys()
    assert rows[-1]["compilations"] <= 12


def test_a_policy_on_its_own_rollouts_has_ratio_one(finished):
    # One optimiser step an update: old and current parameters are the same.
    assert {row["learner/ratio_max"] for row in rows_of(finished[0])[1:]} == {1.0}


def test_rollouts_hold_values_and_credit(finished):
    import gzip

    with gzip.open(finished[0] / "rollouts" / "000004.jsonl.gz", "rt") as file:
        steps = [step for line in file for step in json.loads(line)["steps"]]
    for name in ("value", "action_value", "credit", "advantage"):
        assert all(isinstance(step["credit"][name], float) for step in steps)
    assert any(step["credit"]["credit"] for step in steps)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_seed_gives_the_same_numbers(environment, finished, tmp_path, workers):
    workdir = tmp_path / "again"
    more = f"--config.env.num_workers={workers}"
    result = script(environment, "run", *TINY, more, f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    assert rows_of(workdir) == rows_of(finished[0])
    for path in sorted(workdir.glob("rollouts/*")):
        same = finished[0] / "rollouts" / path.name
        assert path.read_bytes() == same.read_bytes()


def test_an_exported_policy_begins_another_run(environment, finished, tmp_path):
    model, workdir = tmp_path / "model", tmp_path / "from_export"
    arguments = (f"--workdir={finished[0]}", f"--directory={model}")
    result = script(environment, "export", *arguments, "--checkpoint=4")
    assert result.returncode == 0, result.stderr
    more = (f"--config.model.directory={model}", "--config.warm_start.steps=0")
    result = script(
        environment,
        "run",
        *TINY,
        *more,
        "--config.learner.num_updates=0",
        f"--workdir={workdir}",
    )
    assert result.returncode == 0, result.stderr
    held_out = [
        rows_of(path)[-1]["eval/success_rate"] for path in (finished[0], workdir)
    ]
    assert held_out[0] == held_out[1]  # Equal weights, panel and seeds.

    # Adapters train on top of it, and the model itself stays.
    adapted = tmp_path / "adapted"
    result = script(
        environment,
        "run",
        *TINY,
        *more,
        "--config.model.lora_rank=4",
        "--config.learner.num_updates=2",
        f"--workdir={adapted}",
    )
    assert result.returncode == 0, result.stderr
    assert {row["learner/ratio_max"] for row in rows_of(adapted)[1:]} == {1.0}
    for kind in ("adapters", "noadapters"):
        result = script(
            environment,
            "export",
            f"--workdir={adapted}",
            "--checkpoint=2",
            f"--directory={tmp_path / kind}",
            f"--{kind}",
        )
        assert result.returncode == 0, result.stderr
    tensors = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (model, tmp_path / "noadapters")
    )
    changed = {n for n in before if not np.array_equal(before[n], after[n])}
    assert changed == {n for n in before if "_proj.weight" in n}

    again = script(environment, "export", *arguments)
    assert again.returncode == 1 and "exists; choose a new one" in again.stderr


def test_another_seed_gives_other_numbers(environment, finished, tmp_path):
    workdir = tmp_path / "other"
    more = ("--config.seed=1", "--config.learner.num_updates=1")
    result = script(environment, "run", *TINY, *more, f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    assert rows_of(workdir)[1] != rows_of(finished[0])[1]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_killed_run_ends_in_the_same_bits(environment, tmp_path, lag):
    result = script(
        environment,
        "check_resume",
        "--kills=2",
        f"--max_policy_lag={lag}",
        f"--workdir={tmp_path}",
        f"--config={TINY[0].removeprefix('--config=')}",
        *(f"--override={a.removeprefix('--config.')}" for a in TINY[1:]),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal bit for bit after 2 kills" in result.stdout


def test_ctrl_c_saves_and_the_same_command_continues(environment, finished, tmp_path):
    workdir = tmp_path / "stopped"
    arguments = [*TINY, f"--workdir={workdir}", "--config.checkpoint.every=100"]
    arguments.append("--config.evaluate.every=100")
    process = subprocess.Popen(
        [sys.executable, "experiments/run.py", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (workdir / "rollouts").exists():  # In the middle of the first updates.
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "the same command continues" in errors
    reached = max(int(p.name) for p in (workdir / "checkpoints").glob("[0-9]*"))
    assert reached >= 1
    result = script(environment, "run", *arguments)
    assert result.returncode == 0, result.stderr
    assert f"continuing after update {reached} of 4" in result.stdout
    assert (
        rows_of(workdir)[1]["learner/loss"] == rows_of(finished[0])[1]["learner/loss"]
    )


def test_evaluate_plays_every_task_once(environment, finished):
    workdir, _ = finished
    result = script(environment, "evaluate", f"--workdir={workdir}", "--temperature=0")
    assert result.returncode == 0, result.stderr
    assert "16/16 tasks" in result.stdout
    (path,) = workdir.glob("evaluation-*-t0.json")
    tasks = [task["task_id"] for task in json.loads(path.read_text())["tasks"]]
    assert len(tasks) == len(set(tasks)) == 16


def test_evaluate_agrees_with_the_run(environment, finished):
    workdir, _ = finished
    result = script(environment, "evaluate", f"--workdir={workdir}", "--checkpoint=4")
    assert result.returncode == 0, result.stderr
    path = workdir / "evaluation-000004-t0.4.json"
    rate = json.loads(path.read_text())["overall"]["rate"]
    assert rate == read_metrics(workdir)[-1]["eval/success_rate"]


def test_a_finished_run_trains_no_more(environment, finished):
    workdir, _ = finished
    before = (workdir / "metrics.jsonl").read_bytes()
    result = script(environment, "run", *TINY, f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_a_workdir_of_another_config_is_refused_and_kept(environment, finished):
    workdir, _ = finished
    before = {p: p.stat().st_mtime_ns for p in workdir.rglob("*") if p.is_file()}
    more = "--config.learner.learning_rate=0.5"
    result = script(environment, "run", *TINY, more, f"--workdir={workdir}")
    assert result.returncode == 1
    assert "config.learner.learning_rate: 0.0003" in result.stderr
    assert "0.5 now" in result.stderr
    assert "Traceback" not in result.stderr
    assert before == {
        p: p.stat().st_mtime_ns for p in workdir.rglob("*") if p.is_file()
    }


def test_more_updates_may_be_asked_of_a_finished_run(environment, finished, tmp_path):
    import shutil

    workdir = tmp_path / "longer"
    shutil.copytree(finished[0], workdir)
    more = "--config.learner.num_updates=5"
    result = script(environment, "run", *TINY, more, f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    assert [row["step"] for row in read_metrics(workdir)] == [0, 1, 2, 3, 4, 5]


def test_a_policy_that_never_parses_stops_before_the_first_update(
    environment, tmp_path
):
    more = ("--config.warm_start.steps=0", f"--workdir={tmp_path / 'run'}")
    result = script(environment, "run", *TINY, *more)
    assert result.returncode == 1
    assert "no_tag" in result.stderr and "replies: [" in result.stderr
    assert "Traceback" not in result.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0]


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(
    environment, tmp_path
):
    workdir = tmp_path / "run"
    more = (
        "--config.learner.learning_rate=1e38",
        "--config.rollout.max_invalid_share=1",
    )
    result = script(environment, "run", *TINY, *more, f"--workdir={workdir}")
    assert result.returncode == 1
    # The policy may also be caught as it samples, with log-probabilities of NaN.
    assert "finite" in result.stderr and "rollouts/00000" in result.stderr
    assert "Traceback" not in result.stderr
    assert list((workdir / "checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--config=configs/quickstrat.py"], ["no config file", "quickstart.py"]),
        (["--config", "configs/quickstrat.py"], ["no config file", "quickstart.py"]),
        (["--config=configs/quickstart.py:smok"], ["'smok'", "smoke"]),
        ([], ["--config is missing"]),
        ([TINY[0], "--config.loss.clip_lo=0.1"], ["clip_lo", "clip_low"]),
        ([TINY[0], "--config.lerner.num_updates=1"], ["'lerner'", '"learner"']),
        ([TINY[0], "--config.learner.num_updates=1e3"], ["1e3", "whole number"]),
        ([TINY[0], "--config.rollout.group_size=1"], ["rollout.group_size=1"]),
        ([TINY[0], "--config.advantage.crbc.beta=1.5"], ["beta", "(0, 1]", "1.5"]),
        ([TINY[0], "--config.advantage.name=gropu"], ["'gropu'", "'grpo'"]),
        ([TINY[0], "--config.env.num_train_tasks=0"], ["num_train_tasks=0"]),
        ([TINY[0], "--config.env.sokoban.levels=/no/such"], ["/no/such"]),
        ([TINY[0], "--config.model.directory=/no/such"], ["/no/such", "preset:"]),
        ([TINY[0], "--workdir=/dev/null/run"], ["--workdir", "/dev/null"]),
        ([TINY[0], f"--workdir={ROOT}/tests"], ["is not empty and holds no run"]),
    ],
)
def test_bad_input_is_one_clear_error(environment, arguments, words):
    started = time.monotonic()
    result = script(environment, "run", *arguments)
    assert time.monotonic() - started < 60  # 5 s on a quiet machine.
    assert result.returncode == 1
    for word in words:
        assert word in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "argument", ["--estimators=gropu", "--estimators=migpo", "--seeds=a", "--seeds=,0"]
)
def test_compare_refuses_before_the_first_run(environment, tmp_path, argument):
    workdir = tmp_path / "compare"
    result = script(environment, "compare", TINY[0], argument, f"--workdir={workdir}")
    assert result.returncode == 1
    assert argument.split("=")[0] in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not workdir.exists()
