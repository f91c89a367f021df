"""What every environment offers, and the records that pass through its door.

An environment is a `gymnasium.Env` over text. Beyond Gymnasium's own rules:

* `reset(options={"task": task_id})` starts that very task; equal ids give equal
  episodes to equal actions, in every process and on every machine.
* The observation is a `str`; an action is the `str` that the policy chose. An action
  that cannot be executed, be it empty, changes nothing but costs a step.
* `truncated` after `max_steps` steps, counted by the environment itself.
* `info` has `won` (bool, from the state and never from the reward), `anchor` (str or
  bytes: equal if and only if the states are), `admissible_actions` (list of str, or
  None if they cannot be listed), `task_id`, `reason` ("" or why the action was not
  executed), and where asked for `image` (uint8 [height, width, 3]).

A module in `crbc_jax.envs.ENVIRONMENTS` makes such environments. It has

* `Options`: a frozen dataclass that checks its own fields (ValueError);
* `make(options) -> gymnasium.Env`;
* `tasks(split, count, options) -> TaskSet`;
* `expert(task_id, options) -> list[Demonstration]`;
* `category(task_id, options) -> int | str | None`, what results are grouped by.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import gymnasium

SPLITS = ("train", "eval")


class TaskSet(NamedTuple):
    """The tasks of one split, the same on every machine."""

    ids: tuple[str, ...]  # Sorted, distinct.
    digest: str  # Of everything that decides what the tasks are; sha256, hexadecimal.


class Demonstration(NamedTuple):
    """One step of an expert: what it saw, `info` as of the environment, and did."""

    observation: str
    info: dict[str, Any]
    action: str


class EnvironmentFailed(RuntimeError):
    """An environment raised, hung or died; its episode is aborted, never a failure."""


class AnyText(gymnasium.spaces.Text):
    """Texts of any characters: those of games and shops have no fixed alphabet."""

    def contains(self, x: Any) -> bool:
        """Whether `x` is a text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length


def digest_lines(lines: Iterable[str]) -> str:
    """Returns the sha256 of `lines`, in hexadecimal."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()
