"""Records that folders pass to each other; no behaviour beyond simple properties."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

Outcome = Literal["success", "failure", "truncated", "aborted"]

AnyArray = Array | np.ndarray  # On a device, or on the host before a jitted call.
Scalar = Num[Array, ""] | float | int  # A number; a tracer inside a jitted function.

# One identity for every reply that no action could be read from, so that different
# junk strings do not look like different actions of an anchor.
INVALID_ACTION = "<invalid>"


class UserError(ValueError):
    """An error that the user can mend; it is shown without a traceback."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One environment step: what the policy saw, sampled, and what came of it."""

    observation: str
    anchor: str | bytes  # Key of the environment state; equal keys are one anchor.
    prompt_ids: np.ndarray  # int32, exactly as served.
    response_ids: np.ndarray  # int32, exactly as sampled; never re-tokenised.
    logprobs: np.ndarray  # float32, of response_ids under the sampling policy.
    policy_version: int  # Number of updates behind the parameters that sampled it.
    finish_reason: str  # "stop" or "length".
    action: str  # Executed action, or INVALID_ACTION.
    parse_code: str  # Of rollout/actions.py: "ok", or what was wrong with the reply.
    is_action_valid: bool  # The reply had the right format, whatever the action.
    reward: float  # The environment's, before any penalty.


@dataclasses.dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode of one task."""

    task_id: str
    group: int  # Index of its group within the update.
    rollout: int  # Index of the trajectory within its group.
    outcome: Outcome
    steps: tuple[Step, ...]
    final_observation: str
    final_anchor: str | bytes
    prompts_truncated: int = 0  # Steps whose history was dropped to fit the limit.
    error: str = ""  # Why it was aborted.

    @property
    def success(self) -> bool:
        return self.outcome == "success"

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of the environment's rewards."""
        return float(sum(step.reward for step in self.steps))


Group = tuple[Trajectory, ...]  # Trajectories of one task, in order of `rollout`.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransitionBatch:
    """The rows of a batch of groups, padded to a bucket; made by graph/batch.py alone.

    One row is one environment step. The rows of a trajectory are contiguous and in
    time order; padding comes last in each group. Ids count from 0 within a group.
    """

    source: Int[AnyArray, "groups rows"]  # Anchor.
    pair: Int[AnyArray, "groups rows"]  # Distinct (anchor, action).
    target: Int[AnyArray, "groups rows"]  # Next anchor; on a last row, as seen.
    trajectory: Int[AnyArray, "groups rows"]
    step: Int[AnyArray, "groups rows"]  # From 0.
    is_last: Bool[AnyArray, "groups rows"]  # Last step of its trajectory.
    reward: Float[AnyArray, "groups rows"]
    success: Bool[AnyArray, "groups rows"]  # Of the whole trajectory, on all its rows.
    is_action_valid: Bool[AnyArray, "groups rows"]
    mask: Bool[AnyArray, "groups rows"]  # True = real.
    is_trapped: Bool[
        AnyArray, "groups rows"
    ]  # From its anchor no path leads to an end.
    # Structure of the closure's linear system: see graph/reduction.py.
    chain_target: Int[AnyArray, "groups anchors"]
    core_index: Int[AnyArray, "groups anchors"]
    extras: Mapping[str, AnyArray]  # Further [groups, rows] columns of single methods.
    # Static upper bounds of the ids above (bucketed).
    num_anchors: int = dataclasses.field(metadata={"static": True})
    num_pairs: int = dataclasses.field(metadata={"static": True})
    num_trajectories: int = dataclasses.field(metadata={"static": True})
    num_core: int = dataclasses.field(metadata={"static": True})
    has_chains: bool = dataclasses.field(metadata={"static": True})


class TrainState(NamedTuple):
    """All that an optimiser step changes, and the frozen reference beside it."""

    params: Any
    opt_state: Any
    # What trains, as it was at first, for the KL term; None without one.
    reference: Any | None
    step: Int[Array, ""]  # Optimiser steps so far.
