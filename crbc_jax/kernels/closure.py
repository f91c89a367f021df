"""Cross-rollout Bellman closure: V = b + beta M V, one small system per group.

M(s, s') = N(s, s') / N(s) and b(s) = beta N(s, success) / N(s) are the empirical
process of a group's rollouts (kernels/transitions.py).
Source: arXiv 2609.35082 (CRBC), sections 3 and 4; equation numbers are that paper's.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from crbc_jax.kernels.groups import in_chunks
from crbc_jax.kernels.returns import at_rows, set_sums, steps_to_end
from crbc_jax.kernels.transitions import (
    Process,
    backup,
    empirical_process,
    values_ahead,
)
from crbc_jax.types import Scalar, TransitionBatch

# A residual above this voids a group; rounding alone leaves below 1e-5 in float32.
MAX_RESIDUAL = 1e-3
# Matrices of at most so many elements are solved at once (64 MiB in float32): memory
# stays bounded, and batched solvers of GPUs were wrong beyond 2^29 elements.
MAX_ELEMENTS = 2**24


class Closure(NamedTuple):
    """Solved values; success is worth 1, failure 0."""

    value: Float[Array, "groups anchors"]  # V; 0 at anchors without a visit.
    # Largest |b + beta M V - V|; inf where it is not finite or V is not unique.
    residual: Float[Array, " groups"]


class Credit(NamedTuple):
    """The closure as seen from each row; 0 on padding and in groups that are void."""

    value: Float[Array, "groups rows"]  # V(s)
    action_value: Float[Array, "groups rows"]  # Q(s, a)
    advantage: Float[Array, "groups rows"]  # Q - V
    sigma: Float[Array, "groups rows"]  # Deviation of Q - V under the policy at s.
    credit: Float[Array, "groups rows"]  # Eq. 13.
    num_actions: Int[Array, "groups rows"]  # Distinct actions taken at s.
    residual: Float[Array, " groups"]


class _Affine(NamedTuple):
    """Every anchor's value in terms of one in the core: offset + slope * V(core)."""

    maps: Float[Array, "groups anchors 2"]  # Offset and slope.
    core: Int[Array, "groups anchors"]  # Position in the core; beyond it means 0.


@functools.partial(jax.jit, static_argnames="method")
def solve_closure(
    batch: TransitionBatch, beta: Scalar, method: str = "reduced"
) -> Closure:
    """Values of the behaviour policy in the empirical process (eqs. 7 to 9).

    Rows of M sum to at most 1, so for beta < 1 the system is strictly diagonally
    dominant. At beta = 1 it is regular if every anchor has an observed path to an end,
    which whole rollouts always have; groups with a trapped anchor come back with an
    infinite residual then, and the others do not notice.

    Args:
        batch: any leading groups; may be traced under vmap or shard_map.
        beta: discount a transition, in (0, 1]; the caller checks.
        method: "reduced" eliminates chains first; "dense" solves for all anchors at
            once. Equal but for rounding.

    Raises:
        ValueError: for an unknown method.
    """
    if method not in _SOLVERS:
        raise ValueError(f"method={method!r}; known: {sorted(_SOLVERS)}")
    process = empirical_process(batch)
    value = _SOLVERS[method](beta, batch, process)
    error = jnp.abs(backup(value, beta, batch, process) - value)
    residual = jnp.max(error, axis=1)
    is_unique = (beta < 1) | ~jnp.any(batch.is_trapped, axis=1)
    return Closure(
        value, jnp.where(is_unique & jnp.isfinite(residual), residual, jnp.inf)
    )


@functools.partial(jax.jit, static_argnames=("depth", "method"))
def closure_credit(
    batch: TransitionBatch,
    *,
    beta: Scalar = 0.98,
    depth: int = -1,
    sigma_min: Scalar = 0.1,
    method: str = "reduced",
) -> Credit:
    """V, Q, their difference and its normalised form at every row.

    Args:
        batch: any leading groups; may be traced under vmap or shard_map.
        beta: discount a transition, in (0, 1].
        depth: -1 for the full closure; K >= 0 for K backups of the Monte-Carlo values
            (eqs. 6 and 10): Q^(K) = B V^(K-1), and K = 0 uses Monte-Carlo Q too.
        sigma_min: floor of the scale (appendix C.3).
        method: of `solve_closure`.
    """

    def credit(batch):
        return _credit(batch, beta, depth, sigma_min, method)

    return in_chunks(credit, batch)


def _credit(batch, beta, depth, sigma_min, method) -> Credit:
    process = empirical_process(batch)
    value, outcome, residual = _values(batch, process, beta, depth, method)
    is_sound = (residual <= MAX_RESIDUAL)[:, None] & batch.mask
    ones = batch.mask.astype(value.dtype)
    sums = set_sums(
        jnp.stack([ones, ones * outcome], axis=-1), batch.pair, batch.num_pairs
    )
    count, total = (at_rows(sums[..., i], batch.pair) for i in range(2))
    count = jnp.maximum(count, 1)
    action_value = total / count
    row_value = at_rows(value, batch.source)
    advantage = jnp.where(is_sound, action_value - row_value, 0)
    # Each row of a pair counts 1 / N(s, a): their sum over s is its number of pairs.
    parts = jnp.stack([process.weight * advantage**2, ones / count], axis=-1)
    sums = set_sums(parts, batch.source, batch.num_anchors)
    variance, num_actions = (at_rows(sums[..., i], batch.source) for i in range(2))
    sigma = jnp.sqrt(variance)
    num_actions = jnp.round(num_actions).astype(jnp.int32)
    credit = jnp.where(num_actions >= 2, advantage / jnp.maximum(sigma, sigma_min), 0)
    return Credit(
        value=jnp.where(is_sound, row_value, 0),
        action_value=jnp.where(is_sound, action_value, 0),
        advantage=advantage,
        sigma=sigma,
        credit=credit,
        num_actions=jnp.where(batch.mask, num_actions, 0),
        residual=residual,
    )


def _values(batch, process, beta, depth, method):
    """V by anchor, what Q averages by row, and the residual by group."""
    if depth < 0:
        value, residual = solve_closure(batch, beta, method)
        return value, beta * values_ahead(value, batch, process), residual
    returns = _discounted_success(batch, beta)
    value = set_sums(process.weight * returns, batch.source, batch.num_anchors)
    residual = jnp.zeros(batch.mask.shape[0], value.dtype)
    if depth == 0:
        return value, returns, residual

    def once(_, value):
        return backup(value, beta, batch, process)

    before = jax.lax.fori_loop(0, depth - 1, once, value)
    outcome = beta * values_ahead(before, batch, process)
    return once(None, before), outcome, residual


def _discounted_success(batch: TransitionBatch, beta) -> Float[Array, "groups rows"]:
    """Monte-Carlo return G_t = beta^(T - t + 1) R of every row (eq. 6)."""
    steps = steps_to_end(batch) + 1
    success = (batch.mask & batch.success).astype(batch.reward.dtype)
    return success * jnp.asarray(beta, success.dtype) ** steps


def _solve_dense(beta, batch: TransitionBatch, process: Process):
    """Solves (I - beta M) V = b over all anchors, by one batched LU."""
    every = jnp.broadcast_to(jnp.arange(batch.num_anchors), process.visits.shape)
    return _solve_plain(beta, batch, process, every, batch.num_anchors)


def _solve_reduced(beta, batch: TransitionBatch, process: Process):
    """Solves the same system, exactly, by eliminating chains first.

    An anchor with one successor besides itself obeys V(s) = a + c V(target) with
    a = beta wins / (N - beta loops) and c = beta (moves - loops) / (N - beta loops).
    Composing these maps along a chain leads down to a core anchor or an end; a linear
    solve remains for the core alone.
    """
    index = batch.core_index
    if not batch.has_chains:
        return _solve_plain(beta, batch, process, index, batch.num_core)
    is_core = index < batch.num_core
    is_chain = batch.chain_target != jnp.arange(batch.num_anchors)
    # At least one visit leaves for good, or the anchor would be trapped.
    keep = jnp.where(process.visits > 0, process.visits - beta * process.loops, 1)
    offset = jnp.where(is_core, 0, beta * process.wins / keep)
    slope = jnp.where(is_chain, beta * (process.moves - process.loops) / keep, is_core)
    maps = jnp.stack([offset, slope], axis=-1)
    maps, target = _compose(maps, batch.chain_target)
    affine = _Affine(maps, at_rows(index, target))
    return _solve_core(beta, batch, process, index, affine, batch.num_core)


def _solve_plain(beta, batch, process, index, num_core):
    """Solves for the anchors with index < num_core, which are all there are."""
    zeros = jnp.zeros_like(process.visits)
    itself = _Affine(jnp.stack([zeros, zeros + 1], axis=-1), index)
    return _solve_core(beta, batch, process, index, itself, num_core)


_SOLVERS = {"reduced": _solve_reduced, "dense": _solve_dense}


def _compose(
    maps: Float[Array, "groups anchors 2"], target: Int[Array, "groups anchors"]
) -> tuple[Float[Array, "groups anchors 2"], Int[Array, "groups anchors"]]:
    """Composes affine maps along chains by pointer doubling.

    A chain's last anchor is a fixed point: a core anchor (offset 0, slope 1) or an end
    (its own value, slope 0). So composing once too often does no harm.

    Returns:
        The maps in terms of the last anchors, and which these are.
    """

    def compose(maps, target):
        offset, slope = maps[..., 0], maps[..., 1]
        ahead = _maps_at(maps, target)
        return jnp.stack([offset + slope * ahead[..., 0], slope * ahead[..., 1]], -1)

    def double(carry):
        maps, target, ahead = carry
        return compose(maps, target), ahead, at_rows(ahead, ahead)

    def is_under_way(carry):
        _, target, ahead = carry
        return jnp.any(target != ahead)

    start = maps, target, at_rows(target, target)
    maps, target, _ = jax.lax.while_loop(is_under_way, double, start)
    return compose(maps, target), target


def _maps_at(maps: Float[Array, "groups anchors 2"], index):
    """Gathers both numbers of a map at once, which costs little more than one."""
    return jax.vmap(lambda m, i: m.at[i].get(mode="clip"))(maps, index)


def _solve_core(beta, batch, process, index, affine: _Affine, num_core: int):
    """Solves for the anchors with index < num_core, then fills in the others."""
    row = at_rows(index, batch.source)  # num_core: the row belongs to no equation.
    column = at_rows(affine.core, batch.target)
    ahead = _maps_at(affine.maps, batch.target)
    weight = beta * process.weight
    inner = weight * process.move
    right = weight * process.win + inner * ahead[..., 0]
    entry = inner * ahead[..., 1]
    outside = num_core * num_core
    place = jnp.where(
        (row < num_core) & (column < num_core), row * num_core + column, outside
    )
    solved = _solve_systems(place, entry, set_sums(right, row, num_core))
    padded = jnp.pad(solved, ((0, 0), (0, 1)))
    return affine.maps[..., 0] + affine.maps[..., 1] * at_rows(padded, affine.core)


def _solve_systems(
    place: Int[Array, "groups rows"],
    entry: Float[Array, "groups rows"],
    right: Float[Array, "groups core"],
) -> Float[Array, "groups core"]:
    """Solves (I - matrix) x = right, where `entry` adds to the matrix at `place`."""
    # On CPUs a batched LU is no faster, and in jax 0.10 it may wait for ever: it hands
    # its parts to the very threads that block on them (jaxlib's ParallelBatchMap).
    return jax.lax.platform_dependent(
        place, entry, right, cpu=_one_by_one, default=_at_once
    )


def _one_by_one(place, entry, right):
    systems = jax.vmap(_system, (0, 0, None))(place, entry, right.shape[1])
    return jax.lax.map(lambda operands: _solve(*operands), (systems, right))


def _at_once(place, entry, right):
    num_groups, size = right.shape
    most = max(1, MAX_ELEMENTS // (size * size))

    def solve(operands):
        place, entry, right = operands
        return _solve(_system(place, entry, size), right)

    return jax.lax.map(solve, (place, entry, right), batch_size=min(most, num_groups))


def _system(place, entry, size):
    """I - matrix of one group."""
    matrix = jnp.zeros(size * size, entry.dtype).at[place].add(entry, mode="drop")
    return jnp.eye(size, dtype=entry.dtype) - matrix.reshape(size, size)


def _solve(system, right):
    with jax.default_matmul_precision("highest"):
        return jnp.linalg.solve(system, right)
