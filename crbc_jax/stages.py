"""The stages of training, each bound to its part of the config.

`train.py` runs them in turn. `version` counts the updates behind a set of parameters:
version 0 is the policy that reinforcement learning starts from.
"""

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from crbc_jax import distributed, envs
from crbc_jax.advantages import WHOLE_BATCH, diagnostics, make_estimator
from crbc_jax.background import Background
from crbc_jax.envs.pool import EnvPool
from crbc_jax.evaluate import EvalResult, evaluate
from crbc_jax.graph.batch import build_batch, columns_of
from crbc_jax.kernels.closure import closure_credit
from crbc_jax.kernels.groups import over_groups
from crbc_jax.learner.warm_start import Demonstration
from crbc_jax.metrics import Progress
from crbc_jax.models import lora
from crbc_jax.models.config import DecoderConfig
from crbc_jax.models.tokenizer import Tokenizer
from crbc_jax.parity import ParityProbe
from crbc_jax.plan import env_options
from crbc_jax.rollout import make_engine
from crbc_jax.rollout.collect import EVAL, EpisodeKey, Player, collect_all, run_episode
from crbc_jax.rollout.prompts import build_prompt, encode_reply, stop_ids
from crbc_jax.rollout.templates import PROMPTS
from crbc_jax.rollout.templates.base import Record
from crbc_jax.types import Group, UserError


class Clock:
    """Seconds by stage, since they were last read."""

    def __init__(self):
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Adds the time that the block takes to `stage`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            self._seconds[stage] = self._seconds.get(stage, 0.0) + elapsed

    def read(self) -> dict[str, float]:
        """Returns `seconds/STAGE` fields, and starts from zero."""
        seconds, self._seconds = self._seconds, {}
        return {f"seconds/{stage}": value for stage, value in seconds.items()}


class Rollouts:
    """Engine and environments: collects groups for training, and evaluates.

    A context manager; leaving it stops worker processes and frees the engine.

    Args:
        config: of the whole run.
        decoder_config: shape of the policy, for an engine that runs it.
        tokenizer: of the policy.
        background: where engine and environments live.

    Raises:
        ValueError: naming the setting of environment or engine that does not fit.
    """

    def __init__(
        self,
        config: ConfigDict,
        decoder_config: DecoderConfig,
        tokenizer: Tokenizer,
        background: Background,
    ):
        env, options = config.env, env_options(config.env)
        self._config = config
        self._decoder_config = decoder_config
        self._background = background
        self._env_options = options
        train = envs.tasks(env.name, "train", count=env.num_train_tasks, **options)
        held_out = envs.tasks(env.name, "eval", count=env.num_eval_tasks, **options)
        for name, count in (
            ("rollout.tasks_per_update", config.rollout.tasks_per_update),
            ("env.num_eval_tasks", len(held_out.ids)),
        ):
            if count < jax.process_count():
                raise UserError(
                    f"config.{name}={count} must be at least 1 for each of the "
                    f"{jax.process_count()} processes"
                )
        self.train_ids, self.panel = train.ids, held_out
        self.digests = {"train": train.digest, "eval": held_out.digest}
        self._category = {
            task_id: envs.category(env.name, task_id, **options)
            for task_id in held_out.ids
        }
        template = PROMPTS[config.rollout.prompt]
        self._player = Player(
            engine=make_engine(config, lora.without_adapters(decoder_config)),
            pool=EnvPool(env.name, options, env.num_workers, env.step_timeout),
            tokenizer=tokenizer,
            template=template,
            history_length=config.rollout.history_length,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
            stop_ids=stop_ids(template, tokenizer),
            seed=config.seed,
            parser=config.rollout.parser,
            episode_timeout=config.rollout.episode_timeout,
            gate_step=config.rollout.gate_step,
            min_divergence=config.rollout.min_divergence,
        )
        self._probe = None
        if config.rollout.engine == "vllm":
            self._probe = ParityProbe(config, decoder_config)
        self._ahead: tuple[int, list[Group]] | None = None  # Collected ahead.
        # The collection of the next update while it runs, at lag 1.
        self._running: tuple[int, concurrent.futures.Future] | None = None

    def __enter__(self) -> "Rollouts":
        self._background.run(self._player.pool.__aenter__())
        return self

    def __exit__(self, *_) -> None:
        if self._running is not None:  # After an error.
            self._background.cancel(self._running[1])
        self._background.run(self._player.engine.close())
        self._background.run(self._player.pool.__aexit__())

    def publish(self, params: Any, version: int) -> dict[str, float]:
        """Lets all later requests be answered by `params`, adapters folded in.

        Returns:
            Of an engine outside this process, how well it agrees with the learner:
            fields of a metrics row.

        Raises:
            UserError: if it cannot be reached, or does not agree.
        """
        engine, plain = self._player.engine, params
        if self._decoder_config.lora:
            plain = lora.merge(self._decoder_config, params)
        plain = distributed.local_copy(plain)
        self._background.run(engine.publish(plain, version))
        if self._probe is None:
            return {}

        async def answer():
            return await asyncio.gather(*map(engine.generate, self._probe.requests))

        try:
            completions = self._background.run(answer())
        except ConnectionError as error:
            raise UserError(f"version {version} is published, but {error}") from error
        engine.stats()  # The counters of an update are those of its own rollouts.
        differences = [
            self._probe.compare(params, part)
            for part in distributed.gather(completions)
        ]
        return {name: max(d[name] for d in differences) for name in differences[0]}

    def take(self, update: int) -> list[Group]:
        """Returns the groups of an update, in order; collects them if nobody has.

        Raises:
            Interrupted: if a signal came meanwhile; nothing is lost.
        """
        if self._ahead is not None:
            number, groups = self._ahead
            self._ahead = None
            if number != update:
                raise ValueError(f"rollouts wait for update {number}, not {update}")
            return groups
        work = self._background.start(self._collect(update))
        return distributed.gather_items(self._background.finish(work))

    def start_ahead(self, update: int) -> None:
        """At lag 1 begins to collect for `update`, by the policy of the one before."""
        if self._config.rollout.max_policy_lag:
            if update < self._config.learner.num_updates:
                self._running = update, self._background.start(self._collect(update))

    def finish_ahead(self) -> None:
        """Waits for what `start_ahead` began, if it did."""
        if self._running is not None:
            update, future = self._running
            groups = distributed.gather_items(future.result())
            self._ahead, self._running = (update, groups), None

    @property
    def ahead(self) -> list[Group]:
        """Groups collected ahead of their update; they belong into a checkpoint."""
        return [] if self._ahead is None else self._ahead[1]

    def put_ahead(self, update: int, groups: list[Group]) -> None:
        """Hands back what a checkpoint held of `update`, if anything."""
        self._ahead = (update, groups) if groups else None

    def engine_stats(self) -> dict[str, float]:
        """Counters of the engine since the last call, as fields of a metrics row."""
        return {
            # Part of the rollout's seconds; named so that nobody compares them.
            ("seconds/rollout/engine" if name == "seconds" else f"engine/{name}"): value
            for name, value in self._player.engine.stats().items()
        }

    def evaluate(self, version: int, progress: Progress) -> EvalResult:
        """Plays every task of the panel once.

        The seeds are the same at every version, so that evaluations differ by the
        policy alone as far as possible.
        """
        index = {task_id: i for i, task_id in enumerate(self.panel.ids)}
        share = [self.panel.ids[i] for i in distributed.share(len(self.panel.ids))]

        async def play(task_id: str):
            return await run_episode(
                self._player,
                task_id,
                EpisodeKey(EVAL, 0, index[task_id], 0),
                temperature=self._config.evaluate.temperature,
                versions=range(version, version + 1),
            )

        bar = f"evaluation after update {version}"
        progress.start(bar, len(share))
        result = self._background.run(
            evaluate(
                play,
                share,
                # All at once: which episodes share a batch is then no accident.
                max_concurrent=len(share),
                category=self._category,
                on_done=lambda done: progress.show(bar, done),
            )
        )
        progress.finish(bar, keep=False)
        # The counters of an update are those of its own rollouts, also where a resumed
        # run did not evaluate before it.
        self._player.engine.stats()
        return EvalResult(tuple(distributed.gather_items(result.tasks)))

    def demonstrate(self) -> list[Demonstration]:
        """Lets the expert play training tasks, each step as prompt and reply.

        Raises:
            UserError: if it cannot solve one of them.
        """
        env, player, steps = self._config.env, self._player, []
        for task_id in self.train_ids[: self._config.warm_start.num_tasks]:
            records: list[Record] = []
            try:
                played = envs.expert(env.name, task_id, **self._env_options)
            except ValueError as error:
                raise UserError(
                    f"no demonstration for the warm start: {error}; raise "
                    f"config.env.max_steps={env.max_steps}, choose other tasks, or do "
                    "without: config.warm_start.steps=0 and noise_steps=0"
                ) from error
            for step in played:
                prompt = build_prompt(
                    player.template,
                    player.tokenizer,
                    records,
                    step.observation,
                    history_length=player.history_length,
                    max_tokens=player.max_prompt_tokens,
                    admissible_actions=step.info["admissible_actions"],
                )
                actions = step.info["admissible_actions"] or [step.action]
                steps.append(
                    Demonstration(
                        prompt_ids=prompt.ids,
                        response_ids=self._reply(step.action),
                        alternatives=[self._reply(action) for action in actions],
                    )
                )
                records.append(Record(step.observation, step.action))
        return steps

    def _reply(self, action: str) -> np.ndarray:
        player = self._player
        ids = encode_reply(player.template, player.tokenizer, action)
        if len(ids) > player.max_response_tokens:
            raise UserError(
                f"config.rollout.max_response_tokens={player.max_response_tokens}: the "
                f"expert's reply {player.template.reply(action)!r} has {len(ids)}"
            )
        return ids

    async def _collect(self, update: int) -> list[Group]:
        """Plays this process' share of the groups."""
        settings = self._config.rollout
        first = max(update - settings.max_policy_lag, 0)
        tasks = task_schedule(
            self.train_ids, self._config.seed, update, settings.tasks_per_update
        )
        share = distributed.share(len(tasks))
        return await collect_all(
            self._player,
            [tasks[number] for number in share],
            group_size=settings.group_size,
            update=update,
            temperature=settings.temperature,
            versions=range(first, update + 1),
            first_group=share.start,
        )


class Credit:
    """Groups -> one advantage a step, and what else was computed of each step."""

    def __init__(self, config: ConfigDict, devices: Sequence[jax.Device]):
        """Takes `config.advantage`, and the devices that groups are spread over."""
        estimate, beta = make_estimator(config), config.crbc.beta
        bases = (config.name, config.proas.base if config.name == "proas" else None)

        def assign(batch):
            # In one program: what the three have in common is computed once.
            return (
                estimate(batch),
                closure_credit(batch, beta=beta),
                diagnostics.count(batch, beta),
            )

        is_whole = any(name in WHOLE_BATCH for name in bases)
        self.devices = devices[:1] if is_whole else devices
        # TransitionBatch -> what `assign` returns; jitted.
        self.program = over_groups(assign, self.devices)

    def __call__(
        self, groups: Sequence[Group]
    ) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, float]]:
        """Returns advantages and columns, [steps] each, and fields of a metrics row.

        Steps are those of the trajectories that were not aborted, in order.
        """
        batch, order = build_batch(columns_of(groups))
        advantages, closure, counts = jax.device_get(self.program(batch))
        advantages = order.unpad(advantages)
        columns = {
            name: order.unpad(getattr(closure, name))
            for name in ("value", "action_value", "credit")
        }
        return (
            advantages,
            columns | {"advantage": advantages},
            {
                f"credit/{name}": value
                for name, value in diagnostics.summarize(counts).items()
            },
        )


def task_schedule(
    task_ids: Sequence[str], seed: int, update: int, count: int
) -> list[str]:
    """Returns the tasks of an update: each epoch goes once through all, shuffled.

    A function of its arguments alone, so that a resumed run goes on where it was.
    """
    numbers = range(update * count, (update + 1) * count)
    orders = {
        epoch: np.random.default_rng([seed, epoch]).permutation(len(task_ids))
        for epoch in {number // len(task_ids) for number in numbers}
    }
    return [
        task_ids[orders[number // len(task_ids)][number % len(task_ids)]]
        for number in numbers
    ]
