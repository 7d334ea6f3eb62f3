r"""Runs tests of PyTorch's own exporter, and exports each of their models by ``dynamo_moe`` too.

It is a plugin of pytest, and needs a checkout with such tests, which is not part of this project:

    PYTHONPATH=tests/support python -m pytest -p upstream_exports -p no:cacheprovider \
        --report build/upstream.json CHECKOUT/test/onnx/exporter/test_small_models_e2e.py

The tests run as they are. Where one calls ``torch.onnx.export(..., dynamo=True)``, the same model
is exported by :func:`dynamo_moe.export` with the same arguments and dynamic shapes. What PyTorch
compares its program on, our file is compared with the model on.

So do tests of the exporter of transformers, in a checkout of it: where one calls ``OnnxExporter``,
a copy of the model is converted by :func:`dynamo_moe.convert`, exported with the same keyword
arguments, without a cache unless it is given one, and compared with the model on them. With
symbolic shapes it is compared on twice the batch, too, if the model takes that.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import math
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch.onnx._internal.exporter import _testing

import dynamo_moe
from dynamo_moe.pytree import tree_leaves
from dynamo_moe.verification.errors import worst_errors

RIGHT, WRONG, REFUSED, NOT_RUN, SKIPPED = "right", "wrong", "refused", "not run", "no module"
RANDOM, ROUNDING, BLIND = "random", "rounding", "right but for blind tokens"
UNFINISHED = "unfinished"
# How much larger than PyTorch's own an error in float32 may be: sums in another order round anew.
_FEW_TIMES = 4
# Of upstream's arguments, those that have a meaning here, by our name.
_OPTIONS = {
    "dynamic_shapes": "dynamic_shapes",
    "input_names": "input_names",
    "output_names": "output_names",
    "opset_version": "opset",
}


@dataclass
class Exported:
    """The outcome of one export.

    Attributes:
        test: The test's name.
        model: The class of the model.
        upstream: Whether the exporter under test exports the model.
        ours: Whether our file is right, wrong, does not run in ONNX Runtime, or is refused;
            "random": it differs from the model, which differs from itself; "rounding": it is not
            much farther from the model in float64 than the model in float32 is; "right but for
            blind tokens": it is right where the masks hide as much behind the first token, and
            differs where a token may see no other; "unfinished": the test ended before it was
            written.
        message: The error, if any.
        converted: How many modules were converted first.
    """

    test: str
    model: str
    upstream: bool
    ours: str
    message: str = ""
    converted: int = 0


class Plugin:
    """Watches the exports of each test."""

    def __init__(self, folder: Path, report: Path | None) -> None:
        self.outcomes: list[Exported] = []
        self._folder, self._report, self._test = folder, report, ""
        self._files: dict[int, tuple[Exported, Path, torch.nn.Module, tuple[Any, ...]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Replaces PyTorch's export and comparison for the time of a test."""
        self._test = item.name
        with pytest.MonkeyPatch.context() as patch:
            if (exporter := _transformers_exporter()) is not None:
                # From transformers 5.17 on, ``export`` calls it, and quantises what it returns.
                name = "export_program" if hasattr(exporter, "export_program") else "export"
                patch.setattr(exporter, name, self._exporting_by(getattr(exporter, name)))
            patch.setattr(torch.onnx, "export", self._exporting(torch.onnx.export))
            checked = self._comparing(_testing.assert_onnx_program)
            patch.setattr(_testing, "assert_onnx_program", checked)
            return (yield)

    def _begin(self, model: Any) -> Exported:
        ours = UNFINISHED if isinstance(model, torch.nn.Module) else SKIPPED
        kind = type(model).__name__
        self.outcomes.append(Exported(self._test, kind, upstream=False, ours=ours))
        return self.outcomes[-1]

    def write_report(self) -> None:
        """Writes the outcomes, also of a process that does not live to see the end."""
        if self._report is not None:
            self._report.parent.mkdir(parents=True, exist_ok=True)
            outcomes = [asdict(outcome) for outcome in self.outcomes]
            self._report.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")

    def _exporting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def export(model: Any, args: Any = (), f: Any = None, **options: Any) -> Any:
            outcome = self._begin(model)
            path = self._folder / f"{len(self.outcomes)}.onnx"
            if isinstance(model, torch.nn.Module):
                self._export(original, outcome, model, args, path, options)
            program = original(model, args, f, **options)
            outcome.upstream = True
            if outcome.ours == RIGHT:
                example = (args if isinstance(args, tuple) else (args,), options.get("kwargs"))
                self._files[id(program)] = (outcome, path, model, example)
                if options.get("dynamic_shapes") is None and not options.get("dynamic_axes"):
                    self._compare(outcome, path, model, *example)
            return program

        return export

    def _exporting_by(self, original: Callable[..., Any]) -> Callable[..., Any]:
        torch_export = torch.onnx.export

        def export(self_: Any, model: Any, sample_inputs: Any, config: Any) -> Any:
            outcome = self._begin(model)
            path = self._folder / f"{len(self.outcomes)}.onnx"
            inputs, reference = copy.deepcopy((dict(sample_inputs), model))
            symbolic = config["dynamic"] if isinstance(config, dict) else config.dynamic
            takes = inspect.signature(model.forward).parameters
            given = [name for name, value in inputs.items() if value is not None]
            if "use_cache" in takes and not any("past" in name for name in given):
                inputs["use_cache"] = False
            options = {"kwargs": inputs, "dynamic_shapes": "batch" if symbolic else None}
            if (converted := _converted(outcome, model, inputs)) is not None:
                self._export(torch_export, outcome, converted, (), path, options)
                self._compare(outcome, path, converted, (), inputs, reference)
                if symbolic and (doubled := _doubled(reference, inputs)) is not None:
                    self._compare(outcome, path, converted, (), doubled, reference)
            self.write_report()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.onnx, "export", torch_export)  # It takes the program.
                program = original(self_, model, sample_inputs, config)
            outcome.upstream = True
            self.write_report()
            return program

        return export

    def _export(
        self,
        original: Callable[..., Any],
        outcome: Exported,
        model: torch.nn.Module,
        args: Any,
        path: Path,
        options: Any,
    ) -> None:
        ours = {_OPTIONS[name]: value for name, value in options.items() if name in _OPTIONS}
        ours = {name: value for name, value in ours.items() if value is not None}
        ours.setdefault("dynamic_shapes", None)
        try:
            with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
                warnings.simplefilter("ignore")
                patch.setattr(torch.onnx, "export", original)  # It is called for parts of ours.
                dynamo_moe.export(model, args, path, kwargs=options.get("kwargs"), **ours)
            outcome.ours = RIGHT
        except Exception as failure:  # Whatever comes out of it is the result.
            outcome.ours, outcome.message = REFUSED, _line(failure)

    def _comparing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compare(program: Any, **options: Any) -> None:
            if id(program) in self._files:
                outcome, path, model, (args, kwargs) = self._files[id(program)]
                args, kwargs = options.get("args", args), options.get("kwargs", kwargs)
                self._compare(outcome, path, model, args or (), kwargs)
            original(program, **options)

        return compare

    def _compare(
        self,
        outcome: Exported,
        path: Path,
        model: torch.nn.Module,
        args: Any,
        kwargs: Any,
        reference: torch.nn.Module | None = None,
    ) -> None:
        if outcome.ours != RIGHT:
            return
        case: Any = args
        if kwargs:
            names = inspect.signature(model.forward).parameters
            case = {**dict(zip(names, args, strict=False)), **kwargs}
        try:
            dynamo_moe.verify(path, model, [case], reference=reference)
        except dynamo_moe.VerificationError as failure:
            outcome.ours, outcome.message = WRONG, _line(failure)
            if kwargs and _is_random(model, kwargs):
                outcome.ours = RANDOM
            elif (seen := _padded_behind(case)) is not None:
                with contextlib.suppress(Exception):  # It is wrong, then.
                    dynamo_moe.verify(path, model, [seen], reference=reference)
                    outcome.ours = BLIND
            if outcome.ours == WRONG and kwargs and _rounds(path, model, kwargs):
                outcome.ours = ROUNDING
        except Exception as failure:  # ONNX Runtime has many kinds of exceptions.
            outcome.ours, outcome.message = NOT_RUN, _line(failure)


def _converted(
    outcome: Exported, model: torch.nn.Module, inputs: dict[str, Any]
) -> torch.nn.Module | None:
    """Returns a converted copy: the exporter under test gets the model as it is."""
    try:
        model = copy.deepcopy(model).eval()
        report = dynamo_moe.convert(model, (), inputs, fallback="batched_mm")
    except Exception as failure:  # Whatever comes out of it is the result.
        outcome.ours, outcome.message = REFUSED, _line(failure)
        return None
    outcome.converted = len(report.replaced)
    return model


def _doubled(model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the inputs with each row twice, or None where the model does not take that."""
    if any(not isinstance(value, torch.Tensor | int | None) for value in inputs.values()):
        return None
    doubled = {
        name: torch.cat([value, value]) if isinstance(value, torch.Tensor) and value.ndim else value
        for name, value in inputs.items()
    }
    try:
        with torch.no_grad():
            model(**copy.deepcopy(doubled))
    except Exception:  # Not every tensor is of the batch.
        return None
    return doubled


def _padded_behind(case: Any) -> dict[str, Any] | None:
    """Returns a case whose masks hide as much, but behind the first token; None without masks."""
    masks = [name for name in case if "attention_mask" in name] if isinstance(case, dict) else []
    masks = [name for name in masks if isinstance(case[name], torch.Tensor)]
    changed = {name: case[name].sort(-1, descending=True).values for name in masks}
    for mask in changed.values():
        mask[..., 0] = 1
    return {**case, **changed} if masks else None


def _is_random(model: torch.nn.Module, inputs: dict[str, Any]) -> bool:
    """Whether two runs of the model differ."""
    first, second = _results(model, inputs), _results(model, inputs)
    return worst_errors("model", first, second) != (0, 0)


def _rounds(path: Path, model: torch.nn.Module, inputs: dict[str, Any]) -> bool:
    """Whether the file's error against the model in float64 is one that float32 explains.

    PyTorch's own error says what that is. Errors are those that ``verify`` compares.
    """
    wide = {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    try:
        exact = _results(copy.deepcopy(model).double(), wide)
        errors = [
            worst_errors(what, results, exact)
            for what, results in (
                ("file", _results_of_file(path, inputs)),
                ("model", _results(model, inputs)),
            )
        ]
    except Exception:  # Not every model takes float64.
        return False
    return all(of_file <= _FEW_TIMES * own < math.inf for of_file, own in zip(*errors, strict=True))


def _results_of_file(path: Path, inputs: dict[str, Any]) -> list[torch.Tensor]:
    session = onnxruntime.InferenceSession(path)
    feeds = {value.name: inputs[value.name].numpy() for value in session.get_inputs()}
    return [torch.from_numpy(np.asarray(array)).double() for array in session.run(None, feeds)]


def _results(model: torch.nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        leaves = tree_leaves(model(**copy.deepcopy(inputs)))
    return [leaf.double() for leaf in leaves if torch.is_tensor(leaf)]


def _transformers_exporter() -> Any:
    """Returns transformers' ONNX exporter, if it has one."""
    try:
        from transformers.exporters.exporter_onnx import OnnxExporter
    except ImportError:
        return None
    return OnnxExporter


def _line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".replace("\n", " ")[:300]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--report``."""
    parser.addoption("--report", type=Path, help="where to write the outcomes, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin."""
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    plugin = Plugin(Path(folder.name), config.getoption("--report"))
    config.pluginmanager.register(plugin, "upstream-exports")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Shows how many exports came out how, and each that did not come out right."""
    plugin: Any = config.pluginmanager.get_plugin("upstream-exports")
    terminalreporter.section("exports by dynamo_moe")
    for outcome in plugin.outcomes:
        if outcome.ours not in (RIGHT, SKIPPED):
            upstream = "exported" if outcome.upstream else "fails"
            terminalreporter.line(
                f"{outcome.test}: {outcome.model} ({upstream} upstream): "
                f"{outcome.ours}: {outcome.message}"
            )
    exported = [outcome for outcome in plugin.outcomes if outcome.upstream]
    counts = Counter(outcome.ours for outcome in exported)
    terminalreporter.line(f"of {len(exported)} that are exported upstream: {dict(counts)}")
    others = Counter(o.ours for o in plugin.outcomes if not o.upstream)
    terminalreporter.line(f"of {others.total()} that upstream refuses: {dict(others)}")
    plugin.write_report()
