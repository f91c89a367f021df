"""The settings of AppWorld, checked where they enter."""

import dataclasses
import pathlib

SETS = ("train", "dev", "test_normal", "test_challenge")
HOW_TO_INSTALL = "run third_party/appworld/install.sh FOLDER, which says what to set"


@dataclasses.dataclass(frozen=True)
class Options:
    """Whose server plays which tasks.

    Raises:
        ValueError: naming the field, its value and what it must be.
    """

    max_steps: int = 30  # Steps an episode.
    python: str = ""  # Interpreter that has the package appworld.
    root: str = ""  # AppWorld's root directory, with the folder data.
    train_set: str = "train"  # Of SETS.
    eval_set: str = "dev"  # Of SETS.
    start_timeout: float = 60.0  # Seconds that a server may take to answer.
    call_timeout: float = 100.0  # Seconds that a call, or the agent's code, may take.

    def __post_init__(self):
        self._need(self.max_steps >= 1, "max_steps", "must be at least 1")
        for field in ("start_timeout", "call_timeout"):
            self._need(getattr(self, field) > 0, field, "must be positive seconds")
        for field in ("train_set", "eval_set"):
            known = f"must be one of {list(SETS)}"
            self._need(getattr(self, field) in SETS, field, known)
        self._need(
            self.train_set != self.eval_set,
            "eval_set",
            "must be another than train_set",
        )
        self._need(
            pathlib.Path(self.python).is_file(),
            "python",
            f"must be an interpreter that has AppWorld: {HOW_TO_INSTALL}",
        )
        self._need(
            pathlib.Path(self.root).is_dir() and self.root != "",
            "root",
            f"must be AppWorld's root directory: {HOW_TO_INSTALL}",
        )

    def task_ids(self, name: str) -> list[str]:
        """Returns the ids of a data set, in AppWorld's order.

        Raises:
            ValueError: if the data is not there.
        """
        path = pathlib.Path(self.root) / "data" / "datasets" / f"{name}.txt"
        if not path.is_file():
            raise ValueError(
                f"appworld.root={self.root!r}: {path} is missing; run "
                f"`appworld download data --root {self.root}` with {self.python}'s "
                "package"
            )
        # A line may end in a tag of the task, after "#".
        lines = path.read_text().split("\n")
        return [line.partition("#")[0].strip() for line in lines if line.strip()]

    def _need(self, holds: bool, field: str, what: str) -> None:
        if not holds:
            raise ValueError(f"appworld.{field}={getattr(self, field)!r}: {what}")
