"""Pictures of ONNX graphs, with the MoE layers marked.

A graph is laid out in layers from top to bottom and folded into columns, like a page of text, at
one fixed text size: a larger graph gives a larger picture, not smaller letters. Weights, and
the nodes that prepare weights or sizes, are not drawn; a chain of shape operators is one box.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TypeAlias

import onnx

from dynamo_moe.files.model_files import load_graph

Source: TypeAlias = "str | PathLike[str] | onnx.ModelProto"


def draw(model: Source, destination: str | PathLike[str], *, title: str = "") -> Path:
    """Draws a model's graph, its MoE layers in orange.

    Args:
        model: An ONNX file or a loaded model.
        destination: A ``.svg`` or ``.png`` file. With the same versions of the packages
            that draw, equal models give equal files.
        title: Text above the graph; the file's name, or else the graph's, if empty.

    Returns:
        The destination.

    Raises:
        FileNotFoundError: There is no such model file, or no such folder to write to.
        ValueError: The file is not an ONNX model, its graph has nothing to draw, or the destination
            is neither SVG nor PNG.
        ImportError: The extra ``draw`` is not installed.
    """
    return draw_comparison([(title, model)], destination)


def draw_comparison(models: Sequence[tuple[str, Source]], destination: str | PathLike[str]) -> Path:
    """Draws models side by side, each under its title and its number of nodes.

    An MoE layer that is spelled out in standard operators gets a frame and its number of nodes,
    to be compared with the one node that it is in another file.

    Args:
        models: Title and model, from left to right.
        destination: As in :func:`draw`.

    Returns:
        The destination.

    Raises:
        FileNotFoundError: As in :func:`draw`.
        ValueError: As in :func:`draw`; or there are no models.
        ImportError: As in :func:`draw`.
    """
    destination = Path(destination)
    if destination.suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"a picture is a .svg or .png file, got {destination.name!r}")
    if not models:
        raise ValueError("nothing to draw: no models")
    try:
        from dynamo_moe.drawing.paint import Panel, paint
    except ImportError as error:
        raise ImportError(
            f"drawing needs the package {error.name}: pip install 'dynamo-moe[draw]'",
            name=error.name,
        ) from error
    panels = []
    for title, source in models:
        if isinstance(source, onnx.ModelProto):
            panels.append(Panel(title or source.graph.name, source.graph))
        else:
            panels.append(Panel(title or Path(source).name, load_graph(source).graph))
    paint(panels, destination)
    return destination
