"""Engines and their timings as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from trt_plugin.bundle.view import layer_text, size_text
from trt_plugin.engine.contents import UNKNOWN

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trt_plugin.engine.benchmark import BenchmarkReport
    from trt_plugin.engine.building import EngineReport
    from trt_plugin.engine.contents import EngineContents

__all__ = ["benchmark_view", "contents_view", "report_view"]


def report_view(report: EngineReport) -> RenderableType:
    """Returns what ``dynamo-moe engine`` prints."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    plugins = ", ".join(f"{each.name} ({each.plugin})" for each in report.plugin_layers)
    rows = {
        "Builder": report.builder,
        "Built for": ", ".join(report.architectures) or "the builder's choice",
        "MoE kernels for": ", ".join(report.contents.architectures) or "none",
        "Layers": f"{report.layers} before fusion, {len(report.plugin_layers)} of them plugins",
        "Plugin layers": plugins or "none",
        "Inputs": ", ".join(_tensor(each) for each in report.inputs),
        "Outputs": ", ".join(_tensor(each) for each in report.outputs),
        "Profiles": str(report.profiles),
        "Size": size_text(report.contents.bytes),
        "MoE kernels": size_text(report.contents.program_bytes),
        "Time": f"{report.seconds:.1f} s",
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return Group(Text(str(report.path), style="bold"), table)


def contents_view(contents: EngineContents) -> RenderableType:
    """Returns what ``dynamo-moe inspect`` prints of an engine."""
    library = {
        "installed": "in it, as it is installed here",
        "other": "in it, in another version than the one that is installed here",
        None: "not in it; load it before the engine",
    }
    head = Text.assemble(
        (f"Engine of {contents.tensorrt or 'TensorRT'}", "bold"), f"  {size_text(contents.bytes)}"
    )
    parts: list[RenderableType] = [head]
    if contents.programs:
        parts += ["", _programs(contents), "", f"Plugin's library: {library[contents.library]}"]
    else:
        parts.append("No kernels of MoE layers")
    parts.append(Text(f"Not known: {UNKNOWN}", style="dim"))
    return Group(*parts)


def benchmark_view(report: BenchmarkReport) -> RenderableType:
    """Returns what ``dynamo-moe bench-engine`` prints."""
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in report.shapes.items())
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    table.add_column("Engine", overflow="fold", style="cyan")
    table.add_column("CUDA graph")
    for heading in ("Mean ms", "Median", "p90", "p99", "Rows/s", "Difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in report.timings:
        table.add_row(
            str(each.engine),
            "yes" if each.cuda_graph else "no",
            *(f"{time:.3f}" for time in (each.mean, each.median, each.p90, each.p99)),
            f"{each.throughput:,.0f}",
            f"{each.difference:.1e}",
        )
    return Group(Text(f"{report.device}, {shapes}", style="bold"), "", table)


def _programs(contents: EngineContents) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    table.add_column("MoE layer", overflow="fold")
    table.add_column("GPU", no_wrap=True)
    for heading in ("Kernels", "Size", "Copies"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stored in contents.programs:
        program = stored.program
        table.add_row(
            Text(layer_text(program.layer.to_dict()), style="cyan"),
            f"sm_{program.architecture}",
            str(len(program.kernels)),
            size_text(len(program.data)),
            str(stored.copies),
        )
    return table


def _tensor(tensor: object) -> str:
    name, dtype, shape = (getattr(tensor, each) for each in ("name", "dtype", "shape"))
    return f"{name} {dtype} [{', '.join('?' if size < 0 else str(size) for size in shape)}]"
