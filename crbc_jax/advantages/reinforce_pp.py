"""REINFORCE++: scores whitened over the response tokens of the whole batch."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from crbc_jax.advantages.extras import require_column
from crbc_jax.kernels.returns import has_company, normalize, scores, whiten
from crbc_jax.types import Scalar, TransitionBatch

_STATIC = ("stat_weighting",)


@functools.partial(jax.jit, static_argnames=_STATIC)
def reinforce_pp_advantages(
    batch: TransitionBatch,
    *,
    stat_weighting: str = "trajectories",
    invalid_action_penalty: Scalar = 0.1,
) -> Float[Array, "groups rows"]:
    """Whitened scores without a group baseline (arXiv 2501.03262).

    The token return at discount 1 is the row's score on each of its tokens, so that
    one scalar a row, weighted by the column `response_len`, is the same thing. The
    only estimator that compares across groups: the batch is its one group, and a
    batch of equal scores gets exactly 0.

    Args:
        batch: rows of all groups, with extras["response_len"], in tokens.
        stat_weighting: what the score of a row is, as in GRPO.
        invalid_action_penalty: reward units an invalid step.
    """
    score, _ = scores(
        batch,
        stat_weighting=stat_weighting,
        invalid_action_penalty=invalid_action_penalty,
    )
    return whiten(score, _tokens(batch, "reinforce_pp"))


@functools.partial(jax.jit, static_argnames=_STATIC)
def reinforce_pp_baseline_advantages(
    batch: TransitionBatch,
    *,
    stat_weighting: str = "trajectories",
    invalid_action_penalty: Scalar = 0.1,
) -> Float[Array, "groups rows"]:
    """Scores minus their group's mean, whitened over the batch's response tokens.

    A group without differences enters the whitening with exactly 0, and leaves it
    with the common shift, minus the batch's token-weighted mean over its deviation:
    that is the published method, and the one exception here to "such a group gets 0".

    Args:
        batch: rows of all groups, with extras["response_len"], in tokens.
        stat_weighting: as in GRPO; "steps" is verl-agent's default.
        invalid_action_penalty: reward units an invalid step.
    """
    score, members = scores(
        batch,
        stat_weighting=stat_weighting,
        invalid_action_penalty=invalid_action_penalty,
    )
    centred = normalize(score, members, normalization="mean")
    centred = jnp.where(batch.mask & has_company(batch), centred, 0)
    return whiten(centred, _tokens(batch, "reinforce_pp_baseline"))


def _tokens(batch: TransitionBatch, method: str) -> Num[Array, "groups rows"]:
    tokens = require_column(batch, "response_len", method, "tokens of its response")
    return jnp.where(batch.mask, tokens, 0)
