"""WebShop: find and buy what an instruction asks for, in up to 15 steps.

    python experiments/run.py --config=configs/webshop.py --workdir=runs/webshop

Variants, after a colon: `1.5b` (default) and `7b` are the published settings of CRBC
(arXiv 2609.35082) with Qwen2.5, on the official small catalogue; `small` is a policy of
1M parameters, trained from nothing in minutes on two CPU cores, on a generated
catalogue. Products: `--config.env.webshop.data_dir=FOLDER`.
"""

from crbc_jax.config import default_config, published_config

VARIANTS = ("1.5b", "7b", "small")


def get_config(variant: str = "1.5b"):
    if variant not in VARIANTS:
        raise ValueError(
            f"configs/webshop.py has no variant {variant!r}; known: {VARIANTS}"
        )
    config = default_config() if variant == "small" else published_config(variant)
    config.env.name = "webshop"
    config.env.num_workers = 0  # One catalogue for all; a session costs nothing.
    config.env.max_steps = 15
    config.env.num_train_tasks = 10_000  # All 6,410 of the small catalogue.
    config.env.num_eval_tasks = 128
    config.env.webshop.data_dir = "data/webshop"
    config.env.webshop.observation = "text_rich"
    config.rollout.prompt = "webshop"
    config.rollout.max_prompt_tokens = 5120
    config.learner.minibatch_rows = 0 if variant == "small" else 64
    config.advantage.gigpo.normalization = "mean"
    config.advantage.graphgpo.discount = 0.2
    if variant == "small":
        config.env.max_steps = 10
        config.env.num_eval_tasks = 64
        config.env.webshop.data_dir = "generated"
        config.env.webshop.observation = "text"
        config.model.directory = "preset:text_tiny"
        config.rollout.prompt = "webshop_compact"
        config.rollout.history_length = 4
        config.rollout.max_prompt_tokens = 592
        config.rollout.max_response_tokens = 24
        config.rollout.tasks_per_update = 8
        config.warm_start.steps = 600
        config.warm_start.batch_rows = 32
        config.warm_start.learning_rate = 2e-3
        config.warm_start.num_tasks = 1024
        config.learner.num_updates = 8
        config.learner.learning_rate = 1e-4
        config.learner.weight_decay = 0.0
        config.learner.row_tokens = 640
        config.learner.microbatch_rows = 4
        config.evaluate.every = 4
    return config
