"""An environment module whose tasks name how an episode ends; for collect_test."""

import dataclasses
import itertools
import time

import gymnasium

BOARD = "####\n#P_#\n#XO#\n####"
MAX_STEPS = 4
_RESETS = itertools.count()


@dataclasses.dataclass(frozen=True)
class Options:
    pass


class RiggedEnv(gymnasium.Env):
    """Only "right" moves the player; "down" ends the episode, except as the task says.

    Tasks: "lose", "win", "raise", "hang" (at "down"), "never the same" (each reset).
    """

    def reset(self, *, seed=None, options=None):
        self._task = options["task"]
        self._num_steps = 0
        self._anchor = str(next(_RESETS)) if self._task == "never the same" else "start"
        return BOARD, self._info(won=False, reason="")

    def step(self, action):
        self._num_steps += 1
        is_end = action == "down"
        if is_end and self._task == "raise":
            raise ZeroDivisionError("as asked")
        if is_end and self._task == "hang":
            time.sleep(60)
        if action == "right":
            self._anchor = "moved"
        reason = "" if action in ("right", "down") else "nothing happens"
        won = is_end and self._task == "win"
        truncated = not is_end and self._num_steps >= MAX_STEPS
        reward = 10.0 if won else -0.1
        return BOARD, reward, is_end, truncated, self._info(won, reason)

    def _info(self, won, reason):
        return {
            "won": won,
            "reason": reason,
            "anchor": self._anchor,
            "admissible_actions": None,
            "task_id": self._task,
        }


def make(options):
    return RiggedEnv()
