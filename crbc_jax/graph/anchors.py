"""Observations and actions -> small integers within their group.

The only place that decides what is "the same state": equal keys of one group.
"""

import collections
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np


def intern(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Numbers equal values alike, from 0.

    Args:
        values: hashables; arrays (such as RGB frames) are equal if shape, dtype and
            bytes are. Each value is hashed once.

    Returns:
        int64 [values].

    Raises:
        TypeError: if a value is neither an array nor hashable.
    """
    if (
        isinstance(values, np.ndarray)
        and values.ndim == 1
        and values.dtype.kind in "iu"
    ):
        return np.unique(values, return_inverse=True)[1].astype(np.int64)
    if any(isinstance(value, np.ndarray) for value in values):
        values = [_key(value) for value in values]
    # Neither loop runs in Python: a value that is not there gets the next number.
    codes = collections.defaultdict(itertools.count().__next__)
    return np.fromiter(map(codes.__getitem__, values), np.int64, len(values))


def number_within(group: np.ndarray, code: np.ndarray) -> tuple[np.ndarray, int]:
    """Numbers the distinct codes of each group from 0, in order of their code.

    Args:
        group: int [rows], from 0.
        code: int [rows], from 0.

    Returns:
        int64 [rows], and the largest number of distinct codes of a group.
    """
    if not len(code):
        return np.zeros(0, np.int64), 0
    width = int(code.max()) + 1
    distinct, inverse = np.unique(group * width + code, return_inverse=True)
    group_of = distinct // width
    first = np.searchsorted(group_of, np.arange(int(group.max()) + 1))
    number = inverse - first[group]
    return number, int(number.max()) + 1


def _key(value: Any) -> Hashable:
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    return value
