"""Boards as pictures, 16 pixels a cell, as gym-sokoban draws them."""

import functools
import pathlib

import numpy as np
from jaxtyping import Int, UInt8

from crbc_jax.envs.sokoban import rules

# The looks of a cell: the values of rules.py, and then the player on a target.
PLAYER_ON_TARGET = rules.PLAYER + 1


def looks(
    layout: Int[np.ndarray, "rows columns"], cells: Int[np.ndarray, "rows columns"]
) -> Int[np.ndarray, "rows columns"]:
    """Returns what each cell looks like; equal looks are equal states."""
    on_target = (cells == rules.PLAYER) & (layout == rules.TARGET)
    return np.where(on_target, PLAYER_ON_TARGET, cells)


def render(
    layout: Int[np.ndarray, "rows columns"], cells: Int[np.ndarray, "rows columns"]
) -> UInt8[np.ndarray, "height width 3"]:
    """Draws a board in RGB."""
    tiles = _tiles()[looks(layout, cells)]
    rows, columns, height, width, channels = tiles.shape
    return tiles.swapaxes(1, 2).reshape(rows * height, columns * width, channels)


@functools.cache
def _tiles() -> UInt8[np.ndarray, "looks 16 16 3"]:
    """Loads the art, which is gym-sokoban's; tiles_LICENSE.txt has its licence."""
    return np.load(pathlib.Path(__file__).with_name("tiles.npy"))
