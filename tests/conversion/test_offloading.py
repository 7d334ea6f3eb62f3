"""``offload``: whose weights move where, and how many experts a layer keeps on the device.

The device is mocked: what is on it are CPU tensors, and the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_converted_modules import Listed, Stacked
from torch import Tensor, nn

import dynamo_moe
from custom_ops.offload import cache_bytes
from custom_ops.offload import calls as offload_calls
from custom_ops.offload.calls import _CACHES
from dynamo_moe.models import DroplessMoEMlp
from mocked_device import mocked_device

EXPERTS = 4


@pytest.fixture(autouse=True)
def device(monkeypatch):
    pinned: set[int] = set()

    def pin_memory(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        pinned.add(copy.untyped_storage().data_ptr())
        return copy

    for state in mocked_device(monkeypatch):
        monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(Tensor, "is_pinned", lambda t: t.untyped_storage().data_ptr() in pinned)
        yield state


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(DroplessMoEMlp(16, 24, num_experts=EXPERTS, top_k=2) for _ in range(2)))


def converted(model: nn.Sequential) -> nn.Sequential:
    model = model.eval().requires_grad_(False)
    report = dynamo_moe.convert(model)
    assert report.replaced
    return model


class Fused(Listed):
    """Gate and up in one stack, which the operator reads as it lies."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.w13 = nn.Parameter(torch.randn(4, 48, 16) / 4)
        self.w2 = nn.Parameter(torch.randn(4, 16, 24) / 5)

    def run(self, expert: int, x: Tensor) -> Tensor:
        gate, up = (x @ self.w13[expert].T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.w2[expert].T


KINDS = {
    "mlp": mlp,
    "listed": lambda: nn.Sequential(Listed(), Listed()),
    "fused": lambda: nn.Sequential(Fused(), Fused()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_computes_the_same_from_host_memory(kind, monkeypatch):
    model = converted(KINDS[kind]())
    x = torch.randn(9, 16)
    expected = model(x)
    residents = dynamo_moe.offload(model, 2, device="cpu")
    assert residents == {str(place): 2 for place in range(len(model))}
    experts = [p for p in model.parameters() if p.numel() >= 16 * 24]
    assert experts
    assert all(each.is_pinned() for each in experts)
    assert not any(p.is_pinned() for p in model.parameters() if p.numel() < 16 * 24)
    caches = {*_CACHES}
    assert len(caches) == len(model)
    # What is on the device runs the kernels, with the caches that are there.
    monkeypatch.setattr(offload_calls, "forward_of", lambda *_: offload_calls.forward)
    for _ in range(2):
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert {*_CACHES} == caches
    # Another number of slots needs no other memory.
    addresses = [each.data_ptr() for each in experts]
    dynamo_moe.offload(model, 3, device="cpu")
    assert [each.data_ptr() for each in experts] == addresses
    assert {each.resident for each in _CACHES.values()} == {3}


@pytest.mark.parametrize("zero_points", [False, True])
def test_packed_experts_too(zero_points, monkeypatch):
    model = converted(nn.Sequential(Listed(), Listed()))
    dynamo_moe.quantize(model, group=8, zero_points=zero_points)
    x = torch.randn(9, 16)
    expected = model(x)
    packed = [each for name, each in model.named_buffers() if ".w" in name]
    assert len(packed) == (12 if zero_points else 8)
    sizes = [each[0].nbytes for each in packed[: len(packed) // 2]]
    memory = 2 * cache_bytes(EXPERTS, 3, sizes)
    assert dynamo_moe.offload(model, memory=memory, device="cpu") == {"0": 3, "1": 3}
    assert dynamo_moe.offload(model, memory=memory - 1, device="cpu") == {"0": 2, "1": 2}
    dynamo_moe.offload(model, 2, device="cpu")
    assert all(each.is_pinned() for name, each in model.named_buffers() if ".w" in name)
    assert {each.resident for each in _CACHES.values()} == {2}
    caches = {*_CACHES}
    monkeypatch.setattr(offload_calls, "forward_of", lambda *_: offload_calls.forward)
    for _ in range(2):
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert {*_CACHES} == caches


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_ranks_own_experts(kind, packed, monkeypatch):
    """Of three ranks the first has two experts, the others one; their results sum to the whole."""
    model = converted(KINDS[kind]())[:1]
    reference = copy.deepcopy(model)
    if packed:
        dynamo_moe.quantize(reference, group=8)
    x = torch.randn(9, 16)
    expected = reference(x)
    total = torch.zeros_like(x)
    monkeypatch.setattr(offload_calls, "forward_of", lambda *_: offload_calls.forward)
    for rank, count in enumerate((2, 1, 1)):
        with dynamo_moe.sharded(model, rank, 3):
            if packed:
                dynamo_moe.quantize(model, group=8)
            assert dynamo_moe.offload(model, 2, device="cpu") == {"0": count}
            tensors = [*model.named_parameters(), *model.named_buffers()]
            experts = [each for name, each in tensors if ".part.w" in name]
            assert experts
            assert all(each.is_pinned() and len(each) == count for each in experts)
            assert [each.resident for each in _CACHES.values()] == [count]
            total += model(x)
        del tensors, experts
        _CACHES.clear()
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)
    monkeypatch.undo()


def test_an_offloaded_model_is_not_sharded():
    model = converted(mlp())
    dynamo_moe.offload(model, 2, device="cpu")
    with (
        pytest.raises(ValueError, match=r"'0' are in pinned memory.*: offload a model once it is"),
        dynamo_moe.sharded(model, 0, 2),
    ):
        pass


def experts_of(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.numel() >= 16 * 24]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_changed_weights_are_used(kind, inference, monkeypatch):
    model = converted(KINDS[kind]())
    with torch.inference_mode(inference):
        dynamo_moe.offload(model, EXPERTS, device="cpu")
    x, changed = torch.randn(9, 16), copy.deepcopy(model)
    state = {name: each * 1.5 for name, each in model.state_dict().items()}
    changed.load_state_dict(state)
    expected = changed(x)
    monkeypatch.setattr(offload_calls, "forward_of", lambda *_: offload_calls.forward)
    with torch.no_grad():
        before = model(x)
        model.load_state_dict(state)
        for _ in range(2):
            torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(before, expected, atol=1e-4, rtol=1e-4)
    assert all(each.is_pinned() for each in experts_of(model))


@pytest.mark.parametrize("kind", ["listed", "fused"])
def test_offloaded_models_compile(kind, monkeypatch):
    model = converted(KINDS[kind]())
    x = torch.randn(9, 16)
    expected = model(x)
    dynamo_moe.offload(model, 2, device="cpu")
    monkeypatch.setattr(offload_calls, "forward_of", lambda *_: offload_calls.forward)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize("kind", KINDS)
def test_a_layers_old_memory_is_freed_before_the_next_is_pinned(kind, monkeypatch):
    model = converted(KINDS[kind]())
    model(torch.randn(1, 16))
    old = [{weakref.ref(each.untyped_storage()) for each in experts_of(layer)} for layer in model]
    alive: list[list[bool]] = []
    pin_memory = Tensor.pin_memory

    def pin(tensor: Tensor) -> Tensor:
        gc.collect()
        alive.append([any(memory() is not None for memory in layer) for layer in old])
        return pin_memory(tensor)

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    dynamo_moe.offload(model, 2, device="cpu")
    # Each layer pins w1 and w2.
    assert alive == [[True, True]] * 2 + [[False, True]] * 2
    gc.collect()
    assert not any(memory() for layer in old for memory in layer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_to_pin_leaves_a_model_that_computes(kind, monkeypatch):
    model = converted(KINDS[kind]())
    x = torch.randn(9, 16)
    expected = model(x)
    pin_memory = Tensor.pin_memory
    pinned: list[Any] = []
    moved: list[Any] = []

    def pin(tensor: Tensor) -> Tensor:
        if len(pinned) == 3:
            raise RuntimeError("out of memory")
        pinned.append(tensor.numel())
        return pin_memory(tensor)

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "pin_memory", pin)
        patched.setattr(Tensor, "to", lambda tensor, *_, **__: moved.append(1) or tensor)
        with pytest.raises(RuntimeError, match="out of memory"):
            dynamo_moe.offload(model, 2, device="cpu")
    assert not moved
    assert torch.equal(model(x), expected)
    # The next attempt pins the second layer.
    monkeypatch.setattr(Tensor, "pin_memory", lambda t: pinned.append(1) or pin_memory(t))
    dynamo_moe.offload(model, 2, device="cpu")
    assert len(pinned) == 3 + 2
    assert torch.equal(model(x), expected)


def test_all_else_moves_to_the_device(monkeypatch):
    model = converted(mlp())
    model.register_buffer("scale", torch.ones(()))
    moved: list[int] = []
    to = Tensor.to

    def noted(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if arguments == ("cpu",):
            moved.append(tensor.data_ptr())
        return to(tensor, *arguments, **options)

    monkeypatch.setattr(Tensor, "to", noted)
    dynamo_moe.offload(model, 2, device="cpu")
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert {name for name, each in held.items() if each.data_ptr() in moved} == {
        "scale",
        *(f"{layer}.{name}" for layer in (0, 1) for name in ("router.weight", "b1", "b2")),
    }


def test_a_number_for_each_layer():
    model = converted(mlp())
    assert dynamo_moe.offload(model, {"1": 9}, device="cpu") == {"1": EXPERTS}
    first, second = model
    assert second.w1.is_pinned()
    assert not first.w1.is_pinned()


def test_as_many_as_fit():
    model = converted(mlp())
    one = 16 * 24 * 4
    enough = {n: 2 * cache_bytes(EXPERTS, n, (one, one)) for n in range(1, EXPERTS + 1)}
    for resident, memory in enough.items():
        for more in (0, 1):
            assert dynamo_moe.offload(model, memory=memory + more, device="cpu")["0"] == resident
    assert dynamo_moe.offload(model, memory=1 << 40, device="cpu")["0"] == EXPERTS
    message = f"one expert of each layer takes {enough[1]:,} bytes .* memory={enough[1] - 1:,}"
    with pytest.raises(ValueError, match=message):
        dynamo_moe.offload(model, memory=enough[1] - 1, device="cpu")


def test_weights_in_the_memory_of_others():
    model = converted(mlp())
    (first, _), rest = model, torch.randn(EXPERTS * 16 * 24 + 8)
    first.w1.data = rest[8:].view(EXPERTS, 16, 24)
    expected = first.w1.clone()
    dynamo_moe.offload(model, 2, device="cpu")
    assert first.w1.is_pinned()
    assert torch.equal(first.w1, expected)


def test_what_is_refused():
    model = converted(mlp())
    with pytest.raises(ValueError, match="needs either resident_experts or memory"):
        dynamo_moe.offload(model)
    with pytest.raises(ValueError, match="needs either resident_experts or memory"):
        dynamo_moe.offload(model, 2, memory=1)
    with pytest.raises(ValueError, match=r"no layers \['2'\]; there are \['0', '1'\]"):
        dynamo_moe.offload(model, {"0": 1, "2": 1})
    with pytest.raises(ValueError, match="resident_experts must be at least 1, got 0 for '0'"):
        dynamo_moe.offload(model, 0)
    with pytest.raises(ValueError, match=r"names none of the layers \['0', '1'\]"):
        dynamo_moe.offload(model, {})
    numbers: list[Any] = [2.5, True, None]
    for number in numbers:
        with pytest.raises(TypeError, match=f"must be an integer, got {number} for '0'"):
            dynamo_moe.offload(model, {"0": number})
    with pytest.raises(ValueError, match="convert it first"):
        dynamo_moe.offload(nn.Linear(2, 2), 1)
    apart = converted(nn.Sequential(Stacked()))
    with pytest.raises(ValueError, match="'0' cannot be offloaded: their weights do not lie"):
        dynamo_moe.offload(apart, 1)
    assert not _CACHES
