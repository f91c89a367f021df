"""Compiles a run for devices that are elsewhere, and says whether it fits them.

    python experiments/compile.py --config=configs/alfworld.py:7b --topology=v5e:4x4

Compiles training step, publishing, decoding and credit for a slice of TPUs on any CPU
machine that has their compiler (`pip install -e ".[tpu]"`, in an environment of its
own), in minutes; nothing runs on a TPU. `--topology=cuda:8` lowers training step and
credit for eight GPUs: it needs no compiler, hence says nothing of memory. The exit
status is 1 if a phase does not fit or credit communicates.
"""

import os
import sys

# Before JAX is loaded. There is no TPU to ask; its compiler is told of none, too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_WORKER_ID", "0")
os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
os.environ.setdefault("TPU_LOG_DIR", "disabled")

import jax  # noqa: E402
from absl import flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from crbc_jax import command_line  # noqa: E402
from crbc_jax.models.config import load_shape  # noqa: E402
from crbc_jax.types import UserError  # noqa: E402

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, and `:variant` if it has any.", lock_config=True
)
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "A slice of TPUs, as v5e:4x4, or cuda:NUMBER."
)


def lower_for_cuda(config, model, count: str) -> None:
    from crbc_jax import ahead_of_time

    if not count.isdecimal() or int(count) < 1:
        raise UserError(
            f"--topology=cuda:{count}: a number of GPUs is needed, as cuda:8"
        )
    jax.config.update("jax_num_cpu_devices", int(count))
    sizes = ahead_of_time.lower_for_cuda(config, model, jax.devices())
    for name, size in sizes.items():
        print(f"{name:>14}  lowered for CUDA, {size / 2**20:.1f} MiB of StableHLO")


def compile_for_tpu(config, model, topology: str) -> bool:
    """Prints a table; says whether everything is as it must be."""
    from crbc_jax import ahead_of_time
    from crbc_jax.ahead_of_time import GIB

    devices = ahead_of_time.topology_devices(topology)
    chip = ahead_of_time.chip_of(devices[0])
    print(
        f"{len(devices)} x {devices[0].device_kind}: {chip.memory_gib} GiB, "
        f"{chip.peak_flops / 1e12:.0f} TFLOP/s in bfloat16 each"
    )
    cost = ahead_of_time.step_cost(config, model, devices)
    print(
        f"an optimiser step of {cost.tokens:,} tokens: {cost.flops / 1e15:.2f} PFLOP; "
        f"at the chips' peak {cost.flops / chip.peak_flops / len(devices):.2f} s"
    )
    print(f"\n{'GiB a device':>14}  program  resident  total")
    is_right = True
    host = ahead_of_time.host_devices(topology)
    for phase in ahead_of_time.compile_phases(config, model, devices, host):
        fits = not phase.error and phase.total <= chip.memory_gib * GIB
        communicates = phase.name == "credit" and phase.collectives
        is_right = is_right and fits and not communicates
        sizes = f"{phase.program / GIB:7.2f}  {phase.resident / GIB:8.2f}  "
        sizes += f"{phase.total / GIB:5.2f}"
        collectives = ", ".join(
            f"{count} {name}" for name, count in sorted(phase.collectives.items())
        )
        print(
            f"{phase.name:>14}  {sizes}  {'fits' if fits else 'DOES NOT FIT'}; "
            f"{collectives or 'no collective'}; compiled in {phase.seconds:.0f} s"
            + f"\n{phase.error}"
            * bool(phase.error),
            flush=True,
        )
    return is_right


def main(_) -> None:
    config, topology = _CONFIG.value, _TOPOLOGY.value
    model = load_shape(config.model.directory)
    if topology.startswith("cuda:"):
        lower_for_cuda(config, model, topology.removeprefix("cuda:"))
    elif not compile_for_tpu(config, model, topology):
        sys.exit(1)


if __name__ == "__main__":
    command_line.start(main, ["config=configs/alfworld.py:7b", "topology=v5e:4x4"])
