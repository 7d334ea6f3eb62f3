"""What the ``symbolic`` of a ``torch.autograd.Function`` says of its node.

PyTorch's old exporter called it with a graph. Here it is called with a graph that only records, and
with values of which nothing is known; each argument that is no tensor takes two values, which tell
the attributes that follow it from those that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_moe._op_schemas import PLUGIN_ATTRIBUTES

__all__ = ["declaration_of"]

# Kinds of attributes by the suffix of their keyword, and the arguments that they can hold.
_KINDS = {"f": ("float",), "i": ("int", "bool"), "s": ("str",)}
_VALUES: Mapping[str, tuple[Any, Any]] = {
    "int": (1000003, 1000033),
    "bool": (False, True),
    "float": (0.7853981, 1.0471975),
    "str": ("first", "second"),
}


def declaration_of(symbolic: Callable[..., Any], schema: Any, name: str) -> dict[str, Any]:
    """Returns the arguments of ``register_op`` that say what ``symbolic`` says.

    Args:
        symbolic: The function of the graph and of the operator's arguments.
        schema: The operator's ``torch.FunctionSchema``.
        name: Of the Function, for messages.

    Raises:
        ValueError: If it does not make exactly one node of the operator's arguments.
    """
    arguments = schema.arguments
    base = _record(symbolic, arguments, {}, len(schema.returns), name)
    _check_domain(base, name)
    tensors = [argument.name for argument in arguments if "Tensor" in str(argument.type)]
    if sorted(base.inputs) != sorted(tensors):
        raise ValueError(
            f"{name}.symbolic gives its node the inputs {', '.join(base.inputs)}; the operator has "
            f"the tensors {', '.join(tensors)}, and each must be there once"
        )
    renamed: dict[str, str] = {}
    for argument in arguments:
        if argument.name in tensors:
            continue
        kind, first, second = _two_values(argument, name)
        other = _record(symbolic, arguments, {argument.name: second}, len(schema.returns), name)
        if set(other.attributes) != set(base.attributes) or other.inputs != base.inputs:
            raise ValueError(f"{name}.symbolic makes other nodes for other {argument.name!r}")
        for attribute, (suffix, value) in base.attributes.items():
            changed = other.attributes[attribute][1]
            if changed == value:
                continue
            if (value, changed) != (first, second):
                raise ValueError(
                    f"{name}.symbolic computes the attribute {attribute!r} from {argument.name!r}; "
                    "an attribute must be an argument as it is"
                )
            if kind not in _KINDS[suffix]:
                raise ValueError(
                    f"{name}.symbolic gives the attribute {attribute!r} as _{suffix}, but the "
                    f"argument {argument.name!r} is {kind}: annotate it {_KINDS[suffix][0]}"
                )
            renamed[argument.name] = attribute
    constants = {
        attribute: value
        for attribute, (_, value) in base.attributes.items()
        if attribute not in renamed.values()
    }
    domain, _, op_type = base.op.rpartition("::")
    found: dict[str, Any] = {
        "domain": domain,
        "op_type": op_type,
        "inputs": base.inputs,
        "attributes": renamed,
        **{key: constants.pop(key) for key in PLUGIN_ATTRIBUTES if key in constants},
    }
    return {**found, "constants": constants} if constants else found


@dataclass
class _Node:
    op: str
    inputs: list[str]
    outputs: list[_Value]
    attributes: dict[str, tuple[str, Any]]


class _Value:
    """A tensor of which nothing is known."""

    def __init__(self, name: str, function: str) -> None:
        self._name, self._function = name, function

    def type(self) -> None:
        """What is often asked only to be set on the result."""

    def setType(self, type: Any) -> _Value:  # noqa: N802  PyTorch's name.
        return self

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            f"{self._function}.symbolic asks for {self._name}.{name}: what it makes depends on "
            "more than the operator's arguments"
        )


class _Graph:
    """Records the nodes that are added to it."""

    def __init__(self, function: str) -> None:
        self._function = function
        self.nodes: list[_Node] = []

    def op(self, name: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """What ``torch.onnx``'s graph has, for nodes of the arguments alone."""
        found = {}
        for key, value in attributes.items():
            attribute, _, suffix = key.rpartition("_")
            if suffix not in _KINDS or not attribute:
                raise ValueError(
                    f"{self._function}.symbolic gives the attribute {key!r}; only _f, _i and _s "
                    "have a counterpart among an operator's arguments"
                )
            found[attribute] = (suffix, list(value) if isinstance(value, tuple) else value)
        results = [_Value(f"output {place}", self._function) for place in range(outputs)]
        names = [getattr(value, "_name", repr(value)) for value in inputs]
        self.nodes.append(_Node(name, names, results, found))
        return results[0] if outputs == 1 else tuple(results)

    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"{self._function}.symbolic uses g.{name}; only g.op can be followed")


def _record(
    symbolic: Callable[..., Any],
    arguments: Sequence[Any],
    changed: Mapping[str, Any],
    results: int,
    name: str,
) -> _Node:
    graph = _Graph(name)
    given = [
        _Value(argument.name, name)
        if "Tensor" in str(argument.type)
        else changed.get(argument.name, _two_values(argument, name)[1])
        for argument in arguments
    ]
    returned = symbolic(graph, *given)
    if len(graph.nodes) != 1:
        ops = ", ".join(node.op for node in graph.nodes) or "none"
        raise ValueError(
            f"{name}.symbolic must make one node, it makes {len(graph.nodes)} ({ops}): write them "
            "as the body of register_op, and choose a domain and an op_type of your own"
        )
    (node,) = graph.nodes
    outputs = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if outputs != node.outputs or len(outputs) != results:
        raise ValueError(
            f"{name}.symbolic must return the {results} results of its node, in order; the node "
            f"has {len(node.outputs)}, and {len(outputs)} are returned"
        )
    return node


def _two_values(argument: Any, name: str) -> tuple[str, Any, Any]:
    """Returns the kind of an argument and two values of it."""
    kind = str(argument.real_type).removeprefix("Optional[").rstrip("]")
    plain = kind.removeprefix("List[")
    if plain not in _VALUES:
        raise ValueError(f"{name}: the argument {argument.name!r} has a type of no attribute")
    first, second = _VALUES[plain]
    if "List[" in str(argument.real_type):
        return plain, [first], [second]
    return plain, first, second


def _check_domain(node: _Node, name: str) -> None:
    domain = node.op.rpartition("::")[0]
    if domain in ("", "onnx", "aten", "prim"):
        raise ValueError(
            f"{name}.symbolic makes {node.op!r}, which is no operator of your own: name it "
            "'domain::Name'"
        )
