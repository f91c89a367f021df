"""Times a large WebShop catalogue, by the code that loads the official one.

    python experiments/bench_webshop.py --products=200000

Writes made-up products in the format of WebShop's files into a temporary folder, then
loads, searches and plays there, each as users do.
"""

import json
import os
import pathlib
import resource
import tempfile
import time

import numpy as np
from absl import app, flags

from crbc_jax import envs
from crbc_jax.envs.webshop.generator import generate_shop
from crbc_jax.envs.webshop.options import Options
from crbc_jax.envs.webshop.shop import open_shop

_PRODUCTS = flags.DEFINE_integer("products", 200_000, "Products of the catalogue.", 600)
_SEARCHES = 50
_SECONDS = 5.0  # Of play.


def write_files(folder: pathlib.Path, num_products: int) -> None:
    """Writes what WebShop's setup.sh would leave, and the nouns of titles."""
    shop = generate_shop(num_products)
    for name, content in {
        "items_shuffle.json": shop.records,
        "items_ins_v2.json": shop.instructions,
        "title_nouns.json": shop.title_nouns,
    }.items():
        (folder / name).write_text(json.dumps(content))


def play(options: dict) -> float:
    """Returns steps a second of a random shopper."""
    env = envs.make("webshop", **options)
    rng = np.random.default_rng(0)
    steps, started, is_over = 0, time.perf_counter(), True
    while time.perf_counter() - started < _SECONDS:
        if is_over:
            _, info = env.reset(seed=steps)
        action = str(rng.choice(info["admissible_actions"]))
        if action.startswith("search"):
            action = "search[water bottle]"
        _, _, terminated, truncated, info = env.step(action)
        is_over, steps = terminated or truncated, steps + 1
    return steps / (time.perf_counter() - started)


def main(_) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # In a child, so that its memory is not counted.
        if (child := os.fork()) == 0:
            write_files(pathlib.Path(folder), _PRODUCTS.value)
            os._exit(0)
        os.waitpid(child, 0)
        size = sum(path.stat().st_size for path in pathlib.Path(folder).iterdir())
        options = {"data_dir": folder, "size": "all"}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        shop = open_shop(Options(**options))
        seconds = time.perf_counter() - started
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(
            f"{len(shop.products):,} products, {len(shop.goals):,} goals, "
            f"{size / 2**20:,.0f} MiB of files: loaded in {seconds:.1f} s, "
            f"{memory / 2**20:.2f} GiB at the peak"
        )
        rng, times = np.random.default_rng(0), []
        for index in rng.integers(len(shop.goals), size=_SEARCHES):
            started = time.perf_counter()
            shop.search(shop.goals[index].instruction.lower())
            times.append(1000 * (time.perf_counter() - started))
        print(
            f"searches of {_SEARCHES} instructions: {np.median(times):.1f} ms median, "
            f"{min(times):.1f} to {max(times):.1f}"
        )
        print(f"random shopper: {play(options):,.0f} steps/s")


if __name__ == "__main__":
    app.run(main)
