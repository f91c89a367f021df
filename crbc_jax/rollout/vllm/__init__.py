"""Rollouts served by vLLM, whose weights are proved fresh."""
