"""The report of a conversion: the outcome of each module that is or looks like an MoE layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_moe.json_values import json_values

if TYPE_CHECKING:
    from rich.console import RenderableType

ADAPTER_PAGE = "docs/how-to/add_an_adapter.md"
"""The page that messages name for modules that are left as they are."""


@dataclass(frozen=True)
class ConversionReport:
    """The result of :func:`convert`."""

    replaced: tuple[Replacement, ...]
    unrecognised: tuple[Unrecognised, ...]

    @property
    def advice(self) -> str | None:
        """Advice on modules that were left, or a model that has none, in one line."""
        if self.unrecognised:
            return (
                "Modules that are left become many nodes, or fail to export: "
                f"{ADAPTER_PAGE} says how to convert them."
            )
        if not self.replaced:
            return (
                "Nothing to convert: no module looks like a router with experts that is not "
                f"converted yet. If one routes all the same, write an adapter: {ADAPTER_PAGE}."
            )
        return None

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain lists and dictionaries, for JSON."""
        return json_values(self)

    def __rich__(self) -> RenderableType:
        """Returns a table for the terminal, and the advice."""
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table
        from rich.text import Text

        plural = "" if len(self.replaced) == 1 else "s"
        title = f"{len(self.replaced)} MoE module{plural} converted"
        table = Table(title=title, title_justify="left")
        for column in ("module", "was", "now"):
            table.add_column(column)
        for replacement in self.replaced:
            how = "same numbers" if replacement.compared else "not compared"
            notes = "".join(f"; {note}" for note in replacement.notes)
            now = f"{replacement.adapter} ({how}){escape(notes)}"
            table.add_row(replacement.module or "the model", replacement.original, now)
        for left in self.unrecognised:
            table.add_row(
                left.module or "the model", left.original, f"[yellow]left: {escape(left.reason)}[/]"
            )
        remarks = filter(None, (self._ties(), self.advice))
        return Group(table, *map(Text, remarks))

    def _ties(self) -> str | None:
        """Returns where experts are chosen in another order now, in one line."""
        places: dict[str, list[str]] = {}
        for replacement in self.replaced:
            for tokens in replacement.ties:
                places.setdefault(tokens, []).append(replacement.module or "the model")
        if not places:
            return None
        shown = "; ".join(
            f"{tokens} in {'each' if len(paths) == len(self.replaced) else few(paths, 3)}"
            for tokens, paths in places.items()
        )
        return (
            "Of equal scores the lower expert comes first now, as in ONNX; PyTorch's order is any. "
            f"Scores were equal for {shown}."
        )


@dataclass(frozen=True)
class Replacement:
    """One module that was converted.

    Attributes:
        module: Its path in the model.
        adapter: The way it was converted: an adapter's name, ``transformers-experts`` for experts
            of transformers' models, or ``mixture`` for a layer identified by its numbers.
        original: The name of its class.
        compared: Whether both were seen to give the same numbers; False where the module could
            not run, as on the meta device.
        notes: The effects that the module no longer has.
        ties: For what tokens it found equal scores in its trial, such as ``tokens of zeros``, and
            ranked them as PyTorch's ``topk`` happened to. Now the lower index comes first.
    """

    module: str
    adapter: str
    original: str
    compared: bool
    notes: tuple[str, ...] = ()
    ties: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unrecognised:
    """One module that looks like an MoE layer and was left as it is.

    Attributes:
        module: Its path in the model.
        original: The name of its class.
        reason: Why it was left.
    """

    module: str
    original: str
    reason: str


def few(names: Sequence[str], most: int) -> str:
    """Returns the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
