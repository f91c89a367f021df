"""Times the credit functions on this machine, interleaved, in one table.

python experiments/bench_credit.py
"""

import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from absl import flags

from crbc_jax import command_line, step_advantages
from crbc_jax.advantages import ESTIMATORS, bind
from crbc_jax.graph.batch import build_batch
from crbc_jax.kernels.closure import solve_closure
from crbc_jax.kernels.transitions import empirical_process

REPEATS = flags.DEFINE_integer("repeats", 31, "Timed calls of each function.")


def random_rollouts(
    seed: int,
    num_groups: int,
    num_rollouts: int,
    max_steps: int,
    num_anchors: int,
    min_steps: int = 5,
) -> dict[str, list]:
    """Walks over a line of places with detours; two thirds succeed, some early."""
    rng = np.random.default_rng(seed)
    names = (
        "group_id traj_id step anchor action reward success is_action_valid "
        "response_len milestone_achieved reasonable advancing base_adv"
    ).split()
    columns = {name: [] for name in names}
    for group in range(num_groups):
        for rollout in range(num_rollouts):
            success = bool(rng.random() < 2 / 3)
            length = (
                int(rng.integers(min_steps, max_steps + 1)) if success else max_steps
            )
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

    What else runs on the machine then strikes all of them alike. The call before each
    timed one brings its data back into the cache.
    """
    for function in functions.values():
        jax.block_until_ready(function())  # Compiles.
    seconds = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            jax.block_until_ready(function())
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


def detours(seed: int, num_groups: int, num_anchors: int) -> dict[str, list]:
    """Groups of 8 x 50 steps with just so many distinct anchors, at most 400.

    Rollouts follow one line of places and leave it for detours of their own, as agents
    do: most anchors then have a single successor.
    """
    rng = np.random.default_rng(seed)
    line = 20
    names = ("group_id", "traj_id", "step", "anchor", "action", "reward", "success")
    columns = {name: [] for name in names}
    share = min((num_anchors - line) / 400, 0.99)
    length = max(4.5, share / (1 - share))  # Of a detour, on average.
    leave = share / (length * (1 - share))
    for group in range(num_groups):
        fresh = iter(range(line, num_anchors))
        for rollout in range(8):
            place, path = 0, []
            while len(path) < 50:
                path.append(place)
                place = (place + 1) % line
                if rng.random() < leave:
                    away = min(rng.integers(1, round(2 * length)), 50 - len(path))
                    path += itertools.islice(fresh, max(away, 0))
            for step, anchor in enumerate(path):
                values = (
                    group,
                    (group, rollout),
                    step,
                    f"observation {anchor} " + "of a room, as long as they are " * 10,
                    f"action {rng.integers(3)}",
                    0.0,
                    rollout % 2 == 0,
                )
                for name, value in zip(names, values, strict=True):
                    columns[name].append(value)
    return columns


@functools.partial(jax.jit, static_argnames="size")
def solve_dense(batch, beta: float, size: int):
    """The plain way: M of every group padded to `size` anchors, one solve, residual."""
    process = empirical_process(batch)
    group = jnp.arange(batch.mask.shape[0])[:, None]
    weight = beta * process.weight
    matrix = jnp.zeros((batch.mask.shape[0], size, size))
    matrix = matrix.at[group, batch.source, batch.target].add(weight * process.move)
    right = jnp.zeros(matrix.shape[:2])
    right = right.at[group, batch.source].add(weight * process.win)
    value = jnp.linalg.solve(jnp.eye(size) - matrix, right[..., None])[..., 0]
    error = right + jnp.einsum("gij,gj->gi", matrix, value) - value
    return value, jnp.max(jnp.abs(error), axis=1)


def solve_sparse(batch, beta: float) -> list[np.ndarray]:
    """The same by SciPy's sparse LU, group by group, in float64."""
    values = []
    inner = batch.mask & ~batch.is_last
    wins = batch.mask & batch.is_last & batch.success
    for group, source in enumerate(batch.source):
        rows, moves = batch.mask[group], inner[group]
        size = int(source[rows].max()) + 1
        visits = np.maximum(np.bincount(source[rows], minlength=size), 1)
        tails, heads = source[moves], batch.target[group, moves]
        entries = -beta / visits[tails]
        matrix = scipy.sparse.csc_matrix((entries, (tails, heads)), (size, size))
        right = beta * np.bincount(source[wins[group]], minlength=size) / visits
        matrix += scipy.sparse.identity(size, format="csc")
        values.append(scipy.sparse.linalg.spsolve(matrix, right))
    return values


def closure_table(repeats: int) -> list[str]:
    """The closure against a plain dense solve in its bucket, and SciPy's sparse LU."""
    lines = ["Closure of 16 groups, rows to values; milliseconds: median (range)"]
    lines.append(
        f"{'anchors':>8}{'core':>6}{'closure':>24}{'dense':>27}{'SciPy':>26}"
        f"{'dense/':>9}{'SciPy/':>8}"
    )
    for num_anchors in (64, 128, 256, 400):
        batch, _ = build_batch(detours(0, 16, num_anchors))
        on_device = jax.device_put(batch)
        distinct = int(batch.source.max()) + 1
        size = 1 << (distinct - 1).bit_length()
        expected = solve_sparse(batch, 0.98)
        value = solve_closure(on_device, 0.98).value
        for v, e in zip(value, expected, strict=True):
            np.testing.assert_allclose(v[: len(e)], e, atol=1e-5)
        times = interleaved(
            {
                "closure": functools.partial(solve_closure, on_device, 0.98),
                "dense": functools.partial(solve_dense, on_device, 0.98, size),
                "scipy": functools.partial(solve_sparse, batch, 0.98),
            },
            repeats,
        )
        cells = "".join(
            f"{m:10.2f} ({low:.2f} to {high:.2f})" for m, low, high in times.values()
        )
        closure, dense, sparse = (median for median, _, _ in times.values())
        lines.append(
            f"{distinct:8}{batch.num_core:6} {cells}{dense / closure:9.1f}"
            f"{sparse / closure:8.1f}"
        )
    return lines


def growth_table(repeats: int) -> list[str]:
    """From string anchors to advantages: one update, a large batch, one large group."""
    lines = ["Strings to CRBC advantages, milliseconds: median (lowest to highest)"]
    sizes = {  # Groups, rollouts, longest and shortest of them.
        "16 x 8 x 5-50": (16, 8, 50, 5),
        "256 x 16 x 50": (256, 16, 50, 50),
        "1 x 64 x 200": (1, 64, 200, 200),
    }
    per_row = []
    for name, (groups, rollouts, longest, shortest) in sizes.items():
        columns = random_rollouts(1, groups, rollouts, longest, 35, shortest)
        columns["anchor"] = [
            f"place {a} " + "of a room " * 30 for a in columns["anchor"]
        ]
        rows = len(columns["step"])
        batch, _ = build_batch(columns)
        on_device = jax.device_put(batch)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(batch)) / 2**20
        times = interleaved(
            {
                "whole": lambda c=columns: step_advantages(c),
                "device": lambda b=on_device: ESTIMATORS["crbc"](b),
            },
            max(repeats // 4, 3),
        )
        per_row.append(times["whole"][0] / rows)
        for part, (median, low, high) in times.items():
            lines.append(
                f"{name:>14} {part:>7} {rows:8} rows {median:9.2f} ({low:.2f} to "
                f"{high:.2f}), {1e3 * median / rows:.2f} us a row, batch {size:.1f} MiB"
            )
    small, large, _ = per_row
    lines.append(
        f"a row of the large batch costs {large / small:.2f} x one of the small"
    )
    return lines


def main(_):
    device = jax.devices()[0]
    print(
        f"{device.platform} {device.device_kind}, {os.cpu_count()} cores, "
        f"jax {jax.__version__}, SciPy {scipy.__version__}, NumPy {np.__version__}"
    )
    for table in (closure_table, growth_table, methods_table):
        print("\n" + "\n".join(table(REPEATS.value)), flush=True)


if __name__ == "__main__":
    command_line.start(main, [])
