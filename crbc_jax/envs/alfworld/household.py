"""What the player of a household game knows beyond the last line of text.

ALFWorld says where you are and what you hold only when that changes. The published
agents are told at every step; so are ours. All of it is read off the game's own texts.
"""

import re

_CHANGES = {"clean": "clean", "heat": "heated", "cool": "cooled"}
_ARRIVE = re.compile(r"You arrive at ([a-z]+ \d+)\.")
_TAKE = re.compile(r"You pick up the ([a-z]+ \d+) from the ([a-z]+ \d+)\.")
_PUT = re.compile(r"You (?:move|put) the ([a-z]+ \d+) (?:to|in/on) the ([a-z]+ \d+)\.")
_CHANGE = re.compile(r"You (clean|heat|cool) the ([a-z]+ \d+) using the [a-z]+ \d+\.")
_START = "middle of the room"


class Household:
    """Location, held item, states of items and moved items of an episode."""

    def __init__(self):
        self._location = _START
        self._held: dict[str, str] = {}  # Item -> where it was taken from.
        self._states: dict[str, set[str]] = {}
        self._moves: list[str] = []

    def read(self, text: str) -> None:
        """Takes in what the game answered to an action."""
        if match := _ARRIVE.match(text):
            self._location = match[1]
        elif match := _TAKE.match(text):
            self._held[match[1]] = match[2]
        elif match := _PUT.match(text):
            item, place = match.groups()
            source = self._held.pop(item, place)
            self._moves.append(f"{item} ({self._state(item)}) from {source} to {place}")
        elif match := _CHANGE.match(text):
            states = self._states.setdefault(match[2], set())
            # What is heated is no longer cool, and the other way round.
            if match[1] in ("heat", "cool"):
                states -= {"heated", "cooled"}
            states.add(_CHANGES[match[1]])

    def __str__(self) -> str:
        held = ", ".join(f"{item} ({self._state(item)})" for item in self._held)
        text = f"Location: {self._location}. In hand: {held or 'nothing'}."
        if self._moves:
            text += f" Moved so far: {'; '.join(self._moves)}."
        return text

    def _state(self, item: str) -> str:
        return ", ".join(sorted(self._states.get(item, ()))) or "unprocessed"
