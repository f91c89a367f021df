"""Task, past steps and observation -> prompt ids, one template an environment."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from crbc_jax.models.tokenizer import Tokenizer
from crbc_jax.types import UserError


class Record(NamedTuple):
    """A past step, as the policy is told of it."""

    observation: str
    action: str


class Template(NamedTuple):
    """The words around an environment's text."""

    prompt: Callable[[Sequence[Record], str], str]  # Records, observation -> prompt.
    reply: Callable[[str], str]  # An action -> the reply that a demonstration shows.
    end: str  # One token of the vocabulary, after which a reply is complete.


class Prompt(NamedTuple):
    """A prompt that fits."""

    ids: np.ndarray  # int32 [tokens]
    num_dropped: int  # Records left out, oldest first, to make it fit.


def _sokoban_compact_prompt(records: Sequence[Record], observation: str) -> str:
    past = "".join(f"{_inside(r.observation)}{r.action}<record>" for r in records)
    return f"{past}{_inside(observation)}"


def _inside(board: str) -> str:
    """Cells within the border walls, which every level has, in one line."""
    return "".join(row[1:-1] for row in board.split("\n")[1:-1])


def _action_reply(action: str) -> str:
    return f"<action>{action}</action>"


# Words for the closed vocabulary of the preset of the same name.
PROMPTS = {
    "sokoban_compact": Template(_sokoban_compact_prompt, _action_reply, "</action>")
}


def build_prompt(
    template: Template,
    tokenizer: Tokenizer,
    records: Sequence[Record],
    observation: str,
    *,
    history_length: int,
    max_tokens: int,
) -> Prompt:
    """Fills a template with the last records that fit.

    Raises:
        UserError: if even without history the prompt is longer than `max_tokens`.
    """
    kept = list(records[len(records) - history_length :] if history_length else ())
    wanted = len(kept)
    while True:
        ids = tokenizer.encode(template.prompt(kept, observation))
        if len(ids) <= max_tokens:
            return Prompt(ids, wanted - len(kept))
        if not kept:
            raise UserError(
                f"config.rollout.max_prompt_tokens={max_tokens}, but the observation "
                f"{observation[:60]!r}... alone makes a prompt of {len(ids)} tokens; "
                "raise the limit"
            )
        kept.pop(0)
