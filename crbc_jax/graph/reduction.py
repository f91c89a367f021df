"""Which anchors of a group can be eliminated from its linear system, exactly.

Most anchors have one successor only, besides themselves and the boundaries. Their
equation is affine in one other value, V(s) = a + c V(target), and so is any chain of
them. Only the others, the core, need a linear solve. Structure is found here, on the
host, since the size of the core decides the shape of what is compiled; the numbers are
computed in kernels/closure.py.
"""

from typing import NamedTuple

import numpy as np

_MIN_CORE = 32


class Chains(NamedTuple):
    """Structure of a batch of groups."""

    chain_target: np.ndarray  # int32 [groups, anchors]: the one successor of a chain's
    # anchor; of every other anchor itself.
    core_index: (
        np.ndarray
    )  # int32 [groups, anchors]: position in the core, or num_core.
    num_core: int  # Largest core of a group, as a bucket.


def reduce_chains(
    source: np.ndarray, target: np.ndarray, is_inner: np.ndarray
) -> Chains:
    """Finds chains and core.

    Args:
        source, target: int [groups, rows], anchors in [0, rows).
        is_inner: bool [groups, rows], rows that lead from an anchor to an anchor.
    """
    num_groups, num_anchors = source.shape
    base = np.arange(num_groups)[:, None] * num_anchors
    nodes = np.arange(num_groups * num_anchors)
    leaves = is_inner & (source != target)
    tails, heads = (base + source)[leaves], (base + target)[leaves]
    # An anchor with more than one successor sees a smallest and a largest one.
    low, high = np.full(len(nodes), len(nodes)), np.full(len(nodes), -1)
    np.minimum.at(low, tails, heads)
    np.maximum.at(high, tails, heads)
    is_chain = low == high
    is_core = (high >= 0) & ~is_chain

    pointer = np.where(is_chain, high, nodes)
    is_core |= _cycle_breakers(pointer, is_chain, rounds=num_anchors.bit_length())
    pointer = np.where(is_core, nodes, pointer)

    cores = is_core.reshape(num_groups, num_anchors)
    largest = int(cores.sum(axis=1).max())
    num_core = max(_MIN_CORE, 1 << max(largest - 1, 0).bit_length()) if largest else 0
    core_index = np.where(cores, np.cumsum(cores, axis=1) - 1, num_core)
    return Chains(
        (pointer.reshape(num_groups, num_anchors) - base).astype(np.int32),
        core_index.astype(np.int32),
        num_core,
    )


def _cycle_breakers(pointer, is_chain, rounds) -> np.ndarray:
    """One anchor, the smallest, of each cycle that consists of chain anchors alone."""
    reached, smallest = pointer, np.minimum(np.arange(len(pointer)), pointer)
    for _ in range(
        rounds
    ):  # After k rounds: 2^k steps on, and the smallest on the way.
        smallest = np.minimum(smallest, smallest[reached])
        reached = reached[reached]
    # Whoever still stands on a chain anchor after so many steps stands on a cycle.
    on_cycle = np.zeros(len(pointer), bool)
    on_cycle[reached[is_chain[reached]]] = True
    breakers = np.zeros(len(pointer), bool)
    breakers[smallest[on_cycle]] = True
    return breakers
