"""Text Sokoban as a Gymnasium environment."""

from typing import Any

import gymnasium
import numpy as np

from crbc_jax.envs.sokoban import render, rules
from crbc_jax.envs.sokoban.catalogue import find_level, list_tasks
from crbc_jax.envs.sokoban.options import GENERATED, Options

SYMBOLS = "#_O√XPS"  # Of the looks of a cell in render.py.
_SEEDED_LEVELS = 4096  # What `reset` without a task draws from.


class SokobanEnv(gymnasium.Env[str, str]):
    """One player, who pushes every box onto a target; see crbc_jax/envs/base.py.

    The observation is the board, a line a row, in SYMBOLS: wall, floor, target, box
    on target, box, player, player on target. It is the whole state, and so is the
    anchor too. An action is one of "up", "down", "left", "right"; anything else, also
    "", is a step that changes nothing.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"]}

    def __init__(self, options: Options | None = None):
        self.options = options or Options()
        self.render_mode = "rgb_array" if self.options.images else "ansi"
        self.action_space = gymnasium.spaces.Text(max_length=16)
        self.observation_space = gymnasium.spaces.Text(
            max_length=4096, charset=SYMBOLS + "\n"
        )
        self._task_id = ""
        self._is_over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Starts the task `options["task"]`; without one, a training task by the seed.

        Raises:
            ValueError: if there is no such task with this environment's options.
        """
        super().reset(seed=seed)
        task_id = (options or {}).get("task") or self._draw_task()
        level = find_level(task_id, self.options)
        self._task_id = task_id
        self._layout, self._cells = level.layout, level.cells
        self._num_steps, self._is_over = 0, False
        observation = self.text()
        info = self._info(observation, won=False, reason="")
        return observation, info | {"optimal_moves": level.optimal_moves}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays one action.

        Raises:
            RuntimeError: if the episode is over.
        """
        if self._is_over:
            raise RuntimeError("the episode is over, or none was begun: call reset")
        known = action in rules.ACTIONS
        index = 1 + rules.ACTIONS.index(action) if known else 0
        self._cells, reward, solved = rules.step(self._layout, self._cells, index)
        self._num_steps += 1
        terminated = bool(solved)
        truncated = not terminated and self._num_steps >= self.options.max_steps
        self._is_over = terminated or truncated
        reason = "" if known else f"not one of {', '.join(rules.ACTIONS)}"
        observation = self.text()
        info = self._info(observation, terminated, reason)
        return observation, float(reward), terminated, truncated, info

    def text(self) -> str:
        """Returns the board as the policy sees it."""
        looks = render.looks(self._layout, self._cells).tolist()
        return "\n".join("".join([SYMBOLS[look] for look in row]) for row in looks)

    def image(self) -> np.ndarray:
        """Returns the board as a picture, uint8 [16 rows, 16 columns, 3]."""
        return render.render(self._layout, self._cells)

    def render(self) -> str | np.ndarray:
        """Returns the text, or the picture if the options ask for images."""
        return self.image() if self.options.images else self.text()

    def _info(self, observation: str, won: bool, reason: str) -> dict[str, Any]:
        info = {
            "won": won,
            "admissible_actions": list(rules.ACTIONS),
            "anchor": observation,
            "task_id": self._task_id,
            "reason": reason,
        }
        if self.options.images:
            info["image"] = self.image()
        return info

    def _draw_task(self) -> str:
        if self.options.levels == GENERATED:
            index = int(self.np_random.integers(_SEEDED_LEVELS))
            return list_tasks("train", index + 1, self.options).ids[index]
        ids = list_tasks("train", _SEEDED_LEVELS, self.options).ids
        return ids[int(self.np_random.integers(len(ids)))]
