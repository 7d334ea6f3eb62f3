"""The directive ``option-table``: options of the operators, from their table in ``custom_ops``."""

from __future__ import annotations

from collections.abc import Iterable

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from custom_ops.options import EXPERT_OPTIONS, ROUTER_OPTIONS, Option

_TABLES = {"router": ROUTER_OPTIONS, "experts": EXPERT_OPTIONS}


class OptionTable(SphinxDirective):
    """``{option-table} router`` or ``{option-table} experts``: one line for each option."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the table as parsed MyST."""
        return self.parse_text_to_nodes("\n".join(_lines(_TABLES[self.arguments[0]])))


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("option-table", OptionTable)
    return {"parallel_read_safe": True}


def _lines(options: tuple[Option, ...]) -> Iterable[str]:
    yield "| Option | Type | Default | Meaning | ONNX attribute, plugin field |"
    yield "| --- | --- | --- | --- | --- |"
    for option in options:
        default = f'"{option.default}"' if option.type is str else option.default
        yield (
            f"| `{option.name}` | {option.type.__name__} | `{default}` | "
            f"{option.description.replace('``', '`')} | `{option.attribute}` |"
        )
