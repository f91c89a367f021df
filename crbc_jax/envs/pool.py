"""Episodes of many environments at once, in worker processes or in this one."""

import asyncio
import contextlib
import heapq
import pickle
import sys
from collections.abc import AsyncIterator
from typing import Any

from crbc_jax import envs
from crbc_jax.envs import worker
from crbc_jax.envs.base import EnvironmentFailed

_START_TIMEOUT = 120.0  # Seconds to import an environment's package.
_STOP_TIMEOUT = 2.0  # Seconds that a worker has to end by itself.


class PooledEnvironment:
    """One environment of a pool, held by one episode at a time."""

    def __init__(self, host: "_LocalHost | _ProcessHost", slot: int):
        self._host = host
        self._slot = slot

    async def reset(self, task_id: str) -> tuple[str, dict[str, Any]]:
        """Starts a task: observation, info.

        Raises:
            EnvironmentFailed: if the environment raises, takes too long, or dies.
        """
        return await self._host.call("reset", self._slot, task_id)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays an action: observation, reward, terminated, truncated, info.

        Raises:
            EnvironmentFailed: as `reset`; and if another environment of the same
                worker process took it down.
        """
        return await self._host.call("step", self._slot, action)


class EnvPool:
    """Environments for episodes that run side by side.

        async with EnvPool("sokoban", {}, num_workers=2, step_timeout=30.0) as pool:
            async with pool.environment() as env:
                observation, info = await env.reset(task_id)

    What an environment returns does not depend on the number of workers. It may be
    used again by a later episode. A worker that hangs or dies is started anew at the
    next call, and every episode that it held fails.

    Args:
        name: a row of `crbc_jax.envs.ENVIRONMENTS`.
        options: the environment's, as for `crbc_jax.envs.make`.
        num_workers: processes, each with many environments; 0 runs them in this one.
        step_timeout: seconds that one `reset` or `step` may take. With no workers it
            cannot be enforced.

    Raises:
        ValueError: if an argument is not known or out of range.
    """

    def __init__(
        self, name: str, options: dict[str, Any], num_workers: int, step_timeout: float
    ):
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers}: must be 0 or more")
        if step_timeout <= 0:
            raise ValueError(f"step_timeout={step_timeout}: must be positive seconds")
        envs.build_options(envs.load(name), options)
        setup = (envs.ENVIRONMENTS[name], options)
        if num_workers:
            self._hosts = [
                _ProcessHost(name, setup, step_timeout) for _ in range(num_workers)
            ]
        else:
            self._hosts = [_LocalHost(name, setup)]

    @property
    def num_restarts(self) -> int:
        """Workers that were started to replace another."""
        return sum(host.num_restarts for host in self._hosts)

    async def __aenter__(self) -> "EnvPool":
        try:
            await asyncio.gather(*(host.start() for host in self._hosts))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_) -> None:
        await asyncio.gather(*(host.stop() for host in self._hosts))

    @contextlib.asynccontextmanager
    async def environment(self) -> AsyncIterator[PooledEnvironment]:
        """Lends one environment, of the worker that has lent the fewest."""
        host = min(self._hosts, key=lambda host: host.slots.num_taken)
        slot = host.slots.take()
        try:
            yield PooledEnvironment(host, slot)
        finally:
            host.slots.give_back(slot)


class _Slots:
    """Numbers of a host's environments; the lowest free one is taken first."""

    def __init__(self):
        self._free: list[int] = []
        self._num_slots = 0

    @property
    def num_taken(self) -> int:
        return self._num_slots - len(self._free)

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._num_slots += 1
        return self._num_slots - 1

    def give_back(self, slot: int) -> None:
        heapq.heappush(self._free, slot)


class _LocalHost:
    """Environments in this process."""

    num_restarts = 0

    def __init__(self, name: str, setup: tuple[str, dict[str, Any]]):
        self.slots = _Slots()
        self._name = name
        self._host = worker.Host(*setup)

    async def start(self) -> None:
        """Nothing to start."""

    async def call(self, method: str, slot: int, argument: str) -> Any:
        try:
            return getattr(self._host, method)(slot, argument)
        except Exception as error:  # Whatever an environment raises is its failure.
            self._host.drop(slot)
            raise EnvironmentFailed(
                f"{self._name} {method}: {worker.describe(error)}"
            ) from error

    async def stop(self) -> None:
        self._host.close()


class _ProcessHost:
    """Environments in a child process, which is replaced when it fails.

    Calls wait for their turn, so that each has the whole of its time budget.
    """

    def __init__(
        self, name: str, setup: tuple[str, dict[str, Any]], step_timeout: float
    ):
        self.slots = _Slots()
        self.num_restarts = 0
        self._name = name
        self._setup = setup
        self._step_timeout = step_timeout
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopped = False
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Starts the process; returns once it has loaded the environment's module.

        Raises:
            EnvironmentFailed: with the reason, if it could not.
        """
        # A fresh interpreter, not multiprocessing's spawn: that would run the user's
        # main module again, and with it all that it imports.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from crbc_jax.envs import worker; worker.main()"
        )
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            await self._exchange(self._setup, _START_TIMEOUT, "start")
        except EnvironmentFailed:
            if self._process:
                await self._end(self._process, 0)
            raise

    async def call(self, method: str, slot: int, argument: str) -> Any:
        # Shielded: a caller that is cancelled half-way must not leave half a reply.
        request = (method, slot, argument)
        return await asyncio.shield(asyncio.ensure_future(self._call(request)))

    async def _call(self, request: tuple[str, int, str]) -> Any:
        async with self._turn:
            if self._is_stopped:
                raise EnvironmentFailed(
                    f"{self._name} {request[0]}: the pool is closed"
                )
            if self._process is None:
                self.num_restarts += 1
                await self.start()
            return await self._exchange(request, self._step_timeout, request[0])

    async def _exchange(self, request: Any, timeout: float, what: str) -> Any:
        """Sends one request and returns its result; a process that fails is ended."""
        process = self._process
        try:
            async with asyncio.timeout(timeout):
                process.stdin.write(worker.encode(request))
                await process.stdin.drain()
                length = await process.stdout.readexactly(worker.LENGTH_BYTES)
                body = await process.stdout.readexactly(int.from_bytes(length, "big"))
        except TimeoutError:
            await self._end(process, 0)
            raise EnvironmentFailed(
                f"{self._name} {what}: took more than {timeout:g} s; its worker was "
                "killed"
            ) from None
        except (EOFError, ConnectionError):
            await self._end(process, _STOP_TIMEOUT)
            raise EnvironmentFailed(
                f"{self._name} {what}: its worker ended with exit code "
                f"{process.returncode}"
            ) from None
        succeeded, result = pickle.loads(body)
        if not succeeded:
            raise EnvironmentFailed(f"{self._name} {what}: {result}")
        return result

    async def stop(self) -> None:
        """Lets the process end by itself, and ends it if it does not."""
        self._is_stopped = True
        if process := self._process:
            process.stdin.close()
            await self._end(process, _STOP_TIMEOUT)

    async def _end(self, process: asyncio.subprocess.Process, patience: float) -> None:
        """Forgets the process; kills it if it still runs after `patience` seconds.

        One that is ending by itself is waited for: a kill at that moment could take its
        exit code away from asyncio, which would then make one up.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._process is process:
            self._process = None
