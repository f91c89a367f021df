"""Reinforcement learning of language-model agents over long horizons, in JAX."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crbc_jax.credit import ClosureValues, closure_values, step_advantages

__all__ = ["ClosureValues", "closure_values", "step_advantages"]


def __getattr__(name: str):
    """Loads the notebook's door when it is used: worker processes need no JAX."""
    if name in __all__:
        from crbc_jax import credit

        return getattr(credit, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
