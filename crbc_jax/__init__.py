"""Reinforcement learning of language-model agents over long horizons, in JAX."""
