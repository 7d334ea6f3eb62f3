"""``register_op``: any operator of PyTorch as one ONNX node."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx.defs
import torch
from onnx.defs import OpSchema
from onnx.shape_inference import InferenceContext

from dynamo_moe.operators import registry, user_bodies
from dynamo_moe.operators.schemas import (
    OWN_DOMAIN,
    Constant,
    check_constants,
    check_schema,
    derive_schema,
    is_own_domain,
    scalar_arguments,
)
from dynamo_moe.operators.shape_inference import by_fake_kernel
from dynamo_moe.operators.shape_inference import like as inferred_like
from dynamo_moe.private import operators as private_operators
from dynamo_moe.private.pytorch import OpOverload, OpOverloadPacket, schema_of

_LIKE = "like:"

_DOMAIN = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_OP_TYPE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Domains whose operators a standard or a runtime defines.
_RESERVED_DOMAINS = ("ai.onnx.", "com.microsoft.", "com.ms.", "org.pytorch.", "pkg.")

Attributes = Mapping[str, str] | Callable[[registry.Arguments], Mapping[str, Any]] | None
Inference = str | Callable[[InferenceContext], None] | None


def register_op(
    torch_op: Any,
    *,
    domain: str,
    op_type: str,
    version: int = 1,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    attributes: Attributes = None,
    constants: Mapping[str, Constant] | None = None,
    schema: OpSchema | None = None,
    shape_inference: Inference = "fake",
    body: Any = None,
    fill: registry.Fill | None = None,
    plugin_version: str = "1",
    plugin_namespace: str = "",
    doc: str = "",
) -> None:
    """Makes an operator of PyTorch one node in the files of :func:`export`.

    From then on :func:`export` and :func:`onnx_translation_table` know the operator: it is neither
    decomposed nor translated otherwise. onnx's checker and shape inference know the node. What a
    node looks like follows from the operator's own schema: ``Tensor`` is an input, ``Tensor?`` an
    optional one, ``Tensor[]`` any number of them; ``int``, ``bool``, ``float``, ``str`` and lists
    of them are attributes with the same defaults, and absent where they are None.

    Args:
        torch_op: An ``OpOverload``, an ``OpOverloadPacket`` with one overload, or the result of
            ``torch.library.custom_op``. It needs a fake kernel, must neither change nor return its
            arguments, and must not have complex tensors. It must not draw random numbers; the check
            relies on the tag ``torch.Tag.nondeterministic_seeded``.
        domain: The node's domain, your own.
        op_type: The node's operator type, which is also the name of the TensorRT plugin. No
            standard operator may have it.
        version: Version of the domain.
        inputs: The tensor arguments in the node's order; None: the operator's.
        outputs: Names of the results; None: the operator's.
        attributes: The attributes' names by argument, where they differ. Or, with ``schema``, a
            function from a call's arguments by name, with tensors as ``onnx_ir.Value``, to the
            attributes.
        constants: More attributes, the same at every node.
        schema: The node's whole schema, in place of one derived, with its inference; its inputs
            are the tensor arguments, in any order. ``inputs``, ``outputs``, ``shape_inference`` and
            ``doc`` are refused then.
        shape_inference: ``"fake"``: by the fake kernel; ``"like:x"``: the only result has the type
            and shape of input x; a function of onnx's ``InferenceContext``; None: nothing is
            inferred. In any case :func:`export` writes the shapes that the trace has.
        body: What the node computes, in standard operators: an onnxscript function, an
            ``onnx.FunctionProto``, or an ``onnx_ir.Function``, whose inputs and attributes are the
            node's. Or a function of a node, the opset and the target that returns such a function
            of onnx_ir; functions that differ get a domain each, named by their ``overload``. With
            the target ``plugin`` the body is in the file beside the node; with the others it takes
            the node's place. None: the node stays, and only a runtime that knows it runs the file.
        fill: A function that returns sizes and dtype of the zeros that stand for an absent optional
            input with others behind it, from its name and the call's arguments; another number may
            follow. None: the input is left out.
        plugin_version: Version by which TensorRT finds the plugin.
        plugin_namespace: Namespace by which TensorRT finds the plugin.
        doc: What the operator computes, in words.

    Raises:
        TypeError: If an argument or a result of the operator has a type that nodes cannot have, or
            ``torch_op`` or ``body`` is none of the kinds above.
        ValueError: If the declaration contradicts the operator, a name is taken, the operator
            changes its arguments or has the tag of random numbers, or it is registered already
            with another declaration.

    Example:
        >>> import torch
        >>> @torch.library.custom_op("docs::halve", mutates_args=())
        ... def halve(x: torch.Tensor, times: int = 1) -> torch.Tensor:
        ...     return x / 2**times
        >>> @halve.register_fake
        ... def _(x, times=1):
        ...     return torch.empty_like(x)
        >>> register_op(halve, domain="docs", op_type="Halve")
        >>> import onnx.defs
        >>> onnx.defs.get_schema("Halve", domain="docs").attributes["times"].default_value.i
        1
    """
    declaration = {**locals(), "torch_op": _overload(torch_op), "body": _comparable(body)}
    overload = _overload(torch_op)
    _check_name(overload, domain, op_type)
    _check_operator(overload)
    if callable(attributes) != (schema is not None):
        raise ValueError(
            f"{domain}::{op_type}: attributes that a function computes must be declared in a "
            "schema, and a schema needs that function: pass both or neither"
        )
    if version < 1:
        raise ValueError(f"version must be at least 1, got {version}")
    check_constants(constants or {})
    if callable(attributes) and schema is not None:
        redundant: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "doc": doc or None}
        redundant["shape_inference"] = None if shape_inference == "fake" else shape_inference
        for option, value in redundant.items():
            if value is not None:
                raise ValueError(f"{option} and schema: the schema says it, got {option}={value!r}")
        check_schema(schema, overload, domain=domain, op_type=op_type, version=version)
        compute = attributes
    else:
        renamed = {} if attributes is None or callable(attributes) else attributes
        names = {name: renamed.get(name, name) for name in scalar_arguments(overload)}
        schema = derive_schema(
            overload,
            domain=domain,
            op_type=op_type,
            version=version,
            doc=doc,
            inputs=inputs,
            outputs=outputs,
            renamed=renamed,
            constants=constants or {},
            like=_like(shape_inference),
        )
        inference = _inference(shape_inference, overload, schema, names)
        if inference is not None:
            schema.set_type_and_shape_inference_function(inference)
        compute = functools.partial(_renamed, names)
    plugin = {"plugin_version": plugin_version, "plugin_namespace": plugin_namespace}
    fixed = {**(constants or {}), **plugin}
    undeclared = [name for name in fixed if name not in schema.attributes]
    if undeclared:
        raise ValueError(
            f"the schema of {domain}::{op_type} must declare the attribute {undeclared[0]!r}"
        )
    registry.add(
        registry.Operator(
            torch_op=overload,
            schema=schema,
            attributes=compute,
            fixed=fixed,
            body=None if body is None else user_bodies.body_of(body, schema),
            fill=fill,
            declaration=declaration,
        )
    )


def _renamed(names: Mapping[str, str], arguments: registry.Arguments) -> dict[str, Any]:
    return {name: arguments[argument] for argument, name in names.items()}


def _overload(torch_op: Any) -> OpOverload:
    torch_op = private_operators.overload_of(torch_op)
    if isinstance(torch_op, OpOverloadPacket):
        names = torch_op.overloads()
        if len(names) > 1:
            choices = ", ".join(f"{torch_op}.{name}" for name in names)
            raise ValueError(f"{torch_op} has several overloads, name one: {choices}")
        torch_op = getattr(torch_op, names[0])
    if isinstance(torch_op, OpOverload):
        return torch_op
    raise TypeError(
        "torch_op must be an operator such as torch.ops.my.relu, or what torch.library.custom_op "
        f"returns; got {type(torch_op).__name__}"
    )


def _check_name(torch_op: OpOverload, domain: str, op_type: str) -> None:
    """Checks that a node's name is valid, and that no standard or runtime has given it a meaning.

    The names of TensorRT's own plugins are allowed: a node may be meant for one of them.
    """
    if not _DOMAIN.fullmatch(domain):
        raise ValueError(
            f"domain must be letters, digits, '_', '-' and '.', and not empty; got {domain!r}"
        )
    if not _OP_TYPE.fullmatch(op_type):
        raise ValueError(f"op_type must be letters, digits and '_', got {op_type!r}")
    if f"{domain}.".startswith(_RESERVED_DOMAINS):
        raise ValueError(f"domain {domain!r} is not yours to extend: choose a name of your own")
    if is_own_domain(domain) and torch_op.namespace != OWN_DOMAIN:
        raise ValueError(f"domain {domain!r} is dynamo_moe's own: choose another name")
    if onnx.defs.has(op_type):
        raise ValueError(
            f"{op_type} is a standard ONNX operator, and TensorRT's parser ignores the domain: "
            f"choose another op_type than {domain}::{op_type}"
        )


def _check_operator(torch_op: OpOverload) -> None:
    """Checks that an operator has a fake kernel, and computes nothing but new values."""
    schema = schema_of(torch_op)
    for value in (*schema.arguments, *schema.returns):
        if value.alias_info is not None:
            does = "changes its argument" if value.alias_info.is_write else "shares the memory of"
            raise ValueError(
                f"{torch_op} {does} {value.name!r}: an ONNX node only computes new values; "
                "register an operator that returns them"
            )
    if torch.Tag.nondeterministic_seeded in torch_op.tags:
        raise ValueError(
            f"{torch_op} draws random numbers: two equal nodes would be merged into one; pass the "
            "random tensor to an operator instead"
        )
    if not private_operators.has_fake_kernel(torch_op):
        raise ValueError(
            f"{torch_op} has no fake kernel, so its results have no shape when a model is traced: "
            f'register one with torch.library.register_fake("{schema.name}")'
        )


def _like(shape_inference: Inference) -> str | None:
    """Returns x of ``"like:x"``."""
    if isinstance(shape_inference, str) and shape_inference.startswith(_LIKE):
        return shape_inference[len(_LIKE) :]
    return None


def _inference(
    shape_inference: Inference, torch_op: OpOverload, schema: OpSchema, names: Mapping[str, str]
) -> Callable[[InferenceContext], None] | None:
    if shape_inference is None or not isinstance(shape_inference, str):
        return shape_inference
    if shape_inference == "fake":
        return by_fake_kernel(torch_op, schema, names)
    like = _like(shape_inference)
    if like is not None:
        return inferred_like([formal.name for formal in schema.inputs].index(like))
    raise ValueError(
        'shape_inference must be "fake", "like:" and the name of an input, a function, or None; '
        f"got {shape_inference!r}"
    )


def _comparable(body: Any) -> Any:
    """Returns a body in a form that equals that of the same body, defined again."""
    proto = user_bodies.proto_of(body)
    return body if proto is None else proto.SerializeToString()
