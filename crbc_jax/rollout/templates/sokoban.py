"""Sokoban's grid in words, for a language model, and in the preset's few symbols."""

from crbc_jax.rollout.templates.base import Scene, Template, history, tagged_action
from crbc_jax.types import INVALID_ACTION

_MOVES = ("up", "down", "left", "right")


def _compact_prompt(scene: Scene) -> str:
    past = "".join(
        f"{_inside(r.observation)}{r.action if r.action in _MOVES else INVALID_ACTION}"
        "<record>"
        for r in scene.records
    )
    return f"{past}{_inside(scene.observation)}"


def _inside(board: str) -> str:
    """Cells within the border walls, which every level has, in one line."""
    return "".join(row[1:-1] for row in board.split("\n")[1:-1])


# What differs between prompts comes late, so that a server can reuse the beginning.
_RULES = """\
You are the player in a Sokoban puzzle, a grid of cells seen from above.

Symbols: # is a wall, _ is floor, O is a target, X is a box, √ is a box on a target, \
P is you, S is you on a target.

Your task: get every box onto a target. A move takes you to the next cell in its \
direction. If a box stands there you push it, provided that the cell behind it is \
neither a wall nor a box. Boxes cannot be pulled: one that you push into a corner may \
be stuck for good.
"""

_REPLY = """
Think first about where the box must go, which side to push it from, and how to get \
there. Write that between <think> and </think>. Then give one action, and only one, \
between <action> and </action>.
"""


def _prompt(scene: Scene) -> str:
    return (
        f"{_RULES}{history(scene)}"
        f"\nThis is step {scene.num_steps + 1}. The grid now:\n{scene.observation}\n"
        f"\nYour possible actions: {', '.join(scene.admissible_actions)}\n{_REPLY}"
    )


# Words for a language model, after the published layout.
TEMPLATE = Template(_prompt, tagged_action, end=None, is_message=True)
# Words of the closed vocabulary of the preset sokoban_tiny.
COMPACT = Template(_compact_prompt, tagged_action, end="</action>", is_message=False)
