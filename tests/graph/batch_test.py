"""The door to the device: order of rows, padding, few shapes, aborted trajectories."""

import dataclasses

import jax
import numpy as np
import pytest

from crbc_jax.advantages.crbc import crbc_advantages
from crbc_jax.graph.anchors import intern
from crbc_jax.graph.batch import build_batch, columns_of
from crbc_jax.graph.columns import ColumnError
from crbc_jax.types import Step, Trajectory


def random_columns(rng, num_groups, num_rollouts, max_steps, num_anchors):
    """Rows of random walks, in time order."""
    names = ("group_id", "traj_id", "step", "anchor", "action", "reward", "success")
    columns = {name: [] for name in names}
    for group in range(num_groups):
        for rollout in range(num_rollouts):
            success = bool(rng.integers(2))
            for step in range(int(rng.integers(1, max_steps + 1))):
                anchor, action = (int(rng.integers(n)) for n in (num_anchors, 4))
                values = (
                    f"task {group}",
                    (group, rollout),
                    step,
                    f"observation {anchor}",
                    action,
                    float(rng.normal()),
                    success,
                )
                for name, value in zip(names, values, strict=True):
                    columns[name].append(value)
    return columns


def test_rows_come_back_in_the_callers_order():
    columns = random_columns(np.random.default_rng(0), 5, 3, 9, 7)
    order = np.random.default_rng(1).permutation(len(columns["step"]))
    shuffled = {name: [values[i] for i in order] for name, values in columns.items()}
    batch, rows = build_batch(shuffled)
    np.testing.assert_array_equal(rows.unpad(batch.reward), shuffled["reward"])
    np.testing.assert_array_equal(rows.unpad(batch.step), shuffled["step"])
    assert batch.mask.sum() == len(order)
    group = rows.position // batch.mask.shape[1]
    assert [rows.group_ids[g] for g in group] == shuffled["group_id"]
    # Trajectories are contiguous and in time order, padding is last.
    for mask, step, is_last in zip(batch.mask, batch.step, batch.is_last, strict=True):
        assert not np.any(np.diff(mask.astype(int)) > 0)
        starts = np.flatnonzero(mask & (step == 0))
        ends = np.flatnonzero(mask & is_last)
        for start, end in zip(starts, ends, strict=True):
            np.testing.assert_array_equal(step[start : end + 1], range(end + 1 - start))


def test_ids_number_equal_values_alike_within_a_group():
    columns = random_columns(np.random.default_rng(2), 4, 3, 9, 7)
    batch, rows = build_batch(columns)
    source, pair = rows.unpad(batch.source), rows.unpad(batch.pair)
    names = list(zip(columns["group_id"], columns["anchor"], strict=True))
    assert len(set(zip(columns["group_id"], source, strict=True))) == len(set(names))
    assert len(set(zip(names, source, strict=True))) == len(set(names))
    taken = set(zip(names, columns["action"], strict=True))
    assert len(set(zip(columns["group_id"], pair, strict=True))) == len(taken)


def test_the_next_anchor_is_that_of_the_next_row():
    columns = random_columns(np.random.default_rng(3), 2, 3, 9, 7)
    batch, rows = build_batch(columns)
    source, target = rows.unpad(batch.source), rows.unpad(batch.target)
    goes_on = ~rows.unpad(batch.is_last)[:-1]
    np.testing.assert_array_equal(target[:-1][goes_on], source[1:][goes_on])
    assert not batch.is_trapped.any()


def test_two_hundred_random_batches_compile_at_most_six_times():
    rng = np.random.default_rng(4)
    crbc_advantages.clear_cache()  # What other tests compiled must not hide ours.
    for _ in range(200):
        columns = random_columns(
            rng,
            num_groups=int(rng.integers(1, 17)),
            num_rollouts=int(rng.integers(2, 9)),
            max_steps=int(rng.integers(1, 21)),
            num_anchors=int(rng.integers(1, 60)),
        )
        batch, _ = build_batch(columns)
        crbc_advantages(
            jax.tree.map(np.asarray, batch), beta=float(rng.uniform(0.5, 1))
        )
    assert 1 <= crbc_advantages._cache_size() <= 6


@pytest.mark.parametrize(
    "groups,rows,shape",
    [
        (1, 3, (16, 128)),
        (17, 129, (32, 512)),
        (2, 600, (8, 1024)),
        (1, 9000, (1, 16384)),
    ],
)
def test_shapes_are_buckets(groups, rows, shape):
    columns = random_columns(np.random.default_rng(5), groups, 1, 1, 3)
    columns |= {"step": [], "group_id": [], "traj_id": []}
    for group in range(groups):
        columns["step"] += range(rows)
        columns["group_id"] += [group] * rows
        columns["traj_id"] += [group] * rows
    for name, value in (("anchor", 0), ("action", 0), ("reward", 0), ("success", True)):
        columns[name] = [value] * (groups * rows)
    assert build_batch(columns)[0].mask.shape == shape


def test_frames_are_equal_if_their_bytes_are():
    frame = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    values = [frame, frame.copy(), frame + 1, frame.reshape(3, 4), frame.astype("u2")]
    np.testing.assert_array_equal(intern(values), [0, 0, 1, 2, 3])
    np.testing.assert_array_equal(intern(np.stack(values[:3])), [0, 0, 1])


def test_a_value_that_cannot_be_hashed_is_named():
    columns = random_columns(np.random.default_rng(6), 1, 2, 3, 3)
    columns["anchor"][1] = ["a", "list"]
    with pytest.raises(ColumnError, match="'anchor', row 1: list"):
        build_batch(columns)


def step(anchor, reward=0.0):
    none = np.zeros(2, np.int32)
    return Step(
        observation="",
        anchor=anchor,
        prompt_ids=none,
        response_ids=none,
        logprobs=none.astype(np.float32),
        policy_version=0,
        finish_reason="stop",
        action="go",
        parse_code="ok",
        is_action_valid=True,
        reward=reward,
    )


def test_aborted_trajectories_enter_nothing():
    def trajectory(rollout, outcome):
        return Trajectory(
            task_id="t",
            group=3,
            rollout=rollout,
            outcome=outcome,
            steps=(step("a"), step("b", 1.0)),
            final_observation="",
            final_anchor="c",
        )

    outcomes = ("success", "failure", "truncated", "aborted")
    group = tuple(trajectory(i, outcome) for i, outcome in enumerate(outcomes))
    columns = columns_of([group])
    assert columns == columns_of([group[:3]])
    assert columns["success"] == [True] * 2 + [False] * 4
    batch, rows = build_batch(columns)
    assert rows.group_ids == [3]
    # "c" has no visits, and is known as a target.
    assert np.unique(rows.unpad(batch.target)).size == 2
    fewer, _ = build_batch(columns_of([group[:3]]))
    for field in dataclasses.fields(batch):
        if field.name != "extras":
            np.testing.assert_array_equal(
                getattr(batch, field.name), getattr(fewer, field.name)
            )
