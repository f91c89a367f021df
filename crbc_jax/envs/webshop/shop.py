"""A shop: products, search, goals. One serves all environments of a process."""

import dataclasses
import functools
import pathlib
import random
from collections.abc import Mapping

from crbc_jax.envs.base import digest_lines
from crbc_jax.envs.webshop import files
from crbc_jax.envs.webshop import goals as goals_module
from crbc_jax.envs.webshop.catalogue import Product, read_products
from crbc_jax.envs.webshop.generator import VERSION, generate_shop
from crbc_jax.envs.webshop.goals import Goal
from crbc_jax.envs.webshop.options import GENERATED, Options
from crbc_jax.envs.webshop.reward import Score, score_purchase
from crbc_jax.envs.webshop.search import SearchIndex

NUM_RESULTS = 50  # Of a search.


@dataclasses.dataclass(frozen=True)
class Shop:
    """Everything that does not change between and within episodes.

    Attributes:
        name: of the catalogue and the goals; task ids begin with it.
        products: asin -> product, in the files' order.
        prices: asin -> dollars.
        title_nouns: asin -> nouns of the title.
        goals: shuffled, as the splits are cut.
        index: over the products, in their order.
    """

    name: str
    products: dict[str, Product]
    prices: dict[str, float]
    title_nouns: Mapping[str, tuple[str, ...]]
    goals: list[Goal]
    index: SearchIndex

    @functools.cached_property
    def fingerprint(self) -> str:
        """Returns a digest of all that decides what an episode shows and scores."""
        return digest_lines(
            repr((product, self.prices[asin], self.title_nouns[asin]))
            for asin, product in self.products.items()
        )

    @functools.cached_property
    def _in_order(self) -> list[Product]:
        return list(self.products.values())

    def search(self, keywords: str) -> list[Product]:
        """Returns the products that match best, at most NUM_RESULTS."""
        found = self.index.top(keywords, NUM_RESULTS)
        return [self._in_order[document] for document in found]

    def score(self, goal: Goal, asin: str, chosen: dict[str, str]) -> Score:
        """Scores a purchase for a goal."""
        return score_purchase(
            self.products[asin],
            self.products[goal.asin],
            goal,
            self.prices[asin],
            chosen,
            self.title_nouns[asin],
            self.title_nouns[goal.asin],
        )


def open_shop(options: Options) -> Shop:
    """Returns the shop of the options; it is loaded once a process.

    Raises:
        ValueError: if a file is missing or lacks something, saying what to do.
    """
    fields = ("data_dir", "size", "goals", "seed", "shuffle_seed", "num_products")
    return _open_shop(*(getattr(options, field) for field in fields))


@functools.lru_cache(maxsize=2)
def _open_shop(
    data_dir: str,
    size: str,
    goals: str,
    seed: int,
    shuffle_seed: int,
    num_products: int,
) -> Shop:
    if data_dir == GENERATED:
        generated = generate_shop(num_products)
        products = read_products(generated.records, generated.instructions)
        instructions, title_nouns = generated.instructions, generated.title_nouns
        name = f"generated{VERSION}-{num_products}"
    else:
        folder = pathlib.Path(data_dir)
        products, attributes = files.read_catalogue(folder, size)
        is_human = goals == "human"
        instructions = files.read_human(folder) if is_human else attributes
        title_nouns = files.read_title_nouns(folder, size, products)
        name = size
    rng = random.Random(seed)
    prices = goals_module.draw_prices(products, rng)
    make_goals = {
        "synthetic": goals_module.synthetic_goals,
        "human": goals_module.human_goals,
    }[goals]
    goal_list = list(make_goals(products, prices, instructions, rng))
    random.Random(shuffle_seed).shuffle(goal_list)
    return Shop(
        name=f"{name}-{goals}-{seed}-{shuffle_seed}",
        products={product.asin: product for product in products},
        prices=prices,
        title_nouns=title_nouns,
        goals=goal_list,
        index=SearchIndex(
            (product.index_text() for product in products),
            [product.asin for product in products],
        ),
    )
