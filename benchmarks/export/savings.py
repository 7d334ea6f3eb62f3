"""What does each shortcut of a trace save an export?

    python -m benchmarks.export.savings --json result.json

Of each export the processor time is taken, since other programs change it least. The versions take
turns: as it is, and without one shortcut each. A first turn, in which Python's and PyTorch's own
caches fill, does not count. A shortcut stays in the code if it saves a tenth of any model's time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common.report import conditions, parser, write_json
from benchmarks.common.timing import turns

PACKAGES = ("torch", "transformers", "onnx-ir", "onnxscript")
ALL = "as it is"
OPERATORS, SIZES, ORDERS = "results of operators", "arithmetic of sizes", "orders in memory"
COLLECTOR = "pace of the collector"
VERSIONS = (ALL, OPERATORS, SIZES, ORDERS, COLLECTOR)
MODELS = ("T5-small", "Swin-T", "Llama, 6 blocks")


def without(version: str) -> AbstractContextManager[Any]:
    """Returns the context in which exports lack a shortcut."""
    from dynamo_moe import exporting
    from dynamo_moe.tracing import shortcuts

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


def measure(model: str, rounds: int) -> dict[str, list[float]]:
    """Returns the processor time of each turn's export, in seconds, by version."""
    import dynamo_moe

    module, inputs, dimensions = subject(model)
    seconds: dict[str, list[float]] = {version: [] for version in VERSIONS}
    for number, version in turns(VERSIONS, rounds + 1):
        print(f"{model}: turn {number} of {rounds}, {version}", flush=True)
        with tempfile.TemporaryDirectory() as folder, without(version):
            path = Path(folder) / "model.onnx"
            started = time.process_time()
            dynamo_moe.export(module.eval(), (), path, kwargs=inputs, dynamic_shapes=dimensions)
            seconds[version].append(time.process_time() - started)
    return {version: taken[1:] for version, taken in seconds.items()}


def main() -> None:
    """Measures, prints a table, and writes every number."""
    arguments = parser(__doc__, "json")
    arguments.add_argument("--turns", type=int, default=5)
    options = arguments.parse_args()
    seconds = {model: measure(model, options.turns) for model in MODELS}
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
