import jax
import numpy as np
import pytest

from crbc_jax.config import default_config
from crbc_jax.learner import sharding
from crbc_jax.learner.learner import make_learner


@pytest.fixture
def config():
    config = default_config()
    config.rollout.tasks_per_update = 3
    config.rollout.group_size = 2
    config.rollout.max_prompt_tokens = 8
    config.env.max_steps = 5
    return config


@pytest.fixture
def mesh():
    return sharding.make_mesh()


@pytest.mark.parametrize(
    "settings, shape",
    [
        ({}, (1, 32)),  # 30 rows, no more than there are, over 8 devices.
        ({"microbatch_rows": 8}, (4, 8)),
        ({"microbatch_rows": 8, "minibatch_groups": 2}, (3, 8)),
        ({"minibatch_groups": 99}, (1, 32)),
        ({"microbatch_rows": 8, "minibatch_rows": 16}, (2, 8)),
    ],
    ids=str,
)
def test_buffers_hold_the_largest_minibatch(
    settings, shape, config, mesh, decoder_config, make_groups
):
    config.learner.update(settings)
    learner = make_learner(config, decoder_config, mesh)
    groups = make_groups([[5, 5]] * 3)
    batches, _ = learner.pack(groups, np.ones(30, np.float32))
    assert {batch.rows.tokens.shape[:2] for batch in batches} == {shape}


def test_reference_is_kept_only_for_a_kl_term(config, mesh, decoder_config):
    """And a state looks as announced, so that checkpoints restore into it."""
    learner = make_learner(config, decoder_config, mesh)
    assert learner.abstract_state.reference is None
    config.loss.kl_coef = 0.01
    learner = make_learner(config, decoder_config, mesh)
    abstract = learner.abstract_state
    params = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract.params
    )
    state = learner.init_state(params)
    assert state.reference is not None
    jax.tree.map(
        lambda leaf, target: (
            np.testing.assert_equal(leaf.sharding, target.sharding),
            np.testing.assert_equal(leaf.shape, target.shape),
            np.testing.assert_equal(leaf.dtype, target.dtype),
        ),
        state,
        abstract,
    )


@pytest.mark.parametrize(
    "section, settings, message",
    [
        ("learner", {"old_logprobs": "served"}, "old_logprobs='served'.*recomputed"),
        ("learner", {"microbatch_rows": 12}, "microbatch_rows=12 .* use 16"),
        ("warm_start", {"steps": 1, "batch_rows": 20}, "batch_rows=20 .* use 24"),
    ],
)
def test_impossible_settings_are_refused(
    section, settings, message, config, mesh, decoder_config
):
    config[section].update(settings)
    with pytest.raises(ValueError, match=message):
        make_learner(config, decoder_config, mesh)
