"""Properties that hold for every row of the table of estimators."""

import dataclasses
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from oracles import ORACLES
from random_steps import one_step_groups, random_steps, take

import crbc_jax
from crbc_jax.advantages import ESTIMATORS, bind, make_estimator
from crbc_jax.config import default_config
from crbc_jax.graph.batch import build_batch

EVERY = sorted(ESTIMATORS)
# REINFORCE++ compares over the whole batch, so what another group does matters.
BATCH_WIDE = {"reinforce_pp", "reinforce_pp_baseline"}
WITHIN_GROUPS = sorted(set(EVERY) - BATCH_WIDE)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}

every_estimator = pytest.mark.parametrize("name", EVERY)


def advantages(steps, name, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*reads the outcome.*")
        return crbc_jax.step_advantages(steps, name, **options)


@every_estimator
def test_matches_float64_oracle(name):
    for seed in range(3):
        steps = random_steps(seed)
        expected = ORACLES[name](steps)
        assert np.abs(expected).max() > 0.1  # There is something to compare.
        np.testing.assert_allclose(advantages(steps, name), expected, **CLOSE)


@pytest.mark.parametrize("base", ["gigpo", "crbc", "rtmc"])
def test_proas_around_other_methods(base):
    steps = random_steps(seed=3)
    got = advantages(steps, "proas", base=base)
    np.testing.assert_allclose(got, ORACLES["proas"](steps, base=base), **CLOSE)


@every_estimator
def test_order_of_rows_and_names_of_ids_do_not_matter(name):
    steps = random_steps(seed=4)
    expected = advantages(steps, name)
    order = np.random.default_rng(0).permutation(len(expected))
    shuffled = take(steps, order)
    shuffled["group_id"] = [f"task {9 - g}" for g in shuffled["group_id"]]
    shuffled["traj_id"] = [("rollout", -t) for t in shuffled["traj_id"]]
    shuffled["anchor"] = [np.full((2, 2), 7 - a, np.uint8) for a in shuffled["anchor"]]
    shuffled["action"] = [b"action %d" % (5 - a) for a in shuffled["action"]]
    np.testing.assert_allclose(advantages(shuffled, name), expected[order], **CLOSE)


@pytest.mark.parametrize("name", WITHIN_GROUPS)
def test_groups_do_not_talk_to_each_other(name):
    steps = random_steps(seed=5)
    expected = advantages(steps, name)
    changed = {key: list(values) for key, values in steps.items()}
    changed["reward"] = [
        r * (3.0 if g == 1 else 1.0)
        for r, g in zip(steps["reward"], steps["group_id"], strict=True)
    ]
    changed["is_action_valid"] = [
        v and g != 1
        for v, g in zip(steps["is_action_valid"], steps["group_id"], strict=True)
    ]
    others = np.array(steps["group_id"]) != 1
    np.testing.assert_array_equal(advantages(changed, name)[others], expected[others])


@pytest.mark.parametrize("name", WITHIN_GROUPS)
def test_a_duplicated_group_changes_nothing(name):
    steps = random_steps(seed=6, num_groups=3)
    copy = take(steps, np.flatnonzero(np.array(steps["group_id"]) == 0))
    copy["group_id"] = [77] * len(copy["step"])
    copy["traj_id"] = [t + 7700 for t in copy["traj_id"]]
    both = {key: steps[key] + copy[key] for key in steps}
    got, expected = advantages(both, name), advantages(steps, name)
    np.testing.assert_allclose(got[: len(expected)], expected, **CLOSE)
    np.testing.assert_allclose(
        got[len(expected) :], expected[: len(copy["step"])], **CLOSE
    )


@every_estimator
def test_padding_is_zero_and_its_content_harmless(name):
    batch, _ = build_batch(random_steps(seed=7))
    estimate = bind(name, {})
    expected = np.asarray(estimate(batch))
    pad = ~batch.mask
    assert pad.any() and not expected[pad].any()
    poisoned = dataclasses.replace(
        batch,
        reward=np.where(pad, np.nan, batch.reward),
        success=batch.success | pad,
        is_last=batch.is_last | pad,
        is_action_valid=batch.is_action_valid & ~pad,
        step=np.where(pad, 3, batch.step),
        extras={
            k: np.where(pad, 7, v).astype(v.dtype) for k, v in batch.extras.items()
        },
    )
    np.testing.assert_array_equal(np.asarray(estimate(poisoned)), expected)


CONSTANT = [[0.2] * 8, [0.7] * 8, [0.95] * 8, [0.1] * 7]


@every_estimator
@pytest.mark.parametrize("success", [True, False])
def test_equal_rollouts_get_exactly_zero(name, success):
    groups = [[0.7] * 8] * 4 if name == "reinforce_pp" else CONSTANT
    steps = one_step_groups(groups, success)
    assert not advantages(steps, name).any()


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"g2po"}))
def test_equal_returns_from_rewards_in_another_order_get_exactly_zero(name):
    # A Sokoban step, box on target, and the last box: summed from the front, these
    # differ in the last bit of float32. (G2PO compares edges; those do differ.)
    rewards = [[-0.1, 0.9, 10.9], [10.9, -0.1, 0.9], [0.9, 10.9, -0.1]]
    naive = [np.float32(0) + sum(map(np.float32, r), np.float32(0)) for r in rewards]
    assert len(set(naive)) > 1
    steps = one_step_groups([[0.0] * 9] * 4, success=False)
    steps["traj_id"] = [f"{g}/{t}" for g in range(4) for t in "aaabbbccc"]
    steps["step"] = [0, 1, 2] * 12
    steps["reward"] = [value for r in rewards for value in r] * 4
    steps["anchor"] = [f"state {row}" for row in range(36)]
    assert not advantages(steps, name).any()


@every_estimator
def test_all_failures_get_exactly_zero(name):
    steps = random_steps(seed=8)
    size = len(steps["step"])
    steps["reward"], steps["success"] = [0.0] * size, [False] * size
    steps["is_action_valid"] = [True] * size
    steps["milestone_achieved"] = [False] * size
    assert not advantages(steps, name).any()


def test_all_successes_still_credit_shorter_routes():
    steps = random_steps(seed=9)
    steps["success"] = [True] * len(steps["step"])
    steps["reward"] = [0.0] * len(steps["step"])
    steps["is_action_valid"] = [True] * len(steps["step"])
    assert not advantages(steps, "grpo").any()
    for name in ("crbc", "rtmc", "graphgpo", "gated_bepo"):
        assert np.abs(advantages(steps, name)).max() > 0.05


@pytest.mark.parametrize("name", WITHIN_GROUPS)
def test_a_group_of_one_gets_exactly_zero(name):
    steps = one_step_groups([[0.7], [1.0, 0.0]])
    got = advantages(steps, name)
    assert got[0] == 0
    assert np.isfinite(got).all()


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"reinforce_pp"}))
def test_a_batch_of_groups_of_one_is_refused(name):
    steps = one_step_groups([[1.0], [0.0], [1.0], [0.0]])
    with pytest.raises(ValueError, match="group_id"):
        advantages(steps, name)


def test_the_same_rollouts_as_one_task_are_compared():
    got = advantages(one_step_groups([[1.0, 0.0, 1.0, 0.0]]), "grpo")
    assert list(np.sign(got)) == [1, -1, 1, -1]
    assert abs(got.sum()) < 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_type_of_rewards_does_not_matter(dtype):
    rewards = np.array([1, 1, 1, 1.0078125]).astype(jnp.dtype(dtype))
    steps = one_step_groups([[1.0] * 4])
    steps["reward"] = rewards
    got = advantages(steps, "grpo")
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [-0.5, -0.5, -0.5, 1.5], atol=1e-3)
    steps["reward"] = np.array([1, 1, 0, 0], np.int32)
    whole = advantages(steps, "grpo")
    steps["reward"] = np.array([True, True, False, False])
    np.testing.assert_array_equal(advantages(steps, "grpo"), whole)
    assert list(np.sign(whole)) == [1, 1, -1, -1]


@every_estimator
def test_same_result_sharded(name):
    batch, _ = build_batch(random_steps(seed=10, num_groups=8))
    estimate = bind(name, {})
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    got = estimate(sharded)
    assert len(got.sharding.device_set) == 8
    np.testing.assert_allclose(got, estimate(batch), rtol=1e-5, atol=1e-5)


# Those with a matrix product or a loop whose end the data decide.
@pytest.mark.parametrize("name", ["crbc", "gated_bepo", "graphgpo", "hgpo"])
def test_same_result_inside_a_mesh_and_at_low_matmul_precision(name):
    batch, _ = build_batch(random_steps(seed=10, num_groups=8))
    estimate = bind(name, {})
    expected = np.asarray(estimate(batch))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    with jax.set_mesh(mesh), jax.default_matmul_precision("bfloat16"):
        inside = np.asarray(estimate(batch))
    np.testing.assert_allclose(inside, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["crbc", "gated_bepo", "graphgpo", "hgpo"])
def test_same_result_under_vmap(name):
    batch, _ = build_batch(random_steps(seed=10, num_groups=8))
    estimate = bind(name, {})
    leaves, structure = jax.tree.flatten(batch)

    def estimate_half(*leaves):
        return estimate(jax.tree.unflatten(structure, leaves))

    halves = [leaf.reshape(2, -1, *leaf.shape[1:]) for leaf in leaves]
    got = jax.vmap(estimate_half)(*halves).reshape(batch.mask.shape)
    np.testing.assert_allclose(got, estimate(batch), rtol=1e-5, atol=1e-5)


def test_new_numbers_do_not_compile_again():
    estimator = ESTIMATORS["gigpo"]
    before = estimator._cache_size()
    for seed in range(4):
        batch, _ = build_batch(random_steps(seed, num_trajectories=3))
        estimator(batch, discount=0.9 + 0.01 * seed, step_weight=1.0 + seed)
    assert estimator._cache_size() - before <= 2  # Two sizes of the closure's core.


def test_long_trajectories_weigh_more_only_if_asked_to():
    steps = one_step_groups([[0.0] * 10])
    steps["traj_id"] = ["short"] * 2 + ["long"] * 8
    steps["step"] = [0, 1, *range(8)]
    steps["reward"] = [0.0, 10.0] + [0.0] * 8
    steps["success"] = [True] * 2 + [False] * 8
    got = advantages(steps, "grpo", normalization="mean")
    np.testing.assert_allclose(got, [5.0] * 2 + [-5.0] * 8, atol=1e-6)
    got = advantages(steps, "grpo", normalization="mean", stat_weighting="steps")
    np.testing.assert_allclose(got, [8.0] * 2 + [-2.0] * 8, atol=1e-6)


def test_graphgpo_gives_no_step_credit_without_a_success():
    steps = random_steps(seed=13)
    steps["success"] = [False] * len(steps["step"])
    assert not advantages(steps, "graphgpo", episode_weight=0.0).any()


def test_g2po_knows_success_whatever_its_reward():
    steps = one_step_groups([[1.0, 0.0, 0.0]])
    got = advantages(steps, "g2po", normalization="mean")
    assert got[0] > 10.0  # Next value 10 against 0, at the anchor and over edges.
    assert not advantages(one_step_groups([[1.0]]), "g2po").any()


def test_gated_residuals_average_to_zero_at_every_anchor():
    steps = random_steps(seed=14, num_groups=1)
    # One step of accumulation leaves the residual itself; its mean over the group is
    # then 0, and mean-normalising changes nothing.
    got = advantages(steps, "gated_bepo", gae_lambda=0.0, mix=1.0, normalization="mean")
    gated = {a: [] for a in steps["anchor"]}
    for anchor, value in zip(steps["anchor"], got, strict=True):
        gated[anchor].append(value)
    means = [np.mean(v) for v in gated.values() if np.ptp(v) > 0]
    assert means and np.abs(means).max() < 1e-6


def test_config_has_the_defaults_of_the_functions():
    config = default_config().advantage
    assert set(config.keys()) == {"name", *ESTIMATORS}
    for name, estimator in ESTIMATORS.items():
        parameters = list(inspect.signature(estimator).parameters.values())[1:]
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert dict(config[name]) == defaults, name


@every_estimator
def test_made_from_the_config(name):
    config = default_config().advantage
    config.name = name
    estimate = make_estimator(config)
    assert estimate.func is ESTIMATORS[name]
    options = dict(config[name])
    assert estimate.keywords == options | (dict(config.grpo) if name == "proas" else {})


def test_proas_takes_its_base_from_the_config():
    config = default_config().advantage
    config.name, config.proas.base, config.gigpo.step_weight = "proas", "gigpo", 3.0
    batch, _ = build_batch(random_steps(seed=15))
    expected = ESTIMATORS["proas"](batch, base="gigpo", step_weight=3.0)
    np.testing.assert_allclose(make_estimator(config)(batch), expected, rtol=1e-6)
    config.proas.base = "gipgo"
    with pytest.raises(ValueError, match="gigpo"):
        make_estimator(config)


@pytest.mark.parametrize(
    "name,column",
    [
        ("migpo", "milestone_achieved"),
        ("proas", "reasonable"),
        ("proas", "advancing"),
        ("reinforce_pp", "response_len"),
        ("reinforce_pp_baseline", "response_len"),
    ],
)
def test_a_missing_column_is_named(name, column):
    steps = random_steps(seed=16)
    del steps[column]
    with pytest.raises(ValueError, match=column):
        advantages(steps, name)
