"""CRBC: its options, its two parts, and groups without a solution.

Golden values and what all estimators share: golden_test.py and estimators_test.py.
"""

import dataclasses

import numpy as np
import pytest
from oracles import crbc, grpo
from random_steps import random_steps

import crbc_jax
from crbc_jax.advantages.crbc import crbc_advantages
from crbc_jax.graph.batch import build_batch

CLOSE = {"rtol": 0, "atol": 1e-3}  # Credit to 2e-4, times its weight of 5.


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 1.0},
        {"depth": 0},
        {"depth": 2, "beta": 0.9},
        {"sigma_min": 0.5},
        {"group_weight": 0.0, "step_weight": 5.0},
        {"group_weight": 2.0, "step_weight": 0.0},
        {"stat_weighting": "steps", "invalid_action_penalty": 0.5},
    ],
    ids=str,
)
def test_options_equal_float64_loops(options):
    steps = random_steps(seed=20, num_groups=3)
    expected = crbc(steps, **options)
    assert np.abs(expected - crbc(steps)).max() > 0.01  # The option does something.
    got = crbc_jax.step_advantages(steps, **options)
    np.testing.assert_allclose(got, expected, **CLOSE)


def test_credit_averages_to_zero_over_each_anchor():
    steps = random_steps(seed=21)
    got = crbc_jax.step_advantages(steps, group_weight=0.0)
    states = list(zip(steps["group_id"], steps["anchor"], strict=True))
    for state in set(states):
        visits = [a for a, s in zip(got, states, strict=True) if s == state]
        assert abs(np.mean(visits)) < 1e-4
    assert np.abs(got).max() > 1


def test_one_action_only_gets_no_credit():
    steps = random_steps(seed=22) | {}
    steps["action"] = ["go"] * len(steps["step"])
    got = crbc_jax.step_advantages(steps)
    np.testing.assert_allclose(got, grpo(steps), rtol=0, atol=1e-5)


def test_a_group_without_solution_keeps_its_group_advantage_alone():
    steps = random_steps(seed=23, num_groups=3)
    batch, order = build_batch(steps)
    whole = order.unpad(crbc_advantages(batch, beta=1.0))
    is_trapped = batch.is_trapped.copy()
    is_trapped[1] = batch.mask[1]  # As if no path of group 1 led to an end.
    batch = dataclasses.replace(batch, is_trapped=is_trapped)
    got = order.unpad(crbc_advantages(batch, beta=1.0))
    trapped = np.array(steps["group_id"]) == 1
    np.testing.assert_allclose(got[trapped], grpo(steps)[trapped], rtol=0, atol=1e-5)
    assert np.abs(whole - got)[trapped].max() > 0.1
    np.testing.assert_array_equal(got[~trapped], whole[~trapped])
