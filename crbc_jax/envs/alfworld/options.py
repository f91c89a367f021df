"""The settings of ALFWorld, checked where they enter."""

import dataclasses
import os
import pathlib

FOLDERS = ("train", "valid_train", "valid_seen", "valid_unseen")
# Start of a game's folder -> the name that result tables give its type.
TASK_TYPES = {
    "pick_and_place_simple": "Pick",
    "look_at_obj_in_light": "Look",
    "pick_clean_then_place_in_recep": "Clean",
    "pick_heat_then_place_in_recep": "Heat",
    "pick_cool_then_place_in_recep": "Cool",
    "pick_two_obj_and_place": "Pick2",
}
HOW_TO_GET_DATA = (
    "run `alfworld-download` of the package alfworld (2 GB, into ~/.cache/alfworld), "
    "or set data_dir or $ALFWORLD_DATA to the folder that holds json_2.1.1"
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Which games are played, and how fast.

    Raises:
        ValueError: naming the field, its value and what it must be.
    """

    max_steps: int = 50  # Steps an episode.
    data_dir: str = ""  # Folder with json_2.1.1; "": $ALFWORLD_DATA or the official.
    train_folder: str = "train"  # Of FOLDERS: where training games lie.
    eval_folder: str = "valid_seen"  # And those that evaluate.
    task_types: str = "all"  # Or names of TASK_TYPES, as "Pick,Look".
    cached: bool = True  # Cache what the engine would compute again at every step.

    def __post_init__(self):
        self._need(self.max_steps >= 1, "max_steps", "must be at least 1")
        for field in ("train_folder", "eval_folder"):
            known = f"must be one of {list(FOLDERS)}"
            self._need(getattr(self, field) in FOLDERS, field, known)
        self._need(
            self.train_folder != self.eval_folder,
            "eval_folder",
            "must be another than train_folder",
        )
        unknown = set(self.types) - set(TASK_TYPES.values())
        self._need(
            not unknown and self.types,
            "task_types",
            f'must be "all" or names of {list(TASK_TYPES.values())}, with commas',
        )
        root = self.root
        self._need(
            root.is_dir(),
            "data_dir",
            f"{root} is no folder. To get the games, {HOW_TO_GET_DATA}",
        )

    @property
    def root(self) -> pathlib.Path:
        """Folder that holds train, valid_seen and so on."""
        folder = self.data_dir or os.environ.get("ALFWORLD_DATA", "~/.cache/alfworld")
        return pathlib.Path(folder).expanduser().absolute() / "json_2.1.1"

    @property
    def types(self) -> tuple[str, ...]:
        """Names of the task types that are played."""
        if self.task_types == "all":
            return tuple(TASK_TYPES.values())
        return tuple(self.task_types.split(","))

    def _need(self, holds: bool, field: str, what: str) -> None:
        if not holds:
            raise ValueError(f"alfworld.{field}={getattr(self, field)!r}: {what}")
