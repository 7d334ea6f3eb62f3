"""NCCL's communicator of a process group, which engines of several ranks sum with.

NCCL is opened when it is asked for, and never linked. The functions are those of NCCL's public
header, ``nccl.h``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_void_p
from typing import TYPE_CHECKING, Any

from trt_plugin.engine.installed import EngineError

if TYPE_CHECKING:
    import torch.distributed as dist

_LIBRARY = "libnccl.so.2"
# TensorRT takes 2.19 to below 3.
_OLDEST, _TOO_NEW = 21900, 30000


class _UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = (("internal", c_char * 128),)


class Communicator:
    """A rank's communicator; it is destroyed with this object.

    Args:
        group: A process group of all ranks, of any backend; NCCL's id goes through it. Every rank
            of it makes one, each with a CUDA device of its own, the current one.

    Raises:
        EngineError: If NCCL is missing, has a version that TensorRT does not take, or fails.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        import torch.distributed as dist

        self._handle = c_void_p()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise EngineError("this process is not in the group of the engine's ranks")
        identity, failure = _UniqueId(), ""
        try:
            self._library = _opened()
            if rank == 0:
                self._check("ncclGetUniqueId", self._library.ncclGetUniqueId(byref(identity)))
        except EngineError as error:
            failure = str(error)
        said = _say(group, bytes(identity), failure)
        for number, (_, reason) in enumerate(said):
            if reason:
                raise EngineError(f"rank {number} of {ranks}: {reason}")
        joined = _UniqueId.from_buffer_copy(said[0][0])
        result = self._library.ncclCommInitRank(byref(self._handle), ranks, joined, rank)
        self._check("ncclCommInitRank", result)

    def __del__(self) -> None:
        if self._handle.value is not None:
            self._library.ncclCommDestroy(self._handle)

    @property
    def capsule(self) -> Any:
        """The ``ncclComm_t`` as TensorRT's Python API takes it."""
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (c_void_p, c_char_p, c_void_p)
        return make(self._handle, None, None)

    def _check(self, function: str, result: int) -> None:
        if result != 0:
            reason = self._library.ncclGetErrorString(result).decode(errors="replace")
            raise EngineError(f"NCCL's {function} failed: {reason}")


@contextmanager
def before_joining(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Lets the other ranks, which wait in :class:`Communicator`, know of a failure inside."""
    try:
        yield
    except Exception as error:
        if group is not None:
            _say(group, b"", str(error) or type(error).__name__)
        raise


def _say(group: dist.ProcessGroup, identity: bytes, failure: str) -> list[tuple[bytes, str]]:
    """Returns what all ranks say, in order: NCCL's id, if it is rank 0, or why a rank fails."""
    import torch.distributed as dist

    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (identity, failure), group=group)
    return said


def _opened() -> Any:
    """Returns NCCL's library, its functions declared."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise EngineError(
            f"an engine of several ranks needs NCCL, and {_LIBRARY} cannot be opened ({error}): "
            "install it, or a PyTorch that brings it"
        ) from error
    library.ncclGetUniqueId.argtypes = (POINTER(_UniqueId),)
    library.ncclCommInitRank.argtypes = (POINTER(c_void_p), c_int, _UniqueId, c_int)
    library.ncclCommDestroy.argtypes = (c_void_p,)
    library.ncclGetErrorString.argtypes = (c_int,)
    library.ncclGetErrorString.restype = c_char_p
    version = c_int()
    library.ncclGetVersion(byref(version))
    if not _OLDEST <= version.value < _TOO_NEW:
        raise EngineError(
            f"TensorRT needs NCCL from 2.19 to below 3; {_LIBRARY} has the version code "
            f"{version.value}"
        )
    return library
