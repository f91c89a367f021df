"""AppWorld: agents that write code against the apps of a simulated phone.

Its own server, in an interpreter of its own, plays the tasks and runs the agent's code;
here is only a client. third_party/appworld says how to install it.
"""

from crbc_jax.envs.appworld.env import AppWorldEnv
from crbc_jax.envs.appworld.options import Options
from crbc_jax.envs.base import Demonstration, TaskSet, digest_lines


def make(options: Options) -> AppWorldEnv:
    """Builds the environment; its server starts with the first `reset`."""
    return AppWorldEnv(options)


def tasks(split: str, count: int, options: Options) -> TaskSet:
    """Lists the first `count` tasks of a split's data set, which AppWorld keeps apart.

    The digest is of the ids: AppWorld's task data is versioned by its package.
    """
    name = options.train_set if split == "train" else options.eval_set
    ids = tuple(sorted(options.task_ids(name)[:count]))
    return TaskSet(ids, digest_lines(ids))


def expert(task_id: str, options: Options) -> list[Demonstration]:
    """There is none.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"AppWorld task {task_id!r}: no scripted expert plays AppWorld")


def category(task_id: str, options: Options) -> None:
    """Returns None: the tasks are of one kind."""
