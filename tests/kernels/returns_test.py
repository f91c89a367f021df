"""Returns, totals and normalisation against plain NumPy."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crbc_jax.graph.batch import build_batch
from crbc_jax.kernels.returns import (
    discounted_sums,
    normalize,
    token_gae,
    trajectory_totals,
    whiten,
)

GOLDEN = pathlib.Path(__file__).parents[3] / "shared" / "golden"


def trajectories(rewards):
    """One group of the given trajectories, as a batch."""
    rows = [
        (number, step, reward)
        for number, trajectory in enumerate(rewards)
        for step, reward in enumerate(trajectory)
    ]
    number, step, reward = zip(*rows, strict=True)
    return build_batch(
        {
            "group_id": [0] * len(rows),
            "traj_id": number,
            "step": step,
            "anchor": [0] * len(rows),
            "action": [0] * len(rows),
            "reward": reward,
            "success": [False] * len(rows),
        }
    )


def test_discounted_sums_match_the_recursion():
    rng = np.random.default_rng(0)
    rewards = [rng.normal(size=length) for length in (1, 2, 17, 5, 30)]
    batch, order = trajectories(rewards)
    expected = []
    for trajectory in rewards:
        later, sums = 0.0, []
        for reward in trajectory[::-1]:
            later = reward + 0.9 * later
            sums.append(later)
        expected += sums[::-1]
    got = order.unpad(jax.jit(discounted_sums)(batch.reward, batch, 0.9))
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_equal_futures_have_bit_equal_returns():
    future = [0.3, -0.1, 0.7, 10.9]
    batch, order = trajectories([[0.5] * n + future for n in range(12)])
    got = order.unpad(jax.jit(discounted_sums)(batch.reward, batch, 0.95))
    first = [int(i) - 4 for i in np.cumsum([n + 4 for n in range(12)])]
    assert len(set(got[first].tolist())) == 1


def test_totals_do_not_depend_on_the_order_of_rewards():
    rng = np.random.default_rng(1)
    rewards = np.float32(rng.normal(size=40) * 10.0 ** rng.integers(-3, 3, 40))
    batch, order = trajectories([rng.permutation(rewards) for _ in range(10)])
    got = order.unpad(jax.jit(trajectory_totals)(batch.reward, batch))
    assert set(got.tolist()) == {float(np.float32(rewards.astype(np.float64).sum()))}


@pytest.mark.parametrize("normalization", ["mean", "mean_std"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_normalize_by_sets(normalization, ddof):
    rng = np.random.default_rng(2)
    values = np.float32(rng.normal(size=(3, 40)) + 100)
    ids, members = rng.integers(0, 6, (3, 40)), rng.random((3, 40)) < 0.8
    got = normalize(
        jnp.asarray(values),
        jnp.asarray(members),
        normalization=normalization,
        ids=jnp.asarray(ids),
        num_ids=8,
        ddof=ddof,
    )
    for group in range(3):
        for number in range(6):
            own = members[group] & (ids[group] == number)
            chosen = values[group, own].astype(np.float64)
            expected = chosen - chosen.mean()
            if normalization == "mean_std" and len(chosen) > 1:
                expected /= chosen.std(ddof=ddof) + 1e-6
            np.testing.assert_allclose(got[group, own], expected, atol=1e-5)


@pytest.mark.parametrize("value", [0.2, 0.7, 0.95, 9.9, 1e-30, 3e8])
def test_equal_members_are_exactly_zero(value):
    values = jnp.full((1, 63), value, jnp.float32)
    everything = jnp.ones((1, 63), bool)
    assert not normalize(values, everything, normalization="mean_std").any()
    assert not whiten(values, everything).any()


def test_unknown_names_are_refused():
    values, members = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    with pytest.raises(ValueError, match="mean_std"):
        normalize(values, members, normalization="std")


@pytest.mark.parametrize("case", ["case0", "case1"])
def test_token_gae_matches_golden(case):
    path = GOLDEN / f"ppo_gae_{case}.json"
    if not path.exists():
        pytest.skip("golden values are not on this machine")
    golden = json.loads(path.read_text())
    inputs, outputs = golden["inputs"], golden["outputs"]
    rewards = np.array(inputs["token_level_rewards"], np.float32)
    values = np.array(inputs["values"], np.float32)
    mask = np.array(inputs["response_mask"], bool)
    options = (golden["params"]["gamma"], golden["params"]["lam"])
    # Garbage outside the mask must not matter.
    garbage = np.where(mask, values, 1e6).astype(np.float32)
    advantages, targets = token_gae(rewards, garbage, mask, *options)
    tolerance = golden["tolerance"]
    expected = np.array(outputs["returns_values_masked"])
    np.testing.assert_allclose(targets, np.where(mask, expected, 0), **tolerance)
    expected = np.where(mask, outputs["adv_whitened_values_masked"], 0)
    np.testing.assert_allclose(
        whiten(advantages, jnp.asarray(mask)), expected, **tolerance
    )
