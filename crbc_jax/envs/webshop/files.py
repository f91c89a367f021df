"""WebShop's official files, and the nouns of titles beside them."""

import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from crbc_jax.envs.webshop.catalogue import Product, read_products
from crbc_jax.envs.webshop.options import HOW_TO_GET_DATA

_PRODUCTS = {"small": "items_shuffle_1000.json", "all": "items_shuffle.json"}
_ATTRIBUTES = {"small": "items_ins_v2_1000.json", "all": "items_ins_v2.json"}
_HUMAN = "items_human_ins.json"
_NOUNS = "title_nouns.json"
_SHIPPED_NOUNS = pathlib.Path(__file__).parent / "title_nouns_small.json"
_NOUN_TAGS = ("NOUN", "PROPN")


def read_catalogue(
    folder: pathlib.Path, size: str
) -> tuple[list[Product], dict[str, Any]]:
    """Reads the products, and the attributes and instructions by rule.

    Raises:
        ValueError: if a file is not there, saying how to get it.
    """
    attributes = _read_json(folder, _ATTRIBUTES[size])
    return read_products(_read_json(folder, _PRODUCTS[size]), attributes), attributes


def read_human(folder: pathlib.Path) -> dict[str, Any]:
    """Reads people's instructions; errors as of `read_catalogue`."""
    return _read_json(folder, _HUMAN)


def read_title_nouns(
    folder: pathlib.Path, size: str, products: Sequence[Product]
) -> dict[str, tuple[str, ...]]:
    """Reads the folder's *title_nouns*.json; else those shipped for the small set.

    Such a file maps product numbers to lists of nouns, at its top or in "nouns".

    Raises:
        ValueError: if a product's are not known, saying how to get them.
    """
    known = {}
    for path in sorted(folder.glob(f"*{_NOUNS}")) or [_SHIPPED_NOUNS]:
        content = json.loads(path.read_bytes())
        known |= content.get("nouns", content)
    missing = [product.asin for product in products if product.asin not in known]
    if missing:
        raise ValueError(
            f"webshop.data_dir={str(folder)!r}: the nouns of {len(missing):,} of "
            f"{len(products):,} titles are not known, among them {missing[0]}'s, and "
            f"rewards need them; to write them to {_NOUNS} in that folder: pip install "
            f'"crbc_jax[webshop-full]", then python experiments/build_title_nouns.py '
            f"--data_dir={folder} --size={size}"
        )
    return {product.asin: tuple(known[product.asin]) for product in products}


def build_title_nouns(
    folder: pathlib.Path, size: str, parse: Callable[[Iterable[str]], Iterable[Any]]
) -> pathlib.Path:
    """Writes the nouns of all titles into the folder; returns the file's path.

    Args:
        folder: of WebShop's files.
        size: of the catalogue, of `options.SIZES`.
        parse: texts -> spaCy documents, in order: the method `pipe` of a pipeline that
            tags. Rewards are the published ones' if it is en_core_web_sm's.
    """
    products, _ = read_catalogue(folder, size)
    documents = parse(product.title for product in products)
    nouns = {
        product.asin: [
            token.text.lower() for token in document if token.pos_ in _NOUN_TAGS
        ]
        for product, document in zip(products, documents, strict=True)
    }
    path = folder / _NOUNS
    path.write_text(json.dumps(nouns, ensure_ascii=False, separators=(",", ":")))
    return path


def _read_json(folder: pathlib.Path, name: str) -> Any:
    path = folder / name
    if not path.is_file():
        raise ValueError(
            f"webshop.data_dir={str(folder)!r} has no file {name}; to get it, "
            f"{HOW_TO_GET_DATA}, or set webshop.size to the one that is there"
        )
    return json.loads(path.read_bytes())
