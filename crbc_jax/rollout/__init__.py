"""Policy and environments in, trajectories out."""

from typing import Any

from crbc_jax.models.config import DecoderConfig
from crbc_jax.rollout.engine import Engine


def _make_sampler(config: Any, model: DecoderConfig) -> Engine:
    from crbc_jax.rollout.sampler import Sampler  # Loads flax.

    return Sampler(
        model,
        max_prompt_tokens=config.max_prompt_tokens,
        max_response_tokens=config.max_response_tokens,
    )


# Name -> function of (config.rollout, shape of the model) that makes an Engine.
ENGINES = {"sampler": _make_sampler}


def make_engine(config: Any, model: DecoderConfig) -> Engine:
    """Makes the engine that `config.engine` names, of the fields of config.rollout.

    Raises:
        ValueError: if there is no such engine, or its settings do not fit the model.
    """
    if config.engine not in ENGINES:
        raise ValueError(
            f"config.rollout.engine={config.engine!r}; known: {sorted(ENGINES)}"
        )
    return ENGINES[config.engine](config, model)
