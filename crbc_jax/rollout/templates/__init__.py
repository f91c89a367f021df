"""The table of prompts: how a policy is told of an environment, a module each."""

from crbc_jax.rollout.templates import alfworld, sokoban, webshop

PROMPTS = {
    "alfworld": alfworld.TEMPLATE,
    "alfworld_compact": alfworld.COMPACT,
    "sokoban": sokoban.TEMPLATE,
    "sokoban_compact": sokoban.COMPACT,
    "webshop": webshop.TEMPLATE,
    "webshop_compact": webshop.COMPACT,
}
