"""Policy and environments in, trajectories out."""

from typing import Any

from crbc_jax.models.config import DecoderConfig, count_params
from crbc_jax.rollout.engine import Engine

# Of a model that computes 32 rows, most of them padding, in less time than it takes to
# compile for another number of rows.
_SMALL_PARAMS = 20_000_000


def _make_sampler(config: Any, model: DecoderConfig) -> Engine:
    from crbc_jax.rollout.sampler import Sampler  # Loads flax.

    is_small = count_params(model) < _SMALL_PARAMS
    return Sampler(
        model,
        row_buckets=(32, 128) if is_small else (1, 8, 32, 128),
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
    )


def _make_vllm(config: Any, model: DecoderConfig) -> Engine:
    from crbc_jax.rollout.vllm.engine import VllmEngine  # Loads httpx.

    rollout = config.rollout
    max_tokens = rollout.max_prompt_tokens + rollout.max_response_tokens
    return VllmEngine(model, config.model.directory, rollout.vllm, max_tokens)


# Name -> function of (config, shape of the model) that makes an Engine.
ENGINES = {"sampler": _make_sampler, "vllm": _make_vllm}


def make_engine(config: Any, model: DecoderConfig) -> Engine:
    """Makes the engine that `config.rollout.engine` names.

    Args:
        config: of the whole run.
        model: shape of the policy, without adapters.

    Raises:
        ValueError: if there is no such engine, or its settings do not fit the model.
    """
    name = config.rollout.engine
    if name not in ENGINES:
        raise ValueError(f"config.rollout.engine={name!r}; known: {sorted(ENGINES)}")
    return ENGINES[name](config, model)
