"""Advantage estimators: TransitionBatch -> one advantage a step.

What each reads of a trajectory: all of them its return (undiscounted sum of rewards)
and invalid steps for the episode part, but for `rtmc`, which reads the outcome alone.
For the step part, `gigpo` and `hgpo` read every reward, `g2po` the return; `graphgpo`,
`migpo`, `gated_bepo` and `crbc` read the outcome, milestones or graph.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from crbc_jax.advantages.crbc import crbc_advantages
from crbc_jax.advantages.g2po import g2po_advantages
from crbc_jax.advantages.gated_bepo import gated_bepo_advantages
from crbc_jax.advantages.gigpo import gigpo_advantages
from crbc_jax.advantages.graphgpo import graphgpo_advantages
from crbc_jax.advantages.grpo import grpo_advantages
from crbc_jax.advantages.hgpo import hgpo_advantages
from crbc_jax.advantages.migpo import migpo_advantages
from crbc_jax.advantages.proas import BASE_COLUMN, proas_advantages
from crbc_jax.advantages.reinforce_pp import (
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
)
from crbc_jax.advantages.rloo import rloo_advantages
from crbc_jax.advantages.rtmc import rtmc_advantages

ESTIMATORS = {
    "crbc": crbc_advantages,
    "g2po": g2po_advantages,
    "gated_bepo": gated_bepo_advantages,
    "gigpo": gigpo_advantages,
    "graphgpo": graphgpo_advantages,
    "grpo": grpo_advantages,
    "hgpo": hgpo_advantages,
    "migpo": migpo_advantages,
    "proas": proas_advantages,
    "reinforce_pp": reinforce_pp_advantages,
    "reinforce_pp_baseline": reinforce_pp_baseline_advantages,
    "rloo": rloo_advantages,
    "rtmc": rtmc_advantages,
}

# Compare with nobody of their own group.
WITHOUT_GROUP = ("reinforce_pp",)
# Whiten over the rows of all groups; the others treat each group alone.
WHOLE_BATCH = ("reinforce_pp", "reinforce_pp_baseline")
# Need columns that the trainer's environments do not give (see `step_advantages`).
ANNOTATED = ("migpo", "proas")

# What each option may be: a test, and the same in words. An option means the same
# in every method that has it.
_RULES = {
    "beta": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "discount": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "gae_lambda": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "mix": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "sigma_min": (lambda x: x > 0, "above 0"),
    "depth": (lambda x: x >= -1 and x == int(x), "-1 (full closure) or 0, 1, 2, ..."),
    "history_length": (lambda x: x >= 0 and x == int(x), "0, 1, 2, ..."),
    "stat_weighting": (
        lambda x: x in ("trajectories", "steps"),
        "'trajectories' or 'steps'",
    ),
    "normalization": (lambda x: x in ("mean_std", "mean"), "'mean_std' or 'mean'"),
    "normalize_distance": (lambda x: x in (True, False), "True or False"),
    "base_group": (lambda x: x in (True, False), "True or False"),
}


def make_estimator(config: Any) -> Callable:
    """Binds the options of `config.advantage` to the estimator that it names.

    Args:
        config: a ConfigDict or the like: `name`, and under each estimator's name the
            options of that one.

    Returns:
        TransitionBatch -> float [groups, rows].
    """
    name = config["name"]
    check_name("advantage.name", name, ESTIMATORS)
    options = dict(config[name])
    if name == "proas" and options["base"] != BASE_COLUMN:
        check_name("advantage.proas.base", options["base"], _BASES)
        options |= dict(config[options["base"]])
    return bind(name, options)


def bind(name: str, options: Mapping[str, Any]) -> Callable:
    """Binds options to an estimator, after checking names and values.

    Raises:
        ValueError: naming the option, its value, and what is known or needed.
    """
    check_name("estimator", name, ESTIMATORS)
    known = list(inspect.signature(ESTIMATORS[name]).parameters)[1:]
    if name == "proas":
        base = options.get("base", "grpo")
        check_name("option 'base' of 'proas'", base, _BASES)
        known = ["base"]
        if base != BASE_COLUMN:
            known += list(inspect.signature(ESTIMATORS[base]).parameters)[1:]
    for option, value in options.items():
        check_name(f"option of {name!r}", option, known)
        if option != "base":  # Checked above.
            _check_value(name, option, value)
    return functools.partial(ESTIMATORS[name], **options)


def check_name(what: str, name: Any, known: Iterable[str]) -> None:
    """Raises a ValueError that lists the known names, the nearest first."""
    if name in known:
        return
    nearest = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise ValueError(f"{what}: unknown {name!r}; {hint}known: {sorted(known)}")


def _check_value(name, option, value):
    rule, words = _RULES.get(option, (None, "a finite number"))
    try:
        sound = rule(value) if rule else math.isfinite(value)
    except (TypeError, ValueError):
        sound = False
    if not sound:
        raise ValueError(
            f"option {option!r} of {name!r} must be {words}, got {value!r}"
        )


_BASES = sorted({*ESTIMATORS, BASE_COLUMN} - {"proas"})
