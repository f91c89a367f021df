"""WebShop as a Gymnasium environment."""

import json
from typing import Any

import gymnasium

from crbc_jax.envs.base import AnyText
from crbc_jax.envs.webshop import pages
from crbc_jax.envs.webshop.options import Options
from crbc_jax.envs.webshop.shop import Shop, open_shop
from crbc_jax.envs.webshop.tasks import draw_task, find_goal

_WON_REWARD = 10.0  # As the published results have it; less than 1 of 1 is 0.
SEARCH_FORM = "search[<your query>]"


class WebShopEnv(gymnasium.Env[str, str]):
    """A shopper with one wish and a shop's pages; see crbc_jax/envs/base.py.

    An action is `search[words]`, on any page, or `click[text]` of something on the
    page. The observation is the page, in WebShop's mode "text" or "text_rich". Only a
    purchase ends the episode: its score is in `info["task_score"]`, 0 to 1, and the
    reward is 10 if that is 1, else 0.

    `info["anchor"]` is the page's text after the instruction, with the product and
    the chosen options, which decide the reward and the text does not always show. How
    a product was found is no part of it, so that searches in other words meet again.
    `info["admissible_actions"]` has the form of a search where there is a search bar.
    """

    metadata = {"render_modes": ["ansi"]}

    def __init__(self, options: Options | None = None):
        self.options = options or Options()
        self.render_mode = "ansi"
        self.action_space = AnyText(max_length=1 << 20)
        self.observation_space = AnyText(max_length=1 << 24)
        self._shop: Shop = open_shop(self.options)
        self._task_id = ""
        self._is_over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Starts the task `options["task"]`; without one, a training task by the seed.

        Raises:
            ValueError: if there is no such task with this environment's options.
        """
        super().reset(seed=seed)
        task_id = (options or {}).get("task") or draw_task(self._shop, self.np_random)
        self._goal = find_goal(self._shop, task_id)
        self._task_id = task_id
        self._num_steps, self._is_over, self._score = 0, False, 0.0
        self._begin_session()
        return self.render(), self._info("")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays one action.

        Raises:
            RuntimeError: if the episode is over.
        """
        if self._is_over:
            raise RuntimeError("the episode is over, or none was begun: call reset")
        reason = self._act(*parse_action(action))
        self._num_steps += 1
        terminated = self._place == "done"
        truncated = not terminated and self._num_steps >= self.options.max_steps
        self._is_over = terminated or truncated
        info = self._info(reason)
        reward = _WON_REWARD * info["won"]
        return self.render(), reward, terminated, truncated, info

    def render(self) -> str:
        """Returns the page as the policy sees it."""
        if self.options.observation == "text":
            return self._page.text()
        return self._page.text_rich()

    def _begin_session(self) -> None:
        self._keywords, self._found, self._page_number = "", [], 1
        self._asin, self._chosen, self._visited = "", {}, set()
        self._show("start", pages.start_page(self._goal.instruction))

    def _act(self, name: str, argument: str) -> str:
        """Follows an action; returns why it was not, or "" """
        if name == "search" and argument:
            self._keywords, self._page_number = argument, 1
            self._found = self._shop.search(argument)
            self._show_results()
        elif name != "click" or not argument:
            return "neither search[words] nor click[text]"
        elif argument not in self._clickables or self._place == "start":
            return "not on this page to be clicked"
        else:
            self._click(argument)
        return ""

    def _click(self, text: str) -> None:
        """Follows a click on something of the current page."""
        is_results = self._place == "results"
        if text == pages.BUY.lower():
            self._buy()
        elif text == pages.BACK.lower():
            self._begin_session()
        elif is_results and text == pages.NEXT.lower():
            self._page_number += 1
            self._show_results()
        elif text == pages.PREVIOUS.lower():
            if is_results:
                self._page_number -= 1
            if self._place == "details":
                self._show_item()
            else:
                self._show_results()
        elif label := _DETAILS.get(text):
            product = self._shop.products[self._asin]
            page = pages.details_page(self._goal.instruction, product, label)
            self._show("details", page)
        else:
            self._choose(text, is_results)

    def _choose(self, text: str, is_results: bool) -> None:
        """Opens a product of the results, or picks an option of the product."""
        if is_results:
            self._asin, self._chosen = text.upper(), {}
            self._visited.add(self._asin)
        else:
            options = self._shop.products[self._asin].options
            # Of two options with the same value the last one is meant.
            name = [name for name, values in options.items() if text in values][-1]
            self._chosen[name] = text
        self._show_item()

    def _buy(self) -> None:
        self._score = self._shop.score(self._goal, self._asin, self._chosen).total
        self._show("done", pages.done_page(self._asin, self._chosen, self._score))

    def _show_results(self) -> None:
        self._asin, self._chosen = "", {}
        page = pages.results_page(
            self._goal.instruction, self._found, self._page_number, self._visited
        )
        self._show("results", page)

    def _show_item(self) -> None:
        product = self._shop.products[self._asin]
        page = pages.item_page(
            self._goal.instruction, product, self._keywords, self._chosen
        )
        self._show("item", page)

    def _show(self, place: str, page: pages.Page) -> None:
        self._place, self._page = place, page
        self._clickables = page.clickables()

    def _info(self, reason: str) -> dict[str, Any]:
        is_start = self._place == "start"
        anchor = pages.join(self._page.body)
        if self._asin:
            anchor += f"{pages.SEPARATOR}{self._asin} {json.dumps(self._chosen)}"
        clicks = [f"click[{text}]" for text in self._clickables]
        return {
            "won": self._score == 1.0,
            "task_score": self._score,
            "admissible_actions": [SEARCH_FORM] if is_start else clicks,
            "anchor": anchor,
            "task_id": self._task_id,
            "reason": reason,
        }


_DETAILS = {label.lower(): label for label in pages.DETAILS}


def parse_action(action: str) -> tuple[str, str]:
    """Splits `name[argument]`; the argument in lower case, both empty if it is none.

    As the original: what follows the last bracket is ignored, the name is what comes
    before the last opening one that leaves an argument, and only the first line counts.
    """
    line = action.partition("\n")[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, max(end - 1, 1))
    if start < 0:
        return "", ""
    return line[:start], line[start + 1 : end].lower()
