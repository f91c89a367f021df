"""Reply of the policy -> the action in it, or the reason why there is none."""

import re
from typing import NamedTuple

# What can be said of a reply. The format of the first two is right.
CODES = (
    "ok",
    "not_admissible",  # A well-formed action that the environment did not execute.
    "many_tags",  # Several different actions; the last one is executed.
    "no_tag",  # No complete <action>..</action> after the reasoning.
    "open_think",  # <think> that is never closed.
    "empty",  # Nothing between the tags.
)
_FORMAT_IS_RIGHT = ("ok", "not_admissible")

_ACTION = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL)


class ParsedAction(NamedTuple):
    """What a reply asks for."""

    action: str  # Lower case, single spaces; "" if none could be read.
    code: str  # One of CODES.

    @property
    def is_valid(self) -> bool:
        """True if the format is right, whether or not the action can be executed."""
        return self.code in _FORMAT_IS_RIGHT


def parse_action(reply: str) -> ParsedAction:
    """Reads the last complete <action> pair after the reasoning.

    Stricter than the published rule, which also finds words within words and sends
    unreadable text to the environment.
    """
    if "<think>" in reply and "</think>" not in reply.rsplit("<think>", 1)[1]:
        return ParsedAction("", "open_think")
    found = [
        " ".join(text.lower().split())
        for text in _ACTION.findall(reply.rsplit("</think>", 1)[-1])
    ]
    if not found:
        return ParsedAction("", "no_tag")
    if not found[-1]:
        return ParsedAction("", "empty")
    return ParsedAction(found[-1], "ok" if len(set(found)) == 1 else "many_tags")
