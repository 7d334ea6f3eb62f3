"""Timing, tables, JSON and plots, shared by all benchmarks.

No module here needs more than the standard library until it draws: the GPU's machine has neither
rich nor typer.
"""
