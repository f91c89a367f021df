"""Kills a run at random moments; what comes out must be the same, bit for bit.

    python experiments/check_resume.py --kills=20 --max_policy_lag=1

Trains once without a stop, and once killed with SIGKILL `--kills` times and continued
by the same command; then compares parameters, metrics and rollouts.
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
from crbc_jax.models.pretrained import load_model
from crbc_jax.types import TrainState

_CONFIG = flags.DEFINE_string("config", "configs/quickstart.py:smoke", "Config file.")
_KILLS = flags.DEFINE_integer("kills", 20, "How often the run is killed.", 1)
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


def run_killed(workdir: pathlib.Path, usual_seconds: float) -> None:
    """Runs to the end, killed at moments spread over the whole life of a process."""
    moments = random.Random(_SEED.value)
    for number in range(_KILLS.value):
        delay = moments.uniform(0.0, usual_seconds)
        process = subprocess.Popen(command(workdir), stdout=subprocess.DEVNULL)
        try:
            code = process.wait(timeout=delay)
            print(f"kill {number}: the run ended before, with exit status {code}")
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            rows = read_metrics(workdir)
            reached = rows[-1]["step"] if rows else "no update"
            print(f"kill {number}: after {delay:.1f} s, at {reached}", flush=True)
    subprocess.run(command(workdir), stdout=subprocess.DEVNULL, check=True)


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
    decoder_config, _ = load_model(config.model.directory)
    learner = make_learner(config, decoder_config, make_mesh(**config.mesh))
    checkpoints = Checkpointer(workdir, keep_last=1)
    return checkpoints.restore(checkpoints.latest(), learner.abstract_state)[0]


def main(_) -> None:
    folder = pathlib.Path(_WORKDIR.value or tempfile.mkdtemp(prefix="check_resume-"))
    straight, killed = folder / "straight", folder / "killed"
    started = time.monotonic()
    subprocess.run(command(straight), stdout=subprocess.DEVNULL, check=True)
    run_killed(killed, usual_seconds=time.monotonic() - started)
    if found := differences(straight, killed):
        sys.exit(f"check_resume.py: {folder}: these differ: {', '.join(found)}")
    print(f"equal bit for bit after {_KILLS.value} kills: {folder}")


if __name__ == "__main__":
    command_line.start(main, [])
