"""Several processes, one run: each plays a share of the episodes, all train together.

Every process holds the same config and host data, and its own part of the arrays.
Rollouts are the only work that differs; what they bring is gathered in full, in order,
so that an update is the same whatever the number of processes. Nothing communicates
while episodes are played: their lengths differ, and a collective would wait for the
slowest step of all. With one process every function here returns at once.
"""

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from crbc_jax.types import UserError

_T = TypeVar("_T")
_ALL_HERE = b"all here"
_PATIENCE = 10.0  # Seconds beyond the deadline for process 0's last word.


def initialize(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    is_multi_host: bool,
    timeout: int,
) -> None:
    """Joins the processes of a run; to be called before any device is touched.

    Without a coordinator it follows what a TPU slice, Slurm or Open MPI say. If none
    of them started more than one process, and nobody says so, it does nothing.

    Args:
        coordinator: HOST:PORT of process 0, at which all meet.
        num_processes, process_id: given with it.
        is_multi_host: there are several, even if no variable of a launcher tells: on
            the machines of a TPU slice JAX asks the slice itself.
        timeout: seconds that all of them have to come.

    Raises:
        UserError: if some did not, with how many did and the command for all hosts.
    """
    given = (coordinator, num_processes, process_id)
    if any(value is not None for value in given) and None in given:
        raise UserError(
            "--coordinator=HOST:PORT, --num_processes=N and --process_id=I go together"
        )
    if coordinator is None and not (is_multi_host or _has_launcher()):
        return
    if coordinator is not None:
        if not 0 <= process_id < num_processes:
            raise UserError(
                f"--process_id={process_id} must be 0 to {num_processes - 1}, "
                f"--num_processes={num_processes} less 1"
            )
        # JAX ends a process that waits in vain without a word of who is missing.
        _call_roll(coordinator, num_processes, process_id, timeout)
    jax.distributed.initialize(
        coordinator, num_processes, process_id, initialization_timeout=timeout
    )


def _call_roll(address: str, count: int, number: int, timeout: int) -> None:
    """Returns in all processes once all are there; raises in all if some are not."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise UserError(f"--coordinator={address!r} must be HOST:PORT")
    deadline = time.monotonic() + timeout
    try:
        if number == 0:
            missing = _wait_for_others(int(port), count, deadline)
        else:
            missing = _report(host, int(port), number, deadline)
    except OSError as error:
        missing = f"process 0 does not answer at {address} ({error})"
    if missing:
        raise UserError(
            f"the {count} processes of this run did not meet within {timeout} s "
            f"(--join_timeout): {missing}. Start on every host, with I from 0 to "
            f"{count - 1}: python experiments/run.py --config=... --workdir=SHARED "
            f"--coordinator={address} --num_processes={count} --process_id=I"
        )


def _wait_for_others(port: int, count: int, deadline: float) -> str:
    """Of process 0: returns "" when all have reported, else who has not."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("", port)))
        came: dict[int, socket.socket] = {}
        while len(came) < count - 1 and time.monotonic() < deadline:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            with contextlib.suppress(TimeoutError):
                other = stack.enter_context(server.accept()[0])
                came[int(other.recv(16) or 0)] = other
        absent = sorted(set(range(1, count)) - set(came))
        missing = f"{len(came) + 1} came, not {absent}" if absent else ""
        for other in came.values():
            other.sendall(missing.encode() or _ALL_HERE)
        return missing


def _report(host: str, port: int, number: int, deadline: float) -> str:
    """Of the others: returns "" when process 0 says that all are there."""
    while True:
        left = max(deadline - time.monotonic(), 0.01)
        try:
            with socket.create_connection((host, port), timeout=left) as server:
                server.settimeout(left + _PATIENCE)  # It knows best who is missing.
                server.sendall(str(number).encode())
                answer = server.recv(4096)
                return "" if answer == _ALL_HERE else answer.decode()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def share(count: int) -> range:
    """This process' part of `count` items, in order; parts differ by one at most."""
    number, total = jax.process_index(), jax.process_count()
    return range(count * number // total, count * (number + 1) // total)


def gather(value: _T) -> list[_T]:
    """What each process brings, in their order; all of them call it."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.int64(len(data))))
    padded = np.zeros(_bucket(int(sizes.max())), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [
        pickle.loads(row[:size].tobytes())
        for row, size in zip(rows, sizes, strict=True)
    ]


def gather_items(items: Sequence[_T]) -> list[_T]:
    """The items of all processes, one after the other."""
    return [item for part in gather(list(items)) for item in part]


def agree(number: int) -> int:
    """The largest of the processes' numbers: has any of them been asked to stop?"""
    return max(gather(number))


def check_equal(value: Any, what: str) -> None:
    """Refuses to go on with processes that were started in different ways.

    Raises:
        UserError: naming `what` differs.
    """
    values = gather(value)
    if any(other != values[0] for other in values):
        raise UserError(
            f"the processes of this run do not have the same {what}: start all of "
            "them with the same command and data"
        )


def place(tree: Any, shardings: Any) -> Any:
    """Puts host or local arrays, equal in all processes, on all devices."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def put(leaf, sharding):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        data = np.asarray(leaf)
        return jax.make_array_from_callback(data.shape, sharding, data.__getitem__)

    return jax.tree.map(put, tree, shardings)


def local_copy(tree: Any) -> Any:
    """Whole arrays on this process' first device, of arrays that lie on all.

    With one process the arrays as they are.
    """
    if jax.process_count() == 1:
        return tree
    mesh = jax.tree.leaves(tree)[0].sharding.mesh
    whole = NamedSharding(mesh, PartitionSpec())
    gathered = jax.jit(lambda x: x, out_shardings=whole)(tree)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), gathered)


def _has_launcher() -> bool:
    """Whether a launcher started several processes."""
    if int(os.environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in os.environ:
        return True
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return True
    return "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")


def _bucket(size: int) -> int:
    """The next power of two: each size compiles anew."""
    return 1 << max(size - 1, 1).bit_length()
