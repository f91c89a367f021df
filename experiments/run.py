"""Trains one agent.

    python experiments/run.py --config=configs/quickstart.py --workdir=runs/quickstart

The same command continues a run that was stopped. Any setting of crbc_jax/config.py
can be changed after the config file: `--config.learner.num_updates=60`; repeat
`--config=` first, since overrides before it are an error.
"""

import datetime
import pathlib
import sys

from absl import flags
from ml_collections import config_flags

from crbc_jax import command_line
from crbc_jax.background import Interrupted
from crbc_jax.plan import make_plan

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, and `:variant` if it has any.", lock_config=True
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the run is kept; by default a new folder in runs/."
)


def default_workdir(config_path: str) -> pathlib.Path:
    """Names a new folder after the config file, its variant and the time."""
    name = pathlib.Path(config_path).name.replace(".py", "").replace(":", "-")
    return pathlib.Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def main(_) -> None:
    config_path = flags.FLAGS["config"].config_filename
    workdir = pathlib.Path(_WORKDIR.value or default_workdir(config_path))
    print(make_plan(_CONFIG.value, workdir), flush=True)

    # Only now: this loads Flax, Optax and Orbax, which takes seconds.
    from crbc_jax.train import train

    try:
        train(_CONFIG.value, workdir, command=" ".join(["python", *sys.argv]))
    except Interrupted as stop:
        print("\nstopped; the same command continues", file=sys.stderr)
        sys.exit(128 + stop.signal_number)


if __name__ == "__main__":
    command_line.start(main, ["config=configs/quickstart.py"])
