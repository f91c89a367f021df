"""Two real processes of four devices each do what one process with eight does."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest

from crbc_jax import distributed
from crbc_jax.checkpoint import Checkpointer
from crbc_jax.config import default_config
from crbc_jax.learner.learner import make_learner
from crbc_jax.learner.sharding import make_mesh
from crbc_jax.metrics import read_metrics
from crbc_jax.models.config import load_config

ROOT = pathlib.Path(__file__).parent.parent
pytestmark = pytest.mark.timeout(1200)
CACHE = pathlib.Path(tempfile.mkdtemp(prefix="compiled-"))
TINY = (
    "--config=configs/quickstart.py:smoke",
    "--config.env.num_eval_tasks=9",  # Not a multiple of the processes.
    "--config.env.num_train_tasks=32",
    "--config.warm_start.steps=20",
    "--config.warm_start.noise_steps=0",
    "--config.warm_start.batch_rows=64",
    "--config.rollout.tasks_per_update=3",
    "--config.learner.num_updates=3",
    "--config.learner.microbatch_rows=32",
    "--config.loss.kl_coef=0.01",
    "--config.evaluate.every=3",
    "--config.checkpoint.every=1",
    "--config.mesh.data=2",
    "--config.mesh.fsdp=-1",
)


def start(num_devices, *arguments):
    return subprocess.Popen(
        [sys.executable, "experiments/run.py", *TINY, *arguments],
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(num_devices),
            "JAX_COMPILATION_CACHE_DIR": str(CACHE),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_two(workdir, *arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    together = (f"--coordinator={address}", "--num_processes=2")
    return [
        start(4, f"--workdir={workdir}", *together, f"--process_id={i}", *arguments)
        for i in range(2)
    ]


def finish(processes, status=0):
    outputs = [process.communicate(timeout=600) for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == status, "\n".join(output)
    return outputs


def params_of(workdir, step):
    config = default_config()
    config.loss.kl_coef = 0.01
    learner = make_learner(config, load_config(config.model.directory), make_mesh())
    abstract = learner.abstract_state
    state, _ = Checkpointer(workdir, keep_last=1).restore(step, abstract)
    return state


def assert_close(one, other, atol):
    import jax

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), one, other
    )


def test_two_processes_are_one_also_after_a_stop_and_on_other_meshes(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    finish([start(8, f"--workdir={one}")])

    processes = start_two(two)
    while not (two / "checkpoints" / "000001").is_dir():
        assert all(process.poll() is None for process in processes), finish(processes)
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)  # To one of them: both save and stop.
    outputs = finish(processes, status=128 + signal.SIGTERM)
    assert "updates 1/3" in outputs[0][0] and "updates 1/3" not in outputs[1][0]
    saved = Checkpointer(two, keep_last=1).latest()
    assert saved in (1, 2)
    finish(start_two(two))

    rows = [read_metrics(workdir) for workdir in (one, two)]
    assert [row["step"] for row in rows[1]] == [0, 1, 2, 3]
    for row, other in zip(*rows, strict=True):
        for name in row:
            if name.startswith(("rollout/", "eval/", "batch/", "credit/")):
                np.testing.assert_allclose(other[name], row[name], atol=1e-4)
    tasks = [
        [
            t["task_id"]
            for t in json.loads((w / "evals/000003.json").read_text())["tasks"]
        ]
        for w in (one, two)
    ]
    assert tasks[0] == tasks[1] and len(set(tasks[0])) == 9
    expected = params_of(one, 3)
    assert_close(params_of(two, 3).params, expected.params, 1e-5)
    assert_close(params_of(two, 3).reference, expected.reference, 1e-5)

    # 8 devices -> 4 -> 1, one update each.
    for num_devices, updates in ((4, 4), (1, 5)):
        more = (f"--workdir={two}", f"--config.learner.num_updates={updates}")
        finish([start(num_devices, *more, "--config.mesh.data=1")])
    more = (f"--workdir={one}", "--config.learner.num_updates=5")
    finish([start(8, *more)])
    assert_close(params_of(two, 5).params, params_of(one, 5).params, 1e-5)


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_does_not_come_ends_the_others_in_time(tmp_path, number):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (
        f"--coordinator=127.0.0.1:{port}",
        "--num_processes=3",
        f"--process_id={number}",
        "--join_timeout=3",
    )
    started = time.monotonic()
    (output,) = finish([start(1, f"--workdir={tmp_path}", *arguments)], status=1)
    assert "3 processes of this run did not meet within 3 s" in output[1]
    who = ("1 came, not [1, 2]", "process 0 does not answer at 127.0.0.1")[number]
    assert who in output[1]
    assert "--num_processes=3 --process_id=I" in output[1]
    assert time.monotonic() - started < 60
    assert not list(tmp_path.iterdir())


def test_one_process_shares_with_nobody():
    assert distributed.share(7) == range(7)
    assert distributed.gather([1]) == [[1]]
    assert distributed.gather_items("ab") == ["a", "b"]
    assert distributed.agree(15) == 15
    distributed.check_equal({"a": 1}, "config")


def test_shares_are_whole_and_in_order(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 3)
    shares = []
    for number in range(3):
        monkeypatch.setattr("jax.process_index", lambda number=number: number)
        shares += [list(distributed.share(8))]
    assert sum(shares, []) == list(range(8))
    assert sorted(map(len, shares)) == [2, 3, 3]
