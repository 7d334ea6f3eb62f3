"""ONNX files in ONNX Runtime, in this process or in a separate one.

ONNX Runtime can end the process: segmentation faults and failed assertions have been seen while it
loaded a file. Run as a script, this module is a process that loads and runs files for another one.
So it imports neither PyTorch, which takes seconds, nor anything of dynamo_moe.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnxruntime

_BFLOAT16 = 16
"""``onnx.TensorProto.BFLOAT16``, without onnx."""

_EXTERNAL_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
# With its default of 4, products of packed weights round their tokens to 8 bits.
_ACCURACY = ("session.qdq_matmulnbits_accuracy_level", "1")


class RefusedError(ValueError):
    """ONNX Runtime cannot load a file, or run it on the inputs."""


def describe() -> str:
    """Returns the name and version of the runtime.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    import onnxruntime

    return f"ONNX Runtime {onnxruntime.__version__}"


class Runtime(AbstractContextManager["Runtime"]):
    """ONNX Runtime on the CPU, in this process."""

    def __init__(self) -> None:
        self._sessions: list[onnxruntime.InferenceSession] = []

    def __exit__(self, *_: object) -> None:
        self._sessions.clear()

    def load(
        self, model: str | bytes, folder: str = "", library: tuple[str, str] | None = None
    ) -> tuple[int, list[str]]:
        """Makes a session of a file, or of a serialised model with external data in a folder.

        Args:
            model: The file, or the model.
            folder: That of the model's external data.
            library: A library of operators, and a folder where the session notes which nodes run.

        Returns:
            The session's number, and the names of the file's inputs.

        Raises:
            RefusedError: If ONNX Runtime cannot load it.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry(*_ACCURACY)
        if folder:
            options.add_session_config_entry(_EXTERNAL_DATA_FOLDER, folder)
        try:
            if library is not None:
                options.register_custom_ops_library(library[0])
                options.enable_profiling = True
                options.profile_file_prefix = f"{library[1]}/session"
            session = onnxruntime.InferenceSession(
                model, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime's exceptions have no base class of their own.
            raise RefusedError(str(error)) from error
        self._sessions.append(session)
        return len(self._sessions) - 1, [value.name for value in session.get_inputs()]

    def run(
        self, number: int, feeds: Mapping[str, np.ndarray], outputs: Sequence[str]
    ) -> list[np.ndarray]:
        """Runs a session, and returns the named outputs; bfloat16 is that of ml_dtypes.

        Raises:
            RefusedError: If ONNX Runtime cannot run the file on these inputs.
        """
        session = self._sessions[number]
        try:
            values = {name: _to_ort(array) for name, array in feeds.items()}
            return [_to_numpy(value) for value in session.run_with_ort_values(outputs, values)]
        except Exception as error:
            raise RefusedError(str(error)) from error

    def nodes_run(self, number: int) -> list[tuple[str, str]]:
        """Returns the operator and the name of each node that a session with a library has run."""
        events = json.loads(Path(self._sessions[number].end_profiling()).read_bytes())
        ending = "_kernel_time"
        return [
            (event["args"]["op_name"], event["name"].removesuffix(ending))
            for event in events
            if event["name"].endswith(ending)
        ]


class RuntimeProcess(Runtime):
    """The same in a separate process; if that dies, the call raises ChildProcessError.

    Args:
        timeout: Seconds after which a load or a run raises TimeoutError; None: any number.
    """

    def __init__(self, timeout: float | None = None) -> None:
        super().__init__()
        self._timeout = timeout
        self._expired = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  Closed with the process.
        # -P: this file's folder has modules that must not stand in for others.
        self._process = subprocess.Popen(  # noqa: S603  This Python, and this very file.
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )
        self._stdin: Any = self._process.stdin
        self._stdout: Any = self._process.stdout

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def load(
        self, model: str | bytes, folder: str = "", library: tuple[str, str] | None = None
    ) -> tuple[int, list[str]]:
        """As :meth:`Runtime.load`."""
        asked = "load", model, folder, library
        loaded: tuple[int, list[str]] = self._ask("loading the file", *asked)
        return loaded

    def run(
        self, number: int, feeds: Mapping[str, np.ndarray], outputs: Sequence[str]
    ) -> list[np.ndarray]:
        """As :meth:`Runtime.run`."""
        asked = "run", number, dict(feeds), list(outputs)
        results: list[np.ndarray] = self._ask("running the file", *asked)
        return results

    def nodes_run(self, number: int) -> list[tuple[str, str]]:
        """As :meth:`Runtime.nodes_run`."""
        found: list[tuple[str, str]] = self._ask("reading the profile", "nodes_run", number)
        return found

    def _ask(self, doing: str, method: str, *args: Any) -> Any:
        timer = threading.Timer(self._timeout or 0, self._expire)
        if self._timeout is not None:
            timer.start()
        try:
            pickle.dump((method, args), self._stdin, protocol=5)
            self._stdin.flush()
            refused, answer = pickle.load(self._stdout)  # noqa: S301  Our own process wrote it.
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise self._end(doing) from error
        finally:
            timer.cancel()
        if refused:
            raise RefusedError(answer)
        return answer

    def _expire(self) -> None:
        self._expired = True
        self._process.kill()

    def _end(self, doing: str) -> OSError:
        code = self._process.wait()
        if self._expired:
            return TimeoutError(f"ONNX Runtime took more than {self._timeout:g} s for {doing}")
        end = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        self._stderr.seek(0)
        *_, last = [b"", *filter(None, self._stderr.read().splitlines())]
        reason = f": {last.decode(errors='replace').strip()}" if last else ""
        return ChildProcessError(f"ONNX Runtime {end} while {doing}{reason}")


def _to_ort(array: np.ndarray) -> onnxruntime.OrtValue:
    import onnxruntime

    # ascontiguousarray gives a scalar an axis.
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.name != "bfloat16":
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    bits = array.view(np.uint16)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _BFLOAT16)


def _to_numpy(value: onnxruntime.OrtValue) -> np.ndarray:
    if value.data_type() != "tensor(bfloat16)":
        result: np.ndarray = value.numpy()
        return result
    import ml_dtypes

    # ONNX Runtime cannot convert it to NumPy.
    shape = value.shape()
    size = 2 * int(np.prod(shape))
    content = ctypes.string_at(value.data_ptr(), size)
    return np.frombuffer(bytearray(content), ml_dtypes.bfloat16).reshape(shape)


def _serve() -> None:
    """Answers requests until there are no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What ONNX Runtime prints must not come between answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    runtime = Runtime()
    while True:
        try:
            method, args = pickle.load(sys.stdin.buffer)  # noqa: S301  Our own process wrote it.
        except EOFError:
            return
        try:
            answer = False, getattr(runtime, method)(*args)
        except RefusedError as error:
            answer = True, str(error)
        pickle.dump(answer, answers, protocol=5)
        answers.flush()


if __name__ == "__main__":
    _serve()
