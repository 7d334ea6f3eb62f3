"""The experts' weights and biases, from the tensors that store them to the bodies' compute dtype.

A format of weights that is not plain gets a loader here: see docs/how-to/add_a_weight_format.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
from onnx_ir.tensor_adapters import from_torch_dtype

from dynamo_moe.moe_nodes.bodies.config import BodyConfig
from dynamo_moe.moe_nodes.bodies.ops import Ops

_BIASES = ("b1", "b2")


def stored(config: BodyConfig, name: str) -> dict[str, ir.DataType]:
    """Returns the dtypes of the inputs that hold a weight or a bias, by their names."""
    if name in _BIASES:
        return {name: config.bias_dtype}
    tensors = config.shape.weight_format.stored
    return {f"{name}{tensor.suffix}": from_torch_dtype(tensor.dtype) for tensor in tensors}


def loaded(
    op: Ops, config: BodyConfig, name: str, tensors: Sequence[ir.Value], out: str
) -> ir.Value:
    """Returns a weight, or a part of one, or a bias, in the compute dtype.

    Args:
        op: Records the nodes.
        config: The layer.
        name: ``w1``, ``b1``, ``w2`` or ``b2``.
        tensors: What holds it, as :func:`stored` lists it.
        out: The result's name, where it is not the tensor itself.
    """
    if name in _BIASES:
        return op.cast(tensors[0], config.bias_dtype, config.compute_dtype, out=out)
    return _LOADERS[config.shape.weight_format.encoding](op, config, tensors, out)


def _plain(op: Ops, config: BodyConfig, tensors: Sequence[ir.Value], out: str) -> ir.Value:
    return op.cast(tensors[0], config.operand_dtype, config.compute_dtype, out=out)


_LOADERS: dict[str, Callable[[Ops, BodyConfig, Sequence[ir.Value], str], ir.Value]] = {
    "plain": _plain
}
