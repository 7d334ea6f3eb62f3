"""Layers whose experts' weights are in host memory, and the device's cache of them.

The words: such a layer is *offloaded*; R of its experts at a time are *resident*, each in a *slot*
of the device's memory; slots and the tables of what they hold are the layer's *cache*. The kernels
that fill it are in :mod:`custom_ops.kernels.residency`.
"""

from custom_ops.offload.cache import ExpertCache, Wave, Waves, cache_bytes
from custom_ops.offload.weight_source import FileIdentity, WeightSource

__all__ = [
    # The cache in Python, and its size
    "ExpertCache",
    "Wave",
    "Waves",
    "cache_bytes",
    # Weights in files
    "FileIdentity",
    "WeightSource",
]
