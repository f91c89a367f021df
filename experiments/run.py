"""Trains one agent.

    python experiments/run.py --config=configs/quickstart.py --workdir=runs/quickstart

The same command continues a run that was stopped. Any setting of crbc_jax/config.py
can be changed after the config file: `--config.learner.num_updates=60`; repeat
`--config=` first, since overrides before it are an error.
"""

import datetime
import pathlib
import signal
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from crbc_jax.plan import make_plan
from crbc_jax.types import UserError

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
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax tells of every file it writes.
    print(make_plan(_CONFIG.value, workdir), flush=True)

    # Only now: these load JAX, Flax, Optax and Orbax, which takes seconds.
    from crbc_jax.train import Interrupted, train

    try:
        train(_CONFIG.value, workdir, command=" ".join(["python", *sys.argv]))
    except Interrupted as stop:
        print("\nstopped; the same command continues", file=sys.stderr)
        sys.exit(128 + stop.signal_number)


def parse_flags(argv):
    """Reads the command line; a config that cannot be loaded is a one-line error."""
    try:
        flags.FLAGS(argv)
        if _CONFIG.value is None:
            raise flags.IllegalFlagValueError(
                "--config is missing, e.g. --config=configs/quickstart.py"
            )
        return argv
    except (OSError, AttributeError, TypeError, ValueError, flags.Error) as error:
        sys.exit(f"run.py: {error}")


if __name__ == "__main__":
    try:
        app.run(main, flags_parser=parse_flags)
    except (UserError, OSError) as error:
        sys.exit(f"run.py: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
