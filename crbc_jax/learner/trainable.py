"""Parameters -> those that train and those that stay, by their names.

With low-rank adapters (LoRA, arXiv 2106.09685) only these train: a frozen parameter
has neither gradient nor moments. Without adapters everything trains.
"""

from typing import Any

import jax

_ADAPTERS = ("lora_a", "lora_b")  # Leaves beside the `kernel` that they add to.


def split(params: Any) -> tuple[Any, Any]:
    """Returns two trees like `params`: trainable and frozen, None for the others'."""
    is_adapted = any(
        _name(path) in _ADAPTERS
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    )

    def pick(is_trainable):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: (
                leaf
                if is_trainable == (not is_adapted or _name(path) in _ADAPTERS)
                else None
            ),
            params,
        )

    return pick(True), pick(False)


def merge(trainable: Any, frozen: Any) -> Any:
    """The parameters that were split."""
    return jax.tree.map(
        lambda ours, other: other if ours is None else ours,
        trainable,
        frozen,
        is_leaf=lambda leaf: leaf is None,
    )


def _name(path) -> str:
    return path[-1].key
