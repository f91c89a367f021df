"""Task, past steps and observation -> prompt ids, by the template of the environment.

The words are in templates/.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from crbc_jax.models.tokenizer import Tokenizer
from crbc_jax.rollout.templates.base import Record, Scene, Template
from crbc_jax.types import UserError


class Prompt(NamedTuple):
    """A prompt that fits."""

    ids: np.ndarray  # int32 [tokens]
    num_dropped: int  # Records left out, oldest first, to make it fit.


def build_prompt(
    template: Template,
    tokenizer: Tokenizer,
    records: Sequence[Record],
    observation: str,
    *,
    history_length: int,
    max_tokens: int,
    admissible_actions: Sequence[str] | None = None,
) -> Prompt:
    """Fills a template with the last records that fit.

    Args:
        template: a row of templates.PROMPTS.
        tokenizer: of the policy.
        records: of all steps so far.
        observation: of now.
        history_length: records to show, at most.
        max_tokens: that the prompt may have.
        admissible_actions: as the environment lists them, if it does.

    Raises:
        UserError: if even without history the prompt is longer than `max_tokens`.
    """
    kept = list(records[-history_length:] if history_length else ())
    wanted = len(kept)
    first = records[0].observation if records else observation
    while True:
        scene = Scene(kept, len(records), first, observation, admissible_actions or ())
        text = template.prompt(scene)
        if template.is_message:
            text = tokenizer.in_chat(text)
        ids = tokenizer.encode(text)
        if len(ids) <= max_tokens:
            return Prompt(ids, wanted - len(kept))
        if not kept:
            raise UserError(
                f"config.rollout.max_prompt_tokens={max_tokens}, but the observation "
                f"{observation[:60]!r}... alone makes a prompt of {len(ids)} tokens; "
                "raise the limit"
            )
        kept.pop(0)


def encode_reply(template: Template, tokenizer: Tokenizer, action: str) -> np.ndarray:
    """Returns the int32 ids of the reply that asks for `action`, end token included.

    Raises:
        UserError: if no token can end it.
    """
    ids = tokenizer.encode(template.reply(action))
    last = stop_ids(template, tokenizer)[0]
    return ids if ids[-1] == last else np.append(ids, np.int32(last))


def stop_ids(template: Template, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns what ends a reply: the template's token, then the model's own.

    Raises:
        UserError: if the vocabulary has neither.
    """
    ids = []
    if template.end and tokenizer.has_token(template.end):
        ids.append(tokenizer.id_of(template.end))
    if tokenizer.eos_id is not None:
        ids.append(tokenizer.eos_id)
    if not ids:
        raise UserError(
            "config.model.directory: its tokenizer_config.json names no eos_token, "
            "and this config.rollout.prompt needs one to end a reply"
        )
    return tuple(ids)
