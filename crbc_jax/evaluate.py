"""A fixed panel of tasks -> success with intervals.

Every task of the panel is run exactly once. Aborted episodes say nothing of the
policy, so they are counted apart and never in a denominator.
"""

import asyncio
import collections
import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from crbc_jax.types import Trajectory

_Z_95 = 1.959963984540054  # Two-sided 95 % quantile of the standard normal.

RunEpisode = Callable[[str], Awaitable[Trajectory]]  # From the id of a task.


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95 % score interval of a success probability; (0, 1) without any trial.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical
    inference (1927).

    Raises:
        ValueError: unless 0 <= successes <= trials.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"successes={successes} must lie in 0..trials={trials}")
    if trials == 0:
        return 0.0, 1.0
    rate, weight = successes / trials, _Z_95**2 / trials
    centre = (rate + weight / 2) / (1 + weight)
    half_width = math.sqrt(weight * (rate * (1 - rate) + weight / 4)) / (1 + weight)
    # At the ends the formula is exact, but its rounding is not.
    low = 0.0 if successes == 0 else centre - half_width
    high = 1.0 if successes == trials else centre + half_width
    return low, high


class Proportion(NamedTuple):
    """Successes of a number of trials."""

    successes: int
    trials: int

    @property
    def rate(self) -> float:
        """NaN without any trial."""
        return self.successes / self.trials if self.trials else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's, at 95 %."""
        return wilson_interval(self.successes, self.trials)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.rate:.3f} [{low:.3f}, {high:.3f}]"

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "successes": self.successes,
            "trials": self.trials,
            "rate": self.rate if self.trials else None,
            "low": low,
            "high": high,
        }


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """How the episode of one task ended."""

    task_id: str
    category: str
    outcome: str  # As types.Outcome.
    num_steps: int
    episode_return: float
    error: str  # Why it was aborted.


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Results of one panel, in the panel's order."""

    tasks: tuple[TaskResult, ...]

    @property
    def overall(self) -> Proportion:
        """Successes among the episodes that were not aborted."""
        return _proportion(self.tasks)

    @property
    def num_aborted(self) -> int:
        return len(self.tasks) - self.overall.trials

    @property
    def by_category(self) -> dict[str, Proportion]:
        """The same for each category, in natural order of their names."""
        members = collections.defaultdict(list)
        for task in self.tasks:
            members[task.category].append(task)
        return {
            name: _proportion(members[name]) for name in sorted(members, key=_order)
        }

    @property
    def counts(self) -> str:
        """Denominators in words: `253/256 tasks, 3 aborted`."""
        aborted = f", {self.num_aborted} aborted" if self.num_aborted else ""
        return f"{self.overall.trials}/{len(self.tasks)} tasks{aborted}"

    def scalars(self) -> dict[str, float]:
        """Fields of a metrics row."""
        low, high = self.overall.interval
        steps = [task.num_steps for task in self.tasks if task.outcome != "aborted"]
        shares = self.by_category if len(self.by_category) > 1 else {}
        return {
            "eval/success_rate": self.overall.rate,
            "eval/success_low": low,
            "eval/success_high": high,
            "eval/episode_steps": sum(steps) / len(steps) if steps else math.nan,
            "eval/aborted": self.num_aborted,
        } | {f"eval/success_rate/{name}": share.rate for name, share in shares.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "num_tasks": len(self.tasks),
            "num_aborted": self.num_aborted,
            "overall": self.overall.to_json(),
            "by_category": {
                name: share.to_json() for name, share in self.by_category.items()
            },
            "tasks": [dataclasses.asdict(task) for task in self.tasks],
        }


async def evaluate(
    run_episode: RunEpisode,
    task_ids: Sequence[str],
    *,
    max_concurrent: int,
    category: Mapping[str, Any] | None = None,
    on_done: Callable[[int], None] | None = None,
) -> EvalResult:
    """Runs one episode of every task.

    The result does not depend on `max_concurrent` if `run_episode` gives each request
    a seed that only its task and step decide.

    Args:
        run_episode: plays one task; an episode that breaks comes back as aborted.
        task_ids: the panel; each id once.
        max_concurrent: episodes in flight at most.
        category: of each task, by its id: what to group by, or None.
        on_done: called with the number of finished episodes after each.

    Raises:
        ValueError: if the panel is empty, or names a task twice, or an episode comes
            back under another task's id.
    """
    repeated = [name for name, n in collections.Counter(task_ids).items() if n > 1]
    if not task_ids or repeated:
        raise ValueError(
            f"a panel needs at least one task, and each of them once; got "
            f"{len(task_ids)}, repeated: {repeated[:3]}"
        )
    grades = category or dict.fromkeys(task_ids)
    labels = {i: "" if grades[i] is None else str(grades[i]) for i in task_ids}
    slots = asyncio.Semaphore(max_concurrent)
    num_done = 0

    async def play(task_id: str) -> TaskResult:
        nonlocal num_done
        async with slots:
            trajectory = await run_episode(task_id)
        if trajectory.task_id != task_id:
            raise ValueError(f"task {task_id!r} came back as {trajectory.task_id!r}")
        num_done += 1
        if on_done is not None:
            on_done(num_done)
        return TaskResult(
            task_id=task_id,
            category=labels[task_id],
            outcome=trajectory.outcome,
            num_steps=len(trajectory.steps),
            episode_return=trajectory.episode_return,
            error=trajectory.error,
        )

    episodes = [asyncio.ensure_future(play(task_id)) for task_id in task_ids]
    try:
        return EvalResult(tuple(await asyncio.gather(*episodes)))
    finally:
        for episode in episodes:  # After an error, no other plays on.
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)


def _proportion(tasks: Sequence[TaskResult]) -> Proportion:
    counted = [task for task in tasks if task.outcome != "aborted"]
    return Proportion(sum(task.outcome == "success" for task in counted), len(counted))


def _order(name: str) -> tuple:
    """Numbers by value, before words."""
    return (0, float(name), name) if name.isdigit() else (1, 0.0, name)
