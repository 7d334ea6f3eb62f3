"""Weights that are not in memory: lazy tensors, checkpoints, placeholders for a trace."""
