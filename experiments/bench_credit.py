"""Times the credit functions on this machine, interleaved, in one table.

python experiments/bench_credit.py
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np
from absl import app, flags

from crbc_jax.advantages import ESTIMATORS, bind
from crbc_jax.graph.batch import build_batch

REPEATS = flags.DEFINE_integer("repeats", 31, "Timed calls of each function.")


def random_rollouts(
    seed: int, num_groups: int, num_rollouts: int, max_steps: int, num_anchors: int
) -> dict[str, list]:
    """Walks over a line of places with detours; two thirds succeed in time."""
    rng = np.random.default_rng(seed)
    names = (
        "group_id traj_id step anchor action reward success is_action_valid "
        "response_len milestone_achieved reasonable advancing base_adv"
    ).split()
    columns = {name: [] for name in names}
    for group in range(num_groups):
        for rollout in range(num_rollouts):
            success = bool(rng.random() < 2 / 3)
            length = int(rng.integers(5, max_steps)) if success else max_steps
            anchor = 0
            for step in range(length):
                action = int(rng.integers(3))
                values = (
                    group,
                    (group, rollout),
                    step,
                    anchor,
                    action,
                    10.0 * (success and step == length - 1),
                    success,
                    rng.random() < 0.9,
                    int(rng.integers(1, 60)),
                    rng.random() < 0.1,
                    rng.random() < 0.8,
                    rng.random() < 0.3,
                    float(success) - 0.3,
                )
                for name, value in zip(names, values, strict=True):
                    columns[name].append(value)
                jump = rng.random() < 0.1
                moved = int(rng.integers(num_anchors)) if jump else anchor + action - 1
                anchor = min(max(moved, 0), num_anchors - 1)
    return columns


def interleaved(
    functions: Mapping[str, Callable], repeats: int
) -> dict[str, tuple[float, float, float]]:
    """Median, lowest and highest milliseconds of each; rounds alternate the functions.

    What else runs on the machine then strikes all of them alike.
    """
    for function in functions.values():
        jax.block_until_ready(function())  # Compiles.
    seconds = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(time.perf_counter() - start)
    return {
        name: (1e3 * statistics.median(s), 1e3 * min(s), 1e3 * max(s))
        for name, s in seconds.items()
    }


def methods_table(repeats: int) -> list[str]:
    """Every method on one update of 16 groups x 8 rollouts x up to 50 steps."""
    columns = random_rollouts(0, 16, 8, 50, num_anchors=35)
    batch, _ = build_batch(columns)
    batch = jax.device_put(batch)
    functions = {name: functools.partial(bind(name, {}), batch) for name in ESTIMATORS}
    times = interleaved(functions, repeats)
    crbc = times["crbc"][0]
    lines = [f"Methods, {len(columns['step'])} rows, milliseconds on the device"]
    lines.append(f"{'method':24}{'median':>9}{'lowest':>9}{'highest':>9}{'/ crbc':>9}")
    for name, (median, lowest, highest) in sorted(times.items(), key=lambda i: i[1]):
        lines.append(
            f"{name:24}{median:9.2f}{lowest:9.2f}{highest:9.2f}{median / crbc:9.2f}"
        )
    return lines


def main(_):
    device = jax.devices()[0]
    print(f"{device.platform} {device.device_kind}, jax {jax.__version__}")
    print("\n".join(methods_table(REPEATS.value)))


if __name__ == "__main__":
    app.run(main)
