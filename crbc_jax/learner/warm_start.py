"""Demonstrations -> a policy that starts from something, by supervised steps.

Cross-entropy on the replies, each reply counting alike. In a second phase a share of
the labels are replies of random actions: that loosens an imitating policy, which would
otherwise be too sure of itself to explore.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from crbc_jax.learner import gradient, sharding, trainable
from crbc_jax.learner.rows import Rows, Segment, fill_rows, fit, split_rows
from crbc_jax.models.config import DecoderConfig
from crbc_jax.types import TrainState, UserError

_PURPOSE = 0x57A7  # Keeps these draws apart from others of the same seed.


class Demonstration(NamedTuple):
    """One step of an expert."""

    prompt_ids: Int[np.ndarray, " tokens"]
    response_ids: Int[np.ndarray, " tokens"]  # With the stop id, as it is sampled.
    # Replies of the actions that label noise draws from (the right one may be there).
    alternatives: Sequence[Int[np.ndarray, " tokens"]]


class Batch(NamedTuple):
    """What one step trains on; at padding everything is 0."""

    rows: Rows  # [microbatches, rows, ...]
    weight: Float[np.ndarray, "microbatches rows responses"]  # Of each token's loss.
    num_microbatches: Int[np.ndarray, ""]  # Those in use.


@dataclasses.dataclass(frozen=True)
class BatchMaker:
    """Draws the batch of any step, a function of seed and step counter alone."""

    demonstrations: Sequence[Demonstration]
    batch_rows: int  # Demonstrations a step.
    microbatch_rows: int  # Rows at once.
    seed: int
    row_tokens: int = 0  # Slots of a row that several share; 0: each has its own.

    def __post_init__(self):
        if not self.demonstrations:
            raise ValueError("no demonstrations: a warm start needs at least one")
        if self.row_tokens and self.row_tokens < self._longest:
            raise ValueError(
                f"row_tokens={self.row_tokens} cannot hold the longest demonstration, "
                f"of {self._longest} tokens"
            )

    @functools.cached_property
    def _longest(self) -> int:
        return max(len(d.prompt_ids) + _longest_reply(d) for d in self.demonstrations)

    @functools.cached_property
    def _shape(self) -> tuple[int, int, int]:
        """Micro-batches, slots for tokens, slots for replies: the same in all steps."""
        if self.row_tokens:
            num_rows = math.ceil(self.batch_rows / (self.row_tokens // self._longest))
            length = self.row_tokens
            # No row holds more of replies than the demonstration that has most of them.
            densest = max(
                _longest_reply(d) / (len(d.prompt_ids) + _longest_reply(d))
                for d in self.demonstrations
            )
            num_responses = math.ceil(densest * length)
        else:
            num_rows = self.batch_rows
            num_responses = max(map(_longest_reply, self.demonstrations))
            length = num_responses + max(len(d.prompt_ids) for d in self.demonstrations)
        return math.ceil(num_rows / self.microbatch_rows), length, num_responses

    def __call__(self, step: int, label_noise: float = 0.0) -> Batch:
        """Demonstrations drawn with replacement.

        Args:
            step: counts from 0.
            label_noise: share of them whose label is that of a random action.
        """
        random = np.random.default_rng([self.seed, _PURPOSE, step])
        chosen = [
            self.demonstrations[index]
            for index in random.integers(len(self.demonstrations), size=self.batch_rows)
        ]
        is_noisy = random.random(self.batch_rows) < label_noise
        draws = random.random(self.batch_rows)
        segments = [
            Segment(
                d.prompt_ids,
                [
                    d.alternatives[int(draw * len(d.alternatives))]
                    if noisy
                    else d.response_ids
                ],
            )
            for d, noisy, draw in zip(chosen, is_noisy, draws, strict=True)
        ]
        if self.row_tokens:
            numbers = fit([s.num_tokens for s in segments], self.row_tokens)
            contents = [[segments[number] for number in row] for row in numbers]
        else:
            contents = [[segment] for segment in segments]
        num_microbatches, length, num_responses = self._shape
        rows = fill_rows(
            contents,
            num_rows=num_microbatches * self.microbatch_rows,
            length=length,
            num_responses=num_responses,
        )
        counts = [len(reply) for row in contents for s in row for reply in s.replies]
        weight = np.zeros(rows.response_mask.shape, np.float32)
        weight[rows.response_mask] = np.repeat(
            1 / (self.batch_rows * np.array(counts)), counts
        )
        return Batch(
            split_rows(rows, num_microbatches),
            weight.reshape(num_microbatches, -1, num_responses),
            np.int32(math.ceil(len(contents) / self.microbatch_rows)),
        )


def make_warm_start_step(
    decoder_config: DecoderConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    compute: gradient.Compute = gradient.DEFAULT_COMPUTE,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """Returns the jitted step (state, batch) -> (state, scalars).

    The state, which has no reference, is donated. Scalars: `loss` (nats a token,
    demonstrations alike) and those of `gradient.apply_gradient`.
    """
    abstract = gradient.abstract_state(
        decoder_config, optimizer, mesh, keep_reference=False
    )
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    in_rows, everywhere = sharding.microbatch_sharding(mesh), sharding.replicated(mesh)

    @functools.partial(
        jax.jit,
        in_shardings=(state_shardings, Batch(in_rows, in_rows, everywhere)),
        out_shardings=(state_shardings, everywhere),
        donate_argnames="state",
    )
    def step(state, batch):
        params, frozen = trainable.split(state.params)

        def objective(params, microbatch):
            rows, weight = microbatch
            params = trainable.merge(params, frozen)
            logprobs, _ = gradient.response_logprobs(
                decoder_config, params, rows, 1.0, mesh, compute
            )
            # Where nothing is, the log-probability means nothing.
            logprobs = jnp.where(rows.response_mask, logprobs, 0.0)
            return -jnp.sum(weight * logprobs), ({}, {})

        grads, loss, _, _ = gradient.accumulate(
            objective, params, (batch.rows, batch.weight), batch.num_microbatches, mesh
        )
        state, scalars = gradient.apply_gradient(optimizer, state, grads, loss, True)
        return state, {"loss": loss} | scalars

    return step


def run_warm_start(
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]],
    make_batch: BatchMaker,
    state: TrainState,
    *,
    steps: int,
    noise_steps: int,
    label_noise: float,
    on_step: Callable[[int, float], None],
) -> TrainState:
    """Takes `steps` steps on the demonstrations, then `noise_steps` on noisy labels.

    Args:
        step: from `make_warm_start_step`.
        state: donated.
        label_noise: see `BatchMaker`; of the second phase alone.
        on_step: called with the number of steps done and the loss, for progress; what
            it raises ends the warm start.

    Raises:
        UserError: if loss or gradient is not finite.
    """
    for index in range(steps + noise_steps):
        noise = label_noise if index >= steps else 0.0
        state, scalars = step(state, make_batch(index, noise))
        loss = float(scalars["loss"])
        if scalars["nonfinite"]:
            raise UserError(
                f"warm start: loss {loss} or its gradient is not finite at step "
                f"{index + 1}; lower config.warm_start.learning_rate"
            )
        on_step(index + 1, loss)
    return state


def _longest_reply(demonstration: Demonstration) -> int:
    return max(map(len, (demonstration.response_ids, *demonstration.alternatives)))
