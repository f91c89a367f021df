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
from crbc_jax.types import Group, TrainState, UserError

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
    # The optimiser step that `update` takes, jitted (see `updates.make_update`): for
    # compiling ahead of time.
    step: Callable[..., tuple[TrainState, dict[str, Any]]]


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
        kl_form=config.loss.kl_form,
        entropy_coef=config.loss.entropy_coef,
        temperature=config.rollout.temperature,
        importance_cap=config.loss.importance_cap,
        importance_level=config.loss.importance_level,
    )
    compute = gradient.Compute(settings.compute_dtype, settings.remat)
    optimizer = gradient.make_optimizer(
        settings.learning_rate,
        settings.weight_decay,
        settings.max_grad_norm,
        settings.moment_dtype,
    )
    plain, abstract = (
        gradient.abstract_state(decoder_config, optimizer, mesh, keep_reference=keep)
        for keep in (False, options.kl_coef > 0)
    )
    init_plain = init_state = gradient.make_init(optimizer, plain)
    if options.kl_coef:
        init_state = gradient.make_init(optimizer, abstract)
    step = updates.make_update(decoder_config, options, optimizer, mesh, compute)
    score = updates.make_score(decoder_config, options.temperature, mesh, compute)

    def update(state, minibatches):
        return updates.run_update(
            step,
            score,
            state,
            [sharding.put_microbatches(batch, mesh) for batch in minibatches],
            old_logprobs=settings.old_logprobs,
            num_epochs=settings.num_epochs,
        )

    return Learner(
        warm_start=_bind_warm_start(config, decoder_config, mesh, compute, init_plain),
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
        update=update,
        step=step,
    )


def _bind_warm_start(config, decoder_config, mesh, compute, init_plain):
    """The stage as one function; shares the compiled `init_plain` with the update."""
    settings = config.warm_start
    microbatch_rows = min(settings.batch_rows, config.learner.microbatch_rows)
    optimizer = gradient.make_optimizer(
        settings.learning_rate,
        config.learner.weight_decay,
        config.learner.max_grad_norm,
        config.learner.moment_dtype,
    )
    if settings.steps + settings.noise_steps:
        sharding.check_rows(microbatch_rows, mesh, "config.warm_start.batch_rows")

    def warm_start(params, demonstrations, on_step):
        make_batch = BatchMaker(
            demonstrations,
            batch_rows=settings.batch_rows,
            microbatch_rows=microbatch_rows,
            seed=config.seed,
            row_tokens=config.learner.row_tokens,
        )
        state = run_warm_start(
            make_warm_start_step(decoder_config, optimizer, mesh, compute),
            lambda *args: sharding.put_microbatches(make_batch(*args), mesh),
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
    settings, rollout = config.learner, config.rollout
    sharding.check_rows(
        settings.microbatch_rows, mesh, "config.learner.microbatch_rows"
    )
    num_groups = rollout.tasks_per_update
    if settings.minibatch_groups:
        num_groups = min(num_groups, settings.minibatch_groups)
    max_steps = num_groups * rollout.group_size * config.env.max_steps
    if settings.minibatch_rows:
        max_steps = min(max_steps, settings.minibatch_rows)
    capacity = Capacity(
        microbatch_rows=settings.microbatch_rows,
        max_steps=max_steps,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
        row_tokens=settings.row_tokens,
        share_prompts=settings.share_prompts,
    )
    if settings.share_prompts and not settings.row_tokens:
        raise UserError(
            "config.learner.share_prompts needs rows of several steps: set "
            f"config.learner.row_tokens, to {4 * capacity.max_step_tokens} say"
        )
    if 0 < settings.row_tokens < capacity.max_step_tokens:
        raise UserError(
            f"config.learner.row_tokens={settings.row_tokens} must be 0 (one step a "
            "row) or hold the longest step, config.rollout.max_prompt_tokens + "
            f"max_response_tokens={capacity.max_step_tokens}; padding is small at four "
            "times that"
        )
    # No wider than all rows there are, which still split over the devices.
    parts = sharding.num_row_parts(mesh)
    all_rows = math.ceil(capacity.max_rows / parts) * parts
    return capacity._replace(microbatch_rows=min(settings.microbatch_rows, all_rows))
