"""A vLLM server as a child process of this run: started, watched, stopped."""

import asyncio
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time

from crbc_jax.rollout.vllm.client import MODEL, Client
from crbc_jax.types import UserError

_SCRIPT = pathlib.Path(__file__).resolve().parents[3] / "third_party/vllm/crbc_vllm.py"
_PAUSE = 0.5  # Seconds between looks at a server that starts.
_STOP_SECONDS = 20.0


class Server:
    """Holds the process; `start` may be called again after it died.

    Args:
        python: interpreter that has vLLM.
        arguments: of vLLM's API server, besides those that we set.
        token: that its clients show.
        start_timeout: seconds until it must answer.
    """

    def __init__(
        self, python: str, arguments: list[str], *, token: str, start_timeout: float
    ):
        self._command = [python, str(_SCRIPT), "--end-with-stdin", *arguments]
        self._environment = os.environ | {"CRBC_VLLM_TOKEN": token}
        self._start_timeout = start_timeout
        self._process: subprocess.Popen | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        if not _SCRIPT.is_file():
            raise UserError(
                f"{_SCRIPT} is missing: servers are started from a checkout of the "
                "repository (pip install -e .)"
            )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self, directory: pathlib.Path, client: Client) -> None:
        """Starts a server on the weights in `directory`; returns when it answers.

        Raises:
            UserError: if it ends, with what it wrote last, or is too late.
        """
        await self.stop()
        self._log = tempfile.TemporaryFile()
        options = ["--model", str(directory), "--served-model-name", MODEL]
        try:
            self._process = subprocess.Popen(
                [*self._command, *options, "--port", str(self._port)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for us; we then stop it.
            )
        except OSError as error:
            raise UserError(
                f"config.rollout.vllm.python={self._command[0]!r}: {error}"
            ) from error
        deadline = time.monotonic() + self._start_timeout
        while not await client.is_healthy():
            if not self.is_running:
                raise UserError(f"the vLLM server ended: {await self.stop()}")
            if time.monotonic() > deadline:
                raise UserError(
                    f"the vLLM server did not answer in {self._start_timeout:g} s "
                    f"(config.rollout.vllm.start_timeout): {await self.stop()}"
                )
            await asyncio.sleep(_PAUSE)

    async def stop(self) -> str:
        """Ends all its processes; returns the end of what they wrote."""
        if self._process is None:
            return ""
        self._process.stdin.close()  # It ends its process group by itself,
        try:
            await asyncio.to_thread(self._process.wait, _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # or, if it hangs, not.
        except ProcessLookupError:
            pass
        self._process.wait()
        self._process = None
        with self._log as file:
            file.seek(0)
            return file.read()[-2000:].decode(errors="replace")
