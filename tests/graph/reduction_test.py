"""Chains and core of small graphs, drawn by hand."""

import numpy as np

from crbc_jax.graph import reduction
from crbc_jax.graph.reduction import find_trapped, reduce_chains


def rows_of(*edges):
    """One group with a row for each edge; an edge to itself only may be a None."""
    source, target = (np.array([side], np.int64) for side in zip(*edges, strict=True))
    size = max(source.max(), target.max()) + 1
    width = max(size, source.shape[1])
    pad = ((0, 0), (0, width - source.shape[1]))
    mask = np.pad(np.ones_like(source, bool), pad)
    return np.pad(source, pad), np.pad(target, pad), mask


def chains_of(monkeypatch, *edges, plain=0):
    monkeypatch.setattr(reduction, "_PLAIN", plain)
    source, target, mask = rows_of(*edges)
    chains = reduce_chains(source, target, mask, mask)
    core = np.flatnonzero(chains.core_index[0] < chains.num_core)
    return chains.chain_target[0], core.tolist(), chains


def test_a_line_needs_no_core(monkeypatch):
    target, core, _ = chains_of(monkeypatch, (0, 1), (1, 2), (1, 1), (2, 3))
    assert target.tolist() == [1, 2, 3, 3] and core == []


def test_a_fork_is_the_core(monkeypatch):
    target, core, _ = chains_of(monkeypatch, (0, 1), (1, 2), (1, 3), (2, 4), (3, 4))
    assert target.tolist() == [1, 1, 4, 4, 4] and core == [1]


def test_a_cycle_of_chains_is_broken_once(monkeypatch):
    edges = [(0, 1), (1, 2), (2, 1), (3, 4), (4, 5), (5, 6), (6, 4), (7, 5)]
    target, core, _ = chains_of(monkeypatch, *edges)
    assert core == [1, 4]
    assert target.tolist() == [1, 1, 1, 4, 4, 6, 4, 5]


def test_where_nothing_is_saved_all_anchors_are_in_the_core(monkeypatch):
    edges = [(0, 1), (1, 2), (2, 3)]
    target, core, chains = chains_of(monkeypatch, *edges, plain=64)
    assert not chains.has_chains and chains.num_core == 32
    assert core == [0, 1, 2] and target.tolist() == [0, 1, 2, 3]


def test_many_anchors_with_a_small_core_are_reduced(monkeypatch):
    edges = [(i, i + 1) for i in range(40)] + [(0, 40)]
    _, core, chains = chains_of(monkeypatch, *edges, plain=64)
    assert chains.has_chains and core == [0] and chains.num_core == 32


def test_only_a_closed_class_is_trapped():
    # 0 and 1 lead to each other; 2 leads there, and to an end; 3 leads to 2.
    source, target, mask = rows_of((0, 1), (1, 0), (2, 0), (2, 2), (3, 2), (4, 0))
    is_last = np.zeros_like(mask)
    is_last[0, 3] = True
    trapped = find_trapped(source, target, mask, is_last)[0]
    assert trapped.tolist() == [True, True, False, False, True, False]
