"""Compares estimators on one task: same warm start, levels and seeds for each.

    python experiments/compare.py --config=configs/quickstart.py:hard \
        --estimators=grpo,crbc --seeds=0,1,2,3,4

Writes compare.md, compare.json and compare.png into --workdir. Overrides such as
`--config.learner.num_updates=20` apply to every run. The same command continues a
comparison that was stopped: finished runs are kept, the others resume.
"""

import itertools
import json
import math
import pathlib
import subprocess
import sys

from absl import flags
from ml_collections import config_flags

from crbc_jax import command_line
from crbc_jax.advantages import ANNOTATED, ESTIMATORS
from crbc_jax.types import UserError

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, and `:variant` if it has any.", lock_config=True
)
_ESTIMATORS = flags.DEFINE_list(
    "estimators", ["grpo", "crbc"], "Estimators to compare."
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "Seeds of each.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/compare", "Where all runs are kept.")

_RUN = pathlib.Path(__file__).parent / "run.py"
# Two-sided 95 % quantiles of Student's t by degrees of freedom, 1 to 30.
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def summarise(values: list[float]) -> dict[str, float]:
    """Mean, sample standard deviation and half the 95 % t-interval over seeds."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return {"mean": mean, "std": 0.0, "half_width": float("nan"), "count": 1}
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1))
    half_width = _T_95[min(count - 1, len(_T_95)) - 1] * std / math.sqrt(count)
    return {"mean": mean, "std": std, "half_width": half_width, "count": count}


def read_success(workdir: pathlib.Path) -> dict[int, float]:
    """Held-out success by update, from a run's metrics.jsonl."""
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {
        row["step"]: row["eval/success_rate"]
        for row in rows
        if "eval/success_rate" in row
    }


def run(workdir: pathlib.Path, overrides: list[str]) -> None:
    """Trains, or finishes training, one run in a process of its own."""
    config = [a for a in sys.argv[1:] if a.startswith(("--config", "-config"))]
    command = [sys.executable, str(_RUN), *config, *overrides, f"--workdir={workdir}"]
    if code := subprocess.run(command).returncode:
        raise UserError(f"{' '.join(command)} ended with exit status {code}")


def draw(path: pathlib.Path, curves: dict[str, dict[int, dict[str, float]]]) -> None:
    """One line an estimator: mean over seeds, and its 95 % interval as a band."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, curve in curves.items():
        updates = sorted(curve)
        mean = [curve[u]["mean"] for u in updates]
        half_width = [curve[u]["half_width"] for u in updates]
        (line,) = axes.plot(updates, mean, marker="o", label=name)
        low = [m - h for m, h in zip(mean, half_width, strict=True)]
        high = [m + h for m, h in zip(mean, half_width, strict=True)]
        axes.fill_between(updates, low, high, alpha=0.2, color=line.get_color())
    axes.set(xlabel="update", ylabel="held-out success", ylim=(0, 1))
    axes.legend(title="mean and 95 % interval over seeds")
    figure.savefig(path, dpi=150)


def table(curves: dict[str, dict[int, dict[str, float]]]) -> str:
    """Markdown: a row an estimator, a column an update."""
    updates = sorted(next(iter(curves.values())))
    lines = [
        "| estimator | " + " | ".join(f"update {u}" for u in updates) + " |",
        "| --- |" + " --- |" * len(updates),
    ]
    for name, curve in curves.items():
        cells = [
            f"{c['mean']:.3f} ± {c['half_width']:.3f} (std {c['std']:.3f})"
            for c in (curve[u] for u in updates)
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(_) -> None:
    known = sorted(set(ESTIMATORS) - set(ANNOTATED))
    for name in _ESTIMATORS.value:
        if name not in known:
            raise UserError(f"--estimators: {name!r} not in {known}")
    for seed in _SEEDS.value:
        if not seed.isdecimal():
            raise UserError(f"--seeds: {seed!r} must be a whole number, e.g. 0,1,2")
    for flag in (_ESTIMATORS, _SEEDS):
        if not flag.value or len(set(flag.value)) < len(flag.value):
            raise UserError(
                f"--{flag.name}={','.join(flag.value)}: give at least one, each once"
            )
    workdir = pathlib.Path(_WORKDIR.value)
    success = {name: {} for name in _ESTIMATORS.value}
    for seed in _SEEDS.value:
        warm = workdir / f"warm-start-{seed}"
        run(warm, [f"--config.seed={seed}", "--config.learner.num_updates=0"])
        for name in _ESTIMATORS.value:
            folder = workdir / f"{name}-{seed}"
            overrides = [
                f"--config.seed={seed}",
                f"--config.advantage.name={name}",
                f"--config.warm_start.directory={warm}",
            ]
            run(folder, overrides)
            success[name][seed] = read_success(folder)

    curves = {
        name: {
            update: summarise([runs[seed][update] for seed in _SEEDS.value])
            for update in next(iter(runs.values()))
        }
        for name, runs in success.items()
    }
    # Pairs share everything but the estimator, so their difference is the sharp test.
    paired = {
        f"{second} - {first}": {
            update: summarise(
                [
                    success[second][seed][update] - success[first][seed][update]
                    for seed in _SEEDS.value
                ]
            )
            for update in curves[first]
        }
        for first, second in itertools.combinations(success, 2)
    }
    text = (
        f"{table(curves)}\n\nPaired by seed:\n\n{table(paired)}"
        if paired
        else (table(curves))
    )
    (workdir / "compare.md").write_text(text + "\n")
    (workdir / "compare.json").write_text(
        json.dumps({"success": success, "curves": curves, "paired": paired}, indent=1)
    )
    draw(workdir / "compare.png", curves)
    print(f"\n{text}\n\nplot: {workdir / 'compare.png'}")


if __name__ == "__main__":
    command_line.start(main, ["config=configs/quickstart.py:hard"])
