"""How fast do files of language models generate on a CPU, ours and onnxruntime-genai's builder's?

    python -m benchmarks.cpu.generation --json result.json
    python -m benchmarks.cpu.generation --quantized --case "qwen3moe 1024" --json result.json

Four families at two widths, four layers, random float32 weights. Each turn is a process of its own
with one thread, which loads a file, reads a prompt of 256 tokens, and then decodes one token after
256 in the cache, over and over. Files whose attention writes into the cache get one buffer as past
and present, the others new arrays, as their runtimes do. PyTorch runs the model itself with its own
cache. All logits are compared with PyTorch's.

With ``--quantized``, the variants are files of one model with experts, and then all linear layers,
in int4 with groups of 32, and PyTorch's model is quantised alike. Every file keeps tokens as they
are.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.common.onnx_files import (
    PACKAGES,
    Array,
    count_nodes,
    file_bytes,
    open_session,
    relative_error,
)
from benchmarks.common.timing import Timing, fresh_processes, milliseconds, resident_bytes, turns
from benchmarks.cpu.language_models import quiet
from benchmarks.export.models import VOCABULARY, causal_lm
from trt_plugin.native import library_path

LAYERS, PROMPT, HEADS, GROUPS = 4, 256, 8, 2
PYTORCH, BUILDER = "PyTorch", "builder of onnxruntime-genai"
MAX_ERROR = 1e-3
# Runs of a prompt and of a step in a turn.
RUNS = {"prompt": 6, "step": 60}


@dataclass(frozen=True)
class Variant:
    """A way to run a model: a file of ours unless it has no target.

    Attributes:
        target: The export's.
        options: Further options of the export.
        quantize: What rounds the model before, with options of its own.
        shared: Whether one buffer is past and present.
        library: Whether the session has the native library's operators.
    """

    target: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    quantize: Mapping[str, Any] | None = None
    shared: bool = False
    library: bool = False


VARIANTS = {
    "onnxruntime": Variant("onnxruntime"),
    "onnxruntime, shared cache": Variant("onnxruntime", {"shared_cache": True}, shared=True),
    "onnxruntime, opset 20": Variant("onnxruntime", {"opset": 20}),
    "plugin": Variant("plugin"),
    "plugin, library": Variant("plugin", library=True),
    BUILDER: Variant(shared=True),
    PYTORCH: Variant(),
}
ROUNDED: dict[str, Mapping[str, Any] | None] = {
    "float32": None,
    "experts int4": {},
    "all int4": {"linear": "int4", "ignore": ()},
}
QUANTIZED = {
    f"{rounded}, {name}": replace(VARIANTS[name], quantize=quantize)
    for rounded, quantize in ROUNDED.items()
    for name in ("onnxruntime", "plugin", "plugin, library")
}
# So that ONNX Runtime does not round tokens where it makes a pair of nodes one.
EXACT = {"session.qdq_matmulnbits_accuracy_level": "1"}


class NoFileError(Exception):
    """The builder does not have a family; the message is its own."""


@dataclass(frozen=True)
class Case:
    """A model of a family and a width; its MLP or its experts have the width too."""

    family: str
    width: int

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.family} {self.width}"

    def build(self) -> Any:
        """Returns the model."""
        wide = 2 if self.family == "Llama" else 1
        options: dict[str, Any] = {"intermediate_size": wide * self.width}
        families: dict[str, dict[str, Any]] = {
            "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
            "Qwen3Moe": {
                "num_experts": 32,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": self.width // 2,
            },
            "GptOss": {
                "num_local_experts": 32,
                "num_experts_per_tok": 4,
            },
        }
        options |= families.get(self.family, {})
        model = causal_lm(
            self.family,
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            head_dim=self.width // HEADS,
            max_position_embeddings=1024,
            **options,
        )
        # A new model's are zero, which the builder leaves out; a trained one's are not.
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_(std=0.02)
        return model


CASES = tuple(
    Case(family, width)
    for family in ("Llama", "Mixtral", "Qwen3Moe", "GptOss")
    for width in (256, 1024)
)


def inputs(case: Case) -> dict[str, dict[str, Array]]:
    """Returns the tokens of a prompt and of a step, and the step's cache."""
    rng = np.random.default_rng(0)
    shape = 1, GROUPS, PROMPT, case.width // HEADS
    cache = {
        f"{layer}.{part}": rng.standard_normal(shape, np.float32)
        for layer in range(LAYERS)
        for part in ("key", "value")
    }
    ids = rng.integers(VOCABULARY, size=(1, PROMPT + 1))
    prompt = {"input_ids": ids[:, :-1], "attention_mask": np.ones((1, PROMPT), np.int64)}
    step = {"input_ids": ids[:, -1:], "attention_mask": np.ones((1, PROMPT + 1), np.int64)}
    return {"prompt": prompt, "step": {**step, **cache}}


def export(case: Case, variant: Variant, path: Path) -> None:
    """Writes a file: ours, or the builder's."""
    import dynamo_moe

    if variant.target is not None:
        model = build(case, variant.quantize)
        dynamo_moe.export_language_model(
            model, path, target=variant.target, external_data=True, **variant.options
        )
        return
    model = case.build()
    checkpoint = path.parent / "checkpoint"
    model.save_pretrained(checkpoint)
    _tokenizer().save_pretrained(checkpoint)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"]
    command += ["-i", str(checkpoint), "-o", str(path.parent), "-c", str(path.parent / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not path.exists():
        message = done.stderr.strip().rpartition("\n")[2]
        raise NoFileError(message.replace(str(checkpoint), case.family))


def build(case: Case, quantize: Mapping[str, Any] | None) -> Any:
    """Returns the model, converted, and rounded with these options."""
    import dynamo_moe

    model = case.build()
    dynamo_moe.convert(model)
    if quantize is not None:
        dynamo_moe.quantize(model, **quantize)
    return model


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w0")
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=Tokenizer(words))


@dataclass(frozen=True)
class Turn:
    """What one process found."""

    load_ms: float
    peak_bytes: int
    ms: dict[str, list[float]]
    logits: dict[str, Array]


def turn(case: Case, variant: Variant, path: Path | None) -> Turn:
    """Loads a file, or the model for None, and runs the prompt and the step."""
    began = time.perf_counter()
    if path is None:
        calls = _calls_of_pytorch(case, case.build())
    else:
        calls = _calls_of_file(case, variant, path)
    load_ms = (time.perf_counter() - began) * 1e3
    logits = {name: call() for name, call in calls.items()}
    times = {name: [milliseconds(call) for _ in range(RUNS[name])] for name, call in calls.items()}
    return Turn(load_ms, resident_bytes(peak=True), times, logits)


def reference(case: Case, quantize: Mapping[str, Any] | None) -> dict[str, Array]:
    """Returns PyTorch's logits of the prompt and of the step."""
    calls = _calls_of_pytorch(case, build(case, quantize))
    return {name: call() for name, call in calls.items()}


def _calls_of_pytorch(case: Case, model: Any) -> dict[str, Callable[[], Array]]:
    import torch
    from transformers import DynamicCache

    from dynamo_moe.language_models.caches import cache_argument

    torch.set_num_threads(1)
    feeds = inputs(case)

    def call(feed: Mapping[str, Array]) -> Array:
        given = {name: torch.from_numpy(value) for name, value in feed.items()}
        cache = DynamicCache(config=model.config)
        if "0.key" in given:
            for layer in range(LAYERS):
                cache.update(given[f"{layer}.key"], given[f"{layer}.value"], layer)
        ids, mask = given["input_ids"], given["attention_mask"]
        name = cache_argument(model.forward)
        with torch.inference_mode():
            found: Array = model(
                input_ids=ids, attention_mask=mask, use_cache=True, **{name: cache}
            ).logits.numpy()
        return found[:, -1]

    return {name: partial(call, feed) for name, feed in feeds.items()}


def _calls_of_file(case: Case, variant: Variant, path: Path) -> dict[str, Callable[[], Array]]:
    library = library_path() if variant.library else None
    session, feeds = open_session(path, 1, EXACT, library=library), inputs(case)
    empty = np.zeros((1, GROUPS, 0, case.width // HEADS), np.float32)
    outputs = [value.name for value in session.get_outputs()]
    tokens = ("input_ids", "attention_mask")

    def call(feed: Mapping[str, Array]) -> Array:
        cache = {
            name: feed.get(name.removeprefix("past_key_values."), empty)
            for name in (value.name for value in session.get_inputs())
            if name not in tokens
        }
        found: Array = session.run(outputs, {**{name: feed[name] for name in tokens}, **cache})[0]
        return found[:, -1]

    if variant.shared:
        return {name: _into_buffers(case, session, feed) for name, feed in feeds.items()}
    return {name: partial(call, feed) for name, feed in feeds.items()}


def _into_buffers(case: Case, session: Any, feed: Mapping[str, Array]) -> Callable[[], Array]:
    """Returns a call whose cache lies in buffers with room for twice the prompt."""
    import onnxruntime

    binding = session.io_binding()
    for name in ("input_ids", "attention_mask"):
        binding.bind_cpu_input(name, feed[name])
    binding.bind_output("logits")
    for part in (f"{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")):
        room = np.zeros((1, GROUPS, 2 * PROMPT, case.width // HEADS), np.float32)
        if part in feed:
            room[:, :, :PROMPT] = feed[part]
        buffer = onnxruntime.OrtValue.ortvalue_from_numpy(room)
        binding.bind_ortvalue_input(f"past_key_values.{part}", buffer)
        binding.bind_ortvalue_output(f"present.{part}", buffer)

    def call() -> Array:
        session.run_with_iobinding(binding)
        found: Array = binding.copy_outputs_to_cpu()[0]
        return found[:, -1]

    return call


def measure(
    case: Case, variants: Mapping[str, Variant], folder: Path, rounds: int
) -> dict[str, dict[str, Any]]:
    """Exports, compares and times the variants of one model, or says why one has no file."""
    found: dict[str, dict[str, Any]] = {}
    for name, variant in variants.items():
        if name == PYTORCH:
            found[name] = {"nodes": None}
            continue
        print(f"{case.name}: exporting {name}", flush=True)
        path = folder / name / "model.onnx"
        path.parent.mkdir()
        try:
            with quiet():
                export(case, variant, path)
            found[name] = {"nodes": count_nodes(path)["nodes"], "file bytes": file_bytes(path)}
        except NoFileError as error:
            found[name] = {"error": str(error)}
    taken: dict[str, list[Turn]] = {name: [] for name, row in found.items() if "error" not in row}
    wanted: dict[str, dict[str, Array]] = {}
    with fresh_processes() as processes:
        for number, name in turns(taken, rounds):
            print(f"{case.name}: turn {number + 1} of {rounds}, {name}", flush=True)
            file = None if name == PYTORCH else folder / name / "model.onnx"
            taken[name].append(processes.submit(turn, case, variants[name], file).result())
        expected: dict[str, dict[str, Array]] = {}
        for name in taken:
            quantize = variants[name].quantize
            rounding = str(quantize)
            if rounding not in expected:
                expected[rounding] = processes.submit(reference, case, quantize).result()
            wanted[name] = expected[rounding]
    for name, each in taken.items():
        off = max(relative_error(t.logits[part], wanted[name][part]) for t in each for part in RUNS)
        found[name] |= {
            "max relative error": off,
            "load ms": asdict(Timing.of([t.load_ms for t in each])),
            "peak bytes": max(t.peak_bytes for t in each),
            **{f"{p} ms": asdict(Timing.of([ms for t in each for ms in t.ms[p]])) for p in RUNS},
        }
        if off > MAX_ERROR:
            found[name]["error"] = f"wrong: logits off by {off:.1e}"
    return found


def show(cases: list[dict[str, Any]]) -> None:
    """Prints all results, a row a file."""
    rows = []
    for case in cases:
        for name, row in case["variants"].items():
            if "error" in row:
                print(f"{case['name']}, {name}: {row['error']}")
                continue
            times = [report.digits(row[f"{part} ms"]["best"]) for part in ("load", *RUNS)]
            sizes = [f"{row.get(f'{what} bytes', 0) / 1e6:.0f}" for what in ("file", "peak")]
            rows.append([case["name"], name, row["nodes"] or "", *times, *sizes])
    columns = ["model", "variant", "nodes", "load, ms", "prompt, ms", "step, ms"]
    columns += ["file, MB", "peak, MB"]
    print(report.table("generation", columns, rows))


def main() -> None:
    """Times files that generate."""
    known = report.parser(__doc__, "json")
    known.add_argument("--turns", type=int, default=3, help="processes of each file")
    known.add_argument("--case", default="", help="only models whose name contains this")
    known.add_argument("--quantized", action="store_true", help="files in float32 and in int4")
    known.add_argument("--quick", action="store_true", help="narrow models, one turn")
    given: argparse.Namespace = known.parse_args()
    chosen = [case for case in CASES if given.case.lower() in case.name.lower()]
    if not chosen:
        known.error(f"no model is called {given.case!r}: {', '.join(c.name for c in CASES)}")
    if given.quick:
        chosen = [Case(case.family, 128) for case in chosen if case.width == CASES[0].width]
    rounds = 1 if given.quick else given.turns
    result = report.conditions((*PACKAGES, "onnxruntime-genai"))
    result |= {
        "threads": 1,
        "turns": rounds,
        "layers": LAYERS,
        "prompt": PROMPT,
    }
    result["cases"] = []
    chosen_variants = QUANTIZED if given.quantized else VARIANTS
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            variants = measure(case, chosen_variants, Path(folder), rounds)
        result["cases"].append({"name": case.name, "variants": variants})
    show(result["cases"])
    report.write_json(given.json, result)


if __name__ == "__main__":
    main()
