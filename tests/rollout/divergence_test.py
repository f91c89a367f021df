"""Edit distance between action prefixes: the peer's values, and the simple cases."""

import json
import pathlib

import pytest

from crbc_jax.rollout.divergence import prefix_divergence

GOLDEN = pathlib.Path(__file__).parents[3] / "shared" / "golden"


def test_matches_the_published_code():
    path = GOLDEN / "selective_rollout_divergence.json"
    if not path.exists():
        pytest.skip("golden values are not on this machine")
    for case in json.loads(path.read_text())["outputs"]["cases"]:
        got = prefix_divergence(case["actions"], case["K"])
        assert got == pytest.approx(
            case["metrics"]["prefix_edit_distance_mean"], abs=1e-12
        )


@pytest.mark.parametrize(
    "actions,expected",
    [
        ([["a"] * 10] * 4, 0.0),
        ([["a"] * 10, ["b"] * 10], 1.0),
        ([["a", "b", "c", "d"], ["b", "c", "d", "a"]], 0.5),  # Shifted by one.
        ([["a"], ["a"]], 0.0),  # Ended early, alike.
        ([["a", "b"]], 0.0),
        ([], 0.0),
    ],
)
def test_simple_cases(actions, expected):
    length = 4 if len(actions) == 2 and len(actions[0]) == 4 else 10
    assert prefix_divergence(actions, length) == pytest.approx(expected)


def test_length_must_be_positive():
    with pytest.raises(ValueError, match="length"):
        prefix_divergence([["a"], ["b"]], 0)
