"""Log-probabilities, advantages and values -> the loss of each token.

Pure functions of arrays, the response tokens of a row along the last axis. How tokens
and steps are averaged is not decided here but by the weights of
`packing.step_weights`, so that every objective is the same plain sum

    sum over tokens of  weight * mask * loss
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# exp(20) is finite in float32 and far outside of every clip range in use.
_MAX_LOG_RATIO = 20.0
_MAX_KL = 10.0  # Of a token's k3 penalty; verl's clamp.

RATIOS = ("token", "step", "step_mean")
OLD_LOGPROBS = ("recomputed", "sampled")  # What ratios compare with.
IMPORTANCE_LEVELS = ("token", "step")
KL_FORMS = ("k1", "abs", "mse", "k3")


class Surrogate(NamedTuple):
    """The clipped surrogate of each token, and what clipping did."""

    loss: Float[Array, "*rows tokens"]  # 0 where masked.
    ratio: Float[Array, "*rows tokens"]  # New over old probability; 1 where masked.
    is_clipped_low: Bool[Array, "*rows tokens"]  # Below 1 - clip_low, and it matters.
    is_clipped_high: Bool[Array, "*rows tokens"]  # Above 1 + clip_high, and it matters.
    is_dual_clipped: Bool[Array, "*rows tokens"]
    is_clamped: Bool[Array, "*rows tokens"]  # Log-ratio beyond what exp can bear.


def masked_mean(
    values: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> Float[Array, ""]:
    """Mean over True; exactly 0, with zero gradient, where nothing is True."""
    total = jnp.sum(jnp.where(mask, values, 0))
    return total / jnp.maximum(jnp.sum(mask), 1)


def logprobs_and_entropy(
    logits: Float[Array, "*tokens vocab"],
    token_ids: Int[Array, "*tokens"],
    temperature: float,
    vocab_axis: str | None = None,
) -> tuple[Float[Array, "*tokens"], Float[Array, "*tokens"]]:
    """Log-probability of each token, never positive, and entropy there, in nats.

    Both are those of the distribution that is sampled: at `temperature`, which must
    be positive. Computed in float32 whatever the dtype of the logits.

    Args:
        vocab_axis: inside shard_map, the mesh axis that the vocabulary is split over,
            in order; the logits are then this device's part.
    """
    logits = logits.astype(jnp.float32) / temperature
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    first = 0
    if vocab_axis is not None:
        highest = jax.lax.pmax(highest, vocab_axis)
        first = jax.lax.axis_index(vocab_axis) * logits.shape[-1]

    def total(values):
        values = jnp.sum(values, axis=-1)
        return values if vocab_axis is None else jax.lax.psum(values, vocab_axis)

    shifted = logits - highest
    log_softmax = shifted - jnp.log(total(jnp.exp(shifted)))[..., None]
    entropy = -total(jnp.exp(log_softmax) * log_softmax)
    if vocab_axis is None:
        chosen = jnp.take_along_axis(log_softmax, token_ids[..., None], axis=-1)
        return chosen[..., 0], entropy
    slot = token_ids[..., None] - first
    is_here = (slot >= 0) & (slot < logits.shape[-1])
    slot = jnp.clip(slot, 0, logits.shape[-1] - 1)
    chosen = jnp.take_along_axis(log_softmax, slot, axis=-1)
    return total(jnp.where(is_here, chosen, 0)), entropy


def log_ratios(
    logprobs: Float[Array, "*rows tokens"],
    old_logprobs: Float[Array, "*rows tokens"],
    mask: Bool[Array, "*rows tokens"],
    ratio: str,
    step_ids: Int[Array, "*rows tokens"] | None = None,
) -> Float[Array, "*rows tokens"]:
    """Log of the importance ratio that each token is weighted with; 0 where masked.

    Args:
        ratio: "token", of each token alone (PPO as verl has it); "step", of the whole
            reply (the product over its tokens; CRBC's eq. 2); "step_mean", its
            geometric mean over the tokens (GSPO, arXiv 2507.18071, eq. 7).
        step_ids: of the reply that a token belongs to; None: a row is one reply.

    Raises:
        ValueError: if `ratio` is none of these.
    """
    if ratio not in RATIOS:
        raise ValueError(f"loss.ratio={ratio!r}; known: {RATIOS}")
    log_ratio = jnp.where(mask, logprobs - old_logprobs, 0)
    if ratio == "token":
        return log_ratio
    if step_ids is None:
        step_ids = jnp.zeros(mask.shape, jnp.int32)
    is_same = step_ids[..., :, None] == step_ids[..., None, :]

    def step_sum(values):
        return jnp.sum(jnp.where(is_same, values[..., None, :], 0), axis=-1)

    total = step_sum(log_ratio)
    if ratio == "step_mean":
        total /= jnp.maximum(step_sum(mask), 1)
    return jnp.where(mask, total, 0)


def truncated_importance(
    old_logprobs: Float[Array, "*rows tokens"],
    sampled_logprobs: Float[Array, "*rows tokens"],
    mask: Bool[Array, "*rows tokens"],
    level: str,
    cap: float,
    step_ids: Int[Array, "*rows tokens"] | None = None,
) -> tuple[Float[Array, "*rows tokens"], Bool[Array, "*rows tokens"]]:
    """Weights for rollouts whose sampler was not quite the policy: min(p / q, cap).

    p is the learner's probability before the update, q the sampler's: of each token,
    or of the whole reply. Truncation bounds the variance at the price of a bias
    (Ionides, 2008, Truncated importance sampling).

    Args:
        level: "token" or "step".
        cap: above 0.
        step_ids: see `log_ratios`.

    Returns:
        The weights, 1 where masked and without gradient, and where `cap` holds.
    """
    log_ratio = log_ratios(old_logprobs, sampled_logprobs, mask, level, step_ids)
    ratio = jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    weight = jnp.where(mask, jnp.minimum(ratio, cap), 1.0)
    return jax.lax.stop_gradient(weight), mask & (ratio > cap)


def clipped_surrogate(
    log_ratio: Float[Array, "*rows tokens"],
    advantage: Float[Array, "*rows #tokens"],
    mask: Bool[Array, "*rows tokens"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> Surrogate:
    """PPO's clipped surrogate with separate bounds, and dual clipping.

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and for A < 0 at most
    -A dual_clip. The log-ratio is clamped to +-20 before exp, so that one absurd token
    can not turn the loss into NaN. Sources: PPO (arXiv 1707.06347, eq. 7), DAPO (arXiv
    2503.14476, section 3.1: clip_high above clip_low), dual clip (arXiv 1912.09729).

    Args:
        log_ratio: from `log_ratios`.
        advantage: of the step that a token belongs to.
        mask: True at the response tokens that the policy sampled.
        dual_clip: above 1.
    """
    clamped = jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = jnp.exp(clamped)
    free = -advantage * ratio
    clipped = -advantage * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    pessimistic = jnp.maximum(free, clipped)
    bound = -advantage * dual_clip
    is_dual = mask & (advantage < 0) & (pessimistic > bound)
    is_clipped = mask & (clipped > free)
    loss = jnp.where(advantage < 0, jnp.minimum(pessimistic, bound), pessimistic)
    return Surrogate(
        loss=jnp.where(mask, loss, 0),
        ratio=ratio,
        is_clipped_low=is_clipped & (ratio < 1),
        is_clipped_high=is_clipped & (ratio > 1),
        is_dual_clipped=is_dual,
        is_clamped=mask & (jnp.abs(log_ratio) > _MAX_LOG_RATIO),
    )


def kl_penalty(
    logprobs: Float[Array, "*shape"],
    reference_logprobs: Float[Array, "*shape"],
    form: str = "k3",
) -> Float[Array, "*shape"]:
    """KL(policy, reference) of each token, estimated from the sampled token alone.

    Args:
        form: "k1", log p - log q; "abs", its magnitude; "mse", half its square (k2);
            "k3", exp(d) - d - 1 with d = log q - log p, at most 10: unbiased, never
            negative, low variance. Source: Schulman, Approximating KL divergence.

    Raises:
        ValueError: if `form` is none of these.
    """
    difference = logprobs - reference_logprobs
    if form == "k1":
        return difference
    if form == "abs":
        return jnp.abs(difference)
    if form == "mse":
        return 0.5 * jnp.square(difference)
    if form == "k3":
        # The inner clamp keeps the gradient of the outer one from being 0 * inf.
        d = jnp.clip(-difference, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return jnp.minimum(jnp.expm1(d) - d, _MAX_KL)
    raise ValueError(f"form={form!r}; known: {KL_FORMS}")


def value_loss(
    values: Float[Array, "*rows tokens"],
    old_values: Float[Array, "*rows tokens"],
    returns: Float[Array, "*rows tokens"],
    mask: Bool[Array, "*rows tokens"],
    *,
    clip: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Clipped squared error of a critic, without a factor 1/2, and the clipped share.

    Mean over the mask of max((v - R)^2, (v_clipped - R)^2), v_clipped within `clip`
    of the old value. Source: as in verl; ALGORITHMS of PPO implementations since
    baselines' ppo2.
    """
    near_old = jnp.clip(values, old_values - clip, old_values + clip)
    free, clipped = jnp.square(values - returns), jnp.square(near_old - returns)
    loss = masked_mean(jnp.maximum(free, clipped), mask)
    return loss, masked_mean((clipped > free).astype(jnp.float32), mask)
