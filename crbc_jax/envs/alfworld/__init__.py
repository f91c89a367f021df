"""ALFWorld's household games, played by its own engine (extra `alfworld`)."""

from crbc_jax.envs.alfworld import games
from crbc_jax.envs.alfworld.env import ALFWorldEnv
from crbc_jax.envs.alfworld.expert import play_expert
from crbc_jax.envs.alfworld.options import Options
from crbc_jax.envs.base import Demonstration, TaskSet


def make(options: Options) -> ALFWorldEnv:
    """Builds the environment; it holds a copy of the planner's library, 8 MB."""
    return ALFWorldEnv(options)


def tasks(split: str, count: int, options: Options) -> TaskSet:
    """Lists games of the split's folder."""
    return games.list_tasks(split, count, options)


def expert(task_id: str, options: Options) -> list[Demonstration]:
    """Plays a planned solution; the planner knows what is in every drawer."""
    return play_expert(task_id, options)


def category(task_id: str, options: Options) -> str:
    """Returns the type of the task: Pick, Look, Clean, Heat, Cool or Pick2."""
    return games.task_type(games.find_game(task_id, options).parent.parent.name)
