"""Trajectories in, padded tensors out; host only."""
