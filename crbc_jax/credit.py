"""Columns of any framework's rollouts -> one advantage a step, or the closure's values.

steps = {"group_id": [...], "traj_id": [...], "step": [...], "anchor": [...],
         "action": [...], "reward": [...], "success": [...]}
advantages = crbc_jax.step_advantages(steps, estimator="crbc", beta=0.98)
"""

import functools
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from crbc_jax.advantages import WITHOUT_GROUP, bind
from crbc_jax.graph.batch import build_batch
from crbc_jax.kernels.closure import MAX_RESIDUAL, closure_credit
from crbc_jax.types import TransitionBatch

# Methods that read no reward but the outcome.
_OUTCOME_ONLY = ("rtmc",)


class ClosureValues(NamedTuple):
    """The empirical process of each group, solved, and seen from each input row.

    Success is worth 1 and failure 0; values are discounted by beta a transition.
    """

    value: Float[np.ndarray, " rows"]  # V(s) of the row's anchor, in [0, beta].
    action_value: Float[np.ndarray, " rows"]  # Q(s, a).
    advantage: Float[np.ndarray, " rows"]  # Q - V; averages to 0 over an anchor.
    sigma: Float[np.ndarray, " rows"]  # Its deviation over the anchor's visits.
    credit: Float[np.ndarray, " rows"]  # Normalised and gated (eq. 13).
    num_actions: Int[np.ndarray, " rows"]  # Distinct actions seen at the anchor.
    residual: Float[np.ndarray, " groups"]  # Largest error of the group's equations.
    group_ids: list[Any]  # The groups of `residual`, in its order.


def step_advantages(
    steps: Mapping[str, Any], estimator: str = "crbc", **options: Any
) -> Float[np.ndarray, " rows"]:
    """Computes one advantage for every environment step.

    Args:
        steps: columns of equal length (lists, NumPy arrays, a pandas or pyarrow
            table's), one row an environment step, in any row order.
            `group_id`: the task; trajectories of one task are compared.
            `traj_id`: the trajectory; distinct over all groups.
            `step`: 0, 1, 2, ... within the trajectory.
            `anchor`: the state, by which visits are matched within a group, and
            `action`: hashable, or an array.
            `reward`: the environment's.
            `success`: the trajectory's outcome, the same on all its rows.
            `is_action_valid`: was the reply's format right? Default: all true.
            `next_anchor`: default: the anchor of the trajectory's next row.
            `response_len`, `milestone_achieved`, `reasonable`, `advancing`,
            `base_adv`: for the methods that need them.
        estimator: a row of `crbc_jax.advantages.ESTIMATORS`.
        **options: of that estimator; `depth=None` is the full closure.

    Returns:
        float32 (float64 where JAX runs with x64), in the order of the rows.

    Raises:
        ValueError: naming the column, the row and the remedy; or the estimator or
            option, and the nearest that is known.
    """
    if "depth" in options:
        options["depth"] = _depth(options["depth"])
    estimate = bind(estimator, options)
    batch, order = build_batch(steps)
    if estimator not in WITHOUT_GROUP:
        _check_groups(batch, order.group_ids)
    if estimator in _OUTCOME_ONLY and np.any(batch.reward[~batch.is_last]):
        warnings.warn(
            f"estimator {estimator!r} reads the outcome of a trajectory alone; the "
            "rewards of its earlier steps are ignored",
            stacklevel=2,
        )
    return order.unpad(estimate(batch))


def closure_values(
    steps: Mapping[str, Any], beta: float = 0.98, depth: int | None = None
) -> ClosureValues:
    """Solves the cross-rollout Bellman closure of each group (arXiv 2609.35082).

    Args:
        steps: as for `step_advantages`; rewards are not used.
        beta: discount a transition, in (0, 1].
        depth: None for the full closure; K = 0, 1, 2, ... for K backups of the
            Monte-Carlo values.

    Raises:
        ValueError: as `step_advantages`.
    """
    options = {"beta": beta, "depth": _depth(depth)}
    bind("crbc", options)  # Checks the values.
    batch, order = build_batch(steps)
    solved = _solve(batch, **options)
    residual = np.asarray(solved.residual)[: len(order.group_ids)]
    if void := [order.group_ids[i] for i in np.flatnonzero(residual > MAX_RESIDUAL)]:
        warnings.warn(
            f"the equations of groups {void} have no solution (residual above "
            f"{MAX_RESIDUAL}): some of their states never reach an end; their credit "
            "is 0. Choose beta below 1, or complete their trajectories",
            stacklevel=2,
        )
    per_row = {
        name: order.unpad(values)
        for name, values in solved._asdict().items()
        if name != "residual"
    }
    return ClosureValues(**per_row, residual=residual, group_ids=order.group_ids)


@functools.partial(jax.jit, static_argnames=("depth",))
def _solve(batch, *, beta, depth):
    return closure_credit(batch, beta=beta, depth=depth)


def _depth(depth: Any) -> int:
    """The notebook's depth (None is full) -> the kernels' (-1 is full)."""
    if depth is None:
        return -1
    try:
        sound = 0 <= depth < 2**31 and depth == int(depth)
    except (TypeError, ValueError):
        sound = False
    if not sound:
        raise ValueError(
            f"depth must be 0, 1, 2, ... backups, or None for the full closure; got "
            f"{depth!r}"
        )
    return int(depth)


def _check_groups(batch: TransitionBatch, group_ids: list[Any]) -> None:
    """Refuses batches in which no trajectory has another to be compared with."""
    trajectories = np.sum(batch.mask & (batch.step == 0), axis=1)
    if len(group_ids) > 1 and trajectories.max() == 1:
        raise ValueError(
            f"column 'group_id': each of the {len(group_ids)} groups has one "
            "trajectory, so that every advantage would be 0; give all rollouts of a "
            "task the same group_id (is it the trajectory's id?)"
        )
