"""Engines and their timings as tables for a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from trt_plugin.bundle.view import layer_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

# ``EngineContents.library``.
_LIBRARY = {
    "installed": "in it, as it is installed here",
    "other": "in it, in another version than the one that is installed here",
    None: "not in it; load it before the engine",
}
# ``EngineContents.shared_cache``.
_CACHES = {True: "all contexts together", False: "each context", None: "each cache"}


def report_view(report: dict[str, Any]) -> RenderableType:
    """Returns a table of ``EngineReport.to_dict()``."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    contents, plugins = report["contents"], report["plugin_layers"]
    rows = {
        "Builder": report["builder"],
        "Built for": ", ".join(report["architectures"]) or "the builder's choice",
        "MoE kernels for": ", ".join(contents["architectures"]) or "none",
        "Layers": f"{report['layers']} before fusion, {len(plugins)} of them plugins",
        "Plugin layers": ", ".join(f"{layer['name']} ({layer['plugin']})" for layer in plugins),
        "Inputs": ", ".join(_tensor(tensor) for tensor in report["inputs"]),
        "Outputs": ", ".join(_tensor(tensor) for tensor in report["outputs"]),
        "Profiles": str(report["profiles"]),
        "Size": decimal(contents["bytes"]),
        "MoE kernels": decimal(contents["program_bytes"]),
        "Time": f"{report['seconds']:.1f} s",
    }
    for name, value in rows.items():
        table.add_row(name, Text(value or "none"))
    return Group(Text(report["path"], style="bold"), table)


def contents_view(contents: dict[str, Any]) -> RenderableType:
    """Returns a table of ``EngineContents.to_dict()``."""
    head = Text.assemble(("Engine", "bold"), f"  {decimal(contents['bytes'])}")
    parts: list[RenderableType] = [head]
    if contents["programs"]:
        library = f"Plugin's library: {_LIBRARY[contents['library']]}"
        parts += ["", _programs(contents["programs"]), "", library]
    else:
        parts.append("No kernels of MoE layers")
    if contents["offloaded"]:
        memory = _memory(contents["offloaded"], shared_cache=contents["shared_cache"])
        parts += ["", _offloaded(contents["offloaded"]), "", *memory]
    parts.append(Text(f"Not known: {contents['unknown']}", style="dim"))
    return Group(*parts)


def benchmark_view(report: dict[str, Any]) -> RenderableType:
    """Returns a table of ``BenchmarkReport.to_dict()``."""
    shapes = ", ".join(f"{name} {shape}" for name, shape in report["shapes"].items())
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    table.add_column("Engine", overflow="fold", style="cyan")
    table.add_column("CUDA graph")
    for heading in ("Mean ms", "Median", "p90", "p99", "Rows/s", "Difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for timing in report["timings"]:
        table.add_row(
            Text(timing["engine"]),
            "yes" if timing["cuda_graph"] else "no",
            *(f"{timing[name]:.3f}" for name in ("mean", "median", "p90", "p99")),
            f"{timing['throughput']:,.0f}",
            f"{timing['difference']:.1e}",
        )
    return Group(Text(f"{report['device']}, {shapes}", style="bold"), "", table)


def _programs(programs: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    table.add_column("MoE layer", overflow="fold", style="cyan")
    table.add_column("GPU", no_wrap=True)
    for heading in ("Kernels", "Size", "Copies"):
        table.add_column(heading, justify="right", no_wrap=True)
    for program in programs:
        table.add_row(
            Text(layer_text(program["layer"])),
            program["architecture"],
            str(len(program["kernels"])),
            decimal(program["bytes"]),
            str(program["copies"]),
        )
    return table


def _offloaded(offloaded: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    table.add_column("Offloaded experts", overflow="fold", style="cyan")
    for heading in ("Layers", "Slots", "On the GPU", "All experts"):
        table.add_column(heading, justify="right", no_wrap=True)
    for experts in offloaded:
        size, first = experts["device_bytes"], experts["tensors"]["w1"]
        table.add_row(
            Text(f"byte {first['offset']} of {Path(first['path']).name}"),
            str(experts["layers"]),
            "?" if size is None else f"{experts['resident_experts']} of {experts['experts']}",
            "?" if size is None else decimal(size * experts["layers"]),
            decimal(experts["weight_bytes"]),
        )
    return table


def _memory(offloaded: Sequence[dict[str, Any]], *, shared_cache: bool | None) -> Iterator[Text]:
    """The experts' memory in all, and the state of their files."""
    sizes = [experts["device_bytes"] for experts in offloaded]
    known = sum(experts["layers"] * (experts["device_bytes"] or 0) for experts in offloaded)
    on_device = "an unknown size" if None in sizes else decimal(known)
    # Layers may share weights.
    listed = [source for experts in offloaded for source in experts["tensors"].values()]
    sources = {tuple(source.values()) for source in listed}
    weights = decimal(sum(size for _, _, size, _ in sources))
    yield Text(
        f"Experts' weights: {on_device} on the GPU for {_CACHES[shared_cache]} instead of "
        f"{weights}; {weights} on the host, pinned"
    )
    files = {source["path"]: source["state"] for source in listed}
    for path, state in files.items():
        yield Text.assemble(f"{path}: ", (state, "green" if state == "found" else "red"))


def _tensor(tensor: dict[str, Any]) -> str:
    """``x float [?, 8]``."""
    sizes = ", ".join("?" if size < 0 else str(size) for size in tensor["shape"])
    return f"{tensor['name']} {tensor['dtype']} [{sizes}]"
