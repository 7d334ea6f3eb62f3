"""The cache in Python under its public name; :mod:`custom_ops.offload` is where it lies."""

from custom_ops.offload import ExpertCache, Wave, Waves, cache_bytes

__all__ = ["ExpertCache", "Wave", "Waves", "cache_bytes"]
