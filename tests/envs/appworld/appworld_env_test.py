"""The client of AppWorld's server: by a fake one, and by the real one without data.

The real server needs $APPWORLD_PYTHON, an interpreter with the package appworld.
"""

import asyncio
import os
import pathlib
import subprocess
import sys
import time

import pytest

from crbc_jax import envs
from crbc_jax.envs.appworld.server import Server
from crbc_jax.envs.base import EnvironmentFailed
from crbc_jax.envs.pool import EnvPool
from crbc_jax.rollout.actions import parse_code
from crbc_jax.rollout.templates import PROMPTS
from crbc_jax.rollout.templates.base import Record, Scene

FAKE = pathlib.Path(__file__).parent / "fake"


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    sets = tmp_path / "data" / "datasets"
    sets.mkdir(parents=True)
    (sets / "train.txt").write_text("b_1#tag\na_2\n\nc_1\n")
    (sets / "dev.txt").write_text("d_1\n")
    return {"python": sys.executable, "root": str(tmp_path)}


@pytest.fixture
def env(options):
    environment = envs.make("appworld", **options, max_steps=3, call_timeout=1.0)
    yield environment
    environment.close()


def test_an_episode(env):
    text, info = env.reset(options={"task": "b_1"})
    assert text.startswith("Task: Like all songs of my playlist.\nFor: Ada Byron, ada@")
    assert (info["anchor"], info["won"], info["admissible_actions"]) == (
        "",
        False,
        None,
    )
    text, reward, terminated, truncated, info = env.step("print('Ä')\nx = 1")
    assert text == info["anchor"] == "ran print('Ä')\nx = 1"
    assert (reward, terminated, truncated) == (0.0, False, False)
    *_, reward, terminated, truncated, info = env.step("apis.x.complete_task()")
    assert (reward, terminated, truncated) == (10.0, True, False)
    assert info["won"] and info["test_share"] == 1.0


def test_a_completed_task_whose_tests_fail_is_lost(env):
    env.reset(options={"task": "a_2"})
    _, reward, terminated, _, info = env.step("complete_task")
    assert (reward, terminated, info["won"]) == (0.0, True, False)
    assert info["test_share"] == 0.75
    env.reset(options={"task": "b_1"})  # The server takes the next task.
    assert env.step("complete_task")[1] == 10.0


def test_no_code_costs_a_step_and_the_limit_truncates(env):
    env.reset(options={"task": "b_1"})
    assert env.step("x = 1")[-1]["anchor"] == "ran x = 1"
    text, *_, info = env.step(" ")
    assert text == info["reason"] == "no code" and info["anchor"] == "ran x = 1"
    assert env.step("y")[2:4] == (False, True)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("z")


def test_a_task_that_the_server_does_not_know(env):
    with pytest.raises(RuntimeError, match=r"500 to /initialize.*doesn't exist"):
        env.reset(options={"task": "none_1"})
    env.reset(options={"task": "b_1"})


@pytest.mark.parametrize("code", ["die", "hang"])
def test_a_server_that_fails_aborts_its_episode_alone(options, code):
    async def run():
        settings = options | {"call_timeout": 0.5}
        async with EnvPool("appworld", settings, 1, 30.0) as pool:
            async with pool.environment() as bad, pool.environment() as good:
                await bad.reset("b_1")
                await good.reset("c_1")
                with pytest.raises(EnvironmentFailed):
                    await bad.step(code)
                assert (await good.step("complete_task"))[1] == 10.0
                await bad.reset("b_1")  # By a server of its own again.

    asyncio.run(run())


def test_the_server_ends_with_its_parent(options, tmp_path):
    program = (
        "import os, crbc_jax.envs as envs\n"
        f"env = envs.make('appworld', **{options!r})\n"
        "env.reset(options={'task': 'b_1'})\n"
        "print(env._server._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = os.pathsep.join([str(FAKE), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    pid = int(run.stdout)
    deadline = time.monotonic() + 10
    while pathlib.Path(f"/proc/{pid}/cmdline").exists():
        if not pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
            break  # It has ended, and nobody has asked for its exit code.
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_tasks_are_those_of_the_data_set(options):
    train = envs.tasks("appworld", "train", count=9, **options)
    assert train.ids == ("a_2", "b_1", "c_1")
    assert envs.tasks("appworld", "eval", count=9, **options).ids == ("d_1",)
    with pytest.raises(ValueError, match=r"test_normal\.txt is missing.*download data"):
        envs.tasks("appworld", "eval", count=9, eval_set="test_normal", **options)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"python": ""}, r"python=''.*install\.sh"),
        ({"root": "/no/such"}, r"root=.*install\.sh"),
        ({"eval_set": "train"}, "another than train_set"),
        ({"train_set": "all"}, "train_set='all'"),
        ({"max_steps": 0}, "max_steps=0"),
    ],
)
def test_options_are_checked(options, change, message):
    with pytest.raises(ValueError, match=message):
        envs.make("appworld", **options | change)


def test_code_is_read_as_it_is_written():
    reply = "<think>use <code>a</code></think>\n<code>\nif A:\n    print('B')\n</code>"
    assert parse_code(reply) == ("if A:\n    print('B')", "ok")
    assert parse_code("print(1)").code == "no_tag"
    assert parse_code("<code> \n</code>").code == "empty"
    assert parse_code("<think> <code>a</code>").code == "open_think"
    assert parse_code("<code>a</code><code>b</code>") == ("b", "many_tags")


def test_the_prompt_tells_task_code_and_output():
    records = [Record("Task: T\nFor: Ada", "print(1)")]
    prompt = PROMPTS["appworld"].prompt(Scene(records, 1, "Task: T\nFor: Ada", "1", ()))
    assert "Task: T" in prompt and "Action 1: print(1)" in prompt
    assert "The last output:\n1\n" in prompt and "complete_task" in prompt


def test_the_real_server_speaks_this_protocol(tmp_path):
    """Without task data it starts, and refuses a task with the reason."""
    python = os.environ.get("APPWORLD_PYTHON")
    if not python:
        pytest.skip("no $APPWORLD_PYTHON: see third_party/appworld")
    with Server(
        python, str(tmp_path), start_timeout=120.0, call_timeout=30.0
    ) as server:
        with pytest.raises(RuntimeError, match="500 to /initialize"):
            server.call("initialize", task_id="82e2fac_1", experiment_name="x")
        with pytest.raises(RuntimeError, match=r"answers \d+ to /execute"):
            server.call("execute", task_id="82e2fac_1", code="print(1)")
