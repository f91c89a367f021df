"""WebShop's pages in words, after the published layout."""

from crbc_jax.rollout.templates.base import Scene, Template, history, tagged_action

# What differs between prompts comes late, so that a server can reuse the beginning.
_RULES = """\
You shop in an online store for somebody who told you what to buy.

search[words] looks for products, on the page that has a search bar. click[text] \
follows a button or a product, or chooses an option of a product. Buying ends the \
visit, and you are paid by how well the product, its options and its price fit the wish.
"""
_REPLY = """
Think first: does what you see fit the wish, and what is still missing? Write that \
between <think> and </think>. Then give one possible action, and only one, between \
<action> and </action>.
"""
_MARK = "Instruction:"
_SEPARATOR = " [SEP] "


def _prompt(scene: Scene) -> str:
    wish = _wish(scene)
    actions = "\n".join(f"'{action}'" for action in scene.admissible_actions)
    return (
        f"{_RULES}\nThe wish: {wish}\n{history(scene, lambda text: _page(text, wish))}"
        f"\nThis is step {scene.num_steps + 1}. The page now:\n"
        f"{_page(scene.observation, wish)}\n"
        f"\nYour possible actions:\n{actions}\n{_REPLY}"
    )


def _compact_prompt(scene: Scene) -> str:
    # Of the past the actions alone: they say which options are chosen, no page does.
    wish, past = _wish(scene), "".join(f"> {r.action}\n" for r in scene.records)
    return f"{_page(scene.observation, wish)}\n{past}{wish}\n"


def _wish(scene: Scene) -> str:
    """The instruction; the modes "text" and "text_rich" end it in their own ways."""
    text = scene.first_observation.partition(_MARK)[2].removeprefix(_SEPARATOR)
    return text.strip().partition("\n")[0].partition(_SEPARATOR)[0]


def _page(text: str, wish: str) -> str:
    """The page without the wish, which stands in the prompt already."""
    after = text.partition(wish)[2] if wish else text
    return after.removeprefix(_SEPARATOR).strip()


# Words for a language model, after the published layout.
TEMPLATE = Template(_prompt, tagged_action, end=None, is_message=True)
# The facts alone, for a small policy that is trained from nothing.
COMPACT = Template(_compact_prompt, tagged_action, end="</action>", is_message=False)
