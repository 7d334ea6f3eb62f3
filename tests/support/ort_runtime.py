"""Plays ONNX Runtime's part with tests/native/onnxruntime: operators of the CUDA provider."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from standin import ROOT, build
from trt_plugin.native import library_path

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
DOMAIN, OFFLOADED = "moe", "moe.offloaded"
ENTRY = "dynamo_moe.kernels"
FAIL, INVALID_ARGUMENT = 1, 2
SOURCE = ROOT / "tests" / "native" / "onnxruntime" / "runtime.cc"

_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int32: 6,
    torch.int64: 7,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}
_ALIGNMENT = 256
_FILL = 0xFF


class OrtError(Exception):
    """A status with a message.

    Attributes:
        code: FAIL or INVALID_ARGUMENT.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("data", ctypes.c_void_p),
    )


@cache
def _runtime() -> ctypes.CDLL:
    path = build(
        "ort_runtime.so",
        [SOURCE],
        *("-O1", "-fPIC", "-shared", "-fvisibility=default", "-pthread"),
    )
    library = ctypes.CDLL(str(path))
    for name in ("options_new", "operator", "node_new"):
        getattr(library, f"ort_{name}").restype = ctypes.c_void_p
    for name in ("register", "kernel_new", "call", "message"):
        getattr(library, f"ort_{name}").restype = ctypes.c_char_p
    library.ort_live.restype = ctypes.c_int64
    return library


def _check(failure: bytes | None) -> None:
    if failure is not None:
        raise OrtError(failure.decode(), _runtime().ort_failure_code())


def _tensors(each: Sequence[tuple[int, Sequence[int] | None, int]]) -> ctypes.Array:
    """Tensors of types, sizes (None: an unknown number of them) and addresses."""
    return (_Tensor * len(each))(
        *(
            _Tensor(
                kind, -1 if sizes is None else len(sizes),
                (ctypes.c_int64 * len(sizes or ()))(*(sizes or ())), data,
            )
            for kind, sizes, data in each
        )
    )  # fmt: skip


def live() -> int:
    """The runtime's objects that the library has not released."""
    return _runtime().ort_live()


def messages() -> list[str]:
    """Returns and clears the log: level and text."""
    taken = []
    while (message := _runtime().ort_message()) is not None:
        taken.append(message.decode())
    return taken


def fail_scratch(how: int) -> None:
    """Makes the next request for scratch memory fail: 1 with a status, 2 with null."""
    _runtime().ort_fail_scratch(how)


class Options:
    """A session's options, in which the library is registered.

    Args:
        kernels: The session's entry that names a bundle.
        version: The runtime's version.
    """

    def __init__(
        self,
        kernels: Path | str | None = None,
        *,
        version: str = "1.31.1",
    ) -> None:
        self._call = _runtime()
        self._call.ort_set_version(version.encode())
        self._options = ctypes.c_void_p(self._call.ort_options_new())
        if kernels is not None:
            entry = (ENTRY.encode(), str(kernels).encode())
            self._call.ort_options_entry(self._options, *entry)
        loaded = ctypes.CDLL(str(library_path()))
        register = ctypes.cast(loaded.RegisterCustomOps, ctypes.c_void_p)
        _check(self._call.ort_register(self._options, register))

    def operator(
        self,
        name: str,
        *,
        domain: str = DOMAIN,
        provider: str = CUDA,
        dtype: torch.dtype = torch.float32,
    ) -> int | None:
        """An operator for tokens of a dtype; None if there is none."""
        texts = (each.encode() for each in (domain, name, provider))
        return self._call.ort_operator(self._options, *texts, _TYPES[dtype])

    def kernel(
        self,
        name: str,
        attributes: Mapping[str, Any],
        inputs: Sequence[Tensor | None],
        *,
        domain: str = DOMAIN,
        constants: bool = True,
        ranks: bool = True,
    ) -> Kernel:
        """Makes the kernel of a node.

        Args:
            name: The operator.
            attributes: The node's attributes.
            inputs: The node's inputs; None has an empty name.
            domain: The operator's domain.
            constants: Whether the weights are the file's. Otherwise they are given to each call.
            ranks: Whether the other inputs' numbers of dimensions are known.
        """
        tokens = 3 if "Experts" in name else 1
        described = []
        for index, tensor in enumerate(inputs):
            if tensor is None:
                described.append((0, (), 0))
                continue
            sizes, data = tuple(tensor.shape), 0
            if index < tokens:
                sizes = (*(-1 for _ in sizes[:-1]), *sizes[-1:])
            elif constants:
                data = tensor.data_ptr()
            described.append((_TYPES[tensor.dtype], sizes if ranks or data else None, data))
        node = ctypes.c_void_p(
            self._call.ort_node_new(b"layers.3.mlp", _tensors(described), len(described))
        )
        kinds = {int: ("integer", ctypes.c_int64), float: ("number", ctypes.c_float)}
        for key, value in attributes.items():
            if isinstance(value, str):
                self._call.ort_node_text(node, key.encode(), value.encode())
            else:
                kind, number = kinds[type(value)]
                getattr(self._call, f"ort_node_{kind}")(node, key.encode(), number(value))
        x = inputs[0]
        assert x is not None
        operator = ctypes.c_void_p(self.operator(name, domain=domain, dtype=x.dtype))
        kernel = ctypes.c_void_p()
        try:
            _check(self._call.ort_kernel_new(operator, node, ctypes.byref(kernel)))
        finally:
            # The library reads it only while it makes the kernel.
            self._call.ort_node_free(node)
        return Kernel(self._call, operator, kernel)


class Kernel:
    """A node's kernel."""

    def __init__(
        self, call: ctypes.CDLL, operator: ctypes.c_void_p, kernel: ctypes.c_void_p
    ) -> None:
        self._call, self._operator, self._kernel = call, operator, kernel

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self._call.ort_kernel_free(self._operator, self._kernel)

    def enqueue(self, inputs: Sequence[Tensor | None], y: Tensor, stream: int = 0) -> None:
        """Calls it; the tensors' memory stands in for the device's."""
        described = [
            (0, (), 0) if t is None else (_TYPES[t.dtype], tuple(t.shape), t.data_ptr())
            for t in inputs
        ]
        arguments = (_tensors(described), ctypes.c_size_t(len(described)))
        addresses = (ctypes.c_void_p(y.data_ptr()), ctypes.c_void_p(stream))
        _check(self._call.ort_call(self._operator, self._kernel, *arguments, *addresses))

    def run(self, inputs: Sequence[Tensor | None], stream: int = 0) -> Tensor:
        """Calls it with y filled with 0xFF (NaN); the memory around y must not change."""
        x = inputs[0]
        assert x is not None
        size = x.numel() * x.element_size()
        memory = torch.full((2 * _ALIGNMENT + size,), _FILL, dtype=torch.uint8)
        begin = -memory.data_ptr() % _ALIGNMENT
        y = memory[begin : begin + size].view(x.dtype).view(x.shape)
        self.enqueue(inputs, y, stream)
        assert (memory[:begin] == _FILL).all()
        assert (memory[begin + size :] == _FILL).all()
        return y
