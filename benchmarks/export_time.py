"""How long ``dynamo_moe.export`` takes and what it needs, against other ways to an ONNX file.

    python -m benchmarks.export_time --json result.json --plot result.png

The peers: ``dynamo`` is ``torch.onnx.export(dynamo=True)`` with its defaults; ``dynamo, one node a
layer`` is the same after :func:`dynamo_moe.convert`, with our translation table, so that only the
exporter differs; ``TorchScript`` is ``torch.onnx.export(dynamo=False)``; ``transformers`` is its
``OnnxExporter``. Mixtral's own experts can be exported by none of them, so ``batched_mm`` stands
for them. Who fails is listed with the reason.

Each export has a process of its own, in which a tiny export comes first: it imports what is
imported late and fills caches. Then the model is built, and the export is timed until its file is
on disk; :func:`dynamo_moe.convert` counts as ours. All export without gradients: with them,
``dynamo`` fails on T5's attention ("Cannot view a tensor with shape ..."). Memory is the peak of
the resident set over what it is at the start, when the weights are in memory already.

The exports of a case take turns, each round starting with another. The first file of each runs in
ONNX Runtime on inputs of other sizes (other values, where shapes are static) and is compared with
PyTorch. Those of ``dynamo, one node a layer`` cannot run: only our export adds the nodes' bodies.

The case ``checkpoint`` has the shape of Qwen3-30B-A3B: 48 layers of 128 experts. Its safetensors
file has all 61 GB, but is one hole: no block of it is on disk. Its experts are stored as the model
holds them, so that the ONNX file can refer to every weight where it is. Nothing can be computed
with such weights; the ONNX file is checked by onnx, and for whether it refers to every byte.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any
from unittest import mock

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks._timing import record

PACKAGES = ("torch", "transformers", "onnxruntime", "onnx", "onnx-ir", "onnxscript")
OURS = "ours"
DYNAMO = "dynamo"
ONE_NODE = "dynamo, one node a layer"
TORCHSCRIPT = "TorchScript"
TRANSFORMERS = "transformers"
COLORS = {
    OURS: "#0b6e4f",
    DYNAMO: "#c2570c",
    ONE_NODE: "#f2a65a",
    TORCHSCRIPT: "#3b5bdb",
    TRANSFORMERS: "#9c36b5",
}
MAX_ERROR = 1e-3
# What an export of the case "checkpoint" is to stay below.
GOAL_SECONDS, GOAL_BYTES = 60, 2e9
VOCABULARY = 1000
OWN_STEPS = "own steps"


@dataclass(frozen=True)
class Row:
    """A model and its example, exported by each of ``exporters``."""

    label: str
    exporters: tuple[str, ...] = (OURS,)
    blocks: int = 6
    batch: int = 2
    length: int = 16
    dynamic: bool = True
    """Batch and length are symbolic."""
    cache: bool = False
    """The keys and values of earlier tokens are inputs and outputs."""
    quick: bool = False
    """Belongs to a quick run."""

    def shrunk(self) -> Row:
        """The same with few blocks, for a quick run."""
        return replace(self, blocks=max(1, self.blocks // 12))


@dataclass(frozen=True)
class Case:
    """Exports that are compared with each other."""

    name: str
    model: str
    rows: tuple[Row, ...]

    def shrunk(self) -> Case:
        """The rows of a quick run."""
        return replace(self, rows=tuple(row.shrunk() for row in self.rows if row.quick))


CASES = (
    Case(
        "example size",
        "t5",
        tuple(
            Row(
                f"L {length}, batch {batch}", batch=batch, length=length, quick=length == batch * 64
            )
            for batch in (2, 8)
            for length in (16, 128, 512, 1024)
        ),
    ),
    Case(
        "T5-small",
        "t5",
        (
            Row("L 16", (OURS, DYNAMO, TORCHSCRIPT, TRANSFORMERS), quick=True),
            Row("L 512", (OURS, DYNAMO, TORCHSCRIPT), length=512),
            Row("L 1024, batch 8", (OURS, DYNAMO, TORCHSCRIPT), length=1024, batch=8),
            Row("L 16, static", (OURS, DYNAMO, TORCHSCRIPT), dynamic=False, quick=True),
        ),
    ),
    Case(
        "Llama",
        "llama",
        (
            Row("6 blocks", (OURS, DYNAMO), blocks=6, quick=True),
            Row("12 blocks", (OURS, DYNAMO), blocks=12),
            Row("24 blocks", (OURS, DYNAMO, TORCHSCRIPT, TRANSFORMERS), blocks=24, quick=True),
            Row("48 blocks", (OURS, DYNAMO), blocks=48),
        ),
    ),
    Case(
        "Mixtral",
        "mixtral",
        (Row("24 blocks", (OURS, DYNAMO, ONE_NODE, TRANSFORMERS), blocks=24, quick=True),),
    ),
    Case(
        "checkpoint",
        "qwen3",
        (
            Row("logits", blocks=48),
            Row("logits and cache", blocks=48, cache=True, quick=True),
        ),
    ),
    Case("Swin-MoE", "swin", (Row("Swin-T", (OURS, ONE_NODE), quick=True),)),
)


class Subject:
    """A model in memory, with an example.

    Attributes:
        model: The model; :func:`dynamo_moe.convert` and the peers' settings are for it.
        module: What is exported: from named inputs to one tensor.
        dynamic: Names of the symbolic dimensions by input.
    """

    model: Any
    module: Any
    dynamic: Mapping[str, Mapping[int, str]]

    def __init__(self, row: Row, tiny: bool) -> None:
        import torch

        torch.manual_seed(0)
        self.row = row
        self.build(tiny)

    def build(self, tiny: bool) -> None:
        """Sets the attributes."""
        raise NotImplementedError

    def inputs(self, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
        """Random inputs by name."""
        raise NotImplementedError

    def prepare(self, exporter: str) -> None:
        """What an exporter needs and what is not timed."""
        import dynamo_moe

        if exporter == ONE_NODE:
            dynamo_moe.convert(self.model)

    def export(self, exporter: str, folder: Path) -> None:
        """Writes ``model.onnx``."""
        inputs = self.inputs(self.row.batch, self.row.length)
        dynamic = self.dynamic if self.row.dynamic else None
        _EXPORTERS[exporter](self, inputs, dynamic, folder / "model.onnx")

    def check(self, path: Path) -> dict[str, Any]:
        """Compares the file with PyTorch."""
        import onnxruntime
        import torch

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(path, options)
        names = [value.name for value in session.get_outputs()]
        output = "logits" if "logits" in names else names[0]
        wanted = {value.name for value in session.get_inputs()}
        sizes = [(3, 7), (1, 21)] if self.row.dynamic else [(self.row.batch, self.row.length)]
        errors = []
        for seed, (batch, length) in enumerate(sizes, start=1):
            inputs = self.inputs(batch, length, seed)
            with torch.no_grad():
                expected = self.module(**inputs).numpy()
            feeds = {name: value.numpy() for name, value in inputs.items() if name in wanted}
            errors.append(relative_error(session.run([output], feeds)[0], expected))
        return {"max relative error": max(errors)}


class _T5(Subject):
    """T5-small with random weights."""

    dynamic = MappingProxyType(
        {
            "input_ids": {0: "batch", 1: "length"},
            "attention_mask": {0: "batch", 1: "length"},
            "decoder_input_ids": {0: "batch", 1: "decoder_length"},
        }
    )

    def build(self, tiny: bool) -> None:
        from torch import nn
        from transformers import T5Config, T5ForConditionalGeneration

        width = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4} if tiny else {}
        config = T5Config(**width, num_layers=self.row.blocks, use_cache=False)
        self.model = T5ForConditionalGeneration(config).eval()

        class Logits(nn.Module):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.model = model

            def forward(self, input_ids: Any, attention_mask: Any, decoder_input_ids: Any) -> Any:
                return self.model(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    decoder_input_ids=decoder_input_ids,
                    use_cache=False,
                ).logits

        self.module = Logits(self.model).eval()

    def inputs(self, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
        # The lengths differ where they may: a file that takes only equal ones is found out.
        target = length if seed == 0 or not self.row.dynamic else length + 2
        ids, others = _tokens(batch, length, seed), _tokens(batch, target, seed + 100)
        return {"input_ids": ids, "attention_mask": _mask(ids), "decoder_input_ids": others}


class _Llama(Subject):
    """Narrow blocks: what is exported is their number of nodes."""

    dynamic = MappingProxyType(
        {"input_ids": {0: "batch", 1: "length"}, "attention_mask": {0: "batch", 1: "length"}}
    )
    architecture = "Llama"
    intermediate = 688
    options: Mapping[str, int] = MappingProxyType({})

    def build(self, tiny: bool) -> None:
        import transformers
        from torch import nn

        width = 32 if tiny else 256
        config = getattr(transformers, f"{self.architecture}Config")(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=64 if tiny else self.intermediate,
            num_hidden_layers=self.row.blocks,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=width // 8,
            use_cache=False,
            **self.options,
        )
        self.model = getattr(transformers, f"{self.architecture}ForCausalLM")(config).eval()

        class Logits(nn.Module):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.model = model

            def forward(self, input_ids: Any, attention_mask: Any) -> Any:
                return self.model(
                    input_ids=input_ids, attention_mask=attention_mask, use_cache=False
                ).logits

        self.module = Logits(self.model).eval()

    def inputs(self, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
        ids = _tokens(batch, length, seed)
        return {"input_ids": ids, "attention_mask": _mask(ids)}


class _Mixtral(_Llama):
    """The same blocks with 8 experts each, of which 2 are chosen."""

    architecture = "Mixtral"
    intermediate = 512
    options = MappingProxyType({"num_local_experts": 8, "num_experts_per_tok": 2})

    def prepare(self, exporter: str) -> None:
        super().prepare(exporter)
        if exporter in {DYNAMO, TORCHSCRIPT, TRANSFORMERS}:
            self.model.set_experts_implementation("batched_mm")


class _Swin(Subject):
    """Swin-T with MoE layers in its last two stages."""

    dynamic = MappingProxyType({"images": {0: "batch"}})

    def build(self, tiny: bool) -> None:
        from dynamo_moe.models import SwinMoE, SwinMoEConfig

        narrow = {"embed_dim": 12, "depths": (2, 2, 2, 2), "mlp_ratio": 1, "num_experts": 4}
        config = SwinMoEConfig(**narrow) if tiny else SwinMoEConfig()
        self.model = self.module = SwinMoE(config).eval()

    def inputs(self, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
        import torch

        del length
        generator = torch.Generator().manual_seed(seed)
        size = self.model.config.image_size
        return {"images": torch.randn(batch, 3, size, size, generator=generator)}


class _Checkpoint(Subject):
    """A checkpoint of the shape of Qwen3-30B-A3B whose file is one hole."""

    model = module = None
    dynamic = MappingProxyType({})

    def build(self, tiny: bool) -> None:
        from transformers import Qwen3MoeConfig

        width = 64 if tiny else 2048
        self.config = Qwen3MoeConfig(
            hidden_size=width, moe_intermediate_size=width * 3 // 8, intermediate_size=width * 3,
            num_hidden_layers=self.row.blocks, num_attention_heads=32, num_key_value_heads=4,
            head_dim=4 if tiny else 128, num_experts=8 if tiny else 128, num_experts_per_tok=8,
            vocab_size=VOCABULARY if tiny else 151936, tie_word_embeddings=False,
            norm_topk_prob=True, dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"],
        )  # fmt: skip
        self.bytes = 0
        self.seconds: dict[str, float] = {}

    def inputs(self, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
        raise NotImplementedError("the model cannot be run")

    def export(self, exporter: str, folder: Path) -> None:
        import dynamo_moe

        task = "text-generation-with-past" if self.row.cache else "text-generation"
        started = time.perf_counter()
        model = dynamo_moe.open_checkpoint(folder)
        opened = time.perf_counter()
        dynamo_moe.convert(model)
        converted = time.perf_counter()
        dynamo_moe.export_language_model(
            model, folder / "model.onnx", task=task, external_data=True, link_weights=True
        )
        self.seconds = {
            "opening": opened - started,
            "converting": converted - opened,
            "exporting": time.perf_counter() - converted,
        }

    def write(self, folder: Path) -> None:
        """Writes the checkpoint; its weights take no room on file systems that have holes."""
        import torch
        from transformers import Qwen3MoeForCausalLM

        self.config.save_pretrained(folder)
        with torch.device("meta"):
            parameters = dict(Qwen3MoeForCausalLM(self.config).named_parameters())
        header, end = safetensors_header({name: tuple(p.shape) for name, p in parameters.items()})
        path = folder / "model.safetensors"
        path.write_bytes(header)
        os.truncate(path, len(header) + end)
        self.bytes = end
        allocated = path.stat().st_blocks * 512
        if allocated > len(header) + 2**20:
            raise OSError(f"{folder}: the file system has no holes, {allocated} bytes are taken")

    def check(self, path: Path) -> dict[str, Any]:
        import onnx

        onnx.checker.check_model(path)
        model = onnx.load(path, load_external_data=False)
        linked = written = 0
        for tensor in model.graph.initializer:
            places = {entry.key: entry.value for entry in tensor.external_data}
            if places.get("location") == "model.safetensors":
                linked += int(places["length"])
            else:
                written += math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(
                    tensor.data_type
                ).itemsize  # fmt: skip
        return {
            "not run": "no weights",
            "weights bytes": self.bytes,
            "linked bytes": linked,
            "other weights bytes": written,
            "seconds of the parts": self.seconds,
        }


def safetensors_header(shapes: Mapping[str, Sequence[int]]) -> tuple[bytes, int]:
    """Returns the start of a safetensors file of bfloat16 tensors, and the bytes that follow."""
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text, end


_SUBJECTS: Mapping[str, type[Subject]] = {
    "t5": _T5,
    "llama": _Llama,
    "mixtral": _Mixtral,
    "swin": _Swin,
    "qwen3": _Checkpoint,
}


def _tokens(batch: int, length: int, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def _mask(ids: Any) -> Any:
    import torch

    return torch.ones_like(ids)


Dynamic = Mapping[str, Mapping[int, str]] | None


def _export_ours(subject: Subject, inputs: dict[str, Any], dynamic: Dynamic, path: Path) -> None:
    import dynamo_moe

    dynamo_moe.convert(subject.model)
    dynamo_moe.export(
        subject.module, (), path, kwargs=inputs, dynamic_shapes=dynamic, external_data=True
    )


def _export_dynamo(
    subject: Subject, inputs: dict[str, Any], dynamic: Dynamic, path: Path, **options: Any
) -> None:
    import torch

    torch.onnx.export(
        subject.module,
        (),
        path,
        kwargs=inputs,
        dynamo=True,
        verbose=False,
        dynamic_shapes=_symbolic(dynamic),
        **options,
    )


def _export_one_node(
    subject: Subject, inputs: dict[str, Any], dynamic: Dynamic, path: Path
) -> None:
    import dynamo_moe

    table = dynamo_moe.onnx_translation_table()
    _export_dynamo(subject, inputs, dynamic, path, custom_translation_table=table)


def _export_torchscript(
    subject: Subject, inputs: dict[str, Any], dynamic: Dynamic, path: Path
) -> None:
    import torch

    torch.onnx.export(
        subject.module,
        tuple(inputs.values()),
        path,
        dynamo=False,
        input_names=list(inputs),
        output_names=["logits"],
        dynamic_axes=dynamic and {**dynamic, "logits": dict(next(reversed(dynamic.values())))},
    )


def _export_transformers(
    subject: Subject, inputs: dict[str, Any], dynamic: Dynamic, path: Path
) -> None:
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    config = OnnxConfig(dynamic_shapes=_symbolic(dynamic))
    OnnxExporter().export(subject.model, inputs, config=config).save_pretrained(path.parent)


_EXPORTERS: Mapping[str, Callable[[Subject, dict[str, Any], Dynamic, Path], None]] = {
    OURS: _export_ours,
    DYNAMO: _export_dynamo,
    ONE_NODE: _export_one_node,
    TORCHSCRIPT: _export_torchscript,
    TRANSFORMERS: _export_transformers,
}


def _symbolic(dynamic: Dynamic) -> dict[str, Any] | None:
    from torch.export import Dim

    if dynamic is None:
        return None
    return {name: dict.fromkeys(dimensions, Dim.DYNAMIC) for name, dimensions in dynamic.items()}


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, over the largest value."""
    if found.shape != wanted.shape:
        raise ValueError(f"the result is {found.shape}, not {wanted.shape}")
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


Runner = Callable[..., dict[str, Any]]


@contextlib.contextmanager
def runner(quick: bool) -> Iterator[Runner]:
    """Yields :func:`run` in a process for each call; a quick run has one process for all."""

    def alone(*arguments: Any) -> dict[str, Any]:
        with ProcessPoolExecutor(1, get_context("spawn")) as processes:
            try:
                return processes.submit(run, *arguments).result()
            except BrokenProcessPool:
                return {"error": "the process was killed, perhaps as memory ran out"}

    if not quick:
        yield alone
        return
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        yield lambda *arguments: processes.submit(run, *arguments).result()


def run(
    model: str, row: Row, exporter: str, quick: bool, check: bool, folder: Path | None
) -> dict[str, Any]:
    """Exports in this process.

    Args:
        model: Of a case.
        row: What to export.
        exporter: And by which.
        quick: A tiny model, and nothing before it.
        check: Compare the file with PyTorch.
        folder: Where to write.
    """
    _silence()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        if not quick:
            small, started = replace(row, blocks=1, batch=2, length=4), time.perf_counter()
            with contextlib.suppress(Exception):  # What fails for a tiny model does so again.
                _export(_SUBJECTS[model](small, tiny=True), exporter, place / "first", {})
            found["first export s"] = time.perf_counter() - started
        subject = _SUBJECTS[model](row, tiny=quick)
        try:
            path = _export(subject, exporter, place / "timed", found)
        except Exception as error:  # Any layer may be refused, for whatever reason.
            return {"error": reason(error)}
        found["file bytes"] = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
        if check:
            found |= _nodes(path)
            try:
                found |= subject.check(path)
            except Exception as error:
                found["check failed"] = reason(error)
    return found


def _export(subject: Subject, exporter: str, folder: Path, found: dict[str, Any]) -> Path:
    """Exports, and adds time and memory to ``found``."""
    import torch

    folder.mkdir()
    if isinstance(subject, _Checkpoint):
        subject.write(folder)
    subject.prepare(exporter)
    gc.collect()
    _reset_peak()
    before = _status("VmRSS")
    with _watched() as way, torch.no_grad():
        started, used = time.perf_counter(), time.process_time()
        subject.export(exporter, folder)
        found["seconds"] = time.perf_counter() - started
        found["cpu seconds"] = time.process_time() - used
    found["peak bytes"] = _status("VmHWM") - before
    if exporter == OURS:
        found["way"] = way[-1] if way else OWN_STEPS
    return folder / "model.onnx"


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    """Notes when ``dynamo_moe.export`` leaves the work to ``torch.onnx.export``, and why."""
    import torch

    way: list[str] = []
    reasons: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            cause = record.exc_info[1] if record.exc_info else None
            reasons.append(record.getMessage() if cause is None else reason(cause))

    original = torch.onnx.export

    def noting(*args: Any, **options: Any) -> Any:
        way.append(": ".join(["torch.onnx.export", *reasons]))
        return original(*args, **options)

    log, listener = logging.getLogger("dynamo_moe._exporter"), Listener()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(listener)
    try:
        with mock.patch.object(torch.onnx, "export", noting):
            yield way
    finally:
        log.removeHandler(listener)
        log.setLevel(level)


def _nodes(path: Path) -> dict[str, int]:
    import onnx_ir as ir
    from onnx_ir.passes.common import InlinePass

    model = ir.load(path)
    main_graph = len(model.graph)
    InlinePass()(model)
    return {
        "nodes": main_graph,
        "nodes, functions inlined": sum(1 for _ in model.graph.all_nodes()),
    }


def reason(error: BaseException) -> str:
    """An error in one line; of a chain the first, which the exporters wrap at length."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    text = re.sub(r"/\S+/", "", text)  # Of a path the name alone.
    return f"{type(error).__name__}: {text}"[:300]


def _silence() -> None:
    """Drops what the exporters and transformers print in this process."""
    warnings.simplefilter("ignore")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def _reset_peak() -> None:
    """Lets ``VmHWM`` start again from here (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    """Bytes of a field of this process's status (Linux)."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s*(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def measure(
    case: Case, turns: int, *, quick: bool, folder: Path | None, runs: Runner, console: Console
) -> list[dict[str, Any]]:
    """Runs the exports of a case in turn."""
    jobs = [(row, exporter) for row in case.rows for exporter in row.exporters]
    taken: dict[tuple[str, str], list[dict[str, Any]]] = {
        (row.label, exporter): [] for row, exporter in jobs
    }
    for turn in range(turns):
        first = turn % len(jobs)
        for row, exporter in jobs[first:] + jobs[:first]:
            done = taken[row.label, exporter]
            if any("error" in one for one in done):
                continue
            console.print(f"{case.name}, {row.label}: turn {turn + 1} of {turns}, {exporter}")
            one = runs(case.model, row, exporter, quick, not done, folder)
            if "error" in one:
                console.print(f"  {one['error']}", markup=False)
            done.append(one)
    return [
        {
            "label": row.label,
            "blocks": row.blocks,
            "batch": row.batch,
            "length": row.length,
            "dynamic": row.dynamic,
            "exporters": {
                exporter: together(taken[row.label, exporter]) for exporter in row.exporters
            },
        }
        for row in case.rows
    ]


_PER_TURN = ("seconds", "cpu seconds", "peak bytes", "first export s")


def together(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of an exporter's turns, with each turn's value, and what its first turn found."""
    for one in turns:
        if "error" in one:
            return {"error": one["error"]}
    result = {name: value for name, value in turns[0].items() if name not in _PER_TURN}
    for name in _PER_TURN:
        values = [one[name] for one in turns if name in one]
        if values:
            result[name] = {"median": statistics.median(values), "turns": values}
    return result


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the cases come to: ratios, spreads, growth."""
    result: dict[str, Any] = {"time / ours": {}, "memory / ours": {}}
    for case in cases:
        for row in case["rows"]:
            for key, title in (("seconds", "time / ours"), ("peak bytes", "memory / ours")):
                peers = ratios(row, key)
                if peers:
                    result[title][f"{case['name']}, {row['label']}"] = peers
        ours = _ours(case)
        if case["name"] == "example size" and ours:
            sizes = result["example size"] = {}
            for title, key in (("time", "seconds"), ("memory", "peak bytes")):
                between = spread([_median(one, key) for one in ours])
                sizes[f"{title} between sizes, percent"] = between
                sizes[f"{title} between turns of a size, percent"] = statistics.median(
                    spread(one[key]["turns"]) for one in ours
                )
        if case["name"] == "checkpoint" and ours:
            result["checkpoint"] = {
                "seconds": max(_median(one, "seconds") for one in ours),
                "peak bytes": max(_median(one, "peak bytes") for one in ours),
                "goal": {"seconds": GOAL_SECONDS, "peak bytes": GOAL_BYTES},
            }
    return result


def _ours(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = (row["exporters"][OURS] for row in case["rows"])
    return [one for one in found if "error" not in one]


def _median(found: Mapping[str, Any], key: str) -> float:
    return float(found[key]["median"])


def ratios(row: Mapping[str, Any], key: str) -> dict[str, float]:
    """The peers' medians over ours."""
    found = row["exporters"]
    if "error" in found[OURS]:
        return {}
    ours = _median(found[OURS], key)
    if not ours:  # Memory, in a quick run: an earlier export left enough.
        return {}
    return {
        name: _median(one, key) / ours
        for name, one in found.items()
        if name != OURS and "error" not in one
    }


def spread(values: Sequence[float]) -> float:
    """From the least to the largest, in percent of the median."""
    middle = statistics.median(values)
    return 100 * (max(values) - min(values)) / middle if middle else 0.0


def tables(cases: Sequence[Mapping[str, Any]]) -> Table:
    """All of it, a row an exporter."""
    numbers = ("time, s", "x ours", "CPU, s", "memory, MB", "x ours", "nodes", "error")
    table = Table("case", "exporter")
    for title in numbers:
        table.add_column(title, justify="right")
    table.add_column("remarks", overflow="fold")
    for case in cases:
        for row in case["rows"]:
            times, memory = ratios(row, "seconds"), ratios(row, "peak bytes")
            for place, (name, one) in enumerate(row["exporters"].items()):
                head = (f"{case['name']}, {row['label']}" if place == 0 else "", name)
                if "error" in one:
                    table.add_row(*head, *[""] * len(numbers), escape(f"failed: {one['error']}"))
                    continue
                table.add_row(
                    *head,
                    f"{_median(one, 'seconds'):.1f}",
                    f"{times[name]:.2f}" if name in times else "",
                    f"{_median(one, 'cpu seconds'):.1f}",
                    f"{_median(one, 'peak bytes') / 1e6:.0f}",
                    f"{memory[name]:.2f}" if name in memory else "",
                    str(one.get("nodes", "")),
                    f"{one['max relative error']:.0e}" if "max relative error" in one else "",
                    escape(remarks(one)),
                )
    return table


def remarks(found: Mapping[str, Any]) -> str:
    """What a reader of an exporter's times should know."""
    parts = []
    if "check failed" in found:
        parts.append(f"the file fails: {found['check failed']}")
    if found.get("max relative error", 0) > MAX_ERROR:
        parts.append("the file's results are wrong")
    if found.get("way", OWN_STEPS) != OWN_STEPS:
        parts.append(found["way"])
    if "linked bytes" in found:
        linked, weights = found["linked bytes"], found["weights bytes"]
        parts.append(f"{linked / 1e9:.2f} of {weights / 1e9:.2f} GB linked")
    return "; ".join(parts)


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws what ``--json`` writes: ratios of time and memory, growth, and example sizes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    cases = {case["name"]: case for case in result["cases"]}
    drawn = [
        (draw, chosen)
        for draw, chosen in (
            (_draw_times, [row for case in result["cases"] for row in _compared(case)]),
            (_draw_memory, [row for case in result["cases"] for row in _compared(case)]),
            (_draw_growth, _rows(cases.get("Llama"))),
            (_draw_sizes, _rows(cases.get("example size"))),
        )
        if chosen
    ]
    columns = min(2, len(drawn)) or 1
    lines = math.ceil(len(drawn) / columns) or 1
    figure, panels = plt.subplots(
        lines, columns, figsize=(7.5 * columns, 4.8 * lines), layout="constrained", squeeze=False
    )
    for panel in panels.flat[len(drawn) :]:
        panel.set_visible(False)
    for panel, (draw, chosen) in zip(panels.flat, drawn, strict=False):
        draw(panel, chosen)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(result["cases"]), fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _title(cases: Sequence[Mapping[str, Any]]) -> str:
    if not cases:
        return ""
    one = cases[-1]["run"]
    versions = one["versions"]
    return (
        f"PyTorch {versions['torch']}, onnxscript {versions['onnxscript']}, transformers "
        f"{versions['transformers']}; {one['cpu']}, {one['cores']} cores, "
        f"median of {one['turns']}, {one['date'][:10]}{', quick' * one['quick']}"
    )


def _rows(case: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    rows = case["rows"] if case else []
    return [row for row in rows if "error" not in row["exporters"][OURS]]


def _compared(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows that have peers, labelled with their case."""
    return [
        {**row, "label": f"{case['name']}, {row['label']}"}
        for row in _rows(case)
        if ratios(row, "seconds") and ratios(row, "peak bytes")
    ]


def _draw_times(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    _bars(panel, rows, "seconds", "{:.3g} s", "export time / ours (right: slower than ours)")


def _draw_memory(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    _bars(panel, rows, "peak bytes", "{:.0f} MB", "peak memory over the start / ours", 1e-6)


def _bars(
    panel: Any, rows: Sequence[Mapping[str, Any]], key: str, ours: str, title: str, unit: float = 1
) -> None:
    labels, place, seen = {}, 0.0, set()
    for row in rows:
        found = ratios(row, key)
        middle = place + (len(found) - 1) / 2
        labels[middle] = f"{row['label']}\nours: " + ours.format(
            _median(row["exporters"][OURS], key) * unit
        )
        for name, ratio in found.items():
            label = None if name in seen else name
            seen.add(name)
            # From ours at 1: a bar to the right is more than ours.
            panel.barh(place, ratio - 1, 0.85, left=1, color=COLORS[name], label=label)
            panel.annotate(
                f"{ratio:.2g}",
                (ratio, place),
                (3 if ratio >= 1 else -3, 0),
                textcoords="offset points",
                ha="left" if ratio >= 1 else "right",
                va="center",
                fontsize=7.5,
            )
            place += 1
        place += 0.8
    panel.axvline(1, color=COLORS[OURS], linewidth=2, label="ours")
    panel.set(xscale="log", title=title)
    panel.margins(x=0.12)
    low, high = panel.get_xlim()
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_yticks(list(labels), list(labels.values()), fontsize=7.5)
    panel.invert_yaxis()
    panel.legend(fontsize=7.5)


_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def _draw_growth(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for name, color in COLORS.items():
        points = [
            (row["blocks"], _median(row["exporters"][name], "seconds"))
            for row in rows
            if "error" not in row["exporters"].get(name, {"error": ""})
        ]
        if points:
            panel.plot(*zip(*points, strict=True), "o-", color=color, label=name)
    ticks = [row["blocks"] for row in rows]
    panel.set(title="Llama: export time", xlabel="blocks", ylabel="s")
    panel.set_xticks(ticks, map(str, ticks))
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=7.5)


def _draw_sizes(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for key, line in (("seconds", "-"), ("peak bytes", "--")):
        every = [_median(row["exporters"][OURS], key) for row in rows]
        middle = statistics.median(every)
        name = f"{middle:.1f} s" if key == "seconds" else f"{middle / 1e6:.0f} MB"
        for batch, color in zip(
            sorted({row["batch"] for row in rows}), COLORS.values(), strict=False
        ):
            points = [
                (row["length"], 100 * _median(row["exporters"][OURS], key) / middle)
                for row in rows
                if row["batch"] == batch
            ]
            label = f"{'time' if key == 'seconds' else 'memory'}, batch {batch} (100 % = {name})"
            panel.plot(*zip(*points, strict=True), f"o{line}", color=color, label=label)
    panel.set(
        title="ours, T5-small: the example's size",
        xlabel="length of the example",
        ylabel="% of the median of all",
        xscale="log",
        ylim=(0, 150),
    )
    ticks = sorted({row["length"] for row in rows})
    panel.set_xticks(ticks, map(str, ticks))
    panel.minorticks_off()
    panel.legend(fontsize=7.5)


def merged(known: Sequence[Any], new: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The cases of two runs in their usual order, the new ones in place of the known."""
    by_name = {case["name"]: case for case in (*known, *new)}
    return [by_name[case.name] for case in CASES if case.name in by_name]


def main(
    turns: Annotated[int, typer.Option(min=1, help="Processes of each export.")] = 3,
    case: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    folder: Annotated[Path | None, typer.Option(help="Write the files in it.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models, one cold turn.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw results here.")] = None,
) -> None:
    """Times exports to ONNX, ours and others."""
    console = Console(width=160, highlight=False)
    chosen = [one for one in CASES if case.lower() in one.name.lower()]
    if not chosen:
        names = ", ".join(one.name for one in CASES)
        raise typer.BadParameter(f"no case contains {case!r}; there are {names}")
    turns = 1 if quick else turns
    # With --case, the file's other cases stay.
    known: list[Any] = []
    if case and json_file is not None and json_file.exists():
        known = json.loads(json_file.read_text())["cases"]
    new: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    with runner(quick) as runs:
        for one in chosen:
            conditions = record(PACKAGES) | {"turns": turns, "quick": quick}
            size = one.shrunk() if quick else one
            rows = measure(size, turns, quick=quick, folder=folder, runs=runs, console=console)
            new.append({"name": one.name, "run": conditions, "rows": rows})
            result = {"cases": merged(known, new)}
            result["summary"] = summary(result["cases"])
            # After each case: a long run that is broken off is not lost.
            if json_file is not None:
                json_file.write_text(json.dumps(result, indent=2) + "\n")
    console.print(tables(result["cases"]))
    console.print_json(data=result["summary"])
    if plot_file is not None:
        plot(result, plot_file)


if __name__ == "__main__":
    typer.run(main)
