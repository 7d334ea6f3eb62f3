"""The report of ``verify``: the errors of each case, and their table for a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from dynamo_moe.conversion.reports import few
from dynamo_moe.json_values import json_values
from dynamo_moe.tolerances import Tolerance

_SHOWN = 3
"""Names of nodes in a table."""


@dataclass(frozen=True)
class CaseResult:
    """One set of inputs.

    Attributes:
        shapes: Shapes of the inputs, by name of the ONNX input.
        max_error: The worst element's error over all outputs, relative to the RMS of its row or its
            column in the expected output, the smaller, but at least 1 % of the output's; infinite
            where integers, booleans, dtypes or the places of infinities and NaN differ.
        rms_error: RMS of the errors, relative to the expected output's RMS.
        routing_agreement: Fraction of (token, layer) pairs whose set of experts agrees, 0 to 1;
            None if the file names no MoE layers.
        passed: Whether both errors are within the tolerance.
        model_error: With a reference, the worst element's error of the model itself: the part of
            ``max_error`` that the conversion causes.
        excepted: Empty, as a rule. Else what the case passes but for: ``ties``, if scores of the
            model's own top-k are equal, and the file agrees with the model where that takes the
            first of them, as ONNX does; ``close choices``, if it agrees where the model takes the
            file's experts for tokens whose scores differ by less than the tolerance, so that
            rounding decides; ``hidden tokens``, if results differ for tokens alone that a mask
            hides; ``rounding``, if the model is in half precision, and the file is at most twice as
            far from it in float32 as the model itself is: the errors are relative to that.
        other_choices: With ``ties`` and ``close choices``, the (token, layer) pairs for which the
            model itself chose other experts.
    """

    shapes: dict[str, tuple[int, ...]]
    max_error: float
    rms_error: float
    routing_agreement: float | None
    passed: bool
    model_error: float | None = None
    excepted: str = ""
    other_choices: int = 0


@dataclass(frozen=True)
class VerificationReport:
    """The result of :func:`verify`.

    Attributes:
        path: The ONNX file.
        runtime: Name and version of the runtime.
        tolerance: The bounds on every case's errors.
        cases: One result for each set of inputs.
        left_out: How many more were drawn that the model does not take, as it does not so many
            positions.
        by_operator: With the native library, the MoE nodes that its operators computed; else None.
        by_function: With the library, those that the functions beside them computed.
        missing: An operator that ONNX Runtime does not have in bfloat16, for which file and model
            were computed in float32, with the same weights; empty if they ran as they are.
    """

    path: Path
    runtime: str
    tolerance: Tolerance
    cases: tuple[CaseResult, ...]
    left_out: int = 0
    by_operator: tuple[str, ...] | None = None
    by_function: tuple[str, ...] = ()
    missing: str = ""

    @property
    def passed(self) -> bool:
        """Whether there is a case, and every one is within the tolerance."""
        return bool(self.cases) and all(case.passed for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain values, for JSON."""
        return {**json_values(self), "passed": self.passed}

    def __rich__(self) -> Table:
        """Returns a table for the terminal."""
        verdict = "[green]agrees[/]" if self.passed else "[red]DIFFERS[/]"
        title = f"{escape(str(self.path))} in {self.runtime}: {verdict}"
        table = Table(title=title, title_justify="left")
        model_column = (
            ["model's error"] if any(case.model_error is not None for case in self.cases) else []
        )
        for column in ("inputs", "max error", "RMS error", *model_column, "same routing", ""):
            table.add_column(column)
        for case in self.cases:
            inputs = [f"{name} {list(shape)}" for name, shape in case.shapes.items()]
            if len(inputs) > 4:
                inputs[3:] = [f"and {len(inputs) - 3} more"]
            same = case.routing_agreement
            table.add_row(
                ", ".join(inputs),
                f"{case.max_error:.1e}",
                f"{case.rms_error:.1e}",
                *([] if case.model_error is None else [f"{case.model_error:.1e}"]),
                "-" if same is None else f"{same:.2%}",
                _verdict(case),
            )
        table.caption = f"tolerance: max {self.tolerance.max:.0e}, RMS {self.tolerance.rms:.0e}"
        if self.left_out:
            table.caption += f"; {self.left_out} more cases were drawn, and refused by the model"
        if self.missing:
            table.caption += (
                f"; in float32: ONNX Runtime has no {self.missing} of bfloat16 on a CPU"
            )
        if self.by_operator is not None:
            table.caption += f"; MoE nodes by the library's operators: {len(self.by_operator)}"
        if self.by_function:
            names = few(self.by_function, _SHOWN)
            table.caption += f"; by functions: {len(self.by_function)} ({escape(names)})"
        return table


def _verdict(case: CaseResult) -> str:
    if not case.passed:
        return "[red]fails[/]"
    count = f" ({case.other_choices})" if case.other_choices else ""
    return f"[green]ok but for {case.excepted}{count}[/]" if case.excepted else "[green]ok[/]"


class VerificationError(AssertionError):
    """The file does not compute what the model computes; ``report`` says where."""

    def __init__(self, report: VerificationReport) -> None:
        worst = max(report.cases, key=lambda case: (not case.passed, case.max_error))
        compared, model_error = "model", ""
        if worst.model_error is not None:
            compared = "reference"
            model_error = f"; the model's own error is {worst.model_error:.1e}"
        super().__init__(
            f"{report.path} differs from the {compared}: max error {worst.max_error:.1e} "
            f"(tolerance {report.tolerance.max:.0e}), RMS {worst.rms_error:.1e} "
            f"({report.tolerance.rms:.0e}) on inputs {worst.shapes}{model_error}"
        )
        self.report = report
