"""The MoE nodes of an exported graph, and the modules that nodes come from."""

from __future__ import annotations

import ast

import onnx_ir as ir

from dynamo_moe.moe_nodes import schemas

__all__ = ["moe_nodes", "module_of"]

_SCOPES = "pkg.torch.onnx.name_scopes"


def moe_nodes(model: ir.Model) -> list[ir.Node]:
    """Returns the MoE nodes, those in the branches of control flow too."""
    return [
        node
        for node in model.graph.all_nodes()
        if node.domain == schemas.DOMAIN and node.op_type in schemas.SCHEMAS
    ]


def module_of(node: ir.Node) -> str:
    """Returns the path of the PyTorch module that a freshly exported node comes from."""
    # [root, module, submodule, ..., the fx node itself]
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))[:-1]
    return str(scopes[-1]) if scopes else ""
