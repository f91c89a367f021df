"""Environments by name: make one, list its tasks, ask its expert."""

import dataclasses
import difflib
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from crbc_jax.envs.base import SPLITS, Demonstration, EnvironmentFailed, TaskSet

if TYPE_CHECKING:
    import gymnasium

__all__ = [
    "ENVIRONMENTS",
    "Demonstration",
    "EnvironmentFailed",
    "TaskSet",
    "category",
    "expert",
    "make",
    "tasks",
]

# Name -> module, loaded where it is used; base.py says what such a module offers.
ENVIRONMENTS = {
    "alfworld": "crbc_jax.envs.alfworld",
    "appworld": "crbc_jax.envs.appworld",
    "sokoban": "crbc_jax.envs.sokoban",
    "webshop": "crbc_jax.envs.webshop",
}


def make(name: str, **options) -> "gymnasium.Env":
    """Builds one environment.

    Args:
        name: a row of ENVIRONMENTS.
        **options: fields of that environment's `Options`; the rest take defaults.

    Raises:
        ValueError: if the name, an option or its value is not known.
    """
    module = load(name)
    return module.make(build_options(module, options))


def tasks(name: str, split: str, *, count: int, **options) -> TaskSet:
    """Lists at most `count` tasks of a split, fewer only if the data has no more.

    No wall-and-target layout, game or goal is in both splits.

    Raises:
        ValueError: as `make`; and if there is no task, or no split of that name.
    """
    module = load(name)
    if split not in SPLITS:
        raise ValueError(f"split={split!r}; known: {list(SPLITS)}")
    if count < 1:
        raise ValueError(f"count={count} of {split!r} tasks: must be at least 1")
    task_set = module.tasks(split, count, build_options(module, options))
    if not task_set.ids:
        raise ValueError(
            f"{name} has no {split!r} task with {options}; point its data option at "
            "a folder that holds more"
        )
    return task_set


def expert(name: str, task_id: str, **options) -> list[Demonstration]:
    """Plays a task by the scripted expert; the same steps at every call.

    Raises:
        ValueError: as `make`; and if the expert cannot solve the task.
    """
    module = load(name)
    return module.expert(task_id, build_options(module, options))


def category(name: str, task_id: str, **options) -> int | str | None:
    """Returns what a task's results are grouped by, or None for nothing.

    Sokoban: moves of the shortest solution. ALFWorld: the task's type.

    Raises:
        ValueError: as `make`.
    """
    module = load(name)
    return module.category(task_id, build_options(module, options))


def load(name: str) -> ModuleType:
    """Imports the module behind a row of ENVIRONMENTS.

    Raises:
        ValueError: if there is no such row.
    """
    if name not in ENVIRONMENTS:
        raise ValueError(
            f"environment {name!r} is not known: {sorted(ENVIRONMENTS)}"
            + _suggest(name, ENVIRONMENTS)
        )
    return importlib.import_module(ENVIRONMENTS[name])


def build_options(module: ModuleType, options: dict[str, Any]) -> Any:
    """Builds the environment module's `Options`, naming a field that it lacks."""
    known = [field.name for field in dataclasses.fields(module.Options)]
    for field in options:
        if field not in known:
            raise ValueError(
                f"{module.__name__} has no option {field!r}; it has {known}"
                + _suggest(field, known)
            )
    return module.Options(**options)


def _suggest(value, known) -> str:
    near = difflib.get_close_matches(str(value), list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""
