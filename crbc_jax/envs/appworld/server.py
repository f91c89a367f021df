"""One of AppWorld's own environment servers, as a child process on this machine."""

import contextlib
import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

# Serves on the loopback only, and ends when standard input does: with the process that
# holds its other end, however that ends.
_PROGRAM = """
import os, sys, threading
import uvicorn
from appworld import update_root
port, root = int(sys.argv[1]), sys.argv[2]
update_root(root)
def end_with_parent():
    sys.stdin.buffer.read()
    os._exit(0)
threading.Thread(target=end_with_parent, daemon=True).start()
from appworld.serve.environment import app
uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
"""
_PAUSE = 0.1  # Seconds between looks at a server that starts.


class Server:
    """Starts a server, calls it, and stops it; a context manager.

    It holds one task at a time, and freezes the clock of its process for it.

    Args:
        python: interpreter that has the package appworld.
        root: AppWorld's root directory.
        start_timeout: seconds until it must answer.
        call_timeout: seconds that a call may take.

    Raises:
        RuntimeError: if it does not start, with the end of what it wrote.
    """

    def __init__(
        self, python: str, root: str, *, start_timeout: float, call_timeout: float
    ):
        self._call_timeout = call_timeout
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [python, "-c", _PROGRAM, str(port), root],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )
        deadline = time.monotonic() + start_timeout
        while not self._answers():
            is_late = time.monotonic() > deadline
            if is_late or self._process.poll() is not None:
                text = self.close()[-2000:]
                what = f"did not answer in {start_timeout:g} s" if is_late else "ended"
                raise RuntimeError(f"AppWorld's server {what}: {text}")
            time.sleep(_PAUSE)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def call(self, path: str, **body: Any) -> Any:
        """Returns the `output` of POST /path.

        Raises:
            RuntimeError: with the server's answer, if it refuses.
            TimeoutError: if it takes too long.
        """
        request = urllib.request.Request(
            f"{self._url}/{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self._call_timeout) as answer:
                return json.load(answer)["output"]
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise RuntimeError(
                f"AppWorld's server answers {error.code} to /{path}: {text}"
            ) from error

    def close(self) -> str:
        """Ends the process; returns what it wrote to standard error."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        with self._errors as file:
            file.seek(0)
            return file.read().decode(errors="replace")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(self._url, timeout=self._call_timeout):
                return True
        return False
