"""Words and terms are Lucene's."""

import json
import pathlib

import numpy as np
import pytest

from crbc_jax.envs.webshop.analyzer import analyze, tokenize
from crbc_jax.envs.webshop.search import SearchIndex, round_lengths
from crbc_jax.envs.webshop.stemmer import stem

GOLDEN = pathlib.Path(__file__).parents[2] / "golden/webshop_analyzer.json"


@pytest.mark.parametrize(
    "case", json.loads(GOLDEN.read_text())["cases"], ids=lambda case: case["text"][:20]
)
def test_terms_equal_lucenes(case):
    assert analyze(case["text"]) == case["tokens"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("", []),
        ("can't stop.now 3.5 a,b 1,000", ["can't", "stop.now", "3.5", "a", "b"]),
        ("_ snake_case _x_", ["snake_case", "_x_"]),
        ("棉布 shirt", ["棉", "布", "shirt"]),
        ("カタカナ ひら", ["カタカナ", "ひ", "ら"]),
        ("cafe\u0301s ©2021", ["cafe\u0301s", "©", "2021"]),
        ("x" * 300, ["x" * 255, "x" * 45]),
    ],
)
def test_words(text, words):
    assert tokenize(text)[: len(words)] == words


@pytest.mark.parametrize(
    "word, expected",
    [
        ("caresses", "caress"),
        ("ponies", "poni"),
        ("feed", "feed"),
        ("plastered", "plaster"),
        ("hopping", "hop"),
        ("falling", "fall"),
        ("filing", "file"),
        ("happy", "happi"),
        ("relational", "relat"),
        ("possibly", "possibl"),
        ("electricity", "electr"),
        ("adoption", "adopt"),
        ("controlling", "control"),
        ("rate", "rate"),
        ("as", "as"),
    ],
)
def test_stems(word, expected):
    assert stem(word) == expected


def test_scores_are_bm25_worked_by_hand():
    index = SearchIndex(["red shirt", "red red shoe", "blue hat"], ["b", "a", "c"])
    idf = np.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    mean = 7 / 3
    expected = [
        idf * 1 / (1 + 0.9 * (0.6 + 0.4 * 2 / mean)),
        idf * 2 / (2 + 0.9 * (0.6 + 0.4 * 3 / mean)),
        0,
    ]
    np.testing.assert_allclose(index.score("red"), expected, rtol=1e-6)
    np.testing.assert_allclose(index.score("RED reds"), np.multiply(2, expected), 1e-6)
    assert index.top("red", 50) == (1, 0)
    assert index.top("nothing", 50) == ()


def test_equal_scores_are_ordered_by_name_also_at_the_cut():
    index = SearchIndex(["hat"] * 5, ["e", "c", "a", "d", "b"])
    assert index.top("hat", 3) == (2, 4, 1)


def test_long_documents_have_lucenes_rounded_length():
    lengths = np.array([0, 24, 39, 40, 41, 42, 55, 56, 57, 1000])
    expected = [0, 24, 39, 40, 40, 42, 54, 56, 56, 984]
    assert round_lengths(lengths).tolist() == expected
