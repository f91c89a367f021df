"""A scripted shopper who knows which product the goal was made from."""

import re

from crbc_jax.envs.base import Demonstration
from crbc_jax.envs.webshop import pages
from crbc_jax.envs.webshop.env import WebShopEnv
from crbc_jax.envs.webshop.goals import Goal
from crbc_jax.envs.webshop.options import Options
from crbc_jax.envs.webshop.shop import Shop, open_shop
from crbc_jax.envs.webshop.tasks import find_goal

_EXTRAS = re.compile(r" with [\w ]+: |, and price lower than ")


def play_expert(task_id: str, options: Options) -> list[Demonstration]:
    """Searches for the product, chooses the options and buys.

    Raises:
        ValueError: if that does not win: the search does not find the product, the
            steps do not suffice, or the reward's rules do not give it full marks.
    """
    shop = open_shop(options)
    env = WebShopEnv(options)
    observation, info = env.reset(options={"task": task_id})
    steps = []
    for action in _plan(shop, find_goal(shop, task_id)):
        steps.append(Demonstration(observation, info, action))
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            break
    if not info["won"]:
        raise ValueError(
            f"WebShop task {task_id!r}: the expert scored {info['task_score']:.3f} of "
            f"1 in {len(steps)} steps, max_steps is {options.max_steps}"
        )
    return steps


def _plan(shop: Shop, goal: Goal) -> list[str]:
    product = shop.products[goal.asin]
    # As a shopper would: by the wish, without its options and price. Else by the title.
    for text in (_EXTRAS.split(goal.instruction)[0], product.title):
        # A bracket would end the action's argument, a line break the action.
        keywords = re.sub(r"[\[\]\n]", " ", text.removeprefix("Find me ")).strip()
        found = [other.asin for other in shop.search(keywords.lower())]
        if goal.asin in found:
            break
    else:
        return []
    actions = [f"search[{keywords}]"]
    num_pages = found.index(goal.asin) // pages.PAGE_SIZE
    actions += [f"click[{pages.NEXT.lower()}]"] * num_pages
    actions.append(f"click[{goal.asin.lower()}]")
    values = [v for values in product.options.values() for v in values]
    wishes = goal.options.values() if isinstance(goal.options, dict) else goal.options
    actions += [f"click[{wish}]" for wish in wishes if wish in values]
    return [*actions, f"click[{pages.BUY.lower()}]"]
