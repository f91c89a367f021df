"""Trajectories and one advantage a step -> optimiser mini-batches of few shapes.

Host side, NumPy. A row is one environment step: its prompt, then its reply, exactly as
served, from slot 0; the rest of the row is padding. Rows fill micro-batches in order,
micro-batches fill a buffer of fixed size, and `num_microbatches` says how many of them
hold anything, so that one compilation serves every number of rows.

Whatever the objective averages over is divided out here, once for the whole optimiser
mini-batch: a row carries the weight of each of its tokens. Micro-batch size and number
of devices therefore change nothing but rounding.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from crbc_jax.types import Group, Step

AGGREGATIONS = (
    "token_mean",
    "group_step",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
)
DEGENERATE_GROUPS = ("keep", "drop_pg", "drop_all")

_Ndarray = Array | np.ndarray


class Rows(NamedTuple):
    """Token rows; leading axes `batch` are [rows] or [microbatches, rows]."""

    tokens: Int[_Ndarray, "*batch length"]
    positions: Int[_Ndarray, "*batch length"]  # Within the sequence, from 0.
    segment_ids: Int[_Ndarray, "*batch length"]  # 1 = sequence, 0 = padding.
    # Slot of the token before each response token: its state predicts that token.
    response_index: Int[_Ndarray, "*batch responses"]
    response_ids: Int[_Ndarray, "*batch responses"]
    response_mask: Bool[_Ndarray, "*batch responses"]  # True = sampled by the policy.


class MiniBatch(NamedTuple):
    """What one optimiser step trains on; weights of padded rows are 0."""

    rows: Rows
    sampled_logprobs: Float[_Ndarray, "microbatches rows responses"]  # The engine's.
    advantage: Float[_Ndarray, "microbatches rows"]
    pg_weight: Float[_Ndarray, "microbatches rows"]  # Of each token's surrogate.
    kl_weight: Float[_Ndarray, "microbatches rows"]  # Of its KL and entropy.
    num_microbatches: Int[_Ndarray, ""]  # Those in use.


class Capacity(NamedTuple):
    """The fixed sizes of a run's mini-batches."""

    microbatch_rows: int  # Rows at once, on all devices together.
    max_rows: int  # Rows of the largest mini-batch that can come.
    max_prompt_tokens: int
    max_response_tokens: int


class _Row(NamedTuple):
    step: Step
    group: int
    advantage: np.float32
    is_degenerate: bool  # Every advantage of its group is exactly 0.


def row_weights(
    aggregation: str,
    num_tokens: Int[np.ndarray, " rows"],
    group: Int[np.ndarray, " rows"],
    max_tokens: int,
) -> Float[np.ndarray, " rows"]:
    """Weight of each token of a row, of the mean over all rows given.

    Args:
        aggregation: "token_mean": tokens count alike. "group_step": groups count
            alike, then the steps of a group, then the tokens of a step (eq. 15 of
            CRBC). Further verl's "seq_mean_token_mean", "seq_mean_token_sum" and
            "seq_mean_token_sum_norm": steps count alike, and the tokens of a step are
            averaged, summed, or summed and divided by `max_tokens` in place of the
            number of steps (Dr.GRPO).
        num_tokens: response tokens of each row; a row of 0 gets a finite weight.
        group: group of each row.
        max_tokens: longest response possible.

    Raises:
        ValueError: if `aggregation` is none of these.
    """
    tokens = np.maximum(num_tokens, 1).astype(np.float64)
    num_rows = max(len(tokens), 1)
    if aggregation == "token_mean":
        weights = np.full(len(tokens), 1 / max(num_tokens.sum(), 1))
    elif aggregation == "group_step":
        _, inverse, counts = np.unique(group, return_inverse=True, return_counts=True)
        weights = 1 / (max(len(counts), 1) * counts[inverse] * tokens)
    elif aggregation == "seq_mean_token_mean":
        weights = 1 / (num_rows * tokens)
    elif aggregation == "seq_mean_token_sum":
        weights = np.full(len(tokens), 1 / num_rows)
    elif aggregation == "seq_mean_token_sum_norm":
        weights = np.full(len(tokens), 1 / max_tokens)
    else:
        raise ValueError(f"loss.aggregation={aggregation!r}; known: {AGGREGATIONS}")
    return weights.astype(np.float32)


def pack(
    groups: Sequence[Group],
    advantages: Float[np.ndarray, " steps"],
    *,
    capacity: Capacity,
    aggregation: str,
    degenerate_groups: str = "keep",
    minibatch_groups: int = 0,
    minibatch_rows: int = 0,
) -> tuple[list[MiniBatch], dict[str, float]]:
    """Cuts the steps of an update into optimiser mini-batches.

    Args:
        groups: all groups of the update; aborted trajectories are left out.
        advantages: one float32 a step, ordered by group, rollout, step.
        capacity: sizes; equal capacities give mini-batches of few shapes.
        aggregation: see `row_weights`; means are over a mini-batch.
        degenerate_groups: what groups whose advantages are all exactly 0 do.
            "keep": they count as any other (and feel KL and entropy). "drop_pg": they
            do not count in the surrogate's mean. "drop_all": nor in any other.
        minibatch_groups: whole groups a mini-batch, so that the number of optimiser
            steps does not depend on how long episodes are; 0 = all of them.
        minibatch_rows: steps a mini-batch in place of that (the published settings);
            the last one may be smaller, and counts as a whole optimiser step.

    Returns:
        The mini-batches, and scalars: `rows`, `tokens`, `response_share` (of all
        tokens), `padding_share` (of all slots that are computed), and
        `degenerate_group_share`.

    Raises:
        ValueError: naming the step (group, rollout, step) and the field, if a trained
            token has no sampled log-probability, a prompt or reply does not fit, an
            advantage is missing or not finite, or a mini-batch exceeds the capacity.
    """
    if degenerate_groups not in DEGENERATE_GROUPS:
        raise ValueError(
            f"loss.degenerate_groups={degenerate_groups!r}; known: {DEGENERATE_GROUPS}"
        )
    if minibatch_groups and minibatch_rows:
        raise ValueError(
            f"learner.minibatch_groups={minibatch_groups} and learner.minibatch_rows="
            f"{minibatch_rows}: give one of them; the other must be 0"
        )
    rows = _list_rows(groups, advantages, capacity)
    if minibatch_rows:
        cuts = range(0, max(len(rows), 1), minibatch_rows)
        parts = [rows[start : start + minibatch_rows] for start in cuts]
    else:
        size = minibatch_groups or max(len(groups), 1)
        parts = [[] for _ in range(math.ceil(max(len(groups), 1) / size))]
        for row in rows:
            parts[row.group // size].append(row)
    if degenerate_groups == "drop_all":
        parts = [[row for row in part if not row.is_degenerate] for part in parts]
    longest = max((len(row.step.prompt_ids) for row in rows), default=1)
    prompt_length = min(_bucket(longest), capacity.max_prompt_tokens)
    minibatches = [
        _fill(part, capacity, prompt_length, aggregation, degenerate_groups)
        for part in parts
    ]
    return minibatches, _describe(rows, parts, minibatches)


def fill_rows(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    num_rows: int,
    prompt_length: int,
    response_length: int,
) -> Rows:
    """Lays prompts and replies into `num_rows` rows; surplus rows are all padding.

    Rows have prompt_length + response_length slots; the caller sees to it that
    everything fits, and that no prompt is empty.
    """
    length = prompt_length + response_length
    before, after = (
        np.array([len(ids) for ids in part] + [0] * (num_rows - len(part)), np.int32)
        for part in (prompts, responses)
    )
    slots = np.arange(length, dtype=np.int32)
    is_token = slots < (before + after)[:, None]
    response_slots = np.arange(response_length, dtype=np.int32)
    is_response = response_slots < after[:, None]
    tokens = np.zeros((num_rows, length), np.int32)
    response_ids = np.zeros((num_rows, response_length), np.int32)
    if len(prompts):
        both = [ids for pair in zip(prompts, responses, strict=True) for ids in pair]
        tokens[is_token] = np.concatenate(both)
        response_ids[is_response] = np.concatenate(responses)
    return Rows(
        tokens=tokens,
        positions=np.where(is_token, slots, 0),
        segment_ids=is_token.astype(np.int32),
        response_index=np.where(is_response, before[:, None] - 1 + response_slots, 0),
        response_ids=response_ids,
        response_mask=is_response,
    )


def split_rows(rows: Rows, num_microbatches: int) -> Rows:
    """[microbatches * rows, ...] -> [microbatches, rows, ...], in order."""
    return Rows(*(leaf.reshape(num_microbatches, -1, *leaf.shape[1:]) for leaf in rows))


def _list_rows(groups, advantages, capacity) -> list[_Row]:
    """All steps in order, checked, each with its advantage."""
    steps = [
        (f"group {index}, rollout {trajectory.rollout}, step {number}", index, step)
        for index, group in enumerate(groups)
        for trajectory in group
        if trajectory.outcome != "aborted"
        for number, step in enumerate(trajectory.steps)
    ]
    advantages = np.asarray(advantages, np.float32)
    if advantages.shape != (len(steps),):
        raise ValueError(
            f"advantages has shape {advantages.shape}; needed is one a step (not one a "
            f"rollout or token), in order of group, rollout, step: ({len(steps)},)"
        )
    is_live = np.zeros(len(groups), bool)
    for (where, index, step), advantage in zip(steps, advantages, strict=True):
        _check_step(where, step, advantage, capacity)
        is_live[index] |= advantage != 0
    return [
        _Row(step, index, advantage, not is_live[index])
        for (_, index, step), advantage in zip(steps, advantages, strict=True)
    ]


def _check_step(where: str, step: Step, advantage: np.float32, capacity: Capacity):
    if not np.isfinite(advantage):
        raise ValueError(f"{where}: its advantage is {advantage}, not a finite number")
    count = len(step.response_ids)
    if len(step.logprobs) != count or not np.isfinite(step.logprobs).all():
        raise ValueError(
            f"{where}: {count} response tokens but log-probabilities {step.logprobs!r};"
            " every trained token must have been sampled, with a finite one: leave "
            "tokens that the harness appended out of response_ids"
        )
    for name, found, limit in (
        ("prompt", len(step.prompt_ids), capacity.max_prompt_tokens),
        ("response", count, capacity.max_response_tokens),
    ):
        if not 1 <= found <= limit:
            raise ValueError(
                f"{where}: its {name} has {found} tokens; needed are 1 to "
                f"config.rollout.max_{name}_tokens={limit}"
            )


def _fill(
    part: Sequence[_Row],
    capacity: Capacity,
    prompt_length: int,
    aggregation: str,
    degenerate_groups: str,
) -> MiniBatch:
    """Writes the rows of one mini-batch into its buffer."""
    if len(part) > capacity.max_rows:
        raise ValueError(
            f"a mini-batch has {len(part)} rows, but its buffer {capacity.max_rows}: "
            "max_rows must be groups x group_size x max_steps of a mini-batch"
        )
    max_microbatches = math.ceil(capacity.max_rows / capacity.microbatch_rows)
    num_rows = max_microbatches * capacity.microbatch_rows
    num_tokens = np.array([len(row.step.response_ids) for row in part], np.int64)
    group = np.array([row.group for row in part], np.int64)
    in_kl = np.ones(len(part), bool)
    in_pg = in_kl.copy()
    if degenerate_groups == "drop_pg":
        in_pg = np.array([not row.is_degenerate for row in part], bool)

    def weights(included):
        values = np.zeros(num_rows, np.float32)
        values[np.flatnonzero(included)] = row_weights(
            aggregation,
            num_tokens[included],
            group[included],
            capacity.max_response_tokens,
        )
        return values.reshape(max_microbatches, -1)

    rows = fill_rows(
        [row.step.prompt_ids for row in part],
        [row.step.response_ids for row in part],
        num_rows=num_rows,
        prompt_length=prompt_length,
        response_length=capacity.max_response_tokens,
    )
    sampled = np.zeros(rows.response_ids.shape, np.float32)
    advantage = np.zeros(num_rows, np.float32)
    if part:
        sampled[rows.response_mask] = np.concatenate([r.step.logprobs for r in part])
        advantage[: len(part)] = [row.advantage for row in part]
    return MiniBatch(
        rows=split_rows(rows, max_microbatches),
        sampled_logprobs=sampled.reshape(max_microbatches, -1, sampled.shape[-1]),
        advantage=advantage.reshape(max_microbatches, -1),
        pg_weight=weights(in_pg),
        kl_weight=weights(in_kl),
        num_microbatches=np.int32(math.ceil(len(part) / capacity.microbatch_rows)),
    )


def _describe(rows, parts, minibatches) -> dict[str, float]:
    kept = [row.step for part in parts for row in part]
    responses = sum(len(step.response_ids) for step in kept)
    tokens = responses + sum(len(step.prompt_ids) for step in kept)
    slots = sum(
        int(batch.num_microbatches) * math.prod(batch.rows.tokens.shape[1:])
        for batch in minibatches
    )
    groups = {row.group for row in rows}
    degenerate = {row.group for row in rows if row.is_degenerate}
    return {
        "rows": float(len(kept)),
        "tokens": float(tokens),
        "response_share": responses / max(tokens, 1),
        "padding_share": 1 - tokens / max(slots, 1),
        "degenerate_group_share": len(degenerate) / max(len(groups), 1),
    }


def _bucket(count: int) -> int:
    """The next of 4, 5, 6, 7, then 8, 10, 12, 14, then 16, 20, ...: few, and near."""
    unit = 2 ** max(math.ceil(math.log2(count + 1)) - 3, 0)
    return max(math.ceil(count / unit) * unit, 4)
