import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crbc_jax.learner.rows import Segment, fill_rows, fit, split_rows


def ids(*values):
    return np.array(values, np.int32)


def test_rows_by_hand():
    """Two segments in a row; the first one's prompt has two replies."""
    shared = Segment(ids(10, 11), [ids(20), ids(30, 31)])
    single = Segment(ids(12), [ids(40, 41)])
    rows = fill_rows(
        [[shared, single]], num_rows=2, length=10, num_responses=6, has_branches=True
    )
    expected = {
        "tokens": [10, 11, 20, 30, 31, 12, 40, 41, 0, 0],
        "positions": [0, 1, 2, 2, 3, 0, 1, 2, 0, 0],
        "segment_ids": [1, 1, 1, 1, 1, 2, 2, 2, 0, 0],
        "branch_ids": [0, 0, 1, 2, 2, 0, 1, 1, 0, 0],
        "response_ids": [20, 30, 31, 40, 41, 0],
        # The prompt's last token predicts the first one of both its replies.
        "response_index": [1, 1, 3, 5, 6, 0],
        "response_mask": [1, 1, 1, 1, 1, 0],
        "step_ids": [0, 1, 1, 2, 2, 0],
    }
    for name, values in rows._asdict().items():
        np.testing.assert_array_equal(values[0], expected[name], err_msg=name)
        assert not values[1].any()


def test_without_shared_prompts_there_are_no_branches():
    rows = fill_rows(
        [[Segment(ids(1), [ids(2)])]], num_rows=4, length=3, num_responses=1
    )
    assert rows.branch_ids is None
    assert split_rows(rows, 2).tokens.shape == (2, 2, 3)
    assert split_rows(rows, 2).branch_ids is None


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=60),
    limit=st.integers(20, 100),
)
def test_fit_loses_nothing_and_fills_rows(lengths, limit):
    rows = fit(lengths, limit)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    used = [sum(lengths[item] for item in row) for row in rows]
    assert all(total <= limit for total in used)
    # What Capacity.max_rows relies on.
    assert all(len(row) >= limit // 20 for row in rows[:-1])
    # No row could have gone into an earlier one.
    for row, total in zip(rows[1:], used[:-1], strict=True):
        assert total + max(lengths[item] for item in row) > limit


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_four_longest_steps_waste_little(seed):
    """Lengths of real episodes: prompts grow with the history, then are cut."""
    random = np.random.default_rng(seed)
    lengths = np.minimum(
        random.integers(300, 400, 1600) + 60 * random.integers(0, 30, 1600), 2560
    )
    rows = fit(lengths, 4 * 2560)
    assert 1 - lengths.sum() / (len(rows) * 4 * 2560) < 0.02
