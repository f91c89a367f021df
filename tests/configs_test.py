"""Every config file and variant: it is planned, or says what it lacks and what runs."""

import importlib.util
import pathlib
import subprocess
import sys
import time

import pytest

from crbc_jax.config import default_config
from crbc_jax.plan import ConfigError, make_plan

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


def load(name: str):
    path = ROOT / "configs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"configs_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


VARIANTS = [(name, variant) for name in FILES for variant in load(name).VARIANTS]


@pytest.mark.parametrize("name, variant", VARIANTS)
def test_a_variant_runs_here_or_says_what_does(name, variant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Where there is neither model nor data.
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    config = load(name).get_config(variant)
    leaves = set(default_config().to_dict())
    assert set(config.to_dict()) == leaves
    try:
        plan = make_plan(config, tmp_path / "run")
    except ConfigError as error:
        assert variant != "small" or name == "alfworld"
        remedies = {
            "small": "alfworld-download",
            "smollm2": "third_party/vllm/install.sh",
            "vllm": "third_party/vllm/install.sh",
        }
        assert remedies.get(variant, "configs/") in str(error)
    else:
        assert plan.train_tasks and plan.eval_tasks
        assert variant in ("small", "full", "smoke", "hard")


@pytest.mark.parametrize("name", FILES)
def test_a_variant_that_is_none_is_named(name):
    with pytest.raises(ValueError, match="no variant 'smal'.*small|smoke"):
        load(name).get_config("smal")


def test_the_published_settings():
    """ALGORITHMS: the table of the paper's settings."""
    seen = {}
    for name in ("alfworld", "webshop", "sokoban"):
        config = load(name).get_config("7b" if name == "alfworld" else "1.5b")
        rollout = config.rollout
        seen[name] = (
            config.env.max_steps,
            rollout.max_prompt_tokens,
            rollout.max_response_tokens,
            rollout.tasks_per_update * rollout.group_size,
            config.learner.minibatch_rows,
        )
        assert config.learner.learning_rate == 1e-6 and config.loss.kl_coef == 0.01
        assert (rollout.temperature, config.evaluate.temperature) == (1.0, 0.4)
        assert (config.learner.num_updates, config.evaluate.every) == (150, 5)
        assert config.advantage.crbc.beta == 0.98
    assert seen == {
        "alfworld": (50, 2048, 512, 16 * 8, 64),
        "webshop": (15, 5120, 512, 16 * 8, 64),
        "sokoban": (15, 1024, 512, 32 * 8, 64),
    }


@pytest.mark.parametrize("name", ["alfworld", "webshop", "sokoban"])
def test_the_paper_s_run_says_what_is_missing(name, tmp_path):
    """PITFALLS C3. The time has room for a loaded machine: 2 s on a quiet one."""
    started = time.monotonic()
    run = subprocess.run(
        [
            sys.executable,
            ROOT / "experiments/run.py",
            f"--config={ROOT}/configs/{name}.py",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode != 0 and time.monotonic() - started < 30
    for words in ("parameters", "hf download", "GiB", "What runs here: python"):
        assert words in run.stderr, run.stderr
    assert "Traceback" not in run.stderr and not list(tmp_path.iterdir())
