"""How fast are our ONNX files of language models on a CPU, against those of transformers?

    python -m benchmarks.cpu.language_models --json result.json --plot result.png

Each model has two layers, random float32 weights and a file per variant that takes any batch and
length; docs/explanation/performance.md says what the variants are. ``--redraw`` only draws
``--plot``, from the results in ``--json``.

Each turn of a file is a process of its own that loads it and runs all phases: the waiting threads
of other sessions would take the cores, and what ``batched_mm`` copies would not fit beside them.
The files take turns, each round starting with another; every turn's logits are compared with
PyTorch's. Turns in which other processes were busy do not count: on two cores, half a core of
theirs triples some of the times. All files have their weights in a second file and the same session
options.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
    time_runs,
)
from benchmarks.common.plots import SMALL, panels, ratio_bars
from benchmarks.common.timing import Timing, fresh_processes, resident_bytes, turns
from benchmarks.export.exporters import by_transformers
from benchmarks.export.models import causal_lm
from trt_plugin.native import library_path

OURS = "plugin"
LAYERS = 2
VOCABULARY = 1000
MAX_ERROR = 1e-3
# A turn begins no further run of a phase after this time.
PHASE_MS = 1500
# Turns in which other processes used more of the cores than this count only if all turns did.
QUIET = 0.1
# The machine rests after a turn that took this much memory: while a virtual machine gives it back
# to its host, the next turn takes up to 1.4 times as long.
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
        return replace(self, width=64, options={**self.options, **narrow})


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

    color: str
    target: str = ""
    body: str = "loop"
    experts: str = "eager"
    fusions: str | None = None
    library: bool = False  # Whether its session has the native library's operators.


VARIANTS = {
    OURS: Variant("#0b6e4f", target="plugin"),
    "plugin, library": Variant("#064e3b", target="plugin", library=True),
    "plugin, unrolled": Variant("#2fa37b", target="plugin", body="unrolled"),
    "com.microsoft::MoE": Variant("#8fd3b6", target="onnxruntime"),
    "grouped_mm": Variant("#c2570c", experts="grouped_mm"),
    "grouped_mm + fusions": Variant("#f2a65a", experts="grouped_mm", fusions="cpu"),
    "batched_mm": Variant("#3b5bdb", experts="batched_mm"),
    "batched_mm + fusions": Variant("#91a7ff", experts="batched_mm", fusions="cpu"),
}


@dataclass(frozen=True)
class Phase:
    """Prompts of one length, one a run."""

    length: int
    count: int  # different prompts
    runs: int  # timed runs of a turn at most, after an untimed run of each prompt and one more

    def feeds(self) -> list[dict[str, Array]]:
        """Random tokens, so that runs of one token use other experts each."""
        rng = np.random.default_rng(self.length)
        prompts = [rng.integers(VOCABULARY, size=(1, self.length)) for _ in range(self.count)]
        return [{"input_ids": ids, "attention_mask": np.ones_like(ids)} for ids in prompts]


PHASES = {"prefill": Phase(256, 1, 8), "decode": Phase(1, 16, 64)}


def build(case: Case, experts: str) -> Any:
    """Returns the model with random weights, the same every time."""
    model = causal_lm(
        case.architecture,
        vocab_size=VOCABULARY,
        hidden_size=case.width,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=case.width // 8,
        **case.options,
    )
    model.set_experts_implementation(experts)
    return model


def expected(case: Case) -> dict[str, list[Array]]:
    """PyTorch's logits of every prompt."""
    import torch

    model = build(case, "eager")

    def logits(feed: Mapping[str, Array]) -> Array:
        found: Array = model(input_ids=torch.from_numpy(feed["input_ids"])).logits.numpy()
        return found

    with torch.inference_mode():
        return {name: [*map(logits, phase.feeds())] for name, phase in PHASES.items()}


def export(case: Case, variant: Variant, folder: Path) -> dict[str, Any]:
    """Writes ``model.onnx`` and returns how long that took, with the model in memory."""
    import torch

    import dynamo_moe

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    model = build(case, variant.experts)
    started = time.perf_counter()
    if variant.target:
        dynamo_moe.convert(model)
        options: Any = {"target": variant.target, "body": variant.body, "external_data": True}
        dynamo_moe.export_language_model(model, path, task="text-generation", **options)
    else:
        ids = torch.ones(2, 3, dtype=torch.int64)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        dynamic = {name: {0: "batch", 1: "length"} for name in inputs}
        by_transformers(model, inputs, dynamic, path, ort_fusions=variant.fusions)
    seconds = time.perf_counter() - started
    return {"export s": seconds, "file bytes": file_bytes(path), **count_nodes(path)}


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
    others: float  # share of the machine's cores that was used by other processes
    ms: dict[str, list[float]]
    logits: dict[str, list[Array]]


def turn(path: Path, threads: int, library: Path | None) -> Turn:
    """Loads a file in this process and runs every phase."""
    began, used, own = time.perf_counter(), _used_seconds(), time.process_time()
    session = open_session(path, threads, library=library)
    load_ms = (time.perf_counter() - began) * 1e3
    times: dict[str, list[float]] = {}
    logits: dict[str, list[Array]] = {}
    for name, phase in PHASES.items():
        feeds = phase.feeds()
        logits[name] = [session.run(["logits"], feed)[0] for feed in feeds]
        # The second run of a shape still allocates, one block for all that the first one used.
        session.run(["logits"], feeds[0])
        times[name] = time_runs(session, ["logits"], feeds, phase.runs, PHASE_MS)
    others = _used_seconds() - used - (time.process_time() - own)
    others /= (time.perf_counter() - began) * (os.cpu_count() or 1)
    return Turn(load_ms, resident_bytes(peak=True), others, times, logits)


def _used_seconds() -> float:
    """Seconds that all cores have worked, or been kept from it by the host (Linux)."""
    user, nice, system, _, _, irq, soft, steal, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def measure(
    case: Case, variants: Mapping[str, Variant], folder: Path, threads: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Exports, compares and times the variants of one model, or finds why one has no file."""
    found: dict[str, dict[str, Any]] = {}
    taken: dict[str, list[Turn]] = {}
    for name, variant in variants.items():
        print(f"{case.name}: exporting {name}", flush=True)
        try:
            with quiet():
                found[name] = export(case, variant, folder / name)
            taken[name] = []
        except Exception as error:  # Any layer may be refused, for whatever reason.
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    with quiet():
        wanted = expected(case)
    with fresh_processes() as processes:
        for number, name in turns(taken, rounds):
            if "error" in found[name]:
                continue
            print(f"{case.name}: turn {number + 1} of {rounds}, {name}", flush=True)
            library = library_path() if variants[name].library else None
            one = processes.submit(turn, folder / name / "model.onnx", threads, library).result()
            taken[name].append(one)
            errors = {
                phase: max(map(relative_error, one.logits[phase], wanted[phase]))
                for phase in PHASES
            }
            found[name]["max relative error"] = errors
            if max(errors.values()) > MAX_ERROR:
                found[name]["error"] = f"wrong: logits off by {max(errors.values()):.1e}"
            if one.peak_bytes > MUCH_MEMORY:
                time.sleep(REST_S)
    for name, result in found.items():
        if "error" not in result:
            result.update(summary(taken[name]))
    return found


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Times of the quiet turns of a file together, or of the quietest."""
    quiet_turns = [one for one in turns if one.others < QUIET]
    used = quiet_turns or [min(turns, key=lambda one: one.others)]
    result: dict[str, Any] = {
        "turns": len(used),
        "other processes' share of the cores, of all turns": [round(t.others, 2) for t in turns],
        "load ms": asdict(Timing.of([one.load_ms for one in used])),
        "peak bytes": max(one.peak_bytes for one in used),
    }
    for phase in PHASES:
        samples = [ms for one in used for ms in one.ms[phase]]
        result[f"{phase} ms"] = asdict(Timing.of(samples))
    return result


def show(cases: Sequence[Mapping[str, Any]]) -> None:
    """Prints all results, a row a file."""
    rows = []
    for case in cases:
        ours = case["variants"][OURS]
        for name, result in case["variants"].items():
            if "error" in result:
                print(f"{case['name']}, {name}: {result['error']}")
                continue
            times = []
            for phase in PHASES:
                mine, base = result[f"{phase} ms"], ours.get(f"{phase} ms", {}).get("median")
                ratio = f" {mine['median'] / base:.2f}x" if base else ""
                median, best = report.digits(mine["median"]), report.digits(mine["best"])
                times.append(f"{median} ({best}){ratio}")
            rows.append([
                case["name"],
                name,
                *times,
                result["turns"],
                result["load ms"]["median"],
                f"{result['file bytes'] / 1e6:.0f}",
                f"{result['peak bytes'] / 1e6:.0f}",
                result["nodes, functions inlined"],
                f"{result['export s']:.1f}",
            ])  # fmt: skip
    phases = [f"{phase}, ms (best)" for phase in PHASES]
    rest = ["turns", "load, ms", "file, MB", "peak, MB", "nodes", "export, s"]
    print(report.table("language models", ["model", "variant", *phases, *rest], rows))


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws the times over ours, one panel a phase, from what ``--json`` writes."""
    versions = result["versions"]
    title = (
        f"{LAYERS}-layer models, float32, batch 1, ONNX Runtime {versions['onnxruntime']}, "
        f"transformers {versions['transformers']}; {result['cpu']}, {result['threads']} threads, "
        f"{result['date'][:10]}"
    )
    colors = {name: variant.color for name, variant in VARIANTS.items()}
    with panels(path, len(PHASES), 2, (7.5, 5), title) as drawn:
        for panel, (phase, inputs) in zip(drawn, PHASES.items(), strict=True):
            groups = []
            for case in result["cases"]:
                times = {
                    name: variant[f"{phase} ms"]["median"]
                    for name, variant in case["variants"].items()
                    if "error" not in variant
                }
                if ours := times.pop(OURS, None):
                    ratios = {name: ms / ours for name, ms in times.items()}
                    groups.append((f"{case['name']}\nours: {ours:.3g} ms", ratios))
            ratio_bars(panel, groups, colors)
            tokens = "1 token" if inputs.length == 1 else f"{inputs.length} tokens"
            panel.set_title(f"{phase}, {tokens}: time / ours (right: slower)")
        names = drawn[0].get_legend_handles_labels()
        drawn[0].figure.legend(*names, loc="outside lower center", ncols=7, fontsize=SMALL)


def main() -> None:
    """Times our ONNX files of language models against those of transformers' exporter."""
    known = report.parser(__doc__, "json", "plot")
    known.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of a session")
    known.add_argument("--turns", type=int, default=5, help="processes of each file")
    known.add_argument("--case", default="", help="only models whose name contains this")
    known.add_argument("--only", nargs="*", choices=VARIANTS, help=f"these files, beside {OURS!r}")
    known.add_argument("--quick", action="store_true", help="narrow models, one turn")
    given = report.parse(known, plot)
    chosen = report.matching_cases(known, CASES, given.case)
    result = report.conditions(PACKAGES)
    result |= {"threads": given.threads, "turns": 1 if given.quick else given.turns}
    result |= {"layers": LAYERS, "vocabulary": VOCABULARY, "dtype": "float32", "batch": 1}
    result["phases"] = {name: asdict(phase) for name, phase in PHASES.items()}
    print("importing the exporters", flush=True)
    with tempfile.TemporaryDirectory() as folder, quiet():
        for name in (OURS, "grouped_mm + fusions"):  # The first export of a process is slower.
            export(CASES[0].shrunk(), VARIANTS[name], Path(folder))
    variants = {
        name: variant
        for name, variant in VARIANTS.items()
        if not given.only or name in (OURS, *given.only)
    }
    new = []
    for case in chosen:
        size = case.shrunk() if given.quick else case
        with tempfile.TemporaryDirectory() as folder:
            found = measure(size, variants, Path(folder), given.threads, result["turns"])
        new.append(asdict(size) | {"variants": found})
    result["cases"] = report.merged(new, CASES, given)
    show(result["cases"])
    report.write_json(given.json, result)
    if given.plot:
        plot(result, given.plot)


if __name__ == "__main__":
    main()
