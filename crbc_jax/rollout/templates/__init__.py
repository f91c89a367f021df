"""The table of prompts: how a policy is told of an environment, a module each."""

from crbc_jax.rollout.templates import alfworld, appworld, sokoban, webshop

PROMPTS = {
    "alfworld": alfworld.TEMPLATE,
    "alfworld_compact": alfworld.COMPACT,
    "appworld": appworld.TEMPLATE,
    "sokoban": sokoban.TEMPLATE,
    "sokoban_compact": sokoban.COMPACT,
    "webshop": webshop.TEMPLATE,
    "webshop_compact": webshop.COMPACT,
}
