"""Random rollouts for hypothesis, and the closure once more in plain float64 loops.

Independent of the package: dictionaries and loops over rows, no padding.
"""

import collections
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

PLACES = 12


@st.composite
def rollouts(draw, max_groups=3):
    """Columns of rollouts that follow a random map of places, but for some detours.

    So there are long chains, self-loops, cycles that only an episode's end leaves,
    and places where several ways part.
    """
    columns = collections.defaultdict(list)
    place = st.integers(0, PLACES - 1)
    for group in range(draw(st.integers(1, max_groups))):
        follow = draw(st.lists(place, min_size=PLACES, max_size=PLACES))
        for rollout in range(draw(st.integers(1, 4))):
            detours = draw(st.dictionaries(st.integers(0, 11), place, max_size=3))
            actions = draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
            success, here = draw(st.booleans()), draw(place)
            for step, action in enumerate(actions):
                append(columns, group, rollout, step, here, action, success)
                here = detours.get(step, follow[here])
    return dict(columns)


def append(columns, group, rollout, step, anchor, action, success):
    """Appends a row."""
    columns["group_id"].append(group)
    columns["traj_id"].append((group, rollout))
    columns["step"].append(step)
    columns["anchor"].append(anchor)
    columns["action"].append(action)
    columns["reward"].append(0.0)
    columns["success"].append(success)


def walks(*paths, group=0):
    """One rollout a path: anchors, then True or False; there is one action only."""
    columns = collections.defaultdict(list)
    for rollout, (*anchors, success) in enumerate(paths):
        for step, anchor in enumerate(anchors):
            append(columns, group, rollout, step, anchor, "go", success)
    return dict(columns)


def joined(*tables):
    """Several tables of the same columns, one after the other."""
    return {name: [v for t in tables for v in t[name]] for name in tables[0]}


class Process(NamedTuple):
    """Of all groups together; states are (group, anchor), pairs (state, action)."""

    states: list
    matrix: np.ndarray  # M [states, states].
    wins: np.ndarray  # N(s, success) / N(s) [states].
    moves: list  # Of each row: its state, pair, and next state or True or False.
    returned: list  # Of each row: steps to the end, if it is a success; else None.


def process_of(columns):
    """Counts."""
    size = len(columns["step"])
    row_of = {(columns["traj_id"][r], columns["step"][r]): r for r in range(size)}
    length = collections.Counter(columns["traj_id"])
    moves, returned = [], []
    for row in range(size):
        trajectory, step = columns["traj_id"][row], columns["step"][row]
        group, success = columns["group_id"][row], bool(columns["success"][row])
        state = (group, columns["anchor"][row])
        if step == length[trajectory] - 1:
            ahead = success
        elif "next_anchor" in columns:
            ahead = (group, columns["next_anchor"][row])
        else:
            ahead = (group, columns["anchor"][row_of[trajectory, step + 1]])
        moves.append((state, (state, columns["action"][row]), ahead))
        returned.append(length[trajectory] - step if success else None)
    visits = collections.Counter(state for state, _, _ in moves)
    states = list(visits)
    matrix, wins = np.zeros((len(states), len(states))), np.zeros(len(states))
    for state, _, ahead in moves:
        if isinstance(ahead, bool):
            wins[states.index(state)] += ahead / visits[state]
        else:
            matrix[states.index(state), states.index(ahead)] += 1 / visits[state]
    return Process(states, matrix, wins, moves, returned)


def means(keys, values):
    """Mean of the values of each key."""
    sets = collections.defaultdict(list)
    for key, value in zip(keys, values, strict=True):
        sets[key].append(value)
    return {key: float(np.mean(members)) for key, members in sets.items()}


def monte_carlo(process, beta):
    """V0 of each state, and Q0 of each pair."""
    worth = [0.0 if n is None else beta**n for n in process.returned]
    pairs = [pair for _, pair, _ in process.moves]
    return means([state for state, _, _ in process.moves], worth), means(pairs, worth)


def ahead_of(process, value):
    """Value of what follows each row."""
    return [
        float(ahead) if isinstance(ahead, bool) else value[ahead]
        for _, _, ahead in process.moves
    ]


def closure(columns, beta, depth=-1, sigma_min=0.1):
    """Every field of `closure_credit` at every input row, as a dictionary."""
    process = process_of(columns)
    states, pairs, _ = zip(*process.moves, strict=True)
    value, action_value = monte_carlo(process, beta)
    if depth < 0:
        system = np.eye(len(process.states)) - beta * process.matrix
        solved = np.linalg.solve(system, beta * process.wins)
        value = previous = dict(zip(process.states, solved, strict=True))
    for _ in range(max(depth, 0)):
        previous = value
        value = means(states, [beta * v for v in ahead_of(process, previous)])
    if depth:
        worth = [beta * v for v in ahead_of(process, previous)]
        action_value = means(pairs, worth)
    v = np.array([value[state] for state in states])
    q = np.array([action_value[pair] for pair in pairs])
    variance = means(states, (q - v) ** 2)
    sigma = np.sqrt([variance[state] for state in states])
    actions = collections.Counter(state for state, _ in set(pairs))
    number = np.array([actions[state] for state in states])
    credit = np.where(number > 1, (q - v) / np.maximum(sigma, sigma_min), 0)
    return {
        "value": v,
        "action_value": q,
        "advantage": q - v,
        "sigma": sigma,
        "credit": credit,
        "num_actions": number,
    }
