"""Checks that an environment works here, and how fast.

    python experiments/check_env.py --env=sokoban
    python experiments/check_env.py --env=sokoban --option=size=8 --option=num_boxes=2

Says what is installed, plays a random agent and the scripted expert on held-out
tasks, and prints success, steps a second and reset times. Exits with 1 if a package
is missing or the expert does worse than it is known to.
"""

import ast
import importlib.metadata
import sys
import time

import numpy as np
from absl import app, flags

from crbc_jax import envs

_ENV = flags.DEFINE_string("env", "sokoban", "A row of crbc_jax.envs.ENVIRONMENTS.")
_OPTION = flags.DEFINE_multi_string(
    "option", [], "FIELD=VALUE of the environment's options; may be repeated."
)
_NUM_TASKS = flags.DEFINE_integer("tasks", 256, "Held-out tasks to play.", 1)

# Packages that each environment needs, and the share of tasks that its expert solves.
_PACKAGES = {
    "alfworld": ("gymnasium", "alfworld", "textworld", "pyyaml"),
    "appworld": ("gymnasium",),
    "sokoban": ("gymnasium", "numpy"),
    "webshop": ("gymnasium", "numpy", "rapidfuzz"),
}
_BLIND_ACTIONS = ["print(1)"]  # Where an environment lists none: AppWorld runs code.
# WebShop's reward gives 4 % of the official goals' own products no full marks, whatever
# options are chosen; all generated goals can be met. Nobody plays AppWorld.
_EXPERT_SUCCESS = {"alfworld": 1.0, "appworld": None, "sokoban": 1.0, "webshop": 0.95}


def parse_options(assignments: list[str]) -> dict:
    """Reads FIELD=VALUE texts; a value that is no Python literal is a string."""
    options = {}
    for assignment in assignments:
        field, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"--option={assignment!r}: must be FIELD=VALUE")
        try:
            options[field] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            options[field] = value
    return options


def print_packages(name: str) -> bool:
    """Prints the version of each package; returns whether all are there."""
    complete = True
    for package in _PACKAGES.get(name, ()):
        try:
            print(f"  {package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {package} is missing: pip install {package}")
            complete = False
    return complete


def play_random(env, task_ids) -> tuple[float, float, np.ndarray]:
    """Returns success rate, steps a second, and the seconds of each reset."""
    wins, steps, step_seconds, reset_seconds = 0, 0, 0.0, []
    for index, task_id in enumerate(task_ids):
        rng = np.random.default_rng([0, index])
        started = time.perf_counter()
        _, info = env.reset(options={"task": task_id})
        reset_seconds.append(time.perf_counter() - started)
        is_over = False
        while not is_over:
            action = str(rng.choice(info["admissible_actions"] or _BLIND_ACTIONS))
            started = time.perf_counter()
            _, _, terminated, truncated, info = env.step(action)
            step_seconds += time.perf_counter() - started
            steps += 1
            is_over = terminated or truncated
        wins += info["won"]
    return wins / len(task_ids), steps / step_seconds, np.array(reset_seconds)


def play_expert(env, name: str, task_ids, options: dict) -> float:
    """Replays the expert's actions in `env`; returns its success rate.

    A demonstration whose observations the environment does not repeat is a failure.
    """
    wins = 0
    for task_id in task_ids:
        try:
            steps = envs.expert(name, task_id, **options)
        except ValueError as error:
            print(f"  {error}")
            continue
        observation, info = env.reset(options={"task": task_id})
        same = True
        for step in steps:
            same = same and observation == step.observation
            observation, _, _, _, info = env.step(step.action)
        wins += same and info["won"]
    return wins / len(task_ids)


def main(_) -> None:
    name, options = _ENV.value, parse_options(_OPTION.value)
    print(f"{name}: packages")
    if not print_packages(name):
        sys.exit(1)
    task_set = envs.tasks(name, "eval", count=_NUM_TASKS.value, **options)
    print(f"{len(task_set.ids)} held-out tasks, digest {task_set.digest[:12]}")
    env = envs.make(name, **options)
    success, steps_per_second, resets = play_random(env, task_set.ids)
    print(f"random agent: {success:.1%} solved, {steps_per_second:,.0f} steps/s")
    milliseconds = 1000 * np.quantile(resets, [0.5, 0.95, 1.0])
    print(
        "resets: {:.2f} ms median, {:.2f} ms 95 %, {:.2f} ms most".format(*milliseconds)
    )
    expected = _EXPERT_SUCCESS.get(name, 1.0)
    if expected is None:
        env.close()
        print("expert: there is none")
        return
    success = play_expert(env, name, task_set.ids, options)
    env.close()
    print(f"expert: {success:.1%} solved, {expected:.1%} expected")
    if success < expected:
        sys.exit(1)


if __name__ == "__main__":
    try:
        app.run(main)
    except ValueError as error:
        sys.exit(f"check_env.py: {error}")
