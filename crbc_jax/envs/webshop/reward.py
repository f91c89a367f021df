"""How well a purchase meets a goal, by WebShop's rules.

Source: Yao et al., WebShop (2022), section 3 and appendix A, and the published code,
whose peculiarities the scores depend on: they are kept, and said where they occur.
"""

import functools
from typing import NamedTuple

from rapidfuzz import fuzz, utils

from crbc_jax.envs.webshop.catalogue import Product
from crbc_jax.envs.webshop.goals import Goal

_MIN_SIMILARITY = 85  # Of 100; alike is what is above.
_CACHED_PAIRS = 1 << 16
_COLORS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux "
    "bronze brown burgundy camel camo caramel champagne charcoal cheetah chestnut "
    "chocolate christmas coffee cognac copper coral cranberry cream crystal dark denim "
    "eggplant elephant espresso fuchsia gold granite grape graphite grass gray green "
    "grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime "
    "magenta maroon mauve merlot midnight mint mocha multicolor mushroom mustard "
    "natural navy nude olive orange peach pewter pink plum purple rainbow red rose "
    "royal rust sand sapphire seashell silver skull slate steel stone stonewash "
    "sunflower tan taupe teal tiger turquoise violet walnut wheat white wine yellow"
).split()


class Score(NamedTuple):
    """A purchase's score, and what it is made of."""

    total: float  # 0 to 1; 1 is success.
    kind: float  # 0, 0.1, 0.5 or 1: whether it is the kind of thing that was wanted.
    title: float  # Share of the wanted title's nouns.
    same_query: bool
    same_category: bool
    num_attributes: int  # Of the goal's.
    num_options: int
    within_price: bool


def score_purchase(
    bought: Product,
    wanted: Product,
    goal: Goal,
    price: float,
    chosen: dict[str, str],
    bought_nouns: tuple[str, ...],
    wanted_nouns: tuple[str, ...],
) -> Score:
    """Scores the purchase of `bought` with the `chosen` options at `price` dollars.

    total = kind * (attributes met + options met + price met) / (all of them)

    Args:
        bought: the product that was bought.
        wanted: the product that `goal` was made from.
        goal: what was asked for.
        price: of `bought`, in dollars.
        chosen: option name -> chosen value.
        bought_nouns: nouns of the title of `bought`, in lower case.
        wanted_nouns: those of `wanted`, as often as they occur.
    """
    same_query = bought.query == wanted.query
    same_category = len(set(bought.categories) & set(wanted.categories)) >= 2
    title = 0.2
    if wanted_nouns:
        title = len(set(bought_nouns) & set(wanted_nouns)) / len(wanted_nouns)
    kind = 1.0 if same_query or same_category or title > 0.2 else 0.5
    if title < 0.1:
        kind = 0.1 if title else 0.0
    num_attributes = sum(_has_attribute(bought, wish) for wish in goal.attributes)
    values = [_plain_color(value) for value in chosen.values()]
    wishes = [_plain_color(wish) for wish in goal.wanted_options()]
    num_options = sum(any(_alike(value, w) for value in values) for w in wishes)
    within_price = price <= goal.price_limit
    met = num_attributes + num_options + within_price
    total = met / (len(goal.attributes) + len(wishes) + 1) * kind
    return Score(
        total,
        kind,
        title,
        same_query,
        same_category,
        num_attributes,
        num_options,
        within_price,
    )


def _has_attribute(product: Product, wish: str) -> bool:
    """Whether an attribute is alike, or one of the product's texts has the words."""
    return (
        any(_alike(attribute, wish) for attribute in product.attributes)
        or wish in product.title.lower()
        or wish in " ".join(product.bullets).lower()
        or wish in product.description.lower()
    )


def _plain_color(option: str | tuple[str, str]) -> str | tuple[str, str]:
    """Returns the first known color within a text, or the option itself.

    A pair (name, value) has a color "within" only if one of the two is just that.
    """
    return next((color for color in _COLORS if color in option), option)


@functools.lru_cache(_CACHED_PAIRS)
def _alike(one: str | tuple[str, str], other: str | tuple[str, str]) -> bool:
    """Whether two texts share their words; a pair is compared as Python prints it."""
    similarity = fuzz.token_set_ratio(_clean(one), _clean(other))
    return round(similarity) > _MIN_SIMILARITY


def _clean(text: str | tuple[str, str]) -> str:
    return utils.default_process(str(text).encode("ascii", "ignore").decode())
