"""ALFWorld by its real engine, against transcripts of the stock one."""

import asyncio
import pathlib
import shutil
import subprocess
import sys

import pytest
from gymnasium.utils.env_checker import check_env

from crbc_jax import envs
from crbc_jax.envs.alfworld.household import Household
from crbc_jax.envs.pool import EnvPool

COOL = "valid_seen/pick_cool_then_place_in_recep-Pot-None-DiningTable-21/"


@pytest.fixture(scope="module")
def env(data_dir):
    environment = envs.make("alfworld", data_dir=data_dir)
    yield environment
    environment.close()


def replay(env, task_id, plan):
    """Texts of the game, numbers of admissible commands, and the last step."""
    _, info = env.reset(options={"task": task_id})
    texts, counts = [info["feedback"]], [len(info["admissible_actions"])]
    for action in plan["plan"]:
        assert not texts[-1].startswith("Nothing") and not info["won"]
        _, reward, terminated, _, info = env.step(action)
        texts.append(info["feedback"])
        counts.append(len(info["admissible_actions"]))
        assert info["reason"] == ""
    return texts, counts, (reward, terminated, info["won"])


def test_all_golden_plans_are_won_with_the_stock_texts(env, plans):
    assert len(plans) == 30
    for number, (task_id, plan) in enumerate(plans.items()):
        for _ in range(2 if number % 5 == 0 else 1):  # A game played before, too.
            texts, counts, end = replay(env, task_id, plan)
            assert texts == plan["observations"]
            assert [count + 1 for count in counts] == plan["num_admissible"]  # help.
            assert end == (10.0, True, True)


def test_the_caches_change_no_command(data_dir, plans):
    """Stock and cached engine, each in a process of its own: the caches stay on."""
    program = f"""
import sys
from crbc_jax import envs
env = envs.make("alfworld", data_dir={data_dir!r}, cached=sys.argv[1] == "True")
for task_id in {sorted(plans)[::8]!r}:
    text, info = env.reset(options={{"task": task_id}})
    for number in range(6):
        actions = info["admissible_actions"]
        print(repr(info["anchor"]))
        *_, info = env.step(actions[7 * number % len(actions)])
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", program, cached],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for cached in ("False", "True")
    ]
    assert runs[0] == runs[1] and len(runs[0].splitlines()) == 24


def test_what_the_text_hides_is_told(env, plans):
    (task_id,) = [task for task in plans if task.startswith(COOL)]
    text, info = env.reset(options={"task": task_id})
    assert text == info["feedback"] + (
        "\nLocation: middle of the room. In hand: nothing."
    )
    for action in plans[task_id]["plan"]:
        text, *_, info = env.step(action)
    assert text.split("\n")[-1] == (
        "Location: diningtable 3. In hand: nothing. Moved so far: "
        "pot 1 (cooled) from stoveburner 4 to diningtable 3."
    )
    assert info["anchor"] == text + "\n" + ",".join(info["admissible_actions"])


def test_states_of_items():
    household = Household()
    for text in (
        "You arrive at fridge 1. The fridge 1 is closed.",
        "You pick up the mug 2 from the fridge 1.",
        "You clean the mug 2 using the sinkbasin 1.",
        "You heat the mug 2 using the microwave 1.",
        "You cool the mug 2 using the fridge 1.",
        "Nothing happens.",
    ):
        household.read(text)
    assert str(household) == "Location: fridge 1. In hand: mug 2 (clean, cooled)."
    household.read("You put the mug 2 in/on the shelf 3.")  # Games of ALFWorld 0.2.
    household.read("You pick up the mug 2 from the shelf 3.")
    assert "In hand: mug 2 (clean, cooled)" in str(household)
    assert "Moved so far: mug 2 (clean, cooled) from fridge 1 to shelf 3." in str(
        household
    )


@pytest.mark.parametrize(
    "action",
    ["", "put mug 1 in/on desk 1", "go to narnia 1", "gehe zum Bett ✨", "x" * 10_000],
)
def test_an_action_that_cannot_be_executed_costs_a_step(env, plans, action):
    task_id = min(plans)
    _, before = env.reset(options={"task": task_id})
    text, reward, terminated, truncated, info = env.step(action)
    assert text.startswith("Nothing happens.\nLocation: middle of the room.")
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info["reason"] == "not one of the admissible actions"
    assert info["admissible_actions"] == before["admissible_actions"]
    assert "help" not in info["admissible_actions"]


def test_the_step_limit_truncates(data_dir, plans):
    env = envs.make("alfworld", data_dir=data_dir, max_steps=2)
    env.reset(options={"task": min(plans)})
    assert env.step("look")[2:4] == (False, False)
    assert env.step("look")[2:4] == (False, True)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("look")


def test_gymnasium_finds_no_fault(data_dir):
    check_env(envs.make("alfworld", data_dir=data_dir), skip_render_check=True)


def test_the_expert_wins_about_as_fast_as_the_shortest_plan(data_dir, plans):
    for task_id in sorted(plans)[::3]:
        steps = envs.expert("alfworld", task_id, data_dir=data_dir)
        # The nearest of several items is not looked for.
        assert len(steps) <= len(plans[task_id]["plan"]) + 1
        assert steps[0].info["task_id"] == task_id
    with pytest.raises(ValueError, match="max_steps is 2"):
        envs.expert("alfworld", task_id, data_dir=data_dir, max_steps=2)


def test_tasks_are_the_same_on_every_machine(data_dir, plans, tmp_path, monkeypatch):
    train = envs.tasks("alfworld", "train", count=100, data_dir=data_dir)
    seen = envs.tasks("alfworld", "eval", count=100, data_dir=data_dir)
    unseen = envs.tasks(
        "alfworld", "eval", count=100, data_dir=data_dir, eval_folder="valid_unseen"
    )
    assert sorted(train.ids + seen.ids + unseen.ids) == sorted(plans)
    types = {envs.category("alfworld", i, data_dir=data_dir) for i in train.ids}
    assert types == {"Pick", "Look", "Clean", "Heat", "Cool", "Pick2"}
    # A copy elsewhere, whose folders are listed in another order.
    copied = tmp_path / "alfworld"
    shutil.copytree(data_dir, copied)
    glob = pathlib.Path.glob
    monkeypatch.setattr(pathlib.Path, "glob", lambda *args: reversed(list(glob(*args))))
    monkeypatch.setenv("ALFWORLD_DATA", str(copied))
    assert envs.tasks("alfworld", "train", count=100) == train
    few = envs.tasks("alfworld", "train", count=6)
    assert set(few.ids) < set(train.ids) and few.digest != train.digest
    # The digest is of what the games are, not only of their names.
    game = copied / "json_2.1.1" / few.ids[0] / "game.tw-pddl"
    game.write_text(game.read_text() + " ")
    assert envs.tasks("alfworld", "train", count=6).digest != few.digest


def test_only_the_types_asked_for(data_dir):
    found = envs.tasks(
        "alfworld", "train", count=100, data_dir=data_dir, task_types="Look,Pick2"
    )
    types = [envs.category("alfworld", i, data_dir=data_dir) for i in found.ids]
    assert sorted(types) == ["Look"] * 3 + ["Pick2"] * 3


def test_splits_that_share_a_game_are_refused(data_dir, tmp_path):
    copied = tmp_path / "alfworld"
    shutil.copytree(data_dir, copied)
    train = copied / "json_2.1.1" / "train"
    game = next(train.iterdir())
    shutil.copytree(game, copied / "json_2.1.1" / "valid_seen" / game.name)
    for split in ("train", "eval"):
        with pytest.raises(ValueError, match="must not share games"):
            envs.tasks("alfworld", split, count=100, data_dir=str(copied))


def test_data_that_is_not_there(tmp_path, monkeypatch):
    """PITFALLS C3: an error at once, with the remedy."""
    with pytest.raises(ValueError, match=r"data_dir=.*alfworld-download"):
        envs.tasks("alfworld", "train", count=1, data_dir=str(tmp_path))
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"no solvable game.*alfworld-download"):
        envs.tasks("alfworld", "train", count=1, data_dir=str(tmp_path))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"none/json_2\.1\.1 is no folder"):
        envs.make("alfworld")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"train_folder": "valid_seen"}, "another than train_folder"),
        ({"eval_folder": "test"}, "eval_folder='test': must be one of"),
        ({"task_types": "Pick,Slice"}, "task_types='Pick,Slice'"),
        ({"max_steps": 0}, "max_steps=0"),
    ],
)
def test_options_are_checked(data_dir, options, message):
    with pytest.raises(ValueError, match=message):
        envs.make("alfworld", data_dir=data_dir, **options)


@pytest.mark.parametrize("task_id", ["", "train", "../../etc/passwd/x", "train/a/b"])
def test_a_task_that_is_none_is_named(env, task_id):
    with pytest.raises(ValueError, match="is no game below"):
        envs.category("alfworld", task_id, data_dir=env.options.data_dir)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_worker_processes_play_the_same(data_dir, plans, num_workers):
    async def play(pool, task_id):
        async with pool.environment() as env:
            texts = [(await env.reset(task_id))[1]["feedback"]]
            for action in plans[task_id]["plan"]:
                texts.append((await env.step(action))[-1]["feedback"])
        return texts

    async def run():
        options = {"data_dir": data_dir}
        async with EnvPool("alfworld", options, num_workers, 60.0) as pool:
            # The same game in several environments at once, and others beside it.
            tasks = [*sorted(plans)[:4], *[min(plans)] * 3]
            return tasks, await asyncio.gather(*(play(pool, i) for i in tasks))

    for task_id, texts in zip(*asyncio.run(run()), strict=True):
        assert texts == plans[task_id]["observations"]
