"""Runs compile tasks in worker processes.

Processes, since Triton holds the interpreter's lock while it compiles; processes of our own rather
than multiprocessing's, since those run the caller's main script again, would compile with
``TRITON_INTERPRET`` where the caller has set it, and do not say which task ended one.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from trt_plugin.compiling.tasks import Compiled, CompileError, Task

# Settings that the caller made for other work with Triton would change the code.
_COMPILER_VARIABLES = ("TRITON_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_", "DISABLE_", "USE_IR_LOC")
_LINES_OF_A_CRASH = 5


def compile_tasks(tasks: Sequence[Task], jobs: int, done: Callable[[Task, Compiled], None]) -> None:
    """Compiles kernels.

    Args:
        tasks: The kernels to compile.
        jobs: Number of processes.
        done: Called for each, in any order and from several threads.

    Raises:
        CompileError: If one does not compile. The others are then stopped.
    """
    if not tasks:
        return
    pending = deque(tasks)
    with tempfile.TemporaryDirectory(prefix="dynamo-moe-") as folder:
        workers = [_Worker(Path(folder), at) for at in range(min(jobs, len(tasks)))]
        try:
            with ThreadPoolExecutor(len(workers)) as threads:
                try:
                    running = [threads.submit(worker.drain, pending, done) for worker in workers]
                    for future in as_completed(running):
                        future.result()
                finally:
                    pending.clear()
                    for worker in workers:
                        worker.kill()
        finally:
            for worker in workers:
                worker.close()


class _Worker:
    """A process that runs trt_plugin.compiling.worker, and the thread's end of it."""

    def __init__(self, folder: Path, number: int) -> None:
        # The folder also holds the temporary files of the process and of the ptxas it runs.
        self.errors = (folder / f"errors-{number}").open("w+b")
        self.process = subprocess.Popen(  # noqa: S603  It is this very Python.
            [sys.executable, *_site(), "-P", "-m", "trt_plugin.compiling.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=_environment(folder),
            text=True,
        )

    def drain(self, pending: deque[Task], done: Callable[[Task, Compiled], None]) -> None:
        """Compiles until nothing is pending."""
        while True:
            try:
                task = pending.popleft()
            except IndexError:
                return
            done(task, _compiled(task, self._run(task)))

    def _run(self, task: Task) -> dict[str, Any]:
        stdin, stdout = self.process.stdin, self.process.stdout
        line = ""
        if stdin and stdout:
            try:
                print(task.to_json(), file=stdin, flush=True)
                line = stdout.readline()
            except OSError:
                pass
        if not line:
            self.process.wait()
            self.errors.seek(0)
            last = self.errors.read().decode(errors="replace").strip().splitlines()
            raise CompileError(
                f"{task} does not compile: the compiler ended with code {self.process.returncode}",
                "\n".join(last[-_LINES_OF_A_CRASH:]),
                task.values,
            )
        result: dict[str, Any] = json.loads(line)
        return result

    def kill(self) -> None:
        """Ends the process, whatever it is doing."""
        self.process.kill()

    def close(self) -> None:
        """Waits for the process to end and closes its files."""
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe:
                pipe.close()


def _site() -> list[str]:
    # Otherwise an editable install's hook could find other packages than the caller's.
    return ["-S"] if sys.flags.no_site else []


def _environment(folder: Path) -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_COMPILER_VARIABLES)
    }
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
        "TMPDIR": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        # Line tables hold the sources' paths: bundles would differ between checkouts.
        "TRITON_DISABLE_LINE_INFO": "1",
    }


def _compiled(task: Task, result: dict[str, Any]) -> Compiled:
    if "error" in result:
        raise CompileError(f"{task} does not compile", result["error"], task.values)
    try:
        return Compiled.of(base64.b64decode(result["cubin"]), result["metadata"])
    except ValueError as error:
        raise CompileError(f"{task} cannot be launched", str(error), task.values) from None
