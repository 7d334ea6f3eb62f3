"""The operators on CUDA tokens with the experts in pinned host memory: R of them on the device.

w1 and w2 alone, packed ones with their scales and zero points, lie in host memory, which the device
reads; all else is on the device. A cache of R experts per layer and device persists from call to
call, see :mod:`custom_ops.kernels.residency`. :func:`offload_experts` makes it; a layer that nobody
offloaded gets one at its first call, of :func:`default_resident_experts`. It lives as long as the
memory of both weights.

A cache follows its calls from stream to stream. It is empty at first, after a call of which a
launch failed, and once a weight has changed in place. A CUDA graph captures a layer only when its
cache need not be emptied; the replays are calls like others, and the caller orders them with those
on other streams. Weights must not be freed while the device computes. There are no gradients.

Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K = top_k.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from custom_ops import _cuda, _grouped
from custom_ops.expert_weights import ExpertWeights, PackedExperts
from custom_ops.offload import cache_bytes
from custom_ops.options import ExpertOptions, RouterOptions
from custom_ops.packed_weights import PackedWeight
from custom_ops.weight_formats import STORED_SUFFIXES

if TYPE_CHECKING:
    from custom_ops.kernels.spec import ForwardPlan

# E, the device, and addresses and bytes of the tensors: parts of a weight have its address.
_Key = tuple[int, torch.device, tuple[tuple[int, int], ...]]


def forward_of(x: Tensor, w1: Tensor) -> Callable[..., Tensor]:
    """Returns the function that computes a call, by where its tokens and its experts are."""
    if not x.is_cuda:
        return _grouped.forward
    return _cuda.forward if w1.is_cuda else forward


def forward(
    x_TD: Tensor,
    routing: Mapping[str, Any],
    parameters: ExpertWeights | PackedExperts,
    options: ExpertOptions,
    router: RouterOptions | None = None,
) -> Tensor:
    """Computes the same as :func:`custom_ops._cuda.forward`, to the bit.

    Raises:
        ValueError: If w1 or w2 is not pinned or would have to be copied, there are no kernels for
            the layer, or it has more tokens than they count.
        TypeError: If there are no kernels for a dtype.
        RuntimeError: If a CUDA graph captures a call that must empty the cache: the first one, or
            the next after a failure or a change of the weights.
    """
    fields = _cuda.layer_fields(x_TD, routing, parameters, options, router)
    tensors = _cuda.readable(x_TD, routing, parameters)
    weights = _cuda.stored(parameters)
    for name, weight in weights.items():
        if tensors[name].data_ptr() != weight.data_ptr():
            raise ValueError(
                f"{name} is in host memory, where it must be contiguous, or the transpose of what "
                f"is, and begin at a multiple of 16 bytes; got strides {weight.stride()}"
            )
    cache = _cache_of(weights, x_TD.device, fields["top_k"])
    plan = _plan(x_TD.device, resident_experts=cache.resident, **fields)
    if x_TD.shape[0] > plan.ranges[-1].last:
        raise ValueError(
            f"with experts in host memory, x must have at most {plan.ranges[-1].last} tokens, "
            f"got {x_TD.shape[0]}"
        )
    tensors["y"] = y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    if x_TD.shape[0]:
        with torch.cuda.device(x_TD.device):
            cache.launch(plan, tensors, tuple(map(_change_count, weights.values())))
    return y_TD


def offload_experts(
    w1: Tensor | PackedWeight,
    w2: Tensor | PackedWeight,
    resident_experts: int,
    device: torch.device | str = "cuda",
) -> None:
    """Makes, or makes anew, the cache of a layer whose experts are in pinned host memory.

    It takes :func:`custom_ops.offload.cache_bytes` of the device's memory until either weight is
    freed. Weights that change in place are copied to the slots anew, where PyTorch counts the
    change: not through ``data``, nor in inference mode's tensors.

    Graphs of the layer write the old cache, which is freed: capture them anew. The caller orders
    their replays with calls on other streams. Before weights are freed, or a layer is offloaded
    again, synchronise with the device if it may still compute.

    Args:
        w1: ``[E, F, D]`` or ``[E, D, F]``, as it lies; or the tensors that pack it, of
            :func:`custom_ops.experts_packed`.
        w2: ``[E, D, H]`` or ``[E, H, D]``, as it lies; packed where w1 is.
        resident_experts: R, in ``1..E``.
        device: Where the layer computes; without an index, the current CUDA device.

    Raises:
        ValueError: If a weight is not in pinned host memory, the two have other numbers of experts,
            or R is not in ``1..E``.
        TypeError: If R is no integer.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    with _LOCK:
        _make(_named("w1", w1) | _named("w2", w2), resident_experts, device)


def _named(name: str, weight: Tensor | PackedWeight) -> dict[str, Tensor]:
    tensors = (weight,) if isinstance(weight, Tensor) else weight
    named = zip(STORED_SUFFIXES, tensors, strict=False)
    return {name + suffix: tensor for suffix, tensor in named if tensor is not None}


def default_resident_experts(experts: int, top_k: int) -> int:
    """Returns R for a layer that nobody offloaded: a quarter of E, but no fewer than K."""
    return min(experts, max(top_k, -(-experts // 4)))


class _Cache:
    """A layer's slots and tables on a device, and the launcher of its calls.

    Attributes:
        resident: R.
    """

    def __init__(self, resident: int, size: int, device: torch.device) -> None:
        self.resident = resident
        # A tensor made in inference mode could not be emptied outside of it.
        with torch.cuda.device(device), torch.inference_mode(mode=False):
            self._state = torch.zeros(size, dtype=torch.uint8, device=device)
            # Copies must not queue behind products, whose programs stay until all work is done.
            self._side = torch.cuda.Stream(device, priority=-1)
            self._stream = torch.cuda.current_stream(device)
            self._ended = self._stream.record_event()
        # The change counts of the weights that are in the slots; None where the tables are to be
        # emptied.
        self._cached_counts: tuple[int, ...] | None = None
        self._lock = threading.Lock()

    def launch(
        self, plan: ForwardPlan, tensors: dict[str, Tensor], change_counts: tuple[int, ...]
    ) -> None:
        """Runs a call on the current stream, behind the cache's earlier calls."""
        from custom_ops.kernels.launch_waves import launch_in_waves

        with self._lock:
            is_valid = self._cached_counts == change_counts
            if torch.cuda.is_current_stream_capturing():
                if not is_valid:
                    raise RuntimeError(_NOT_IN_A_CAPTURE)
                launch_in_waves(plan, tensors, self._state, self._side)
                return
            stream = torch.cuda.current_stream()
            self._follow(stream)
            self._cached_counts = None
            try:
                if not is_valid:
                    self._state[: plan.tables_size].zero_()
                launch_in_waves(plan, tensors, self._state, self._side)
            finally:
                self._ended = stream.record_event()
            self._cached_counts = change_counts

    def _follow(self, stream: torch.cuda.Stream) -> None:
        if stream != self._stream:
            stream.wait_event(self._ended)
            self._state.record_stream(stream)
            self._stream = stream


_NOT_IN_A_CAPTURE = (
    "the cache must be emptied, in a capture: a layer with experts in host memory must run once "
    "before a CUDA graph captures it, and again if its weights changed or a call failed"
)
_CACHES: dict[_Key, _Cache] = {}
# A thread that holds it may allocate, by which Python may free weights, and so their caches.
_LOCK = threading.RLock()


def _cache_of(weights: Mapping[str, Tensor], device: torch.device, top_k: int) -> _Cache:
    key = _key(weights, device)
    cache = _CACHES.get(key)
    if cache is not None:
        return cache
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(_NOT_IN_A_CAPTURE)
    with _LOCK:
        resident = default_resident_experts(len(weights["w1"]), top_k)
        return _CACHES.get(key) or _make(weights, resident, device)


def _key(weights: Mapping[str, Tensor], device: torch.device) -> _Key:
    places = tuple((weight.data_ptr(), weight.nbytes) for weight in weights.values())
    return len(weights["w1"]), device, places


def _make(weights: Mapping[str, Tensor], resident: int, device: torch.device) -> _Cache:
    for name, weight in weights.items():
        if weight.device.type != "cpu":
            raise ValueError(f"{name} is on {weight.device}: experts are offloaded to host memory")
        if not weight.is_pinned():
            raise ValueError(
                f"{name} is in host memory that the device cannot read: pin it by "
                f"{name}.pin_memory(), or offload the model by dynamo_moe.offload; under autocast, "
                "its dtype must be autocast's"
            )
    experts = len(weights["w1"])
    for name, weight in weights.items():
        if len(weight) != experts:
            raise ValueError(f"w1 has {experts} experts, {name} has {len(weight)}")
    if isinstance(resident, bool) or not isinstance(resident, int):
        raise TypeError(f"resident_experts must be an integer, got {resident!r}")
    if not 1 <= resident <= experts:
        raise ValueError(f"resident_experts must be in 1..{experts}, got {resident}")
    size = cache_bytes(experts, resident, (weight[0].nbytes for weight in weights.values()))
    key = _key(weights, device)
    if key not in _CACHES:
        for weight in weights.values():
            # The storage, since the tensor may be a view of the weight's memory.
            weakref.finalize(weight.untyped_storage(), _forget, key).atexit = False
    _CACHES[key] = made = _Cache(resident, size, device)
    return made


def _forget(key: _Key) -> None:
    """Drops the cache of weights of which one is gone."""
    with _LOCK:
        _CACHES.pop(key, None)


def _change_count(weight: Tensor) -> int:
    """Returns how often a weight was changed in place; 0 where PyTorch does not count."""
    return 0 if weight.is_inference() else getattr(weight, "_version", 0)


@lru_cache(maxsize=1024)
def _plan(device: torch.device, **fields: Any) -> ForwardPlan:
    from custom_ops.kernels.architectures import nearest_architecture
    from custom_ops.kernels.plan import plan

    try:
        layer = _cuda.layer_of(**fields)
    except (TypeError, ValueError) as error:
        raise type(error)(f"with experts in host memory: {error}") from error
    return plan(layer, nearest_architecture(*torch.cuda.get_device_capability(device)))
