"""Layers like others, with a few fields changed wherever in the record they are."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from custom_ops.kernels.layer import Layer
from custom_ops.layer_shape import LayerShape
from custom_ops.options import LAYOUT_OPTIONS
from custom_ops.weight_formats import plain_format

_OF_LAYOUT = {option.name for option in LAYOUT_OPTIONS}
_OF_SHAPE = {field.name for field in fields(LayerShape)}


def changed_shape(shape: LayerShape, **changes: Any) -> LayerShape:
    """A shape with other fields, ``experts_dtype`` of plain weights, or fields of its layout."""
    layout = {name: changes.pop(name) for name in _OF_LAYOUT & changes.keys()}
    if "experts_dtype" in changes:
        changes["weight_format"] = plain_format(changes.pop("experts_dtype"))
    return replace(shape, layout=replace(shape.layout, **layout), **changes)


def changed(layer: Layer, **changes: Any) -> Layer:
    """A layer with other fields, of its own or as in :func:`changed_shape`."""
    names = (_OF_SHAPE | _OF_LAYOUT | {"experts_dtype"}) & changes.keys()
    of_shape = {name: changes.pop(name) for name in names}
    return replace(layer, shape=changed_shape(layer.shape, **of_shape), **changes)
