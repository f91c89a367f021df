"""Trajectories and one advantage a step -> optimiser mini-batches of few shapes.

Host side, NumPy. Steps fill token rows, one a row or several (see rows.py); rows fill
micro-batches, micro-batches fill a buffer of fixed size, and `num_microbatches` says
how many of them hold anything, so that one compilation serves every number of rows.

Whatever the objective averages over is divided out here, once for the whole optimiser
mini-batch: every token carries its weight. Packing, micro-batch size and number of
devices therefore change nothing but rounding.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from crbc_jax.learner.rows import Rows, Segment, fill_rows, fit, split_rows
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


class MiniBatch(NamedTuple):
    """What one optimiser step trains on; at padding everything is 0."""

    rows: Rows
    sampled_logprobs: Float[_Ndarray, "microbatches rows responses"]  # The engine's.
    advantage: Float[_Ndarray, "microbatches rows responses"]  # Of the token's step.
    pg_weight: Float[_Ndarray, "microbatches rows responses"]  # Of its surrogate.
    kl_weight: Float[_Ndarray, "microbatches rows responses"]  # Of its KL and entropy.
    num_microbatches: Int[_Ndarray, ""]  # Those in use.


class Capacity(NamedTuple):
    """The fixed sizes of a run's mini-batches."""

    microbatch_rows: int  # Rows at once, on all devices together.
    max_steps: int  # Environment steps of the largest mini-batch that can come.
    max_prompt_tokens: int
    max_response_tokens: int
    # Slots of a row that steps share; 0: a row is one step, with slots for the longest.
    row_tokens: int = 0
    share_prompts: bool = False  # Equal prompts of a group are laid once a row.

    @property
    def max_step_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def max_rows(self) -> int:
        """Rows that the largest mini-batch can need; see `fit`."""
        at_least = max(self.row_tokens // self.max_step_tokens, 1)
        return math.ceil(self.max_steps / at_least)


class _Step(NamedTuple):
    record: Step
    group: int
    advantage: np.float32
    is_degenerate: bool  # Every advantage of its group is exactly 0.
    pg_weight: np.float32 = np.float32(0)  # Of each response token.
    kl_weight: np.float32 = np.float32(0)

    @property
    def num_tokens(self) -> int:
        return len(self.record.prompt_ids) + len(self.record.response_ids)


# Rows of segments of steps: those of a segment share its prompt.
_Arrangement = list[list[list[_Step]]]


def step_weights(
    aggregation: str,
    num_tokens: Int[np.ndarray, " steps"],
    group: Int[np.ndarray, " steps"],
    max_tokens: int,
) -> Float[np.ndarray, " steps"]:
    """Weight of each token of a step, of the mean over all steps given.

    Args:
        aggregation: "token_mean": tokens count alike. "group_step": groups count
            alike, then the steps of a group, then the tokens of a step (eq. 15 of
            CRBC). Further verl's "seq_mean_token_mean", "seq_mean_token_sum" and
            "seq_mean_token_sum_norm": steps count alike, and the tokens of a step are
            averaged, summed, or summed and divided by `max_tokens` in place of the
            number of steps (Dr.GRPO).
        num_tokens: response tokens of each step; a step of 0 gets a finite weight.
        group: group of each step.
        max_tokens: longest response possible.

    Raises:
        ValueError: if `aggregation` is none of these.
    """
    tokens = np.maximum(num_tokens, 1).astype(np.float64)
    num_steps = max(len(tokens), 1)
    if aggregation == "token_mean":
        weights = np.full(len(tokens), 1 / max(num_tokens.sum(), 1))
    elif aggregation == "group_step":
        _, inverse, counts = np.unique(group, return_inverse=True, return_counts=True)
        weights = 1 / (max(len(counts), 1) * counts[inverse] * tokens)
    elif aggregation == "seq_mean_token_mean":
        weights = 1 / (num_steps * tokens)
    elif aggregation == "seq_mean_token_sum":
        weights = np.full(len(tokens), 1 / num_steps)
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
        aggregation: see `step_weights`; means are over a mini-batch.
        degenerate_groups: what groups whose advantages are all exactly 0 do.
            "keep": they count as any other (and feel KL and entropy). "drop_pg": they
            do not count in the surrogate's mean. "drop_all": nor in any other.
        minibatch_groups: whole groups a mini-batch, so that the number of optimiser
            steps does not depend on how long episodes are; 0 = all of them.
        minibatch_rows: steps a mini-batch in place of that (the published settings);
            the last one may be smaller, and counts as a whole optimiser step.

    Returns:
        The mini-batches, and scalars: `steps`, `rows`, `tokens` (that are computed),
        `response_share` (of them), `shared_share` (of the tokens of all steps, those
        that shared prompts save), `padding_share` (of all slots that are computed),
        and `degenerate_group_share`.

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
    steps = _list_steps(groups, advantages, capacity)
    if minibatch_rows:
        cuts = range(0, max(len(steps), 1), minibatch_rows)
        parts = [steps[start : start + minibatch_rows] for start in cuts]
    else:
        size = minibatch_groups or max(len(groups), 1)
        parts = [[] for _ in range(math.ceil(max(len(groups), 1) / size))]
        for step in steps:
            parts[step.group // size].append(step)
    if degenerate_groups == "drop_all":
        parts = [[step for step in part if not step.is_degenerate] for part in parts]
    for part in parts:
        if len(part) > capacity.max_steps:
            raise ValueError(
                f"a mini-batch has {len(part)} steps, but its buffer is for "
                f"{capacity.max_steps}: max_steps must be groups x group_size x "
                "max_steps of a mini-batch"
            )
    parts = [_weigh(part, aggregation, degenerate_groups, capacity) for part in parts]
    arranged = [_arrange(part, capacity) for part in parts]
    length, num_responses = _row_size(steps, arranged, capacity)
    minibatches = [
        _fill(contents, capacity, length, num_responses) for contents in arranged
    ]
    return minibatches, _describe(steps, parts, arranged, minibatches)


def _list_steps(groups, advantages, capacity) -> list[_Step]:
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
        _Step(step, index, advantage, not is_live[index])
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


def _arrange(steps: Sequence[_Step], capacity: Capacity) -> _Arrangement:
    """Says which steps of a mini-batch share a row, and which of them a prompt."""
    if not capacity.row_tokens:
        return [[[step]] for step in steps]
    segments: list[list[_Step]] = []
    lengths: list[int] = []
    open_segments: dict[tuple[int, bytes], int] = {}
    for step in steps:
        key = step.group, step.record.prompt_ids.tobytes()
        segment = open_segments.get(key)
        added = len(step.record.response_ids)
        # No longer than a step can be, so that `max_rows` always suffices.
        if segment is not None and lengths[segment] + added <= capacity.max_step_tokens:
            segments[segment].append(step)
            lengths[segment] += added
            continue
        if capacity.share_prompts:
            open_segments[key] = len(segments)
        segments.append([step])
        lengths.append(step.num_tokens)
    rows = fit(lengths, capacity.row_tokens)
    return [[segments[number] for number in row] for row in rows]


def _row_size(
    steps: Sequence[_Step], arranged: Sequence[_Arrangement], capacity: Capacity
) -> tuple[int, int]:
    """Slots of a row for all tokens, and for those of replies; from a few values."""
    if not capacity.row_tokens:
        longest = max((len(step.record.prompt_ids) for step in steps), default=1)
        prompt_length = min(_bucket(longest), capacity.max_prompt_tokens)
        num_responses = capacity.max_response_tokens
        return prompt_length + num_responses, num_responses
    most = max(
        (
            sum(len(step.record.response_ids) for segment in row for step in segment)
            for arrangement in arranged
            for row in arrangement
        ),
        default=1,
    )
    return capacity.row_tokens, min(_bucket(most), capacity.row_tokens)


def _weigh(part, aggregation, degenerate_groups, capacity) -> list[_Step]:
    """Divides out what the objective averages over: the steps with their weights."""
    num_tokens = np.array([len(step.record.response_ids) for step in part], np.int64)
    group = np.array([step.group for step in part], np.int64)

    def weights(is_included):
        values = np.zeros(len(part), np.float32)
        values[is_included] = step_weights(
            aggregation,
            num_tokens[is_included],
            group[is_included],
            capacity.max_response_tokens,
        )
        return values

    in_kl = np.ones(len(part), bool)
    in_pg = in_kl
    if degenerate_groups == "drop_pg":
        in_pg = np.array([not step.is_degenerate for step in part], bool)
    return [
        step._replace(pg_weight=pg_weight, kl_weight=kl_weight)
        for step, pg_weight, kl_weight in zip(
            part, weights(in_pg), weights(in_kl), strict=True
        )
    ]


def _fill(
    contents: _Arrangement, capacity: Capacity, length: int, num_responses: int
) -> MiniBatch:
    """Writes the rows of one mini-batch into its buffer."""
    max_microbatches = math.ceil(capacity.max_rows / capacity.microbatch_rows)
    rows = fill_rows(
        [
            [
                Segment(
                    segment[0].record.prompt_ids,
                    [step.record.response_ids for step in segment],
                )
                for segment in row
            ]
            for row in contents
        ],
        num_rows=max_microbatches * capacity.microbatch_rows,
        length=length,
        num_responses=num_responses,
        has_branches=capacity.share_prompts,
    )
    steps = [step for row in contents for segment in row for step in segment]
    counts = [len(step.record.response_ids) for step in steps]

    def lay(values):
        """One value a response token, in order, into the response slots."""
        array = np.zeros(rows.response_mask.shape, np.float32)
        array[rows.response_mask] = values
        return array.reshape(max_microbatches, -1, num_responses)

    def lay_steps(values):
        return lay(np.repeat(np.array(values, np.float32), counts))

    return MiniBatch(
        rows=split_rows(rows, max_microbatches),
        sampled_logprobs=lay(
            np.concatenate([np.zeros(0), *(step.record.logprobs for step in steps)])
        ),
        advantage=lay_steps([step.advantage for step in steps]),
        pg_weight=lay_steps([step.pg_weight for step in steps]),
        kl_weight=lay_steps([step.kl_weight for step in steps]),
        num_microbatches=np.int32(math.ceil(len(contents) / capacity.microbatch_rows)),
    )


def _describe(steps, parts, arranged, minibatches) -> dict[str, float]:
    kept = [step for part in parts for step in part]
    responses = sum(len(step.record.response_ids) for step in kept)
    served = sum(step.num_tokens for step in kept)
    tokens = sum(np.count_nonzero(batch.rows.segment_ids) for batch in minibatches)
    slots = sum(
        int(batch.num_microbatches) * math.prod(batch.rows.tokens.shape[1:])
        for batch in minibatches
    )
    groups = {step.group for step in steps}
    degenerate = {step.group for step in steps if step.is_degenerate}
    return {
        "steps": float(len(kept)),
        "rows": float(sum(map(len, arranged))),
        "tokens": float(tokens),
        "response_share": responses / max(tokens, 1),
        "shared_share": 1 - tokens / max(served, 1),
        "padding_share": 1 - tokens / max(slots, 1),
        "degenerate_group_share": len(degenerate) / max(len(groups), 1),
    }


def _bucket(count: int) -> int:
    """The next of 4, 5, 6, 7, then 8, 10, 12, 14, then 16, 20, ...: few, and near."""
    unit = 2 ** max(math.ceil(math.log2(count + 1)) - 3, 0)
    return max(math.ceil(count / unit) * unit, 4)
