"""The table of prompts: how a policy is told of an environment, a module each."""

from crbc_jax.rollout.templates import sokoban

PROMPTS = {
    "sokoban": sokoban.TEMPLATE,
    "sokoban_compact": sokoban.COMPACT,
}
