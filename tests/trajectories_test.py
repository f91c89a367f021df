import gzip
import json

import numpy as np
import pytest

from crbc_jax.trajectories import read_groups, write_groups
from crbc_jax.types import INVALID_ACTION, Step, Trajectory


def make_groups(seed=0):
    """Two groups of two trajectories; one is aborted and has a step, one has none."""
    rng = np.random.default_rng(seed)

    def make_step(index):
        valid = index % 2 == 0
        return Step(
            observation=f"# _ «{index}»\n",
            anchor=bytes([index, 255]) if valid else f"state {index}",
            prompt_ids=rng.integers(0, 99, 5).astype(np.int32),
            response_ids=rng.integers(0, 99, 2).astype(np.int32),
            logprobs=np.log(rng.uniform(size=2)).astype(np.float32),
            policy_version=7,
            finish_reason="stop" if valid else "length",
            action="up" if valid else INVALID_ACTION,
            parse_code="ok" if valid else "no_tag",
            is_action_valid=valid,
            reward=-0.1,
        )

    def make(group, rollout, outcome, num_steps):
        return Trajectory(
            task_id=f"task-{group}",
            group=group,
            rollout=rollout,
            outcome=outcome,
            steps=tuple(make_step(index) for index in range(num_steps)),
            final_observation="end",
            final_anchor=b"\x00",
            prompts_truncated=rollout,
            error="worker died" if outcome == "aborted" else "",
        )

    return [
        (make(0, 0, "success", 3), make(0, 1, "aborted", 1)),
        (make(1, 0, "truncated", 2), make(1, 1, "aborted", 0)),
    ]


def assert_same(left, right):
    for name in Trajectory.__slots__:
        if name != "steps":
            assert getattr(left, name) == getattr(right, name)
    assert len(left.steps) == len(right.steps)
    for a, b in zip(left.steps, right.steps, strict=True):
        for name in Step.__slots__:
            x, y = getattr(a, name), getattr(b, name)
            assert type(x) is type(y)
            if isinstance(x, np.ndarray):
                assert x.dtype == y.dtype
                assert x.tobytes() == y.tobytes()
            else:
                assert x == y


def test_round_trip_is_exact(tmp_path):
    groups = make_groups()
    path = tmp_path / "rollouts" / "000001.jsonl.gz"
    write_groups(path, groups, {"value": np.arange(5, dtype=np.float32)})
    restored = read_groups(path)
    assert [len(group) for group in restored] == [2, 2]
    for before, after in zip(groups, restored, strict=True):
        for left, right in zip(before, after, strict=True):
            assert_same(left, right)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_credit_lands_on_its_step_and_skips_aborted(tmp_path):
    path = tmp_path / "one.jsonl.gz"
    value = np.array([0, 1, np.nan, 3, 4], np.float32)
    write_groups(path, make_groups(), {"value": value})
    lines = [json.loads(line) for line in gzip.open(path, "rt")]
    credit = [[step.get("credit") for step in line["steps"]] for line in lines]
    assert credit == [
        [{"value": 0.0}, {"value": 1.0}, {"value": None}],
        [None],
        [{"value": 3.0}, {"value": 4.0}],
        [],
    ]


def test_equal_groups_are_equal_bytes(tmp_path):
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_groups(tmp_path / name, make_groups())
    write_groups(tmp_path / "c.jsonl.gz", make_groups(1))
    a, b, c = ((tmp_path / f"{n}.jsonl.gz").read_bytes() for n in "abc")
    assert a == b != c


def test_credit_of_another_length_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"credit\['value'\] .*\(6,\).* 5 steps"):
        write_groups(tmp_path / "x.jsonl.gz", make_groups(), {"value": np.zeros(6)})
    assert not (tmp_path / "x.jsonl.gz").exists()
