"""Policy and environments in, groups of trajectories out.

Each episode is a coroutine; none waits for another's step. What an episode samples
depends on its seeds alone: the seed of a request is derived from the run's seed and
from the update, group, rollout and step that it belongs to.
"""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import numpy as np

from crbc_jax.envs.base import EnvironmentFailed
from crbc_jax.envs.pool import EnvPool
from crbc_jax.models.tokenizer import Tokenizer
from crbc_jax.rollout.actions import CODES, PARSERS, settle
from crbc_jax.rollout.divergence import Gate
from crbc_jax.rollout.engine import Completion, Engine, Request, SamplingParams
from crbc_jax.rollout.prompts import build_prompt
from crbc_jax.rollout.templates.base import Record, Template
from crbc_jax.types import Group, Outcome, Step, Trajectory, UserError

# Set apart the seeds of rollouts that train from those of evaluations.
TRAIN, EVAL = 0, 1

_SAMPLE_LENGTH = 200  # Characters of a reply that an error shows.


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
    parser: str = "strict"  # A row of rollout.actions.PARSERS.
    episode_timeout: float = math.inf  # Seconds an episode may take; then aborted.
    gate_step: int = 0  # Steps after which divergence.Gate may cut a group; 0: never.
    min_divergence: float = 0.0  # Below which it does.


class EpisodeKey(NamedTuple):
    """Which episode this is; with the run's seed it decides all that is sampled."""

    purpose: int  # TRAIN or EVAL.
    update: int
    group: int
    rollout: int


@dataclasses.dataclass
class _Progress:
    """What an episode has seen; it survives when the episode breaks."""

    steps: list[Step] = dataclasses.field(default_factory=list)
    observation: str = ""  # The latest, not acted on yet; and its anchor.
    anchor: str | bytes = ""
    prompts_truncated: int = 0


async def run_episode(
    player: Player,
    task_id: str,
    key: EpisodeKey,
    *,
    temperature: float,
    versions: range,
    gate: Gate | None = None,
) -> Trajectory:
    """Plays one task to its end; an episode that breaks comes back as aborted.

    Args:
        player: see there.
        task_id: of the environment.
        key: see there.
        temperature: of sampling; 0 is greedy.
        versions: policy versions that may answer.
        gate: of its group; once that cuts the group, the episode ends where it is.

    Raises:
        StaleRollout: if a reply came from another version.
        UserError: if a prompt cannot be made to fit.
    """
    progress, outcome, error = _Progress(), "aborted", ""
    with player.engine.episode():
        try:
            async with asyncio.timeout(player.episode_timeout) as cap:
                outcome = await _play(
                    player, task_id, key, temperature, versions, gate, progress
                )
        except (EnvironmentFailed, ConnectionError, TimeoutError) as failure:
            error = f"{type(failure).__name__}: {failure}"
            if cap.expired():
                error = (
                    f"TimeoutError: took more than {player.episode_timeout:g} s "
                    "(config.rollout.episode_timeout)"
                )
    return Trajectory(
        task_id=task_id,
        group=key.group,
        rollout=key.rollout,
        outcome=outcome,
        steps=tuple(progress.steps),
        final_observation=progress.observation,
        final_anchor=progress.anchor,
        prompts_truncated=progress.prompts_truncated,
        error=error,
    )


async def _play(
    player: Player,
    task_id: str,
    key: EpisodeKey,
    temperature: float,
    versions: range,
    gate: Gate | None,
    progress: _Progress,
) -> Outcome:
    """Steps through one episode; `progress` is up to date whenever this ends."""
    sampling = SamplingParams(player.max_response_tokens, player.stop_ids, temperature)
    parse = PARSERS[player.parser]
    records: list[Record] = []
    terminated = truncated = False
    async with player.pool.environment() as env:
        progress.observation, info = await env.reset(task_id)
        progress.anchor = info["anchor"]
        while not (terminated or truncated or (gate and gate.is_cut)):
            prompt = build_prompt(
                player.template,
                player.tokenizer,
                records,
                progress.observation,
                history_length=player.history_length,
                max_tokens=player.max_prompt_tokens,
                admissible_actions=info["admissible_actions"],
            )
            progress.prompts_truncated += prompt.num_dropped > 0
            seed = request_seed(player.seed, key, len(progress.steps))
            completion = await player.engine.generate(
                Request(prompt.ids, sampling, seed)
            )
            _check_completion(completion, versions, key, len(progress.steps))
            # From here on text is for the environment alone: what is trained are the
            # ids as they were sampled.
            parsed = parse(player.tokenizer.decode(completion.token_ids))
            observation, reward, terminated, truncated, info = await env.step(
                parsed.action
            )
            played = settle(parsed, info["reason"])
            progress.steps.append(
                Step(
                    observation=progress.observation,
                    anchor=progress.anchor,
                    prompt_ids=prompt.ids,
                    response_ids=completion.token_ids,
                    logprobs=completion.logprobs,
                    policy_version=completion.policy_version,
                    finish_reason=completion.finish_reason,
                    action=played.action,
                    parse_code=played.code,
                    is_action_valid=played.is_valid,
                    reward=float(reward),
                )
            )
            records.append(Record(progress.observation, played.action))
            progress.observation, progress.anchor = observation, info["anchor"]
            num_steps, is_over = len(progress.steps), terminated or truncated
            if gate and (num_steps == gate.step or (is_over and num_steps < gate.step)):
                gate.enter([step.action for step in progress.steps], info["won"])
    if info["won"]:
        return "success"
    return "failure" if terminated else "truncated"


async def collect(
    player: Player,
    task_ids: Sequence[str],
    *,
    group_size: int,
    update: int,
    temperature: float,
    versions: range,
    first_group: int = 0,
) -> AsyncIterator[Group]:
    """Plays every task `group_size` times; yields each group when it is complete.

    A group that the player's gate cuts is not yielded.

    Whoever leaves the iterator early closes it (`contextlib.aclosing`): no episode
    plays on then, nor after an error or a cancellation.

    Args:
        player: see there.
        task_ids: one group each; a task that comes twice makes two groups.
        group_size: rollouts a task.
        update: the update that the rollouts are for.
        temperature: of sampling.
        versions: policy versions that may answer.
        first_group: number of the first task among all of the update.

    Raises:
        StaleRollout, UserError: as `run_episode`.
        RuntimeError: if members of a group did not start from the same state.
    """
    if not task_ids:
        raise UserError("no task to collect: the environment's training split is empty")

    def start(group: int, rollout: int) -> asyncio.Task:
        return asyncio.create_task(
            run_episode(
                player,
                task_ids[group],
                EpisodeKey(TRAIN, update, first_group + group, rollout),
                temperature=temperature,
                versions=versions,
                gate=gates[group],
            )
        )

    async def complete(group: int) -> Group | None:
        members = tuple(await asyncio.gather(*episodes[group]))
        _check_same_start(members)
        return None if gates[group] and gates[group].is_cut else members

    indices = range(len(task_ids))
    gates = [
        Gate(group_size, player.gate_step, player.min_divergence)
        if player.gate_step
        else None
        for _ in indices
    ]
    episodes = [[start(group, i) for i in range(group_size)] for group in indices]
    groups = [asyncio.create_task(complete(group)) for group in indices]
    try:
        for group in asyncio.as_completed(groups):
            if (members := await group) is not None:
                yield members
    finally:
        tasks = [*groups, *itertools.chain.from_iterable(episodes)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect_all(
    player: Player, task_ids: Sequence[str], **settings
) -> list[Group]:
    """Returns all groups of `collect`, in the order of `task_ids`; same arguments."""
    async with contextlib.aclosing(collect(player, task_ids, **settings)) as groups:
        complete = [group async for group in groups]
    return sorted(complete, key=lambda members: members[0].group)


def request_seed(seed: int, key: EpisodeKey, step: int) -> int:
    """Derives the seed of one request, below 2**63."""
    sequence = np.random.SeedSequence((seed, *key, step))
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def rollout_stats(groups: Sequence[Group]) -> dict[str, float]:
    """Fields of a metrics row; means are over the episodes that were not aborted."""
    played = [[t for t in group if t.outcome != "aborted"] for group in groups]
    episodes = list(itertools.chain.from_iterable(played))
    steps = [step for trajectory in episodes for step in trajectory.steps]
    num_episodes, num_steps = max(len(episodes), 1), max(len(steps), 1)
    codes = collections.Counter(step.parse_code for step in steps)
    stats = {
        "rollout/success_rate": sum(t.success for t in episodes) / num_episodes,
        "rollout/return": sum(t.episode_return for t in episodes) / num_episodes,
        "rollout/episode_steps": len(steps) / num_episodes,
        "rollout/truncated": sum(t.outcome == "truncated" for t in episodes)
        / num_episodes,
        "rollout/aborted": sum(len(group) for group in groups) - len(episodes),
        "rollout/prompts_truncated": sum(t.prompts_truncated for t in episodes),
        "rollout/steps": len(steps),
        "rollout/prompt_tokens": sum(len(s.prompt_ids) for s in steps),
        "rollout/response_tokens": sum(len(s.response_ids) for s in steps),
        "rollout/invalid_share": sum(not s.is_action_valid for s in steps) / num_steps,
        # Steps that left the environment as it was: the policy runs in a circle.
        "rollout/noop_share": sum(map(_count_noops, episodes)) / num_steps,
        "groups/size_min": min(map(len, played), default=0),
    }
    stats |= {f"invalid/{code}": codes[code] / num_steps for code in CODES[1:]}
    return {name: float(value) for name, value in stats.items()}


def check_replies(
    groups: Sequence[Group], tokenizer: Tokenizer, max_invalid_share: float
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
    samples = [tokenizer.decode(s.response_ids)[:_SAMPLE_LENGTH] for s in invalid[:3]]
    raise UserError(
        f"{len(invalid)} of {len(steps)} replies have no readable action, more than "
        f"config.rollout.max_invalid_share={max_invalid_share} allows; reasons: "
        f"{', '.join(f'{code} {count}' for code, count in reasons)}; replies: "
        f"{samples}. Start from a policy that knows the format (config.warm_start)"
    )


def check_any_played(groups: Sequence[Group]) -> None:
    """Refuses an update whose groups were all cut, or whose episodes all aborted.

    Raises:
        UserError: with the most frequent reasons.
    """
    if not groups:
        raise UserError(
            "the rollouts of every group are too much alike (config.rollout."
            "min_divergence): the policy hardly explores; raise config.rollout."
            "temperature, or play all groups on with config.rollout.gate_step=0"
        )
    everyone = [trajectory for group in groups for trajectory in group]
    if all(t.outcome == "aborted" for t in everyone):
        errors = collections.Counter(t.error for t in everyone).most_common(3)
        reasons = "; ".join(f"{count} x {error}" for error, count in errors)
        raise UserError(f"all {len(everyone)} episodes were aborted: {reasons}")


def _check_completion(
    completion: Completion, versions: range, key: EpisodeKey, step: int
) -> None:
    """Refuses a reply of the wrong policy, or one that cannot be trained on."""
    if completion.policy_version not in versions:
        raise StaleRollout(
            f"policy version {completion.policy_version} answered step {step} of "
            f"{key}; allowed are {versions.start} to {versions.stop - 1} "
            "(config.rollout.max_policy_lag)"
        )
    num_tokens, num_logprobs = len(completion.token_ids), len(completion.logprobs)
    if num_tokens != num_logprobs or num_tokens == 0:
        raise ValueError(
            f"the engine answered step {step} of {key} with token_ids [tokens="
            f"{num_tokens}] and logprobs [tokens={num_logprobs}]; every token needs "
            "the log-probability that it was sampled with, and there must be one token"
        )


def _check_same_start(members: Group) -> None:
    starts = {(m.steps[0].observation, m.steps[0].anchor) for m in members if m.steps}
    if len(starts) > 1:
        raise RuntimeError(
            f"task {members[0].task_id!r} started from {len(starts)} different states "
            "in one group; an environment must give equal ids equal episodes"
        )


def _count_noops(trajectory: Trajectory) -> int:
    anchors = [step.anchor for step in trajectory.steps] + [trajectory.final_anchor]
    return sum(a == b for a, b in itertools.pairwise(anchors))
