"""Bodies that users give to their operators, brought into the form that a file needs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx
import onnx.checker
import onnx.defs
import onnx_ir as ir
import onnxscript
from onnx.defs import OpSchema
from onnxscript import version_converter

from dynamo_moe.operators.foreign import is_foreign
from dynamo_moe.operators.registry import Body, attribute_type

_OPTIONAL = OpSchema.FormalParameterOption.Optional

_STANDARD_DOMAINS = ("", "ai.onnx.ml")

# Marks nodes that onnxscript's version converter must leave: it refuses references to attributes.
_UNCONVERTED = "dynamo_moe.unconverted"


def body_of(body: Any, schema: OpSchema) -> Body:
    """Returns the function that gives the body of each node of an operator.

    Args:
        body: An onnxscript function, ``onnx.FunctionProto`` or ``onnx_ir.Function``; or a function
            of a node, which is returned as it is.
        schema: The operator's schema.

    Raises:
        TypeError: If the body is none of these.
        ValueError: If its inputs, outputs or attributes are not the operator's, or it uses what is
            no ONNX operator.
    """
    function = proto_of(body)
    if function is None:
        if callable(body):
            of_node: Body = body
            return of_node
        raise TypeError(
            "body must be an onnxscript function, an onnx.FunctionProto, an onnx_ir.Function, or "
            f"a function that returns one for a node; got {type(body).__name__}"
        )
    name = f"{schema.domain}::{schema.name}"
    if any(f.option == OpSchema.FormalParameterOption.Variadic for f in schema.inputs):
        raise ValueError(
            f"the body of {name}: an ONNX function has a fixed number of inputs, but "
            f"{schema.inputs[-1].name!r} is a list of tensors: pass a function that returns the "
            "body of a given node"
        )
    for what, got, wanted in (
        ("inputs", function.input, [formal.name for formal in schema.inputs]),
        ("outputs", function.output, [formal.name for formal in schema.outputs]),
    ):
        if len(got) != len(wanted):
            raise ValueError(
                f"the body of {name} must have {len(wanted)} {what} ({', '.join(wanted)}), got "
                f"{len(got)} ({', '.join(got)})"
            )
    _check_valid(function, name)
    _check(ir.serde.deserialize_function(function), name, schema.attributes)
    return lambda node, opset, target: ir.serde.deserialize_function(function)


def proto_of(body: Any) -> onnx.FunctionProto | None:
    """Returns a function as an onnx ``FunctionProto``; None if it is not a kind of function."""
    if isinstance(body, onnxscript.OnnxFunction):
        proto: onnx.FunctionProto = body.to_function_proto()
        return proto
    if isinstance(body, ir.Function):
        return ir.to_proto(body)
    return body if isinstance(body, onnx.FunctionProto) else None


def content(function: ir.Function) -> bytes:
    """Returns a body in a form that equals that of an equal body."""
    proto = ir.to_proto(function)
    del proto.value_info[:]  # Bodies may note the shapes of their node.
    serialized: bytes = proto.SerializeToString(deterministic=True)
    return serialized


def prepare_body(function: ir.Function, node: ir.Node, schema: OpSchema, opset: int) -> None:
    """Gives a node's body the model's opset and the attributes of the node's operator, in place.

    A body that has all the node's attributes gets no further ones.

    Raises:
        ValueError: If it does not fit the node, or cannot be converted to the opset.
    """
    name = f"{schema.domain}::{schema.name}"
    if len(function.inputs) < len(node.inputs) or len(function.outputs) != len(node.outputs):
        raise ValueError(
            f"the body of {name} has {len(function.inputs)} inputs and {len(function.outputs)} "
            f"outputs, but node {node.name!r} has {len(node.inputs)} and {len(node.outputs)}"
        )
    _check(function, name, schema.attributes)
    _convert(function, name, opset)
    if node.attributes.keys() <= function.attributes.keys():
        return
    for attribute, declared in schema.attributes.items():
        if attribute not in function.attributes:
            function.attributes[attribute] = ir.Attr(attribute, attribute_type(declared), None)


def omit_absent(function: ir.Function, node: ir.Node, name: str) -> None:
    """Removes from a node's body the inputs that the node leaves out; ``overload`` notes them.

    ONNX Runtime 1.31 crashes on a function that uses an input that its node does not have.

    Raises:
        ValueError: If the body cannot do without such an input, or such an attribute.
    """

    def refusal(what: str, user: ir.Node) -> ValueError:
        return ValueError(
            f"the body of {name} cannot do without the {what}, which node {node.name!r} leaves "
            f"out: {user.op_type} needs it; pass a function that returns the body of a given node"
        )

    inputs = [*node.inputs, *[None] * len(function.inputs)]
    absent = [value for value, got in zip(function.inputs, inputs, strict=False) if got is None]
    for value in absent:
        for user, index in list(value.uses()):
            if not _may_lack(user, index):
                raise refusal(f"input {value.name!r}", user)
            user.replace_input_with(index, None)
    while len(function.inputs) > len(node.inputs):
        function.inputs.pop()
    if absent:
        parts = [function.overload, "without", *(str(value.name) for value in absent)]
        function.overload = "_".join(filter(None, parts))
    defaults = (a.name for a in function.attributes.values() if a.value is not None)
    known = {None, *node.attributes, *defaults}
    for user in function.all_nodes():
        for attribute in user.attributes.values():
            if attribute.ref_attr_name not in known and _needs(user, attribute.name):
                raise refusal(f"attribute {attribute.ref_attr_name!r}", user)


def _needs(node: ir.Node, attribute: str) -> bool:
    if node.domain not in _STANDARD_DOMAINS or not onnx.defs.has(node.op_type, node.domain):
        return False
    declared = onnx.defs.get_schema(node.op_type, domain=node.domain).attributes.get(attribute)
    return node.op_type == "Constant" or (declared is not None and declared.required)


def _may_lack(node: ir.Node, index: int) -> bool:
    if node.domain not in _STANDARD_DOMAINS:
        return True  # A runtime's own operator, of which onnx knows nothing.
    formals = onnx.defs.get_schema(node.op_type, domain=node.domain).inputs
    return index < len(formals) and formals[index].option == _OPTIONAL


def _check_valid(function: onnx.FunctionProto, name: str) -> None:
    try:
        onnx.checker.check_function(function)
    except onnx.checker.ValidationError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the body of {name} is not a valid ONNX function: {reason}") from error
    computed = {*function.input, *(name for node in function.node for name in node.output)}
    for output in function.output:
        if output not in computed:
            raise ValueError(f"the body of {name} computes no output {output!r}")


def _check(function: ir.Function, name: str, attributes: Collection[str]) -> None:
    referenced = {*function.attributes}
    for node in function.all_nodes():
        referenced |= {a.ref_attr_name for a in node.attributes.values() if a.is_ref()}
        standard = node.domain in _STANDARD_DOMAINS and onnx.defs.has(node.op_type, node.domain)
        if not standard and not is_foreign(node.domain, node.op_type):
            raise ValueError(
                f"the body of {name} uses {node.domain or 'ai.onnx'}::{node.op_type}, which is "
                "not an ONNX operator: write what it computes into the body itself"
            )
    unknown = sorted(str(attribute) for attribute in referenced if attribute not in attributes)
    if unknown:
        raise ValueError(
            f"the body of {name} refers to the attribute {unknown[0]!r}, which the operator "
            f"does not have; it has {', '.join(attributes)}"
        )


def _convert(function: ir.Function, name: str, opset: int) -> None:
    """Brings the body to the model's version of the standard operators, in place."""
    body_opset = function.opset_imports.get("", opset)
    if body_opset > opset:
        raise ValueError(
            f"the body of {name} is written for opset {body_opset}, the file has {opset}: export "
            f"with opset={body_opset}, or write the body for {opset}"
        )
    if body_opset < opset:
        left = [
            node
            for node in function.all_nodes()
            if node.domain == "" and any(a.is_ref() for a in node.attributes.values())
        ]
        for node in left:
            _check_unchanged(node, name, body_opset, opset)
            node.domain = _UNCONVERTED
        version_converter.convert_version(ir.Model(function.graph, ir_version=10), opset)
        for node in left:
            node.domain = ""
    for node in function.all_nodes():
        node.version = None
    function.opset_imports[""] = opset


def _check_unchanged(node: ir.Node, name: str, body_opset: int, opset: int) -> None:
    """Checks that a newer version of a node's operator has only added to the older one."""
    old, new = (onnx.defs.get_schema(node.op_type, version, "") for version in (body_opset, opset))
    same_inputs = [formal.name for formal in old.inputs] == [f.name for f in new.inputs]
    if not same_inputs or not set(old.attributes) <= set(new.attributes):
        raise ValueError(
            f"the body of {name} is written for opset {body_opset}, the file has {opset}, and "
            f"between them {node.op_type} has changed: write the body for opset {opset}"
        )
