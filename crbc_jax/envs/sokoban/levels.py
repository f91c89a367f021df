"""Sokoban levels: made from a seed, or read from Boxoban files, and split by layout.

A layout is walls and targets, without player and boxes. A hash of it decides whether
its levels are for training or evaluation, so no layout is ever in both splits,
whatever the pool, the size or the file.
"""

import functools
import hashlib
import heapq
import itertools
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int8

from crbc_jax.envs.base import TaskSet, digest_lines
from crbc_jax.envs.sokoban import rules, solver
from crbc_jax.envs.sokoban.options import GENERATED, Options

# Part of every seed and digest. A change of the levels that a seed makes, which the
# test of their hash shows, needs another version.
_VERSION = "sokoban-levels-1"
_INDEX_DIGITS = 6  # Of a task id: so many that sorting ids sorts numbers.
_EVAL_SHARE = 8  # One layout in this many is for evaluation.
_MAX_ATTEMPTS = 500  # Layouts of the right split that are tried for one level.
_MAX_REPEATS = 8  # Of a level, on average, before a split is taken to have no more.
_MAX_STATES = 50_000  # Bound of the search that grades a layout.

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


def list_tasks(split: str, count: int, options: Options) -> TaskSet:
    """Lists at most `count` task ids, fewer only where there are no more levels.

    Generated levels for training are made when they are played, so listing them costs
    nothing. Those for evaluation are made at once, so that none comes twice.

    Raises:
        ValueError: if the settings allow no level, or a file is not one of levels.
    """
    if options.levels == GENERATED:
        prefix = f"{_id_prefix(options)}-{split}"
        last = min(_MAX_REPEATS * count, 10**_INDEX_DIGITS)
        candidates = (f"{prefix}-{index:0{_INDEX_DIGITS}d}" for index in range(last))
        if split == "eval":
            candidates = _distinct(candidates, options)
        ids = tuple(itertools.islice(candidates, count))
        find_level(ids[0], options)  # Refuses settings that no level can meet.
        return TaskSet(ids, digest_lines([_VERSION, *ids]))
    in_split = []
    for path, name in _level_files(options.levels):
        for task_id, text in _read_file(path, name).items():
            layout = text.translate(_HIDE_MOVABLES)
            if _split_of(layout) == split:
                in_split.append((_layout_hash(layout), task_id, text))
    # The first by hash are a sample of all files, and the same whatever their order.
    chosen = sorted(level[1:] for level in heapq.nsmallest(count, in_split))
    lines = itertools.chain.from_iterable(chosen)
    return TaskSet(tuple(task_id for task_id, _ in chosen), digest_lines(lines))


@functools.lru_cache(maxsize=8192)
def find_level(task_id: str, options: Options) -> Level:
    """Returns the level of a task that `list_tasks` lists with the same options.

    Raises:
        ValueError: if it lists no such task.
    """
    if options.levels == GENERATED:
        prefix = _id_prefix(options)
        pattern = rf"{re.escape(prefix)}-(train|eval)-(\d{{{_INDEX_DIGITS}}})"
        match = re.fullmatch(pattern, task_id)
        if not match:
            raise ValueError(
                f"task {task_id!r} is not one of the pool {prefix}; tasks and "
                "environment need the same sokoban options"
            )
        return _generate(match[1], int(match[2]), options)
    for path, name in _level_files(options.levels):
        if task_id.rpartition("#")[0] == name:
            levels = _read_file(path, name)
            if task_id in levels:
                return parse_level(levels[task_id], task_id)
    raise ValueError(f"sokoban.levels={options.levels!r} has no task {task_id!r}")


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
        [_LAYOUT[character] for character in row.translate(_HIDE_MOVABLES)]
        for row in rows
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


def _to_set(mask: np.ndarray) -> int:
    packed = np.packbits(mask.reshape(-1), bitorder="little")
    return int.from_bytes(packed.tobytes(), "little")


def _to_mask(cells: int, size: int) -> np.ndarray:
    packed = np.frombuffer(cells.to_bytes(size * size // 8 + 1, "little"), np.uint8)
    bits = np.unpackbits(packed, count=size * size, bitorder="little")
    return bits.reshape(size, size).astype(bool)


def _layout_hash(layout: str) -> bytes:
    """Hashes walls and targets as text, rows by newline."""
    return hashlib.sha256(layout.encode()).digest()


def _split_of(layout: str) -> str:
    return "train" if _layout_hash(layout)[0] % _EVAL_SHARE else "eval"


# Boxoban files.


@functools.lru_cache(maxsize=8)
def _level_files(levels: str) -> tuple[tuple[pathlib.Path, str], ...]:
    """Returns (path, name) of each level file; names, and their order, are portable."""
    root = pathlib.Path(levels)
    if root.is_file():
        return ((root, root.name),)
    named = ((path.relative_to(root).as_posix(), path) for path in root.rglob("*.txt"))
    files = tuple((path, name) for name, path in sorted(named))
    if not files:
        raise ValueError(
            f"sokoban.levels={levels!r}: no level file (*.txt) in {root.absolute()}; "
            "Boxoban's are at https://github.com/google-deepmind/boxoban-levels"
        )
    return files


@functools.lru_cache(maxsize=64)
def _read_file(path: pathlib.Path, name: str) -> dict[str, str]:
    """Returns the levels of a file by task id, in order."""
    found = {}
    for block in _blocks(path.read_text(encoding="utf-8")):
        found[f"{name}#{len(found):0{_INDEX_DIGITS}d}"] = block
    if not found:
        raise ValueError(f"{path.absolute()} holds no Sokoban level")
    return found


def _blocks(text: str) -> Iterator[str]:
    """Yields runs of lines that have a wall; others (`; 12`, empty) lie between."""
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.strip().startswith("#"):
            block.append(line.rstrip())
        elif block:
            yield "\n".join(block)
            block = []


# Generated levels.


def _distinct(task_ids: Iterator[str], options: Options) -> Iterator[str]:
    """Leaves out tasks whose level an earlier one has."""
    seen = set()
    for task_id in task_ids:
        level = find_level(task_id, options)
        content = level.layout.tobytes() + level.cells.tobytes()
        if content not in seen:
            seen.add(content)
            yield task_id


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


def _id_prefix(options: Options) -> str:
    size, plural = options.size, "" if options.num_boxes == 1 else "es"
    return (
        f"{size}x{size}-{options.num_boxes}box{plural}"
        f"-{options.min_moves}to{options.max_moves}moves"
    )


def _generate(split: str, index: int, options: Options) -> Level:
    """Makes level `index` of a split: draws layouts until one has a fitting start.

    Every start that few enough moves solve is found exactly, by searching backwards
    from the solved states, so the level is solvable and its length known.
    """
    attempt, fitting = 0, 0
    while fitting < _MAX_ATTEMPTS:
        draws = _Draws(f"{_VERSION}/{_id_prefix(options)}/{split}/{index}/{attempt}")
        attempt += 1
        board = _draw_board(draws, options)
        if board is None or _split_of(_board_text(board, options.size)) != split:
            continue
        fitting += 1
        start = _draw_start(draws, board, options)
        if start is not None:
            return _to_level(board, *start, options.size)
    raise ValueError(
        f"sokoban: none of {_MAX_ATTEMPTS} random {options.size}x{options.size} boards "
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
        " " if board.floor >> cell & 1 else "#" for cell in range(size * size)
    )
    for cell in range(size * size):
        if board.targets >> cell & 1:
            text = f"{text[:cell]}.{text[cell + 1 :]}"
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
