"""Synthetic trajectories and a very small model for the learner's tests."""

import dataclasses
import itertools

import numpy as np
import pytest

from crbc_jax.models.config import load_config
from crbc_jax.types import Step, Trajectory

VOCAB = 24


@pytest.fixture(scope="session")
def decoder_config():
    """The quick start's decoder, smaller; sizes still divide by 2, 4 and 8."""
    return dataclasses.replace(
        load_config("preset:sokoban_tiny"),
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
    )


def make_step(random, num_prompt, num_response):
    return Step(
        observation="",
        anchor="",
        prompt_ids=random.integers(VOCAB, size=num_prompt).astype(np.int32),
        response_ids=random.integers(VOCAB, size=num_response).astype(np.int32),
        logprobs=random.uniform(-4, -2, num_response).astype(np.float32),
        policy_version=0,
        finish_reason="stop",
        action="up",
        parse_code="ok",
        is_action_valid=True,
        reward=0.0,
    )


def make_trajectory(group, rollout, steps, outcome="failure"):
    return Trajectory("task", group, rollout, outcome, tuple(steps), "", "")


@pytest.fixture(scope="session")
def make_groups():
    """Returns a function: [[steps of a rollout, ...] of a group, ...] -> groups.

    Prompts have 3 to 8 tokens (at least one has 8, so that all batches share their
    bucket), replies 1 to 3.
    """

    def make(num_steps, seed=0):
        random = np.random.default_rng(seed)
        prompts = itertools.chain([8], iter(lambda: random.integers(3, 9), None))
        return [
            tuple(
                make_trajectory(
                    group,
                    rollout,
                    [
                        make_step(random, next(prompts), random.integers(1, 4))
                        for _ in range(count)
                    ],
                )
                for rollout, count in enumerate(counts)
            )
            for group, counts in enumerate(num_steps)
        ]

    return make
