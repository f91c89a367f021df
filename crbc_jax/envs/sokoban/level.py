"""One Sokoban level: its record, its text, and the split that its layout is in.

A layout is walls and targets, without player and boxes. A hash of it decides whether
its levels are for training or evaluation, so no layout is ever in both splits,
whatever the pool, the size or the file.
"""

import hashlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int8

from crbc_jax.envs.sokoban import rules, solver

_EVAL_SHARE = 8  # One layout in this many is for evaluation.

_HIDE_MOVABLES = str.maketrans("@$+*", "  ..")
_LAYOUT = {"#": rules.WALL, " ": rules.FLOOR, ".": rules.TARGET}
_CELLS = {
    **_LAYOUT,
    "@": rules.PLAYER,
    "+": rules.PLAYER,
    "$": rules.BOX,
    "*": rules.BOX_ON_TARGET,
}


class Level(NamedTuple):
    """Where an episode starts; cells as in rules.py. Arrays must not be written to."""

    layout: Int8[np.ndarray, "rows columns"]
    cells: Int8[np.ndarray, "rows columns"]
    optimal_moves: int | None  # Of the shortest solution; None if not graded.


def parse_level(text: str, name: str) -> Level:
    """Reads one level in Boxoban's characters: `# @ $ .`, and `* +` on a target.

    Raises:
        ValueError: if the text is no level; it says what is wrong with `name`.
    """
    rows = text.splitlines()

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"Sokoban level {name}: {what}:\n{text}")

    unknown = sorted(set(text) - set(_CELLS) - {"\n"})
    need(not unknown, f"unknown characters {unknown}")
    need(len({len(row) for row in rows}) == 1, "rows must be equally long")
    border = rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)
    need(set(border) == {"#"}, "the border must be all wall")
    players = sum(map(text.count, "@+"))
    need(players == 1, f"needs one player, has {players}")
    boxes, targets = sum(map(text.count, "$*")), sum(map(text.count, ".*+"))
    need(
        boxes == targets and boxes > 0,
        f"needs as many boxes as targets, has {boxes} and {targets}",
    )
    need("$" in text, "is solved at its start")
    cells = [[_CELLS[character] for character in row] for row in rows]
    layout = [
        [_LAYOUT[character] for character in row]
        for row in layout_text(text).splitlines()
    ]
    return Level(np.array(layout, np.int8), np.array(cells, np.int8), None)


def to_board(level: Level) -> tuple[solver.Board, int, int]:
    """Returns the board, the player and the boxes of a level for the solver."""
    cells = level.cells
    board = solver.Board(
        width=cells.shape[1],
        floor=_to_set(level.layout != rules.WALL),
        targets=_to_set(level.layout == rules.TARGET),
    )
    boxes = (cells == rules.BOX) | (cells == rules.BOX_ON_TARGET)
    return board, _to_set(cells == rules.PLAYER), _to_set(boxes)


def layout_text(text: str) -> str:
    """Returns a level's text without player and boxes: `#`, ` ` and `.`."""
    return text.translate(_HIDE_MOVABLES)


def layout_hash(layout: str) -> bytes:
    """Returns the sha256 of a layout text."""
    return hashlib.sha256(layout.encode()).digest()


def split_of(layout: str) -> str:
    """Returns the only split that levels of this layout may be in."""
    return "train" if layout_hash(layout)[0] % _EVAL_SHARE else "eval"


def _to_set(mask: Bool[np.ndarray, "rows columns"]) -> int:
    packed = np.packbits(mask.reshape(-1), bitorder="little")
    return int.from_bytes(packed.tobytes(), "little")
