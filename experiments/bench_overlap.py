"""What overlapping collection and update gains: the training loop at lag 0 and 1.

    python experiments/bench_overlap.py --repeats=3

The loop, its threads, credit and update are the real ones. What a real run has
elsewhere is simulated: an engine whose replies take time but nothing of this machine,
as a server's GPU would, and an environment whose episodes are as long as recorded ones
of ALFWorld. Runs at config.rollout.max_policy_lag 0 and 1 take turns.

Printed are seconds an update by stage, the share of them in which the engine had
nothing to do, and for lag 1 the ratio to the longer of rollout and everything else at
lag 0, which no overlap can beat.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import statistics
import tempfile
import time

import gymnasium
import numpy as np
from absl import flags

from crbc_jax import command_line
from crbc_jax.envs.base import TaskSet, digest_lines
from crbc_jax.rollout.engine import Completion

_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs at each lag.", lower_bound=1)
_UPDATES = flags.DEFINE_integer("updates", 5, "Of each run.", lower_bound=3)
_REPLY_SECONDS = flags.DEFINE_float("reply_seconds", 0.04, "Of a reply.", 0.0)

# Steps of ALFWorld's planner on 30 official games, five of each kind. An agent in
# training fails in about every third episode, which then lasts to the limit.
_LENGTHS = np.repeat((3, 4, 5, 6, 7, 8, 9), (2, 7, 1, 10, 5, 3, 2))
_MAX_STEPS = 50
_RANDOM = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True)
class Options:
    """Of the environment, which is this module."""

    max_steps: int = _MAX_STEPS


class RecordedEnv(gymnasium.Env):
    """Episodes that do nothing, for as many steps as a recorded one took."""

    def __init__(self, options: Options):
        self._max_steps = options.max_steps

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._task, self._steps = options["task"], 0
        # Members of a group differ: drawn from one stream, in the order of starting.
        fails = _RANDOM.random() < 1 / 3
        self._length = self._max_steps if fails else int(_RANDOM.choice(_LENGTHS))
        return self._see()

    def step(self, action):
        self._steps += 1
        text, info = self._see()
        truncated = not info["won"] and self._steps >= self._max_steps
        return text, float(info["won"]), info["won"], truncated, info

    def _see(self):
        is_over = self._length < self._max_steps and self._steps >= self._length
        text = f"You are in the middle of room {self._steps}."
        return text, {
            "won": is_over,
            "anchor": text,
            "admissible_actions": None,
            "task_id": self._task,
            "reason": "",
        }


make = RecordedEnv


def tasks(split, count, options):
    ids = tuple(f"{split}-{number:03}" for number in range(count))
    return TaskSet(ids, digest_lines(ids))


def category(task_id, options):
    return None


class SleepingEngine:
    """An Engine that answers anything with the same words, after a while."""

    def __init__(self, reply_ids: np.ndarray, seconds: float):
        self._reply_ids = reply_ids
        self._seconds = seconds
        self._version = -1
        self._running = 0
        self._busy_since = self._busy = 0.0

    async def generate(self, request):
        if not self._running:
            self._busy_since = time.perf_counter()
        self._running += 1
        version = self._version
        # Replies differ in length: from half to one and a half of the mean.
        spread = np.random.default_rng(request.seed).uniform(0.5, 1.5)
        await asyncio.sleep(self._seconds * spread)
        self._running -= 1
        if not self._running:
            self._busy += time.perf_counter() - self._busy_since
        return Completion(
            token_ids=self._reply_ids,
            logprobs=np.full(len(self._reply_ids), -1.0, np.float32),
            policy_version=version,
            finish_reason="stop",
        )

    async def publish(self, params, version):
        self._version = version

    @contextlib.contextmanager
    def episode(self):
        yield

    def stats(self):
        busy, self._busy = self._busy, 0.0
        return {"seconds": busy}

    async def close(self):
        pass


def make_config(lag: int):
    """A run of the simulation; everything but the lag is the same."""
    from ml_collections import ConfigDict

    from crbc_jax.config import default_config

    config = default_config()
    config.env.name = "recorded"
    config.env.recorded = ConfigDict()
    config.env.max_steps = _MAX_STEPS
    config.env.num_eval_tasks = 2
    config.model.directory = "preset:text_tiny"
    config.model.fresh = True
    config.rollout.engine = "sleeping"
    config.rollout.prompt = "recorded"
    config.rollout.max_prompt_tokens = 48
    config.rollout.max_response_tokens = 16
    config.rollout.tasks_per_update = 4
    config.rollout.max_policy_lag = lag
    config.loss.importance_cap = 2.0
    config.learner.num_updates = _UPDATES.value
    config.evaluate.every = config.checkpoint.every = _UPDATES.value
    return config


def run(lag: int) -> tuple[dict[str, float], float]:
    """Mean seconds an update by stage, and of those the engine's busy ones."""
    from crbc_jax.metrics import read_metrics
    from crbc_jax.train import train

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        train(make_config(lag), pathlib.Path(folder), command="")
        # The first update compiles, and at lag 1 the last one has nothing beside it.
        rows = read_metrics(folder)[2:-1]
    stages = ("rollout", "credit", "update", "publish")
    seconds = {
        stage: statistics.mean(row[f"seconds/{stage}"] for row in rows)
        for stage in stages
    }
    return seconds, statistics.mean(row["seconds/rollout/engine"] for row in rows)


def register() -> None:
    """Adds the simulated engine, environment and prompt to their tables."""
    from crbc_jax.envs import ENVIRONMENTS
    from crbc_jax.models.pretrained import load_policy
    from crbc_jax.rollout import ENGINES
    from crbc_jax.rollout.prompts import encode_reply
    from crbc_jax.rollout.templates import PROMPTS
    from crbc_jax.rollout.templates.base import Template, tagged_action

    template = Template(
        lambda scene: scene.observation,
        tagged_action,
        end="</action>",
        is_message=False,
    )
    _, tokenizer = load_policy(make_config(0).model)
    reply_ids = encode_reply(template, tokenizer, "go to countertop 1")
    ENVIRONMENTS["recorded"] = __name__
    PROMPTS["recorded"] = template
    ENGINES["sleeping"] = lambda *_: SleepingEngine(reply_ids, _REPLY_SECONDS.value)


def main(_) -> None:
    register()
    walls, longest = {0: [], 1: []}, []
    print("lag  rollout  credit  update  publish    wall  engine idle")
    for _ in range(_REPEATS.value):
        for lag in walls:
            seconds, busy = run(lag)
            wall = sum(seconds.values())
            walls[lag].append(wall)
            if lag == 0:
                longest.append(max(seconds["rollout"], wall - seconds["rollout"]))
            print(
                f"{lag:>3}  {seconds['rollout']:7.2f} {seconds['credit']:7.2f} "
                f"{seconds['update']:7.2f} {seconds['publish']:8.2f} {wall:7.2f}  "
                f"{1 - busy / wall:10.0%}",
                flush=True,
            )
    for name, ratios in (
        ("lag 1 / lag 0", np.divide(walls[1], walls[0])),
        ("lag 1 / longer of rollout and the rest", np.divide(walls[1], longest)),
    ):
        print(
            f"{name}: {np.median(ratios):.2f} "
            f"({np.min(ratios):.2f} to {np.max(ratios):.2f})"
        )


if __name__ == "__main__":
    command_line.start(main, [])
