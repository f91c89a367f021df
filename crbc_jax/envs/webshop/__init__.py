"""WebShop: an own engine of the shop, its search, its goals and its rewards."""

from crbc_jax.envs.base import Demonstration, TaskSet
from crbc_jax.envs.webshop.env import WebShopEnv
from crbc_jax.envs.webshop.expert import play_expert
from crbc_jax.envs.webshop.options import Options
from crbc_jax.envs.webshop.shop import open_shop
from crbc_jax.envs.webshop.tasks import find_goal, list_tasks


def make(options: Options) -> WebShopEnv:
    """Builds the environment; its shop is loaded once a process."""
    return WebShopEnv(options)


def tasks(split: str, count: int, options: Options) -> TaskSet:
    """Lists task ids: goals 0 to 499 evaluate, the rest train."""
    return list_tasks(open_shop(options), split, count)


def expert(task_id: str, options: Options) -> list[Demonstration]:
    """Searches for the product that the goal was made from, and buys it."""
    return play_expert(task_id, options)


def category(task_id: str, options: Options) -> None:
    """Returns None: the goals are of one kind."""
    find_goal(open_shop(options), task_id)
