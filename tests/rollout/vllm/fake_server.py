"""A stand-in for third_party/vllm/crbc_vllm.py: its routes and faults, no model.

A reply's tokens are the first bytes of the loaded weights' SHA-256, so that a test sees
which weights answered. As a script it serves a port until standard input ends.
"""

import argparse
import hashlib
import json
import os
import pathlib
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse


def fingerprint(directory) -> list[int]:
    """The tokens by which the weights in `directory` answer."""
    data = (pathlib.Path(directory) / "model.safetensors").read_bytes()
    return [byte % 16 for byte in hashlib.sha256(data).digest()[:3]]


class FakeServer(ThreadingHTTPServer):
    """Serves on the loopback; `faults` maps a path to what it does wrong, each once."""

    daemon_threads = True

    def __init__(self, directory, port=0, token=""):
        super().__init__(("127.0.0.1", port), _Handler)
        self.token = token
        self.faults: dict[str, list[str]] = {}
        self.requests: list[dict] = []
        self.restart(directory)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def restart(self, directory) -> None:
        """As if the process had been started anew on these weights."""
        self.tokens = fingerprint(directory)
        self.version = "default"
        self.instance = uuid.uuid4().hex

    def handle_error(self, request, client_address):
        pass  # A client that has given up.


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer(None)

    def do_POST(self):
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(json.loads(data) if data else None)

    def log_message(self, *_):
        pass

    def _answer(self, body):
        server, path = self.server, urlparse(self.path).path
        wanted = f"Bearer {server.token}"
        if server.token and self.headers.get("Authorization") != wanted:
            return self._send(401, b"needs the token")
        fault = server.faults.get(path, [])
        fault = fault.pop(0) if fault else ""
        if fault == "hang":
            time.sleep(30)
        if fault == "500":
            return self._send(500, b'{"error": "out of memory"}')
        if fault == "half":
            return self._send(200, b'{"choices": [{"token_', promised=500)
        if fault == "die":
            os._exit(1)
        if fault == "wrong":
            return self._send(200, b'{"choices": []}')
        result = {}
        if path == "/collective_rpc":
            server.tokens = fingerprint(body["args"][0])
        elif path == "/update_weight_version":
            server.version = body["new_version"]
        elif path == "/weight_info":
            result = {"weight_version": server.version}
        elif path == "/v1/completions":
            server.requests.append(body)
            tokens = server.tokens[: body["max_tokens"]]
            result = {
                "choices": [
                    {
                        "token_ids": tokens,
                        "logprobs": {"token_logprobs": [-1.5] * len(tokens)},
                        "finish_reason": "length",
                    }
                ]
            }
        self._send(200, json.dumps(result).encode())

    def _send(self, status, data, promised=None):
        self.send_response(status)
        self.send_header("Content-Length", str(promised or len(data)))
        self.send_header("x-instance", self.server.instance)
        self.end_headers()
        self.wfile.write(data)
        if promised:
            self.close_connection = True


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--port", type=int)
    arguments, _ = parser.parse_known_args()
    fake = FakeServer(arguments.model, arguments.port, os.environ["CRBC_VLLM_TOKEN"])
    if os.environ.get("FAKE_DIES"):
        sys.exit("no room for the KV cache")
    sys.stdin.buffer.read()
