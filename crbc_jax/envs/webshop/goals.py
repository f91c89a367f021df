"""What a shopper wants: goals by rule, or by people, in a fixed order."""

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from crbc_jax.envs.webshop.catalogue import Product

_PRICE_LIMITS = [10.0 * tens for tens in range(1, 100)]  # Dollars.
_NUM_LIMITS = 4  # Of which two are drawn.
_NO_LIMIT = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """What to buy. `options` maps names to values; people's goals have values only."""

    asin: str  # A product that meets it.
    instruction: str
    attributes: tuple[str, ...]
    price_limit: float | int  # Dollars.
    options: dict[str, str] | tuple[str, ...]

    def wanted_options(self) -> tuple[tuple[str, str] | str, ...]:
        """Returns the options as the reward compares them: pairs, or values."""
        if isinstance(self.options, dict):
            return tuple(self.options.items())
        return self.options

    def as_json(self) -> str:
        """Returns the whole goal as one line, under WebShop's names."""
        return json.dumps(
            {
                "asin": self.asin,
                "instruction_text": self.instruction,
                "attributes": self.attributes,
                "price_upper": self.price_limit,
                "goal_options": self.options,
            },
            sort_keys=True,
            ensure_ascii=False,
        )


def draw_prices(products: Sequence[Product], rng: random.Random) -> dict[str, float]:
    """Returns each product's price in dollars: of a range, one point for good."""
    return {
        product.asin: rng.uniform(*product.prices)
        if len(product.prices) > 1
        else product.prices[0]
        for product in products
    }


def synthetic_goals(
    products: Sequence[Product],
    prices: Mapping[str, float],
    instructions: Mapping[str, Mapping[str, Any]],
    rng: random.Random,
) -> Iterator[Goal]:
    """Yields a goal for each combination of options of products with instructions.

    Args:
        products: in the files' order, on which the draws depend.
        prices: as `draw_prices` gives them.
        instructions: content of items_ins_v2*.json.
        rng: what `draw_prices` has left.
    """
    for product in products:
        entry = instructions.get(product.asin, {})
        if entry.get("instruction") is None:
            continue
        limit, limit_text = _draw_limit(prices[product.asin], rng)
        names = sorted(product.options)
        for values in itertools.product(*(product.options[name] for name in names)):
            options = dict(zip(names, values, strict=True))
            wanted = ", and ".join(f"{name}: {v}" for name, v in options.items())
            wanted = f" with {wanted}" if wanted else ""
            yield Goal(
                asin=product.asin,
                instruction=f"{entry['instruction']}{wanted}{limit_text}",
                attributes=tuple(entry["instruction_attributes"]),
                price_limit=limit,
                options=options,
            )


def human_goals(
    products: Sequence[Product],
    prices: Mapping[str, float],
    instructions: Mapping[str, Sequence[Mapping[str, Any]]],
    rng: random.Random,
) -> Iterator[Goal]:
    """Yields a goal for each of people's instructions that names an attribute.

    Arguments as of `synthetic_goals`, but of items_human_ins.json.
    """
    for product in products:
        for entry in instructions.get(product.asin, ()):
            if not entry["instruction_attributes"]:
                continue
            limit, limit_text = _draw_limit(prices[product.asin], rng)
            yield Goal(
                asin=product.asin,
                instruction=entry["instruction"].strip(".") + limit_text,
                attributes=tuple(entry["instruction_attributes"]),
                price_limit=limit,
                options=tuple(entry["instruction_options"]),
            )


def _draw_limit(price: float, rng: random.Random) -> tuple[float | int, str]:
    """Draws a price limit above `price`, and says it; dear products have none."""
    limits = [limit for limit in _PRICE_LIMITS if limit > price][:_NUM_LIMITS]
    if len(limits) < 2:
        return _NO_LIMIT, ""
    limit = max(rng.sample(limits, 2))
    return limit, f", and price lower than {limit:.2f} dollars"
