"""ALFWorld: household tasks of up to 50 steps.

    python experiments/run.py --config=configs/alfworld.py --workdir=runs/alfworld

Variants, after a colon: `1.5b` (default) and `7b` are the published settings of CRBC
(arXiv 2609.35082) with Qwen2.5. `smollm2` trains adapters of SmolLM2-135M on the two
easiest kinds of task, with rollouts served by vLLM: minutes an update on two CPU cores.
`small` is a policy of 1M parameters, trained from nothing in minutes on two CPU cores.
Games: `--config.env.alfworld.data_dir=FOLDER`.
"""

from crbc_jax.config import default_config, published_config

VARIANTS = ("1.5b", "7b", "smollm2", "small")


def get_config(variant: str = "1.5b"):
    if variant not in VARIANTS:
        raise ValueError(
            f"configs/alfworld.py has no variant {variant!r}; known: {VARIANTS}"
        )
    is_published = variant in ("1.5b", "7b")
    config = published_config(variant) if is_published else default_config()
    config.env.name = "alfworld"
    config.env.num_workers = 16 if is_published else 2
    config.env.max_steps = 50
    config.env.num_train_tasks = 4096  # All 3,553.
    config.env.num_eval_tasks = 128
    config.rollout.prompt = "alfworld"
    config.rollout.max_prompt_tokens = 2048
    config.advantage.graphgpo.discount = 0.1
    if variant == "smollm2":
        config.env.max_steps = 12
        config.env.alfworld.task_types = "Pick,Look"
        config.env.num_workers = 1
        config.env.num_eval_tasks = 64
        config.model.directory = "models/SmolLM2-135M-Instruct"
        config.model.lora_rank = 16
        config.rollout.engine = "vllm"
        config.rollout.vllm.arguments = "--enforce-eager --max-num-seqs 16"
        config.rollout.prompt = "alfworld_compact"
        config.rollout.history_length = 1
        config.rollout.max_prompt_tokens = 768
        config.rollout.max_response_tokens = 24
        config.rollout.tasks_per_update = 4
        config.rollout.group_size = 4
        config.warm_start.steps = 30
        config.warm_start.batch_rows = 16
        config.warm_start.num_tasks = 256
        config.warm_start.learning_rate = 1e-3
        config.learner.num_updates = 8
        config.learner.learning_rate = 1e-4
        config.learner.row_tokens = 800
        config.learner.microbatch_rows = 1
        config.evaluate.every = 4
        config.checkpoint.every = 1
    if variant == "small":
        config.env.max_steps = 20
        config.env.alfworld.task_types = "Pick,Look"  # The easiest.
        config.env.num_eval_tasks = 32
        config.model.directory = "preset:text_tiny"
        config.rollout.prompt = "alfworld_compact"
        config.rollout.history_length = 1
        config.rollout.max_prompt_tokens = 800
        config.rollout.max_response_tokens = 24
        config.rollout.tasks_per_update = 4
        config.warm_start.steps = 300
        config.warm_start.batch_rows = 16
        config.warm_start.learning_rate = 2e-3
        config.warm_start.num_tasks = 128
        config.learner.num_updates = 4
        config.learner.learning_rate = 1e-4
        config.learner.weight_decay = 0.0
        config.learner.row_tokens = 824
        config.learner.microbatch_rows = 2
        config.evaluate.every = 4
    return config
