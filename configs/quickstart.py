"""Text Sokoban with a tiny policy: the whole path, on two CPU cores, in minutes.

    python experiments/run.py --config=configs/quickstart.py --workdir=runs/quickstart

Append `:smoke` to the config's path for a run of under a minute, `:hard` for levels
of 6 to 13 moves (the setting of experiments/compare.py).
"""

from crbc_jax.config import default_config

VARIANTS = ("full", "smoke", "hard")


def get_config(variant: str = "full"):
    if variant not in VARIANTS:
        raise ValueError(
            f"configs/quickstart.py has no variant {variant!r}; known: {VARIANTS}"
        )
    config = default_config()
    # A competent policy, then loosened: one that stopped early learns far less.
    config.warm_start.steps = 500
    config.warm_start.num_tasks = 4096
    config.warm_start.noise_steps = 50
    config.warm_start.label_noise = 0.7
    config.rollout.tasks_per_update = 32
    config.learner.minibatch_groups = 4  # Eight optimiser steps an update.
    if variant == "hard":
        config.env.max_steps = 20
        config.env.sokoban.min_moves = 6
        config.env.sokoban.max_moves = 13
        config.rollout.tasks_per_update = 16
        config.warm_start.label_noise = 0.6  # Longer levels forgive less of it.
    if variant == "smoke":
        config.env.num_train_tasks = 256
        config.env.num_eval_tasks = 32
        config.warm_start.steps = 40
        config.warm_start.noise_steps = 10
        config.warm_start.num_tasks = 256
        config.rollout.tasks_per_update = 4
        config.learner.minibatch_groups = 0
        config.learner.num_updates = 6
        config.evaluate.every = 3
        config.checkpoint.every = 2
    return config
