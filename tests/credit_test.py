"""The notebook's door: columns in, advantages and closure values out."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crbc_jax
from crbc_jax.graph.batch import build_batch

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = sorted((ROOT / "../shared/golden").glob("crbc_*.json"))
OUTPUTS = {  # Golden names of the fields.
    "value": "V",
    "action_value": "Q",
    "advantage": "A",
    "sigma": "sigma",
    "credit": "A_S",
    "num_actions": "n_actions",
}


def two_rollouts():
    """At "hall", "left" wins a step later and "right" fails."""
    return {
        "group_id": ["task"] * 4,
        "traj_id": ["a", "a", "b", "b"],
        "step": [0, 1, 0, 1],
        "anchor": ["hall", "door", "hall", "cellar"],
        "action": ["left", "open", "right", "open"],
        "reward": [0.0, 10.0, 0.0, 0.0],
        "success": [True, True, False, False],
    }


def test_values_worked_by_hand():
    values = crbc_jax.closure_values(two_rollouts(), beta=0.5)
    # V(door) = 0.5, V(cellar) = 0, V(hall) = 0.5 * (0.5 + 0) / 2 = 0.125.
    np.testing.assert_allclose(values.value, [0.125, 0.5, 0.125, 0.0], atol=1e-7)
    np.testing.assert_allclose(values.action_value, [0.25, 0.5, 0.0, 0.0], atol=1e-7)
    np.testing.assert_allclose(values.advantage, [0.125, 0, -0.125, 0], atol=1e-7)
    np.testing.assert_allclose(values.sigma, [0.125, 0, 0.125, 0], atol=1e-7)
    np.testing.assert_allclose(values.credit, [1, 0, -1, 0], atol=1e-6)
    assert values.num_actions.tolist() == [2, 1, 2, 1]
    assert values.group_ids == ["task"] and values.residual[0] < 1e-6


def test_advantages_worked_by_hand():
    got = crbc_jax.step_advantages(two_rollouts(), beta=0.5)
    group = 5 / (np.sqrt(50) + 1e-6)  # Returns 10 and 0: mean 5, sample std sqrt(50).
    np.testing.assert_allclose(got, [group + 5, group, -group - 5, -group], atol=1e-5)
    assert got.dtype == np.float32


@pytest.mark.skipif(not GOLDEN, reason="golden values are not on this machine")
@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_values_match_golden(path):
    golden = json.loads(path.read_text())
    params, outputs = golden["params"], golden["outputs"]
    with jax.enable_x64(True):
        exact = crbc_jax.closure_values(golden["inputs"], params["beta"], params["K"])
    single = crbc_jax.closure_values(golden["inputs"], params["beta"], params["K"])
    for field, name in OUTPUTS.items():
        expected = np.array(outputs[name])
        np.testing.assert_allclose(
            getattr(exact, field), expected, **golden["tolerance"], err_msg=field
        )
        close = 2e-4 if field == "credit" else 1e-5
        np.testing.assert_allclose(
            getattr(single, field), expected, rtol=0, atol=close, err_msg=field
        )


def test_columns_may_be_arrays_or_of_a_data_frame():
    class Column:
        """As of pandas: has no more than length, iteration and tolist."""

        def __init__(self, values):
            self.values = values

        def __len__(self):
            return len(self.values)

        def tolist(self):
            return list(self.values)

    expected = crbc_jax.step_advantages(two_rollouts())
    for make in (np.array, Column, tuple):
        steps = {name: make(values) for name, values in two_rollouts().items()}
        np.testing.assert_array_equal(crbc_jax.step_advantages(steps), expected)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"reward": None}, ["'reward'", "missing"]),
        ({"reward": [0.0, 10.0, 0.0]}, ["'reward'", "3", "4"]),
        ({"reward": [0.0, float("nan"), 0.0, 0.0]}, ["'reward'", "row 1", "nan"]),
        ({"step": [0, 2, 0, 1]}, ["'step'", "row 1"]),
        ({"step": [0, 0, 0, 1]}, ["'step'", "row 1"]),
        ({"group_id": ["x", "x", "y", "y"], "traj_id": ["a"] * 4}, ["'traj_id'"]),
        ({"success": [True, False, False, False]}, ["'success'", "row 1"]),
        ({"success": ["True", "True", "False", "False"]}, ["row 0", "'True'", "1 and"]),
        ({"success": [[1], [1], [0], [0]]}, ["'success'", "row 0"]),
        ({"reward": np.zeros((4, 1))}, ["'reward'", "[4, 1]"]),
        ({"reward": [0.0, 1e39, 0.0, 0.0]}, ["'reward'", "row 1", "1e+39", "scale"]),
        ({"reward": (x for x in range(4))}, ["'reward'", "generator", "list"]),
        ({"anchor": "stsu"}, ["'anchor'", "str", "list"]),
        ({"action": {"a", "b", "c", "d"}}, ["'action'", "set", "list"]),
        ({"step": np.array(0)}, ["'step'", "list"]),
        ({"anchor": np.array([0.0, np.nan, 0.0, 1.0])}, ["'anchor'", "row 1", "NaN"]),
        ({"group_id": ["x", "x", float("nan"), "x"]}, ["'group_id'", "row 2", "NaN"]),
        ({"response_len": [1, 2, -1, 1]}, ["'response_len'", "row 2", "-1"]),
        ({"response_len": [1, 2, 2**40, 1]}, ["'response_len'", "row 2"]),
        ({"next_anchor": [b"t", b"e", b"u", None]}, ["'next_anchor'", "bytes", "str"]),
    ],
)
def test_a_wrong_column_is_named_with_its_row(change, words):
    steps = {k: v for k, v in (two_rollouts() | change).items() if v is not None}
    for compute in (crbc_jax.step_advantages, crbc_jax.closure_values):
        with pytest.raises(ValueError) as error:
            compute(steps)
        assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    "estimator,options,words",
    [
        ("cbrc", {}, ["cbrc", "did you mean 'crbc'"]),
        ("gigpo", {"discuont": 0.9}, ["discuont", "did you mean 'discount'"]),
        ("grpo", {"stat_weighting": "rows"}, ["stat_weighting", "trajectories"]),
        ("crbc", {"beta": 0.0}, ["beta", "(0, 1]"]),
        ("crbc", {"beta": 1.5}, ["beta", "(0, 1]"]),
        ("crbc", {"beta": float("nan")}, ["beta", "(0, 1]"]),
        ("crbc", {"depth": -1}, ["depth", "None"]),
        ("crbc", {"depth": 1.5}, ["depth", "None"]),
        ("crbc", {"depth": "full"}, ["depth", "None", "'full'"]),
        ("crbc", {"depth": float("nan")}, ["depth", "None"]),
        ("crbc", {"depth": 2**40}, ["depth", "None"]),
        ("crbc", {"invalid_action_penalty": "1"}, ["invalid_action_penalty", "finite"]),
        ("graphgpo", {"normalize_distance": "no"}, ["normalize_distance", "True or"]),
        ("gigpo", {"step_weight": float("inf")}, ["step_weight", "finite"]),
        ("gigpo", {"discount": "high"}, ["discount", "(0, 1]"]),
        ("proas", {"base": "grop"}, ["grop", "'grpo'"]),
        ("proas", {"base": "grpo", "beta": 0.9}, ["beta"]),
    ],
)
def test_a_wrong_name_or_option_is_named(estimator, options, words):
    with pytest.raises(ValueError) as error:
        crbc_jax.step_advantages(two_rollouts(), estimator, **options)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("steps", [None, [{"group_id": 0}], "steps"])
def test_what_is_no_table_is_refused(steps):
    with pytest.raises(ValueError, match="does not map names to columns"):
        crbc_jax.step_advantages(steps)


def test_a_whole_table_may_list_its_columns_as_pyarrow_does():
    class Table:
        """Iterates over columns, not names."""

        def __init__(self, columns):
            self.columns, self.column_names = columns, list(columns)

        def __getitem__(self, name):
            return self.columns[name]

        def __iter__(self):
            return iter(self.columns.values())

    np.testing.assert_array_equal(
        crbc_jax.step_advantages(Table(two_rollouts())),
        crbc_jax.step_advantages(two_rollouts()),
    )


def test_frames_of_any_library_are_anchors():
    frames = np.zeros((4, 8, 8, 3), np.uint8)
    frames[1], frames[3] = 1, 2
    expected, got = (
        crbc_jax.step_advantages(two_rollouts() | {"anchor": make(frames)})
        for make in (np.asarray, jnp.asarray)
    )
    np.testing.assert_array_equal(got, expected)


def test_closure_options_are_checked():
    with pytest.raises(ValueError, match="beta"):
        crbc_jax.closure_values(two_rollouts(), beta=2.0)
    with pytest.raises(ValueError, match="depth"):
        crbc_jax.closure_values(two_rollouts(), depth=-2)


def test_ignored_rewards_are_said():
    steps = two_rollouts() | {"reward": [0.1, -0.1, 0.0, 0.0]}
    with pytest.warns(UserWarning, match="ignored"):
        crbc_jax.step_advantages(steps, "rtmc")


def test_misspelt_columns_are_said():
    steps = two_rollouts() | {"is_action_vaild": [False] * 4, "comment": [""] * 4}
    with pytest.warns(UserWarning, match="'is_action_vaild'.*'is_action_valid'"):
        crbc_jax.step_advantages(steps)


def test_nothing_follows_an_end_under_any_name():
    steps = two_rollouts() | {"traj_id": [0, 1, 2, 3], "step": [0] * 4}
    expected = crbc_jax.step_advantages(steps)
    for nothing in ([None] * 4, np.full(4, np.nan)):
        got = crbc_jax.step_advantages(steps | {"next_anchor": nothing})
        np.testing.assert_array_equal(got, expected)


def test_step_rewards_enter_the_return():
    steps = {
        "group_id": [0] * 4,
        "traj_id": [0, 0, 0, 1],
        "step": [0, 1, 2, 0],
        "anchor": list("abcd"),
        "action": list("wxyz"),
        "reward": [0.1, -0.1, 1.0, 0.0],
        "success": [True] * 3 + [False],
    }
    got = crbc_jax.step_advantages(steps, "grpo", normalization="mean")
    np.testing.assert_allclose(got, [0.5, 0.5, 0.5, -0.5], atol=1e-6)


def test_importing_loads_jax_and_numpy_alone_and_touches_no_device():
    script = (
        "import sys, crbc_jax\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends\n"
        "heavy = 'flax optax orbax torch matplotlib pandas scipy gymnasium "
        "ml_collections tokenizers'.split()\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert result.stdout.strip() == "[]"


def test_rows_come_back_in_the_order_they_came():
    steps = two_rollouts()
    order = [3, 0, 2, 1]
    shuffled = {name: [values[i] for i in order] for name, values in steps.items()}
    expected = crbc_jax.step_advantages(steps)[order]
    np.testing.assert_array_equal(crbc_jax.step_advantages(shuffled), expected)
    batch, order = build_batch(shuffled)
    assert order.unpad(batch.step).tolist() == shuffled["step"]
