"""Task order, interruption, and the folder of a run."""

import asyncio
import collections
import os
import signal
import time

import jax
import numpy as np
import pytest

from crbc_jax.background import Background, Interrupted, StopSignal
from crbc_jax.config import default_config
from crbc_jax.stages import Credit, Rollouts, task_schedule
from crbc_jax.types import Step, Trajectory, UserError
from crbc_jax.workdir import Workdir

TASKS = [f"task-{i}" for i in range(10)]
DIGESTS = {"train": "t", "eval": "e"}


def test_every_epoch_plays_every_task_once_in_another_order():
    stream = [t for u in range(10) for t in task_schedule(TASKS, 0, u, 3)]
    epochs = [stream[i : i + 10] for i in range(0, 30, 10)]
    assert all(sorted(epoch) == TASKS for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_schedule_of_an_update_needs_no_history():
    assert task_schedule(TASKS, 5, 7, 4) == task_schedule(list(TASKS), 5, 7, 4)
    assert task_schedule(TASKS, 5, 7, 4) != task_schedule(TASKS, 6, 7, 4)


def test_an_update_may_span_epochs_and_ask_for_more_than_there_is():
    tasks = task_schedule(TASKS, 0, 0, 25)
    assert set(collections.Counter(tasks).values()) == {2, 3}


def test_a_signal_cancels_what_waits_and_lets_it_clean_up():
    cleaned = []

    async def hang():
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    before = signal.getsignal(signal.SIGINT)
    with StopSignal() as stop, Background(stop) as background:
        future = background.start(hang())
        os.kill(os.getpid(), signal.SIGINT)
        started = time.monotonic()
        with pytest.raises(Interrupted) as error:
            background.finish(future)
        assert time.monotonic() - started < 5
    assert error.value.signal_number == signal.SIGINT and cleaned == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_signal_acts_at_once():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        while not stop.number:
            time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)


def test_an_error_in_the_background_comes_out_in_front():
    async def fail():
        raise ValueError("the engine is gone")

    with Background(StopSignal()) as background:
        with pytest.raises(ValueError, match="the engine is gone"):
            background.finish(background.start(fail()))


def test_a_workdir_belongs_to_one_run(tmp_path):
    config = default_config()
    Workdir(tmp_path / "run", config, DIGESTS)
    Workdir(tmp_path / "run", config, DIGESTS)  # The same run, again.
    config.seed = 1
    with pytest.raises(UserError, match=r"config.seed: 0 in the workdir, 1 now"):
        Workdir(tmp_path / "run", config, DIGESTS)
    with pytest.raises(UserError, match="tasks.eval"):
        Workdir(tmp_path / "run", default_config(), DIGESTS | {"eval": "other"})


def test_a_folder_with_anything_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("do not lose me")
    with pytest.raises(UserError, match="not empty and holds no run"):
        Workdir(tmp_path, default_config(), DIGESTS)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_damaged_record_of_the_run_is_named(tmp_path):
    Workdir(tmp_path / "run", default_config(), DIGESTS)
    (tmp_path / "run" / "run.json").write_text('{"config": ')
    with pytest.raises(UserError, match=r"run\.json is damaged .*record\.json"):
        Workdir(tmp_path / "run", default_config(), DIGESTS)


def test_a_run_that_was_killed_as_it_began_may_begin_again(tmp_path):
    (tmp_path / ".run.json").write_text('{"config": ')
    Workdir(tmp_path, default_config(), DIGESTS)


def test_a_summary_without_evaluations_says_so(tmp_path):
    assert "no eval" in Workdir(tmp_path, default_config(), DIGESTS).summary()


def test_a_folder_that_cannot_be_made_names_the_flag(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--workdir"):
        Workdir(tmp_path / "file" / "run", default_config(), DIGESTS)


def test_a_task_that_the_expert_cannot_solve_names_the_settings(monkeypatch):
    def expert(*_, **__):
        raise ValueError("task 'a' has one of 50 moves, max_steps is 15")

    monkeypatch.setattr("crbc_jax.envs.expert", expert)
    rollouts = object.__new__(Rollouts)  # Without engine and environments.
    rollouts._config, rollouts._player = default_config(), None
    rollouts.train_ids, rollouts._env_options = ["a"], {}
    with pytest.raises(UserError, match=r"50 moves.*max_steps=15.*warm_start\.steps=0"):
        rollouts.demonstrate()


def test_two_processes_do_not_train_in_one_workdir(tmp_path):
    first = Workdir(tmp_path / "run", default_config(), DIGESTS)
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        Workdir(tmp_path / "run", default_config(), DIGESTS)
    del first
    Workdir(tmp_path / "run", default_config(), DIGESTS)


def make_groups():
    """Three groups whose rollouts part at the first step, and differ in the end."""

    def make_step(anchor, action):
        ids = np.arange(1, 4, dtype=np.int32)
        return Step(
            observation="",
            anchor=anchor,
            prompt_ids=ids,
            response_ids=ids,
            logprobs=-np.ones(3, np.float32),
            policy_version=0,
            finish_reason="stop",
            action=action,
            parse_code="ok",
            is_action_valid=True,
            reward=-0.1,
        )

    def make(group, rollout):
        steps = [make_step("start", ["left", "right"][rollout % 2])]
        steps += [make_step(f"{group}-{i}", "up") for i in range(rollout + group)]
        outcome = "success" if rollout % 2 else "failure"
        return Trajectory(str(group), group, rollout, outcome, tuple(steps), "", "end")

    return [tuple(make(group, rollout) for rollout in range(4)) for group in range(3)]


@pytest.mark.parametrize("estimator", ["crbc", "reinforce_pp"])
def test_credit_over_devices_is_that_of_one(estimator):
    config = default_config().advantage
    config.name = estimator
    groups = make_groups()
    alone = Credit(config, jax.devices()[:1])(groups)
    spread = Credit(config, jax.devices())(groups)
    assert len(set(alone[0])) > 2
    for left, right in zip(
        jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)
