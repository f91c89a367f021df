"""A small shop made up by rule, in the form of WebShop's files."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

VERSION = "1"  # Changes with anything that changes the products of a seed.
_SEED = 0

_COLORS = "black white navy teal olive burgundy khaki silver coral ivory".split()
_GARMENT_SIZES = ("small", "medium", "large", "x-large")
_SHOE_SIZES = ("7", "8", "9", "10", "11")
_PACKS = ("1 count", "pack of 2", "pack of 4")
_LENGTHS = ("3 feet", "6 feet", "10 feet")
_SYLLABLES = "ba do fi ka lo mi no pe ra su ti vu zo".split()


class _Kind(NamedTuple):
    """A kind of product: its search, its path in the shop, and what varies."""

    query: str
    path: str
    noun: str  # All of its words are nouns.
    attributes: tuple[str, ...]
    option: str
    values: tuple[str, ...]
    price: float  # Typical, in dollars.


_KINDS = (
    _Kind(
        "women's dresses",
        "Clothing, Shoes & Jewelry › Women › Clothing › Dresses",
        "summer dress",
        ("machine wash", "short sleeve", "high waist", "soft cotton", "loose fit"),
        "size",
        _GARMENT_SIZES,
        30,
    ),
    _Kind(
        "men's shirts",
        "Clothing, Shoes & Jewelry › Men › Clothing › Shirts",
        "dress shirt",
        ("long sleeve", "slim fit", "button closure", "hand wash", "classic fit"),
        "size",
        _GARMENT_SIZES,
        25,
    ),
    _Kind(
        "running shoes",
        "Clothing, Shoes & Jewelry › Unisex › Shoes › Running",
        "running shoes",
        ("rubber sole", "memory foam", "arch support", "non slip", "lace closure"),
        "size",
        _SHOE_SIZES,
        60,
    ),
    _Kind(
        "charging cables",
        "Electronics › Computers & Accessories › Cables › Chargers",
        "charger cable",
        ("fast charging", "heavy duty", "nylon braided", "gold plated", "high speed"),
        "length",
        _LENGTHS,
        12,
    ),
    _Kind(
        "headphones",
        "Electronics › Audio › Headphones › Earbuds",
        "earbuds headset",
        ("noise cancelling", "water resistant", "hands free", "stereo sound"),
        "package",
        _PACKS,
        45,
    ),
    _Kind(
        "throw pillows",
        "Home & Kitchen › Bedding › Pillows › Throw Pillows",
        "cushion pillow",
        ("machine washable", "double sided", "super soft", "zipper closure"),
        "package",
        _PACKS,
        18,
    ),
    _Kind(
        "table lamps",
        "Home & Kitchen › Lighting › Lamps › Table Lamps",
        "desk lamp",
        ("eye protection", "easy install", "touch control", "energy saving"),
        "package",
        _PACKS,
        35,
    ),
    _Kind(
        "water bottles",
        "Sports & Outdoors › Camping › Hydration › Bottles",
        "water bottle",
        ("leak proof", "stainless steel", "bpa free", "wide mouth"),
        "package",
        _PACKS,
        20,
    ),
)


class GeneratedShop(NamedTuple):
    """What WebShop's files would hold, and the nouns of the titles."""

    records: list[dict[str, Any]]  # As items_shuffle.json.
    instructions: dict[str, dict[str, Any]]  # As items_ins_v2.json.
    title_nouns: dict[str, tuple[str, ...]]


def generate_shop(num_products: int) -> GeneratedShop:
    """Makes up products: the same at every call, and more begin with fewer."""
    rng = random.Random(_SEED)
    shop = GeneratedShop([], {}, {})
    for index in range(num_products):
        kind = _KINDS[index % len(_KINDS)]
        asin = f"G{index:09d}"
        brand = _brand(index)
        attributes = rng.sample(kind.attributes, 3)
        colors = rng.sample(_COLORS, rng.randint(2, 4))
        low = round(kind.price * rng.uniform(0.6, 1.4), 2)
        pricing = f"${low}"
        if rng.random() < 0.2:
            pricing += f" - ${round(low * 1.3, 2)}"
        title = f"{brand.title()} {kind.noun.title()}, {', '.join(attributes).title()}"
        shop.records.append(
            {
                "asin": asin,
                "name": title,
                "query": kind.query,
                "product_category": kind.path,
                "pricing": pricing,
                "full_description": f"{brand.title()} makes this {kind.noun}: "
                f"{', '.join(attributes)}. Comes in {', '.join(colors)}.",
                "small_description": [f"{text.capitalize()}" for text in attributes],
                "customization_options": {
                    "Color": _choices(colors),
                    kind.option.capitalize(): _choices(kind.values),
                },
            }
        )
        wanted = sorted(rng.sample(attributes, 2))
        shop.instructions[asin] = {
            "attributes": attributes,
            "instruction": f"Find me {wanted[0]} {kind.query} with {wanted[1]}",
            "instruction_attributes": wanted,
        }
        shop.title_nouns[asin] = (brand, *kind.noun.split())
    return shop


def _brand(index: int) -> str:
    """Returns a name for a number, another for each."""
    name = ""
    for _ in range(4):
        index, digit = divmod(index, len(_SYLLABLES))
        name += _SYLLABLES[digit]
    return name + _SYLLABLES[index] if index else name


def _choices(values: Sequence[str]) -> list[dict[str, str]]:
    return [{"value": value} for value in values]
