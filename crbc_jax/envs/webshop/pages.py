"""WebShop's pages: what is on them, as text and as things to click.

The texts are those that the original's web pages show, to the letter.
"""

import json
from collections.abc import Collection, Sequence
from typing import NamedTuple

from crbc_jax.envs.webshop.catalogue import Product

SEARCH, BACK, NEXT, PREVIOUS, BUY = (
    "Search",
    "Back to Search",
    "Next >",
    "< Prev",
    "Buy Now",
)
DETAILS = ("Description", "Features", "Reviews")
SEPARATOR = " [SEP] "
PAGE_SIZE = 10  # Results a page.


class Part(NamedTuple):
    """One text of a page, and what it is."""

    text: str
    kind: str = "text"  # Or "button", "option", "link".
    is_clicked: bool = False


class Page(NamedTuple):
    """The parts of a page, from top to bottom; the instruction is in the head."""

    head: list[Part]
    body: list[Part]

    def text(self) -> str:
        """Returns the page as WebShop's observation mode "text" has it."""
        return join(self.head + self.body)

    def text_rich(self) -> str:
        """Returns the page as WebShop's observation mode "text_rich" has it."""
        clicked, lines = [], []
        for text, kind, is_clicked in _shown(self.head + self.body):
            if kind == "text":
                lines.append(f"{text}\n")
                continue
            if kind == "option" and is_clicked:
                clicked.append(f"You have clicked {text}.\n")
            before = {"button": "", "option": "  ", "link": "\n"}[kind]
            word = "clicked button" if is_clicked else "button"
            lines.append(f"{before}[{word}] {text} [{word}_]\n")
        return "".join([*reversed(clicked), *lines])

    def clickables(self) -> list[str]:
        """Returns what can be clicked, in lower case: buttons, links, options."""
        shown = [
            part.text.lower()
            for kind in ("button", "link", "option")
            for part in self.body
            if part.kind == kind
        ]
        return list(dict.fromkeys(shown))


def join(parts: Sequence[Part]) -> str:
    """Returns parts of a page in one line."""
    return SEPARATOR.join(part.text.strip() for part in _shown(parts))


def _shown(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if part.text not in ("", "\n")]


def start_page(instruction: str) -> Page:
    """Returns the page with the search bar."""
    head = [Part("WebShop"), Part("Instruction: "), Part(instruction)]
    return Page(head, [Part(SEARCH, "button")])


def results_page(
    instruction: str,
    found: Sequence[Product],
    number: int,
    visited: Collection[str],
) -> Page:
    """Returns page `number`, from 1, of the products that a search found.

    Args:
        instruction: what the shopper wants.
        found: every product that the search found.
        number: of the page; past the last one it is empty.
        visited: asins of products that were looked at.
    """
    body = [
        Part(BACK, "button"),
        Part(f"Page {number} (Total results: {len(found)})"),
    ]
    if number > 1:
        body.append(Part(PREVIOUS, "button"))
    body.append(Part(NEXT, "button"))
    for product in found[PAGE_SIZE * (number - 1) : PAGE_SIZE * number]:
        body += [
            Part(product.asin, "link", product.asin in visited),
            Part(product.title),
            Part(product.price_text),
        ]
    return Page(_head(instruction), body)


def item_page(
    instruction: str, product: Product, keywords: str, chosen: dict[str, str]
) -> Page:
    """Returns the page of one product.

    Args:
        instruction: what the shopper wants.
        product: whose page it is.
        keywords: of the search that found it.
        chosen: option name -> value. The original looks for a value, in quotes, in
            the page's address, which has the keywords and this mapping as JSON: so a
            value that JSON escapes never looks chosen, and one in quotes among the
            keywords does.
    """
    address = "+".join(keywords.split(" ")) + "/" + json.dumps(chosen)
    body = [Part(BACK, "button"), Part(PREVIOUS, "button")]
    for name, values in product.options.items():
        body.append(Part(name))
        body += [Part(v, "option", f'"{v}"' in address) for v in values]
    body += [
        Part(product.title),
        Part(f"Price: {product.price_text}"),
        Part("Rating: N.A."),
    ]
    body += [Part(label, "button") for label in (*DETAILS, BUY)]
    return Page(_head(instruction), body)


def details_page(instruction: str, product: Product, label: str) -> Page:
    """Returns one of the pages DETAILS of a product; there are no reviews."""
    body = [Part(BACK, "button"), Part(PREVIOUS, "button")]
    if label == "Description":
        body.append(Part(product.description))
    elif label == "Features":
        body += [Part(f" {bullet}") for bullet in product.bullets]
    return Page(_head(instruction), body)


def done_page(asin: str, chosen: dict[str, str], score: float) -> Page:
    """Returns the page after a purchase."""
    options = json.dumps(chosen, sort_keys=True)
    for char in "<>&'":  # As the original's templates write JSON.
        options = options.replace(char, f"\\u{ord(char):04x}")
    texts = [
        *("Thank you for shopping with us!", "Your code: ", "None"),
        " (Paste it in your MTurk interface.)",
        *("Purchased", "asin", asin, "options", options, "attrs", "None"),
        *("category", "None", "query", "None", "product category", "None"),
        # The goal is not given to the page: its fields are named and empty.
        *("Target", "asin", "options", "attrs", "price upper", "instuction text"),
        *("category", "product category", "query", "Goal ", "None"),
        *("Reward", "Your score (min 0.0, max 1.0)", str(score)),
        *("Reward Details ", "None"),
    ]
    return Page([], [Part(text) for text in texts])


def _head(instruction: str) -> list[Part]:
    return [Part("Instruction:"), Part(instruction)]
