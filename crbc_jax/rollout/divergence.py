"""Actions of a group so far -> how far its rollouts have come apart, and the gate."""

import itertools
from collections.abc import Hashable, Sequence

_END = object()  # Stands for every action after the end of an episode.


def prefix_divergence(actions: Sequence[Sequence[Hashable]], length: int = 10) -> float:
    """Mean edit distance between the rollouts' first actions, over their length.

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


class Gate:
    """Whether a group is worth playing on, decided once its rollouts have come so far.

    Selective rollout cuts a group whose rollouts have hardly come apart at step 10
    (divergence below 0.12; its code also cuts where most episodes have ended). Here a
    group with a success is spared: identical quick successes diverge by 0 as well, and
    closure credit learns from those. So is one whose rollout was aborted before.
    """

    def __init__(self, num_rollouts: int, step: int, min_divergence: float):
        """Takes the size of the group, and after how many steps it is looked at."""
        self.step = step
        self.is_cut = False
        self._num_rollouts = num_rollouts
        self._min_divergence = min_divergence
        self._entered: list[Sequence[Hashable]] = []
        self._has_success = False

    def enter(self, actions: Sequence[Hashable], success: bool) -> None:
        """Takes the actions of a rollout that has come to the step, or to its end."""
        self._entered.append(actions)
        self._has_success |= success
        if len(self._entered) == self._num_rollouts and not self._has_success:
            divergence = prefix_divergence(self._entered, self.step)
            self.is_cut = divergence < self._min_divergence


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
