"""Closure: against float64 loops, the paper's identities, and hard cases.

Golden values of CRBC run in credit_test.py and advantages/golden_test.py.
"""

import collections
import contextlib
import functools
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import (
    PLACES,
    append,
    closure,
    joined,
    means,
    monte_carlo,
    process_of,
    rollouts,
    walks,
)

import crbc_jax
from crbc_jax.graph import reduction
from crbc_jax.graph.batch import build_batch
from crbc_jax.kernels import closure as closure_module
from crbc_jax.kernels.closure import closure_credit, solve_closure

EXACT = {"rtol": 0, "atol": 1e-9}
SINGLE = {"rtol": 0, "atol": 1e-5}
CREDIT = {"rtol": 0, "atol": 2e-4}
betas = st.sampled_from([0.5, 0.95, 0.98, 1.0])
depths = st.sampled_from([-1, 0, 1, 2, 3])
# Deadlines would count compilations.
random_processes = functools.partial(settings, deadline=None, max_examples=40)


@pytest.fixture(autouse=True, scope="module")
def chains_of_any_length():
    """Small groups are reduced too, so that small examples test the reduction."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "_PLAIN", 0)
        yield


def solved(columns, method="reduced", **options):
    """`closure_credit` at the input rows."""
    batch, order = build_batch(columns)
    credit = jax.device_get(closure_credit(batch, method=method, **options))
    residual = credit.residual[: len(order.group_ids)]
    fields = {
        name: order.unpad(values)
        for name, values in credit._asdict().items()
        if name != "residual"
    }
    return fields | {"residual": residual}


@pytest.mark.parametrize("method", ["reduced", "dense"])
@random_processes()
@given(rollouts(), betas, depths)
def test_equals_float64_loops(method, columns, beta, depth):
    expected = closure(columns, beta, depth)
    single = solved(columns, method, beta=beta, depth=depth)
    with jax.enable_x64(True):
        exact = solved(columns, method, beta=beta, depth=depth)
    for name, values in expected.items():
        assert exact[name].dtype == (np.int32 if name == "num_actions" else np.float64)
        np.testing.assert_allclose(exact[name], values, **EXACT, err_msg=name)
        close = CREDIT if name == "credit" else SINGLE
        np.testing.assert_allclose(single[name], values, **close, err_msg=name)
    assert exact["residual"].max() < 1e-12 and single["residual"].max() < 1e-5


@random_processes()
@given(rollouts(), betas, depths)
def test_centred_and_between_0_and_beta(columns, beta, depth):
    got = solved(columns, beta=beta, depth=depth)
    assert got["value"].min() >= -1e-6 and got["value"].max() <= beta + 1e-6
    states = list(zip(columns["group_id"], columns["anchor"], strict=True))
    # Rows of a state are drawn from the policy there.
    assert np.abs(list(means(states, got["advantage"]).values())).max() < 1e-6


@random_processes(max_examples=25)
@given(rollouts(), betas, st.randoms(use_true_random=False))
def test_order_of_rows_names_copies_and_padding_change_nothing(columns, beta, random):
    size = len(columns["step"])
    order = random.sample(range(size), size)
    changed = {name: [values[i] for i in order] for name, values in columns.items()}
    changed["anchor"] = [f"place {PLACES - place}" for place in changed["anchor"]]
    changed["action"] = [b"do %d" % (9 - action) for action in changed["action"]]
    changed["group_id"] = [("task", -group) for group in changed["group_id"]]
    copy = changed | {
        "group_id": [("copy", group) for group in changed["group_id"]],
        "traj_id": [("copy", trajectory) for trajectory in changed["traj_id"]],
    }
    # A group of its own, so long that all groups are padded to more rows.
    long = walks([*range(130), True], group="long")
    with jax.enable_x64(True):
        expected = solved(columns, beta=beta)
        got = solved(joined(changed, copy, long), beta=beta)
    for name in ("value", "action_value", "advantage", "sigma", "credit"):
        for part in (got[name][:size], got[name][size : 2 * size]):
            np.testing.assert_allclose(part, expected[name][order], **EXACT)


@random_processes(max_examples=25)
@given(rollouts(), betas, st.sampled_from([0, 1, 2, 3]))
def test_finite_depth_closes_in_on_the_closure(columns, beta, depth):
    """Eq. 22: V - V^(K) = (beta M)^K (V - V0); eq. 12: so it shrinks as beta^K."""
    process = process_of(columns)
    states = list(zip(columns["group_id"], columns["anchor"], strict=True))
    with jax.enable_x64(True):
        full, finite = (
            means(states, solved(columns, beta=beta, depth=k)["value"])
            for k in (-1, depth)
        )
    first, _ = monte_carlo(process, beta)

    def gap(value):
        return np.array([full[state] - value[state] for state in process.states])

    shrunk = np.linalg.matrix_power(beta * process.matrix, depth) @ gap(first)
    np.testing.assert_allclose(gap(finite), shrunk, **EXACT)
    bound = beta**depth * np.abs(gap(first)).max()
    assert np.abs(gap(finite)).max() <= bound + 1e-9


@random_processes(max_examples=25)
@given(rollouts(max_groups=2), st.sampled_from([0.5, 0.98, 1.0]))
def test_reweighting_by_credit_lowers_no_value(columns, beta):
    """Proposition 2 and corollary 3 of arXiv 2609.35082, as far as we know them.

    We know what the proposition says of a reweighted policy: that solving its process
    anew gives eq. 11, and that no value falls. We take eq. 11 for the identity
    V' = V + (I - beta M')^-1 sum_a mu'(a|s) A(s, a), and the reweighting for one that
    grows with the advantage, of which the corollary is a special case. Here actions
    with A > 0 occur three times as often as before, and others once.
    """
    process = process_of(columns)
    with jax.enable_x64(True):
        before = solved(columns, beta=beta)
        times = np.where(before["advantage"] > 1e-9, 3, 1)
        reweighted = repeated(process, times)
        got = solved(reweighted, beta=beta)
    states = list(zip(reweighted["group_id"], reweighted["anchor"], strict=True))
    old = means([state for state, _, _ in process.moves], before["value"])
    new = means(states, got["value"])
    after = process_of(reweighted)
    gain = collections.defaultdict(float)
    total = collections.Counter()
    for (state, _, _), count, a in zip(
        process.moves, times, before["advantage"], strict=True
    ):
        gain[state] += count * a
        total[state] += count
    right = np.array([gain[s] / max(total[s], 1) for s in after.states])
    rise = np.linalg.solve(np.eye(len(after.states)) - beta * after.matrix, right)
    for state, predicted in zip(after.states, rise, strict=True):
        if state in old:  # Not where rows are led to their ends, below.
            assert abs(new[state] - old[state] - predicted) < 1e-9
            assert new[state] > old[state] - 1e-9


def repeated(process, times):
    """Columns of a process in which each transition occurs that many times.

    One rollout a transition; what follows it there is worthless and led to nowhere
    else. `next_anchor` says where the transition leads.
    """
    columns = collections.defaultdict(list)
    number = 0
    for (state, (_, action), ahead), count in zip(process.moves, times, strict=True):
        group, anchor = state
        for _ in range(count):
            number += 1
            if isinstance(ahead, bool):
                append(columns, group, number, 0, anchor, action, ahead)
                columns["next_anchor"].append(anchor)
            else:
                append(columns, group, number, 0, anchor, action, False)
                append(columns, group, number, 1, "nowhere", "stop", False)
                columns["next_anchor"] += [ahead[1], "nowhere"]
    return dict(columns)


@pytest.mark.parametrize("beta", [0.98, 1.0])
def test_a_self_loop_equals_its_closed_form(beta):
    # Of ten visits nine lead back, as when an environment answers "Nothing happens.".
    steps = walks(["start", *["loop"] * 10, "door", True])
    got = solved(steps, beta=beta)["value"]
    loop = 0.1 * beta * beta / (1 - 0.9 * beta)
    np.testing.assert_allclose(got, [beta * loop, *[loop] * 10, beta], **SINGLE)


def test_a_cycle_without_a_branch_equals_its_closed_form():
    # a -> b -> c -> a ..., left by the end of the rollouts alone.
    steps = walks([*"abcabcab", True], [*"abca", False])
    beta = 0.98
    # Five visits of a, of which the last one fails; four of b, the last one wins.
    matrix = np.array([[0, 4 / 5, 0], [0, 0, 3 / 4], [1, 0, 0]])
    wins = np.array([0, 1 / 4, 0])
    a, b, c = np.linalg.solve(np.eye(3) - beta * matrix, beta * wins)
    value = {"a": a, "b": b, "c": c}
    expected = [value[x] for x in steps["anchor"]]
    np.testing.assert_allclose(solved(steps, beta=beta)["value"], expected, **SINGLE)


def test_a_long_chain_is_the_power_of_beta():
    names = range(300)
    got = solved(walks([*names, True]), beta=0.99)["value"]
    np.testing.assert_allclose(got, 0.99 ** np.arange(300, 0, -1), **SINGLE)


def test_a_tree_needs_no_closure():
    steps = walks([*"abd", True], [*"abe", False], [*"acf", True])
    full, zero = (solved(steps, beta=0.9, depth=k)["value"] for k in (-1, 0))
    np.testing.assert_allclose(full, zero, **SINGLE)


def test_failures_are_worth_exactly_nothing():
    steps = joined(
        walks([*"abab", False], [*"acb", False], group=0),
        walks([*"ab", True], [*"acb", False], group=1),
    )
    steps["action"] = [row % 3 for row in range(len(steps["step"]))]
    got = solved(steps)
    failed = np.array(steps["group_id"]) == 0
    for name in ("value", "action_value", "advantage", "sigma", "credit"):
        assert not got[name][failed].any() and got[name][~failed].any()


def test_all_successes_still_credit_the_shorter_route():
    steps = walks(["hall", "door", True], ["hall", "attic", "stairs", "door", True])
    steps["action"] = ["near", "go", "far", "go", "go", "go"]
    got = solved(steps)["credit"]
    assert got[0] > 0 > got[2] and not got[[1, 3, 4, 5]].any()


def trap():
    """Anchors t and u, which are said to lead to each other only."""
    steps = walks([*"tutue", True])
    return steps | {"next_anchor": [*"utute"]}


def test_a_trap_is_reported_and_harms_no_other_group():
    good = walks([*"abac", True], [*"abd", False], group=1)
    good["action"] = [0, 0, 1, 0, 0, 0, 0]
    good["next_anchor"] = [*"bacc", *"bdd"]
    steps = joined(trap(), good)
    expected = closure(good, beta=1.0)
    got = solved(steps, beta=1.0)
    assert np.isinf(got["residual"][0]) and got["residual"][1] < 1e-6
    for name, values in expected.items():
        close = CREDIT if name == "credit" else SINGLE
        np.testing.assert_allclose(got[name][5:], values, **close)
    assert not got["credit"][:5].any()
    with pytest.warns(UserWarning, match=r"groups \[0\]"):
        values = crbc_jax.closure_values(steps, beta=1.0)
    assert np.isinf(values.residual[0]) and not values.value[:5].any()
    assert np.isfinite(crbc_jax.step_advantages(steps, beta=1.0)).all()


def test_a_trap_is_worth_nothing_below_beta_1():
    got = solved(trap(), beta=0.98)
    np.testing.assert_allclose(got["value"], [0, 0, 0, 0, 0.98], **SINGLE)
    assert got["residual"][0] < 1e-6


def random_groups(num_groups, num_rollouts=4, seed=0):
    rng = np.random.default_rng(seed)
    tables = []
    for group in range(num_groups):
        paths = [
            [*rng.integers(0, 9, rng.integers(1, 12)).tolist(), bool(rng.integers(2))]
            for _ in range(num_rollouts)
        ]
        tables.append(walks(*paths, group=group))
    steps = joined(*tables)
    return steps | {"action": [row % 3 for row in range(len(steps["step"]))]}


@pytest.mark.parametrize("limit", [8 * 8, 5 * 8 * 8, 16 * 8 * 8 - 1, 2**24])
def test_accelerators_solve_in_chunks(monkeypatch, limit):
    """As on GPU and TPU, where systems are batched; CPUs solve them one by one."""
    rng = np.random.default_rng(0)
    place = rng.integers(0, 64 + 9, (16, 20)).astype(np.int32)  # Some lie outside.
    entry = (0.04 * rng.random((16, 20))).astype(np.float32)
    right = rng.random((16, 8)).astype(np.float32)
    expected = jax.jit(closure_module._one_by_one)(place, entry, right)
    monkeypatch.setattr(closure_module, "MAX_ELEMENTS", limit)
    chunked = jax.jit(lambda *systems: closure_module._at_once(*systems))
    np.testing.assert_allclose(chunked(place, entry, right), expected, atol=1e-6)
    sizes = re.findall(
        r"tensor<(\d+)x8x8xf32>", chunked.lower(place, entry, right).as_text()
    )
    assert max(map(int, sizes), default=1) == min(16, max(1, limit // 64))


def test_no_more_groups_than_anchors_is_no_trap():
    # jnp.linalg.solve reads [n, n] right-hand sides of n systems as one matrix.
    steps = random_groups(32)
    batch, order = build_batch(steps)
    assert batch.mask.shape[0] == batch.num_core == 32
    expected = closure(steps, 0.98)["value"]
    np.testing.assert_allclose(solved(steps, beta=0.98)["value"], expected, **SINGLE)


@pytest.mark.parametrize("method", ["reduced", "dense"])
@pytest.mark.parametrize("setting", ["mesh", "bfloat16", "both"])
def test_surroundings_change_nothing(setting, method):
    steps = random_groups(3)
    expected = closure(steps, 0.98)
    with contextlib.ExitStack() as stack:
        if setting != "bfloat16":
            mesh = jax.make_mesh((8,), ("data",))
            stack.enter_context(jax.set_mesh(mesh))
        if setting != "mesh":
            stack.enter_context(jax.default_matmul_precision("bfloat16"))
        got = solved(steps, method, beta=0.98)
    for name, values in expected.items():
        close = CREDIT if name == "credit" else SINGLE
        np.testing.assert_allclose(got[name], values, **close, err_msg=name)


def test_an_unknown_method_is_named():
    batch, _ = build_batch(random_groups(1))
    with pytest.raises(ValueError, match="'lu'.*dense.*reduced"):
        solve_closure(batch, 0.98, method="lu")
