"""A Hugging Face model directory -> what this package needs of it."""

from crbc_jax.models.config import DecoderConfig, load_config
from crbc_jax.models.tokenizer import Tokenizer, load_tokenizer
from crbc_jax.types import UserError


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
