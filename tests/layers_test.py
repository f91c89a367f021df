"""Imports between the folders of crbc_jax point one way."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "crbc_jax"
# Each folder or module of the package, and what of ours it may import.
ARROWS = {
    "types": set(),
    "config": set(),
    "envs": {"types"},
    "graph": {"types"},
    "kernels": {"types"},
    "models": {"types"},
    # The embedded sampler runs the policy itself, hence the arrow to models.
    "rollout": {"envs", "models", "types"},
    "advantages": {"kernels", "types"},
    "learner": {"distributed", "models", "types"},
    "distributed": {"types"},
    "background": set(),
    "command_line": {"types"},
    "checkpoint": {"types"},
    "metrics": {"types"},
    "trajectories": {"types"},
    # The notebook's door: columns in, advantages out.
    "credit": {"advantages", "graph", "kernels", "types"},
    # Checks names in every table before a run begins.
    "plan": {"advantages", "envs", "learner", "models", "rollout", "types"},
    "evaluate": {"envs", "rollout", "types"},
    "figures": {"types"},
    "report": {"figures", "metrics", "types"},
    "workdir": {
        "checkpoint",
        "config",
        "distributed",
        "evaluate",
        "trajectories",
        "types",
    },
    "parity": {"learner", "models", "rollout", "types"},
    "stages": None,  # May import all, as may the loop over them,
    "train": None,
    "ahead_of_time": None,  # and what compiles their programs for elsewhere.
    "__init__": {"credit"},
}


def unit_of(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of_ours(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            if node.module == "crbc_jax":
                names |= {f"crbc_jax.{alias.name}" for alias in node.names}
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {n.split(".")[1] for n in names if n.startswith("crbc_jax.")}


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_follow_the_arrows(path):
    unit = unit_of(path)
    assert unit in ARROWS, f"{unit} has no row in ARROWS"
    allowed = ARROWS[unit]
    if allowed is not None:
        extra = imports_of_ours(path) - allowed - {unit}
        assert not extra, f"{path.name} may not import {sorted(extra)}"
