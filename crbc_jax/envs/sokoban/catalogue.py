"""Which Sokoban levels there are: generated ones and those of Boxoban files, by id."""

import functools
import heapq
import itertools
import pathlib
import re
from collections.abc import Iterator

from crbc_jax.envs.base import TaskSet, digest_lines
from crbc_jax.envs.sokoban.generator import VERSION, generate, pool_name
from crbc_jax.envs.sokoban.level import (
    Level,
    layout_hash,
    layout_text,
    parse_level,
    split_of,
)
from crbc_jax.envs.sokoban.options import GENERATED, Options

_INDEX_DIGITS = 6  # Of a task id: so many that sorting ids sorts numbers.
_MAX_REPEATS = 8  # Of a level, on average, before a split is taken to have no more.


def list_tasks(split: str, count: int, options: Options) -> TaskSet:
    """Lists at most `count` task ids, fewer only where there are no more levels.

    Generated levels for training are made when they are played, so listing them costs
    nothing. Those for evaluation are made at once, so that none comes twice.

    Raises:
        ValueError: if the settings allow no level, or a file is not one of levels.
    """
    if options.levels == GENERATED:
        prefix = f"{pool_name(options)}-{split}"
        last = min(_MAX_REPEATS * count, 10**_INDEX_DIGITS)
        candidates = (f"{prefix}-{index:0{_INDEX_DIGITS}d}" for index in range(last))
        if split == "eval":
            candidates = _distinct(candidates, options)
        ids = tuple(itertools.islice(candidates, count))
        find_level(ids[0], options)  # Refuses settings that no level can meet.
        return TaskSet(ids, digest_lines([VERSION, *ids]))
    in_split = []
    for path, name in _level_files(options.levels):
        for task_id, text in _read_file(path, name).items():
            layout = layout_text(text)
            if split_of(layout) == split:
                in_split.append((layout_hash(layout), task_id, text))
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
        prefix = pool_name(options)
        pattern = rf"{re.escape(prefix)}-(train|eval)-(\d{{{_INDEX_DIGITS}}})"
        match = re.fullmatch(pattern, task_id)
        if not match:
            raise ValueError(
                f"task {task_id!r} is not one of the pool {prefix}; tasks and "
                "environment need the same sokoban options"
            )
        return generate(match[1], int(match[2]), options)
    for path, name in _level_files(options.levels):
        if task_id.rpartition("#")[0] == name:
            levels = _read_file(path, name)
            if task_id in levels:
                return parse_level(levels[task_id], task_id)
    raise ValueError(f"sokoban.levels={options.levels!r} has no task {task_id!r}")


def _distinct(task_ids: Iterator[str], options: Options) -> Iterator[str]:
    """Leaves out tasks whose level an earlier one has."""
    seen = set()
    for task_id in task_ids:
        level = find_level(task_id, options)
        content = level.layout.tobytes() + level.cells.tobytes()
        if content not in seen:
            seen.add(content)
            yield task_id


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
