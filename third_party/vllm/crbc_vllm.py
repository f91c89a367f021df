"""What crbc_jax adds to a vLLM server; runs in vLLM's own environment, without JAX.

`WorkerExtension` loads published weights into a running server, and `Guard` stands
before all of its routes. As a script this module starts a server with both:

    python crbc_vllm.py --model DIR --port 8000 ...    # Arguments of vLLM's API server.

The server listens on the loopback. To open it to other hosts, give `--host` and set
CRBC_VLLM_TOKEN, here and where the trainer runs: its routes load weights and call
methods. With `--end-with-stdin` it ends when standard input does.
"""

import hashlib
import hmac
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import uuid

_CHUNK_BYTES = 2**22
_STOP_SECONDS = 10.0  # Between asking a server to end and killing it.


class WorkerExtension:
    """Methods that vLLM's workers gain; the trainer calls them by /collective_rpc."""

    def load_published(self, directory: str) -> dict[str, float]:
        """Loads the weights of a published directory, all or none of them.

        Raises:
            ValueError: if a file is not the one that the manifest describes; the
                weights are then as they were.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            VocabParallelEmbedding,
        )

        started = time.perf_counter()
        _verify(pathlib.Path(directory))
        verified = time.perf_counter()
        self.reload_weights(weights_path=directory)
        # On CPU a head keeps a packed copy of its weights. That of a tied head would
        # stay the old one: no tensor of the checkpoint bears its name.
        for module in self.get_model().modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)
        return {
            "verify_seconds": verified - started,
            "load_seconds": time.perf_counter() - verified,
        }


def _verify(directory: pathlib.Path) -> None:
    """Compares every file of the manifest by size and SHA-256."""
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    for name, expected in manifest["files"].items():
        path = directory / name
        size = path.stat().st_size
        if size != expected["size"]:
            raise ValueError(f"{path} has {size} bytes, not {expected['size']}")
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != expected["sha256"]:
            raise ValueError(f"{path} is damaged: its SHA-256 is not the manifest's")


class Guard:
    """Refuses requests without the token in CRBC_VLLM_TOKEN, if that is set.

    vLLM's own --api-key leaves the routes open that load weights and call methods.
    Every answer bears an id of this server process: a trainer that sees another one
    than before knows that the server was restarted, and with what weights it began.
    """

    _INSTANCE = uuid.uuid4().hex.encode()

    def __init__(self, app):
        self._app = app
        token = os.environ.get("CRBC_VLLM_TOKEN")
        self._expected = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def send_signed(message):
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"x-instance", self._INSTANCE)]
                message = message | {"headers": headers}
            await send(message)

        given = dict(scope["headers"]).get(b"authorization", b"")
        if self._expected and not hmac.compare_digest(given, self._expected):
            start = {"type": "http.response.start", "status": 401}
            await send_signed(start | {"headers": [(b"content-type", b"text/plain")]})
            body = b"this server needs the token in CRBC_VLLM_TOKEN"
            return await send({"type": "http.response.body", "body": body})
        await self._app(scope, receive, send_signed)


def serve(arguments: list[str]) -> int:
    """Runs a server until it ends; returns its status."""
    ends_with_stdin = "--end-with-stdin" in arguments
    arguments = [text for text in arguments if text != "--end-with-stdin"]
    if not any(text.partition("=")[0] == "--host" for text in arguments):
        arguments += ["--host", "127.0.0.1"]
    elif "CRBC_VLLM_TOKEN" not in os.environ:
        sys.exit("crbc_vllm.py: --host opens the server; set CRBC_VLLM_TOKEN, too")
    folder = str(pathlib.Path(__file__).resolve().parent)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments),
        *("--worker-extension-cls", "crbc_vllm.WorkerExtension"),
        *("--middleware", "crbc_vllm.Guard"),
        # Log-probabilities of the distribution that was sampled from, and no settings
        # of sampling that the trainer does not know of.
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
    ]
    path = os.environ.get("PYTHONPATH")
    environment = os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{path}" if path else folder,
        "VLLM_SERVER_DEV_MODE": "1",  # The routes that pause and load weights.
        "VLLM_NO_USAGE_STATS": "1",
        # Of vLLM for CPUs, which would take half of the memory; GiB.
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    }
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    if ends_with_stdin:
        # Whoever holds the other end: however that process ends, the operating system
        # closes it, and every process of the server goes too.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # It is for the server.

        def stop_when_orphaned():
            sys.stdin.buffer.read()
            _end_group(server)

        threading.Thread(target=stop_when_orphaned, daemon=True).start()
    status = server.wait()
    if ends_with_stdin:
        _end_group(server)
    return status


def _end_group(server: subprocess.Popen) -> None:
    """Ends all processes of this group, which this one leads, itself last."""
    os.killpg(0, signal.SIGTERM)
    try:
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
