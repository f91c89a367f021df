"""Many environments in one process, driven by messages; run as a child by pool.py.

A message is its length (8 bytes, big-endian) and then a pickle. The child answers
each request with one reply, in order, and ends when its input does. Nothing here
imports JAX: a worker starts in a fraction of a second.
"""

import importlib
import os
import pickle
import signal
import sys
from typing import Any, BinaryIO

from crbc_jax import envs

LENGTH_BYTES = 8


class Host:
    """Environments of one kind, each in a numbered slot."""

    def __init__(self, module_name: str, options: dict[str, Any]):
        self._module = importlib.import_module(module_name)
        self._options = envs.build_options(self._module, options)
        self._environments = {}

    def reset(self, slot: int, task_id: str) -> tuple[str, dict[str, Any]]:
        """Starts a task in the slot's environment, which is made if need be."""
        if slot not in self._environments:
            self._environments[slot] = self._module.make(self._options)
        return self._environments[slot].reset(options={"task": task_id})

    def step(
        self, slot: int, action: str
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Steps the slot's environment.

        Raises:
            LookupError: if the slot holds none, since the process is a new one.
        """
        if slot not in self._environments:
            raise LookupError("the episode was lost when its worker was restarted")
        return self._environments[slot].step(action)

    def drop(self, slot: int) -> None:
        """Closes the slot's environment, if it holds one."""
        if environment := self._environments.pop(slot, None):
            try:
                environment.close()
            except Exception as error:  # It is given up, often since it failed before.
                print(f"closing an environment: {describe(error)}", file=sys.stderr)

    def close(self) -> None:
        """Closes every environment."""
        for slot in list(self._environments):
            self.drop(slot)


def describe(error: BaseException) -> str:
    """Returns an exception as one line of text."""
    return f"{type(error).__name__}: {error}"


def encode(message: Any) -> bytes:
    """Returns a message as bytes, its length first."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def main() -> None:
    """Serves requests `(method, slot, argument)` after a first `(module, options)`.

    A reply is `(True, result)` or `(False, reason)`.
    """
    # Ctrl-C reaches all processes of a terminal; the parent decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What environments print must not mix with the replies.
    requests = sys.stdin.buffer
    host = None
    while (message := _read(requests)) is not None:
        try:
            if host is None:
                host, result = Host(*message), None
            else:
                method, slot, argument = message
                result = getattr(host, method)(slot, argument)
            reply = encode((True, result))
        except Exception as error:  # Whatever an environment raises is its failure.
            if host is not None:
                host.drop(slot)
            reply = encode((False, describe(error)))
        replies.write(reply)
        replies.flush()


def _read(requests: BinaryIO) -> Any | None:
    """Returns the next message, or None at the end of the input."""
    length = requests.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    return pickle.loads(requests.read(int.from_bytes(length, "big")))
