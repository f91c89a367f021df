"""A canned engine: replies come from a function, so that tests need no model."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from crbc_jax.rollout.engine import Completion, Request


class ScriptedEngine:
    """An Engine that asks a function for each reply, at once and in order of arrival.

    Attributes:
        requests: all that came, failed ones too.
        version: of the last `publish`; -1 before.
    """

    def __init__(
        self,
        reply: Callable[[Request], Sequence[int]],
        *,
        logprob: float = -1.0,
        failures: Collection[int] = (),
    ):
        """Scripts the engine.

        Args:
            reply: request -> token ids; cut after a stop id and at `max_tokens`.
            logprob: of every token.
            failures: numbers, from 0, of the requests that fail with ConnectionError.
        """
        self.requests: list[Request] = []
        self.version = -1
        self._reply = reply
        self._logprob = logprob
        self._failures = frozenset(failures)
        self._stats = {"requests": 0.0, "response_tokens": 0.0}

    async def generate(self, request: Request) -> Completion:
        """Answers with what the function says.

        Raises:
            ConnectionError: where the script has a failure.
        """
        number = len(self.requests)
        self.requests.append(request)
        if number in self._failures:
            raise ConnectionError(f"scripted failure of request {number}")
        token_ids = list(self._reply(request))[: request.sampling.max_tokens]
        ends = [i for i, t in enumerate(token_ids) if t in request.sampling.stop_ids]
        token_ids = token_ids[: ends[0] + 1] if ends else token_ids
        self._stats["requests"] += 1
        self._stats["response_tokens"] += len(token_ids)
        return Completion(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.full(len(token_ids), self._logprob, np.float32),
            policy_version=self.version,
            finish_reason="stop" if ends else "length",
        )

    async def publish(self, params: Any, version: int) -> None:
        """Notes the version; the replies stay those of the script."""
        self.version = version

    @contextlib.contextmanager
    def episode(self) -> Iterator[None]:
        """Changes nothing: no request waits for another."""
        yield

    def stats(self) -> Mapping[str, float]:
        """Returns `requests` answered and `response_tokens` since the last call."""
        stats, self._stats = self._stats, dict.fromkeys(self._stats, 0.0)
        return stats

    async def close(self) -> None:
        """Holds nothing to free."""
