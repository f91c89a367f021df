"""What the words around an environment's text are made of."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Record(NamedTuple):
    """A past step, as the policy is told of it."""

    observation: str
    action: str


class Scene(NamedTuple):
    """All that a prompt may tell of an episode."""

    records: Sequence[Record]  # The last ones, oldest first: as many as fit.
    num_steps: int  # Taken so far.
    first_observation: str  # Of the episode: where environments tell the task.
    observation: str  # Of now.
    admissible_actions: Sequence[str]  # Empty if the environment cannot list them.


class Template(NamedTuple):
    """The words around an environment's text."""

    prompt: Callable[[Scene], str]
    reply: Callable[[str], str]  # An action -> the reply that a demonstration shows.
    # Text after which a reply is complete, where it is one token of the vocabulary.
    # Else, and if None, a reply ends with the model's own end token.
    end: str | None
    is_message: bool  # A user's message of a chat, rather than text to continue.


def history(scene: Scene, show: Callable[[str], str] = str) -> str:
    """Returns the records as numbered blocks, "" if there are none.

    Args:
        scene: of now.
        show: what to show of a past observation.
    """
    if not scene.records:
        return ""
    first = scene.num_steps - len(scene.records) + 1
    blocks = [
        f"[Observation {number}:\n{show(record.observation)}\n"
        f"Action {number}: {record.action}]\n"
        for number, record in enumerate(scene.records, first)
    ]
    return (
        f"\nSteps taken so far: {scene.num_steps}. "
        f"The last {len(scene.records)}, oldest first:\n{''.join(blocks)}"
    )


def tagged_action(action: str) -> str:
    """Returns the shortest reply that the parsers read as `action`."""
    return f"<action>{action}</action>"
