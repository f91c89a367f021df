"""Flax policies, and their directories on disk."""
