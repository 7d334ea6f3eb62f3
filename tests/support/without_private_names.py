"""A run of the package with a PyTorch whose private names have all moved; prints what happened.

Run as a script, since it decides what ``import dynamo_moe`` finds. What moves is decided by who
imports it: PyTorch itself keeps its private names.
"""

from __future__ import annotations

import builtins
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_import = builtins.__import__
_PACKAGES = ("torch", "transformers", "onnxscript", "onnx_ir")


def _is_private(name: str, names: Sequence[str]) -> bool:
    parts = [*name.split("."), *names]
    private = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[0] in _PACKAGES and (private or "experimental" in parts)


def _import_public(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> Any:
    importer = str((globals or {}).get("__name__", "")).split(".")[0]
    if importer in ("custom_ops", "dynamo_moe") and _is_private(name, fromlist or ()):
        refused.append(f"{name} {' '.join(fromlist or ())}")
        raise ImportError(f"no {name} in this PyTorch")
    return _import(name, globals, locals, fromlist, level)


refused: list[str] = []
builtins.__import__ = _import_public

import torch  # noqa: E402
from onnxscript import rewriter  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import dynamo_moe  # noqa: E402
import dynamo_moe.private.onnxscript  # noqa: E402
import dynamo_moe.private.operators  # noqa: E402
import dynamo_moe.private.tracer  # noqa: E402
import dynamo_moe.pytree  # noqa: E402
import dynamo_moe.tracing.shortcuts  # noqa: E402
from dynamo_moe.private import transformers  # noqa: E402

# No other module imports private names; a test holds that.
builtins.__import__ = _import

from moe_architectures import ARCHITECTURES, example_inputs  # noqa: E402
from small_models import OwnRouter, op_model  # noqa: E402

FOLDER = Path(sys.argv[1])
del rewriter._DEFAULT_REWRITE_RULES


def _exported(name: str, model: nn.Module, example: Any) -> dynamo_moe.ExportReport:
    args, kwargs = ((), example) if isinstance(example, dict) else (example, None)
    report = dynamo_moe.export(model, args, FOLDER / f"{name}.onnx", kwargs=kwargs)
    [note] = [note for note in report.notes if "its own exporter alone" in note]
    assert torch.__version__ in note, note
    assert "no torch" in note, note
    return report


def _check(name: str, model: nn.Module) -> None:
    result = dynamo_moe.verify(FOLDER / f"{name}.onnx", model)
    assert result.passed, result


def _own_operator() -> nn.Module:
    @torch.library.custom_op("without_private_names::halve", mutates_args=())
    def halve(x: Tensor, times: int = 1) -> Tensor:
        return x / 2**times

    halve.register_fake(lambda x, times=1: torch.empty_like(x))
    dynamo_moe.register_op(halve, domain="without.private.names", op_type="Halve")

    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return halve(x, 2)

    return Halves()


def main() -> None:
    """Converts, exports and verifies a few models."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    model = op_model(OwnRouter(activation="silu", gated=True))
    _exported("operators", model, torch.randn(3, 16))
    _check("operators", model)
    architecture = ARCHITECTURES["mixtral"]
    language_model = architecture.build()
    # The interface of transformers' experts has moved too: they are recognised by structure.
    transformers._IMPLEMENTATION = "_moved"
    [converted] = {each.adapter for each in dynamo_moe.convert(language_model).replaced}
    assert converted != "transformers-experts"
    report = _exported("mixtral", language_model, example_inputs(architecture, 2, 5))
    assert report.layers
    _check("mixtral", language_model)

    operators = _exported("halves", _own_operator(), torch.randn(2, 4)).nodes
    assert operators == {"without.private.names::Halve": 1}, operators
    sys.stdout.write("\n".join(sorted(set(refused))))


if __name__ == "__main__":
    main()
