"""Config in, plan out: what a run will do and need, before anything is compiled."""

import dataclasses
import difflib
import functools
import os
import pathlib
import shutil

from ml_collections import ConfigDict

from crbc_jax import envs
from crbc_jax.advantages import ANNOTATED, WITHOUT_GROUP, make_estimator
from crbc_jax.envs.base import TaskSet, digest_lines
from crbc_jax.learner.gradient import DTYPES
from crbc_jax.learner.losses import (
    IMPORTANCE_LEVELS,
    KL_FORMS,
    OLD_LOGPROBS,
    RATIOS,
)
from crbc_jax.learner.packing import AGGREGATIONS, DEGENERATE_GROUPS
from crbc_jax.models.config import (
    PRESET_PREFIX,
    DecoderConfig,
    count_params,
    load_config,
    preset_names,
)
from crbc_jax.models.decoder import REMAT
from crbc_jax.models.weights import draws_weights, has_weights
from crbc_jax.rollout import ENGINES
from crbc_jax.rollout.actions import PARSERS
from crbc_jax.rollout.templates import PROMPTS
from crbc_jax.types import UserError

# What runs on any machine, by environment; the quick start for the others.
_SMALL = {
    "alfworld": "configs/alfworld.py:small --config.env.alfworld.data_dir=FOLDER",
    "webshop": "configs/webshop.py:small",
}
_SMOLLM2 = "SmolLM2-135M-Instruct"
_FLOAT_BYTES = 4


class ConfigError(UserError):
    """A setting that no run can work with."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The numbers of a run; `str` is the table that the user sees first."""

    model: str
    num_params: int
    train_tasks: int
    eval_tasks: int
    digest: str  # Of both task lists.
    max_steps_per_update: int
    max_tokens_per_update: int
    num_updates: int
    memory_gib: float  # At the peak of an update, all devices together.
    available_gib: float  # Main memory of this machine.
    workdir: pathlib.Path

    def __str__(self) -> str:
        rows = {
            "model": f"{self.model}, {self.num_params:,} parameters",
            "tasks": f"{self.train_tasks:,} to train, {self.eval_tasks:,} held out "
            f"(digest {self.digest[:12]})"
            if self.digest
            else "no data",
            "an update": f"at most {self.max_steps_per_update:,} environment steps, "
            f"{self.max_tokens_per_update:,} tokens",
            "updates": f"{self.num_updates:,}",
            "memory": f"about {self.memory_gib:.2f} GiB; this machine has "
            f"{self.available_gib:.1f} GiB",
            "workdir": str(self.workdir),
        }
        return "\n".join(f"{name:>10}  {value}" for name, value in rows.items())


def make_plan(config: ConfigDict, workdir: pathlib.Path) -> Plan:
    """Checks the whole config and says what the run will do.

    Reads the model's config.json and lists the tasks; touches no accelerator.

    Raises:
        ConfigError: naming the field, its value, and what to write instead; with the
            plan and all that is missing, if the machine lacks the model or memory.
    """
    _check_settings(config)
    _check_writable(workdir)
    missing = []
    model = _read_model(config.model, missing)
    options, name = env_options(config.env), config.env.name
    try:
        train = envs.tasks(name, "train", count=config.env.num_train_tasks, **options)
        held_out = envs.tasks(name, "eval", count=config.env.num_eval_tasks, **options)
    except ValueError as error:  # Of the environment, which names its own field.
        if not missing:
            raise ConfigError(f"config.env: {error}") from error
        missing.append(f"config.env: {error}")
        train = held_out = TaskSet((), "")

    rollout = config.rollout
    episodes = rollout.tasks_per_update * rollout.group_size
    steps = episodes * config.env.max_steps
    tokens_a_step = rollout.max_prompt_tokens + rollout.max_response_tokens
    num_params = count_params(model)
    memory = _memory_bytes(config, model, num_params, tokens_a_step) / 2**30
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if memory > available:
        missing.append(
            f"config.model.directory={config.model.directory!r} needs about "
            f"{memory:.1f} GiB and this machine has {available:.1f} GiB"
        )
    plan = Plan(
        model=config.model.directory,
        num_params=num_params,
        train_tasks=len(train.ids),
        eval_tasks=len(held_out.ids),
        digest=train.digest and digest_lines([train.digest, held_out.digest]),
        max_steps_per_update=steps,
        max_tokens_per_update=steps * tokens_a_step,
        num_updates=config.learner.num_updates,
        memory_gib=memory,
        available_gib=available,
        workdir=workdir,
    )
    if missing:
        small = _SMALL.get(name, "configs/quickstart.py")
        what = "\n".join(f"- {text}" for text in missing)
        raise ConfigError(
            f"this run cannot begin here.\n{plan}\nWhat is missing:\n{what}\n"
            f"What runs here: python experiments/run.py --config={small}"
        )
    return plan


def _read_model(settings: ConfigDict, missing: list[str]) -> DecoderConfig:
    """Reads its shape, of a model that is not there the known one."""
    directory = settings.directory
    name = pathlib.PurePath(directory).name
    if "-VL-" in name:
        raise ConfigError(
            f"config.model.directory={directory!r}: models that see pictures cannot be "
            "run yet; what can be is the board as text, --config=configs/sokoban.py"
        )
    if name == _SMOLLM2 and not pathlib.Path(directory).expanduser().is_dir():
        raise ConfigError(
            f"config.model.directory={directory!r}: no such directory; to make it: "
            f"python experiments/get_model.py smollm2 --directory={directory}"
        )
    if pathlib.Path(directory).expanduser().is_dir() or name not in preset_names():
        config = load_config(directory)
        if not draws_weights(settings) and not has_weights(directory):
            raise ConfigError(
                f"config.model.directory={directory!r}: it holds no weights "
                "(model.safetensors, or parts and their index); get the whole model, "
                "or set config.model.fresh=True to draw new ones"
            )
        return config
    missing.append(
        f"config.model.directory={directory!r}: no such directory; to get it: "
        f"hf download Qwen/{name} --local-dir {directory}"
    )
    return load_config(f"{PRESET_PREFIX}{name}")


def env_options(env: ConfigDict) -> dict:
    """The keyword arguments of envs.make and envs.tasks for `config.env`.

    Raises:
        ConfigError: if no environment has that name.
    """
    trainable = [name for name in envs.ENVIRONMENTS if name in env]
    _check_known("config.env.name", env.name, trainable)
    return {"max_steps": env.max_steps, **env[env.name].to_dict()}


def _memory_bytes(config, model, num_params, tokens_a_step) -> float:
    """Peak of an update: state, gradient, the sampler's copy, and activations."""
    copies = 5 + (config.loss.kl_coef > 0)  # Parameters, 2 moments, gradient, sampler.
    rows = config.learner.microbatch_rows
    # Kept for the backward pass: about 16 vectors a token and layer, and the logits.
    activations = rows * (
        tokens_a_step * model.num_layers * 16 * model.hidden_size
        + config.rollout.max_response_tokens * model.vocab_size * 3
    )
    episodes = config.rollout.tasks_per_update * config.rollout.group_size
    cache = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    return _FLOAT_BYTES * (
        copies * num_params + activations + episodes * tokens_a_step * cache
    )


def _check_known(field: str, value: str, known) -> None:
    if value not in known:
        near = difflib.get_close_matches(str(value), list(known), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{field}={value!r} is not known: {sorted(known)}{hint}")


# What a setting alone must be: in words, as a test, and of which ones.
_BOUNDS = (
    (
        "must be at least 1",
        lambda value: value >= 1,
        "env.max_steps env.num_train_tasks env.num_eval_tasks rollout.tasks_per_update "
        "rollout.max_prompt_tokens rollout.max_response_tokens learner.microbatch_rows "
        "learner.num_epochs warm_start.batch_rows warm_start.num_tasks evaluate.every "
        "checkpoint.every checkpoint.keep_last rollout.vllm.num_servers",
    ),
    (
        "must be 0 or more",
        lambda value: value >= 0,
        "env.num_workers model.lora_rank rollout.vllm.num_retries "
        "rollout.vllm.max_mismatch "
        "rollout.history_length rollout.gate_step evaluate.temperature "
        "loss.kl_coef loss.importance_cap learner.num_updates learner.learning_rate "
        "learner.weight_decay "
        "learner.minibatch_groups learner.minibatch_rows learner.row_tokens "
        "warm_start.steps "
        "warm_start.noise_steps",
    ),
    (
        "must be positive",
        lambda value: value > 0,
        "rollout.vllm.start_timeout rollout.vllm.request_timeout "
        "env.step_timeout rollout.temperature "
        "rollout.episode_timeout loss.clip_high model.lora_alpha learner.max_grad_norm "
        "warm_start.learning_rate",
    ),
    (
        "must be in [0, 1]",
        lambda value: 0 <= value <= 1,
        "rollout.min_divergence warm_start.label_noise",
    ),
    ("must be in (0, 1]", lambda value: 0 < value <= 1, "loss.clip_low"),
    ("must be above 1", lambda value: value > 1, "loss.dual_clip"),
    ("must be 0 or more, below 2**32", lambda value: 0 <= value < 2**32, "seed"),
    (
        "must be 0 (strictly on-policy) or 1 (collection overlaps the update)",
        lambda value: value in (0, 1),
        "rollout.max_policy_lag",
    ),
)
_CHOICES = {
    "rollout.engine": ENGINES,
    "rollout.prompt": PROMPTS,
    "rollout.parser": PARSERS,
    "loss.ratio": RATIOS,
    "loss.importance_level": IMPORTANCE_LEVELS,
    "loss.kl_form": KL_FORMS,
    "loss.aggregation": AGGREGATIONS,
    "loss.degenerate_groups": DEGENERATE_GROUPS,
    "learner.old_logprobs": OLD_LOGPROBS,
    "rollout.vllm.dtype": DTYPES,
    "learner.compute_dtype": DTYPES,
    "learner.moment_dtype": DTYPES,
    "learner.remat": REMAT,
}


def _check_settings(config: ConfigDict) -> None:
    """Refuses values that would fail later, or silently do nothing."""

    def value_of(field: str):
        return functools.reduce(lambda node, name: node[name], field.split("."), config)

    def need(holds: bool, field: str, words: str) -> None:
        if not holds:
            raise ConfigError(f"config.{field}={value_of(field)!r}: {words}")

    for words, holds, fields in _BOUNDS:
        for field in fields.split():
            need(holds(value_of(field)), field, words)
    for field, known in _CHOICES.items():
        _check_known(f"config.{field}", value_of(field), known)
    try:
        make_estimator(config.advantage)
    except ValueError as error:
        raise ConfigError(f"config.advantage: {error}") from error
    need(
        config.advantage.name not in ANNOTATED,
        "advantage.name",
        "needs annotations of each step that no environment here gives; it is for "
        "crbc_jax.step_advantages on your own rollouts",
    )
    need(
        config.rollout.group_size >= 1 + (config.advantage.name not in WITHOUT_GROUP),
        "rollout.group_size",
        f"{config.advantage.name!r} compares the rollouts of a task: at least 2",
    )
    need(
        not (config.learner.minibatch_groups and config.learner.minibatch_rows),
        "learner.minibatch_rows",
        "set either this or config.learner.minibatch_groups, not both",
    )
    need(
        config.rollout.max_policy_lag == 0
        or config.learner.old_logprobs == "sampled"
        or config.loss.importance_cap > 0,
        "learner.old_logprobs",
        'rollouts of an older policy (config.rollout.max_policy_lag=1) need "sampled", '
        "or config.loss.importance_cap above 0",
    )
    need(
        config.loss.importance_cap == 0 or config.learner.old_logprobs == "recomputed",
        "loss.importance_cap",
        'needs config.learner.old_logprobs="recomputed": ratios to the sampled '
        "log-probabilities weigh the sampler's difference already",
    )
    vllm = config.rollout.vllm
    need(
        config.rollout.engine != "vllm" or vllm.urls or shutil.which(vllm.python),
        "rollout.vllm.python",
        "must be an interpreter that has vLLM, to start servers with; "
        "third_party/vllm/install.sh makes one. Or name running servers by "
        "config.rollout.vllm.urls",
    )
    need(
        not vllm.urls or vllm.folder,
        "rollout.vllm.folder",
        "must be a folder that the servers of config.rollout.vllm.urls see, too: "
        "weights go through files",
    )
    warm = config.warm_start.directory
    need(
        not warm or (pathlib.Path(warm) / "checkpoints" / "000000").is_dir(),
        "warm_start.directory",
        "holds no checkpoints/000000; give the workdir of a run that kept it",
    )


def _check_writable(workdir: pathlib.Path) -> None:
    """The nearest existing parent must be a folder that we may write to."""
    existing = workdir.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(
            f"--workdir={str(workdir)!r} cannot be made: {existing} is not a folder "
            "that this user may write to; choose another"
        )
