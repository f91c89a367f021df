"""Sokoban levels from a seed: random walls, and a start of known shortest solution."""

import hashlib

import numpy as np
from jaxtyping import Bool

from crbc_jax.envs.sokoban import rules, solver
from crbc_jax.envs.sokoban.level import Level, split_of
from crbc_jax.envs.sokoban.options import Options

# Part of every seed and digest. A change of the levels that a seed makes, which the
# test of their hash shows, needs another version.
VERSION = "sokoban-levels-1"
_MAX_DRAWN = 50_000  # Layouts drawn for one level, and how many of them are graded:
_MAX_GRADED = 500  # those of the right split with floor enough.
_MAX_STATES = 50_000  # Bound of the search that grades a layout.


class _Draws:
    """Numbers that are a function of a seed text alone, on every machine and release.

    NumPy's generators may change how they turn bits into choices; a hash cannot.
    """

    def __init__(self, seed: str):
        # Enough for the largest board and the most boxes that the options allow.
        self._bits = int.from_bytes(hashlib.shake_128(seed.encode()).digest(320))

    def bits(self, count: int) -> int:
        """Returns `count` random bits."""
        drawn = self._bits & ((1 << count) - 1)
        self._bits >>= count
        return drawn

    def below(self, bound: int) -> int:
        """Returns a number below `bound`, uniform up to 2**-32 x bound."""
        return self.bits(32) % bound

    def member(self, cells: int) -> int:
        """Returns one cell of a set, as a set."""
        for _ in range(self.below(cells.bit_count())):
            cells &= cells - 1
        return cells & -cells


def pool_name(options: Options) -> str:
    """Names all that decides which levels are generated."""
    size, plural = options.size, "" if options.num_boxes == 1 else "es"
    return (
        f"{size}x{size}-{options.num_boxes}box{plural}"
        f"-{options.min_moves}to{options.max_moves}moves"
    )


def generate(split: str, index: int, options: Options) -> Level:
    """Makes level `index` of a split: draws layouts until one has a fitting start.

    Every start that few enough moves solve is found exactly, by searching backwards
    from the solved states, so the level is solvable and its length known.

    Raises:
        ValueError: if no drawn layout has a start of the length asked for.
    """
    num_graded = 0
    for attempt in range(_MAX_DRAWN):
        draws = _Draws(f"{VERSION}/{pool_name(options)}/{split}/{index}/{attempt}")
        board = _draw_board(draws, options)
        if board is None or split_of(_board_text(board, options.size)) != split:
            continue
        start = _draw_start(draws, board, options)
        if start is not None:
            return _to_level(board, *start, options.size)
        num_graded += 1
        if num_graded == _MAX_GRADED:
            break
    raise ValueError(
        f"sokoban: none of {num_graded} random {options.size}x{options.size} boards "
        f"with {options.num_boxes} box(es) has a start that takes "
        f"min_moves={options.min_moves} to max_moves={options.max_moves} moves; choose "
        "shorter solutions, or a larger size"
    )


def _draw_board(draws: _Draws, options: Options) -> solver.Board | None:
    """Drops walls on three inner cells in eight; keeps one connected part."""
    size = options.size
    inner_row = ((1 << (size - 2)) - 1) << 1
    inner = sum(inner_row << (row * size) for row in range(1, size - 1))
    first, second, third = (draws.bits(size * size) for _ in range(3))
    open_cells = inner & ~(first & (second | third))
    if not open_cells:
        return None
    board = solver.Board(size, open_cells, targets=0)
    floor = solver.connected(board, draws.member(open_cells))
    # Small parts would repeat from level to level, and leave boxes no room.
    if floor.bit_count() < max((size - 2) ** 2 // 2, 2 * options.num_boxes + 3):
        return None
    targets = 0
    for _ in range(options.num_boxes):
        targets |= draws.member(floor & ~targets)
    return solver.Board(size, floor, targets)


def _draw_start(
    draws: _Draws, board: solver.Board, options: Options
) -> tuple[int, int, int] | None:
    """Draws a solution length that the board offers, then a start of that length.

    Starts with the fewest boxes already on targets are preferred.

    Returns:
        Player, boxes and optimal moves; None if the board offers no such length.
    """
    layers = solver.layers_to_solved(board, options.max_moves, _MAX_STATES)
    if len(layers) <= options.min_moves:
        return None
    moves = options.min_moves + draws.below(len(layers) - options.min_moves)
    done = {boxes: (boxes & board.targets).bit_count() for boxes in layers[moves]}
    fewest = min(done.values())
    best = sorted(boxes for boxes in done if done[boxes] == fewest)
    chosen = draws.below(sum(layers[moves][boxes].bit_count() for boxes in best))
    for boxes in best:
        players = layers[moves][boxes]
        if chosen < players.bit_count():
            break
        chosen -= players.bit_count()
    for _ in range(chosen):
        players &= players - 1
    return players & -players, boxes, moves


def _board_text(board: solver.Board, size: int) -> str:
    """Writes a layout as level files do, so that its hash is the same for both."""
    text = "".join(
        "." if board.targets >> cell & 1 else " " if board.floor >> cell & 1 else "#"
        for cell in range(size * size)
    )
    return "\n".join(text[row * size : (row + 1) * size] for row in range(size))


def _to_level(
    board: solver.Board, player: int, boxes: int, moves: int, size: int
) -> Level:
    floor, targets = _to_mask(board.floor, size), _to_mask(board.targets, size)
    layout = np.full((size, size), rules.WALL, np.int8)
    layout[floor] = rules.FLOOR
    layout[targets] = rules.TARGET
    cells = layout.copy()
    box_mask = _to_mask(boxes, size)
    cells[box_mask] = rules.BOX
    cells[box_mask & targets] = rules.BOX_ON_TARGET
    cells[_to_mask(player, size)] = rules.PLAYER
    return Level(layout, cells, moves)


def _to_mask(cells: int, size: int) -> Bool[np.ndarray, "size size"]:
    packed = np.frombuffer(cells.to_bytes(size * size // 8 + 1, "little"), np.uint8)
    bits = np.unpackbits(packed, count=size * size, bitorder="little")
    return bits.reshape(size, size).astype(bool)
