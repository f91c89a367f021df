"""The embedded engine: requests of many episodes -> one jitted call a tick -> replies.

A tick starts when every coroutine that holds `episode()` waits for a reply. Its
requests are sorted by seed, so that what runs together, and hence every bit of the
result, depends on the requests alone and never on who came first.
"""

import asyncio
import contextlib
import contextvars
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from crbc_jax.models.config import DecoderConfig
from crbc_jax.models.decoder import UNROLLED_LAYERS, seed_words, unstack
from crbc_jax.rollout.decoding import MAX_STOP_IDS, NO_TOKEN, Rows, sample
from crbc_jax.rollout.engine import Completion, Request

_PROMPT_MULTIPLE = 4  # Tokens; prompt buckets are multiples of it.

_STATS = (
    "requests",
    "ticks",
    "calls",
    "prompt_tokens",
    "response_tokens",
    "seconds",
)
# The sampler whose episode() the current coroutine holds.
_HELD: contextvars.ContextVar[Any] = contextvars.ContextVar("held", default=None)


class Sampler:
    """An Engine that runs the decoder in this process, with a KV cache.

    A reply depends on its request and the weights; on its companions in the batch it
    depends only through floating-point rounding, and ticks make those deterministic.
    Use it from one event loop at a time; other threads may run JAX beside it.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        max_prompt_tokens: int,
        max_response_tokens: int,
        row_buckets: Sequence[int] = (32, 128),
        num_prompt_buckets: int = 4,
        devices: Sequence[jax.Device] | None = None,
    ):
        """Compiles nothing yet; each (rows, prompt length) bucket does at first use.

        Args:
            config: shape of the decoder.
            max_prompt_tokens: longest prompt; prompts are padded to one of
                `num_prompt_buckets` evenly spaced lengths up to it.
            max_response_tokens: largest `max_tokens` of a request.
            row_buckets: numbers of requests that run as one call; more than the
                largest are cut into several calls.
            num_prompt_buckets: see `max_prompt_tokens`.
            devices: of this process; rows are split among them, weights repeated on
                each. None: the first one.

        Raises:
            ValueError: if a size is not positive, the model has too few positions, or
                the devices do not divide a row bucket.
        """
        sizes = {
            "max_prompt_tokens": max_prompt_tokens,
            "max_response_tokens": max_response_tokens,
            "num_prompt_buckets": num_prompt_buckets,
            "row_buckets": min(row_buckets, default=0),
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        if max_prompt_tokens + max_response_tokens > config.max_positions:
            raise ValueError(
                f"max_prompt_tokens={max_prompt_tokens} + max_response_tokens="
                f"{max_response_tokens} exceed the model's {config.max_positions} "
                "positions (max_position_embeddings)"
            )
        devices = list(devices or jax.local_devices()[:1])
        if any(rows % len(devices) for rows in row_buckets):
            raise ValueError(
                f"row_buckets={tuple(row_buckets)} must be multiples of the number of "
                f"devices, {len(devices)}"
            )
        mesh = jax.sharding.Mesh(np.array(devices), ("rows",))
        self._repeated = NamedSharding(mesh, PartitionSpec())
        self._by_row = NamedSharding(mesh, PartitionSpec("rows"))
        self._config = config
        self._max_prompt_tokens = max_prompt_tokens
        self._max_response_tokens = max_response_tokens
        self._row_buckets = sorted(row_buckets)
        self._prompt_buckets = _prompt_buckets(max_prompt_tokens, num_prompt_buckets)
        self._weights: tuple[Any, int] | None = None  # Parameters and their version.
        self._waiting: dict[asyncio.Future, Request] = {}
        self._holders = 0
        self._is_running = False
        self._closed = False
        self._stats = dict.fromkeys(_STATS, 0.0)

    async def generate(self, request: Request) -> Completion:
        """Samples one reply in the next tick.

        Raises:
            ValueError: if the request fits no bucket or has a bad setting.
            RuntimeError: before the first `publish`, and after `close`.
        """
        self._check(request)
        reply = asyncio.get_running_loop().create_future()
        # A request from outside any episode is an episode of its own meanwhile.
        with contextlib.nullcontext() if _HELD.get() is self else self.episode():
            self._waiting[reply] = request
            self._wake()
            try:
                return await reply
            finally:
                self._waiting.pop(reply, None)  # Still there if it was cancelled.

    async def publish(self, params: Any, version: int) -> None:
        """Copies `params`, on whatever devices, for all ticks that start from now on.

        The caller may donate or delete its own arrays as soon as this returns.
        """

        def copy(leaf):
            # The first transfer may return the caller's own buffer on a shared
            # device; within one sharding, may_alias=False does copy.
            leaf = jax.device_put(leaf, self._repeated)
            return jax.device_put(leaf, self._repeated, may_alias=False)

        if self._config.num_layers > UNROLLED_LAYERS:
            layers = jax.device_put(params["layers"], self._repeated)
            layers = _unstack(layers)  # New arrays in any case.
        else:
            layers = jax.tree.map(copy, params["layers"])
        others = {name: tree for name, tree in params.items() if name != "layers"}
        weights = jax.tree.map(copy, others) | {"layers": layers}
        self._weights = jax.block_until_ready(weights), version

    @contextlib.contextmanager
    def episode(self) -> Iterator[None]:
        """See Engine.episode."""
        token = _HELD.set(self)
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            _HELD.reset(token)
            self._wake()

    def stats(self) -> Mapping[str, float]:
        """Returns the counters since the last call.

        `requests`, `ticks`, `calls` (of the device), `prompt_tokens`,
        `response_tokens` and `seconds` (within ticks).
        """
        stats, self._stats = self._stats, dict.fromkeys(_STATS, 0.0)
        return stats

    async def close(self) -> None:
        """Drops the weights; requests that wait end with RuntimeError."""
        self._closed = True
        self._weights = None
        for reply in self._waiting:
            if not reply.done():
                reply.set_exception(RuntimeError("the sampler was closed"))
        self._waiting.clear()

    def _check(self, request: Request) -> None:
        if self._closed:
            raise RuntimeError("generate was called after close")
        if self._weights is None:
            raise RuntimeError("generate was called before the first publish")
        num_tokens, limit = len(request.prompt_ids), self._max_prompt_tokens
        if not 1 <= num_tokens <= limit:
            raise ValueError(
                f"request.prompt_ids has {num_tokens} tokens; needs 1 to {limit}: "
                "shorten the prompt or raise config.rollout.max_prompt_tokens"
            )
        sampling, limit = request.sampling, self._max_response_tokens
        if not 1 <= sampling.max_tokens <= limit:
            raise ValueError(
                f"sampling.max_tokens={sampling.max_tokens} must be 1 to {limit} "
                "(config.rollout.max_response_tokens)"
            )
        if not 0 <= sampling.temperature < np.inf:
            raise ValueError(
                f"sampling.temperature={sampling.temperature} must be 0 (greedy) or a "
                "positive number"
            )
        if len(sampling.stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"sampling.stop_ids has {len(sampling.stop_ids)} ids; at most "
                f"{MAX_STOP_IDS} are supported"
            )

    def _wake(self) -> None:
        """Starts a tick if one is still due once all that is ready now has run."""
        if self._is_due():
            next(iter(self._waiting)).get_loop().call_soon(self._start_tick)

    def _is_due(self) -> bool:
        is_waiting = bool(self._waiting) and len(self._waiting) >= self._holders
        return is_waiting and not self._is_running

    def _start_tick(self) -> None:
        if not self._is_due():
            return
        batch = sorted(
            self._waiting.items(),
            key=lambda item: (item[1].seed, item[1].prompt_ids.tobytes()),
        )
        self._waiting = {}
        replies, requests = zip(*batch, strict=True)
        # In a thread, so that the loop stays free for signals and timeouts.
        work = asyncio.to_thread(self._run, requests, *self._weights)
        self._is_running = True
        task = replies[0].get_loop().create_task(work)
        task.add_done_callback(functools.partial(self._finish_tick, replies))

    def _finish_tick(
        self, replies: Sequence[asyncio.Future], task: asyncio.Task
    ) -> None:
        self._is_running = False
        failure = None if task.cancelled() else task.exception()
        for number, reply in enumerate(replies):
            if reply.done():  # Its coroutine was cancelled.
                continue
            if task.cancelled():
                reply.cancel()
            elif failure:
                reply.set_exception(failure)
            else:
                reply.set_result(task.result()[number])
        self._wake()

    def _run(self, requests, params, version) -> list[Completion]:
        started = time.perf_counter()
        replies = []
        largest = self._row_buckets[-1]
        for first in range(0, len(requests), largest):
            part = requests[first : first + largest]
            rows = self._pad(part)
            token_ids, logprobs = sample(
                self._config,
                params,
                jax.device_put(rows, self._by_row),
                self._max_response_tokens,
            )
            token_ids, logprobs = np.asarray(token_ids), np.asarray(logprobs)
            replies += [
                _completion(*row, version)
                for row in zip(part, token_ids, logprobs, strict=False)
            ]
            self._stats["calls"] += 1
        self._stats["ticks"] += 1
        self._stats["requests"] += len(requests)
        self._stats["prompt_tokens"] += sum(len(r.prompt_ids) for r in requests)
        self._stats["response_tokens"] += sum(len(r.token_ids) for r in replies)
        self._stats["seconds"] += time.perf_counter() - started
        return replies

    def _pad(self, requests: Sequence[Request]) -> Rows:
        longest = max(len(request.prompt_ids) for request in requests)
        length = next(n for n in self._prompt_buckets if n >= longest)
        num_rows = next(n for n in self._row_buckets if n >= len(requests))
        rows = Rows(
            prompts=np.zeros((num_rows, length), np.int32),
            lengths=np.ones(num_rows, np.int32),
            seeds=np.zeros((num_rows, 2), np.uint32),
            temperatures=np.ones(num_rows, np.float32),
            max_tokens=np.zeros(num_rows, np.int32),
            stop_ids=np.full((num_rows, MAX_STOP_IDS), NO_TOKEN, np.int32),
        )
        for row, request in enumerate(requests):
            num_tokens = len(request.prompt_ids)
            rows.prompts[row, length - num_tokens :] = request.prompt_ids
            rows.lengths[row] = num_tokens
            rows.seeds[row] = seed_words(request.seed)
            rows.temperatures[row] = request.sampling.temperature
            rows.max_tokens[row] = request.sampling.max_tokens
            stop_ids = request.sampling.stop_ids
            rows.stop_ids[row, : len(stop_ids)] = stop_ids
        smallest, largest = np.min(rows.prompts), np.max(rows.prompts)
        if smallest < 0 or largest >= self._config.vocab_size:
            raise ValueError(
                f"request.prompt_ids must be in [0, {self._config.vocab_size}), got "
                f"{smallest} to {largest}: they come from another model's tokenizer"
            )
        return rows


_unstack = jax.jit(unstack)


def _prompt_buckets(max_tokens: int, count: int) -> list[int]:
    """Up to `count` evenly spaced lengths, the last one at least `max_tokens`."""
    step = -(-max_tokens // (count * _PROMPT_MULTIPLE)) * _PROMPT_MULTIPLE
    return list(range(step, max_tokens + step, step))


def _completion(request, token_ids, logprobs, version) -> Completion:
    num_tokens = int(np.sum(token_ids != NO_TOKEN))
    token_ids = token_ids[:num_tokens].copy()
    stopped = int(token_ids[-1]) in request.sampling.stop_ids
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs[:num_tokens].copy(),
        policy_version=version,
        finish_reason="stop" if stopped else "length",
    )
