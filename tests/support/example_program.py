"""examples/run_engine upon stand-ins of TensorRT's and CUDA's runtimes; ONNX Runtime computes.

Run as a script, it runs the program once, in a process of its own: the program's output must be
flushed, and an error in its C++ must not end the tests. Arguments: the library of the program, the
ONNX file that its engine stands for, where to write the report, then the program's own.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "run_engine"
STANDIN = ROOT / "tests" / "native" / "tensorrt"
COMPILER = ("g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{EXAMPLE}")

#: Of each input, the smallest, usual and largest shape.
Profile = Mapping[str, Sequence[Sequence[int]]]

# ONNX Runtime's name, TensorRT's number and NumPy's dtype.
_TYPES: dict[str, tuple[int, Any]] = {
    "tensor(float)": (0, np.float32),
    "tensor(float16)": (1, np.float16),
    "tensor(int32)": (3, np.int32),
    "tensor(int64)": (8, np.int64),
}
_DTYPES = dict(_TYPES.values())


@dataclass(frozen=True)
class Ran:
    """What a run of the program said, and what its GPU would have done."""

    code: int
    out: str
    error: str
    report: dict[str, int]

    @property
    def rows(self) -> list[list[int]]:
        """The ids that it wrote after each prompt."""
        lines = [line.split(":") for line in self.out.splitlines() if line.startswith("row ")]
        return [[int(token) for token in ids.split()] for _, ids in lines]


def compile_program(library: Path) -> None:
    """Compiles all of the example, with the stand-ins in place of the libraries that it links."""
    cuda = files("triton.backends.nvidia") / "include"
    sources = (*EXAMPLE.glob("*.cc"), *STANDIN.glob("*.cc"))
    flags = (f"-I{STANDIN}", "-isystem", str(cuda), "-shared", "-fPIC", "-o", str(library))
    subprocess.run([*COMPILER, *map(str, sources), *flags], check=True)


def write_engine(model: Path, engine: Path, profiles: Sequence[Profile]) -> None:
    """Writes the engine that stands for an ONNX file, as the stand-in reads it."""
    session = onnxruntime.InferenceSession(model)
    nodes = onnx.load(model, load_external_data=False).graph.node
    updated = {node.output[0]: node.input[0] for node in nodes if node.op_type == "TensorScatter"}
    lines = [str(len(profiles))]
    for is_input, values in ((1, session.get_inputs()), (0, session.get_outputs())):
        for value in values:
            shapes: list[Sequence[int]] = [
                [-1 if isinstance(size, str) else size for size in value.shape]
            ]
            shapes += [shape for each in profiles if is_input for shape in each[value.name]]
            text = "  ".join(f"{len(shape)} {' '.join(map(str, shape))}" for shape in shapes)
            end = "" if is_input else f" {updated.get(value.name, '-')}"
            lines.append(f"{value.name} {is_input} {_TYPES[value.type][0]} {text}{end}")
    engine.write_text("\n".join(lines))


def run_program(library: Path, model: Path, engine: Path, *arguments: str, **variables: str) -> Ran:
    """Runs the program with an engine that stands for an ONNX file."""
    return start_program(library, model, engine, *arguments, **variables)()


def start_program(
    library: Path, model: Path, engine: Path, *arguments: str, **variables: str
) -> Callable[[], Ran]:
    """Starts the program with environment variables; returns what waits for its end."""
    report = engine.with_suffix(f".report{variables.get('RANK', '')}")
    report.unlink(missing_ok=True)
    command = [sys.executable, __file__, library, model, report, engine, *arguments]
    pipe = subprocess.PIPE
    started = subprocess.Popen(
        [str(each) for each in command],
        stdout=pipe,
        stderr=pipe,
        text=True,
        env={**os.environ, **variables},
    )

    def end() -> Ran:
        out, error = started.communicate()
        assert report.exists(), error
        return Ran(started.returncode, out, error, json.loads(report.read_text()))

    return end


class _Dims(ctypes.Structure):
    _fields_ = (("rank", ctypes.c_int32), ("sizes", ctypes.c_int64 * 8))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("is_input", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("shape", _Dims),
        ("address", ctypes.c_void_p),
    )

    def array(self) -> np.ndarray:
        """Returns the tensor, which shares its memory; zeros where it has none."""
        shape, dtype = self.shape.sizes[: self.shape.rank], np.dtype(_DTYPES[self.type])
        if self.address is None:
            return np.zeros(shape, dtype)
        memory = (ctypes.c_char * (int(np.prod(shape)) * dtype.itemsize)).from_address(self.address)
        return np.frombuffer(memory, dtype).reshape(shape)


_COMPUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(_Tensor))


def _compute(session: onnxruntime.InferenceSession, tensors: Sequence[_Tensor]) -> None:
    feeds = {tensor.name.decode(): tensor.array() for tensor in tensors if tensor.is_input}
    outputs = [tensor for tensor in tensors if not tensor.is_input]
    results = session.run([tensor.name.decode() for tensor in outputs], feeds)
    for tensor, result in zip(outputs, results, strict=True):
        tensor.shape = _Dims(result.ndim, result.shape)
        if tensor.address is not None:
            tensor.array()[...] = result


def _numbers(library: ctypes.CDLL) -> Iterator[tuple[str, int]]:
    yield "bytes_to_host", ctypes.c_int64.in_dll(library, "standin_bytes_to_host").value
    yield "profile_changes", ctypes.c_int32.in_dll(library, "standin_profile_changes").value
    for name in ("device", "ranks", "rank"):
        yield name, ctypes.c_int32.in_dll(library, f"standin_{name}").value
    library.standin_allocations.restype = ctypes.c_int64
    yield "allocations_left", library.standin_allocations()


def _run_once(library_path: str, model: str, report: str, *arguments: str) -> int:
    library = ctypes.CDLL(library_path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options)

    def compute(count: int, tensors: Any) -> int:
        try:
            _compute(session, tensors[:count])
        except Exception as error:
            # No exception passes through C++.
            sys.stderr.write(f"{error}\n")
            return 1
        return 0

    callback = _COMPUTE(compute)
    ctypes.c_void_p.in_dll(library, "standin_compute").value = ctypes.cast(
        callback, ctypes.c_void_p
    ).value
    values = [b"run_engine", *(argument.encode() for argument in arguments)]
    code = int(library.main(len(values), (ctypes.c_char_p * len(values))(*values)))
    Path(report).write_text(json.dumps(dict(_numbers(library))))
    return code


if __name__ == "__main__":
    sys.exit(_run_once(*sys.argv[1:]))
