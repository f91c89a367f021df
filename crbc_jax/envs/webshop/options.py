"""The settings of WebShop, checked where they enter."""

import dataclasses
import pathlib

GENERATED = "generated"
SIZES = ("small", "all")
GOALS = ("synthetic", "human")
OBSERVATIONS = ("text", "text_rich")
HOW_TO_GET_DATA = (
    "clone https://github.com/princeton-nlp/WebShop and run its setup.sh "
    '(-d small: 1,000 products; -d all: 1.18 million), then give its folder "data"'
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Which catalogue is searched for which goals, and what is seen of it.

    Raises:
        ValueError: naming the field, its value and what it must be.
    """

    max_steps: int = 15  # Steps an episode.
    data_dir: str = GENERATED  # Or a folder of WebShop's official files.
    size: str = "small"  # Of SIZES: which of the folder's catalogues.
    goals: str = "synthetic"  # Of GOALS: instructions by rule, or by people.
    observation: str = "text"  # Of OBSERVATIONS, as WebShop names them.
    seed: int = 42  # Of prices within their range, and of price limits.
    shuffle_seed: int = 233  # Of the order of goals, and so of the splits.
    num_products: int = 200  # Of a generated catalogue.

    def __post_init__(self):
        self._need(self.max_steps >= 1, "max_steps", "must be at least 1")
        self._need(self.size in SIZES, "size", f"must be one of {list(SIZES)}")
        self._need(self.goals in GOALS, "goals", f"must be one of {list(GOALS)}")
        self._need(
            self.observation in OBSERVATIONS,
            "observation",
            f"must be one of {list(OBSERVATIONS)}",
        )
        if self.data_dir == GENERATED:
            self._need(
                100 <= self.num_products <= 1_000_000,
                "num_products",
                "must be 100 to 1,000,000, so that both splits have goals",
            )
            self._need(
                self.goals == "synthetic",
                "goals",
                "a generated catalogue has no goals by people; set data_dir: "
                + HOW_TO_GET_DATA,
            )
            return
        path = pathlib.Path(self.data_dir)
        self._need(
            path.is_dir(),
            "data_dir",
            f'must be "{GENERATED}" or a folder of WebShop\'s files; '
            f"{path.absolute()} is none. To get them, {HOW_TO_GET_DATA}",
        )

    def _need(self, holds: bool, field: str, what: str) -> None:
        if not holds:
            raise ValueError(f"webshop.{field}={getattr(self, field)!r}: {what}")
