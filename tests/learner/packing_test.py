import dataclasses

import numpy as np
import pytest

from crbc_jax.learner.packing import Capacity, pack, step_weights

CAPACITY = Capacity(
    microbatch_rows=4, max_steps=64, max_prompt_tokens=9, max_response_tokens=4
)


def steps_of(groups):
    return [
        step
        for group in groups
        for trajectory in group
        if trajectory.outcome != "aborted"
        for step in trajectory.steps
    ]


def ones(groups):
    return np.ones(len(steps_of(groups)), np.float32)


def rows_of(minibatch):
    """Arrays of a mini-batch as [rows, ...], padding included."""
    tree = (minibatch.rows._asdict() | minibatch._asdict()).items()
    return {
        name: value.reshape(-1, *value.shape[2:])
        for name, value in tree
        if name not in ("rows", "branch_ids", "num_microbatches")
    }


def test_tokens_are_exactly_those_served(make_groups):
    """B1: rows hold prompt and reply ids; each reply token is predicted in place."""
    groups = make_groups([[1, 3], [5]])
    advantages = np.arange(1, 10, dtype=np.float32)
    (batch,), scalars = pack(
        groups, advantages, capacity=CAPACITY, aggregation="token_mean"
    )
    rows = rows_of(batch)
    for index, step in enumerate(steps_of(groups)):
        tokens = np.concatenate([step.prompt_ids, step.response_ids])
        count = len(step.response_ids)
        is_token = rows["segment_ids"][index] == 1
        np.testing.assert_array_equal(rows["tokens"][index][is_token], tokens)
        np.testing.assert_array_equal(
            rows["positions"][index][is_token], np.arange(len(tokens))
        )
        mask = rows["response_mask"][index]
        assert mask.sum() == count
        where = rows["response_index"][index][mask]
        np.testing.assert_array_equal(rows["tokens"][index][where + 1], tokens[-count:])
        np.testing.assert_array_equal(
            rows["response_ids"][index][mask], tokens[-count:]
        )
        np.testing.assert_array_equal(
            rows["sampled_logprobs"][index][mask], step.logprobs
        )
        assert (rows["advantage"][index][mask] == advantages[index]).all()
    padded = slice(9, None)
    assert not rows["response_mask"][padded].any()
    assert not rows["segment_ids"][padded].any()
    assert not rows["pg_weight"][padded].any() and not rows["kl_weight"][padded].any()
    assert batch.num_microbatches == 3
    prompts, replies = (
        sum(len(getattr(step, name)) for step in steps_of(groups))
        for name in ("prompt_ids", "response_ids")
    )
    assert scalars["response_share"] == replies / (prompts + replies)
    assert scalars["padding_share"] == 1 - (prompts + replies) / (
        12 * batch.rows.tokens.shape[-1]
    )


def test_aborted_trajectories_are_left_out(make_groups):
    """B5."""
    groups = make_groups([[2, 3]])
    aborted = dataclasses.replace(groups[0][0], outcome="aborted")
    (batch,), _ = pack(
        [(aborted, groups[0][1])],
        np.ones(3, np.float32),
        capacity=CAPACITY,
        aggregation="group_step",
    )
    np.testing.assert_array_equal(
        rows_of(batch)["response_ids"][0][: len(groups[0][1].steps[0].response_ids)],
        groups[0][1].steps[0].response_ids,
    )
    assert rows_of(batch)["response_mask"].any(axis=1).sum() == 3


def test_group_step_weights_by_hand():
    """Eq. 15: groups alike, then steps alike, then tokens of a step alike."""
    weights = step_weights(
        "group_step", np.array([1, 2, 4]), np.array([7, 7, 9]), max_tokens=4
    )
    np.testing.assert_allclose(weights, [1 / 4, 1 / 8, 1 / 8])
    with pytest.raises(ValueError, match="loss.aggregation='mean'.*group_step"):
        step_weights("mean", np.array([1]), np.array([0]), max_tokens=1)


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "group_step", "seq_mean_token_mean"]
)
def test_means_have_total_weight_one(aggregation, make_groups):
    groups = make_groups([[4, 1], [7], [2, 2, 2]])
    batches, _ = pack(
        groups,
        ones(groups),
        capacity=CAPACITY,
        aggregation=aggregation,
        minibatch_rows=7,
    )
    assert len(batches) == 3
    for batch in batches:
        rows = rows_of(batch)
        for weight in ("pg_weight", "kl_weight"):
            assert (rows[weight][~rows["response_mask"]] == 0).all()
            total = rows[weight].sum()
            np.testing.assert_allclose(total, 1, rtol=1e-6)


@pytest.mark.parametrize("choice", ["keep", "drop_pg", "drop_all"])
@pytest.mark.parametrize("aggregation", ["token_mean", "group_step"])
def test_degenerate_groups(choice, aggregation, make_groups):
    """A13: a group without credit leaves the denominators that it is dropped from."""
    groups = make_groups([[3, 1], [2, 2]])
    advantages = np.array([1, 0, -1, 2, 0, 0, 0, 0], np.float32)
    options = {"capacity": CAPACITY, "aggregation": aggregation}
    (batch,), scalars = pack(groups, advantages, degenerate_groups=choice, **options)
    (alone,), _ = pack(groups[:1], advantages[:4], **options)
    live = rows_of(alone)
    assert scalars["degenerate_group_share"] == 0.5
    rows = rows_of(batch)
    if choice == "drop_all":
        assert scalars["steps"] == 4
        for name in rows:
            np.testing.assert_array_equal(rows[name][:4], live[name][:4])
        return
    (both,), _ = pack(groups, np.ones(8, np.float32), **options)
    np.testing.assert_array_equal(rows["kl_weight"], rows_of(both)["kl_weight"])
    if choice == "keep":
        np.testing.assert_array_equal(rows["pg_weight"], rows["kl_weight"])
    else:
        np.testing.assert_array_equal(rows["pg_weight"][:4], live["pg_weight"][:4])
        np.testing.assert_array_equal(rows["pg_weight"][4:], 0)


@pytest.mark.parametrize("seed", range(3))
def test_number_of_optimiser_steps_does_not_depend_on_episode_lengths(
    seed, make_groups
):
    """B10: whole groups a mini-batch; 1 to 50 steps a rollout."""
    lengths = np.random.default_rng(seed).integers(1, 51, size=(5, 2))
    groups = make_groups(lengths.tolist())
    capacity = CAPACITY._replace(max_steps=200)
    batches, _ = pack(
        groups,
        ones(groups),
        capacity=capacity,
        aggregation="group_step",
        minibatch_groups=2,
    )
    assert len(batches) == 3
    sizes = [rows_of(batch)["response_mask"].any(1).sum() for batch in batches]
    assert sizes == [lengths[:2].sum(), lengths[2:4].sum(), lengths[4:].sum()]


def test_rows_that_do_not_divide(make_groups):
    """B10: 351 rows in mini-batches of 64, micro-batches of 24."""
    groups = make_groups([[50, 1], [300]])
    batches, _ = pack(
        groups,
        ones(groups),
        capacity=CAPACITY._replace(microbatch_rows=24, max_steps=64),
        aggregation="token_mean",
        minibatch_rows=64,
    )
    sizes = [rows_of(batch)["response_mask"].any(1).sum() for batch in batches]
    assert sizes == [64] * 5 + [31]
    assert {batch.rows.tokens.shape[:2] for batch in batches} == {(3, 24)}
    assert [int(batch.num_microbatches) for batch in batches] == [3] * 5 + [2]


def test_few_shapes(make_groups):
    shapes = set()
    for seed in range(30):
        groups = make_groups([[1 + seed % 5, 3]], seed=seed)
        (batch,), _ = pack(
            groups, ones(groups), capacity=CAPACITY, aggregation="token_mean"
        )
        shapes.add(batch.rows.tokens.shape)
    assert len(shapes) <= 3


def test_nothing_to_train_on():
    batches, scalars = pack(
        [], np.zeros(0, np.float32), capacity=CAPACITY, aggregation="group_step"
    )
    assert [int(batch.num_microbatches) for batch in batches] == [0]
    assert scalars["steps"] == 0


def test_shape_errors_name_the_axes(make_groups):
    """B12, A4: one advantage a step, not one a rollout."""
    groups = make_groups([[3, 3], [3, 3]])
    with pytest.raises(ValueError, match=r"\(4,\).*one a step.*\(12,\)"):
        pack(groups, np.ones(4), capacity=CAPACITY, aggregation="token_mean")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logprobs": np.zeros(0, np.float32)}, "step 1.*must have been sampled"),
        ({"logprobs": np.array([np.nan])}, "step 1.*must have been sampled"),
        ({"prompt_ids": np.zeros(10, np.int32)}, "max_prompt_tokens=9"),
        ({"prompt_ids": np.zeros(0, np.int32)}, "prompt has 0 tokens"),
        (
            {"response_ids": np.zeros(5, np.int32), "logprobs": np.zeros(5)},
            "max_response_tokens=4",
        ),
    ],
)
def test_bad_steps_are_refused(change, message, make_groups):
    """B4: a token without a sampled log-probability is never trained."""
    ((first,),) = make_groups([[2]])
    bad = dataclasses.replace(
        first.steps[1],
        **({"response_ids": np.zeros(1, np.int32), "logprobs": np.zeros(1)} | change),
    )
    trajectory = dataclasses.replace(first, steps=(first.steps[0], bad))
    with pytest.raises(ValueError, match=message):
        pack([(trajectory,)], np.ones(2), capacity=CAPACITY, aggregation="token_mean")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"degenerate_groups": "drop"}, "loss.degenerate_groups='drop'.*drop_pg"),
        ({"minibatch_groups": 1, "minibatch_rows": 2}, "minibatch_rows=2: give one"),
        ({"capacity": CAPACITY._replace(max_steps=2)}, "4 steps.*for 2"),
    ],
)
def test_bad_options_are_refused(options, message, make_groups):
    groups = make_groups([[2, 2]])
    with pytest.raises(ValueError, match=message):
        pack(
            groups,
            ones(groups),
            **({"capacity": CAPACITY, "aggregation": "token_mean"} | options),
        )


@pytest.mark.parametrize("advantage", [np.nan, np.inf])
def test_advantages_must_be_finite(advantage, make_groups):
    with pytest.raises(ValueError, match="group 0, rollout 1, step 0.*finite"):
        pack(
            make_groups([[1, 1]]),
            np.array([0, advantage]),
            capacity=CAPACITY,
            aggregation="token_mean",
        )


SHARED = CAPACITY._replace(row_tokens=52, microbatch_rows=2)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("aggregation", ["token_mean", "group_step"])
def test_steps_in_shared_rows_are_those_in_rows_of_their_own(
    share, aggregation, make_groups
):
    """Every token with the same prompt, position, log-probability and weights."""
    groups = make_groups([[7, 9, 3], [5, 2]])
    twin = dataclasses.replace(groups[0][2], steps=groups[0][0].steps[:3])
    groups[0] = (*groups[0][:2], twin)  # Their prompts are equal.
    advantages = np.random.default_rng(0).normal(size=26).astype(np.float32)

    def steps_with(capacity):
        (batch,), scalars = pack(
            groups, advantages, capacity=capacity, aggregation=aggregation
        )
        rows, found = rows_of(batch), []
        branch_ids = batch.rows.branch_ids
        for row in range(len(rows["tokens"])):
            mask = rows["response_mask"][row]
            for number in np.unique(rows["step_ids"][row][mask]):
                slots = np.flatnonzero(mask & (rows["step_ids"][row] == number))
                ends = rows["response_index"][row][
                    slots[1:]
                ]  # All tokens but the last.
                prompt_end = rows["response_index"][row][slots[0]]
                segment = (
                    rows["segment_ids"][row] == rows["segment_ids"][row][prompt_end]
                )
                is_prompt = segment & (np.arange(len(segment)) <= prompt_end)
                if branch_ids is not None:
                    branches = branch_ids.reshape(rows["tokens"].shape)[row]
                    is_prompt = segment & (branches == 0)
                context = np.concatenate([np.flatnonzero(is_prompt), ends])
                np.testing.assert_array_equal(
                    rows["positions"][row][context], np.arange(len(context))
                )
                found.append(
                    tuple(rows["tokens"][row][context])
                    + tuple(
                        tuple(rows[name][row][slots])
                        for name in (
                            "response_ids",
                            "sampled_logprobs",
                            "advantage",
                            "pg_weight",
                            "kl_weight",
                        )
                    )
                )
        return sorted(found, key=str), scalars

    alone, _ = steps_with(CAPACITY)
    shared, scalars = steps_with(SHARED._replace(share_prompts=share))
    assert len(alone) == 26 and shared == alone
    assert scalars["padding_share"] < 0.2
    assert (scalars["shared_share"] > 0.05) == share


def test_shared_rows_need_fewer_slots_in_few_shapes(make_groups):
    shapes, padding = set(), []
    for seed in range(20):
        groups = make_groups([[40, 60], [22, 50]], seed=seed)
        (batch,), scalars = pack(
            groups,
            ones(groups),
            capacity=SHARED._replace(max_steps=200),
            aggregation="token_mean",
        )
        shapes.add(batch.rows.tokens.shape + batch.rows.response_ids.shape)
        padding.append(scalars["padding_share"])
    assert len(shapes) <= 3
    assert max(padding) < 0.1
