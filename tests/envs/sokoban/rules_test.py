import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crbc_jax.envs.sokoban import rules

GOLDEN = pathlib.Path(__file__).parents[2] / "golden/sokoban_transitions.json"
STEPPERS = {
    "numpy": rules.step,
    "jax": jax.jit(functools.partial(rules.step, xp=jnp)),
}


def golden_episodes():
    """Episodes that gym-sokoban 0.0.6 played; the file says how."""
    return json.loads(GOLDEN.read_text())["episodes"]


@pytest.mark.parametrize("stepper", STEPPERS)
@pytest.mark.parametrize("index", range(16))
def test_equals_gym_sokoban(stepper, index):
    episode = golden_episodes()[index]
    layout = np.int8(episode["room_fixed"])
    cells = np.int8(episode["room_state"])
    for step in episode["steps"]:
        cells, reward, solved = STEPPERS[stepper](layout, cells, step["action"])
        np.testing.assert_array_equal(cells, step["room_state"])
        assert np.float32(reward) == np.float32(step["reward"])
        assert solved == step["done"]
        assert cells.dtype == np.int8


def random_boards(num_boards, seed):
    """Boards with several boxes, some on targets, and actions 0 to 4."""
    rng = np.random.default_rng(seed)
    layout = np.zeros((num_boards, 5, 7), np.int8)
    layout[:, 1:-1, 1:-1] = rng.choice([0, 1, 1, 2], (num_boards, 3, 5))
    cells = layout.copy()
    boxes = (layout > 0) & (rng.random(layout.shape) < 0.4)
    cells[boxes] = np.where(layout[boxes] == rules.TARGET, 3, 4)
    for board in range(num_boards):
        cells[board, rng.integers(1, 4), rng.integers(1, 6)] = rules.PLAYER
    layout[(cells == rules.PLAYER) & (layout == rules.WALL)] = rules.FLOOR
    return layout, cells, rng.integers(0, 5, num_boards)


def step_by_hand(layout, cells, action):
    """The rules again, in plain Python."""
    cells = cells.copy()
    (row, column), on_before = np.argwhere(cells == 5)[0], (cells == 3).sum()
    down, right = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)][action]
    ahead = row + down, column + right
    if action and cells[ahead] in (3, 4):
        beyond = ahead[0] + down, ahead[1] + right
        if cells[beyond] in (1, 2):
            cells[beyond] = 3 if layout[beyond] == 2 else 4
            cells[ahead] = layout[ahead]
    if action and cells[ahead] in (1, 2):
        cells[row, column] = layout[row, column]
        cells[ahead] = 5
    solved = not (cells == 4).any()
    reward = -0.1 + (cells == 3).sum() - on_before + 10 * solved
    return cells, reward, solved


@pytest.mark.parametrize("stepper", STEPPERS)
def test_batch_equals_plain_python(stepper):
    boards = random_boards(num_boards=400, seed=0)
    after, reward, solved = STEPPERS[stepper](*boards)
    for index, board in enumerate(zip(*boards, strict=True)):
        cells, expected_reward, expected_solved = step_by_hand(*board)
        np.testing.assert_array_equal(after[index], cells)
        assert reward[index] == pytest.approx(expected_reward, abs=1e-6)
        assert solved[index] == expected_solved


def test_vmap_equals_batch():
    boards = random_boards(num_boards=50, seed=1)
    batched = STEPPERS["jax"](*boards)
    mapped = jax.vmap(STEPPERS["jax"])(*map(jnp.asarray, boards))
    for one, other in zip(batched, mapped, strict=True):
        np.testing.assert_array_equal(one, other)
