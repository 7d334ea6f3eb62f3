"""``draw``: pictures of a model's graph."""

from dynamo_moe.drawing.picture import draw, draw_comparison

__all__ = ["draw", "draw_comparison"]
