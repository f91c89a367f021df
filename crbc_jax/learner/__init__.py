"""Trajectories and advantages in, updated parameters out."""
