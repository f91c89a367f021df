"""The Engine that spreads requests over vLLM servers, with current weights on each.

Every request goes to the server that has fewest. One that fails is repeated, after its
server was looked at: a managed server that died is started anew on the current
weights, and any server that turns out to be another process than the one that took
them gets them again, before it answers anything that is trained on.
"""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from crbc_jax.models.config import DecoderConfig
from crbc_jax.rollout.engine import Completion, Request
from crbc_jax.rollout.vllm.client import Client
from crbc_jax.rollout.vllm.publishing import Publisher
from crbc_jax.rollout.vllm.server import Server
from crbc_jax.types import UserError

_STATS = (
    "requests",
    "retries",
    "restarts",
    "prompt_tokens",
    "response_tokens",
    "seconds",
)


@dataclasses.dataclass
class _Replica:
    """One server, and what we know of it."""

    client: Client
    server: Server | None  # None: somebody else's.
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    was_started: bool = False
    num_running: int = 0
    is_current: bool = False  # It has confirmed the current weights.


class VllmEngine:
    """See `crbc_jax.rollout.engine.Engine`; made in the event loop that uses it.

    Args:
        model: shape of the policy.
        source: its model directory, a path or "preset:NAME".
        settings: config.rollout.vllm.
        max_tokens: longest prompt and reply together.
    """

    def __init__(
        self, model: DecoderConfig, source: str, settings: Any, max_tokens: int
    ):
        self._settings = settings
        self._version = -1
        self._directory: pathlib.Path | None = None
        self._stats = dict.fromkeys(_STATS, 0.0)
        self._running_since = 0.0
        self._temporary = None
        folder = settings.folder
        if not folder:
            folder = self._temporary = tempfile.mkdtemp(prefix="crbc_vllm-")
        self._publisher = Publisher(
            pathlib.Path(folder).absolute(), model, source, settings.dtype
        )
        token = os.environ.get("CRBC_VLLM_TOKEN", "")
        urls = [url.strip() for url in settings.urls.split(",") if url.strip()]
        servers: Sequence[Server | None] = [None] * len(urls)
        if not urls:
            token = secrets.token_hex(16)
            arguments = ["--dtype", settings.dtype, "--max-model-len", str(max_tokens)]
            arguments += shlex.split(settings.arguments)
            servers = [
                Server(
                    settings.python,
                    arguments,
                    token=token,
                    start_timeout=settings.start_timeout,
                )
                for _ in range(settings.num_servers)
            ]
            urls = [server.url for server in servers]
        self._replicas = [
            _Replica(Client(url, token=token, timeout=settings.request_timeout), server)
            for url, server in zip(urls, servers, strict=True)
        ]

    async def generate(self, request: Request) -> Completion:
        """Samples one reply, on whichever server is least busy."""
        self._begin()
        try:
            return await self._generate(request)
        finally:
            self._end()

    async def publish(self, params: Any, version: int) -> None:
        """Writes `params` to disk and has every server load them.

        Raises:
            UserError: if they cannot be written, or no server confirms them.
        """
        try:
            directory = await asyncio.to_thread(self._publisher.write, params, version)
        except OSError as error:
            raise UserError(
                f"version {version} of the weights cannot be published: {error}; "
                "config.rollout.vllm.folder must be a folder with room for two "
                "versions that the servers see, too"
            ) from error
        self._directory, self._version = directory, version
        for replica in self._replicas:
            replica.is_current = False
        failures = await asyncio.gather(
            *map(self._make_current, self._replicas), return_exceptions=True
        )
        problems = [str(failure) for failure in failures if failure is not None]
        for failure in failures:
            if failure is not None and not isinstance(failure, (OSError, UserError)):
                raise failure
        for problem in problems:
            logging.warning("vLLM without version %d: %s", version, problem)
        if len(problems) == len(self._replicas):
            raise UserError(
                f"no vLLM server took version {version} of the weights: {problems[0]}"
            )

    @contextlib.contextmanager
    def episode(self):
        """Servers batch what comes when it comes: there is nothing to wait for."""
        yield

    def stats(self) -> Mapping[str, float]:
        """Counters since the last call.

        `requests`, `retries` and `restarts` of servers, `prompt_tokens`,
        `response_tokens`, and `seconds` with a request under way.
        """
        stats, self._stats = self._stats, dict.fromkeys(_STATS, 0.0)
        return stats

    async def close(self) -> None:
        """Stops the servers that it started, and removes what it published."""
        for replica in self._replicas:
            await replica.client.close()
            if replica.server:
                await replica.server.stop()
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)

    async def _generate(self, request: Request) -> Completion:
        failure: Exception | None = None
        for attempt in range(self._settings.num_retries + 1):
            replica = self._choose()
            self._stats["retries"] += attempt > 0
            replica.num_running += 1
            try:
                if not replica.is_current:
                    await self._make_current(replica)
                completion = await replica.client.complete(request, self._version)
                self._stats["requests"] += 1
                self._stats["prompt_tokens"] += len(request.prompt_ids)
                self._stats["response_tokens"] += len(completion.token_ids)
                return completion
            except (ConnectionError, TimeoutError, UserError) as error:
                # Whatever it was: it must show its weights before it is asked again.
                failure, replica.is_current = error, False
            finally:
                replica.num_running -= 1
        raise ConnectionError(f"no vLLM server replies; the last problem: {failure}")

    def _choose(self) -> _Replica:
        """The least busy server with current weights; else the least busy at all."""
        current = [replica for replica in self._replicas if replica.is_current]
        return min(current or self._replicas, key=lambda r: r.num_running)

    async def _make_current(self, replica: _Replica) -> None:
        """Returns when the server has the current weights."""
        async with replica.lock:
            if replica.is_current:  # Another request saw to it meanwhile.
                return
            server, version = replica.server, self._version
            if server and not (server.is_running and await replica.client.is_healthy()):
                self._stats["restarts"] += replica.was_started
                replica.was_started = True
                await server.start(self._directory, replica.client)
                await replica.client.confirm(version)
            else:
                await replica.client.load(self._directory, version)
            replica.is_current = version == self._version

    def _begin(self) -> None:
        if not any(replica.num_running for replica in self._replicas):
            self._running_since = time.perf_counter()

    def _end(self) -> None:
        if not any(replica.num_running for replica in self._replicas):
            self._stats["seconds"] += time.perf_counter() - self._running_since
