"""Reply of the policy -> the action in it, or the reason why there is none."""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from crbc_jax.types import INVALID_ACTION

# What can be said of a reply. The format of the first two is right.
CODES = (
    "ok",
    "not_admissible",  # A well-formed action that the environment did not execute.
    "many_tags",  # Pairs with different actions. The last one is executed.
    "no_tag",  # No complete <action>..</action>, or <code>, after the reasoning.
    "open_think",  # <think> that is never closed.
    "empty",  # Nothing between the tags.
    "no_think",  # <think> or </think> is missing; only the published rules ask for it.
    "chinese",  # Chinese characters; only the published rules look for them.
)
_FORMAT_IS_RIGHT = ("ok", "not_admissible")

_ACTION = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL)
_CODE = re.compile(r"<code>((?:(?!<code>).)*?)</code>", re.DOTALL)
_CHINESE = re.compile(r"[\u4e00-\u9fff]")


class ParsedAction(NamedTuple):
    """What a reply asks for."""

    action: str  # To be executed as it is; "" if none could be read.
    code: str  # One of CODES.

    @property
    def is_valid(self) -> bool:
        """True if the format is right, whether or not the action can be executed."""
        return self.code in _FORMAT_IS_RIGHT


def parse_action(reply: str) -> ParsedAction:
    """Reads the last complete <action> pair after the reasoning.

    The whole text between the tags is the action, in lower case and with single
    spaces: no word is looked for inside of it, and whether it is admissible is left
    to the environment. Reasoning is optional, but once opened it must be closed, and
    what is tagged within it does not count. A pair that repeats the same action is
    harmless; pairs that differ break the format.
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


def parse_code(reply: str) -> ParsedAction:
    """Reads the last complete <code> block after the reasoning, as it is written.

    For environments whose actions are programs: case and line breaks count.
    """
    if "<think>" in reply and "</think>" not in reply.rsplit("<think>", 1)[1]:
        return ParsedAction("", "open_think")
    found = _CODE.findall(reply.rsplit("</think>", 1)[-1])
    if not found:
        return ParsedAction("", "no_tag")
    code = found[-1].strip("\n")
    if not code.strip():
        return ParsedAction("", "empty")
    return ParsedAction(code, "ok" if len(set(found)) == 1 else "many_tags")


def parse_leniently(
    reply: str, *, words: Sequence[str] = (), tail: int = 0
) -> ParsedAction:
    """Reads a reply by the published rule, to reproduce published numbers.

    The action is what lies between the first <action> and the first </action> of the
    reply in lower case, wherever they are. Source: the projection functions of the
    public implementations of GiGPO and its kin.

    Args:
        reply: of the policy.
        words: the actions of an environment that has few. The first of them that
            occurs at all is meant: "pick up" is "up". Without words, Chinese
            characters anywhere break the format.
        tail: without tags the last `tail` characters are executed nevertheless.
    """
    lower = reply.lower()
    start, end = lower.find("<action>"), lower.find("</action>")
    if start < 0 or end < 0:
        return ParsedAction(lower[-tail:] if tail else "", "no_tag")
    action = lower[start + len("<action>") : end].strip()
    if words:
        action = next((word for word in words if word in action), "")
    if "<think>" not in reply or "</think>" not in reply:
        return ParsedAction(action, "no_think")
    if not words and _CHINESE.search(reply):
        return ParsedAction(action, "chinese")
    return ParsedAction(action, "ok")


# Rules by name: functions of a reply.
PARSERS = {
    "strict": parse_action,
    "code": parse_code,
    "lenient_alfworld": functools.partial(parse_leniently, tail=30),
    "lenient_sokoban": functools.partial(
        parse_leniently, words=("up", "down", "left", "right", "still")
    ),
    "lenient_webshop": functools.partial(parse_leniently, tail=20),
}


def settle(parsed: ParsedAction, reason: str) -> ParsedAction:
    """Returns what a trajectory keeps of a reply once it was played.

    Junk becomes the one INVALID_ACTION. A well-formed action that the environment did
    not execute keeps its text, and has the code "not_admissible".

    Args:
        parsed: what was read of the reply.
        reason: the environment's, why it did not execute the action; "" if it did.
    """
    code = "not_admissible" if reason and parsed.is_valid else parsed.code
    is_readable = parsed.action and (parsed.is_valid or not reason)
    return ParsedAction(parsed.action if is_readable else INVALID_ACTION, code)
