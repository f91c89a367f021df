"""Random rollouts on small graphs, with every column that any estimator reads."""

import numpy as np

NAMES = (
    "group_id traj_id step anchor action reward success is_action_valid response_len "
    "milestone_achieved reasonable advancing base_adv"
).split()


def random_steps(seed, num_groups=4, num_trajectories=4, longest=9, num_anchors=6):
    """Walks on a ring with jumps, self-loops and step rewards; some succeed."""
    rng = np.random.default_rng(seed)
    columns = {name: [] for name in NAMES}
    for group in range(num_groups):
        for rollout in range(num_trajectories):
            # Every group has both outcomes; the others fall as they may.
            success = bool(rollout == 0 or (rollout > 1 and rng.random() < 0.5))
            length = int(rng.integers(2, longest + 1))
            anchor = 0
            for step in range(length):
                action = int(rng.integers(3))
                last_win = success and step == length - 1
                columns["group_id"].append(group)
                columns["traj_id"].append(100 * group + rollout)
                columns["step"].append(step)
                columns["anchor"].append(anchor)
                columns["action"].append(action)
                columns["reward"].append(-0.1 + 10.0 * last_win)
                columns["success"].append(success)
                columns["is_action_valid"].append(bool(rng.random() < 0.8))
                columns["response_len"].append(int(rng.integers(1, 9)))
                columns["milestone_achieved"].append(bool(rng.random() < 0.3))
                columns["reasonable"].append(bool(rng.random() < 0.7))
                columns["advancing"].append(bool(rng.random() < 0.4))
                columns["base_adv"].append(1.0 if success else -0.5)
                if action < 2:
                    anchor = (anchor + action + int(rng.random() < 0.1)) % num_anchors
    return columns


def take(steps, rows):
    """The given rows of every column, in that order."""
    return {name: [values[row] for row in rows] for name, values in steps.items()}


def one_step_groups(rewards, success=None):
    """Groups of one-step trajectories from one state, by their rewards."""
    columns = {name: [] for name in NAMES}
    for group, group_rewards in enumerate(rewards):
        for rollout, reward in enumerate(group_rewards):
            values = (
                group,
                (group, rollout),
                0,
                "start",
                "go",
                reward,
                bool(reward) if success is None else success,
                True,
                5,
                False,
                True,
                False,
                0.0,
            )
            for name, value in zip(NAMES, values, strict=True):
                columns[name].append(value)
    return columns
