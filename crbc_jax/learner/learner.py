"""Config and mesh -> the functions that a training loop needs of this folder."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float
from ml_collections import ConfigDict

from crbc_jax.learner import gradient, losses, sharding
from crbc_jax.learner import update as updates
from crbc_jax.learner.packing import Capacity, MiniBatch, pack
from crbc_jax.learner.warm_start import (
    BatchMaker,
    Demonstration,
    make_warm_start_step,
    run_warm_start,
)
from crbc_jax.models.config import DecoderConfig
from crbc_jax.types import Group, TrainState

Scalars = dict[str, float]


class Learner(NamedTuple):
    """What a training loop needs; each function compiles when it is first called."""

    # Parameters -> parameters trained on demonstrations; calls back with steps done
    # and loss after each step.
    warm_start: Callable[
        [Any, Sequence[Demonstration], Callable[[int, float], None]], Any
    ]
    # Parameters -> a fresh state with copies of them, and the reference if needed.
    init_state: Callable[[Any], TrainState]
    abstract_state: TrainState  # Shapes, dtypes and shardings, to restore into.
    # All groups of an update and one float32 advantage a step -> mini-batches.
    pack: Callable[
        [Sequence[Group], Float[np.ndarray, " steps"]], tuple[list[MiniBatch], Scalars]
    ]
    # One optimiser step a mini-batch; the state that goes in is gone afterwards.
    update: Callable[[TrainState, Sequence[MiniBatch]], tuple[TrainState, Scalars]]


def make_learner(
    config: ConfigDict, decoder_config: DecoderConfig, mesh: Mesh
) -> Learner:
    """Binds the whole config's loss, learner, warm_start and rollout sections.

    Raises:
        UserError: if micro-batches do not split over the mesh.
        ValueError: naming a field with a value that is not known.
    """
    settings = config.learner
    if settings.old_logprobs not in losses.OLD_LOGPROBS:
        raise ValueError(
            f"learner.old_logprobs={settings.old_logprobs!r}; "
            f"known: {losses.OLD_LOGPROBS}"
        )
    capacity = _capacity(config, mesh)
    options = updates.LossOptions(
        clip_low=config.loss.clip_low,
        clip_high=config.loss.clip_high,
        dual_clip=config.loss.dual_clip,
        ratio=config.loss.ratio,
        kl_coef=config.loss.kl_coef,
        entropy_coef=config.loss.entropy_coef,
        temperature=config.rollout.temperature,
    )
    optimizer = gradient.make_optimizer(
        settings.learning_rate, settings.weight_decay, settings.max_grad_norm
    )
    plain = gradient.abstract_state(
        decoder_config, optimizer, mesh, keep_reference=False
    )
    init_plain = init_state = gradient.make_init(optimizer, plain)
    abstract = plain
    if options.kl_coef:
        abstract = plain._replace(reference=plain.params)
        init_state = gradient.make_init(optimizer, abstract)
    return Learner(
        warm_start=_bind_warm_start(config, decoder_config, mesh, init_plain),
        init_state=init_state,
        abstract_state=abstract,
        pack=functools.partial(
            pack,
            capacity=capacity,
            aggregation=config.loss.aggregation,
            degenerate_groups=config.loss.degenerate_groups,
            minibatch_groups=settings.minibatch_groups,
            minibatch_rows=settings.minibatch_rows,
        ),
        update=functools.partial(
            updates.run_update,
            updates.make_update(decoder_config, options, optimizer, mesh),
            updates.make_score(decoder_config, options.temperature, mesh),
            old_logprobs=settings.old_logprobs,
        ),
    )


def _bind_warm_start(config, decoder_config, mesh, init_plain):
    """The stage as one function; shares the compiled `init_plain` with the update."""
    settings = config.warm_start
    microbatch_rows = min(settings.batch_rows, config.learner.microbatch_rows)
    optimizer = gradient.make_optimizer(
        settings.learning_rate,
        config.learner.weight_decay,
        config.learner.max_grad_norm,
    )
    if settings.steps + settings.noise_steps:
        sharding.check_rows(microbatch_rows, mesh, "config.warm_start.batch_rows")

    def warm_start(params, demonstrations, on_step):
        make_batch = BatchMaker(
            demonstrations,
            batch_rows=settings.batch_rows,
            microbatch_rows=microbatch_rows,
            seed=config.seed,
        )
        state = run_warm_start(
            make_warm_start_step(decoder_config, optimizer, mesh),
            make_batch,
            init_plain(params),
            steps=settings.steps,
            noise_steps=settings.noise_steps,
            label_noise=settings.label_noise,
            on_step=on_step,
        )
        return state.params

    return warm_start


def _capacity(config: ConfigDict, mesh: Mesh) -> Capacity:
    """The largest mini-batch that the config can bring, and rows at once."""
    field = "config.learner.microbatch_rows"
    sharding.check_rows(config.learner.microbatch_rows, mesh, field)
    num_groups = config.rollout.tasks_per_update
    if config.learner.minibatch_groups:
        num_groups = min(num_groups, config.learner.minibatch_groups)
    max_rows = num_groups * config.rollout.group_size * config.env.max_steps
    if config.learner.minibatch_rows:
        max_rows = min(max_rows, config.learner.minibatch_rows)
    parts = sharding.num_row_parts(mesh)
    return Capacity(
        # No wider than all rows there are, which still split over the devices.
        microbatch_rows=min(
            config.learner.microbatch_rows, math.ceil(max_rows / parts) * parts
        ),
        max_rows=max_rows,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
    )
