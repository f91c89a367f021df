"""The one protocol of everything that samples replies: request in, completion out."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one reply is sampled."""

    max_tokens: int
    stop_ids: tuple[int, ...]  # The reply ends with, and includes, any of these.
    temperature: float = 1.0  # 0 is greedy; log-probabilities are then those at 1.


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. Equal requests to equal weights give equal replies."""

    prompt_ids: np.ndarray  # int32 [tokens]
    sampling: SamplingParams
    seed: int  # Below 2**63; of this request alone, and distinct within an update.


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """One sampled reply."""

    token_ids: np.ndarray  # int32 [tokens]; includes the stop id that ended it.
    logprobs: np.ndarray  # float32 [tokens], at the sampling temperature.
    policy_version: int
    finish_reason: str  # "stop" or "length"


@runtime_checkable
class Engine(Protocol):
    """What rollouts need of a sampler, be it embedded or a server."""

    async def generate(self, request: Request) -> Completion:
        """Samples one reply.

        Raises:
            ConnectionError, TimeoutError: if no reply came, for no fault of the
                policy; the episode is then aborted.
        """

    async def publish(self, params: Any, version: int) -> None:
        """Makes `params` the weights of all later requests; tags them `version`."""

    def episode(self) -> contextlib.AbstractContextManager[None]:
        """Held by a coroutine while it may still call `generate`.

        An engine that batches by deterministic ticks starts one when every holder
        waits for a reply, so that a batch depends on no timing; others ignore it.
        """

    def stats(self) -> Mapping[str, float]:
        """Counters since the last call (requests, tokens, ticks, seconds)."""

    async def close(self) -> None:
        """Frees what the engine holds. Calling it twice is harmless."""
