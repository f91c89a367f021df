"""The script that users run to see whether an environment works here."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def check_env(*flags):
    return subprocess.run(
        [sys.executable, "experiments/check_env.py", *flags],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_sokoban_works_and_its_expert_solves_everything():
    result = check_env("--env=sokoban", "--tasks=20")
    assert result.returncode == 0, result.stderr
    for part in ("gymnasium", "20 held-out tasks", "steps/s", "ms median"):
        assert part in result.stdout
    assert "expert: 100.0% solved" in result.stdout


def test_webshop_works_without_data():
    result = check_env("--env=webshop", "--tasks=20")
    assert result.returncode == 0, result.stderr
    assert "rapidfuzz" in result.stdout
    assert "expert: 100.0% solved" in result.stdout


def test_an_expert_that_falls_short_is_an_error(tmp_path):
    for index in range(32):  # Walls differ, so that some fall to evaluation.
        row = "".join(" #"[index >> bit & 1] for bit in range(5))
        level = f"########\n#@ $  .#\n#{row} #\n########\n"
        (tmp_path / f"{index}.txt").write_text(level)
    result = check_env(f"--option=levels={tmp_path}", "--option=max_steps=1")
    assert result.returncode == 1
    assert "expert: 0.0% solved" in result.stdout


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--env=sokobann", "did you mean 'sokoban'"),
        ("--option=size", "must be FIELD=VALUE"),
        ("--option=size=3", "sokoban.size=3"),
        ("--option=levels=/no/such/folder", "does not exist"),
    ],
)
def test_bad_flags_are_one_line(flag, message):
    result = check_env(flag)
    assert result.returncode != 0
    assert message in result.stderr and "Traceback" not in result.stderr
