"""Text Sokoban: rules, levels, exact solver, and the environment that joins them."""

from crbc_jax.envs.base import Demonstration, TaskSet
from crbc_jax.envs.sokoban import rules, solver
from crbc_jax.envs.sokoban.catalogue import find_level, list_tasks
from crbc_jax.envs.sokoban.env import SokobanEnv
from crbc_jax.envs.sokoban.level import to_board
from crbc_jax.envs.sokoban.options import Options

_MAX_STATES = 5_000_000  # Bound of the expert's search: a few seconds.


def make(options: Options) -> SokobanEnv:
    """Builds the environment."""
    return SokobanEnv(options)


def tasks(split: str, count: int, options: Options) -> TaskSet:
    """Lists level ids."""
    return list_tasks(split, count, options)


def expert(task_id: str, options: Options) -> list[Demonstration]:
    """Plays a shortest solution; which one of several is fixed.

    Raises:
        ValueError: if the level has no solution, none within `max_steps`, or is too
            large to search.
    """
    actions = solver.solve(*to_board(find_level(task_id, options)), _MAX_STATES)
    if actions is None or len(actions) > options.max_steps:
        found = "no solution" if actions is None else f"one of {len(actions)} moves"
        raise ValueError(
            f"Sokoban task {task_id!r} has {found}, max_steps is {options.max_steps}"
        )
    env = make(options)
    observation, info = env.reset(options={"task": task_id})
    steps = []
    for action in actions:
        word = rules.ACTIONS[action - 1]
        steps.append(Demonstration(observation, info, word))
        observation, _, _, _, info = env.step(word)
    return steps


def category(task_id: str, options: Options) -> int | None:
    """Returns the moves of the shortest solution; None for levels from files."""
    return find_level(task_id, options).optimal_moves
