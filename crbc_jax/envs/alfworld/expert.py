"""A planner that looks into the game's true state.

The engine's own planner proves its plans shortest, which takes up to minutes a game.
The tasks have six forms, whose solutions can be written down.
"""

import re
from collections import defaultdict
from typing import Any

from crbc_jax.envs.alfworld.env import ALFWorldEnv
from crbc_jax.envs.alfworld.options import Options
from crbc_jax.envs.base import Demonstration

# What a goal asks of an item: its predicate -> the verb, and where that is done.
_CHANGES = {
    "isClean": ("clean", "SinkBasinType"),
    "isHot": ("heat", "MicrowaveType"),
    "isCool": ("cool", "FridgeType"),
}


def play_expert(task_id: str, options: Options) -> list[Demonstration]:
    """Plans once, from the game's true state, and plays that.

    Raises:
        ValueError: if the plan does not win within `max_steps`.
    """
    env = ALFWorldEnv(options)
    observation, info = env.reset(options={"task": task_id})
    steps = []
    try:
        for action in plan(env.engine)[: options.max_steps]:
            if info["won"] or action not in info["admissible_actions"]:
                break
            steps.append(Demonstration(observation, info, action))
            observation, _, _, _, info = env.step(action)
    finally:
        env.close()
    if not info["won"]:
        raise ValueError(
            f"ALFWorld task {task_id!r}: {len(steps)} planned actions do not win; "
            f"max_steps is {options.max_steps}"
        )
    return steps


def plan(engine: Any) -> list[str]:
    """Returns actions that solve a game which was just reset.

    Raises:
        ValueError: if the goal has none of the known forms, or its items are missing.
    """
    world = _World(engine)
    goal = engine._game_data["pddl_problem"].partition("(:goal")[2]
    wanted = re.findall(r"\(objectType \?\w+ (\w+)\)", goal)
    place = re.search(r"\(receptacleType \?\w+ (\w+)\)", goal)
    if place is None:  # Look at the last item in the light of the first.
        lamp, item = (world.of_type("objectType", name)[0] for name in wanted)
        return [
            *world.take(item),
            *world.go(world.place_of[lamp]),
            f"use {world.name(lamp)}",
        ]
    target = world.of_type("receptacleType", place[1])[0]
    items = world.of_type("objectType", wanted[0])
    # What is there already counts for two items, but not for one to be changed.
    change = next((c for name, c in _CHANGES.items() if f"({name} " in goal), None)
    if change is None:
        num_there = sum(world.place_of[item] == target for item in items)
        items = [item for item in items if world.place_of[item] != target]
        items = items[: len(wanted) - num_there]
    actions = []
    for item in items if change is None else items[:1]:
        actions += world.take(item)
        if change is not None:
            verb, where = change
            station = world.of_type("receptacleType", where)[0]
            actions += world.go(station)
            actions.append(f"{verb} {world.name(item)} with {world.name(station)}")
        actions += [*world.go(target), *world.open(target)]
        actions.append(f"move {world.name(item)} to {world.name(target)}")
    return actions


class _World:
    """The facts of a game, and what changes of them on the way."""

    def __init__(self, engine: Any):
        self._infos = engine._entity_infos
        self._facts = defaultdict(list)
        for fact in engine.state["_facts"]:
            self._facts[fact.name.lower()].append([a.name for a in fact.arguments])
        self.place_of = dict(self._facts["inreceptacle"])
        self._location_of = dict(self._facts["receptacleatlocation"])
        self._closed = {place for (place,) in self._facts["openable"]}
        self._closed -= {place for (place,) in self._facts["opened"]}
        self._here = self._facts["atlocation"][0][1]

    def name(self, thing: str) -> str:
        """Returns what the player calls it."""
        return self._infos[thing].name

    def of_type(self, relation: str, kind: str) -> list[str]:
        """Returns all things of a type that can be found, in the open ones first.

        Raises:
            ValueError: if there is none.
        """
        known = self.place_of if relation == "objectType" else self._location_of
        things = [
            t for t, k in self._facts[relation.lower()] if k.lower() == kind.lower()
        ]
        found = sorted(
            (thing for thing in things if thing in known),
            key=lambda thing: (self.place_of.get(thing, thing) in self._closed, thing),
        )
        if not found:
            raise ValueError(f"ALFWorld: the game has no {kind} that can be reached")
        return found

    def go(self, place: str) -> list[str]:
        """Goes there, unless the player is."""
        if self._location_of[place] == self._here:
            return []
        self._here = self._location_of[place]
        return [f"go to {self.name(place)}"]

    def open(self, place: str) -> list[str]:
        """Opens it, if it is closed."""
        if place not in self._closed:
            return []
        self._closed.remove(place)
        return [f"open {self.name(place)}"]

    def take(self, item: str) -> list[str]:
        """Fetches an item from where it is."""
        place = self.place_of[item]
        take = f"take {self.name(item)} from {self.name(place)}"
        return [*self.go(place), *self.open(place), take]
