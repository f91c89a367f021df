"""Shortest paths to success, and sets of equal histories, against plain searches."""

import collections

import jax
import numpy as np
import pytest

from crbc_jax.graph.batch import build_batch
from crbc_jax.kernels.distances import success_distances
from crbc_jax.kernels.histories import history_ids, intern_pairs


def walks(paths, success, next_anchor=None):
    """One group; each path is the anchors of a trajectory."""
    rows = [
        (number, step, anchor)
        for number, path in enumerate(paths)
        for step, anchor in enumerate(path)
    ]
    number, step, anchor = zip(*rows, strict=True)
    columns = {
        "group_id": [0] * len(rows),
        "traj_id": number,
        "step": step,
        "anchor": anchor,
        "action": [0] * len(rows),
        "reward": [0.0] * len(rows),
        "success": [success[n] for n in number],
    }
    if next_anchor is not None:
        columns["next_anchor"] = next_anchor
    return build_batch(columns)


def breadth_first(edges, goals):
    """Distances of all nodes to the goals (each 1 step from success)."""
    best = {goal: 1 for goal in goals}
    queue = collections.deque(goals)
    while queue:
        node = queue.popleft()
        for tail, head in edges:
            if head == node and tail not in best:
                best[tail] = best[node] + 1
                queue.append(tail)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_distances_match_breadth_first_search(seed):
    rng = np.random.default_rng(seed)
    paths = [rng.integers(0, 12, rng.integers(1, 9)).tolist() for _ in range(8)]
    success = (rng.random(8) < 0.4).tolist()
    batch, order = walks(paths, success)
    edges = {e for path in paths for e in zip(path[:-1], path[1:], strict=True)}
    goals = {path[-1] for path, won in zip(paths, success, strict=True) if won}
    best = breadth_first(edges, sorted(goals))
    beyond = max(best.values(), default=0) + 1

    anchors, targets, has_success = jax.jit(success_distances)(batch)
    own = np.take_along_axis(np.asarray(anchors), batch.source, axis=1)
    flat = [anchor for path in paths for anchor in path]
    assert order.unpad(own).tolist() == [best.get(a, beyond) for a in flat]
    ahead = [
        best.get(after, beyond)
        if after is not None
        else 0
        if won
        else best.get(last, beyond)
        for path, won in zip(paths, success, strict=True)
        for last in [path[-1]]
        for after in [*path[1:], None]
    ]
    assert order.unpad(targets).tolist() == ahead
    assert bool(has_success[0, 0]) == any(success)


def test_paths_change_over_between_trajectories():
    # 0 -> 1 by the first, 1 -> 2 by the second, 2 -> success by the third.
    batch, order = walks([[0, 1], [1, 2], [2]], [False, False, True])
    _, targets, _ = jax.jit(success_distances)(batch)
    # Row 1 and row 3 end without a known next anchor: they stay where they are.
    assert order.unpad(targets).tolist() == [2, 2, 1, 1, 0]


def test_declared_next_anchors_are_the_edges():
    batch, order = walks([[0, 1], [2]], [False, True], next_anchor=[2, 2, 9])
    _, targets, _ = jax.jit(success_distances)(batch)
    assert order.unpad(targets).tolist() == [1, 1, 0]


def test_histories_are_equal_exactly_when_their_anchors_are():
    rng = np.random.default_rng(3)
    paths = [rng.integers(0, 3, 12).tolist() for _ in range(10)]
    batch, order = walks(paths, [False] * 10)
    histories = jax.jit(history_ids, static_argnums=1)(batch, 4)
    for k, (ids, exists) in enumerate(histories, start=1):
        ids, exists = order.unpad(ids), order.unpad(exists)
        past = [
            tuple(path[max(t - k + 1, 0) : t + 1]) for path in paths for t in range(12)
        ]
        assert exists.tolist() == [len(p) == k for p in past]
        codes = {}
        for code, key in zip(ids[exists], np.array(past, object)[exists], strict=True):
            assert codes.setdefault(tuple(key), code) == code
        assert len(set(codes.values())) == len(codes)


def test_pairs_get_the_index_of_their_first_row():
    rng = np.random.default_rng(4)
    first, second = rng.integers(0, 20, (2, 2, 300), dtype=np.int32)
    mask = rng.random((2, 300)) < 0.9
    got = np.asarray(jax.jit(intern_pairs)(first, second, mask))
    for group in range(2):
        seen = {}
        for row in np.flatnonzero(mask[group]):
            key = (first[group, row], second[group, row])
            assert got[group, row] == seen.setdefault(key, row)
