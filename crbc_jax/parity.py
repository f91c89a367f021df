"""Served log-probabilities against the learner's own, on the same weights.

A server that holds other weights than it should, turns positions by another base, or
tells probabilities of another temperature still answers in fluent text. What it cannot
do is to agree with the learner on how likely its own replies are.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from crbc_jax.learner.gradient import Compute, response_logprobs
from crbc_jax.learner.rows import Segment, fill_rows
from crbc_jax.learner.sharding import num_row_parts
from crbc_jax.models.config import DecoderConfig
from crbc_jax.rollout.engine import Completion, Request, SamplingParams
from crbc_jax.types import UserError

_NUM_PROMPTS, _PROMPT_TOKENS, _REPLY_TOKENS = 8, 24, 16
# Nats, of the mean difference a token. In float32 both sides add the same terms in
# another order; in bfloat16, of 8 bits, each of a model's products is rounded.
_MAX_MISMATCH = {"float32": 1e-3, "bfloat16": 5e-2}


class ParityProbe:
    """A few fixed prompts, replies to which are scored by server and learner.

    Args:
        config: of the whole run.
        model: shape of the policy, with adapters if it has any.
    """

    def __init__(self, config: ConfigDict, model: DecoderConfig):
        rollout, self._config, self._model = config.rollout, config, model
        self._limit = rollout.vllm.max_mismatch or _MAX_MISMATCH[rollout.vllm.dtype]
        random = np.random.default_rng(config.seed)
        length = min(_PROMPT_TOKENS, rollout.max_prompt_tokens)
        prompts = random.integers(model.vocab_size, size=(_NUM_PROMPTS, length))
        seeds = random.integers(2**62, size=_NUM_PROMPTS)
        sampling = SamplingParams(
            max_tokens=min(_REPLY_TOKENS, rollout.max_response_tokens),
            stop_ids=(),
            temperature=rollout.temperature,
        )
        # Send these, and give what comes back to `compare`.
        self.requests = [
            Request(prompt.astype(np.int32), sampling, int(seed))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def compare(
        self, params: Any, completions: Sequence[Completion]
    ) -> dict[str, float]:
        """Returns the mean and the largest difference, in nats a token.

        Args:
            params: of the learner, as published.
            completions: of `requests`, in order.

        Raises:
            UserError: if the mean is above the limit.
        """
        contents = [
            [Segment(request.prompt_ids, [completion.token_ids])]
            for request, completion in zip(self.requests, completions, strict=True)
        ]
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        parts, request = num_row_parts(mesh), self.requests[0]
        num_responses = request.sampling.max_tokens
        rows = fill_rows(
            contents,
            num_rows=-(-len(contents) // parts) * parts,
            length=len(request.prompt_ids) + num_responses,
            num_responses=num_responses,
        )
        logprobs, _ = self._score(mesh)(params, rows)
        served = np.concatenate([completion.logprobs for completion in completions])
        ours = np.asarray(logprobs)[np.asarray(rows.response_mask)]
        difference = np.abs(served - ours)
        mean, largest = float(difference.mean()), float(difference.max())
        if not mean <= self._limit:
            version, vllm = completions[0].policy_version, self._config.rollout.vllm
            raise UserError(
                f"version {version}: what vLLM serves and what the learner computes "
                f"differ by {mean:.3g} nats a token, {largest:.3g} at most; allowed "
                f"are {self._limit:g} (config.rollout.vllm.max_mismatch). The servers "
                "hold other weights or another output head, read config.json in "
                "another way (rotary base), tell log-probabilities without the "
                f"temperature (they need --logprobs-mode processed_logprobs), or "
                f"compute in another dtype than config.rollout.vllm.dtype={vllm.dtype}"
            )
        return {"parity/mean": mean, "parity/max": largest}

    @functools.lru_cache(maxsize=1)  # noqa: B019 - lives as long as the run.
    def _score(self, mesh):
        settings = self._config.learner
        return jax.jit(
            functools.partial(
                response_logprobs,
                self._model,
                temperature=self._config.rollout.temperature,
                mesh=mesh,
                compute=Compute(settings.compute_dtype, settings.remat),
            )
        )
