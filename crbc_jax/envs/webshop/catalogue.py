"""Product records, as WebShop's files hold them -> products."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_NO_PRICE = 100.0  # Dollars, where a record has no price.
_MAX_ASIN_LENGTH = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """One product. Nobody changes it: all environments of a process share it."""

    asin: str  # Amazon's number, the product's name here.
    title: str
    query: str  # Search under which the product was once found: its kind.
    categories: tuple[str, ...]  # Parts of its path in the shop's tree.
    description: str
    bullets: tuple[str, ...]
    prices: tuple[float, ...]  # Dollars: one, or the ends of a range.
    price_text: str
    options: dict[str, tuple[str, ...]]  # Name -> values, in lower case.
    attributes: tuple[str, ...]

    def index_text(self) -> str:
        """Returns what search looks at."""
        options = ", and ".join(
            f"{name}: {', '.join(values)}" for name, values in self.options.items()
        )
        parts = (self.title, self.description, self.bullets[0], options)
        return " ".join(parts).lower()


def read_products(
    records: Iterable[Mapping[str, Any]], attributes: Mapping[str, Mapping[str, Any]]
) -> list[Product]:
    """Returns the products of records, less those without a proper or new number.

    Args:
        records: entries of items_shuffle*.json.
        attributes: content of items_ins_v2*.json, product number -> its entry.
    """
    products = {}
    for record in records:
        asin = record["asin"]
        if asin == "nan" or len(asin) > _MAX_ASIN_LENGTH or asin in products:
            continue
        known = attributes.get(asin, {}).get("attributes", ["DUMMY_ATTR"])
        products[asin] = _read_product(record, known)
    return list(products.values())


def _read_product(record: Mapping[str, Any], attributes: Sequence[str]) -> Product:
    bullets = record["small_description"]
    if not isinstance(bullets, list):
        bullets = [bullets]
    prices = _read_prices(record.get("pricing"))
    return Product(
        asin=record["asin"],
        title=record["name"],
        query=record["query"].lower().strip(),
        categories=tuple(
            part.strip() for part in record["product_category"].split("›")
        ),
        description=record["full_description"],
        bullets=tuple(bullets) or ("",),
        prices=prices,
        price_text=" to ".join(f"${price}" for price in prices),
        options=_read_options(record["customization_options"]),
        attributes=tuple(attributes),
    )


def _read_prices(pricing: str | None) -> tuple[float, ...]:
    """Reads "$5" or "$5 - $7"; of more prices, the first two."""
    if not pricing:
        return (_NO_PRICE,)
    prices = [float(re.sub(r"[^\d.]", "", text)) for text in pricing.split("$")[1:]]
    return tuple(prices[:2])


def _read_options(
    record: Mapping[str, Sequence[Mapping[str, Any]] | None] | str,
) -> dict[str, tuple[str, ...]]:
    return {
        name.lower(): tuple(
            choice["value"].strip().replace("/", " | ").lower() for choice in choices
        )
        for name, choices in (record or {}).items()
        if choices is not None
    }
