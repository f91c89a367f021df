"""A Hugging Face model directory -> what this package needs of it."""

from typing import Any

from crbc_jax.models.config import DecoderConfig, load_config
from crbc_jax.models.decoder import init_params
from crbc_jax.models.lora import add_adapters, with_adapters, without_adapters
from crbc_jax.models.tokenizer import Tokenizer, load_tokenizer
from crbc_jax.models.weights import draws_weights, import_params
from crbc_jax.types import UserError


def load_policy(settings: Any) -> tuple[DecoderConfig, Tokenizer]:
    """Reads what `settings`, a config.model, asks for: shape with adapters, tokenizer.

    Raises:
        UserError: as `load_model`, and if the adapters' targets are not known.
    """
    config, tokenizer = load_model(settings.directory)
    return with_adapters(config, settings), tokenizer


def load_model(directory: str) -> tuple[DecoderConfig, Tokenizer]:
    """Reads shape and tokenizer of the model in `directory`, a path or "preset:NAME".

    Raises:
        UserError: if a file is missing or unsupported, or the two do not fit.
    """
    config = load_config(directory)
    tokenizer = load_tokenizer(directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"config.model.directory={directory!r}: its tokenizer has "
            f"{tokenizer.vocab_size} tokens, its config.json vocab_size="
            f"{config.vocab_size}; they are not of one model"
        )
    return config, tokenizer


def start_params(
    settings: Any, config: DecoderConfig, seed: int, shardings: Any
) -> dict[str, Any]:
    """Reads the weights that `settings`, a config.model, names, or draws fresh ones.

    Args:
        config: of `load_policy(settings)`; its adapters are drawn in any case.
        seed: of what is drawn.
        shardings: tree like the parameters.

    Raises:
        UserError: as `import_params`.
    """
    if draws_weights(settings):
        return init_params(config, seed)
    params = import_params(
        settings.directory, without_adapters(config), shardings=shardings
    )
    return add_adapters(config, params, seed) if config.lora else params
