"""What ``dynamo-moe export`` prints and which files it leaves, also where a step fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from dynamo_moe.cli.common import message_of, print_json

if TYPE_CHECKING:
    from dynamo_moe.conversion import ConversionReport
    from dynamo_moe.exporting import ExportReport
    from dynamo_moe.verification import VerificationReport

__all__ = ["Outcome", "named_finally", "unverified"]


@dataclass
class Outcome:
    """The reports of the steps so far.

    Attributes:
        conversion: None if the model was not loaded.
        unmerged: One line about weights that are not merged, or nothing.
        exported: None if nothing was written.
        verification: None if it was not asked for, or did not finish.
    """

    conversion: ConversionReport | None = None
    unmerged: str = ""
    exported: ExportReport | None = None
    verification: VerificationReport | None = None

    @contextmanager
    def printed(self, *, as_json: bool, quiet: bool) -> Iterator[None]:
        """Prints the reports when the body ends, and also when it raises."""
        try:
            with warnings.catch_warnings():
                # export's warning, which the reports hold too.
                warnings.filterwarnings("ignore", r"\d+ MoE modules? (is|are) not converted")
                yield
        except Exception as error:
            self._print(as_json, quiet, message_of(error))
            raise
        self._print(as_json, quiet, None)

    def _print(self, as_json: bool, quiet: bool, error: str | None) -> None:
        if self.conversion is None:
            return
        if as_json:
            plain: dict[str, Any] = self.exported.to_dict() if self.exported else {}
            plain["conversion"] = self.conversion.to_dict()
            plain["verification"] = self.verification and self.verification.to_dict()
            print_json({**plain, "error": error})
        elif not quiet:
            console = Console()
            console.print(self.conversion)
            if self.unmerged:
                console.print(Text(self.unmerged), soft_wrap=True)
            for report in filter(None, (self.exported, self.verification)):
                console.print(report)


def unverified(out: Path) -> Path:
    """Returns where a file is written that gets its name only once it is verified."""
    return out.with_name(f"{out.stem}.unverified{out.suffix}")


@contextmanager
def named_finally(outcome: Outcome, out: Path) -> Iterator[None]:
    """Gives the exported files their names after the body; if it raises, says where they are."""
    exported = outcome.exported
    if exported is None:
        raise ValueError("nothing was exported: there is no file to name")
    try:
        yield
    except Exception as error:
        error.add_note(f"the file is left at {exported.path}, {out} was not written")
        raise
    from dynamo_moe.files import model_files

    files = model_files.rename_model(exported.files, out)
    profile = [
        out.with_name(out.name + file.name.removeprefix(exported.path.name))
        for file in exported.profile
    ]
    for old, new in zip(exported.profile, profile, strict=True):
        old.replace(new)
    outcome.exported = replace(exported, path=out, files=tuple(files), profile=tuple(profile))
    if outcome.verification is not None:
        outcome.verification = replace(outcome.verification, path=out)
