"""Task, past steps and observation -> prompt ids, one template an environment."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from crbc_jax.models.tokenizer import Tokenizer
from crbc_jax.types import INVALID_ACTION, UserError


class Record(NamedTuple):
    """A past step, as the policy is told of it."""

    observation: str
    action: str


class Scene(NamedTuple):
    """All that a prompt may tell of an episode."""

    records: Sequence[Record]  # The last ones, oldest first: as many as fit.
    num_steps: int  # Taken so far.
    observation: str
    admissible_actions: Sequence[str]  # Empty if the environment cannot list them.


class Template(NamedTuple):
    """The words around an environment's text."""

    prompt: Callable[[Scene], str]
    reply: Callable[[str], str]  # An action -> the reply that a demonstration shows.
    # Text after which a reply is complete, where it is one token of the vocabulary.
    # Else, and if None, a reply ends with the model's own end token.
    end: str | None
    is_message: bool  # A user's message of a chat, rather than text to continue.


class Prompt(NamedTuple):
    """A prompt that fits."""

    ids: np.ndarray  # int32 [tokens]
    num_dropped: int  # Records left out, oldest first, to make it fit.


_MOVES = ("up", "down", "left", "right")


def _sokoban_compact_prompt(scene: Scene) -> str:
    past = "".join(
        f"{_inside(r.observation)}{r.action if r.action in _MOVES else INVALID_ACTION}"
        "<record>"
        for r in scene.records
    )
    return f"{past}{_inside(scene.observation)}"


def _inside(board: str) -> str:
    """Cells within the border walls, which every level has, in one line."""
    return "".join(row[1:-1] for row in board.split("\n")[1:-1])


# What differs between prompts comes late, so that a server can reuse the beginning.
_SOKOBAN_RULES = """\
You are the player in a Sokoban puzzle, a grid of cells seen from above.

Symbols: # is a wall, _ is floor, O is a target, X is a box, √ is a box on a target, \
P is you, S is you on a target.

Your task: get every box onto a target. A move takes you to the next cell in its \
direction. If a box stands there you push it, provided that the cell behind it is \
neither a wall nor a box. Boxes cannot be pulled: one that you push into a corner may \
be stuck for good.
"""

_SOKOBAN_REPLY = """
Think first about where the box must go, which side to push it from, and how to get \
there. Write that between <think> and </think>. Then give one action, and only one, \
between <action> and </action>.
"""


def _sokoban_prompt(scene: Scene) -> str:
    parts = [_SOKOBAN_RULES]
    if scene.records:
        parts.append(
            f"\nSteps taken so far: {scene.num_steps}. "
            f"The last {len(scene.records)}, oldest first:\n"
        )
    first = scene.num_steps - len(scene.records) + 1
    for number, record in enumerate(scene.records, first):
        parts.append(
            f"[Observation {number}:\n{record.observation}\n"
            f"Action {number}: {record.action}]\n"
        )
    parts.append(
        f"\nThis is step {scene.num_steps + 1}. The grid now:\n{scene.observation}\n"
        f"\nYour possible actions: {', '.join(scene.admissible_actions)}\n"
    )
    return "".join([*parts, _SOKOBAN_REPLY])


def _action_reply(action: str) -> str:
    return f"<action>{action}</action>"


PROMPTS = {
    # Words for a language model, after the published layout.
    "sokoban": Template(_sokoban_prompt, _action_reply, end=None, is_message=True),
    # Words of the closed vocabulary of the preset sokoban_tiny.
    "sokoban_compact": Template(
        _sokoban_compact_prompt, _action_reply, end="</action>", is_message=False
    ),
}


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
        template: a row of PROMPTS.
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
    while True:
        scene = Scene(kept, len(records), observation, admissible_actions or ())
        text = template.prompt(scene)
        if template.is_message:
            text = _in_chat(tokenizer, text)
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


def _in_chat(tokenizer: Tokenizer, text: str) -> str:
    """As a user's message in ChatML; models without its tokens get the bare text."""
    if not tokenizer.has_token("<|im_start|>"):
        return text
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
