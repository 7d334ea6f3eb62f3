"""Builds the stand-in driver tests/native/standin.cc and loads it into this process."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "trt_plugin" / "csrc"
# A program, which compares with headers that are not here, and a library of its own.
_APART = ("abi_check.cc", "self_registering.cc")
#: The native library's.
SOURCES = sorted(path for path in CSRC.rglob("*.cc") if path.name not in _APART)
OUT_OF_MEMORY = 2
LAUNCH_FAILED = 719


class _Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_char_p),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("stream", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_memory", ctypes.c_uint32),
        ("image", ctypes.c_int32),
        ("dependent", ctypes.c_int32),
    )


class _TensorMap(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_void_p),
        ("mark", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 5),
        ("rank", ctypes.c_uint16),
        ("type", ctypes.c_uint8),
        ("swizzle", ctypes.c_uint8),
    )


class _Operation(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("value", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("event", ctypes.c_void_p),
        ("address", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
    )


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Launch))
_OPERATION_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Operation))
_OPERATIONS = ("record", "wait", "set", "synchronize", "synchronize all")
#: What the launcher has of the driver besides modules.
RESOURCES = ("memory", "registrations", "pinned memory", "streams", "events")


@dataclass(frozen=True)
class TensorMap:
    """The arguments from which a tensor map was encoded, innermost dimension first.

    The strides leave out the innermost dimension.

    Attributes:
        marked: Whether it still has the bit that must not be set for small tensors with drivers up
            to CUDA 13.1.
    """

    base: int
    dtype: int
    swizzle: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    marked: bool


@dataclass(frozen=True)
class Operation:
    """What a stream is asked for besides launches.

    Attributes:
        kind: ``record``, ``wait``, ``set``, ``synchronize`` or ``synchronize all``, as freeing
            memory does.
        stream: 0 is the default stream.
        event: What is recorded or waited for.
        address: Where ``size`` bytes are set to ``value``.
    """

    kind: str
    stream: int
    event: int
    address: int
    size: int
    value: int


@dataclass(frozen=True)
class Launch:
    """A launch as the driver sees it; its parameters can be read while it runs."""

    image: bytes
    function: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_memory: int
    pdl: bool
    stream: int
    context: int
    parameters: ctypes.Array

    def pointer(self, index: int) -> int:
        return ctypes.c_uint64.from_address(self.parameters[index]).value

    def i32(self, index: int) -> int:
        return ctypes.c_int32.from_address(self.parameters[index]).value

    def i64(self, index: int) -> int:
        return ctypes.c_int64.from_address(self.parameters[index]).value

    def tensor_map(self, index: int) -> TensorMap:
        address = self.parameters[index]
        assert address % 64 == 0
        encoded = _TensorMap.from_address(address)
        rank = encoded.rank
        return TensorMap(
            encoded.address,
            encoded.type,
            encoded.swizzle,
            tuple(encoded.sizes[:rank]),
            tuple(encoded.strides[: rank - 1]),
            tuple(encoded.box[:rank]),
            encoded.mark != 0,
        )


class Standin:
    """The driver. Devices, contexts and images are added before the launcher asks for them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.standin_create_context.restype = ctypes.c_void_p
        library.standin_create_stream.restype = ctypes.c_void_p
        pointers = ("destroy_context", "reset_context", "set_context", "create_stream")
        for name in (*pointers, "begin_capture"):
            getattr(library, f"standin_{name}").argtypes = (ctypes.c_void_p,)
        self._images: list[bytes] = []
        self._contexts: list[int] = []
        self.errors: list[BaseException] = []

    def reset(self) -> None:
        """Resets everything except what is still loaded."""
        self.set_context(None)
        for context in self._contexts:
            self._library.standin_destroy_context(context)
        self._library.standin_reset()
        self._images, self._contexts, self.errors = [], [], []

    def add_device(self, architecture: int, shared_memory: int = 232448) -> int:
        return self._library.standin_add_device(architecture, shared_memory)

    def add_image(self, image: bytes) -> None:
        if image not in self._images:
            self._images.append(image)
            self._library.standin_add_image(image, ctypes.c_size_t(len(image)))

    def create_context(self, device: int = 0) -> int:
        context = self._library.standin_create_context(device)
        self._contexts.append(context)
        return context

    def destroy_context(self, context: int) -> None:
        self._contexts.remove(context)
        self._library.standin_destroy_context(context)

    def reset_context(self, context: int) -> None:
        """Replaces it with another context at the same address."""
        self._library.standin_reset_context(context)

    def set_context(self, context: int | None) -> None:
        """Sets the calling thread's context."""
        self._library.standin_set_context(context)

    @property
    def current_context(self) -> int | None:
        """The calling thread's context."""
        context = ctypes.c_void_p()
        self._library.cuCtxGetCurrent(ctypes.byref(context))
        return context.value

    def create_stream(self, context: int) -> int:
        return self._library.standin_create_stream(context)

    def set_capturing(self, capturing: bool) -> None:
        """Sets whether another thread runs a capture that loading and unloading would break."""
        self._library.standin_set_capturing(capturing)

    @property
    def capture_mode(self) -> int:
        """The calling thread's ``CUstreamCaptureMode``; initially 0, global."""
        return self._library.standin_capture_mode()

    def begin_capture(self, stream: int) -> int:
        """Captures a stream, and those that wait for its events; returns the capture."""
        return self._library.standin_begin_capture(stream)

    def end_capture(self, capture: int) -> None:
        """Ends it: what was part of it no longer is."""
        self._library.standin_end_capture(capture)

    def set_registers_read_only(self, registers: bool) -> None:
        """Sets whether devices can pin pages of the host that they only read."""
        self._library.standin_set_registers_read_only(registers)

    def set_version(self, version: int) -> None:
        """Sets the CUDA version that the driver reports: 12080 for 12.8."""
        self._library.standin_set_version(version)

    def fail(self, function: str, result: int, calls_before: int = 0) -> None:
        """Makes one later call of a function fail."""
        self._library.standin_fail(function.encode(), calls_before, result)

    def calls(self, function: str) -> int:
        return self._library.standin_calls(function.encode())

    @property
    def live_modules(self) -> int:
        return self._library.standin_live_modules()

    def live(self) -> dict[str, int]:
        """How much the launcher has of the driver, by the names of :data:`RESOURCES`."""
        return {kind: self._library.standin_live(kind.encode()) for kind in RESOURCES}

    def on_operation(self, handler: Callable[[Operation], None]) -> None:
        """Sets a handler, which does what streams are asked for besides launches."""

        def call(pointer: ctypes._Pointer) -> None:
            raw = pointer.contents
            handler(
                Operation(
                    _OPERATIONS[raw.kind],
                    raw.stream or 0,
                    raw.event or 0,
                    raw.address or 0,
                    raw.size,
                    raw.value,
                )
            )

        self._operation_callback = _OPERATION_CALLBACK(call)
        self._library.standin_on_operation(self._operation_callback)

    def on_launch(self, handler: Callable[[Launch], None]) -> None:
        """Sets a handler for launches. If it raises, the launch fails and the error is kept."""

        def call(pointer: ctypes._Pointer) -> int:
            raw = pointer.contents
            launch = Launch(
                self._images[raw.image],
                raw.function.decode(),
                tuple(raw.grid),
                tuple(raw.block),
                raw.shared_memory,
                bool(raw.dependent),
                raw.stream or 0,
                raw.context,
                raw.parameters,
            )
            try:
                handler(launch)
            except BaseException as error:
                self.errors.append(error)
                return LAUNCH_FAILED
            return 0

        # Kept alive here, because ctypes does not.
        self._callback = _CALLBACK(call)
        self._library.standin_on_launch(self._callback)


def fake_cubin(content: bytes) -> bytes:
    """An ELF file that bundle readers accept as a cubin: one section, and its content."""
    ident, names = b"\x7fELF\x02\x01".ljust(16, b"\0"), 0
    header = (ident, 2, 190, 1, 0, 0, 64, 0, 64, 0, 0, 64, 1, names)
    section = (0, 1, 0, 0, 128, len(content), 0, 0, 0, 0)
    return struct.pack("<16s2HI3QI6H", *header) + struct.pack("<2I4Q2I2Q", *section) + content


_LINKING = ("-l", "-shared", "-Wl,")


def build(name: str, sources: list[Path], *flags: str, compiler: str = "g++") -> Path:
    """Compiles C++ sources into build/tests, unless they are already compiled.

    What several results compile with the same flags is compiled once. Objects are linked as they
    are.
    """
    digest = _digest(compiler, flags, sources)
    folder = ROOT / "build" / "tests" / digest
    result = folder / name
    if not result.exists():
        folder.mkdir(parents=True, exist_ok=True)
        compiling = [flag for flag in flags if not flag.startswith(_LINKING)]
        objects = [
            source if source.suffix == ".o" else compiled(source, *compiling, compiler=compiler)
            for source in sources
        ]
        beside = folder / f"{name}.{os.getpid()}"
        subprocess.run([compiler, *map(str, objects), *flags, "-o", str(beside)], check=True)
        beside.replace(result)
    return result


def compiled(source: Path, *flags: str, compiler: str = "g++") -> Path:
    """The object file of a source; another process that wants the same waits for it."""
    folder = ROOT / "build" / "tests" / "objects"
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / f"{source.stem}-{_digest(compiler, flags, [source])}.o"
    with result.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            beside = result.with_suffix(".new")
            options = ("-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", *flags)
            subprocess.run([compiler, *options, "-c", str(source), "-o", str(beside)], check=True)
            beside.replace(result)
    return result


def _digest(compiler: str, flags: Sequence[str], sources: Sequence[Path]) -> str:
    headers = sorted(
        [*CSRC.rglob("*.h"), *CSRC.rglob("*.inc"), *(ROOT / "tests" / "native").rglob("*.h")]
    )
    digest = hashlib.sha256(repr((compiler, tuple(flags))).encode())
    for file in [*sources, *headers]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def sanitizing(sanitizers: str) -> tuple[str, ...]:
    """Flags of sanitizers; of those whose code is fast, the fastest to compile."""
    recover, frames = "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"
    return (f"-fsanitize={sanitizers}", recover, frames, "-Og", "-g1", "-pthread")


@cache
def standin() -> Standin:
    """The driver of this process: the launcher now finds it as libcuda.so.1."""
    path = build(
        "libcuda.so.1",
        [ROOT / "tests" / "native" / "standin.cc"],
        *("-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"),
    )
    return Standin(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL))
