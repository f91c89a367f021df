"""Sokoban's rules: one pure function of arrays, for NumPy on the host and JAX in jit.

The cells, rewards and order of actions are gym-sokoban's (Schrader, 2018,
https://github.com/mpSchrader/gym-sokoban), which the papers train on.
"""

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER = range(6)

# Action 0 does nothing; action 1 + i moves towards ACTIONS[i], pushing what is there.
ACTIONS = ("up", "down", "left", "right")

# `Any` as the kind of array is NumPy or JAX; naming JAX would load it in each worker.
Cells = Int[Any, "*boards rows columns"]


class Transition(NamedTuple):
    """What a step leads to."""

    cells: Cells
    reward: Float[Any, "*boards"]
    solved: Bool[Any, "*boards"]  # Every box is on a target.


def step(
    layout: Cells, cells: Cells, action: Int[Any, "*boards"] | int, xp: ModuleType = np
) -> Transition:
    """Moves the player of each board, and the box ahead of it if there is room.

    The reward is -0.1 a step, +1 for a box that comes onto a target, -1 for one that
    leaves it, and +10 while all of them are on targets.

    Args:
        layout: WALL, FLOOR or TARGET; the border is all wall.
        cells: as `layout`, with boxes and one player on top. Where they stand, only
            `layout` tells target from floor for the player.
        action: 0 stays, 1 to 4 are ACTIONS.
        xp: `numpy`, or `jax.numpy` where arguments are JAX arrays.
    """
    rows, columns = cells.shape[-2:]
    flat_layout = layout.reshape(*layout.shape[:-2], rows * columns)
    flat = cells.reshape(flat_layout.shape)
    is_player = flat == PLAYER
    is_box = (flat == BOX) | (flat == BOX_ON_TARGET)
    is_free = (flat == FLOOR) | (flat == TARGET)

    # Comparing indices instead of indexing keeps one code for any batch shape, and
    # is as fast for boards of this size. Off the board nothing compares equal, which
    # is right: two cells ahead is off it only if the next one is wall.
    offset = xp.asarray([0, -columns, columns, -1, 1])[action]
    cell = xp.arange(rows * columns)
    ahead = (is_player.argmax(-1) + offset)[..., None]
    is_ahead = cell == ahead
    is_beyond = cell == ahead + offset[..., None]
    pushes = (is_ahead & is_box).any(-1) & (is_beyond & is_free).any(-1)
    moves = ((is_ahead & is_free).any(-1) | pushes)[..., None]
    box = xp.where(flat_layout == TARGET, BOX_ON_TARGET, BOX).astype(flat.dtype)
    after = xp.where(is_player & moves, flat_layout, flat)
    after = xp.where(is_ahead & moves, xp.asarray(PLAYER, flat.dtype), after)
    after = xp.where(is_beyond & pushes[..., None], box, after)

    gained = (after == BOX_ON_TARGET).sum(-1) - (flat == BOX_ON_TARGET).sum(-1)
    solved = ~(after == BOX).any(-1)
    # Whole numbers first: one rounding, so that float32 rewards are the nearest ones.
    reward = (gained + 10 * solved) - 0.1
    return Transition(after.reshape(cells.shape), reward, solved)
