"""The directive ``command-line``: the help of a ``dynamo-moe`` command, as a page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import typer.main
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from dynamo_moe.cli import app as command_line


class CommandLine(SphinxDirective):
    """``{command-line} NAME``: usage, arguments, options and examples of a command."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the command's description, parsed as MyST."""
        command: Any = typer.main.get_command(command_line)
        return self.parse_text_to_nodes("\n\n".join(_sections(command.commands[self.arguments[0]])))


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}


def _sections(command: Any) -> Iterable[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(["dynamo-moe", command.name, "[OPTIONS]", *(a.metavar for a in arguments)])
    yield _markdown(command.help)
    yield f"```text\n{usage}\n```"
    yield _table("Argument", ((f"`{a.metavar}`", a.help) for a in arguments))
    yield _table("Option", ((_spelling(o), _explained(o)) for o in options))
    if command.epilog:
        yield _markdown(command.epilog)


def _spelling(option: Any) -> str:
    value = f" {option.metavar}" if option.metavar else ""
    names = [*option.opts, *option.secondary_opts]
    return ", ".join(f"`{name}{value}`" for name in names)


def _explained(option: Any) -> str:
    default = option.show_default if isinstance(option.show_default, str) else option.default
    if option.is_flag or default is None:
        return str(option.help)
    return f"{option.help} Default: `{default}`."


def _table(head: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {name} | {_markdown(text)} |" for name, text in rows]
    return "\n".join([f"| {head} | |", "| --- | --- |", *lines])


def _markdown(text: str) -> str:
    return re.sub(r"\[cyan\](.*?)\[/\]", r"`\1`", text)
