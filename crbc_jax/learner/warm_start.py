"""Demonstrations -> a policy that starts from something, by supervised steps.

Cross-entropy on the replies, each row counting alike. In a second phase a share of
the labels are replies of random actions: that loosens an imitating policy, which would
otherwise be too sure of itself to explore.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from crbc_jax.learner import gradient, losses, sharding, trainable
from crbc_jax.learner.rows import Rows, Segment, fill_rows, split_rows
from crbc_jax.models.config import DecoderConfig
from crbc_jax.types import TrainState, UserError

_PURPOSE = 0x57A7  # Keeps these draws apart from others of the same seed.


class Demonstration(NamedTuple):
    """One step of an expert."""

    prompt_ids: Int[np.ndarray, " tokens"]
    response_ids: Int[np.ndarray, " tokens"]  # With the stop id, as it is sampled.
    # Replies of the actions that label noise draws from (the right one may be there).
    alternatives: Sequence[Int[np.ndarray, " tokens"]]


@dataclasses.dataclass(frozen=True)
class BatchMaker:
    """Draws the batch of any step, a function of seed and step counter alone."""

    demonstrations: Sequence[Demonstration]
    batch_rows: int
    microbatch_rows: int  # Divides batch_rows.
    seed: int

    def __post_init__(self):
        if not self.demonstrations:
            raise ValueError("no demonstrations: a warm start needs at least one")
        if self.batch_rows % self.microbatch_rows:
            raise ValueError(
                f"warm_start.batch_rows={self.batch_rows} must be a multiple of the "
                f"{self.microbatch_rows} rows of a micro-batch"
            )

    @functools.cached_property
    def _lengths(self) -> tuple[int, int]:
        """Slots for prompts and replies, the same in every batch."""
        prompts = max(len(d.prompt_ids) for d in self.demonstrations)
        replies = max(
            len(ids)
            for d in self.demonstrations
            for ids in (d.response_ids, *d.alternatives)
        )
        return prompts, replies

    def __call__(self, step: int, label_noise: float = 0.0) -> Rows:
        """Rows [microbatches, rows, ...], drawn with replacement.

        Args:
            step: counts from 0.
            label_noise: share of rows whose label is that of a random action.
        """
        random = np.random.default_rng([self.seed, _PURPOSE, step])
        chosen = [
            self.demonstrations[index]
            for index in random.integers(len(self.demonstrations), size=self.batch_rows)
        ]
        is_noisy = random.random(self.batch_rows) < label_noise
        draws = random.random(self.batch_rows)
        replies = [
            d.alternatives[int(draw * len(d.alternatives))] if noisy else d.response_ids
            for d, noisy, draw in zip(chosen, is_noisy, draws, strict=True)
        ]
        prompt_length, response_length = self._lengths
        rows = fill_rows(
            [
                [Segment(d.prompt_ids, [reply])]
                for d, reply in zip(chosen, replies, strict=True)
            ],
            num_rows=self.batch_rows,
            length=prompt_length + response_length,
            num_responses=response_length,
        )
        return split_rows(rows, self.batch_rows // self.microbatch_rows)


def make_warm_start_step(
    decoder_config: DecoderConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    compute: gradient.Compute = gradient.DEFAULT_COMPUTE,
) -> Callable[[TrainState, Rows], tuple[TrainState, dict[str, Array]]]:
    """Returns the jitted step (state, rows) -> (state, scalars).

    Rows are [microbatches, rows, ...]; the state, which has no reference, is donated.
    Scalars: `loss` (nats a token, rows alike) and those of `gradient.apply_gradient`.
    """
    abstract = gradient.abstract_state(
        decoder_config, optimizer, mesh, keep_reference=False
    )
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    @functools.partial(
        jax.jit,
        in_shardings=(state_shardings, sharding.microbatch_sharding(mesh)),
        out_shardings=(state_shardings, sharding.replicated(mesh)),
        donate_argnames="state",
    )
    def step(state, rows):
        num_microbatches, rows_each = rows.tokens.shape[:2]

        params, frozen = trainable.split(state.params)

        def objective(params, microbatch):
            params = trainable.merge(params, frozen)
            logprobs, _ = gradient.response_logprobs(
                decoder_config, params, microbatch, 1.0, mesh, compute
            )
            row_means = jax.vmap(losses.masked_mean)(logprobs, microbatch.response_mask)
            loss = -jnp.sum(row_means) / (num_microbatches * rows_each)
            return loss, ({}, {})

        grads, loss, _, _ = gradient.accumulate(
            objective, params, rows, jnp.int32(num_microbatches), mesh
        )
        state, scalars = gradient.apply_gradient(optimizer, state, grads, loss, True)
        return state, {"loss": loss} | scalars

    return step


def run_warm_start(
    step: Callable[[TrainState, Rows], tuple[TrainState, dict[str, Array]]],
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
