import time

import pytest

from crbc_jax.rollout.actions import (
    CODES,
    PARSERS,
    ParsedAction,
    parse_action,
    settle,
)
from crbc_jax.types import INVALID_ACTION


@pytest.mark.parametrize(
    "reply, action, code",
    [
        ("<action>up</action>", "up", "ok"),
        ("<action>\n  Go  TO\tdesk 1 </action>", "go to desk 1", "ok"),
        ("<think>up or <b>?</think>\n<action>left</action> done", "left", "ok"),
        # Whole text, not words within it: the environment refuses it.
        ("<action>pick up</action>", "pick up", "ok"),
        ("<action>search[<b>Ω 漢</b>]</action>", "search[<b>ω 漢</b>]", "ok"),
        # The last complete pair after the reasoning.
        ("<think><action>up</action></think><action>left</action>", "left", "ok"),
        ("<think><action>up</action></think>", "", "no_tag"),
        ("a</think><action>up</action></think><action>left</action>", "left", "ok"),
        ("<action>up</action><think>now</think>", "", "no_tag"),
        ("<action>left <action>up</action>", "up", "ok"),
        ("<action>up</action> <action>le", "up", "ok"),
        ("<action>up</action> I said <action>UP</action>", "up", "ok"),
        ("<action>up</action><action>left</action>", "left", "many_tags"),
        ("<action>up</action><action> </action>", "", "empty"),
        ("<action></action>", "", "empty"),
        ("<think>up<action>up</action>", "", "open_think"),
        ("<think>a</think><action>up</action><think>b", "", "open_think"),
        ("I will move up.", "", "no_tag"),
        ("</action>up<action>", "", "no_tag"),
        ("<Action>up</Action>", "", "no_tag"),
        ("<action>up", "", "no_tag"),
        ("", "", "no_tag"),
    ],
)
def test_strict_rule(reply, action, code):
    assert parse_action(reply) == ParsedAction(action, code)
    assert code in CODES


def test_format_is_apart_from_admissibility():
    valid = {code for code in CODES if ParsedAction("up", code).is_valid}
    assert valid == {"ok", "not_admissible"}


@pytest.mark.parametrize(
    "parsed, reason, action, code",
    [
        (("up", "ok"), "", "up", "ok"),
        (("fly", "ok"), "not one of up", "fly", "not_admissible"),
        (("up", "many_tags"), "", "up", "many_tags"),
        # What no action could be read from is one action, whatever it says; and a
        # broken format stays broken if the environment refuses it as well.
        (("fly", "many_tags"), "not one of up", INVALID_ACTION, "many_tags"),
        (("ends in junk", "no_tag"), "unknown", INVALID_ACTION, "no_tag"),
        (("", "no_tag"), "empty", INVALID_ACTION, "no_tag"),
    ],
)
def test_the_environment_has_the_last_word(parsed, reason, action, code):
    assert settle(ParsedAction(*parsed), reason) == ParsedAction(action, code)


THOUGHT = "<think>.</think>"


@pytest.mark.parametrize(
    "parser, reply, action, code",
    [
        ("alfworld", f"{THOUGHT}<action>Look</action>", "look", "ok"),
        ("alfworld", f"{THOUGHT}<ACTION>a</ACTION><action>b</action>", "a", "ok"),
        ("alfworld", "<action>look</action>", "look", "no_think"),
        ("alfworld", "<THINK></THINK><action>look</action>", "look", "no_think"),
        ("alfworld", f"{THOUGHT}看<action>look</action>", "look", "chinese"),
        ("alfworld", "x" + "Y" * 30, "y" * 30, "no_tag"),
        ("webshop", "x" + "Y" * 30, "y" * 20, "no_tag"),
        ("sokoban", f"{THOUGHT}<action>pick up</action>", "up", "ok"),
        # In the order of the list, not of the text.
        ("sokoban", f"{THOUGHT}<action>left, then up</action>", "up", "ok"),
        ("sokoban", f"{THOUGHT}看<action>left</action>", "left", "ok"),
        ("sokoban", f"{THOUGHT}<action>push</action>", "", "ok"),
        ("sokoban", "go up", "", "no_tag"),
    ],
)
def test_published_rule(parser, reply, action, code):
    assert PARSERS[f"lenient_{parser}"](reply) == ParsedAction(action, code)
    assert code in CODES


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("junk", ["<action>", "<think>", "</action>", "Ω", "<actio"])
def test_long_junk_is_read_quickly(parser, junk):
    started = time.perf_counter()
    PARSERS[parser](junk * 10_000)
    assert time.perf_counter() - started < 1.0
