"""Policy and environments in, trajectories out."""
