"""What an export leaves: its reports, and files that get their names once they are verified."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

import dynamo_moe
from dynamo_moe.cli.common import message_of, print_json


@dataclass
class Outcome:
    """The reports of the steps of an export so far, also of one that fails.

    Attributes:
        conversion: None if the model was not loaded.
        unmerged: One line about weights that are not merged, or nothing.
        quantization: None if it was not asked for.
        exported: None if nothing was written.
        verification: None if it was not asked for, or did not finish.
    """

    conversion: dynamo_moe.ConversionReport | None = None
    unmerged: str = ""
    quantization: dynamo_moe.QuantizationReport | None = None
    exported: dynamo_moe.ExportReport | None = None
    verification: dynamo_moe.VerificationReport | None = None

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
            plain["quantization"] = self.quantization and self.quantization.to_dict()
            plain["verification"] = self.verification and self.verification.to_dict()
            print_json({**plain, "error": error})
        elif not quiet:
            console = Console()
            console.print(self.conversion)
            if self.unmerged:
                console.print(Text(self.unmerged), soft_wrap=True)
            if self.quantization:
                console.print(Text(str(self.quantization)), soft_wrap=True)
            for report in filter(None, (self.exported, self.verification)):
                console.print(report)


@contextmanager
def named_finally(
    outcome: Outcome, exported: dynamo_moe.ExportReport, written: Path, out: Path
) -> Iterator[None]:
    """Gives the exported files their names after the body; if it raises, says where they are."""
    try:
        yield
    except Exception as error:
        error.add_note(f"the file is left at {exported.path}, {out} was not written")
        raise
    from dynamo_moe.files import model_files
    from dynamo_moe.files.rank_files import rank_path

    if written.is_dir():
        model_files.move_folder(written, out, exported.path)
        path = out / exported.path.relative_to(written)
        files = [out / file.relative_to(written) for file in exported.files]
        profile = [out / file.relative_to(written) for file in exported.profile]
    else:
        moves = [(written, out)]
        if exported.ranks is not None:
            moves = [
                (rank_path(written, rank), rank_path(out, rank)) for rank in range(exported.ranks)
            ]
        files = []
        for old, new in moves:
            moved = [file for file in exported.files if file.name in (old.name, f"{old.name}.data")]
            files += model_files.rename_model(moved, new)
        path = files[0]
        profile = [
            out.with_name(out.name + file.name.removeprefix(exported.path.name))
            for file in exported.profile
        ]
        for old, new in zip(exported.profile, profile, strict=True):
            old.replace(new)
    outcome.exported = replace(exported, path=path, files=tuple(files), profile=tuple(profile))
    if outcome.verification is not None:
        outcome.verification = replace(outcome.verification, path=path)


def unverified(out: Path, *, is_folder: bool) -> Path:
    """Returns what an output is called until it is verified; a folder is a new one."""
    if is_folder:
        return Path(tempfile.mkdtemp(prefix=f"{out.name}.unverified.", dir=out.parent))
    return out.with_name(f"{out.stem}.unverified{out.suffix}")
