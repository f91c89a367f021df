"""Every setting is read, overridable, typed for the command line, and can be stored."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest
from ml_collections import ConfigDict, FrozenConfigDict

from crbc_jax.config import default_config

ROOT = pathlib.Path(__file__).parent.parent
CONFIG_FILES = sorted(ROOT.glob("configs/*.py"))


def load(path, variant=None):
    spec = importlib.util.spec_from_file_location("config_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments = [] if variant is None else [variant]
    return module.get_config(*arguments), getattr(module, "VARIANTS", ())


def all_configs():
    yield "default", default_config()
    for path in CONFIG_FILES:
        config, variants = load(path)
        yield path.stem, config
        for variant in variants:
            yield f"{path.stem}:{variant}", load(path, variant)[0]


def leaves(config, prefix=""):
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@pytest.mark.parametrize("name,config", list(all_configs()), ids=lambda x: str(x)[:20])
def test_config_freezes_and_survives_json(name, config):
    FrozenConfigDict(config)
    assert ConfigDict(json.loads(config.to_json())) == config


@pytest.mark.parametrize("name,config", list(all_configs()), ids=lambda x: str(x)[:20])
def test_no_leaf_has_a_type_that_the_command_line_cannot_set(name, config):
    for leaf, value in leaves(config):
        assert isinstance(value, (bool, int, float, str, tuple)), (leaf, value)


REAL = re.compile(
    r"(^|_)(beta|gamma|lambda|discount|lr|rate|coef|eps|sigma\w*|decay|temperature|"
    r"alpha|weight|clip|clip_\w+|share|noise|timeout|penalty|norm)$"
)


def test_real_numbers_have_float_defaults():
    for leaf, value in leaves(default_config()):
        if REAL.search(leaf.split(".")[-1]):
            assert isinstance(value, (float, bool)), f"{leaf}={value!r}"


READ_CONFIG = """
import sys
from absl import flags
from ml_collections import config_flags
config = config_flags.DEFINE_config_file("config", lock_config=True)
flags.FLAGS(sys.argv)
print(config.value.to_json())
"""


def config_of_command_line(*arguments):
    result = subprocess.run(
        [sys.executable, "-c", READ_CONFIG, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    return json.loads(result.stdout)


def test_every_leaf_can_be_set_to_its_own_value_from_the_command_line():
    expected, _ = load(ROOT / "configs" / "quickstart.py")
    arguments = [f"--config.{leaf}={value}" for leaf, value in leaves(expected)]
    config = config_of_command_line("--config=configs/quickstart.py", *arguments)
    assert config == json.loads(expected.to_json())


def test_a_real_number_takes_an_integer_from_the_command_line():
    config = config_of_command_line(
        "--config=configs/quickstart.py", "--config.learner.learning_rate=1"
    )
    assert config["learner"]["learning_rate"] == 1.0


def test_a_flagfile_may_override_the_config(tmp_path):
    flagfile = tmp_path / "flags"
    flagfile.write_text("--config=configs/quickstart.py\n--config.seed=3\n")
    assert config_of_command_line(f"--flagfile={flagfile}")["seed"] == 3


def test_every_leaf_is_read_by_the_code():
    code = "\n".join(
        path.read_text()
        for path in (ROOT / "crbc_jax").rglob("*.py")
        if path.name != "config.py" or path.parent.name != "crbc_jax"
    )
    words = set(re.findall(r"\w+", code))
    unread = [
        leaf for leaf, _ in leaves(default_config()) if leaf.split(".")[-1] not in words
    ]
    assert not unread


def test_unknown_variant_names_the_known_ones():
    with pytest.raises(ValueError, match="smoke"):
        load(ROOT / "configs" / "quickstart.py", "smok")
