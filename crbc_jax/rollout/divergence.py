"""Actions of a group so far -> how far its rollouts have come apart."""

import itertools
from collections.abc import Hashable, Sequence

_END = object()  # Stands for every action after the end of an episode.


def prefix_divergence(actions: Sequence[Sequence[Hashable]], length: int = 10) -> float:
    """Mean edit distance between the rollouts' first actions, over their length.

    The gate of selective rollout cuts a group whose value at step 10 is below 0.12
    (the published code also cuts when most episodes have ended). Identical quick
    successes give 0 as well, and closure credit learns from those, so spare groups
    with a success before cutting.

    Args:
        actions: per rollout, its actions in order; compared whole.
        length: actions to look at; shorter rollouts are padded with an end mark.

    Returns:
        In [0, 1]; 0 for fewer than two rollouts.

    Raises:
        ValueError: if length is not positive.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 action, got {length}")
    prefixes = [
        [*rollout[:length], *[_END] * (length - len(rollout[:length]))]
        for rollout in actions
    ]
    pairs = list(itertools.combinations(prefixes, 2))
    if not pairs:
        return 0.0
    return sum(_edit_distance(*pair) / length for pair in pairs) / len(pairs)


def _edit_distance(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Levenshtein's distance on whole items."""
    previous = list(range(len(second) + 1))
    for row, left in enumerate(first, start=1):
        current = [row]
        for column, right in enumerate(second, start=1):
            substitute = previous[column - 1] + (left != right)
            current.append(min(substitute, previous[column] + 1, current[-1] + 1))
        previous = current
    return previous[-1]
