"""What docs/ shows is code that works."""

import pathlib
import re
import sys
import types

import pytest

from crbc_jax import envs
from crbc_jax.config import ConfigDict, default_config
from crbc_jax.metrics import read_metrics
from crbc_jax.rollout.templates import PROMPTS
from crbc_jax.rollout.templates.base import Template
from crbc_jax.train import train

DOCS = pathlib.Path(__file__).parent.parent / "docs"


@pytest.fixture
def corridor(monkeypatch):
    """The module on the page, in the tables that the page names."""
    text = (DOCS / "add_an_environment.md").read_text()
    module = types.ModuleType("corridor")
    monkeypatch.setitem(sys.modules, "corridor", module)
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], module.__dict__)
    monkeypatch.setitem(envs.ENVIRONMENTS, "corridor", "corridor")
    template = Template(
        lambda scene: scene.observation,
        lambda action: f"<action>{action}</action>",
        end="</action>",
        is_message=False,
    )
    monkeypatch.setitem(PROMPTS, "corridor", template)


def test_the_environment_of_the_page_trains(corridor, tmp_path):
    config = default_config()
    config.env.name = config.rollout.prompt = "corridor"
    config.env.corridor = ConfigDict({"length": 4})
    config.env.max_steps = 8
    config.rollout.tasks_per_update, config.rollout.group_size = 2, 4
    config.mesh.data = 8
    config.learner.microbatch_rows = config.warm_start.batch_rows = 64
    config.warm_start.steps = 20
    config.learner.num_updates = 2
    train(config, tmp_path / "run", command="pytest")
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["eval/success_rate"] == 1.0  # Two tasks, and an expert to imitate.
    assert rows[2]["learner/grad_norm"] >= 0
    assert (tmp_path / "run" / "report.html").exists()
