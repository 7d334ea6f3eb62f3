"""Breaks lines of the core on purpose, one at a time, and asks whether the tests notice.

    python tests/support/mutants.py              # all of them, for an hour
    python tests/support/mutants.py router rules # those whose names contain one of the words

A suite that gets shorter must still kill the same mutants. Each is a line of the packages, the
same line broken, and the tests that should fail (mutants.txt). They run up to the first failure, in
a copy of the checkout with an environment of its own, so that the editable installation is not
touched. A broken line of C++ is compiled into that copy's library. The table says which test killed
each mutant, and the exit code is 1 if one survived, or if a line is not in its file exactly once.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
LIBRARY = Path("trt_plugin/libdynamo_moe.so")
_BUILD = "build/cmake"
# pytest's exit code where tests ran and one failed; others mean that they could not run.
_FAILED = 1


@dataclass(frozen=True)
class Mutant:
    """A line of the packages that is broken.

    Attributes:
        name: What goes wrong.
        file: Where, from the checkout's root.
        line: The text, which the file has exactly once.
        broken: What stands in its place.
        tests: Files of tests, or single ones, from ``tests``, the most likely to notice first.
    """

    name: str
    file: str
    line: str
    broken: str
    tests: tuple[str, ...]


def read_mutants(text: str) -> list[Mutant]:
    """Returns the mutants of a text.

    They are separated by empty lines. Each has its name, its file, "- " and the line, "+ " and what
    stands in its place, and the tests.
    """
    mutants = []
    for block in text.split("\n\n")[1:]:
        name, file, line, broken, *tests = block.strip().splitlines()
        mutants.append(Mutant(name, file, line[2:], broken[2:], tuple(tests)))
    return mutants


MUTANTS = read_mutants(Path(__file__).with_suffix(".txt").read_text())


class Checkout:
    """A copy of this checkout, in which lines are broken and tests run.

    Args:
        folder: Where it is made, empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, names.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self._make_environment()
        self._use_library()

    def _make_environment(self) -> None:
        """Makes an environment that sees the copy first, then what this one has installed.

        The entries of its path are plain ones, so this one's editable installation has no effect.
        """
        venv.create(self.folder / ".venv", symlinks=True)
        self.python = self.folder / ".venv" / "bin" / "python"
        (packages,) = (self.folder / ".venv" / "lib").glob("python*/site-packages")
        installed = [path for path in sys.path if path.endswith("site-packages")]
        lines = [str(self.folder), *installed]
        (packages / "checkout.pth").write_text("\n".join(lines) + "\n")

    def _use_library(self) -> None:
        from trt_plugin.native import library_path

        shutil.copy2(library_path(), self.folder / LIBRARY)

    def check(self, mutant: Mutant, seconds: float) -> str:
        """Breaks a line, runs the tests, and mends it; returns a word and what is behind it."""
        path = self.folder / mutant.file
        whole = path.read_text()
        if whole.count(mutant.line) != 1:
            return f"NO SUCH LINE  {mutant.file} has it {whole.count(mutant.line)} times"
        path.write_text(whole.replace(mutant.line, mutant.broken))
        native = mutant.file.startswith("trt_plugin/csrc")
        try:
            if native:
                self._compile()
            results = (self._run(tests, seconds) for tests in mutant.tests)
            return next(filter(None, results), f"SURVIVED      {' '.join(mutant.tests)}")
        finally:
            path.write_text(whole)
            if native:
                self._use_library()

    def _compile(self) -> None:
        """Builds the library without optimisation; the second time only what was touched."""
        configure = ["cmake", "-S", ".", "-B", _BUILD, "-DCMAKE_BUILD_TYPE=Debug"]
        build = ["cmake", "--build", _BUILD, "--target", "dynamo_moe", "--parallel"]
        for command in (configure, build):
            subprocess.run(command, cwd=self.folder, check=True, capture_output=True)
        shutil.copy2(self.folder / _BUILD / LIBRARY.name, self.folder / LIBRARY)

    def _run(self, tests: str, seconds: float) -> str:
        """Runs a file of tests, or one of them; returns what failed, "" if nothing did."""
        command = [str(self.python), "-m", "pytest", "-qx", "-m", "not every", "--tb=no"]
        try:
            run = subprocess.run(
                [*command, f"tests/{tests}"],
                check=False,
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return f"killed        {tests} does not end in {seconds:.0f} s"
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
        if run.returncode == 0:
            return ""
        if run.returncode < 0:
            return f"killed        {tests} ends by signal {-run.returncode}"
        if run.returncode != _FAILED or not failed:
            return f"CANNOT RUN    {(run.stdout + run.stderr).strip().splitlines()[-1]}"
        return f"killed        {failed[1].removeprefix('tests/')}"


def main() -> None:
    """Tries the mutants."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="words of mutants' names or files; default: all")
    parser.add_argument("--seconds", type=float, default=1800, help="for the tests of one mutant")
    arguments = parser.parse_args()
    words: list[str] = arguments.words
    chosen = [
        mutant
        for mutant in MUTANTS
        if not words or any(word in f"{mutant.name} {mutant.file}" for word in words)
    ]
    results = []
    with TemporaryDirectory() as folder:
        checkout = Checkout(Path(folder))
        for mutant in chosen:
            started = time.monotonic()
            results.append(checkout.check(mutant, arguments.seconds))
            seconds = time.monotonic() - started
            sys.stdout.write(f"{seconds:5.0f} s  {mutant.name:<72}  {results[-1]}\n")
            sys.stdout.flush()
    killed = sum(result.startswith("killed") for result in results)
    sys.stdout.write(f"{killed} of {len(results)} mutants killed\n")
    sys.exit(killed < len(results))


if __name__ == "__main__":
    main()
