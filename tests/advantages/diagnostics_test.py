"""Diagnostics: one group by hand, and coverage against a search over the graph."""

import collections

import numpy as np
from random_steps import random_steps

from crbc_jax.advantages.diagnostics import diagnose
from crbc_jax.graph.batch import build_batch


def diagnosed(steps):
    batch, _ = build_batch(steps)
    return {name: float(value) for name, value in diagnose(batch).items()}


def test_shares_worked_by_hand():
    steps = {
        "group_id": [0] * 5 + [1] * 2,
        "traj_id": ["a", "a", "a", "b", "b", "c", "d"],
        "step": [0, 1, 2, 0, 1, 0, 0],
        "anchor": ["x", "x", "y", "x", "z", "x", "x"],
        "action": ["stay", "go", "go", "leave", "go", "go", "go"],
        "reward": [0.0, 0.0, 1.0, 0.0, 0.0, 0.5, 0.5],
        "success": [True] * 3 + [False] * 4,
    }
    got = diagnosed(steps)
    assert got["anchors"] == 2  # 3 and 1.
    np.testing.assert_allclose(got["singleton_share"], 2 / 7)  # y and z.
    np.testing.assert_allclose(got["open_share"], 3 / 7)  # x of group 0.
    np.testing.assert_allclose(got["self_loop_share"], 1 / 7)
    np.testing.assert_allclose(got["unreachable_share"], 2 / 4)  # z, and x of group 1.
    assert got["zero_variance_groups"] == 0.5
    assert got["residual"] < 1e-6
    # Both rollouts of group 0 visit x itself, so all evidence is there at once.
    for depth in (0, 1, 2, 3, "closure"):
        assert got[f"coverage_{depth}"] == 2 and got[f"full_coverage_{depth}"] == 1


def coverage(steps, depth):
    """Rollouts that visit what is reached within `depth` steps, and how often all."""
    following = collections.defaultdict(set)
    actions, visitors = collections.defaultdict(set), collections.defaultdict(set)
    rollouts = collections.defaultdict(set)
    size = len(steps["step"])
    for row in range(size):
        group = steps["group_id"][row]
        here = group, steps["anchor"][row]
        visitors[here].add(steps["traj_id"][row])
        rollouts[group].add(steps["traj_id"][row])
        actions[here].add(steps["action"][row])
        if row + 1 < size and steps["step"][row + 1]:
            following[here].add((group, steps["anchor"][row + 1]))
    counts, full = [], []
    for row in range(size):
        here = steps["group_id"][row], steps["anchor"][row]
        if len(actions[here]) < 2:
            continue
        reached = {here}
        for _ in range(depth):
            reached |= {ahead for place in reached for ahead in following[place]}
        seen = set().union(*(visitors[place] for place in reached))
        counts.append(len(seen))
        full.append(seen == rollouts[here[0]])
    return np.mean(counts), np.mean(full)


def test_coverage_equals_a_search():
    steps = random_steps(seed=1, num_trajectories=6)
    places = np.random.default_rng(0).integers(0, 25, len(steps["step"]))
    steps["anchor"] = places.tolist()  # Rollouts meet here and there.
    got = diagnosed(steps)
    for depth, name in ((0, "0"), (1, "1"), (2, "2"), (3, "3"), (99, "closure")):
        mean, full = coverage(steps, depth)
        np.testing.assert_allclose(got[f"coverage_{name}"], mean, rtol=1e-6)
        np.testing.assert_allclose(got[f"full_coverage_{name}"], full, rtol=1e-6)
    assert got["coverage_0"] + 1 < got["coverage_2"] < got["coverage_closure"]
