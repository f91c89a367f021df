"""Programs for devices that are elsewhere: shapes, CUDA, and a TPU's compiler."""

import dataclasses
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from crbc_jax import ahead_of_time
from crbc_jax.config import default_config
from crbc_jax.learner.learner import make_learner
from crbc_jax.learner.sharding import make_mesh
from crbc_jax.models.config import load_config, load_shape
from crbc_jax.types import UserError

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = ROOT / "experiments" / "compile.py"
HAS_TPU_COMPILER = importlib.util.find_spec("libtpu") is not None


@pytest.fixture
def config():
    """A small run whose training step has every part: KL, bfloat16, remat, shards."""
    config = default_config()
    config.rollout.tasks_per_update, config.rollout.group_size = 4, 2
    config.env.max_steps = 5
    config.loss.kl_coef = 0.01
    config.learner.minibatch_rows, config.learner.microbatch_rows = 16, 8
    config.learner.compute_dtype, config.learner.remat = "bfloat16", "full"
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 2, -1, 2
    return config


@pytest.fixture
def model():
    return dataclasses.replace(load_config("preset:sokoban_tiny"), num_layers=1)


def run_script(*arguments, timeout=300):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=timeout,
    )


def test_the_largest_minibatch_is_as_the_settings_say(config, model):
    learner = make_learner(config, model, make_mesh(**config.mesh))
    minibatch = ahead_of_time.largest_minibatch(config, learner)
    length = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    assert minibatch.rows.tokens.shape == (2, 8, length)
    assert minibatch.rows.response_ids.shape == (2, 8, 4)


def test_rows_of_several_steps_are_full(config, model):
    config.learner.row_tokens, config.learner.share_prompts = 60, True
    learner = make_learner(config, model, make_mesh(**config.mesh))
    minibatch = ahead_of_time.largest_minibatch(config, learner)
    assert minibatch.rows.tokens.shape[2] == 60
    assert minibatch.rows.branch_ids is not None
    assert minibatch.rows.response_ids.shape[2] >= 3 * 4


def test_training_step_and_credit_lower_for_cuda(config, model):
    sizes = ahead_of_time.lower_for_cuda(config, model, jax.devices())
    assert set(sizes) == {"training step", "credit"}
    assert all(size > 0 for size in sizes.values())


def test_the_phases_of_devices_that_are_here(config, model):
    """On CPUs the same programs compile; a TPU's compiler is not needed."""
    phases = {
        phase.name: phase
        for phase in ahead_of_time.compile_phases(
            config, model, jax.devices(), jax.devices()[:2]
        )
    }
    assert list(phases) == ["training step", "publishing", "decoding", "credit"]
    assert not phases["credit"].collectives
    assert phases["training step"].collectives["all-reduce"] > 0
    # Parameters, two moments and the reference, in float32; norms are whole.
    num_params = 4 * sum(
        int(np.prod(leaf.shape))
        for leaf in jax.tree.leaves(
            make_learner(config, model, make_mesh(**config.mesh)).abstract_state.params
        )
    )
    resident = phases["decoding"].resident
    assert 4 * num_params / 4 <= resident < 1.1 * 4 * num_params / 4
    assert all(phase.program > 0 and not phase.error for phase in phases.values())


def test_the_script_lowers_the_published_step_for_eight_gpus():
    result = run_script("--config=configs/alfworld.py:1.5b", "--topology=cuda:8")
    assert result.returncode == 0, result.stderr
    assert re.search(r"training step +lowered for CUDA", result.stdout)
    assert re.search(r"credit +lowered for CUDA", result.stdout)


def test_a_published_shape_needs_no_directory():
    shape = load_shape("models/Qwen2.5-7B-Instruct")
    assert (shape.num_layers, shape.hidden_size, shape.num_kv_heads) == (28, 3584, 4)
    with pytest.raises(UserError, match="no such directory"):
        load_shape("models/of-somebody")


def test_a_number_of_gpus_is_needed():
    result = run_script("--config=configs/quickstart.py", "--topology=cuda:x")
    assert result.returncode == 1
    assert "a number of GPUs is needed" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_slice_ends_in_one_message():
    result = run_script("--config=configs/quickstart.py", "--topology=v5e:1x1")
    assert result.returncode == 1
    assert "v5e:4x4" in result.stderr and "crbc_jax[tpu]" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not HAS_TPU_COMPILER, reason="needs libtpu: pip install jax[tpu]")
def test_the_script_compiles_a_run_for_a_pod():
    result = run_script("--config=configs/quickstart.py", "--topology=v5e:4x4")
    assert result.returncode == 0, result.stderr
    assert re.search(r"credit .* fits; no collective", result.stdout)


@pytest.mark.skipif(not HAS_TPU_COMPILER, reason="needs libtpu: pip install jax[tpu]")
def test_what_does_not_fit_a_pod_ends_in_status_1():
    result = run_script(
        "--config=configs/quickstart.py",
        "--topology=v5e:2x2",
        "--config.rollout.max_prompt_tokens=30000",
        "--config.learner.microbatch_rows=4096",
    )
    assert result.returncode == 1
    assert "DOES NOT FIT" in result.stdout
