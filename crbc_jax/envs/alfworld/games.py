"""Folders of official games -> task ids, and back.

A task id is the path below json_2.1.1: "valid_seen/look_at_obj_in_light-.../trial_...".
"""

import functools
import hashlib
import json
import pathlib

from crbc_jax.envs.alfworld.options import HOW_TO_GET_DATA, TASK_TYPES, Options
from crbc_jax.envs.base import TaskSet, digest_lines

_GAME = "game.tw-pddl"
_UNSUPPORTED = ("movable", "Sliced")  # ALFWorld's own loader leaves these games out.


def list_tasks(split: str, count: int, options: Options) -> TaskSet:
    """Lists at most `count` games of a split, a fixed sample of all of its types.

    Raises:
        ValueError: if there is no game, or one is in the other split's folder too.
    """
    own, other = options.train_folder, options.eval_folder
    if split == "eval":
        own, other = other, own
    root, ids, lines = options.root, [], []
    shared = {i.partition("/")[2] for i in _candidates(root, other, options.types)}
    # In an order that is no type's, whatever the file system's is.
    for task_id in sorted(_candidates(root, own, options.types), key=_shuffled):
        if task_id.partition("/")[2] in shared:
            raise ValueError(
                f"alfworld: the game {task_id} is in {other} too; training and "
                f"evaluation must not share games: mend {root}"
            )
        content = (root / task_id / _GAME).read_bytes()
        if json.loads(content).get("solvable"):
            ids.append(task_id)
            lines.append(f"{task_id} {hashlib.sha256(content).hexdigest()}")
        if len(ids) == count:
            break
    if not ids:
        raise ValueError(
            f"alfworld: no solvable game of the types {', '.join(options.types)} in "
            f"{root / own}. To get the games, {HOW_TO_GET_DATA}"
        )
    return TaskSet(tuple(sorted(ids)), digest_lines(sorted(lines)))


def find_game(task_id: str, options: Options) -> pathlib.Path:
    """Returns the path of a task's game file.

    Raises:
        ValueError: if there is none.
    """
    path = options.root / task_id / _GAME
    parts = pathlib.PurePosixPath(task_id).parts
    if len(parts) != 3 or ".." in parts or not path.is_file():
        raise ValueError(
            f"task {task_id!r} is no game below {options.root}; tasks and environment "
            "need the same alfworld options"
        )
    return path


def task_type(folder: str) -> str:
    """Returns the type that a game's folder is named for, "" if of none."""
    return TASK_TYPES.get(folder.partition("-")[0], "")


@functools.lru_cache(maxsize=8)
def _candidates(
    root: pathlib.Path, folder: str, types: tuple[str, ...]
) -> tuple[str, ...]:
    """Ids of the folder's games of these types, solvable or not."""
    return tuple(
        path.parent.relative_to(root).as_posix()
        for path in (root / folder).glob(f"*/*/{_GAME}")
        if task_type(path.parent.parent.name) in types
        and not any(word in path.parent.parent.name for word in _UNSUPPORTED)
    )


def _shuffled(task_id: str) -> str:
    return hashlib.sha256(task_id.encode()).hexdigest()
