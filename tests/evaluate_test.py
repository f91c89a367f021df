import asyncio
import collections
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from crbc_jax import envs
from crbc_jax.checkpoint import Checkpointer
from crbc_jax.config import default_config
from crbc_jax.envs.pool import EnvPool
from crbc_jax.evaluate import EvalResult, Proportion, evaluate, wilson_interval
from crbc_jax.models.tokenizer import load_tokenizer
from crbc_jax.rollout.collect import EVAL, EpisodeKey, Player, run_episode
from crbc_jax.rollout.scripted import ScriptedEngine
from crbc_jax.rollout.templates import PROMPTS
from crbc_jax.types import TrainState, Trajectory

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "experiments" / "evaluate.py"


@pytest.mark.parametrize(
    "successes, trials", [(0, 10), (10, 10), (1, 3), (105, 256), (189, 256), (0, 1)]
)
def test_wilson_matches_scipy(successes, trials):
    oracle = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    np.testing.assert_allclose(
        wilson_interval(successes, trials), (oracle.low, oracle.high), atol=1e-12
    )


def test_wilson_at_its_ends():
    assert wilson_interval(0, 7)[0] == 0.0
    assert wilson_interval(7, 7)[1] == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="successes=4 must lie in 0..trials=3"):
        wilson_interval(4, 3)


def player(outcomes, log=None, in_flight=None):
    """Plays tasks with canned outcomes, in an order that depends on the task."""

    async def run_episode(task_id):
        if log is not None:
            log.append(task_id)
        if in_flight is not None:
            in_flight.append(in_flight[-1] + 1)
        for _ in range(sum(map(ord, task_id)) % 7):
            await asyncio.sleep(0)
        if in_flight is not None:
            in_flight.append(in_flight[-1] - 1)
        outcome = outcomes[task_id]
        error = "worker died" if outcome == "aborted" else ""
        return Trajectory(task_id, 0, 0, outcome, (), "", "", error=error)

    return run_episode


def panel(size):
    cycle = ["success", "failure", "truncated", "success", "aborted"]
    return {f"level-{index}": cycle[index % 5] for index in range(size)}


def test_21_tasks_are_21_for_any_concurrency():
    outcomes = panel(21)
    results = []
    for max_concurrent in (1, 2, 8, 100):
        log, in_flight = [], [0]
        result = asyncio.run(
            evaluate(
                player(outcomes, log, in_flight),
                list(outcomes),
                max_concurrent=max_concurrent,
            )
        )
        assert collections.Counter(log) == dict.fromkeys(outcomes, 1)
        assert max(in_flight) <= max_concurrent
        results.append(result)
    assert all(result == results[0] for result in results)
    assert [task.task_id for task in results[0].tasks] == list(outcomes)
    assert results[0].overall == Proportion(9, 17)
    assert results[0].counts == "17/21 tasks, 4 aborted"
    assert results[0].scalars()["eval/aborted"] == 4
    assert results[0].scalars()["eval/success_rate"] == 9 / 17


def test_groups_by_category_in_order_of_number():
    outcomes = panel(20)
    category = {name: 2 + index % 9 for index, name in enumerate(outcomes)}
    done = []
    result = asyncio.run(
        evaluate(
            player(outcomes),
            list(outcomes),
            max_concurrent=3,
            category=category,
            on_done=done.append,
        )
    )
    assert list(result.by_category) == [str(moves) for moves in range(2, 11)]
    assert result.by_category["2"] == Proportion(2, 2)  # The third was aborted.
    assert sum(share.trials for share in result.by_category.values()) == 16
    assert done == list(range(1, 21))


def test_result_is_json_even_if_all_were_aborted():
    outcomes = {"a": "aborted", "b": "aborted"}
    result = asyncio.run(evaluate(player(outcomes), ["a", "b"], max_concurrent=2))
    record = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert record["overall"] == {
        "successes": 0, "trials": 0, "rate": None, "low": 0.0, "high": 1.0
    }  # fmt: skip
    assert record["num_aborted"] == 2
    assert record["tasks"][0]["error"] == "worker died"
    assert isinstance(result, EvalResult)
    assert list(record["by_category"]) == [""]


@pytest.mark.parametrize("ids, what", [([], "got 0"), (["a", "b", "a"], "repeated: ")])
def test_empty_or_repeating_panel_is_refused(ids, what):
    with pytest.raises(ValueError, match=what):
        asyncio.run(evaluate(player({}), ids, max_concurrent=1))


def test_an_error_stops_the_other_episodes():
    cancelled = []

    async def run_episode(task_id):
        if task_id == "bad":
            raise ValueError("policy is broken")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(task_id)
            raise

    async def main():
        with pytest.raises(ValueError, match="policy is broken"):
            await evaluate(run_episode, ["a", "bad", "c"], max_concurrent=3)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert cancelled == ["a", "c"]


def test_an_episode_of_another_task_is_refused():
    async def run_episode(task_id):
        return Trajectory("other", 0, 0, "success", (), "", "")

    with pytest.raises(ValueError, match="'a' came back as 'other'"):
        asyncio.run(evaluate(run_episode, ["a"], max_concurrent=1))


def play_sokoban(num_workers):
    """The real path from tasks to a result, but for a policy that walks by its seed."""
    options = {"max_steps": 12, "min_moves": 2, "max_moves": 3}
    tokenizer = load_tokenizer("preset:sokoban_tiny")
    template = PROMPTS["sokoban_compact"]
    replies = [
        tokenizer.encode(template.reply(action))
        for action in ("up", "down", "left", "right")
    ]
    task_ids = envs.tasks("sokoban", "eval", count=21, **options).ids
    engine = ScriptedEngine(lambda request: replies[request.seed % 4])

    async def main():
        await engine.publish(None, 5)
        async with EnvPool("sokoban", options, num_workers, step_timeout=60.0) as pool:
            player = Player(
                engine,
                pool,
                tokenizer,
                template,
                history_length=0,
                max_prompt_tokens=32,
                max_response_tokens=4,
                stop_ids=(tokenizer.id_of("</action>"),),
                seed=0,
            )

            async def run(task_id):
                key = EpisodeKey(EVAL, 5, task_ids.index(task_id), 0)
                return await run_episode(
                    player, task_id, key, temperature=0.4, versions=range(5, 6)
                )

            moves = {i: envs.category("sokoban", i, **options) for i in task_ids}
            return await evaluate(run, task_ids, max_concurrent=8, category=moves)

    return asyncio.run(main())


def test_sokoban_panel_is_the_same_for_any_number_of_workers():
    alone, spread = play_sokoban(num_workers=0), play_sokoban(num_workers=2)
    assert alone == spread
    assert alone.counts == "21/21 tasks"
    assert len({task.task_id for task in alone.tasks}) == 21
    assert alone.overall.successes > 0
    assert set(alone.by_category) <= {"2", "3"}


# Runs the script on canned episodes in place of the policy's.
CANNED = """
import asyncio, importlib.util, pathlib, sys
script = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(script.parents[1]))
from crbc_jax.evaluate import evaluate
from tests.evaluate_test import panel, player

def play(config, checkpoints, step):
    print(f"played {step} at {config.evaluate.temperature}")
    outcomes = panel(20)
    moves = {name: 2 + index % 2 for index, name in enumerate(outcomes)}
    return asyncio.run(
        evaluate(player(outcomes), list(outcomes), max_concurrent=4, category=moves)
    )

spec = importlib.util.spec_from_file_location("script", script)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.play = play
del sys.argv[0]
module.command_line.start(module.main, ["workdir=runs/quickstart"])
"""


def run_script(*arguments, canned=False):
    """Exit status, standard output and standard error of the script."""
    command = [sys.executable, *(["-c", CANNED] if canned else []), str(SCRIPT)]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    (workdir / "config.json").write_text(default_config().to_json())
    checkpoints = Checkpointer(workdir, keep_last=2)
    state = TrainState({"w": np.ones(2, np.float32)}, (), None, np.int32(0))
    for step, success in [(10, 0.8), (20, 0.7)]:
        identity = {"tasks": {"eval": "0123456789abcdef"}}
        checkpoints.save(step, state, {"identity": identity}, success=success)
    return workdir


@pytest.mark.parametrize(
    "flags, step, temperature",
    [
        ([], 10, 0.4),  # The best, at the config's own temperature.
        (["--checkpoint=latest", "--temperature=0"], 20, 0.0),
        (["--checkpoint=20", "--temperature=1.5"], 20, 1.5),
    ],
)
def test_script_prints_a_table_and_writes_json(workdir, flags, step, temperature):
    status, output, error = run_script(f"--workdir={workdir}", *flags, canned=True)
    assert (status, error) == (0, "")
    assert f"played {step} at {temperature}" in output
    assert "16/20 tasks, 4 aborted" in output
    assert "panel 0123456789ab" in output
    assert ("flatters" in output) == (not flags)
    path = workdir / f"evaluation-{step:06d}-t{temperature:g}.json"
    record = json.loads(path.read_text())
    assert record["update"] == step
    assert record["temperature"] == temperature
    assert record["panel"] == "0123456789abcdef"
    assert record["overall"]["successes"] == 8
    assert list(record["by_category"]) == ["2", "3"]
    assert len(record["tasks"]) == 20


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "--workdir is missing"),
        (["--workdir=nowhere"], "--workdir='nowhere' holds no run"),
        (["--workdir={empty}"], "is not the config of a run: it lacks ['advantage',"),
        (["--workdir=.", "--temperature=-1"], "temperature"),
        (["--workdir=.", "--checkpont=best"], "Did you mean: checkpoint"),
        (["--workdir={}", "--checkpoint=15"], "use `best` .* or one of [10, 20]"),
    ],
)
def test_script_refuses_in_one_line(workdir, flags, message, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    flags = [flag.replace("{empty}", str(tmp_path)) for flag in flags]
    flags = [flag.replace("{}", str(workdir)) for flag in flags]
    status, _, error = run_script(*flags)
    assert status == 1
    assert error.startswith("evaluate.py: ")
    assert "Traceback" not in error
    start, _, end = message.partition(" .* ")
    assert start in error and end in error
