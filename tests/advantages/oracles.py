"""Every estimator once more: plain Python and float64, from the written specification.

Independent of the package: dictionaries and loops over rows, no padding. `steps` maps
column names to lists, as `crbc_jax.step_advantages` takes them.
"""

import collections
import math

import numpy as np


class Table:
    """Rows of `steps` by trajectory, group and anchor."""

    def __init__(self, steps):
        self.columns = steps
        self.size = len(steps["group_id"])
        self.group = steps["group_id"]
        self.valid = steps.get("is_action_valid", [True] * self.size)
        rows = collections.defaultdict(list)
        for row in range(self.size):
            rows[self.group[row], steps["traj_id"][row]].append(row)
        self.trajectories = {
            key: sorted(members, key=lambda r: steps["step"][r])
            for key, members in rows.items()
        }
        self.anchor = [(self.group[r], steps["anchor"][r]) for r in range(self.size)]
        self.after, self.path = {}, {}
        for members in self.trajectories.values():
            for number, row in enumerate(members):
                self.path[row] = members
                following = members[number + 1 :]
                self.after[row] = following[0] if following else None
        given = steps.get("next_anchor")
        self.next_anchor = [
            (self.group[r], given[r])
            if given is not None
            else self.anchor[r if self.after[r] is None else self.after[r]]
            for r in range(self.size)
        ]

    def success(self, row):
        return bool(self.columns["success"][row])

    def left(self, row):
        """Steps from this row to the end, this one counted."""
        return len(self.path[row]) - self.path[row].index(row)

    def returned(self, row):
        return math.fsum(float(self.columns["reward"][r]) for r in self.path[row])

    def companions(self, row):
        return sum(key[0] == self.group[row] for key in self.trajectories)

    def backwards(self, per_row):
        """Fills per_row(row, result of the next row or None) from the ends."""
        result = {}
        for members in self.trajectories.values():
            for row in reversed(members):
                result[row] = per_row(row, result.get(self.after[row]))
        return result


def z_score(value, members, normalization, ddof=1):
    """Of a value among members; 0 if they are one or all equal."""
    if max(members) == min(members):
        return 0.0
    centred = value - np.mean(members)
    if normalization == "mean":
        return centred
    return centred / (np.std(members, ddof=ddof) + 1e-6)


def normalize_by(keys, values, normalization, ddof=1):
    sets = collections.defaultdict(list)
    for key, value in zip(keys, values, strict=True):
        sets[key].append(value)
    return [
        z_score(v, sets[k], normalization, ddof)
        for k, v in zip(keys, values, strict=True)
    ]


def scores(table, stat_weighting, penalty):
    """Score of each row, and per group the values that statistics are taken of."""
    own, members = [], collections.defaultdict(list)
    for row in range(table.size):
        counted = table.path[row] if stat_weighting == "trajectories" else [row]
        invalid = sum(not table.valid[r] for r in counted)
        own.append(table.returned(row) - penalty * invalid)
        if stat_weighting == "steps" or row == table.path[row][0]:
            members[table.group[row]].append(own[-1])
    return own, members


def episode(
    table,
    stat_weighting="trajectories",
    normalization="mean_std",
    invalid_action_penalty=0.1,
):
    own, members = scores(table, stat_weighting, invalid_action_penalty)
    return np.array(
        [
            z_score(own[r], members[table.group[r]], normalization)
            if table.companions(r) > 1
            else 0.0
            for r in range(table.size)
        ]
    )


def grpo(steps, **options):
    return episode(Table(steps), **options)


def rloo(steps, stat_weighting="trajectories", invalid_action_penalty=0.1):
    table = Table(steps)
    own, members = scores(table, stat_weighting, invalid_action_penalty)
    out = []
    for row in range(table.size):
        everyone = members[table.group[row]]
        if table.companions(row) < 2:
            out.append(0.0)
        else:
            factor = len(everyone) / (len(everyone) - 1)
            out.append(factor * z_score(own[row], everyone, "mean"))
    return np.array(out)


def whiten(values, tokens):
    flat = np.repeat(np.asarray(values, float), tokens)
    scale = 1 / np.sqrt(flat.var(ddof=1) + 1e-8)
    return (np.asarray(values) - flat.mean()) * scale


def reinforce_pp(steps, stat_weighting="trajectories", invalid_action_penalty=0.1):
    own, _ = scores(Table(steps), stat_weighting, invalid_action_penalty)
    return whiten(own, steps["response_len"])


def reinforce_pp_baseline(
    steps, stat_weighting="trajectories", invalid_action_penalty=0.1
):
    centred = episode(Table(steps), stat_weighting, "mean", invalid_action_penalty)
    return whiten(centred, steps["response_len"])


def step_returns(table, discount, penalty):
    reward = table.columns["reward"]
    sums = table.backwards(
        lambda row, later: float(reward[row]) + discount * (later or 0.0)
    )
    return [sums[r] - penalty * (not table.valid[r]) for r in range(table.size)]


def gigpo(steps, discount=0.95, step_weight=1.0, **options):
    table = Table(steps)
    penalty = options.get("invalid_action_penalty", 0.1)
    returns = step_returns(table, discount, penalty)
    normalization = options.get("normalization", "mean_std")
    step = normalize_by(table.anchor, returns, normalization)
    return episode(table, **options) + step_weight * np.array(step)


def hgpo(
    steps,
    discount=0.95,
    history_length=2,
    length_weight_alpha=1.0,
    base_group=False,
    **options,
):
    table = Table(steps)
    penalty = options.get("invalid_action_penalty", 0.1)
    normalization = options.get("normalization", "mean_std")
    returns = step_returns(table, discount, penalty)
    weighted, weights = np.zeros(table.size), np.zeros(table.size)
    if base_group:
        advantage = episode(table, **options)
        for row in range(table.size):
            group = [advantage[r] for r in range(table.size)]
            same = [
                a for r, a in enumerate(group) if table.group[r] == table.group[row]
            ]
            if any(same):
                weighted[row] += advantage[row]
                weights[row] += 1.0
    for k in range(1, history_length + 2):
        sets = collections.defaultdict(list)
        for row in range(table.size):
            past = table.path[row][: table.path[row].index(row) + 1]
            if len(past) >= k:
                sets[tuple(table.anchor[r] for r in past[-k:])].append(row)
        for members in sets.values():
            values = [returns[r] for r in members]
            if max(values) > min(values):
                for row in members:
                    weight = (k + 1) ** length_weight_alpha
                    weighted[row] += weight * z_score(
                        returns[row], values, normalization, ddof=0
                    )
                    weights[row] += weight
    return weighted / (weights + 1e-6)


def distances(table):
    """Breadth-first from success, by relaxing until nothing changes."""
    best = {}
    changed = True
    while changed:
        changed = False
        for row in range(table.size):
            wins = table.after[row] is None and table.success(row)
            ahead = 0 if wins else best.get(table.next_anchor[row], math.inf)
            if ahead + 1 < best.get(table.anchor[row], math.inf):
                best[table.anchor[row]] = ahead + 1
                changed = True
    return best


def graphgpo(
    steps,
    discount=0.1,
    normalize_distance=False,
    success_reward=10.0,
    step_weight=1.0,
    episode_weight=1.0,
    **options,
):
    table = Table(steps)
    best = distances(table)
    penalty = options.get("invalid_action_penalty", 0.1)
    winners = {table.group[r] for r in range(table.size) if table.success(r)}
    returns = []
    for row in range(table.size):
        own_group = [d for (g, _), d in best.items() if g == table.group[row]]
        beyond = max(own_group, default=0) + 1
        wins = table.after[row] is None and table.success(row)
        exponent = 0 if wins else best.get(table.next_anchor[row], beyond)
        if normalize_distance:
            exponent += 1 - best.get(table.anchor[row], beyond)
        reward = success_reward * discount**exponent
        returns.append(reward - penalty * (not table.valid[row]))
    step = normalize_by(table.anchor, returns, options.get("normalization", "mean_std"))
    step = [s if table.group[r] in winners else 0.0 for r, s in enumerate(step)]
    return episode_weight * episode(table, **options) + step_weight * np.array(step)


def migpo(steps, discount=0.95, milestone_reward=10.0, step_weight=1.0, **options):
    table = Table(steps)
    penalty = options.get("invalid_action_penalty", 0.1)
    reached = steps["milestone_achieved"]

    def steps_to_milestone(row, later):
        return 0 if reached[row] else math.inf if later is None else later + 1

    ahead = table.backwards(steps_to_milestone)
    keys, values = [], []
    for row in range(table.size):
        past = table.path[row][: table.path[row].index(row)]
        keys.append((table.group[row], sum(bool(reached[r]) for r in past)))
        worth = 0.0 if ahead[row] == math.inf else discount ** ahead[row]
        values.append(milestone_reward * worth - penalty * (not table.valid[row]))
    step = normalize_by(keys, values, options.get("normalization", "mean_std"))
    return episode(table, **options) + step_weight * np.array(step)


def g2po(steps, discount=0.95, success_reward=10.0, step_weight=1.0, **options):
    table = Table(steps)
    penalty = options.get("invalid_action_penalty", 0.1)
    normalization = options.get("normalization", "mean_std")
    visits = collections.defaultdict(list)
    for row in range(table.size):
        worth = discount ** table.left(row) * table.returned(row)
        visits[table.anchor[row]].append(worth)
    value = {anchor: np.mean(worths) for anchor, worths in visits.items()}
    ahead = []
    for row in range(table.size):
        if table.after[row] is None:
            ahead.append(success_reward if table.success(row) else 0.0)
        else:
            ahead.append(value[table.anchor[table.after[row]]])
    penalised = [a - penalty * (not v) for a, v in zip(ahead, table.valid, strict=True)]
    node = normalize_by(table.anchor, penalised, normalization)
    change = [a - value[table.anchor[r]] for r, a in enumerate(ahead)]
    edge = normalize_by(table.group, change, normalization)
    edge = [e if table.companions(r) > 1 else 0.0 for r, e in enumerate(edge)]
    return episode(table, **options) + step_weight * (np.array(node) + np.array(edge))


def closure(table, beta):
    """V of every anchor by a dense solve per batch, and Q of every row."""
    index = {anchor: i for i, anchor in enumerate(dict.fromkeys(table.anchor))}
    visits = collections.Counter(table.anchor)
    matrix, right = np.eye(len(index)), np.zeros(len(index))
    for row in range(table.size):
        here = index[table.anchor[row]]
        weight = beta / visits[table.anchor[row]]
        if table.after[row] is not None:
            matrix[here, index[table.next_anchor[row]]] -= weight
        else:
            right[here] += weight * table.success(row)
    solved = np.linalg.solve(matrix, right)
    return {anchor: solved[i] for anchor, i in index.items()}


def ahead_of(table, value):
    return [
        float(table.success(r))
        if table.after[r] is None
        else value[table.next_anchor[r]]
        for r in range(table.size)
    ]


def gated_bepo(steps, discount=0.95, gae_lambda=0.95, mix=0.5, **options):
    table = Table(steps)
    value = closure(table, discount)
    ahead = ahead_of(table, value)
    residual = [discount * a - value[table.anchor[r]] for r, a in enumerate(ahead)]
    residual = [0.0 if abs(d) < 1e-14 else d for d in residual]
    total = table.backwards(
        lambda row, later: residual[row] + discount * gae_lambda * (later or 0.0)
    )
    successors = collections.defaultdict(set)
    for row in range(table.size):
        end = table.after[row] is None
        successors[table.anchor[row]].add(
            ("end", table.success(row)) if end else table.next_anchor[row]
        )
    gated = [r for r in range(table.size) if len(successors[table.anchor[r]]) > 1]
    credit = normalize_by(
        [table.group[r] for r in gated],
        [total[r] for r in gated],
        options.get("normalization", "mean_std"),
    )
    advantage = episode(table, **options)
    for row, bellman in zip(gated, credit, strict=True):
        advantage[row] = (1 - mix) * advantage[row] + mix * bellman
    return advantage


def monte_carlo(table, beta):
    """V0 of every anchor, and Q0 of every (anchor, action): means over visits."""
    worth = [beta ** table.left(r) * table.success(r) for r in range(table.size)]
    pairs = list(zip(table.anchor, table.columns["action"], strict=True))

    def means(keys):
        sets = collections.defaultdict(list)
        for key, value in zip(keys, worth, strict=True):
            sets[key].append(value)
        return {key: np.mean(values) for key, values in sets.items()}

    return means(table.anchor), means(pairs), pairs


def rtmc(steps, discount=0.95):
    table = Table(steps)
    value, action_value, pairs = monte_carlo(table, discount)
    return np.array(
        [action_value[p] - value[a] for p, a in zip(pairs, table.anchor, strict=True)]
    )


def crbc(
    steps,
    beta=0.98,
    depth=-1,
    sigma_min=0.1,
    group_weight=1.0,
    step_weight=5.0,
    **options,
):
    table = Table(steps)
    value, action_value, pairs = monte_carlo(table, beta)
    visits = collections.Counter(table.anchor)
    if depth < 0:
        value = closure(table, beta)
    for _ in range(max(depth, 0)):
        previous, value = value, dict.fromkeys(value, 0.0)
        for row, a in enumerate(ahead_of(table, previous)):
            value[table.anchor[row]] += beta * a / visits[table.anchor[row]]
    if depth != 0:
        backed_up = ahead_of(table, value if depth < 0 else previous)
        sets = collections.defaultdict(list)
        for pair, a in zip(pairs, backed_up, strict=True):
            sets[pair].append(beta * a)
        action_value = {pair: np.mean(values) for pair, values in sets.items()}
    advantage = [
        action_value[p] - value[a] for p, a in zip(pairs, table.anchor, strict=True)
    ]
    squares, actions = collections.defaultdict(float), collections.defaultdict(set)
    for row, anchor in enumerate(table.anchor):
        squares[anchor] += advantage[row] ** 2 / visits[anchor]
        actions[anchor].add(pairs[row])
    step = [
        a / max(math.sqrt(squares[s]), sigma_min) if len(actions[s]) > 1 else 0.0
        for a, s in zip(advantage, table.anchor, strict=True)
    ]
    return group_weight * episode(table, **options) + step_weight * np.array(step)


def proas(steps, base="grpo", **options):
    table = Table(steps)
    if base == "base_adv":
        whole = part = np.array(steps["base_adv"], float)
    else:
        whole = part = ORACLES[base](steps, **options)
        if base in ("gigpo", "graphgpo", "migpo", "g2po", "crbc"):
            part = ORACLES[base](steps, **options, step_weight=0.0)
    drift = table.backwards(
        lambda row, later: (not steps["advancing"][row]) + (later or 0)
    )
    out = []
    for row in range(table.size):
        own, extra = part[row], whole[row] - part[row]
        if own < 0:
            total = sum(drift[r] for r in table.path[row])
            own *= drift[row] * len(table.path[row]) / total if total else 1.0
        if not steps["reasonable"][row]:
            own, extra = min(own, 0.0), min(extra, 0.0)
        out.append(own + extra)
    return np.array(out)


ORACLES = {
    "crbc": crbc,
    "g2po": g2po,
    "gated_bepo": gated_bepo,
    "gigpo": gigpo,
    "graphgpo": graphgpo,
    "grpo": grpo,
    "hgpo": hgpo,
    "migpo": migpo,
    "proas": proas,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "rloo": rloo,
    "rtmc": rtmc,
}
