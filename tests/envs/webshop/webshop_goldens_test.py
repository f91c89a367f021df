"""The engine equals the original on its own data, to the letter and to the last bit."""

import hashlib
import json
import pathlib

import numpy as np
import pytest

from crbc_jax import envs
from crbc_jax.envs.webshop.goals import Goal
from crbc_jax.envs.webshop.options import Options
from crbc_jax.envs.webshop.reward import score_purchase
from crbc_jax.envs.webshop.shop import open_shop

DATA = pathlib.Path(__file__).parents[3] / "../shared/data/webshop"
pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="needs WebShop's small data set and its golden files"
)


@pytest.fixture(scope="module")
def shop():
    return open_shop(Options(data_dir=str(DATA)))


def golden(name):
    return json.loads((DATA / f"golden_{name}.json").read_text())


def test_document_lengths(shop):
    lengths = dict(zip(shop.products, shop.index.lengths.tolist(), strict=True))
    assert lengths == golden("analyzer")["doc_lengths"]


def test_search_lists_and_scores(shop):
    number = {asin: index for index, asin in enumerate(shop.products)}
    for query in golden("search")["queries"]:
        found = [product.asin for product in shop.search(query["query"])]
        assert found == query["asins"], query["query"]
        scores = shop.index.score(query["query"])[[number[asin] for asin in found]]
        # Anserini rounds to 4 decimals, and lowers each of equal ones by 1e-6.
        np.testing.assert_allclose(scores, query["scores"], rtol=0, atol=1e-4)


def test_goals_and_prices(shop):
    expected = golden("goals")
    assert len(shop.goals) == expected["num_goals"]
    text = "\n".join(goal.as_json() for goal in shop.goals)
    assert hashlib.sha256(text.encode()).hexdigest() == expected["sha256_of_all_goals"]
    for asin, price in expected["prices_of_range_products"].items():
        assert shop.prices[asin] == price


def test_rewards(shop):
    for case in golden("rewards")["cases"]:
        wanted, options = case["goal"], case["goal"]["goal_options"]
        goal = Goal(
            wanted["asin"],
            wanted["instruction_text"],
            tuple(wanted["attributes"]),
            wanted["price_upper"],
            options if isinstance(options, dict) else tuple(options),
        )
        score = score_purchase(
            shop.products[case["purchased_asin"]],
            shop.products[goal.asin],
            goal,
            case["price"],
            case["options"],
            shop.title_nouns[case["purchased_asin"]],
            shop.title_nouns[goal.asin],
        )
        info = case["info"]
        assert score.total == case["reward"], case
        assert (score.kind, score.title) == (info["r_type"], info["title_score"])
        assert score.same_query == info["query_match"]
        assert score.same_category == info["category_match"]
        assert score.within_price == info["r_price"]
        assert score.num_attributes / len(goal.attributes) == info["r_att"]
        assert score.num_options == info.get("r_option", 0) * len(goal.options)


@pytest.mark.parametrize("number", range(5))
def test_transcripts(shop, number):
    episode = golden("episodes")["episodes"][number]
    env = envs.make(
        "webshop",
        data_dir=str(DATA),
        observation=episode["observation_mode"],
        max_steps=len(episode["steps"]),
    )
    task = f"{shop.name}-eval-{episode['session']:08d}"
    observation, info = env.reset(options={"task": task})
    for step in episode["steps"]:
        if step["action"] is not None:
            observation, _, terminated, _, info = env.step(step["action"])
            assert terminated == step["done"]
        assert observation == step["observation"]
        assert info["task_score"] == step["reward"]
        assert info["won"] == (step["reward"] == 1.0)
        clickables = step["available"]["clickables"]
        if step["available"]["has_search_bar"]:
            assert info["admissible_actions"] == ["search[<your query>]"]
        else:
            expected = [f"click[{text}]" for text in clickables]
            assert info["admissible_actions"] == expected


def test_human_goals_and_the_expert_on_them():
    options = {"data_dir": str(DATA), "goals": "human"}
    task_set = envs.tasks("webshop", "eval", count=500, **options)
    assert len(task_set.ids) == 13
    steps = envs.expert("webshop", task_set.ids[0], **options)
    assert steps[-1].action == "click[buy now]"
    with pytest.raises(ValueError, match="no 'train' task"):
        envs.tasks("webshop", "train", count=1, **options)


def test_splits_of_the_official_goals():
    options = {"data_dir": str(DATA)}
    evaluation = envs.tasks("webshop", "eval", count=10_000, **options)
    training = envs.tasks("webshop", "train", count=10_000, **options)
    assert (len(evaluation.ids), len(training.ids)) == (500, 6910 - 500)
    assert training.ids[0].endswith("-train-00000500")


def test_the_expert_says_which_goals_no_choice_of_options_meets(shop):
    # "2005grey" is taken for grey, which is not alike to the pair of name and value.
    task = f"{shop.name}-eval-00000334"
    with pytest.raises(ValueError, match=r"scored 0\.800 of 1"):
        envs.expert("webshop", task, data_dir=str(DATA))


def test_title_nouns_that_are_missing_are_an_error_with_a_remedy(tmp_path):
    for name in ("items_shuffle_1000.json", "items_ins_v2_1000.json"):
        (tmp_path / name).symlink_to((DATA / name).resolve())
    (tmp_path / "title_nouns.json").write_text("{}")
    with pytest.raises(ValueError, match="1,000 of 1,000 titles.*build_title_nouns"):
        envs.make("webshop", data_dir=str(tmp_path))
    (tmp_path / "title_nouns.json").unlink()
    envs.make("webshop", data_dir=str(tmp_path))  # Those of the small set are shipped.
