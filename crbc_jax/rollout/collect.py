"""Policy and environments in, groups of trajectories out.

Each episode is a coroutine; none waits for another's step. What an episode samples
depends on its seeds alone: the seed of a request is derived from the run's seed and
from the update, group, rollout and step that it belongs to.
"""

import asyncio
import collections
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from crbc_jax.envs.base import EnvironmentFailed
from crbc_jax.envs.pool import EnvPool
from crbc_jax.models.tokenizer import Tokenizer
from crbc_jax.rollout.actions import parse_action
from crbc_jax.rollout.engine import Engine, Request, SamplingParams
from crbc_jax.rollout.prompts import Record, Template, build_prompt
from crbc_jax.types import INVALID_ACTION, Group, Outcome, Step, Trajectory, UserError

# Set apart the seeds of rollouts that train from those of evaluations.
TRAIN, EVAL = 0, 1


class StaleRollout(RuntimeError):
    """A step was sampled by another policy version than the run allows."""


class Player(NamedTuple):
    """Everything that episodes of a run have in common."""

    engine: Engine
    pool: EnvPool
    tokenizer: Tokenizer
    template: Template
    history_length: int  # Records in the prompt.
    max_prompt_tokens: int
    max_response_tokens: int
    stop_ids: tuple[int, ...]
    seed: int  # Of the run.


class EpisodeKey(NamedTuple):
    """Which episode this is; with the run's seed it decides all that is sampled."""

    purpose: int  # TRAIN or EVAL.
    update: int
    group: int
    rollout: int


async def run_episode(
    player: Player,
    task_id: str,
    key: EpisodeKey,
    *,
    temperature: float,
    versions: range,
) -> Trajectory:
    """Plays one task to its end; an episode that breaks comes back as aborted.

    Args:
        player: see there.
        task_id: of the environment.
        key: see there.
        temperature: of sampling; 0 is greedy.
        versions: policy versions that may answer.

    Raises:
        StaleRollout: if a reply came from another version.
        UserError: if a prompt cannot be made to fit.
    """
    steps: list[Step] = []
    records: list[Record] = []
    outcome: Outcome = "aborted"
    observation, anchor, error, num_cut = "", "", "", 0
    sampling = SamplingParams(player.max_response_tokens, player.stop_ids, temperature)
    with player.engine.episode():
        try:
            async with player.pool.environment() as env:
                observation, info = await env.reset(task_id)
                anchor, is_over = info["anchor"], False
                while not is_over:
                    prompt = build_prompt(
                        player.template,
                        player.tokenizer,
                        records,
                        observation,
                        history_length=player.history_length,
                        max_tokens=player.max_prompt_tokens,
                    )
                    num_cut += prompt.num_dropped > 0
                    seed = request_seed(player.seed, key, len(steps))
                    completion = await player.engine.generate(
                        Request(prompt.ids, sampling, seed)
                    )
                    _check_version(completion.policy_version, versions, key, steps)
                    parsed = parse_action(player.tokenizer.decode(completion.token_ids))
                    reply = await env.step(parsed.action)
                    next_observation, reward, terminated, truncated, info = reply
                    not_executed = parsed.action and info["reason"]
                    if not_executed:
                        parsed = parsed._replace(code="not_admissible")
                    action = parsed.action or INVALID_ACTION
                    steps.append(
                        Step(
                            observation=observation,
                            anchor=anchor,
                            prompt_ids=prompt.ids,
                            response_ids=completion.token_ids,
                            logprobs=completion.logprobs,
                            policy_version=completion.policy_version,
                            finish_reason=completion.finish_reason,
                            action=action,
                            parse_code=parsed.code,
                            is_action_valid=parsed.is_valid,
                            reward=float(reward),
                        )
                    )
                    records.append(Record(observation, action))
                    observation, anchor = next_observation, info["anchor"]
                    is_over = terminated or truncated
            if info["won"]:
                outcome = "success"
            else:
                outcome = "failure" if terminated else "truncated"
        except (EnvironmentFailed, ConnectionError, TimeoutError) as failure:
            error = f"{type(failure).__name__}: {failure}"
    return Trajectory(
        task_id=task_id,
        group=key.group,
        rollout=key.rollout,
        outcome=outcome,
        steps=tuple(steps),
        final_observation=observation,
        final_anchor=anchor,
        prompts_truncated=num_cut,
        error=error,
    )


async def collect(
    player: Player,
    task_ids: Sequence[str],
    *,
    group_size: int,
    update: int,
    temperature: float,
    versions: range,
) -> AsyncIterator[Group]:
    """Plays every task `group_size` times; yields each group when it is complete.

    Args:
        player: see there.
        task_ids: one group each; a task that comes twice makes two groups.
        group_size: rollouts a task.
        update: the update that the rollouts are for.
        temperature: of sampling.
        versions: policy versions that may answer.

    Raises:
        StaleRollout, UserError: as `run_episode`; no episode plays on.
        RuntimeError: if members of a group did not start from the same state.
    """
    if not task_ids:
        raise UserError("no task to collect: the environment's training split is empty")

    async def run_group(group: int, task_id: str) -> Group:
        episodes = [
            run_episode(
                player,
                task_id,
                EpisodeKey(TRAIN, update, group, rollout),
                temperature=temperature,
                versions=versions,
            )
            for rollout in range(group_size)
        ]
        members = tuple(await asyncio.gather(*episodes))
        _check_same_start(members)
        return members

    groups = [
        asyncio.ensure_future(run_group(index, task_id))
        for index, task_id in enumerate(task_ids)
    ]
    try:
        for group in asyncio.as_completed(groups):
            yield await group
    finally:
        for group in groups:  # After an error or a cancellation, none plays on.
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)


def request_seed(seed: int, key: EpisodeKey, step: int) -> int:
    """Derives the seed of one request, below 2**63."""
    sequence = np.random.SeedSequence((seed, *key, step))
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def rollout_stats(groups: Iterable[Group]) -> dict[str, float]:
    """Fields of a metrics row; means are over the episodes that were not aborted."""
    everyone = [trajectory for group in groups for trajectory in group]
    played = [t for t in everyone if t.outcome != "aborted"]
    steps = [step for trajectory in played for step in trajectory.steps]
    num_played, num_steps = max(len(played), 1), max(len(steps), 1)
    stats = {
        "rollout/success_rate": sum(t.success for t in played) / num_played,
        "rollout/return": sum(t.episode_return for t in played) / num_played,
        "rollout/episode_steps": len(steps) / num_played,
        "rollout/truncated": sum(t.outcome == "truncated" for t in played) / num_played,
        "rollout/aborted": len(everyone) - len(played),
        "rollout/prompts_truncated": sum(t.prompts_truncated for t in played),
        "rollout/steps": len(steps),
        "rollout/prompt_tokens": sum(len(s.prompt_ids) for s in steps),
        "rollout/response_tokens": sum(len(s.response_ids) for s in steps),
        "rollout/invalid_share": sum(not s.is_action_valid for s in steps) / num_steps,
        "groups/size_min": min(
            (sum(t.outcome != "aborted" for t in group) for group in groups), default=0
        ),
    }
    reasons = collections.Counter(s.parse_code for s in steps if s.parse_code != "ok")
    return stats | {f"invalid/{code}": n / num_steps for code, n in reasons.items()}


def check_replies(
    groups: Iterable[Group], tokenizer: Tokenizer, max_invalid_share: float
) -> None:
    """Refuses to train a policy whose replies are hardly ever in the right format.

    Without this all groups would be constant, and the run would look alive for hours.

    Raises:
        UserError: with the most frequent reasons and three sample replies.
    """
    steps = [step for group in groups for t in group for step in t.steps]
    invalid = [step for step in steps if not step.is_action_valid]
    if len(invalid) <= max_invalid_share * len(steps):
        return
    reasons = collections.Counter(step.parse_code for step in invalid).most_common(3)
    samples = [tokenizer.decode(step.response_ids) for step in invalid[:3]]
    raise UserError(
        f"{len(invalid)} of {len(steps)} replies have no readable action, more than "
        f"config.rollout.max_invalid_share={max_invalid_share} allows; reasons: "
        f"{', '.join(f'{code} {count}' for code, count in reasons)}; replies: "
        f"{samples}. Start from a policy that knows the format (config.warm_start)"
    )


def check_any_played(groups: Sequence[Group]) -> None:
    """Refuses an update whose episodes were all aborted.

    Raises:
        UserError: with the most frequent reasons.
    """
    everyone = [trajectory for group in groups for trajectory in group]
    if everyone and all(t.outcome == "aborted" for t in everyone):
        errors = collections.Counter(t.error for t in everyone).most_common(3)
        reasons = "; ".join(f"{count} x {error}" for error, count in errors)
        raise UserError(f"all {len(everyone)} episodes were aborted: {reasons}")


def _check_version(version: int, versions: range, key: EpisodeKey, steps) -> None:
    if version not in versions:
        raise StaleRollout(
            f"policy version {version} answered step {len(steps)} of {key}; allowed "
            f"are {versions.start} to {versions.stop - 1} "
            "(config.rollout.max_policy_lag)"
        )


def _check_same_start(members: Group) -> None:
    starts = {m.steps[0].anchor for m in members if m.steps}
    if len(starts) > 1:
        raise RuntimeError(
            f"task {members[0].task_id!r} started from {len(starts)} different states "
            "in one group; an environment must give equal ids equal episodes"
        )
