"""Official games and golden transcripts, where they and the engine are there."""

import importlib.util
import json
import pathlib

import pytest

DATA = pathlib.Path(__file__).parents[4] / "shared" / "data" / "alfworld"


@pytest.fixture(scope="session")
def data_dir() -> str:
    if importlib.util.find_spec("alfworld") is None:
        pytest.skip("the package alfworld is not installed")
    if not DATA.is_dir():
        pytest.skip(f"no official games in {DATA}")
    return str(DATA)


@pytest.fixture(scope="session")
def plans(data_dir) -> dict[str, dict]:
    """Task id -> `plan`, and `observations` and `num_admissible` of each state."""
    games = json.loads((DATA / "golden_plans.json").read_text())["games"]
    prefix, suffix = "json_2.1.1/", "/game.tw-pddl"
    return {k.removeprefix(prefix).removesuffix(suffix): v for k, v in games.items()}
