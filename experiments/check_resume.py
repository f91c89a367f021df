"""Kills a run at random moments; what comes out must be the same, bit for bit.

    python experiments/check_resume.py --kills=20 --max_policy_lag=1

Trains once without a stop, and then as often as it takes to kill `--kills` times with
SIGKILL, continued by the same command; compares parameters, metrics and rollouts.
"""

import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from crbc_jax import command_line
from crbc_jax.checkpoint import Checkpointer
from crbc_jax.learner.learner import make_learner
from crbc_jax.learner.sharding import make_mesh
from crbc_jax.metrics import comparable, read_metrics
from crbc_jax.models.pretrained import load_policy
from crbc_jax.types import TrainState

_CONFIG = flags.DEFINE_string("config", "configs/quickstart.py:smoke", "Config file.")
_KILLS = flags.DEFINE_integer("kills", 20, "Kills in all.", 1)
_LAG = flags.DEFINE_integer("max_policy_lag", 0, "Of the runs: 0 or 1.", 0, 1)
_OVERRIDES = flags.DEFINE_multi_string(
    "override", [], "Further config, such as --override=learner.num_updates=4."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the random moments.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where runs go; else a temporary one.")

_RUN = pathlib.Path(__file__).parent / "run.py"


def command(workdir: pathlib.Path) -> list[str]:
    """The one command that starts and continues the run."""
    lag = [f"--config.rollout.max_policy_lag={_LAG.value}"]
    if _LAG.value:
        lag.append("--config.learner.old_logprobs=sampled")
    more = [f"--config.{override}" for override in _OVERRIDES.value]
    config = f"--config={_CONFIG.value}"
    return [sys.executable, str(_RUN), config, *lag, *more, f"--workdir={workdir}"]


def run_killed(
    workdir: pathlib.Path,
    max_kills: int,
    usual_seconds: float,
    moments: random.Random,
) -> int:
    """Runs to the end, killed at moments spread over the whole life of a process.

    Returns how often it was killed: the end may come first.
    """
    for kills in range(max_kills):
        delay = moments.uniform(0.0, usual_seconds)
        process = subprocess.Popen(command(workdir), stdout=subprocess.DEVNULL)
        try:
            process.wait(timeout=delay)
            return kills
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            rows = read_metrics(workdir)
            reached = f"update {rows[-1]['step']}" if rows else "no update"
            print(f"{workdir.name}: killed after {delay:.1f} s, at {reached}")
    subprocess.run(command(workdir), stdout=subprocess.DEVNULL, check=True)
    return max_kills


def differences(straight: pathlib.Path, killed: pathlib.Path) -> list[str]:
    """Says what is not equal; empty if nothing is."""
    found = []
    rows = [[comparable(row) for row in read_metrics(w)] for w in (straight, killed)]
    if rows[0] != rows[1]:
        found.append("metrics.jsonl")
    names = [{p.name for p in w.glob("rollouts/*")} for w in (straight, killed)]
    if names[0] != names[1]:
        found.append(f"rollout files {names[0] ^ names[1]}")
    for name in sorted(names[0] & names[1]):
        contents = [(w / "rollouts" / name).read_bytes() for w in (straight, killed)]
        if contents[0] != contents[1]:
            found.append(f"rollouts/{name}")
    states = [jax.tree.leaves_with_path(read_state(w)) for w in (straight, killed)]
    for (name, one), (_, other) in zip(*states, strict=True):
        if np.asarray(one).tobytes() != np.asarray(other).tobytes():
            found.append(jax.tree_util.keystr(name))
    return found


def read_state(workdir: pathlib.Path) -> TrainState:
    """The newest state of a run, optimiser and all."""
    config = ConfigDict(json.loads((workdir / "config.json").read_text()))
    decoder_config, _ = load_policy(config.model)
    learner = make_learner(config, decoder_config, make_mesh(**config.mesh))
    checkpoints = Checkpointer(workdir, keep_last=1)
    return checkpoints.restore(checkpoints.latest(), learner.abstract_state)[0]


def main(_) -> None:
    folder = pathlib.Path(_WORKDIR.value or tempfile.mkdtemp(prefix="check_resume-"))
    straight, moments = folder / "straight", random.Random(_SEED.value)
    started = time.monotonic()
    subprocess.run(command(straight), stdout=subprocess.DEVNULL, check=True)
    usual_seconds = time.monotonic() - started
    kills = runs = 0
    while kills < _KILLS.value:
        killed = folder / f"killed{runs}"
        kills += run_killed(killed, _KILLS.value - kills, usual_seconds, moments)
        if found := differences(straight, killed):
            sys.exit(f"check_resume.py: {killed}: these differ: {', '.join(found)}")
        runs += 1
    print(f"equal bit for bit after {kills} kills in {runs} runs: {folder}")


if __name__ == "__main__":
    command_line.start(main, [])
