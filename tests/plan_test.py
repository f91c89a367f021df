"""A run says what it will do, and refuses what it cannot, before it begins."""

import pathlib
import subprocess
import sys

import pytest

from crbc_jax import models
from crbc_jax.config import default_config
from crbc_jax.plan import ConfigError, make_plan


def test_the_plan_counts_what_an_update_may_take(tmp_path):
    config = default_config()
    config.rollout.tasks_per_update, config.rollout.group_size = 3, 5
    config.env.max_steps, config.env.sokoban.max_moves = 7, 7
    plan = make_plan(config, tmp_path / "run")
    assert plan.max_steps_per_update == 3 * 5 * 7
    tokens = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    assert plan.max_tokens_per_update == 3 * 5 * 7 * tokens
    assert f"{plan.num_params:,} parameters" in str(plan)
    assert str(tmp_path / "run") in str(plan)
    assert not (tmp_path / "run").exists()  # A plan changes nothing.


def test_what_cannot_fit_names_the_command_that_runs_here(tmp_path):
    config = default_config()
    config.learner.microbatch_rows = 2**31
    with pytest.raises(ConfigError, match="configs/quickstart.py") as error:
        make_plan(config, tmp_path)
    assert "GiB" in str(error.value)


def test_a_model_that_is_missing_or_bare_names_the_remedy(tmp_path):
    config = default_config()
    config.model.directory = "models/SmolLM2-135M-Instruct"
    with pytest.raises(ConfigError, match="experiments/get_model.py smollm2"):
        make_plan(config, tmp_path)
    preset = pathlib.Path(models.__file__).parent / "presets/sokoban_tiny"
    config.model.directory = str(preset)  # Not as a preset, and without weights.
    with pytest.raises(ConfigError, match="holds no weights.*config.model.fresh=True"):
        make_plan(config, tmp_path)
    config.model.fresh = True
    assert make_plan(config, tmp_path).num_params == 149_824


def test_digest_changes_with_the_tasks(tmp_path):
    config = default_config()
    first = make_plan(config, tmp_path)
    assert make_plan(config, tmp_path).digest == first.digest
    config.env.num_eval_tasks += 1
    second = make_plan(config, tmp_path)
    assert second.digest[:12] != first.digest[:12]  # The user sees no more of it.
    assert f"(digest {second.digest[:12]})" in str(second)


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("env.name", "sokobna", "did you mean 'sokoban'"),
        ("env.sokoban.size", 3, "sokoban.size=3"),
        ("env.sokoban.max_moves", 99, "max_steps"),
        ("rollout.prompt", "sokoban_compat", "sokoban_compact"),
        ("rollout.parser", "strikt", "strict"),
        ("rollout.engine", "sampelr", "sampler"),
        ("rollout.temperature", 0.0, "must be positive"),
        ("rollout.max_policy_lag", 2, "0 (strictly on-policy) or 1"),
        ("rollout.max_policy_lag", 1, "sampled"),  # With recomputed log-probabilities.
        ("advantage.name", "proas", "annotations"),
        ("advantage.crbc.beta", 0.0, "(0, 1]"),
        ("advantage.crbc.depth", -2, "depth"),
        ("loss.aggregation", "token_meen", "token_mean"),
        ("loss.degenerate_groups", "drop", "drop_pg"),
        ("loss.kl_coef", -0.1, "0 or more"),
        ("warm_start.label_noise", 1.5, "[0, 1]"),
        ("learner.learning_rate", -1.0, "0 or more"),
        ("learner.learning_rate", float("nan"), "0 or more"),
        ("learner.num_updates", -1, "0 or more"),
        ("learner.minibatch_rows", -5, "0 or more"),
        ("learner.max_grad_norm", 0.0, "positive"),
        ("warm_start.num_tasks", 0, "at least 1"),
        ("warm_start.steps", -5, "0 or more"),
        ("warm_start.directory", "/no/such", "checkpoints/000000"),
        ("rollout.history_length", -1, "0 or more"),
        ("env.num_workers", -1, "0 or more"),
        ("env.step_timeout", 0.0, "positive"),
        ("loss.clip_low", -0.2, "(0, 1]"),
        ("loss.dual_clip", 0.5, "above 1"),
        ("seed", -1, "0 or more"),
    ],
)
def test_a_setting_that_no_run_can_work_with_is_named(tmp_path, field, value, words):
    config = default_config()
    *sections, leaf = field.split(".")
    node = config
    for name in sections:
        node = node[name]
    node[leaf] = value
    with pytest.raises(ConfigError) as error:
        make_plan(config, tmp_path)
    assert words in str(error.value)


def test_a_group_of_one_is_allowed_where_nobody_is_compared(tmp_path):
    config = default_config()
    config.rollout.group_size = 1
    config.advantage.name = "reinforce_pp"
    assert make_plan(config, tmp_path).max_steps_per_update == 16 * 15


def test_importing_and_planning_touch_no_backend(tmp_path):
    program = (
        "import pathlib, pkgutil, importlib, crbc_jax\n"
        "for m in pkgutil.walk_packages(crbc_jax.__path__, 'crbc_jax.'):\n"
        "    if not m.name.endswith('.worker'): importlib.import_module(m.name)\n"
        "from crbc_jax.config import default_config\n"
        "from crbc_jax.plan import make_plan\n"
        f"make_plan(default_config(), pathlib.Path({str(tmp_path)!r}))\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_package_alone_loads_neither_flax_nor_orbax():
    program = (
        "import sys, crbc_jax\n"
        "crbc_jax.step_advantages, crbc_jax.closure_values\n"
        "heavy = {'flax', 'optax', 'orbax', 'transformers', 'vllm', 'torch',\n"
        "         'matplotlib', 'gymnasium', 'tensorboard', 'ml_collections'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
