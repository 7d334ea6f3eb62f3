"""Plays TensorRT's part with tests/native/host: drives the plugin through both of its phases."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from custom_ops.options import EXPERT_OPTIONS, ROUTER_OPTIONS
from dynamo_moe.moe_nodes.nodes import plugin_version
from moe_cases import Case
from standin import ROOT, SOURCES, build
from trt_plugin.native import library_path

__all__ = [
    "BUILD",
    "NAMES",
    "RTX_VERSION",
    "RUNTIME",
    "SOURCES",
    "VERSIONS",
    "Description",
    "Field",
    "Host",
    "Plugin",
    "attributes_of",
    "build_library",
    "describe",
    "filled",
    "host",
    "inputs_of",
    "serialized",
    "version_of",
]

#: The result of getInferLibVersion(): loggers in version 11 differ from those in 10.
VERSIONS = (101601, 110400)
#: The same of TensorRT for RTX 1.7, with loggers as in version 11.
RTX_VERSION = 10701
BUILD, RUNTIME = 0, 1
NAMES = {"dropless": "DroplessMoE", "experts": "DroplessMoEExperts"}

_HOST = ROOT / "tests" / "native" / "host" / "host.cc"
_DTYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.bool: 4,
    torch.uint8: 5,
    torch.bfloat16: 7,
    torch.int64: 8,
}
# The nodes' inputs in order.
_REQUIRED = {
    "dropless": ("x", "router_weight", "w1", "w2"),
    "experts": ("x", "expert_ids", "expert_weights", "w1", "w2"),
}
_OPTIONAL = {"dropless": ("router_bias", "b1", "b2", "selection_bias"), "experts": ("b1", "b2")}
_TEXT_BYTES = 4096
_ALIGNMENT = 256


class _Dims(ctypes.Structure):
    _fields_ = (("rank", ctypes.c_int32), ("sizes", ctypes.c_int64 * 8))


class _DimsExprs(ctypes.Structure):
    _fields_ = (("rank", ctypes.c_int32), ("symbols", ctypes.c_void_p * 8))


class _TensorDesc(ctypes.Structure):
    _fields_ = (
        ("dims", _Dims),
        ("type", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class _DynamicTensorDesc(ctypes.Structure):
    _fields_ = (("desc", _TensorDesc), ("min", _Dims), ("max", _Dims), ("opt", _Dims))


class _Field(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    )


class _Fields(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int32), ("fields", ctypes.POINTER(_Field)))


@dataclass(frozen=True)
class Field:
    """A plugin field as stored in memory; if data is None, it is a null pointer."""

    FLOAT32: ClassVar = 1
    INT32: ClassVar = 5
    CHAR: ClassVar = 6
    UNKNOWN: ClassVar = 8
    INT64: ClassVar = 10

    type: int
    length: int
    data: bytes | None

    @classmethod
    def of(cls, value: Any) -> Field:
        """The field that TensorRT's parser creates from an attribute."""
        match value:
            case Field():
                return value
            case int():
                return cls(cls.INT32, 1, value.to_bytes(4, "little", signed=True))
            case float():
                return cls(cls.FLOAT32, 1, bytes(ctypes.c_float(value)))
            case str():
                data = value.encode()
                return cls(cls.CHAR, len(data), data)
            case bytes():
                return cls(cls.UNKNOWN, len(value), value)
        raise TypeError(value)


@dataclass(frozen=True)
class Description:
    """A tensor as TensorRT describes it; -1 is an unknown size.

    Attributes:
        shape: Sizes; None if there is no tensor.
        dtype: PyTorch's dtype, or TensorRT's number.
        most: The profile's largest sizes, by default the shape's.
        format: 0 is linear.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype | int
    most: tuple[int, ...] | None = None
    format: int = 0

    def plain(self) -> _TensorDesc:
        number = self.dtype if isinstance(self.dtype, int) else _DTYPES[self.dtype]
        return _TensorDesc(_dims(self.shape), number, self.format, 1.0)

    def dynamic(self) -> _DynamicTensorDesc:
        most = _dims(self.most or self.shape)
        least = _dims([1 if size == -1 else size for size in self.shape or ()])
        return _DynamicTensorDesc(self.plain(), least, most, most)


def describe(tensor: Tensor) -> Description:
    return Description(tuple(tensor.shape), tensor.dtype)


def _dims(sizes: Sequence[int] | None) -> _Dims:
    if sizes is None:
        return _Dims(-1)
    return _Dims(len(sizes), (ctypes.c_int64 * 8)(*sizes))


class Host:
    """A TensorRT of one version, with the plugin's library loaded.

    Args:
        version: The result of getInferLibVersion().
        library: The plugin's library.
        flags: More of the compiler's flags.
    """

    def __init__(self, version: int, library: Path, flags: Sequence[str] = ()) -> None:
        path = build(
            f"host_{version}.so",
            [_HOST],
            *(f"-DHOST_VERSION={version}", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"),
            *(*flags, "-ldl"),
        )
        self.call = ctypes.CDLL(str(path))
        pointers = ("create", "clone", "attach", "field_names", "serialize")
        for name in pointers:
            getattr(self.call, f"host_{name}").restype = ctypes.c_void_p
        for name in ("load", "timing_id", "metadata"):
            getattr(self.call, f"host_{name}").restype = ctypes.c_char_p
        for name in ("has", "has_capability", "message", "supports"):
            getattr(self.call, f"host_{name}").restype = ctypes.c_bool
        self.call.host_workspace.restype = ctypes.c_size_t
        self.live = 0
        self.load(library)

    def load(self, library: Path) -> None:
        """Loads the plugin's library, which logs to the host that loaded it last."""
        reason = self.call.host_load(str(library).encode())
        assert reason is None, reason

    def messages(self) -> list[str]:
        """Returns and clears the log: "own" or "global" logger, severity, text."""
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        taken = []
        while self.call.host_message(buffer, ctypes.c_size_t(_TEXT_BYTES)):
            taken.append(buffer.value.decode())
        return taken

    def has(self, name: str, version: str = "1") -> bool:
        """Whether there is such a creator."""
        return self.call.host_has(name.encode(), version.encode())

    def field_names(self, name: str, version: str = "1") -> dict[str, int]:
        """The types of a creator's fields, by name."""
        names = self.call.host_field_names(name.encode(), version.encode())
        return {field.name.decode(): field.type for field in _collected(names)}

    def create(
        self,
        name: str,
        fields: Mapping[str, Any],
        phase: int = BUILD,
        layer: str = "layers.3.mlp",
        version: str = "1",
    ) -> Plugin | None:
        """Creates a plugin; returns None if the creator refuses."""
        made = [(key.rstrip("*"), Field.of(value)) for key, value in fields.items()]
        kept = [field.data and ctypes.create_string_buffer(field.data) for _, field in made]
        array = (_Field * len(made))(
            *(
                _Field(key.encode(), ctypes.cast(data, ctypes.c_void_p), field.type, field.length)
                for (key, field), data in zip(made, kept, strict=True)
            )
        )
        collection = _Fields(len(made), array)
        texts = (each.encode() for each in (name, version, layer))
        return self.adopt(self.call.host_create(*texts, ctypes.byref(collection), phase))

    def adopt(self, pointer: int | None) -> Plugin | None:
        return None if pointer is None else Plugin(self, pointer)


class Plugin:
    """A plugin; the methods are named after TensorRT's."""

    def __init__(self, host: Host, pointer: int) -> None:
        self.host = host
        self.pointer = ctypes.c_void_p(pointer)
        host.live += 1

    def _call(self, name: str, *arguments: Any) -> Any:
        return getattr(self.host.call, f"host_{name}")(self.pointer, *arguments)

    def describe(self) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call("describe", buffer, ctypes.c_size_t(_TEXT_BYTES))
        return buffer.value.decode()

    def has_capability(self, kind: int) -> bool:
        return self._call("has_capability", kind)

    def clone(self) -> Plugin | None:
        return self.host.adopt(self._call("clone"))

    def attach(self) -> Plugin | None:
        return self.host.adopt(self._call("attach"))

    def destroy(self) -> None:
        self._call("destroy")
        self.pointer = ctypes.c_void_p()
        self.host.live -= 1

    def outputs(self) -> int:
        return self._call("outputs")

    def tactics(self) -> int:
        return self._call("tactics")

    def timing_id(self) -> str:
        return self._call("timing_id").decode()

    def metadata(self) -> str:
        return self._call("metadata").decode()

    def output_type(self, inputs: Sequence[Description]) -> tuple[int, int]:
        """The status, and TensorRT's number for y's dtype."""
        types = (ctypes.c_int32 * len(inputs))(*(each.plain().type for each in inputs))
        result = ctypes.c_int32(-1)
        status = self._call("output_types", ctypes.byref(result), 1, types, len(inputs))
        return status, result.value

    def output_shape(self, inputs: Sequence[Description]) -> tuple[int, list[tuple[int, int]]]:
        """The status, and y's sizes as (input, axis)."""
        shapes = (_DimsExprs * len(inputs))()
        symbols = {}
        for i, each in enumerate(inputs):
            shapes[i].rank = len(each.shape)
            for axis in range(len(each.shape)):
                symbols[16 * (i + 1) + axis] = (i, axis)
                shapes[i].symbols[axis] = 16 * (i + 1) + axis
        result = _DimsExprs()
        status = self._call("output_shapes", shapes, len(inputs), ctypes.byref(result), 1)
        return status, [symbols[symbol] for symbol in result.symbols[: result.rank]]

    def supports(self, position: int, inputs: Sequence[Description], output: Description) -> bool:
        every = _array(_DynamicTensorDesc, [each.dynamic() for each in (*inputs, output)])
        # TensorRT has not yet written the descriptions after this one.
        for later in every[position + 1 :]:
            ctypes.memset(ctypes.byref(later), 0x7F, ctypes.sizeof(later))
        return self._call("supports", position, every, len(inputs), 1)

    def supports_all(self, inputs: Sequence[Description], output: Description) -> bool:
        return all(self.supports(i, inputs, output) for i in range(len(inputs) + 1))

    def configure(self, inputs: Sequence[Description], output: Description) -> int:
        return self._call("configure", *_dynamic(inputs), *_dynamic([output]))

    def workspace(self, inputs: Sequence[Description], output: Description) -> int:
        return self._call("workspace", *_dynamic(inputs), *_dynamic([output]))

    def serialized_at(self) -> int:
        """The address of the only stored field's bytes."""
        (field,) = _collected(self._call("serialize"))
        return field.data

    def serialize(self) -> dict[str, Field]:
        return {
            field.name.decode(): Field(
                field.type,
                field.length,
                ctypes.string_at(
                    field.data, field.length * (4 if field.type == Field.INT32 else 1)
                ),
            )
            for field in _collected(self._call("serialize"))
        }

    def shape_change(self, inputs: Sequence[Description], output: Description) -> int:
        return self._call("shape_change", *_plain(inputs), *_plain([output]))

    def enqueue(
        self,
        inputs: Sequence[Tensor | None],
        output: Tensor,
        workspace: int,
        *,
        descriptions: Sequence[Description] | None = None,
        stream: int = 0,
    ) -> int:
        """Enqueues; the tensors' memory stands in for the device's."""
        described = descriptions or [describe(tensor) for tensor in inputs]
        addresses = [0 if t is None or not t.numel() else t.data_ptr() for t in inputs]
        return self._call(
            "enqueue",
            _plain(described)[0],
            _plain([describe(output)])[0],
            (ctypes.c_void_p * len(inputs))(*addresses),
            (ctypes.c_void_p * 1)(output.data_ptr() if output.numel() else 0),
            ctypes.c_void_p(workspace),
            ctypes.c_void_p(stream),
        )

    def run(
        self,
        inputs: Sequence[Tensor | None],
        size: int,
        descriptions: Sequence[Description] | None = None,
        stream: int = 0,
    ) -> Tensor:
        """Changes the shape and enqueues, with y and the workspace filled with 0xFF (NaN).

        Args:
            inputs: The node's inputs; None has no memory.
            size: Bytes of the workspace. The memory around it must not change.
            descriptions: Descriptions of the inputs, by default those of the tensors.
            stream: The stream.
        """
        x = inputs[0]
        described = descriptions or [describe(tensor) for tensor in inputs]
        assert self.shape_change(described, describe(x)) == 0, self.host.messages()
        bytes_of_y = x.numel() * x.element_size()
        memory = torch.full((_ALIGNMENT + bytes_of_y + 16,), 0xFF, dtype=torch.uint8)
        begin = -memory.data_ptr() % 16
        y = memory[begin : begin + bytes_of_y].view(x.dtype).view(x.shape)
        workspace = torch.full((size + 2 * _ALIGNMENT,), 0xFF, dtype=torch.uint8)
        # Deliberately misaligned: TensorRT does not say how it aligns a workspace.
        first = -workspace.data_ptr() % _ALIGNMENT + 8
        place = workspace.data_ptr() + first
        status = self.enqueue(inputs, y, place, descriptions=descriptions, stream=stream)
        assert status == 0, self.host.messages()
        assert (workspace[:first] == 0xFF).all()
        assert (workspace[first + size :] == 0xFF).all()
        assert (memory[begin + bytes_of_y :] == 0xFF).all()
        return y


def _array(kind: type, values: Sequence[Any]) -> ctypes.Array:
    return (kind * len(values))(*values)


def _plain(descriptions: Sequence[Description]) -> tuple[ctypes.Array, int]:
    return _array(_TensorDesc, [each.plain() for each in descriptions]), len(descriptions)


def _dynamic(descriptions: Sequence[Description]) -> tuple[ctypes.Array, int]:
    return _array(_DynamicTensorDesc, [each.dynamic() for each in descriptions]), len(descriptions)


def _collected(address: int) -> Iterator[_Field]:
    collection = _Fields.from_address(address)
    yield from collection.fields[: collection.count]


def build_library(*flags: str) -> Path:
    """Builds the native library from its sources, with the given compiler flags."""
    library = ("-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ldl", "-pthread")
    return build("libdynamo_moe.so", SOURCES, *library, *flags)


@cache
def _host(version: int, flags: tuple[str, ...]) -> Host:
    return Host(version, library_path(), flags)


def host(version: int, *flags: str) -> Host:
    """A fresh TensorRT host, built with more flags of the compiler."""
    tensorrt = _host(version, flags)
    tensorrt.load(library_path())
    tensorrt.call.host_set_loggers(True, True)
    tensorrt.messages()
    return tensorrt


# --- Cases of the operators as nodes ---


def version_of(case: Case) -> str:
    """The version of the plugin that the case's node names."""
    rare = any(row.rare and row.name in case.options for row in ROUTER_OPTIONS)
    return plugin_version(offloaded=False, rare=rare)


def attributes_of(case: Case) -> dict[str, Any]:
    """All attributes of the case's node."""
    rows = (*EXPERT_OPTIONS, *(ROUTER_OPTIONS if case.op == "dropless" else ()))
    options = {
        row.attribute: case.options.get(row.name, row.default)
        for row in rows
        if not row.rare or version_of(case) != "1"
    }
    w1, w2 = case.arguments["w1"], case.arguments["w2"]
    top_k = case.arguments.get("top_k")
    return {
        "top_k": case.arguments["expert_ids"].shape[-1] if top_k is None else top_k,
        "num_experts": w1.shape[0],
        "in_features": w1.shape[2],
        "hidden_features": w2.shape[2],
    } | {name: int(value) if isinstance(value, bool) else value for name, value in options.items()}


def filled(case: Case) -> Case:
    """The case with zeros for each absent optional input before a present one.

    The exporter writes nodes this way: only the last inputs are omitted.
    """
    a = case.arguments
    present = [name for name in _OPTIONAL[case.op] if a[name] is not None]
    experts, rows, width = a["w1"].shape
    zeros = {
        "router_bias": lambda: a["router_weight"].new_zeros(experts),
        "b1": lambda: a["w1"].new_zeros(experts, rows),
        "b2": lambda: a["w1"].new_zeros(experts, width),
    }
    before = _OPTIONAL[case.op][: _OPTIONAL[case.op].index(present[-1])] if present else ()
    return case.changed(**{name: zeros[name]() for name in before if a[name] is None})


def inputs_of(case: Case) -> list[Tensor]:
    """The inputs of a filled case's node."""
    names = (*_REQUIRED[case.op], *_OPTIONAL[case.op])
    return [case.arguments[name] for name in names if case.arguments[name] is not None]


def serialized(plugin: Plugin) -> bytes:
    """The bundle of the layer's programs that an engine stores."""
    fields = plugin.serialize()
    assert list(fields) == ["programs"]
    programs = fields["programs"]
    assert programs.type == Field.UNKNOWN
    assert programs.data is not None
    return programs.data
