"""Our ONNX files of language models in ONNX Runtime on the CPU, against those of transformers.

    python -m benchmarks.transformers_onnx --json result.json --plot result.png

Each model has two layers, random float32 weights and a file per variant that takes any batch and
length. ``plugin`` and ``com.microsoft::MoE`` are ours; ``grouped_mm`` and ``batched_mm`` are
transformers' own ``OnnxExporter`` with that implementation of the experts, which unrolls the first
into one product per expert and gives the second a copy of both weights for every (token, expert)
pair. ``+ fusions`` is ``OnnxConfig(ort_fusions="cpu")``, which transformers has for ONNX Runtime.

Each turn of a file is a process of its own that loads it and runs all phases: the waiting threads
of other sessions would take the cores, and what ``batched_mm`` copies would not fit beside them.
The files take turns, each round starting with another; every turn's logits are compared with
PyTorch's. Turns in which other processes were busy do not count: on two cores, half a core of
theirs triples some times. All have the weights in a second file and the same session options.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import typer
from onnx_ir.passes.common import InlinePass
from rich.console import Console
from rich.table import Table

from benchmarks._timing import Timing, record

OURS = "plugin"
LAYERS = 2
VOCABULARY = 1000
MAX_ERROR = 1e-3
# No further run of a phase is begun in a turn after so long.
PHASE_MS = 1500
# Turns in which other processes used more of the cores do not count, unless all are such.
QUIET = 0.1
# After a turn that took so much memory the machine rests: while a virtual machine gives it back to
# its host, the next turn takes up to 1.4 times as long.
MUCH_MEMORY = 2e9
REST_S = 5


@dataclass(frozen=True)
class Case:
    """A model; ``experts`` and ``hidden`` go by other names in each config."""

    name: str
    architecture: str
    options: Mapping[str, int | bool]
    width: int = 512

    def shrunk(self) -> Case:
        """The same with narrow layers, for a smoke run."""
        narrow = {key: 64 for key in self.options if key.endswith("intermediate_size")}
        return replace(self, width=64, options=self.options | narrow)


CASES = (
    Case(
        "Mixtral (E 8, k 2, H 1792)",
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1792},
    ),
    Case(
        "Qwen3-MoE (E 128, k 8, H 192)",
        "Qwen3Moe",
        {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 192,
            "norm_topk_prob": True,
        },
    ),
    Case(
        "gpt-oss (E 32, k 4, H 512)",
        "GptOss",
        {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 512},
    ),
)


@dataclass(frozen=True)
class Variant:
    """A way to the ONNX file: one of our targets, or an implementation of transformers."""

    target: str = ""
    body: str = "loop"
    experts: str = "eager"
    fusions: str | None = None
    color: str = ""


VARIANTS = {
    OURS: Variant(target="plugin", color="#0b6e4f"),
    "plugin, unrolled": Variant(target="plugin", body="unrolled", color="#2fa37b"),
    "com.microsoft::MoE": Variant(target="onnxruntime", color="#8fd3b6"),
    "grouped_mm": Variant(experts="grouped_mm", color="#c2570c"),
    "grouped_mm + fusions": Variant(experts="grouped_mm", fusions="cpu", color="#f2a65a"),
    "batched_mm": Variant(experts="batched_mm", color="#3b5bdb"),
    "batched_mm + fusions": Variant(experts="batched_mm", fusions="cpu", color="#91a7ff"),
}


@dataclass(frozen=True)
class Phase:
    """Prompts of one length, one a run."""

    length: int
    count: int
    """Of different prompts."""
    runs: int
    """Most timed runs of each turn, after one of each prompt, and another, that are not timed."""

    def prompts(self) -> list[np.ndarray]:
        """Random tokens, so that runs of one token use other experts each."""
        rng = np.random.default_rng(self.length)
        return [rng.integers(VOCABULARY, size=(1, self.length)) for _ in range(self.count)]


PHASES = {"prefill": Phase(256, 1, 8), "decode": Phase(1, 16, 64)}


def build(case: Case, experts: str) -> Any:
    """The model with random weights, the same every time."""
    import torch
    import transformers

    config = getattr(transformers, f"{case.architecture}Config")(
        vocab_size=VOCABULARY,
        hidden_size=case.width,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=case.width // 8,
        use_cache=False,
        **case.options,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{case.architecture}ForCausalLM")(config).eval()
    model.set_experts_implementation(experts)
    return model


def expected(case: Case) -> dict[str, list[np.ndarray]]:
    """PyTorch's logits of every prompt."""
    import torch

    model = build(case, "eager")
    with torch.inference_mode():
        return {
            name: [model(input_ids=torch.from_numpy(ids)).logits.numpy() for ids in phase.prompts()]
            for name, phase in PHASES.items()
        }


def export(case: Case, variant: Variant, folder: Path) -> dict[str, Any]:
    """Writes ``model.onnx`` and returns how long that took, with the model in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    model = build(case, variant.experts)
    started = time.perf_counter()
    if variant.target:
        _export_ours(model, variant, folder)
    else:
        _export_theirs(model, variant, folder)
    seconds = time.perf_counter() - started
    written = ir.load(folder / "model.onnx")
    main_graph = sum(1 for _ in written.graph.all_nodes())
    InlinePass()(written)
    return {
        "export s": seconds,
        "file bytes": sum(file.stat().st_size for file in folder.glob("model.onnx*")),
        "nodes": main_graph,
        "nodes, functions inlined": sum(1 for _ in written.graph.all_nodes()),
    }


def _export_ours(model: Any, variant: Variant, folder: Path) -> None:
    import dynamo_moe
    from dynamo_moe.language_models import export_language_model

    dynamo_moe.convert(model)
    options = {"target": variant.target, "body": variant.body, "external_data": True}
    export_language_model(model, folder / "model.onnx", task="text-generation", **options)


def _export_theirs(model: Any, variant: Variant, folder: Path) -> None:
    import torch
    from torch.export import Dim
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    ids = torch.ones(2, 3, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    dynamic = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in inputs}
    config = OnnxConfig(dynamic_shapes=dynamic, ort_fusions=variant.fusions)
    OnnxExporter().export(model, inputs, config=config).save_pretrained(folder)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences what the exporters and transformers say about versions and configs."""
    with warnings.catch_warnings(), Path(os.devnull).open("w") as nothing:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            with contextlib.redirect_stdout(nothing):
                yield
        finally:
            logging.disable(logging.NOTSET)


@dataclass(frozen=True)
class Turn:
    """What one process found."""

    load_ms: float
    peak_bytes: int
    others: float
    """Share of the machine's cores that was used by other processes."""
    ms: dict[str, list[float]]
    logits: dict[str, list[np.ndarray]]


def turn(path: Path, threads: int) -> Turn:
    """Loads a file in this process and runs every phase."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    began, used, own = time.perf_counter(), _used_seconds(), time.process_time()
    start = time.perf_counter()
    session = ort.InferenceSession(path, options)
    load_ms = (time.perf_counter() - start) * 1e3
    times, logits = {}, {}
    for name, phase in PHASES.items():
        feeds = [{"input_ids": ids, "attention_mask": np.ones_like(ids)} for ids in phase.prompts()]
        logits[name] = [session.run(["logits"], feed)[0] for feed in feeds]
        # The second run of a shape still allocates: now one block for all that the first one used.
        session.run(["logits"], feeds[0])
        times[name] = []
        for run in range(phase.runs):
            start = time.perf_counter()
            session.run(["logits"], feeds[run % len(feeds)])
            times[name].append((time.perf_counter() - start) * 1e3)
            if sum(times[name]) > PHASE_MS:
                break
    others = _used_seconds() - used - (time.process_time() - own)
    others /= (time.perf_counter() - began) * (os.cpu_count() or 1)
    return Turn(load_ms, _peak_bytes(), others, times, logits)


def _used_seconds() -> float:
    """Seconds that all cores have worked, or been kept from it by the host (Linux)."""
    user, nice, system, _, _, irq, soft, steal, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _peak_bytes() -> int:
    """The largest resident set of this process so far (Linux)."""
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(peak[1]) * 1024 if peak else 0


def relative_error(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest difference, over the largest value of that prompt."""
    pairs = zip(found, wanted, strict=True)
    return max(float(np.abs(f - w).max() / np.abs(w).max()) for f, w in pairs)


def export_all(case: Case, folder: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Each variant's file, or why there is none. Files that are there already are used."""
    found: dict[str, dict[str, Any]] = {}
    for place, (name, variant) in enumerate(VARIANTS.items()):
        target = folder / case.architecture / str(place)
        known = target / "report.json"
        if not known.exists():
            console.print(f"{case.name}: exporting {name}")
            try:
                with quiet():
                    report = export(case, variant, target)
            except Exception as error:  # Any layer may be refused, for whatever reason.
                found[name] = {"error": f"{type(error).__name__}: {error}"}
                continue
            known.write_text(json.dumps(report))
        found[name] = json.loads(known.read_text()) | {"path": target / "model.onnx"}
    return found


def measure(
    case: Case, folder: Path, threads: int, turns: int, console: Console
) -> dict[str, dict[str, Any]]:
    """Exports, compares and times the variants of one model."""
    found = export_all(case, folder, console)
    with quiet():
        wanted = expected(case)
    paths = {name: result.pop("path") for name, result in found.items() if "path" in result}
    taken: dict[str, list[Turn]] = {name: [] for name in paths}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for number in range(turns):
            names = list(paths)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                console.print(f"{case.name}: turn {number + 1} of {turns}, {name}")
                one = processes.submit(turn, paths[name], threads).result()
                errors = {
                    phase: relative_error(one.logits[phase], wanted[phase]) for phase in PHASES
                }
                found[name]["max relative error"] = errors
                if max(errors.values()) > MAX_ERROR:
                    found[name]["error"] = f"wrong: logits off by {max(errors.values()):.1e}"
                    del paths[name]
                taken[name].append(one)
                if one.peak_bytes > MUCH_MEMORY:
                    time.sleep(REST_S)
    for name in paths:
        found[name] |= summary(taken[name])
    return found


def summary(turns: list[Turn]) -> dict[str, Any]:
    """Times of the quiet turns of a file together, or of the quietest."""
    shares = [round(one.others, 2) for one in turns]
    turns = [one for one in turns if one.others < QUIET] or [min(turns, key=lambda t: t.others)]
    result: dict[str, Any] = {
        "turns": len(turns),
        "other processes' share of the cores, of all turns": shares,
        "load ms": _timing([one.load_ms for one in turns]),
        "peak bytes": max(one.peak_bytes for one in turns),
    }
    for phase in PHASES:
        result[f"{phase} ms"] = _timing([ms for one in turns for ms in one.ms[phase]])
    return result


def _timing(ms: list[float]) -> dict[str, float]:
    return asdict(Timing(statistics.median(ms), min(ms)))


def tables(cases: list[dict[str, Any]]) -> Table:
    """All of it, a row a file."""
    columns = [f"{phase}, ms (best)" for phase in PHASES]
    table = Table(
        "model",
        "variant",
        *columns,
        "turns",
        "load, ms",
        "file, MB",
        "peak, MB",
        "nodes",
        "export, s",
    )
    for case in cases:
        for place, (name, result) in enumerate(case["variants"].items()):
            head = (case["name"] if place == 0 else "", name)
            if "error" in result:
                table.add_row(*head, result["error"])
                continue
            ours = case["variants"][OURS]
            times = []
            for phase in PHASES:
                mine, base = result[f"{phase} ms"], ours.get(f"{phase} ms", {}).get("median")
                ratio = f" {mine['median'] / base:.2f}x" if base else ""
                times.append(f"{mine['median']:.2f} ({mine['best']:.2f}){ratio}")
            table.add_row(
                *head,
                *times,
                str(result["turns"]),
                f"{result['load ms']['median']:.0f}",
                f"{result['file bytes'] / 1e6:.0f}",
                f"{result['peak bytes'] / 1e6:.0f}",
                str(result["nodes, functions inlined"]),
                f"{result['export s']:.1f}",
            )
    return table


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws the times over ours, one panel a phase, from what ``--json`` writes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    cases = [case for case in result["cases"] if "error" not in case["variants"][OURS]]
    others = {name: variant for name, variant in VARIANTS.items() if name != OURS}
    figure, panels = plt.subplots(1, len(PHASES), figsize=(13, 4.6), layout="constrained")
    for panel, (phase, inputs) in zip(panels, PHASES.items(), strict=True):
        key, labels = f"{phase} ms", []
        for place, case in enumerate(cases):
            ours = case["variants"][OURS][key]["median"]
            labels.append(f"{case['name'].replace(' (', chr(10) + '(')}\nours: {ours:.3g} ms")
            for offset, (name, variant) in enumerate(others.items()):
                if key not in case["variants"][name]:
                    continue
                ratio = case["variants"][name][key]["median"] / ours
                at = place + (offset - (len(others) - 1) / 2) * 0.16
                label = name if place == 0 else None
                # From ours at 1: a bar that goes up is slower than ours.
                panel.bar(at, ratio - 1, 0.15, bottom=1, color=variant.color, label=label)
                side = "bottom" if ratio >= 1 else "top"
                panel.annotate(
                    f"{ratio:.2g}",
                    (at, ratio),
                    (0, 2 if ratio >= 1 else -2),
                    textcoords="offset points",
                    ha="center",
                    va=side,
                    fontsize=7.5,
                )
        panel.axhline(1, color=VARIANTS[OURS].color, linewidth=2, label=f"ours, {OURS}")
        panel.set(
            yscale="log",
            xticks=range(len(cases)),
            ylabel="time / ours (up: slower than ours)",
            title=f"{phase}, {inputs.length} token{'s' * (inputs.length > 1)}",
        )
        panel.set_xticks(range(len(cases)), labels, fontsize=9)
        ticks = [tick for tick in _TICKS if _within(tick, panel)]
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.margins(y=0.12)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    versions = result["versions"]
    figure.suptitle(
        f"{LAYERS}-layer models, float32, batch 1, ONNX Runtime {versions['onnxruntime']}, "
        f"transformers {versions['transformers']}; {result['cpu']}, {result['threads']} threads, "
        f"{result['date'][:10]}",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 30)


def _within(tick: float, panel: Any) -> bool:
    low, high = panel.get_ylim()
    return bool(low * 0.8 <= tick <= high * 1.25)


def main(
    threads: Annotated[int, typer.Option(help="Threads of each session.")] = os.cpu_count() or 1,
    turns: Annotated[int, typer.Option(help="Processes of each file.")] = 5,
    case: Annotated[str, typer.Option(help="Only models whose name contains this.")] = "",
    folder: Annotated[
        Path | None, typer.Option(help="Keep the ONNX files here, and use those that are here.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Narrow models, one turn.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw results here.")] = None,
) -> None:
    """Times our ONNX files of language models against those of transformers' exporter."""
    console = Console(width=130, highlight=False)
    versions = ["torch", "transformers", "onnxruntime", "onnx", "onnx-ir", "onnxscript"]
    result = record(versions) | {"threads": threads, "turns": 1 if quick else turns}
    result |= {"layers": LAYERS, "vocabulary": VOCABULARY, "dtype": "float32", "batch": 1}
    result["phases"] = {name: asdict(phase) for name, phase in PHASES.items()}
    # With --case, the file's other models stay.
    known = json.loads(json_file.read_text()) if case and json_file and json_file.exists() else {}
    cases = {one["name"]: one for one in known.get("cases", [])}
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        console.print("importing the exporters")
        with tempfile.TemporaryDirectory() as nowhere, quiet():
            for name in (OURS, "grouped_mm + fusions"):  # The first export of a process is slower.
                export(CASES[0].shrunk(), VARIANTS[name], Path(nowhere))
        for chosen in CASES:
            if case.lower() not in chosen.name.lower():
                continue
            size = chosen.shrunk() if quick else chosen
            variants = measure(size, folder, threads, result["turns"], console)
            cases[size.name] = asdict(size) | {"variants": variants}
    result["cases"] = [cases[one.name] for one in CASES if one.name in cases]
    console.print(tables(result["cases"]))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")
    if plot_file is not None:
        plot(result, plot_file)


if __name__ == "__main__":
    typer.run(main)
