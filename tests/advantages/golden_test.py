"""Golden values: other projects' own outputs, and float64 references, through the door.

Each file runs through `crbc_jax.step_advantages` and through the float64 oracle, so
that the oracles, which carry the other tests, are themselves checked.
"""

import json
import pathlib

import jax
import numpy as np
import pytest
from oracles import ORACLES

import crbc_jax

GOLDEN = pathlib.Path(__file__).parents[3] / "shared" / "golden"
FILES = sorted(GOLDEN.glob("*.json"))

# Not compared, and why. Keys are prefixes of file names, with the output or "".
LEFT_OUT = {
    ("gigpo_similar_text_mean_std_norm_sim95", ""): "similarity clustering depends on "
    "the order of rows; anchors match exactly here",
    ("gigpo_float_noise_constant_groups", ""): "shows the peer's rounding noise; "
    "estimators_test.py has those groups as exactly 0",
    ("gigpo", "episode_adv_traj_weighted"): "the peer's quirk: penalty of the first "
    "row alone",
    ("grpo", "adv_traj_std"): "the same quirk",
    ("grpo", "adv_traj_meanonly"): "the same quirk",
    ("rloo", "adv_traj"): "the same quirk",
    ("migpo_alfworld_milestone_match", ""): "finding milestones is an environment's "
    "task; the estimator takes them as a column",
    ("ppo_gae", ""): "token level: kernels/returns_test.py",
    ("selective_rollout", ""): "no advantage: rollout/divergence_test.py",
    ("policy_loss", ""): "losses: learner/losses_test.py",
    ("kl_penalties", ""): "losses: learner/losses_test.py",
    ("value_loss", ""): "losses: learner/losses_test.py",
}
NOISY = "constant_step_group_rows"
MODES = {"mean_std_norm": "mean_std", "mean_norm": "mean"}


def runs_of(name, params):
    """The estimator runs that a file checks: output key, estimator, options."""
    method = name.split("_")[0]
    verl = {"stat_weighting": "steps"}
    shared = dict(verl)
    if "mode" in params:
        shared["normalization"] = MODES[params["mode"]]
    if "gamma" in params and method not in ("g2po", "reinforcepp"):
        shared["discount"] = params["gamma"]
    if method == "grpo":
        yield "adv_cross_steps_std", "grpo", verl
        yield "adv_cross_steps_meanonly", "grpo", verl | {"normalization": "mean"}
    elif method == "rloo":
        yield "adv_cross_steps", "rloo", verl
    elif method == "reinforcepp":
        yield "plain_adv", "reinforce_pp", verl
        yield "baseline_adv", "reinforce_pp_baseline", verl
    elif method == "gigpo":
        yield "adv", "gigpo", shared
    elif method == "hgpo":
        names = ("history_length", "length_weight_alpha", "base_group")
        yield "adv", "hgpo", shared | {name: params[name] for name in names}
    elif method == "graphgpo":
        own = {"normalize_distance": params["normalize_distance"]}
        yield "adv", "graphgpo", shared | own
    elif method in ("migpo", "g2po"):
        yield "adv", method, shared
    elif method == "gated":
        own = {"gae_lambda": params["lam"], "mix": params["alpha"]}
        yield "adv", "gated_bepo", {"discount": params["gamma"]} | own
    elif method == "rtmc":
        yield "A", "rtmc", {"discount": params["gamma"]}
    elif method == "proas":
        yield "adv", "proas", {"base": "base_adv"}
    elif method == "crbc" and "w_S" in params:
        own = {"beta": params["beta"], "depth": params["K"]}
        yield "A_final_traj", "crbc", own
        if params["K"] is None:
            yield "A_final_cross_steps", "crbc", own | verl


def reason_left_out(name, output=""):
    return next(
        (
            reason
            for (prefix, key), reason in LEFT_OUT.items()
            if name.startswith(prefix) and key == output
        ),
        None,
    )


def merged(paths):
    """Several files as one table of steps; groups of different files stay apart."""
    columns = {}
    for path in paths:
        inputs = json.loads(path.read_text())["inputs"]
        for name, values in inputs.items():
            if name.endswith("_vocab"):
                continue
            if name in ("group_id", "traj_id"):
                values = [(path.stem, value) for value in values]
            columns.setdefault(name, []).extend(values)
    return columns


def cases():
    """Files that share estimator and options run as one batch: fewer compilations."""
    batches = {}
    for path in FILES:
        if reason_left_out(path.stem):
            continue
        params = json.loads(path.read_text())["params"]
        for output, estimator, options in runs_of(path.stem, params):
            # Whitening looks at the whole batch, so these files cannot be merged.
            alone = path.stem if estimator.startswith("reinforce") else ""
            key = (alone, estimator, output, tuple(options.items()))
            batches.setdefault(key, []).append(path)
    for (_, estimator, output, options), paths in batches.items():
        own = "" if len(paths) > 1 else f"{paths[0].stem}-"
        label = "-".join(str(value) for _, value in options)
        yield pytest.param(
            paths,
            output,
            estimator,
            dict(options),
            id=f"{own}{estimator}-{output}-{label}",
        )


CASES = list(cases())


@pytest.mark.skipif(not FILES, reason="golden values are not on this machine")
def test_every_file_is_compared_or_left_out_with_a_reason():
    compared = {path.stem for case in CASES for path in case.values[0]}
    # Their values, not advantages: credit_test.py.
    compared |= {p.stem for p in FILES if p.stem.startswith("crbc_")}
    for path in FILES:
        assert (path.stem in compared) != bool(reason_left_out(path.stem)), path.stem


@pytest.mark.parametrize("paths,output,estimator,options", CASES)
def test_matches_golden(paths, output, estimator, options):
    files = [json.loads(path.read_text()) for path in paths]
    steps = merged(paths)
    expected = np.concatenate([file["outputs"][output] for file in files])
    own_reference, tolerance = files[0]["own_reference"], files[0]["tolerance"]
    # The peers leave rounding noise where all returns of an anchor are equal.
    keep = np.ones(len(expected), bool)
    start = 0
    for file in files:
        keep[start + np.array(file["outputs"].get(NOISY, []), int)] = False
        start += len(file["outputs"][output])

    single = crbc_jax.step_advantages(steps, estimator, **options)
    assert single.dtype == np.float32
    close = 1e-3 if estimator == "crbc" else 1e-5  # Credit 2e-4 times its weight 5.
    oracle_options = {k: -1 if v is None else v for k, v in options.items()}
    oracle = ORACLES[estimator](steps, **oracle_options)
    np.testing.assert_allclose(single, oracle, rtol=close, atol=close)
    if not own_reference:
        np.testing.assert_allclose(single[keep], expected[keep], **tolerance)
        return
    np.testing.assert_allclose(oracle, expected, **tolerance)
    with jax.enable_x64(True):
        exact = crbc_jax.step_advantages(steps, estimator, **options)
    assert exact.dtype == np.float64
    np.testing.assert_allclose(exact, expected, **tolerance)
