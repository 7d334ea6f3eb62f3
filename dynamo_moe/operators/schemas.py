"""The ONNX schema of a PyTorch operator, derived from the operator's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx.defs import OpSchema

from dynamo_moe.private.pytorch import OpOverload, schema_of

OWN_DOMAIN = "moe"
"""The domain of the project's own operators, in PyTorch and in ONNX."""

Constant = int | float | str | Sequence[int] | Sequence[float] | Sequence[str]

# TensorRT's parser asks its plugin registry for these before it looks at anything else.
PLUGIN_ATTRIBUTES = {"plugin_version": "1", "plugin_namespace": ""}

_TENSOR_TYPES = [
    f"tensor({name})"
    for name in (
        *("float", "float16", "bfloat16", "double", "bool", "complex64", "complex128"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"),
    )
]
_ATTRIBUTE_TYPES = {
    "int": OpSchema.AttrType.INT,
    "bool": OpSchema.AttrType.INT,
    "float": OpSchema.AttrType.FLOAT,
    "str": OpSchema.AttrType.STRING,
    "List[int]": OpSchema.AttrType.INTS,
    "List[bool]": OpSchema.AttrType.INTS,
    "List[float]": OpSchema.AttrType.FLOATS,
    "List[str]": OpSchema.AttrType.STRINGS,
}
_Option = OpSchema.FormalParameterOption
_INPUT_OPTIONS = {
    "Tensor": _Option.Single,
    "Optional[Tensor]": _Option.Optional,
    "List[Tensor]": _Option.Variadic,
}


def is_own_domain(domain: str) -> bool:
    """Whether a domain is the project's own: ``moe``, or ``moe.`` and a configuration's name."""
    return domain.split(".", maxsplit=1)[0] == OWN_DOMAIN


def derive_schema(
    torch_op: OpOverload,
    *,
    domain: str,
    op_type: str,
    version: int,
    doc: str,
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    renamed: Mapping[str, str],
    constants: Mapping[str, Constant],
    like: str | None,
) -> OpSchema:
    """Returns the schema of an operator's ONNX node, from what ``register_op`` is given.

    ``renamed`` has the attributes' names by argument, where they differ. With ``like`` the only
    result has the type of that input; otherwise types are not related.

    Raises:
        TypeError: If an argument or a result has a type that ONNX nodes cannot have.
        ValueError: If a name is unknown, missing or given twice.
    """
    tensors = _tensor_arguments(torch_op)
    for what, names in (("inputs", inputs), ("outputs", outputs)):
        if isinstance(names, str):
            raise TypeError(f"{what} must be a list of names, got {names!r}")
    order = list(tensors) if inputs is None else list(inputs)
    if sorted(order) != sorted(tensors):
        raise ValueError(
            f"inputs must be the tensor arguments of {torch_op}, {', '.join(tensors)}, in any "
            f"order; got {', '.join(order)}"
        )
    for name in order[:-1]:
        if tensors[name] == _Option.Variadic:
            raise ValueError(
                f"{torch_op}: a list of tensors must be the last input of an ONNX node, and "
                f"{name!r} is not: give the order with inputs=[..., {name!r}]"
            )
    scalars = scalar_arguments(torch_op)
    unknown = [name for name in renamed if name not in scalars]
    if unknown:
        raise ValueError(
            f"attributes names {unknown[0]!r}, but only these arguments of {torch_op} become "
            f"attributes: {', '.join(scalars) or 'none'}"
        )
    attributes = [
        _attribute(argument, renamed.get(name, name)) for name, argument in scalars.items()
    ]
    results = _results(torch_op, outputs)
    if like is not None and (tensors.get(like) != _Option.Single or len(results) != 1):
        raise ValueError(
            f"shape_inference 'like:{like}' needs one result and a Tensor argument {like!r}; "
            f"{torch_op} is {schema_of(torch_op)}"
        )
    for fixed, note in (
        (constants, "Always the same."),
        (PLUGIN_ATTRIBUTES, "Read by TensorRT's ONNX parser."),
    ):
        attributes += [
            OpSchema.Attribute(name, onnx.helper.make_attribute(name, value), note)
            for name, value in fixed.items()
        ]
    _check_unique(torch_op, [*order, *(attribute.name for attribute in attributes)])
    _check_unique(torch_op, results)
    types = {name: f"T_{name}" for name in order}
    result_types = {name: f"U_{name}" if like is None else f"T_{like}" for name in results}
    return OpSchema(
        op_type,
        domain,
        version,
        doc,
        inputs=[
            OpSchema.FormalParameter(
                name,
                types[name],
                param_option=tensors[name],
                is_homogeneous=tensors[name] != _Option.Variadic,
                min_arity=0 if tensors[name] == _Option.Variadic else 1,
            )
            for name in order
        ],
        outputs=[OpSchema.FormalParameter(name, result_types[name]) for name in results],
        type_constraints=[
            (name, _TENSOR_TYPES, "Any tensor of PyTorch.")
            for name in dict.fromkeys([*types.values(), *result_types.values()])
        ],
        attributes=attributes,
    )


def check_schema(
    schema: OpSchema, torch_op: OpOverload, *, domain: str, op_type: str, version: int
) -> None:
    """Checks that a given schema is that of an operator's node.

    Raises:
        ValueError: If it has another name or version, or other inputs or outputs.
    """
    name = f"{domain}::{op_type}"
    for what, got, wanted in (
        ("domain", schema.domain, domain),
        ("name", schema.name, op_type),
        ("since_version", schema.since_version, version),
    ):
        if got != wanted:
            raise ValueError(f"the schema of {name} has the {what} {got!r}, it must be {wanted!r}")
    tensors = _tensor_arguments(torch_op)
    inputs = {formal.name: formal.option for formal in schema.inputs}
    if inputs != tensors:
        raise ValueError(
            f"the inputs of the schema of {name} must be the tensor arguments of {torch_op}, as "
            f"required, optional or variadic as these: {_options(tensors)}; got {_options(inputs)}"
        )
    if len(schema.outputs) != len(schema_of(torch_op).returns):
        raise ValueError(
            f"the schema of {name} must have as many outputs as {torch_op} has results, "
            f"{len(schema_of(torch_op).returns)}; got {len(schema.outputs)}"
        )


def check_constants(constants: Mapping[str, Constant]) -> None:
    """Checks that values can be attributes.

    Raises:
        TypeError: If one cannot.
    """
    for name, value in constants.items():
        try:
            kind = onnx.helper.make_attribute(name, value).type
        except (TypeError, ValueError):
            kind = None
        kinds: Any = _ATTRIBUTE_TYPES.values()
        if kind not in {declared.value for declared in kinds}:
            raise TypeError(
                f"constants[{name!r}] must be an int, a float, a str, or a list of one of them "
                f"that is not empty; got {value!r}"
            )


def scalar_arguments(torch_op: OpOverload) -> dict[str, Any]:
    """Returns the arguments of an operator's schema that are not tensors, by name.

    Raises:
        TypeError: If ONNX has no such type.
    """
    scalars = {}
    for argument in schema_of(torch_op).arguments:
        kind = str(argument.real_type)
        if kind in _INPUT_OPTIONS:
            continue
        if _plain(kind) not in _ATTRIBUTE_TYPES:
            raise TypeError(
                f"{torch_op}: argument {argument.name!r} has the type {_readable(kind)}, which is "
                "neither a tensor nor an ONNX attribute; these are Tensor, Tensor?, Tensor[], "
                "int, bool, float, str, lists of them, and each of them optional"
            )
        scalars[argument.name] = argument
    return scalars


def _tensor_arguments(torch_op: OpOverload) -> dict[str, OpSchema.FormalParameterOption]:
    kinds = {a.name: str(a.real_type) for a in schema_of(torch_op).arguments}
    return {name: _INPUT_OPTIONS[kind] for name, kind in kinds.items() if kind in _INPUT_OPTIONS}


def _results(torch_op: OpOverload, outputs: Sequence[str] | None) -> list[str]:
    returns = schema_of(torch_op).returns
    for index, value in enumerate(returns):
        if str(value.real_type) != "Tensor":
            raise TypeError(
                f"{torch_op}: result {index} has the type {_readable(str(value.real_type))}; an "
                "ONNX node gives tensors, a fixed number of them"
            )
    if not returns:
        raise TypeError(f"{torch_op} has no result, so nothing in a graph could use its node")
    if outputs is None:
        alone = len(returns) == 1
        taken = {argument.name for argument in schema_of(torch_op).arguments}
        return [
            value.name or ("y" if alone and "y" not in taken else f"output_{index}")
            for index, value in enumerate(returns)
        ]
    if len(outputs) != len(returns):
        raise ValueError(
            f"outputs must name the {len(returns)} results of {torch_op}, got {list(outputs)}"
        )
    return list(outputs)


def _attribute(argument: Any, name: str) -> OpSchema.Attribute:
    kind = str(argument.real_type)
    declared: Any = _ATTRIBUTE_TYPES[_plain(kind)]
    if not argument.has_default_value() or argument.default_value is None:
        required = not argument.has_default_value() and not kind.startswith("Optional[")
        return OpSchema.Attribute(name, declared, required=required)
    value = argument.default_value
    convert = {"FLOAT": float, "STRING": str}.get(declared.name.removesuffix("S"), int)
    plain = [convert(item) for item in value] if isinstance(value, list) else convert(value)
    return OpSchema.Attribute(
        name, onnx.helper.make_attribute(name, plain, attr_type=int(declared.value))
    )


def _check_unique(torch_op: OpOverload, names: Sequence[str]) -> None:
    if "" in names:
        raise ValueError(f"{torch_op}: inputs, attributes and results need names, got ''")
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ValueError(f"{torch_op}: two inputs, attributes or results are named {twice[0]!r}")


def _options(formals: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({option.name.lower()})" for name, option in formals.items())


def _plain(kind: str) -> str:
    return kind[len("Optional[") : -1] if kind.startswith("Optional[") else kind


def _readable(kind: str) -> str:
    """Returns a type as PyTorch's schemas write it."""
    if kind.startswith("Optional["):
        return f"{_readable(_plain(kind))}?"
    if kind.startswith("List["):
        return f"{_readable(kind[len('List[') : -1])}[]"
    return {"number": "Scalar"}.get(kind, kind)
