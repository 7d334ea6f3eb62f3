"""What does each shortcut of a trace save an export?

    python -m benchmarks.export.savings --json result.json

Each export has a process of its own, in which the same export comes first. Of the second, the
processor time is taken, since other programs change it least. The versions take turns: as it is,
and without one shortcut each. A shortcut stays in the code if it saves a tenth of any model's time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common.report import conditions, parser, write_json
from benchmarks.common.timing import fresh_processes, turns

PACKAGES = ("torch", "transformers", "onnx-ir", "onnxscript")
ALL = "as it is"
OPERATORS, SIZES, ORDERS = "results of operators", "arithmetic of sizes", "orders in memory"
VIEWS, COLLECTOR = "layouts of plain views", "pace of the collector"
VERSIONS = (ALL, OPERATORS, SIZES, ORDERS, VIEWS, COLLECTOR)
MODELS = ("T5-small", "Swin-T", "Llama, 6 blocks")


def without(version: str) -> AbstractContextManager[Any]:
    """Returns the context in which exports lack a shortcut."""
    from dynamo_moe import exporting
    from dynamo_moe.tracing import remembered_operators, shortcuts

    if version == VIEWS:
        return mock.patch.object(remembered_operators, "layout_of", return_value=None)
    if version == COLLECTOR:
        return mock.patch.object(exporting, "collecting_seldom", nullcontext)
    left = {name: changes for name, changes in shortcuts.savings().items() if name != version}
    return mock.patch.object(shortcuts, "savings", return_value=left)


def subject(model: str) -> tuple[Any, dict[str, Any], Any]:
    """Returns a model with random weights, its example and its symbolic dimensions."""
    import torch
    import transformers

    torch.manual_seed(0)
    if model == "Swin-T":
        config: Any = transformers.SwinConfig()
        return (
            transformers.SwinModel(config),
            {"pixel_values": torch.zeros(2, 3, 224, 224)},
            "batch",
        )
    ids = torch.ones(2, 16, dtype=torch.int64)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": ids}
    dimensions: dict[str, dict[int, str]] = {name: {0: "batch", 1: "length"} for name in inputs}
    if model == "T5-small":
        config = transformers.T5Config(use_cache=False)
        decoder = {"decoder_input_ids": {0: "batch", 1: "decoder_length"}}
        inputs["decoder_input_ids"] = ids
        return transformers.T5ForConditionalGeneration(config), inputs, dimensions | decoder
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), inputs, dimensions


def processor_seconds(model: str, version: str) -> float:
    """Returns the processor time of a process's second export."""
    import dynamo_moe

    module, inputs, dimensions = subject(model)
    with tempfile.TemporaryDirectory() as folder, without(version):
        for _ in range(2):
            started = time.process_time()
            path = Path(folder) / "model.onnx"
            dynamo_moe.export(module.eval(), (), path, kwargs=inputs, dynamic_shapes=dimensions)
    return time.process_time() - started


def measure(models: Sequence[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of each turn, by model and version."""
    jobs = [(model, version) for model in models for version in VERSIONS]
    seconds: dict[str, dict[str, list[float]]] = {model: {} for model in models}
    for number, (model, version) in turns(jobs, rounds):
        print(f"{model}: turn {number + 1} of {rounds}, {version}", flush=True)
        with fresh_processes() as pool:
            taken = pool.submit(processor_seconds, model, version).result()
        seconds[model].setdefault(version, []).append(taken)
    return seconds


def main() -> None:
    """Measures, prints a table, and writes every number."""
    arguments = parser(__doc__, "json")
    arguments.add_argument("--turns", type=int, default=3)
    options = arguments.parse_args()
    seconds = measure(MODELS, options.turns)
    print(f"{'without':24}" + "".join(f"{model:>18}" for model in MODELS))
    for version in VERSIONS:
        medians = [statistics.median(seconds[model][version]) for model in MODELS]
        base = [statistics.median(seconds[model][ALL]) for model in MODELS]
        cells = (f"{one:.2f} s ({one / of:.2f}x)" for one, of in zip(medians, base, strict=True))
        print(f"{version:24}" + "".join(f"{cell:>18}" for cell in cells))
    if options.json is not None:
        write_json(options.json, {**conditions(PACKAGES), "seconds": seconds})


if __name__ == "__main__":
    main()
