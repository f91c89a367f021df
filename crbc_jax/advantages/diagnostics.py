"""What a batch of groups offers to credit assignment, in numbers."""

import functools
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from crbc_jax.kernels.closure import solve_closure
from crbc_jax.kernels.returns import at_rows, first_rows, set_sums, trajectory_totals
from crbc_jax.types import AnyArray, TransitionBatch

DEPTHS = (0, 1, 2, 3, -1)  # Of the coverage; -1 is the full closure.


def diagnose(
    batch: TransitionBatch, beta: float = 0.98, depths: tuple[int, ...] = DEPTHS
) -> dict[str, float]:
    """Shares and means over the batch; rows are visits of anchors.

    Returns:
        `anchors`: distinct anchors a group. `singleton_share`: of rows, at anchors
        that were visited once. `open_share`: of rows, at anchors where two actions or
        more were taken, the only ones that get step credit. `self_loop_share`: of
        rows, which lead back to their anchor. `unreachable_share`: of anchors, from
        which no observed path leads to success. `zero_variance_groups`: share of
        groups whose returns are all equal. `residual`: the largest of a group.
        `coverage_K` and `full_coverage_K` for each depth K (`closure` for the full
        one): rollouts whose evidence reaches a row at an open anchor within K
        transitions, on average, and the share of such rows that all rollouts of the
        group reach (figure 5 of arXiv 2609.35082; the definition of "reach" is ours).
    """
    return summarize(count(batch, beta, depths))


def summarize(counts: Mapping[str, AnyArray]) -> dict[str, float]:
    """Numbers of each group, as `count` gives them -> the numbers of `diagnose`."""
    counts = jax.device_get(counts)
    total = {name: float(np.sum(values)) for name, values in counts.items()}
    rows, open_rows = max(total["rows"], 1), max(total["open"], 1)
    groups, anchors = max(total["groups"], 1), max(total["anchors"], 1)
    result = {
        "anchors": total["anchors"] / groups,
        "singleton_share": total["singletons"] / rows,
        "open_share": total["open"] / rows,
        "self_loop_share": total["self_loops"] / rows,
        "unreachable_share": total["unreachable"] / anchors,
        "zero_variance_groups": total["zero_variance"] / groups,
        "residual": float(np.max(counts["residual"])),
    }
    covered = {name: total[name] / open_rows for name in total if "coverage" in name}
    return result | covered


@functools.partial(jax.jit, static_argnames="depths")
def count(
    batch: TransitionBatch, beta: float = 0.98, depths: tuple[int, ...] = DEPTHS
) -> dict[str, Float[Array, " groups"]]:
    """What `summarize` needs of each group; groups are treated alone."""
    ones = batch.mask.astype(jnp.float32)
    visits = set_sums(ones, batch.source, batch.num_anchors)
    pair_visits = set_sums(ones, batch.pair, batch.num_pairs)
    shares = ones / jnp.maximum(at_rows(pair_visits, batch.pair), 1)
    actions = set_sums(shares, batch.source, batch.num_anchors)
    is_open = batch.mask & (at_rows(actions, batch.source) > 1.5)
    closure = solve_closure(batch, beta)
    is_group = jnp.any(batch.mask, axis=1)
    is_loop = batch.mask & ~batch.is_last & (batch.target == batch.source)
    returns = trajectory_totals(batch.reward, batch)
    low = jnp.min(jnp.where(batch.mask, returns, jnp.inf), axis=1)
    high = jnp.max(jnp.where(batch.mask, returns, -jnp.inf), axis=1)
    is_single = batch.mask & (at_rows(visits, batch.source) == 1)

    def per_group(values):
        return jnp.sum(values, axis=1, dtype=jnp.float32)

    result = {
        "groups": is_group.astype(jnp.float32),
        "rows": per_group(batch.mask),
        "anchors": per_group(visits > 0),
        "open": per_group(is_open),
        "singletons": per_group(is_single),
        "self_loops": per_group(is_loop),
        "unreachable": per_group((visits > 0) & (closure.value <= 0)),
        "zero_variance": (is_group & (low == high)).astype(jnp.float32),
        "residual": closure.residual,
    }
    num_rollouts = jnp.sum(first_rows(batch), axis=1, keepdims=True)
    for depth, reached in _rollouts_within(batch, depths):
        at_row = at_rows(jnp.sum(reached, axis=2), batch.source)
        name = "closure" if depth < 0 else str(depth)
        result[f"coverage_{name}"] = per_group(jnp.where(is_open, at_row, 0))
        is_full = is_open & (at_row == num_rollouts)
        result[f"full_coverage_{name}"] = per_group(is_full)
    return result


def _rollouts_within(
    batch: TransitionBatch, depths: tuple[int, ...]
) -> Iterator[tuple[int, Bool[Array, "groups anchors trajectories"]]]:
    """Which rollouts visit an anchor within each depth's number of transitions."""
    num_groups = batch.mask.shape[0]
    group = jnp.arange(num_groups)[:, None]
    # Rows that lead nowhere are sent beyond the last anchor, and dropped.
    source = jnp.where(batch.mask, batch.source, batch.num_anchors)
    inner = jnp.where(batch.mask & ~batch.is_last, batch.source, batch.num_anchors)
    shape = (num_groups, batch.num_anchors, batch.num_trajectories)
    reached = jnp.zeros(shape, bool)
    reached = reached.at[group, source, batch.trajectory].set(True, mode="drop")

    def spread(reached):
        return reached.at[group, inner].max(reached[group, batch.target], mode="drop")

    def grow(carry):
        wider = spread(carry[0])
        return wider, jnp.any(wider != carry[0])

    done = 0
    for depth in sorted(depth for depth in depths if depth >= 0):
        for _ in range(done, depth):
            reached = spread(reached)
        done = depth
        yield depth, reached
    if min(depths, default=0) < 0:
        yield -1, jax.lax.while_loop(lambda carry: carry[1], grow, (reached, True))[0]
