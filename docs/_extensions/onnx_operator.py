"""The directive ``onnx-operator``: an ONNX operator of domain ``moe``, from its registered schema.

The page therefore shows the rules that onnx's checker applies to a node.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx.defs
from docutils import nodes
from onnx.helper import get_attribute_value
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from dynamo_moe.moe_nodes import translation  # noqa: F401  Registers the operators.
from dynamo_moe.moe_nodes.nodes import DOMAIN

_Parameter = onnx.defs.OpSchema.FormalParameter


class OnnxOperator(SphinxDirective):
    """``{onnx-operator} Name``: the operator's description, inputs, output and attributes."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the operator's description, parsed as MyST."""
        schema = onnx.defs.get_schema(self.arguments[0], domain=DOMAIN)
        return self.parse_text_to_nodes("\n\n".join(_sections(schema)))


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("onnx-operator", OnnxOperator)
    return {"parallel_read_safe": True}


def _sections(schema: onnx.defs.OpSchema) -> Iterable[str]:
    yield schema.doc.strip()
    yield f"Domain `{schema.domain}`, version {schema.since_version}."
    types = {constraint.type_param_str: constraint for constraint in schema.type_constraints}
    yield _table(
        ("Input", "Type", "", "Meaning"),
        ((f"`{p.name}`", p.type_str, _option(p), p.description) for p in schema.inputs),
    )
    yield _table(
        ("Output", "Type", "Meaning"),
        ((f"`{p.name}`", p.type_str, p.description) for p in schema.outputs),
    )
    yield _table(
        ("Type", "One of", "Used for"),
        (
            (name, ", ".join(_element(t) for t in types[name].allowed_type_strs), text)
            for name, text in ((name, types[name].description) for name in sorted(types))
        ),
    )
    yield _table(
        ("Attribute", "Type", "Default", "Meaning"),
        (
            (f"`{name}`", attribute.type.name.lower(), _default(attribute), attribute.description)
            for name, attribute in sorted(schema.attributes.items(), key=_required_first)
        ),
    )


def _required_first(item: tuple[str, onnx.defs.OpSchema.Attribute]) -> tuple[bool, str]:
    return not item[1].required, item[0]


def _option(parameter: _Parameter) -> str:
    return (
        "optional" if parameter.option == onnx.defs.OpSchema.FormalParameterOption.Optional else ""
    )


def _element(type_string: str) -> str:
    return f"`{type_string.removeprefix('tensor(').removesuffix(')')}`"


def _default(attribute: onnx.defs.OpSchema.Attribute) -> str:
    if attribute.required:
        return "required"
    value = get_attribute_value(attribute.default_value)
    if isinstance(value, float):
        return f"`{value:g}`"  # Stored as float32: 1.702 reads back as 1.70200002.
    return f'`"{value.decode()}"`' if isinstance(value, bytes) else f"`{value}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
