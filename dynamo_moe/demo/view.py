"""The demo's final output: a table of the files, and where they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dynamo_moe.demo.pipeline import PYTORCH, DemoResult


def final_view(result: DemoResult) -> RenderableType:
    """Returns the table of files, an explanation of it, and a list of the folder's contents."""
    return Group(_table(result), "", _remarks(result), "", _contents(result))


def _table(result: DemoResult) -> Table:
    images = result.files[0].compared.images
    table = Table(
        title=f"A Swin-MoE on {images} test images of handwritten digits",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("", no_wrap=True)
    headings = ["nodes", "size", "right", "changed\nanswers", "logits\noff by"]
    headings += [f"ms each,\nbatch {size}" for size in result.milliseconds]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    accuracy = f"{result.training.test_accuracy:.1%}"
    times = _times(result.milliseconds)
    table.add_row(f"  {PYTORCH}", "-", "-", accuracy, "-", "-", *times, end_section=True)
    for file in result.files:
        name, compared = file.variant.file, file.compared
        color = "red" if compared.worst else "green"
        table.add_row(
            f"[red]✗ {name}[/]" if file.failures else f"[green]✓[/] {name}",
            str(file.nodes),
            decimal(file.exported.file_bytes),
            f"{compared.accuracy:.1%}",
            f"[{color}]{compared.worst}[/]",
            f"{compared.max_logit_difference:.0e}",
            *_times(file.milliseconds),
        )
    return table


def _times(milliseconds: Mapping[int, float]) -> list[str]:
    return [f"{value:.2f}" if value >= 0.1 else f"{value:.3f}" for value in milliseconds.values()]


def _remarks(result: DemoResult) -> Text:
    """What the table's numbers mean, in full sentences."""
    sizes = ", ".join(map(str, result.files[0].compared.differing))
    text = (
        f"Every file ran in ONNX Runtime on all images in batches of {sizes}, and was verified on "
        "random inputs. Times are medians on one CPU thread. The plugin files' MoE nodes run there "
        "as the standard operators that the file carries for them."
    )
    for file in result.files:
        if file.variant.experts == torch.float16:
            other = file.compared_float32
            text += (
                f"\n{file.variant.file} is compared with the PyTorch model that also has float16 "
                f"experts. Compared with the float32 model, {other.worst} answers change and "
                f"logits are off by {other.max_logit_difference:.0e}."
            )
    return Text(text)


def _contents(result: DemoResult) -> Table:
    layers = len(result.conversion.replaced)
    about = {
        "plugin.onnx": f"{layers} MoE layers, one node each, with a body in standard operators",
        "plugin_fp16.onnx": "the same with float16 experts",
        "dense.onnx": "standard operators only: every expert on every token",
        "onnxruntime.onnx": "ONNX Runtime's own MoE operator",
        "comparison.svg, .png": "the dense graph and the plugin's side by side",
        "graph_*.svg, .png": "each of the two alone",
        "summary.json": "all the numbers",
    }
    title = f"In {escape(str(result.folder))} ({result.seconds:.0f} s)"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.show_header = False
    for name, meaning in about.items():
        table.add_row(name, meaning)
    return table
