"""Cross-rollout Bellman closure: V = b + beta M V, one small system per group.

M(s, s') = N(s, s') / N(s) and b(s) = beta N(s, success) / N(s) are the empirical
process of a group's rollouts; success and failure absorb, with values 1 and 0.
Source: arXiv 2609.35082 (CRBC), sections 3 and 4; equation numbers are that paper's.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from crbc_jax.kernels.returns import at_rows, set_sums, steps_to_end
from crbc_jax.types import TransitionBatch

# A residual above this voids a group; rounding alone leaves below 1e-5 in float32.
MAX_RESIDUAL = 1e-3


class Process(NamedTuple):
    """What the rows of a batch contribute to their anchors' equations."""

    weight: Float[Array, "groups rows"]  # 1 / N(source); 0 on padding.
    bonus: Float[Array, "groups rows"]  # V of the boundary behind a last row.
    is_inner: Float[Array, "groups rows"]  # 1 where an anchor follows, else 0.


class Closure(NamedTuple):
    """Solved values; success is worth 1, failure 0."""

    value: Float[Array, "groups anchors"]  # V; 0 at anchors without a visit.
    residual: Float[Array, " groups"]  # Largest |b + beta M V - V|, inf if not finite.


class Credit(NamedTuple):
    """The closure as seen from each row; 0 on padding and in groups that are void."""

    value: Float[Array, "groups rows"]  # V(s)
    action_value: Float[Array, "groups rows"]  # Q(s, a)
    advantage: Float[Array, "groups rows"]  # Q - V
    sigma: Float[Array, "groups rows"]  # Deviation of Q - V under the policy at s.
    credit: Float[Array, "groups rows"]  # Eq. 13.
    num_actions: Int[Array, "groups rows"]  # Distinct actions taken at s.
    residual: Float[Array, " groups"]


def empirical_process(batch: TransitionBatch) -> Process:
    """Counts visits; every visit counts, repeated ones within a rollout too (eq. 5)."""
    dtype = batch.reward.dtype
    visits = set_sums(batch.mask.astype(dtype), batch.source, batch.num_anchors)
    weight = jnp.where(batch.mask, 1 / at_rows(jnp.maximum(visits, 1), batch.source), 0)
    return Process(
        weight=weight,
        bonus=(batch.mask & batch.is_last & batch.success).astype(dtype),
        is_inner=(batch.mask & ~batch.is_last).astype(dtype),
    )


def backup(
    value: Float[Array, "groups anchors"],
    beta: Float[Array, ""] | float,
    batch: TransitionBatch,
    process: Process,
) -> Float[Array, "groups anchors"]:
    """One application of the Bellman operator of the behaviour policy (eq. 8)."""
    ahead = process.bonus + process.is_inner * at_rows(value, batch.target)
    return beta * set_sums(process.weight * ahead, batch.source, batch.num_anchors)


def solve_dense(
    beta: Float[Array, ""] | float, batch: TransitionBatch, process: Process
) -> Float[Array, "groups anchors"]:
    """Solves (I - beta M) V = b over all anchors, by one batched LU."""
    everything = jnp.broadcast_to(
        jnp.arange(batch.num_anchors), batch.chain_target.shape
    )
    zeros = jnp.zeros(batch.chain_target.shape, process.weight.dtype)
    return _solve_core(
        beta,
        batch,
        process,
        everything,
        zeros,
        zeros + 1,
        everything,
        batch.num_anchors,
    )


def solve_reduced(
    beta: Float[Array, ""] | float, batch: TransitionBatch, process: Process
) -> Float[Array, "groups anchors"]:
    """Solves the same system, exactly, by eliminating chains first.

    An anchor with one successor besides itself obeys V(s) = a + c V(target) with
    c = beta p / (1 - beta p_self). Pointer doubling composes these maps along a chain,
    down to the core anchor or the end that it leads to; a linear solve remains for the
    core alone.
    """
    anchors = jnp.arange(batch.num_anchors)
    is_core = batch.core_index < batch.num_core

    def per_anchor(values):
        return set_sums(process.weight * values, batch.source, batch.num_anchors)

    is_loop = process.is_inner * (batch.target == batch.source)
    keep = 1 - beta * per_anchor(is_loop)
    offset = beta * per_anchor(process.bonus) / keep
    slope = beta * per_anchor(process.is_inner - is_loop) / keep
    is_chain = batch.chain_target != anchors
    # Fixed points of the doubling: a core anchor is itself, an end a constant.
    offset = jnp.where(is_core, 0, offset)
    slope = jnp.where(is_core, 1, jnp.where(is_chain, slope, 0))
    target = batch.chain_target
    for _ in range((batch.num_anchors - 1).bit_length()):
        offset = offset + slope * at_rows(offset, target)
        slope = slope * at_rows(slope, target)
        target = at_rows(target, target)
    if not batch.num_core:
        return offset
    core = at_rows(batch.core_index, target)
    return _solve_core(
        beta, batch, process, batch.core_index, offset, slope, core, batch.num_core
    )


def _solve_core(beta, batch, process, index, offset, slope, core, num_core):
    """Solves for the anchors with index < num_core, then fills in the others.

    Every anchor is offset + slope * (value of the core anchor that `core` names).
    """
    row = at_rows(index, batch.source)  # num_core: the row belongs to no equation.
    weight = beta * process.weight
    inner = weight * process.is_inner
    right = weight * process.bonus + inner * at_rows(offset, batch.target)
    right = set_sums(right, row, num_core)
    column = at_rows(core, batch.target)
    entry = inner * at_rows(slope, batch.target)
    place = jnp.where(
        (row < num_core) & (column < num_core),
        row * num_core + column,
        num_core * num_core,
    )
    matrix = set_sums(entry, place, num_core * num_core)
    system = jnp.eye(num_core, dtype=entry.dtype) - matrix.reshape(
        -1, num_core, num_core
    )
    # [..., None]: a right-hand side of as many groups as anchors would be misread.
    solved = jnp.linalg.solve(system, right[..., None])[..., 0]
    padded = jnp.pad(solved, ((0, 0), (0, 1)))
    return offset + slope * at_rows(padded, core)


def solve_closure(
    batch: TransitionBatch, beta: Float[Array, ""] | float, method: str = "reduced"
) -> Closure:
    """Values of the behaviour policy in the empirical process (eqs. 7 to 9).

    Rows of M sum to at most 1, so for beta < 1 the system is strictly diagonally
    dominant; at beta = 1 it is regular as long as every anchor has an observed path to
    a boundary, which complete rollouts always have. A group for which that fails
    comes back with a large residual; the others do not notice.

    Args:
        batch: any leading groups; may be traced under vmap or shard_map.
        beta: discount a transition, in (0, 1]; the caller checks.
        method: "reduced" or "dense"; equal but for rounding.
    """
    if method not in _SOLVERS:
        raise ValueError(f"method={method!r}; known: {sorted(_SOLVERS)}")
    process = empirical_process(batch)
    value = _SOLVERS[method](beta, batch, process)
    error = jnp.abs(backup(value, beta, batch, process) - value)
    residual = jnp.max(error, axis=1)
    return Closure(value, jnp.where(jnp.isfinite(residual), residual, jnp.inf))


_SOLVERS = {"reduced": solve_reduced, "dense": solve_dense}


def closure_credit(
    batch: TransitionBatch,
    *,
    beta: Float[Array, ""] | float = 0.98,
    depth: int = -1,
    sigma_min: Float[Array, ""] | float = 0.1,
    method: str = "reduced",
) -> Credit:
    """V, Q, their difference and its normalised form at every row.

    Args:
        beta: discount a transition, in (0, 1].
        depth: -1 for the full closure; K >= 0 for K backups of the Monte-Carlo values
            (eqs. 6 and 10): Q^(K) = B V^(K-1), and K = 0 uses Monte-Carlo Q too.
        sigma_min: floor of the scale (appendix C.3).
        method: of `solve_closure`.
    """
    process = empirical_process(batch)
    target_value = None
    if depth < 0:
        value, residual = solve_closure(batch, beta, method)
        target_value = value
    else:
        returns = _discounted_success(batch, beta)
        value = set_sums(process.weight * returns, batch.source, batch.num_anchors)
        residual = jnp.zeros(batch.mask.shape[0], value.dtype)
        for _ in range(depth):
            target_value, value = value, backup(value, beta, batch, process)
    if target_value is None:
        ahead = returns
    else:
        ahead = beta * (
            process.bonus + process.is_inner * at_rows(target_value, batch.target)
        )
    is_sound = (residual <= MAX_RESIDUAL)[:, None] & batch.mask
    ones = batch.mask.astype(value.dtype)
    count = set_sums(ones, batch.pair, batch.num_pairs)
    action_value = at_rows(
        set_sums(ones * ahead, batch.pair, batch.num_pairs) / jnp.maximum(count, 1),
        batch.pair,
    )
    row_value = at_rows(value, batch.source)
    advantage = jnp.where(is_sound, action_value - row_value, 0)
    squares = process.weight * advantage**2
    sigma = jnp.sqrt(
        at_rows(set_sums(squares, batch.source, batch.num_anchors), batch.source)
    )
    # Each row of a pair counts 1 / N(s, a): their sum over s is its number of pairs.
    shares = ones / jnp.maximum(at_rows(count, batch.pair), 1)
    num_actions = jnp.round(
        at_rows(set_sums(shares, batch.source, batch.num_anchors), batch.source)
    ).astype(jnp.int32)
    credit = jnp.where(num_actions >= 2, advantage / jnp.maximum(sigma, sigma_min), 0)
    return Credit(
        value=jnp.where(is_sound, row_value, 0),
        action_value=jnp.where(is_sound, action_value, 0),
        advantage=advantage,
        sigma=jnp.where(is_sound, sigma, 0),
        credit=credit,
        num_actions=jnp.where(batch.mask, num_actions, 0),
        residual=residual,
    )


def _discounted_success(batch: TransitionBatch, beta) -> Float[Array, "groups rows"]:
    """Monte-Carlo return G_t = beta^(T - t + 1) R of every row (eq. 6)."""
    steps = steps_to_end(batch) + 1
    success = (batch.mask & batch.success).astype(batch.reward.dtype)
    return success * jnp.asarray(beta, success.dtype) ** steps
