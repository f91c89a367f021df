import hashlib
import json
import pathlib
import warnings

import gymnasium.utils.env_checker
import numpy as np
import pytest

from crbc_jax import envs
from crbc_jax.envs.sokoban import render, rules

GOLDEN = pathlib.Path(__file__).parents[2] / "golden/sokoban_transitions.json"
TASK = "6x6-1box-2to9moves-train-000000"


def start(**options):
    env = envs.make("sokoban", **options)
    return env, *env.reset(options={"task": TASK})


@pytest.mark.parametrize("images", [False, True])
def test_gymnasium_accepts_it(images):
    env = envs.make("sokoban", images=images)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Without a registered spec the checker cannot build it anew to try renderers.
        warnings.filterwarnings("ignore", message=".*render modes.*")
        gymnasium.utils.env_checker.check_env(env, skip_render_check=True)


def test_a_level_file_can_be_played(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text(
        "; 0\n######\n#@$ .#\n#  #\n".replace("#  #", "#    #") + "######\n"
    )
    env = envs.make("sokoban", levels=str(path), max_steps=5)
    observation, info = env.reset(options={"task": "one.txt#000000"})
    assert observation == "######\n#PX_O#\n#____#\n######"
    assert info["optimal_moves"] is None and info["won"] is False
    observation, reward, terminated, truncated, info = env.step("right")
    assert (observation.splitlines()[1], reward) == ("#_PXO#", -0.1)
    observation, reward, terminated, truncated, info = env.step("right")
    assert observation == info["anchor"] == "######\n#__P√#\n#____#\n######"
    assert (reward, terminated, truncated, info["won"]) == (10.9, True, False, True)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("up")


def test_a_player_on_a_target_is_seen_and_is_another_anchor(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("######\n#@.$ #\n######\n")
    env = envs.make("sokoban", levels=str(path))
    _, before = env.reset(options={"task": "one.txt#000000"})
    observation, *_, after = env.step("right")
    assert observation.splitlines()[1] == "#_SX_#"
    observation, *_, back = env.step("left")
    assert before["anchor"] == back["anchor"] != after["anchor"]


@pytest.mark.parametrize("action", ["", "push up", "UP", "←" * 10_000, "up\n"])
def test_an_unknown_action_costs_a_step_and_changes_nothing(action):
    env, observation, _ = start(max_steps=9)
    for step in range(9):
        after, reward, terminated, truncated, info = env.step(action)
        assert (after, reward, terminated) == (observation, -0.1, False)
        assert truncated == (step == 8)
        assert info["reason"] == "not one of up, down, left, right"
        assert len(info["reason"]) < 100


def test_won_on_the_last_step_is_not_truncated():
    moves = envs.category("sokoban", TASK)
    steps = envs.expert("sokoban", TASK)
    env = envs.make("sokoban")
    env.reset(options={"task": TASK})
    for _ in range(15 - moves):
        env.step("")
    for demonstration in steps:
        *_, terminated, truncated, info = env.step(demonstration.action)
    assert (terminated, truncated, info["won"], info["reason"]) == (
        True,
        False,
        True,
        "",
    )


def test_expert_shows_what_the_environment_shows():
    steps = envs.expert("sokoban", TASK)
    assert len(steps) == envs.category("sokoban", TASK)
    assert steps == envs.expert("sokoban", TASK)
    env, observation, info = start()
    for demonstration in steps:
        assert demonstration.observation == observation
        assert demonstration.info == info
        assert demonstration.action in info["admissible_actions"]
        observation, _, _, _, info = env.step(demonstration.action)
    assert info["won"]


def test_expert_says_when_it_cannot(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("#####\n#$ .#\n# @ #\n#####\n\n######\n#@$ .#\n######\n")
    options = {"levels": str(path), "max_steps": 1}
    with pytest.raises(ValueError, match="no solution"):
        envs.expert("sokoban", "one.txt#000000", **options)
    with pytest.raises(ValueError, match="one of 2 moves, max_steps is 1"):
        envs.expert("sokoban", "one.txt#000001", **options)


def test_reset_without_a_task_draws_one_by_seed():
    env = envs.make("sokoban")
    seen = [env.reset(seed=seed)[1]["task_id"] for seed in (0, 0, 1, 2, 3)]
    assert seen[0] == seen[1] and len(set(seen)) == 4


def test_pictures_equal_gym_sokoban():
    for episode in json.loads(GOLDEN.read_text())["episodes"]:
        layout = np.int8(episode["room_fixed"])
        first = render.render(layout, np.int8(episode["room_state"]))
        last = render.render(layout, np.int8(episode["steps"][-1]["room_state"]))
        assert list(first.shape) == episode["rgb_shape"]
        for picture, moment in ((first, "initial"), (last, "final")):
            digest = hashlib.sha256(picture.tobytes()).hexdigest()
            assert digest == episode[f"rgb_sha256_{moment}"]


def test_pictures_only_on_request():
    env, _, info = start()
    assert "image" not in info and isinstance(env.render(), str)
    env, _, info = start(images=True)
    assert info["image"].shape == (96, 96, 3) and info["image"].dtype == np.uint8
    *_, info = env.step(rules.ACTIONS[0])
    np.testing.assert_array_equal(info["image"], env.render())
