"""The settings of Sokoban, checked where they enter."""

import dataclasses
import pathlib

GENERATED = "generated"


@dataclasses.dataclass(frozen=True)
class Options:
    """Which levels are played, and how.

    Raises:
        ValueError: naming the field, its value and what it must be.
    """

    max_steps: int = 15  # Steps an episode.
    levels: str = GENERATED  # Or a Boxoban level file, or a folder of them.
    # The rest of the levels' settings apply to generated ones only.
    size: int = 6  # Cells a side, walls included.
    num_boxes: int = 1
    min_moves: int = 2  # Of the shortest solution.
    max_moves: int = 9
    images: bool = False  # Whether `info` has an image.

    def __post_init__(self):
        self._need(self.max_steps >= 1, "max_steps", "must be at least 1")
        if self.levels != GENERATED:
            path = pathlib.Path(self.levels)
            self._need(
                path.exists(),
                "levels",
                f'must be "{GENERATED}", or a file or folder of Boxoban levels; '
                f"{path.absolute()} does not exist. Boxoban's are at "
                "https://github.com/google-deepmind/boxoban-levels",
            )
            return
        self._need(5 <= self.size <= 16, "size", "must be 5 to 16 cells a side")
        most = (self.size - 2) ** 2 // 4
        self._need(
            1 <= self.num_boxes <= most,
            "num_boxes",
            f"must be 1 to {most} at this size",
        )
        self._need(self.min_moves >= 1, "min_moves", "must be at least 1")
        self._need(
            self.min_moves <= self.max_moves,
            "max_moves",
            f"must be at least min_moves={self.min_moves}",
        )
        self._need(
            self.max_moves <= self.max_steps,
            "max_moves",
            f"needs more steps than max_steps={self.max_steps} allows; raise max_steps "
            "or lower max_moves",
        )

    def _need(self, holds: bool, field: str, what: str) -> None:
        if not holds:
            raise ValueError(f"sokoban.{field}={getattr(self, field)!r}: {what}")
