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
from crbc_jax.types import UserError

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, and `:variant` if it has any.", lock_config=True
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the run is kept; by default a new folder in runs/."
)


_COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "HOST:PORT of process 0, if the run has several processes and no launcher that "
    "JAX knows (TPU pod, Slurm, Open MPI) started them.",
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "With --coordinator.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "From 0, with --coordinator.")
_MULTI_HOST = flags.DEFINE_boolean(
    "multi_host", False, "On every host of a TPU slice: join the others."
)
_JOIN_TIMEOUT = flags.DEFINE_integer(
    "join_timeout", 300, "Seconds that all processes have to come.", lower_bound=1
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
    import jax

    from crbc_jax import distributed
    from crbc_jax.train import train

    distributed.initialize(
        _COORDINATOR.value,
        _NUM_PROCESSES.value,
        _PROCESS_ID.value,
        is_multi_host=_MULTI_HOST.value,
        timeout=_JOIN_TIMEOUT.value,
    )
    if jax.process_count() > 1 and not _WORKDIR.value:
        raise UserError("--workdir=FOLDER is missing; all processes must share it")
    try:
        train(_CONFIG.value, workdir, command=" ".join(["python", *sys.argv]))
    except Interrupted as stop:
        print("\nstopped; the same command continues", file=sys.stderr)
        sys.exit(128 + stop.signal_number)


if __name__ == "__main__":
    command_line.start(main, ["config=configs/quickstart.py"])
