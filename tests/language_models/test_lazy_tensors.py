"""Lazy tensors: shapes are known at once, values are read in pieces and only when needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dynamo_moe.files.model_files import save_model
from dynamo_moe.weights import lazy_tensors
from dynamo_moe.weights.checkpoints import open_tensors
from dynamo_moe.weights.lazy_tensors import LazyTensor
from dynamo_moe.weights.placeholders import as_ir

save_file = pytest.importorskip("safetensors.torch").save_file

VALUES = {
    "a": torch.arange(6 * 4 * 2, dtype=torch.float32).view(6, 4, 2),
    "b": torch.randn(6, 4, 2),
    "matrix": torch.randn(7, 5),
    "half": torch.randn(3, 4).to(torch.bfloat16),
    "ids": torch.arange(5),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lazy") / "values.safetensors"
    save_file(VALUES, path)
    return path


def assert_same(lazy: Tensor, expected: Tensor) -> None:
    assert isinstance(lazy, LazyTensor)
    assert (lazy.shape, lazy.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(lazy.read(), expected)
    chunks = list(lazy.chunks())
    assert all(chunk.is_contiguous() for chunk in chunks)
    together = torch.cat(chunks) if expected.ndim else chunks[0]
    assert torch.equal(together.view(expected.shape), expected)


OPERATIONS: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "as it is": lambda v: v["a"],
    "stack": lambda v: torch.stack([v["a"], v["b"]]),
    "stack inside": lambda v: torch.stack([v["a"], v["b"]], dim=1),
    "cat rows": lambda v: torch.cat([v["a"], v["b"]]),
    "cat inside": lambda v: torch.cat([v["a"], v["b"]], dim=1),
    "experts": lambda v: torch.cat([torch.stack([v["a"][0]] * 3), torch.stack([v["b"][1]] * 3)], 1),
    "transpose inside": lambda v: v["a"].transpose(1, 2),
    "mT": lambda v: v["a"].mT.contiguous(),
    "transpose rows": lambda v: v["matrix"].T,
    "permute": lambda v: v["a"].permute(0, 2, 1),
    "permute rows": lambda v: v["a"].permute(1, 0, 2),
    "to half": lambda v: v["a"].to(torch.bfloat16),
    "to float": lambda v: v["half"].float(),
    "view": lambda v: v["a"].view(6, 8),
    "view rows": lambda v: v["a"].view(12, 4),
    "reshape": lambda v: v["a"].transpose(1, 2).reshape(6, 8),
    "chunk": lambda v: v["a"].chunk(2, dim=1)[1],
    "chunk rows": lambda v: v["a"].chunk(2, dim=0)[1],
    "split": lambda v: v["a"].split([1, 3], dim=1)[1],
    "slice": lambda v: v["a"][:, 1:3],
    "slice rows": lambda v: v["a"][2:5],
    "slice rows twice": lambda v: v["a"][1:5].transpose(1, 2)[-3:2],
    "slice a stack": lambda v: torch.stack([v["a"], v["b"], v["a"]])[1:],
    "slice rows of a stack": lambda v: torch.stack([v["a"], v["b"]], dim=1)[2:4],
    "every other row": lambda v: v["a"][1::2],
    "index": lambda v: v["a"][2],
    "unsqueeze": lambda v: v["a"].unsqueeze(0),
    "scaled": lambda v: v["a"] * 2 + 1,
    "parameter": lambda v: nn.Parameter(v["a"]).detach(),
    "integers": lambda v: v["ids"].flip(0),
    "scalar": lambda v: v["scalar"].double(),
    "empty": lambda v: v["empty"].clone(),
}


@pytest.mark.parametrize("chunk", [1, 40, 2**20])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str, chunk: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_tensors, "CHUNK_BYTES", chunk)
    operation = OPERATIONS[name]
    assert_same(operation(open_tensors(path)), operation(VALUES))


STEPS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.transpose(1, 2),
    lambda x: x.transpose(0, 1),
    lambda x: torch.cat([x, x], dim=0),
    lambda x: torch.cat([x, x], dim=2),
    lambda x: x[1:],
    lambda x: x[:, :1],
    lambda x: x.to(torch.float16),
    lambda x: x.reshape(x.shape[0], -1, 1),
    lambda x: x.reshape(-1, 2, 2) if x.numel() % 4 == 0 else x,
    lambda x: torch.stack([x, x], dim=0).sum(0),
]


@given(st.lists(st.sampled_from(STEPS), max_size=6), st.integers(1, 200))
@settings(max_examples=150, deadline=None)
def test_any_chain_of_operations(
    path: Path, steps: list[Callable[[Tensor], Tensor]], chunk: int
) -> None:
    lazy, expected = open_tensors(path)["a"], VALUES["a"]
    for step in steps:
        if expected.shape[0] > 1 or step is not STEPS[4]:
            lazy, expected = step(lazy), step(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy_tensors, "CHUNK_BYTES", chunk)
        assert_same(lazy, expected)


@pytest.mark.parametrize(
    ("operation", "rows"),
    [
        (lambda a: a[2:5], slice(2, 5)),
        (lambda a: a[-2:], slice(4, 6)),
        (lambda a: a[1:5][1:3], slice(2, 4)),
        (lambda a: nn.Parameter(a[2:5]).detach(), slice(2, 5)),
        (lambda a: a[2:5].reshape(3, 8), slice(2, 5)),
        (lambda a: a[:, 1:3], None),
        (lambda a: a[::2], None),
        (lambda a: a.mT[2:5], None),
    ],
)
def test_where_rows_lie(path: Path, operation: Any, rows: slice | None) -> None:
    lazy = operation(open_tensors(path)["a"])
    if rows is None:
        assert lazy.origin is None
    else:
        assert torch.equal(lazy.origin.read().flatten(), VALUES["a"][rows].flatten())


def test_rows_are_read_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = open_tensors(path)
    experts = torch.stack([torch.cat([values["a"], values["b"]], dim=1).mT] * 4)
    read = []
    original = lazy_tensors.Stored._read
    monkeypatch.setattr(
        lazy_tensors.Stored,
        "_read",
        lambda self, skip, size, shape: read.append(size) or original(self, skip, size, shape),
    )
    monkeypatch.setattr(lazy_tensors, "CHUNK_BYTES", 1)
    chunks = experts.chunks()
    next(chunks)
    assert sum(read) == VALUES["a"].nbytes + VALUES["b"].nbytes


TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(-1, 0),
    "permute": lambda x: x.permute(1, 0),
    "cast before": lambda x: x.half().t(),
    "cast after": lambda x: x.t().half(),
    "rows": lambda x: x.t().reshape(5, 7, 1),
}


@pytest.mark.parametrize("chunk", [1, 24, 60, 2**20])
@pytest.mark.parametrize("name", TURNS)
def test_a_large_matrix_is_transposed_in_parts(
    name: str, chunk: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_tensors, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(lazy_tensors, "_MOST_TURNED_BYTES", 0)
    turned, expected = TURNS[name](open_tensors(path)["matrix"]), TURNS[name](VALUES["matrix"])
    with monkeypatch.context() as patch:
        patch.setattr(lazy_tensors.Stored, "read", None)
        chunks = list(turned.chunks())
    assert torch.equal(torch.cat(chunks), expected)
    assert torch.equal(turned.read(), expected)


def test_where_the_values_lie(path: Path) -> None:
    values = open_tensors(path)
    origin = nn.Parameter(values["b"]).origin
    stored = path.read_bytes()[origin.offset : origin.offset + origin.nbytes]
    assert stored == VALUES["b"].numpy().tobytes()
    assert values["b"].to(torch.float32).origin == origin
    assert values["b"].mT.origin is None
    assert values["b"].half().origin is None


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda x: x.add_(1), "would change a tensor"),
        (lambda x: x.copy_(torch.zeros(6, 4, 2)), "would change a tensor"),
        (lambda x: torch.equal(x, x), "needs the values"),
    ],
)
def test_values_are_not_there(path: Path, use: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        use(open_tensors(path)["a"])


def test_any_module_takes_them(path: Path, tmp_path: Path) -> None:
    linear = nn.Linear(8, 4)
    save_file(linear.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Linear(8, 4)
    model.load_state_dict(open_tensors(tmp_path), assign=True)
    assert isinstance(model.weight, LazyTensor)
    assert torch.equal(model.weight.read(), linear.weight)


def test_a_file_that_became_shorter(path: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.safetensors"
    short.write_bytes(path.read_bytes())
    values = open_tensors(short)
    short.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match=r"ends .* bytes before its last tensor"):
        [value.read() for value in values.values()]


@pytest.mark.parametrize("external", [True, False])
def test_one_thread_reads_the_weights_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, external: bool
) -> None:
    tensors = {name: torch.randn(100, 3) for name in "abc"}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = [as_ir(lazy.mT, name) for name, lazy in open_tensors(tmp_path).items()]
    values = [ir.Value(name=weight.name, const_value=weight) for weight in weights]
    graph = ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 20})
    threads: set[threading.Thread] = set()
    original = lazy_tensors.Stored._read

    def noting(*args: Any) -> Tensor:
        threads.add(threading.current_thread())
        return original(*args)

    monkeypatch.setattr(lazy_tensors.Stored, "_read", noting)
    save_model(ir.Model(graph, ir_version=10), tmp_path / "m.onnx", external)
    assert len(threads) == 1
    written = ir.load(tmp_path / "m.onnx").graph.initializers
    for name, tensor in tensors.items():
        assert (written[name].const_value.numpy() == tensor.mT.numpy()).all()
