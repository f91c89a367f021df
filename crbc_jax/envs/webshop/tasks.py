"""Task ids of a shop's goals, and the splits."""

import re

import numpy as np

from crbc_jax.envs.base import TaskSet, digest_lines
from crbc_jax.envs.webshop.goals import Goal
from crbc_jax.envs.webshop.shop import Shop

_NUM_EVAL = 500  # The first goals are for evaluation, as in the published results.
_INDEX_DIGITS = 8  # Of a task id: so many that sorting ids sorts numbers.


def list_tasks(shop: Shop, split: str, count: int) -> TaskSet:
    """Lists the first `count` goals of a split, fewer if it has no more."""
    goals = _split_range(shop, split)[:count]
    ids = tuple(_task_id(shop, split, index) for index in goals)
    # All products decide what a search finds, so each is part of what the tasks are.
    lines = [*ids, *(shop.goals[index].as_json() for index in goals)]
    return TaskSet(ids, digest_lines([*lines, shop.fingerprint]))


def find_goal(shop: Shop, task_id: str) -> Goal:
    """Returns the goal of a task.

    Raises:
        ValueError: if the shop has no such task.
    """
    match = re.fullmatch(
        rf"{re.escape(shop.name)}-(train|eval)-(\d{{{_INDEX_DIGITS}}})", task_id
    )
    if not match or int(match[2]) not in _split_range(shop, match[1]):
        raise ValueError(
            f"task {task_id!r} is not one of the shop {shop.name}'s "
            f"{len(shop.goals):,}; tasks and environment need the same webshop options"
        )
    return shop.goals[int(match[2])]


def draw_task(shop: Shop, rng: np.random.Generator) -> str:
    """Draws a training task, or any if there is none for training."""
    split = "train" if _split_range(shop, "train") else "eval"
    goals = _split_range(shop, split)
    return _task_id(shop, split, goals[int(rng.integers(len(goals)))])


def _split_range(shop: Shop, split: str) -> range:
    goals = range(len(shop.goals))
    return goals[:_NUM_EVAL] if split == "eval" else goals[_NUM_EVAL:]


def _task_id(shop: Shop, split: str, index: int) -> str:
    return f"{shop.name}-{split}-{index:0{_INDEX_DIGITS}d}"
