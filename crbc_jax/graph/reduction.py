"""Which anchors of a group can be eliminated from its linear system, exactly.

Most anchors have one successor only, besides themselves and the boundaries. Their
equation is affine in one other value, V(s) = a + c V(target), and so is any chain of
them. Only the others, the core, need a linear solve. Structure is found here, on the
host, since the size of the core decides the shape of what is compiled; the numbers are
computed in kernels/closure.py.
"""

from typing import NamedTuple

import numpy as np

_MIN_CORE = 32  # A smaller system saves nothing and would be one more to compile.
# Up to that size, solving for all anchors is as fast where that makes no larger system.
_PLAIN = 64


class Chains(NamedTuple):
    """Structure of a batch of groups."""

    # int32 [groups, anchors]: the one successor of a chain's anchor; else itself.
    chain_target: np.ndarray
    # int32 [groups, anchors]: position in the core; num_core outside it.
    core_index: np.ndarray
    num_core: int  # Largest core of a group, as a bucket.
    has_chains: bool  # False: all anchors are in the core.


def reduce_chains(
    source: np.ndarray, target: np.ndarray, mask: np.ndarray, is_inner: np.ndarray
) -> Chains:
    """Finds chains and core.

    Args:
        source, target: int [groups, rows], anchors in [0, rows).
        mask: bool [groups, rows].
        is_inner: bool [groups, rows], rows that lead from an anchor to an anchor.
    """
    num_groups, num_anchors = source.shape
    base = np.arange(num_groups)[:, None] * num_anchors
    nodes = np.arange(num_groups * num_anchors)
    is_seen = np.zeros(len(nodes), bool)
    is_seen[(base + source)[mask]] = True
    leaves = is_inner & (source != target)
    is_core, pointer = _find_chains(
        (base + source)[leaves], (base + target)[leaves], nodes, num_anchors
    )
    num_core, num_seen = (_bucket(x, num_groups) for x in (is_core, is_seen))
    has_chains = num_core < num_seen or num_core > _PLAIN
    if not has_chains:
        is_core, pointer = is_seen, nodes
    cores = is_core.reshape(num_groups, num_anchors)
    core_index = np.where(cores, np.cumsum(cores, axis=1) - 1, num_core)
    return Chains(
        (pointer.reshape(num_groups, num_anchors) - base).astype(np.int32),
        core_index.astype(np.int32),
        num_core,
        has_chains,
    )


def find_trapped(
    source: np.ndarray, target: np.ndarray, mask: np.ndarray, is_last: np.ndarray
) -> np.ndarray:
    """Marks the anchors from which no observed path leads to an end.

    At beta = 1 their equations have no unique solution. Whole rollouts have none: each
    visit lies on the path to its rollout's last step. It takes rows whose
    `next_anchor` is not where their rollout went on.

    Args:
        source, target: int [groups, rows], anchors in [0, rows).
        mask, is_last: bool [groups, rows].

    Returns:
        bool [groups, anchors]; False for anchors without rows, which are ends.
    """
    base = np.arange(len(source))[:, None] * source.shape[1]
    inner, last = mask & ~is_last, mask & is_last
    tails, heads = (base + source)[inner], (base + target)[inner]
    trapped = np.zeros(source.size, bool)
    trapped[tails] = True
    trapped[(base + source)[last]] = False
    while (escapes := tails[trapped[tails] & ~trapped[heads]]).size:
        trapped[escapes] = False
    return trapped.reshape(source.shape)


def _bucket(marked: np.ndarray, num_groups: int) -> int:
    """Size of a system for the marked anchors of any group."""
    largest = int(marked.reshape(num_groups, -1).sum(axis=1).max())
    return max(_MIN_CORE, 1 << (largest - 1).bit_length())


def _find_chains(tails, heads, nodes, num_anchors) -> tuple[np.ndarray, np.ndarray]:
    """Core anchors, and of each chain anchor its successor, of all others itself."""
    # An anchor with more than one successor sees a smallest and a largest one.
    low, high = np.full(len(nodes), len(nodes)), np.full(len(nodes), -1)
    np.minimum.at(low, tails, heads)
    np.maximum.at(high, tails, heads)
    is_chain = low == high
    is_core = (high >= 0) & ~is_chain
    pointer = np.where(is_chain, high, nodes)
    is_core |= _cycle_breakers(pointer, is_chain, rounds=num_anchors.bit_length())
    return is_core, np.where(is_core, nodes, pointer)


def _cycle_breakers(pointer, is_chain, rounds) -> np.ndarray:
    """One anchor, the smallest, of each cycle that consists of chain anchors alone."""
    reached, smallest = pointer, np.minimum(np.arange(len(pointer)), pointer)
    # After k rounds: the anchor 2^k steps on, and the smallest on the way.
    for _ in range(rounds):
        smallest = np.minimum(smallest, smallest[reached])
        reached = reached[reached]
    # Whoever still stands on a chain anchor after so many steps stands on a cycle.
    on_cycle = np.zeros(len(pointer), bool)
    on_cycle[reached[is_chain[reached]]] = True
    breakers = np.zeros(len(pointer), bool)
    breakers[smallest[on_cycle]] = True
    return breakers
