"""ALFWorld as a Gymnasium environment."""

from typing import Any

import gymnasium

from crbc_jax.envs.alfworld.engine import make_engine
from crbc_jax.envs.alfworld.games import find_game, list_tasks
from crbc_jax.envs.alfworld.household import Household
from crbc_jax.envs.alfworld.options import Options
from crbc_jax.envs.base import AnyText

_WON_REWARD = 10.0  # As the published results have it; else 0.
_SEEDED_GAMES = 4096  # What `reset` without a task draws from.


class ALFWorldEnv(gymnasium.Env[str, str]):
    """A household in text; see crbc_jax/envs/base.py.

    An action is one of the game's commands. The observation is the game's answer, and
    where the player is, what it holds in which state, and what it has moved. The anchor
    is that and the sorted admissible commands, the state key of GraphGPO and CRBC
    (arXiv 2605.26684, 2609.35082): what is in a closed drawer is no part of it.

    `info["feedback"]` is the game's answer alone.

    Attributes:
        engine: TextWorld's environment below.
    """

    metadata = {"render_modes": ["ansi"]}

    def __init__(self, options: Options | None = None):
        self.options = options or Options()
        self.render_mode = "ansi"
        self.action_space = AnyText(max_length=1 << 20)
        self.observation_space = AnyText(max_length=1 << 16)
        self.engine = make_engine(cached=self.options.cached)
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
        path = find_game(task_id, self.options)
        if task_id != self._task_id:
            self.engine.load(str(path))
            self._task_id = task_id
        self._state = self.engine.reset()
        self._num_steps, self._is_over = 0, False
        self._household = Household()
        return self.render(), self._info(reason="")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays one action.

        Raises:
            RuntimeError: if the episode is over.
        """
        if self._is_over:
            raise RuntimeError("the episode is over, or none was begun: call reset")
        known = action in self._state.admissible_commands
        self._state, _, _ = self.engine.step(action)
        self._household.read(self._state.feedback)
        self._num_steps += 1
        terminated = bool(self._state["won"])
        truncated = not terminated and self._num_steps >= self.options.max_steps
        self._is_over = terminated or truncated
        info = self._info("" if known else "not one of the admissible actions")
        return self.render(), _WON_REWARD * terminated, terminated, truncated, info

    def render(self) -> str:
        """Returns the observation."""
        return f"{self._state.feedback}\n{self._household}"

    def close(self) -> None:
        """Frees the game."""
        self.engine.close()
        self._is_over = True

    def _info(self, reason: str) -> dict[str, Any]:
        actions = [a for a in self._state.admissible_commands if a != "help"]
        return {
            "won": bool(self._state["won"]),
            "admissible_actions": actions,  # Sorted by the engine.
            "anchor": f"{self.render()}\n{','.join(actions)}",
            "task_id": self._task_id,
            "reason": reason,
            "feedback": self._state.feedback,
        }

    def _draw_task(self) -> str:
        ids = list_tasks("train", _SEEDED_GAMES, self.options).ids
        return ids[int(self.np_random.integers(len(ids)))]
