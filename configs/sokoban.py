"""Sokoban 6x6 with one box, in up to 15 steps.

    python experiments/run.py --config=configs/sokoban.py --workdir=runs/sokoban

Variants, after a colon: `1.5b` (default) and `7b` are the published settings with
Qwen2.5 on the board as text; `small` is the quick start (configs/quickstart.py) by its
other name. `vllm` is a few updates of that with rollouts served by vLLM, of
`--config.rollout.vllm.python=INTERPRETER` (see third_party/vllm). `visual` has the
published settings for pictures, whose model (Qwen2.5-VL) this package cannot run yet:
it says so.
"""

from crbc_jax.config import default_config, published_config

VARIANTS = ("1.5b", "7b", "visual", "small", "vllm")


def get_config(variant: str = "1.5b"):
    if variant not in VARIANTS:
        raise ValueError(
            f"configs/sokoban.py has no variant {variant!r}; known: {VARIANTS}"
        )
    if variant in ("small", "vllm"):
        config = default_config()
        config.warm_start.steps = 500
        config.warm_start.num_tasks = 4096
        config.warm_start.noise_steps = 50
        config.warm_start.label_noise = 0.7
        config.rollout.tasks_per_update = 32
        config.learner.minibatch_groups = 4
        if variant == "vllm":
            config.rollout.engine = "vllm"
            config.rollout.tasks_per_update = 8
            config.learner.minibatch_groups = 0
            config.learner.num_updates = 5
            config.env.num_eval_tasks = 64
            config.evaluate.every = 5
            config.warm_start.steps = 200
        return config
    config = published_config("1.5b" if variant == "visual" else variant)
    config.env.max_steps = 15
    config.env.num_train_tasks = 65_536
    config.env.num_eval_tasks = 128
    config.rollout.prompt = "sokoban"
    config.rollout.max_prompt_tokens = 1024
    config.rollout.tasks_per_update = 32
    config.learner.minibatch_rows = 64
    config.advantage.gigpo.normalization = "mean"
    config.advantage.graphgpo.discount = 0.8
    if variant == "visual":
        config.model.directory = "models/Qwen2.5-VL-3B-Instruct"
        config.rollout.history_length = 0
    return config
