"""A model directory's tokenizer files -> text to token ids and back, exactly."""

import json
import os
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import tokenizers

from crbc_jax.models.config import resolve_directory
from crbc_jax.types import UserError


class Tokenizer:
    """Text to ids without silent unknowns, ids to text without clean-up.

    Attributes:
        vocab_size: number of ids, added tokens included.
        bos_id, eos_id, pad_id: None where the model has no such token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        as_chat: Callable[[str], str] | None = None,
    ):
        """Wraps `backend`.

        Args:
            special_tokens: any of bos, eos, pad -> its text.
            as_chat: the model's chat template, if it has one: a user's message -> the
                chat up to where the model's reply begins.
        """
        self._backend = backend
        self._as_chat = as_chat
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id, self.eos_id, self.pad_id = (
            self.id_of(special_tokens[name]) if name in special_tokens else None
            for name in ("bos", "eos", "pad")
        )
        unknown = getattr(backend.model, "unk_token", None)  # Byte-level: none.
        self._unknown_id = backend.token_to_id(unknown) if unknown else None

    def encode(self, text: str) -> np.ndarray:
        """Returns the int32 ids of `text`; adds no token of its own.

        Raises:
            ValueError: if a part of the text is not in the vocabulary.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        if self._unknown_id in encoding.ids:
            spans = zip(encoding.ids, encoding.offsets, strict=True)
            unknown = {text[slice(*at)] for i, at in spans if i == self._unknown_id}
            raise ValueError(
                f"text={text!r}: {sorted(unknown)} are not in the vocabulary of "
                f"{self.vocab_size} tokens; change the text (prompt template, "
                "environment) or choose a model with a larger vocabulary"
            )
        return np.array(encoding.ids, np.int32)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Returns the text of `ids`, special tokens included."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def in_chat(self, message: str) -> str:
        """Returns `message` as a user's, ready for the reply, by the chat template.

        Models that have none get the bare text.
        """
        return self._as_chat(message) if self._as_chat else message

    def has_token(self, token: str) -> bool:
        """Whether one token reads `token`."""
        return self._backend.token_to_id(token) is not None

    def id_of(self, token: str) -> int:
        """Returns the id of the one token that reads `token`.

        Raises:
            ValueError: if there is none.
        """
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise ValueError(
                f"token={token!r} is not in the vocabulary of {self.vocab_size} tokens"
            )
        return token_id


def load_tokenizer(directory: str) -> Tokenizer:
    """Reads tokenizer.json and tokenizer_config.json of a path or "preset:NAME".

    Raises:
        UserError: if the directory or its tokenizer.json does not exist.
    """
    folder = resolve_directory(directory)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"config.model.directory={directory!r}: {path} is missing; save the "
            "tokenizer there in the fast format"
        )
    settings, special_tokens = {}, {}
    settings_path = folder / "tokenizer_config.json"
    if settings_path.is_file():
        settings = json.loads(settings_path.read_text(encoding="utf-8"))
        for name in ("bos", "eos", "pad"):
            token = settings.get(f"{name}_token")
            if token is not None:  # Either the text, or its added-token record.
                text = token["content"] if isinstance(token, dict) else token
                special_tokens[name] = text
    backend = tokenizers.Tokenizer.from_file(str(path))
    return Tokenizer(backend, special_tokens, _chat_template(folder, settings))


def _chat_template(folder: pathlib.Path, settings: dict) -> Callable | None:
    """The template as transformers renders it; None if the model has none."""
    if "chat_template" not in settings and not any(folder.glob("chat_template*")):
        return None
    # Only now: it takes 2 s to load. It would warn that PyTorch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def as_chat(message: str) -> str:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": message}],
            tokenize=False,
            add_generation_prompt=True,
        )

    return as_chat
