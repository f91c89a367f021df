import asyncio
import collections
import json

import numpy as np
import pytest
from scipy import stats

from crbc_jax.evaluate import EvalResult, Proportion, evaluate, wilson_interval
from crbc_jax.types import Trajectory


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


def test_groups_by_difficulty_in_order_of_number():
    outcomes = panel(20)
    difficulty = {name: 2 + index % 9 for index, name in enumerate(outcomes)}
    done = []
    result = asyncio.run(
        evaluate(
            player(outcomes),
            list(outcomes),
            max_concurrent=3,
            difficulty=difficulty,
            on_done=done.append,
        )
    )
    assert list(result.by_difficulty) == [str(moves) for moves in range(2, 11)]
    assert result.by_difficulty["2"] == Proportion(2, 2)  # The third was aborted.
    assert sum(share.trials for share in result.by_difficulty.values()) == 16
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
