"""The reinforcement-learning update: state and mini-batches in, state and scalars out.

loss = sum over response tokens of  pg_weight * clipped surrogate
                                    + kl_weight * (kl_coef * KL form
                                                   - entropy_coef * entropy)
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from crbc_jax.learner import gradient, losses, sharding, trainable
from crbc_jax.learner.packing import MiniBatch
from crbc_jax.learner.rows import Rows
from crbc_jax.models.config import DecoderConfig
from crbc_jax.types import TrainState

Scalars = dict[str, float]


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """The objective of an update."""

    clip_low: float
    clip_high: float
    dual_clip: float
    ratio: str  # See `losses.log_ratios`.
    kl_coef: float  # 0 needs no reference, and computes none.
    kl_form: str  # See `losses.kl_penalty`.
    entropy_coef: float
    temperature: float  # Of sampling; probabilities are compared at it.
    importance_cap: float = 0.0  # See `losses.truncated_importance`; 0: weights of 1.
    importance_level: str = "token"


def make_update(
    decoder_config: DecoderConfig,
    options: LossOptions,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    compute: gradient.Compute = gradient.DEFAULT_COMPUTE,
) -> Callable[
    [TrainState, MiniBatch, Array | np.ndarray | None],
    tuple[TrainState, dict[str, Array]],
]:
    """Returns the jitted optimiser step.

    It takes state, mini-batch and the log-probabilities [microbatches, rows,
    responses] that ratios compare with; None stands for the current ones, whose ratio
    is exactly 1. The state is donated. It returns the state and scalars.
    """
    abstract = gradient.abstract_state(
        decoder_config, optimizer, mesh, keep_reference=options.kl_coef > 0
    )
    score = functools.partial(
        gradient.response_logprobs,
        decoder_config,
        temperature=options.temperature,
        mesh=mesh,
        compute=compute,
    )
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    by_rows = sharding.microbatch_sharding(mesh)
    whole = sharding.replicated(mesh)
    batch_shardings = MiniBatch(
        *(
            by_rows if name != "num_microbatches" else whole
            for name in MiniBatch._fields
        )
    )

    @functools.partial(
        jax.jit,
        in_shardings=(state_shardings, batch_shardings, by_rows),
        out_shardings=(state_shardings, whole),
        donate_argnames="state",
    )
    def update(state, batch, old_logprobs):
        params, frozen = trainable.split(state.params)
        reference = None
        if options.kl_coef:
            reference = trainable.merge(state.reference, frozen)

        def objective(params, microbatch):
            params = trainable.merge(params, frozen)
            return _objective(options, score, params, reference, *microbatch)

        grads, loss, (means, totals), maxima = gradient.accumulate(
            objective,
            params,
            (batch._replace(num_microbatches=None), old_logprobs),
            batch.num_microbatches,
            mesh,
        )
        is_wanted = jnp.any(batch.pg_weight > 0)
        if options.kl_coef or options.entropy_coef:
            is_wanted |= jnp.any(batch.kl_weight > 0)
        state, scalars = gradient.apply_gradient(
            optimizer, state, grads, loss, is_wanted
        )
        num_tokens = jnp.maximum(totals["response_tokens"], 1)
        means = {name: total / num_tokens for name, total in means.items()}
        return state, {"loss": loss} | means | totals | maxima | scalars

    return update


def make_score(
    decoder_config: DecoderConfig,
    temperature: float,
    mesh: Mesh,
    compute: gradient.Compute = gradient.DEFAULT_COMPUTE,
) -> Callable[[Any, MiniBatch], Float[Array, "microbatches rows responses"]]:
    """Returns the jitted function (params, mini-batch) -> log-probabilities."""
    by_rows = sharding.microbatch_sharding(mesh)

    @functools.partial(jax.jit, out_shardings=by_rows)
    def score(params, batch):
        def write(index, scores):
            rows = jax.tree.map(
                lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False),
                batch.rows,
            )
            logprobs, _ = gradient.response_logprobs(
                decoder_config, params, rows, temperature, mesh, compute
            )
            return jax.lax.dynamic_update_index_in_dim(scores, logprobs, index, 0)

        zeros = jnp.zeros(batch.sampled_logprobs.shape, jnp.float32)
        return jax.lax.fori_loop(0, batch.num_microbatches, write, zeros)

    return score


def run_update(
    step: Callable[..., tuple[TrainState, dict[str, Array]]],
    score: Callable[[Any, MiniBatch], Array],
    state: TrainState,
    minibatches: Sequence[MiniBatch],
    *,
    old_logprobs: str,
    num_epochs: int = 1,
) -> tuple[TrainState, Scalars]:
    """Takes one optimiser step a mini-batch, all against the same old policy.

    Args:
        step, score: from `make_update` and `make_score`.
        state: donated.
        minibatches: of one update, in order.
        old_logprobs: "sampled", the engine's; or "recomputed", by the parameters that
            come in: with a single optimiser step these are the current ones.
        num_epochs: times that the mini-batches are gone through.

    Returns:
        The state, and scalars: means over the optimiser steps, but maxima and totals
        where the name says so, and the differences to the sampled log-probabilities
        of the first step alone, before the parameters move. After a step whose loss
        or gradient was not finite (`nonfinite` is 1) no further one is taken.
    """
    if old_logprobs == "sampled":
        olds = [batch.sampled_logprobs for batch in minibatches]
    elif len(minibatches) * num_epochs == 1:
        olds = [None]
    else:
        olds = [score(state.params, batch) for batch in minibatches]
    history = []
    for batch, old in list(zip(minibatches, olds, strict=True)) * num_epochs:
        state, scalars = step(state, batch, old)
        history.append({k: float(v) for k, v in jax.device_get(scalars).items()})
        if history[-1]["nonfinite"]:
            break
    combined = {
        name: _COMBINE.get(name, np.mean)([scalars[name] for scalars in history])
        for name in history[0]
    }
    return state, {name: float(value) for name, value in combined.items()}


def _first(values: Sequence[float]) -> float:
    return values[0]


# How scalars of the optimiser steps of an update become one; others are averaged.
_COMBINE = {
    "ratio_max": max,
    "nonfinite": max,
    "skipped": sum,
    "response_tokens": sum,
    "empty_microbatches": sum,
    "logprob_difference": _first,
    "logprob_difference_max": _first,
    "within_1_percent": _first,
    "within_5_percent": _first,
}


def _objective(
    options: LossOptions,
    score: Callable[[Any, Rows], tuple[Array, Array]],
    params: Any,
    reference: Any | None,
    batch: MiniBatch,
    old_logprobs: Array | None,
):
    """One micro-batch's share of the loss, (token sums, totals), and maxima."""
    mask = batch.rows.response_mask
    logprobs, entropy = score(params, batch.rows)
    current = jax.lax.stop_gradient(logprobs)
    old = current if old_logprobs is None else old_logprobs
    log_ratio = losses.log_ratios(
        logprobs, old, mask, options.ratio, batch.rows.step_ids
    )
    surrogate = losses.clipped_surrogate(
        log_ratio,
        batch.advantage,
        mask,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )

    corrected, means = surrogate.loss, {}
    if options.importance_cap:
        importance, is_truncated = losses.truncated_importance(
            old,
            batch.sampled_logprobs,
            mask,
            options.importance_level,
            options.importance_cap,
            batch.rows.step_ids,
        )
        corrected *= importance

    def weighted(weight, values):
        return jnp.sum(weight * jnp.where(mask, values, 0))

    def token_sum(values):
        return jnp.sum(jnp.where(mask, values, 0))

    loss = pg_loss = weighted(batch.pg_weight, corrected)
    if options.importance_cap:
        means["importance_weight"] = token_sum(importance)
        means["importance_clip_fraction"] = token_sum(is_truncated)
    if options.kl_coef:
        anchor, _ = score(reference, batch.rows)
        anchor = jax.lax.stop_gradient(anchor)
        penalty = losses.kl_penalty(logprobs, anchor, options.kl_form)
        loss += options.kl_coef * weighted(batch.kl_weight, penalty)
        means["reference_kl"] = token_sum(penalty)
    if options.entropy_coef:
        loss -= options.entropy_coef * weighted(batch.kl_weight, entropy)

    is_clipped = surrogate.is_clipped_low | surrogate.is_clipped_high
    difference = jnp.where(mask, jnp.abs(current - batch.sampled_logprobs), 0)
    num_tokens = jnp.sum(mask, dtype=jnp.float32)
    means |= {
        "entropy": token_sum(entropy),
        "policy_kl": token_sum(old - current),
        "clip_fraction": token_sum(is_clipped),
        "clip_fraction_low": token_sum(surrogate.is_clipped_low),
        "clip_fraction_high": token_sum(surrogate.is_clipped_high),
        "clip_fraction_dual": token_sum(surrogate.is_dual_clipped),
        "clamped_fraction": token_sum(surrogate.is_clamped),
        "logprob_difference": jnp.sum(difference),
        "within_1_percent": token_sum(difference <= math.log(1.01)),
        "within_5_percent": token_sum(difference <= math.log(1.05)),
    }
    totals = {
        "pg_loss": pg_loss,
        "response_tokens": num_tokens,
        "empty_microbatches": (num_tokens == 0).astype(jnp.float32),
    }
    maxima = {
        "ratio_max": jnp.max(jnp.where(mask, surrogate.ratio, 0)),
        "logprob_difference_max": jnp.max(difference),
    }
    return loss, jax.lax.stop_gradient(((means, totals), maxima))
