"""Policy and environments in, trajectories out."""

from typing import Any

from crbc_jax.models.config import DecoderConfig
from crbc_jax.rollout.engine import Engine


def _make_sampler(config: Any, model: DecoderConfig) -> Engine:
    from crbc_jax.rollout.sampler import Sampler  # Loads flax.

    return Sampler(
        model,
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
