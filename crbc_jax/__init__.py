"""Reinforcement learning of language-model agents over long horizons, in JAX."""

from crbc_jax.credit import ClosureValues, closure_values, step_advantages

__all__ = ["ClosureValues", "closure_values", "step_advantages"]
