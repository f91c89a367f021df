"""Rewards of a batch's rows -> returns, scores and group-relative advantages.

Everything works on [groups, rows] arrays as `TransitionBatch` lays them out: rows of
a trajectory are contiguous and in time order, padding comes last. Two rules of the
package are built in here, so that every estimator has them:

* Statistics count valid members only. Values are measured from the smallest member
  before anything is averaged, so a set whose members are all equal (max == min), or
  that has one member, is exactly 0 afterwards: no rounding is left to divide by a
  tiny deviation.
* Equal futures give equal floats: a return depends on the rewards that follow, not
  on where in the batch they stand, and a total not on their order. Otherwise sets
  that are constant on paper would not be constant in float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from crbc_jax.types import Scalar, TransitionBatch

EPSILON = 1e-6  # Added to every standard deviation, as in the published code.
_WHITEN_EPSILON = 1e-8  # Added to the variance when whitening.


def rows_ahead(
    values: Shaped[Array, "groups rows"], offset: Int[Array, ""] | int
) -> Shaped[Array, "groups rows"]:
    """Returns values[:, t + offset] at row t; past the end, whatever is last."""
    num_rows = values.shape[1]
    return values[:, jnp.minimum(jnp.arange(num_rows) + offset, num_rows - 1)]


def num_doublings(values: Shaped[Array, "groups rows"]) -> int:
    """Rounds after which steps of 1, 2, 4, ... rows have crossed the whole array."""
    return (values.shape[1] - 1).bit_length()


def at_rows(
    values: Shaped[Array, "groups any"], index: Int[Array, "groups rows"]
) -> Shaped[Array, "groups rows"]:
    """Gathers values[g, index[g, t]]; indices out of range are the caller's fault."""
    return jnp.take_along_axis(values, index, axis=1, mode="clip")


def first_rows(batch: TransitionBatch) -> Bool[Array, "groups rows"]:
    """Marks the first row of each trajectory: one True a trajectory."""
    return batch.mask & (batch.step == 0)


def discounted_sums(
    values: Float[Array, "groups rows"],
    batch: TransitionBatch,
    discount: Scalar,
) -> Float[Array, "groups rows"]:
    """Sums discount^l * values[t + l] over the rest of row t's trajectory.

    By doubling: after k rounds a row holds the sum over the 2^k rows from itself on.
    The order of additions depends on the distance from t alone, so that two visits
    with equal rewards ahead of them get bit-equal returns, which a parallel scan over
    the whole batch would not give.
    """
    left = steps_to_end(batch)

    def double(k, carry):
        sums, power = carry
        ahead = jnp.where(left >= (1 << k), rows_ahead(sums, 1 << k), 0)
        return sums + power * ahead, power * power

    sums = jnp.where(batch.mask, values, 0)
    power = jnp.asarray(discount, sums.dtype)
    return jax.lax.fori_loop(0, num_doublings(values), double, (sums, power))[0]


def trajectory_totals(
    values: Float[Array, "groups rows"], batch: TransitionBatch
) -> Float[Array, "groups rows"]:
    """Sums the values of each trajectory; every row of it holds the total.

    Adds with Knuth's error-free two-sum (TAOCP 2, 4.2.2, theorem B), so that the same
    rewards in another order give the same total.
    """
    left = steps_to_end(batch)

    def double(k, carry):
        total, error = carry
        inside = left >= (1 << k)
        term = jnp.where(inside, rows_ahead(total, 1 << k), 0)
        term_error = jnp.where(inside, rows_ahead(error, 1 << k), 0)
        added = total + term
        virtual = added - total
        lost = (total - (added - virtual)) + (term - virtual)
        return added, error + term_error + lost

    total = jnp.where(batch.mask, values, 0)
    start = (total, jnp.zeros_like(total))
    total, error = jax.lax.fori_loop(0, num_doublings(values), double, start)
    first_row = jnp.arange(values.shape[1]) - jnp.where(batch.mask, batch.step, 0)
    return at_rows(total + error, first_row)


def trajectory_counts(
    claims: Bool[Array, "groups rows"], batch: TransitionBatch
) -> Float[Array, "groups rows"]:
    """Counts the rows of each trajectory for which a claim holds, at each of them."""
    ones = (batch.mask & claims).astype(batch.reward.dtype)
    return at_rows(
        set_sums(ones, batch.trajectory, batch.num_trajectories), batch.trajectory
    )


def steps_until(marked: Bool[Array, "groups rows"]) -> Int[Array, "groups rows"]:
    """Counts rows from each to the next marked one, itself included (0).

    Where none follows, the rows that are left, which no trajectory exceeds.
    """
    num_rows = marked.shape[1]
    row = jnp.broadcast_to(jnp.arange(num_rows), marked.shape)
    where = jnp.where(marked, row, num_rows)
    return jax.lax.cummin(where, axis=1, reverse=True) - row


def steps_to_end(batch: TransitionBatch) -> Int[Array, "groups rows"]:
    """Counts the rows of the trajectory that follow a row; 0 on its last row."""
    return jnp.where(batch.mask, steps_until(batch.mask & batch.is_last), 0)


def scores(
    batch: TransitionBatch,
    *,
    stat_weighting: str,
    invalid_action_penalty: Scalar,
) -> tuple[Float[Array, "groups rows"], Bool[Array, "groups rows"]]:
    """Returns each row's score and the rows that count once in group statistics.

    "trajectories": the return (undiscounted sum of the environment's rewards) minus
    the penalty for each invalid step, the same on all rows; each trajectory counts
    once. "steps": the return minus the penalty if that very row is invalid; each row
    counts, as in verl-agent (long trajectories weigh more).
    """
    returns = trajectory_totals(batch.reward, batch)
    if stat_weighting == "trajectories":
        num_invalid = trajectory_counts(~batch.is_action_valid, batch)
        return returns - invalid_action_penalty * num_invalid, first_rows(batch)
    if stat_weighting == "steps":
        return penalize_invalid(returns, batch, invalid_action_penalty), batch.mask
    raise ValueError(
        f"stat_weighting={stat_weighting!r}; known: ['steps', 'trajectories']"
    )


def normalize(
    values: Float[Array, "groups rows"],
    members: Bool[Array, "groups rows"],
    *,
    normalization: str,
    ids: Int[Array, "groups rows"] | None = None,
    num_ids: int | None = None,
    ddof: int = 1,
) -> Float[Array, "groups rows"]:
    """Centres values on the mean of their set, and scales by its deviation.

    Args:
        values: one a row.
        members: the rows that enter mean and deviation; the result is for all rows.
        normalization: "mean_std" divides by (standard deviation + 1e-6), "mean" only
            subtracts the mean.
        ids: the set of each row, in [0, num_ids); None: the whole group is one set.
        num_ids: static bound of the ids.
        ddof: 1 divides the squares by n - 1 (sample), 0 by n (population).

    Returns:
        Exactly 0 for sets of one member or of equal members.
    """
    if normalization not in ("mean_std", "mean"):
        raise ValueError(
            f"normalization={normalization!r}; known: ['mean', 'mean_std']"
        )
    if ids is None:
        smallest, count, mean = _group_statistics(values, members)
    else:
        smallest, count, mean = _set_statistics(values, members, ids, num_ids)
    centred = (values - smallest) - mean
    if normalization == "mean":
        return centred
    squares = jnp.where(members, centred * centred, 0)
    if ids is None:
        total = jnp.sum(squares, axis=1, keepdims=True)
    else:
        total = at_rows(set_sums(squares, ids, num_ids), ids)
    return centred / (jnp.sqrt(total / jnp.maximum(count - ddof, 1)) + EPSILON)


def group_advantages(
    batch: TransitionBatch,
    *,
    stat_weighting: str = "trajectories",
    normalization: str = "mean_std",
    invalid_action_penalty: Scalar = 0.1,
) -> Float[Array, "groups rows"]:
    """Trajectory-level advantage of every row: GRPO's, and the A^G, A^E of others.

    Source: arXiv 2402.03300 (GRPO), eq. 3 of arXiv 2609.35082 (CRBC). For the options
    see `scores` and `normalize`. Exactly 0 in a group of one trajectory (verl-agent
    keeps the raw score there), in a group of equal scores, and on padding.
    """
    score, members = scores(
        batch,
        stat_weighting=stat_weighting,
        invalid_action_penalty=invalid_action_penalty,
    )
    advantage = normalize(score, members, normalization=normalization)
    return jnp.where(batch.mask & has_company(batch), advantage, 0)


def has_company(batch: TransitionBatch) -> Bool[Array, "groups 1"]:
    """Whether a group has at least two trajectories to compare."""
    return jnp.sum(first_rows(batch), axis=1, keepdims=True) > 1


def anchor_advantages(
    values: Float[Array, "groups rows"],
    batch: TransitionBatch,
    *,
    normalization: str = "mean_std",
) -> Float[Array, "groups rows"]:
    """Normalises values among all visits of the same anchor, revisits included."""
    advantage = normalize(
        values,
        batch.mask,
        normalization=normalization,
        ids=batch.source,
        num_ids=batch.num_anchors,
    )
    return jnp.where(batch.mask, advantage, 0)


def penalize_invalid(
    values: Float[Array, "groups rows"],
    batch: TransitionBatch,
    invalid_action_penalty: Scalar,
) -> Float[Array, "groups rows"]:
    """Subtracts the penalty from the rows whose own reply had the wrong format."""
    invalid = batch.mask & ~batch.is_action_valid
    return values - invalid_action_penalty * invalid.astype(values.dtype)


def whiten(
    values: Float[Array, "*shape"], weights: Shaped[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Shifts and scales to weighted mean 0 and unbiased variance 1, over everything.

    A weight counts how often a value occurs (its tokens); 0 leaves it out, and its
    result is 0. Equal values give exactly 0. Source: verl's `masked_whiten`.
    """
    weights = weights.astype(values.dtype)
    kept = weights > 0
    total = jnp.maximum(jnp.sum(weights), 1)
    smallest = jnp.min(jnp.where(kept, values, jnp.inf))
    shifted = jnp.where(kept, values - smallest, 0)
    centred = shifted - jnp.sum(weights * shifted) / total
    variance = jnp.sum(weights * centred * centred) / jnp.maximum(total - 1, 1)
    return jnp.where(kept, centred * jax.lax.rsqrt(variance + _WHITEN_EPSILON), 0)


@jax.jit
def token_gae(
    rewards: Float[Array, "rows tokens"],
    values: Float[Array, "rows tokens"],
    mask: Bool[Array, "rows tokens"],
    discount: Scalar = 1.0,
    gae_lambda: Scalar = 1.0,
) -> tuple[Float[Array, "rows tokens"], Float[Array, "rows tokens"]]:
    """Generalised advantage estimation inside each response (arXiv 1506.02438).

    Each row is an episode of its own that ends with value 0: nothing is carried from
    one environment step to the next. Rewards and values outside the mask are set to
    0 first; verl's function leaves that to its critic, and garbage on padding leaks
    into the advantages where the critic forgets.

    Args:
        rewards: reward of each token.
        values: critic's value before each token.
        mask: True on the tokens of the response, one contiguous run a row.
        discount: per token.
        gae_lambda: decay of the residuals.

    Returns:
        Advantages (not whitened) and the critic's targets, both 0 outside the mask.
    """
    rewards = jnp.where(mask, rewards, 0)
    values = jnp.where(mask, values, 0)
    next_values = jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
    residual = rewards + discount * next_values - values
    residual = jnp.where(mask, residual, 0)

    def recur(advantage, now):
        advantage = now + discount * gae_lambda * advantage
        return advantage, advantage

    start = jnp.zeros_like(residual[:, 0])
    _, advantages = jax.lax.scan(recur, start, residual.T, reverse=True)
    advantages = advantages.T
    advantages = jnp.where(mask, advantages, 0)
    return advantages, jnp.where(mask, advantages + values, 0)


def set_sums(
    values: Num[Array, "groups rows *rest"],
    ids: Int[Array, "groups rows"],
    num_ids: int,
) -> Num[Array, "groups ids *rest"]:
    """Sums the values of each id within its group.

    Several values a row, on a further axis, cost little more than one.
    """
    zeros = jnp.zeros((num_ids, *values.shape[2:]), values.dtype)
    return jax.vmap(lambda v, i: zeros.at[i].add(v, mode="drop"))(values, ids)


def set_minima(
    values: Num[Array, "groups rows"],
    ids: Int[Array, "groups rows"],
    num_ids: int,
    initial,
) -> Num[Array, "groups ids"]:
    """Smallest value of each id within its group, `initial` for an id without rows."""
    table = jnp.full(num_ids, initial, values.dtype)
    return jax.vmap(lambda v, i: table.at[i].min(v, mode="drop"))(values, ids)


def _group_statistics(values, members):
    count = jnp.sum(members, axis=1, keepdims=True)
    smallest = jnp.min(jnp.where(members, values, jnp.inf), axis=1, keepdims=True)
    smallest = jnp.where(count > 0, smallest, 0)  # A group of padding.
    shifted = jnp.where(members, values - smallest, 0)
    mean = jnp.sum(shifted, axis=1, keepdims=True) / jnp.maximum(count, 1)
    return smallest, count, mean


def _set_statistics(values, members, ids, num_ids):
    count = set_sums(members.astype(jnp.int32), ids, num_ids)
    smallest = set_minima(
        jnp.where(members, values, jnp.inf), ids, num_ids, initial=jnp.inf
    )
    smallest = at_rows(jnp.where(count > 0, smallest, 0), ids)
    shifted = jnp.where(members, values - smallest, 0)
    mean = set_sums(shifted, ids, num_ids) / jnp.maximum(count, 1)
    return smallest, at_rows(count, ids), at_rows(mean, ids)
