"""PyTorch's own samples of its operators, as one-operator models that are exported and compared.

As a script, it exports all samples and counts how many files are right, how many are wrong, and how
many models are refused. With ``--stock`` it does the same with ``torch.onnx.export`` for samples
that our export does not get right.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import onnx
import onnxruntime
import torch
from torch import Tensor, nn
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dynamo_moe
from dynamo_moe.tolerances import tolerance_for

_from_torchlib = ONNXRegistry.from_torchlib

DTYPES = {"float32": torch.float32, "int64": torch.int64}
SAMPLES = 3
"""Number of samples for each operator and dtype, spread over all that PyTorch has."""


class Operator(nn.Module):
    """A model whose forward is a single call; its inputs are the call's tensors."""

    def __init__(self, function: Callable[..., Any], sample: Any) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.function = function
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.inputs = tuple(leaves[place].detach() for place in self.places)
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def forward(self, *tensors: Tensor) -> Any:
        leaves = [*self.leaves]
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        given, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(given, *args, **kwargs)


class _Undetermined(TorchDispatchMode):
    """Detects whether a call draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@cache
def operators() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.full_name: op for op in op_db}


def names(dtype: str) -> list[str]:
    return [name for name, op in operators().items() if DTYPES[dtype] in op.dtypes]


def models(name: str, dtype: str, count: int = SAMPLES) -> Iterator[tuple[int, Operator, Any]]:
    """Yields the samples' numbers, models and results, without random or sparse tensors."""
    op = operators()[name]
    try:
        samples = [*op.sample_inputs("cpu", DTYPES[dtype])]
    except (RuntimeError, NotImplementedError):  # The operator needs a GPU.
        return
    if "empty" in name:
        return
    for number in sorted({round(i * (len(samples) - 1) / max(count - 1, 1)) for i in range(count)}):
        model = Operator(op.op, samples[number]).eval()
        if not model.inputs or any(x.layout != torch.strided for x in model.inputs):
            continue
        try:
            with _Undetermined() as random:
                expected = results(model)
        except Exception:  # noqa: S112  What PyTorch itself cannot run here.
            continue
        plain = all(
            # NumPy has no bfloat16, and ONNX Runtime returns NumPy arrays.
            isinstance(y, Tensor) and y.layout == torch.strided and y.dtype != torch.bfloat16
            for y in expected
        )
        if expected and plain and not random.seen:
            yield number, model, expected


def results(model: Operator) -> list[Any]:
    with torch.no_grad():
        return pytree.tree_leaves(model(*(x.clone() for x in model.inputs)))


def ours(model: Operator, path: Path) -> None:
    dynamo_moe.export(model, model.inputs, path, dynamic_shapes=None)


def stock(model: Operator, path: Path) -> None:
    # It rebuilds its table of translations for each export, which takes most of the time.
    with patch.object(ONNXRegistry, "from_torchlib", staticmethod(_translations)):
        torch.onnx.export(model, model.inputs, path, dynamo=True, verbose=False)


@cache
def _translations(opset_version: int) -> ONNXRegistry:
    return _from_torchlib(opset_version)


def outcome(
    export: Callable[[Operator, Path], None], model: Operator, expected: list[Tensor]
) -> tuple[str, str]:
    """Returns ``right``, ``wrong`` or ``refused``, and the reason."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        try:
            with _silence():
                export(model, path)
        except Exception as error:
            return "refused", f"{type(error).__name__}: {error}"
        try:
            compare(path, model, expected)
        except Exception as error:
            return "wrong", f"{type(error).__name__}: {error}"
    return "right", ""


def compare(path: Path, model: Operator, expected: list[Tensor]) -> None:
    onnx.checker.check_model(str(path), full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(str(path), options)
    feeds = {
        value.name: x.resolve_conj().numpy()
        if not x.is_complex()
        else torch.view_as_real(x).numpy()
        for value, x in zip(session.get_inputs(), model.inputs, strict=True)
    }
    bound = tolerance_for({torch.float32})
    for array, wanted in zip(session.run(None, feeds), expected, strict=True):
        y = torch.view_as_real(wanted.resolve_conj()) if wanted.is_complex() else wanted
        finite = y[y.isfinite()].double()
        rms = finite.square().mean().sqrt().item() if finite.numel() else 0.0
        torch.testing.assert_close(
            torch.from_numpy(array), y, rtol=bound.max, atol=bound.max * rms + 1e-6, equal_nan=True
        )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Silences the exporters' logs, which tests would store and which are huge."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)


def main() -> None:
    with_stock = "--stock" in sys.argv
    counts: Counter[str] = Counter()
    for dtype in DTYPES:
        for name in names(dtype):
            for number, model, expected in models(name, dtype):
                result, why = outcome(ours, model, expected)
                if result != "right" and with_stock:
                    result += f"; stock {outcome(stock, model, expected)[0]}"
                counts[f"{dtype}: {result}"] += 1
                if result != "right":
                    say(f"{name} {dtype} {number}: {result}: {why[:160]!r}")
    for result, count in sorted(counts.items()):
        say(f"{result} {count}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
