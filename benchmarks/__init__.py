"""Benchmarks, by what they need: ``cpu``, ``export`` and ``gpu``; ``common`` is what they share."""
