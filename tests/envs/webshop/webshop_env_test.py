"""WebShop without any data: protocol, tasks, oddities of actions, memory."""

import gc
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
import tracemalloc
import types
import warnings

import gymnasium.utils.env_checker
import pytest

from crbc_jax import envs
from crbc_jax.envs.webshop import shop as shop_module
from crbc_jax.envs.webshop.env import parse_action
from crbc_jax.envs.webshop.files import (
    build_title_nouns,
    read_catalogue,
    read_title_nouns,
)
from crbc_jax.envs.webshop.generator import generate_shop

ROOT = pathlib.Path(__file__).parents[3]
TASK = "generated1-200-synthetic-42-233-train-00000600"


def start(**options):
    env = envs.make("webshop", **options)
    return env, *env.reset(options={"task": TASK})


@pytest.mark.parametrize("observation", ["text", "text_rich"])
def test_gymnasium_accepts_it(observation):
    env = envs.make("webshop", observation=observation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Without a registered spec the checker cannot build it anew to try renderers.
        warnings.filterwarnings("ignore", message=".*render modes.*")
        gymnasium.utils.env_checker.check_env(env, skip_render_check=True)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_expert_wins_every_generated_goal(split):
    for task in envs.tasks("webshop", split, count=200).ids:
        env = envs.make("webshop")
        observation, info = env.reset(options={"task": task})
        for step in envs.expert("webshop", task):
            assert (step.observation, step.info) == (observation, info)
            observation, reward, terminated, truncated, info = env.step(step.action)
            assert info["reason"] == ""
        assert (reward, terminated, truncated) == (10.0, True, False)
        assert info["won"] and info["task_score"] == 1.0


def test_tasks_are_the_same_in_another_process_and_disjoint():
    program = (
        "from crbc_jax import envs; s = envs.tasks('webshop', 'eval', count=99); "
        "print(s.digest, s.ids[-1])"
    )
    lines = {
        subprocess.check_output(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            text=True,
        )
        for seed in ("1", "2")
    }
    evaluation = envs.tasks("webshop", "eval", count=99)
    assert lines == {f"{evaluation.digest} {evaluation.ids[-1]}\n"}
    training = envs.tasks("webshop", "train", count=10_000)
    assert list(training.ids) == sorted(training.ids)
    assert not {i[-8:] for i in training.ids} & {i[-8:] for i in evaluation.ids}


def test_the_digest_knows_the_goals_and_the_products():
    digests = {
        envs.tasks("webshop", "eval", count=5, **options).digest
        for options in ({}, {"seed": 1}, {"shuffle_seed": 1}, {"num_products": 201})
    }
    assert len(digests) == 4


def test_a_partial_purchase_earns_nothing_but_its_score_is_told():
    steps = envs.expert("webshop", TASK)
    env, *_ = start()
    env.step(steps[0].action)
    env.step(steps[1].action)
    _, reward, terminated, _, info = env.step("click[buy now]")  # Without options.
    assert (reward, terminated, info["won"]) == (0.0, True, False)
    assert 0 < info["task_score"] < 1
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("search[x]")


@pytest.mark.parametrize(
    "action",
    [
        "",
        "search[]",
        "search",
        "Search[x]",
        "click[search]",
        "click[buy now]",
        "\nsearch[x]",
        "search[x",
        "[" * 10_000,
        "click[" + "é" * 10_000 + "]",
        "click[\u202e🙂]",
    ],
)
def test_what_cannot_be_done_costs_a_step_and_changes_nothing(action):
    env, observation, before = start(max_steps=2)
    after, reward, terminated, truncated, info = env.step(action)
    assert (after, reward, terminated, truncated) == (observation, 0.0, False, False)
    assert info["reason"] and len(info["reason"]) < 100
    assert info["anchor"] == before["anchor"]
    assert env.step(action)[3]


@pytest.mark.parametrize(
    "query", ["shoes ñandú 靴 🙂", "a" * 10_000, "x " * 5_000, "the", "[", "\0"]
)
def test_any_words_can_be_searched(query):
    env, *_ = start()
    started = time.perf_counter()
    observation, *_, info = env.step(f"search[{query}]")
    assert time.perf_counter() - started < 1
    assert info["reason"] == "" or query == "["
    assert "Page 1" in observation or query == "["


def test_actions_are_cut_as_the_original_does():
    assert parse_action("search[Red Shoes]") == ("search", "red shoes")
    assert parse_action("click[x] and so on") == ("click", "x")
    assert parse_action("a[b][c]") == ("a[b]", "c")
    assert parse_action("search[]]") == ("search", "]")
    assert parse_action("[x]") == ("", "")
    assert parse_action("search[x]\n]") == ("search", "x")


def test_hidden_choices_part_anchors_and_the_way_there_does_not():
    steps = envs.expert("webshop", TASK)
    env, *_ = start()
    env.step(steps[0].action)
    plain, *_, before = env.step(steps[1].action)
    chosen, *_, after = env.step(steps[2].action)
    assert plain == chosen and before["anchor"] != after["anchor"]
    env.step("click[< prev]")
    *_, again = env.step(steps[1].action)
    assert again["anchor"] == before["anchor"]
    assert "Find me" not in before["anchor"]
    for label in ("description", "reviews"):
        *_, page = env.step(f"click[{label}]")
        assert page["anchor"] != before["anchor"]
        *_, back = env.step("click[< prev]")
        assert back["anchor"] == before["anchor"]


def test_next_page_goes_past_the_end():
    env, *_ = start()
    env.step("search[dress]")
    for number in range(2, 8):
        observation, *_ = env.step("click[next >]")
        assert f"Page {number} (" in observation
    assert observation.endswith("< Prev [SEP] Next >")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"data_dir": "/no/such/folder"}, r"webshop\.data_dir='/no/such.*setup\.sh"),
        ({"goals": "human"}, "no goals by people.*setup.sh"),
        ({"goals": "robot"}, r"webshop\.goals='robot'.*'human'"),
        ({"size": "big"}, "must be one of"),
        ({"observation": "html"}, "text_rich"),
        ({"num_products": 5}, "must be 100 to"),
        ({"max_steps": 0}, "at least 1"),
        ({"datadir": "x"}, "did you mean 'data_dir'"),
    ],
)
def test_errors_name_the_field_and_the_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        envs.make("webshop", **options)


def test_an_empty_data_folder_is_an_error_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"no file items_ins_v2_1000\.json.*setup\.sh"):
        envs.make("webshop", data_dir=str(tmp_path))


def test_nouns_of_titles_are_built_from_tags(tmp_path):
    records = generate_shop(100).records
    (tmp_path / "items_shuffle.json").write_text(json.dumps(records))
    (tmp_path / "items_ins_v2.json").write_text("{}")

    def parse(texts):
        tags = ("PROPN", "NOUN", "VERB")
        for text in texts:
            words = zip(text.split(), itertools.cycle(tags), strict=False)
            yield [types.SimpleNamespace(text=word, pos_=tag) for word, tag in words]

    path = build_title_nouns(tmp_path, "all", parse)
    nouns = json.loads(path.read_text())
    words = records[7]["name"].lower().split()
    assert nouns[records[7]["asin"]] == [
        word for index, word in enumerate(words) if index % 3 < 2
    ]
    products, _ = read_catalogue(tmp_path, "all")
    assert read_title_nouns(tmp_path, "all", products).keys() == nouns.keys()


def test_a_task_of_another_shop_is_an_error():
    env = envs.make("webshop", seed=1)
    with pytest.raises(ValueError, match="the same webshop options"):
        env.reset(options={"task": TASK})
    with pytest.raises(ValueError, match="not one of"):
        envs.make("webshop").reset(options={"task": TASK.replace("600", "400")})


def test_environments_share_one_shop():
    shop_module._open_shop.cache_clear()
    tracemalloc.start()
    try:
        many = [start()[0]]
        one_size = tracemalloc.get_traced_memory()[0]
        for _ in range(63):
            env, *_ = start()
            env.step("search[running shoes]")
            many.append(env)
        many_size = tracemalloc.get_traced_memory()[0]
        # A real shop is hundreds of times as large as this one.
        assert many_size < 2 * one_size
        for _ in range(2_000):
            env, *_ = start()
            env.step("search[lamp]")
            env.close()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < many_size + 0.1 * one_size
    finally:
        tracemalloc.stop()


def test_steps_are_fast():
    env, *_ = start()
    actions = ["search[running shoes]", "click[next >]", "click[< prev]"] * 4
    started = time.perf_counter()
    for _ in range(50):
        env.reset(options={"task": TASK})
        for action in actions:
            env.step(action)
    # Thousands; the bound leaves room for a busy machine.
    assert 50 * len(actions) / (time.perf_counter() - started) > 1_200


def test_it_does_not_import_jax():
    # A bare package in place of crbc_jax, whose own names need JAX.
    program = (
        "import sys, types; package = types.ModuleType('crbc_jax'); "
        f"package.__path__ = [{str(ROOT / 'crbc_jax')!r}]; "
        "sys.modules['crbc_jax'] = package; from crbc_jax.envs import webshop; "
        "webshop.make(webshop.Options()); print('jax' in sys.modules)"
    )
    output = subprocess.check_output(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert output == "False\n"
