"""The ONNX node that the ``symbolic`` of a ``torch.autograd.Function`` declares.

PyTorch's old exporter called it with a graph. Here it is called with a graph that only records:
once, and then once more for each argument that is not a tensor, with another value of it. An
attribute that takes both values is that argument; one that never changes is a constant. If a
``symbolic`` compares an argument it is refused, since another value might make a different node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_moe.operators.schemas import PLUGIN_ATTRIBUTES

# Kinds of attributes by the suffix of their keyword, and the arguments that they can hold.
_KINDS = {"f": ("float",), "i": ("int", "bool"), "s": ("str",)}
# Two values by the type of an argument; they equal nothing that a symbolic makes by itself.
_VALUES: Mapping[str, tuple[Any, Any]] = {
    "int": (1000003, 1000033),
    "bool": (False, True),
    "float": (0.7853981, 1.0471975),
    "str": ("first value", "second value"),
}


def declaration_of(symbolic: Callable[..., Any], schema: Any, name: str) -> dict[str, Any]:
    """Returns the arguments of ``register_op`` that declare the node of ``symbolic``.

    Args:
        symbolic: The function of the graph and of the operator's arguments.
        schema: The operator's ``torch.FunctionSchema``.
        name: The Function's name, for messages.

    Raises:
        ValueError: If it does not make exactly one node of the operator's arguments.
    """
    arguments, results = schema.arguments, len(schema.returns)
    base = _record(symbolic, arguments, {}, results, name)
    domain, _, op_type = base.op.rpartition("::")
    if domain in ("", "onnx", "aten", "prim"):
        raise ValueError(
            f"{name}.symbolic makes {base.op!r}, which is not an operator of your own: name "
            "it 'domain::Name'"
        )
    tensors = [argument.name for argument in arguments if "Tensor" in str(argument.type)]
    if sorted(base.inputs) != sorted(tensors):
        raise ValueError(
            f"{name}.symbolic gives its node the inputs {', '.join(base.inputs)}; the operator has "
            f"the tensors {', '.join(tensors)}, and each must be there once"
        )
    renamed: dict[str, str] = {}
    for argument in arguments:
        key = argument.name
        if key not in tensors:
            kind, values = _values(argument, name)
            changed = _record(symbolic, arguments, {key: values[1]}, results, name)
            attribute = _attribute_of(key, kind, values, base, changed, name)
            if attribute is not None:
                renamed[key] = attribute
        if str(argument.real_type).startswith("Optional["):
            try:
                without = _record(symbolic, arguments, {key: None}, results, name)
            except (AttributeError, TypeError):
                continue  # The symbolic itself cannot take None.
            _check_without(base, without, key, renamed.get(key), name)
    constants = {
        attribute: value
        for attribute, (_, value) in base.attributes.items()
        if attribute not in renamed.values()
    }
    declaration: dict[str, Any] = {
        "domain": domain,
        "op_type": op_type,
        "inputs": base.inputs,
        "attributes": renamed,
        **{key: constants.pop(key) for key in PLUGIN_ATTRIBUTES if key in constants},
    }
    return {**declaration, "constants": constants} if constants else declaration


def _attribute_of(
    key: str, kind: str, values: tuple[Any, Any], base: _Node, other: _Node, name: str
) -> str | None:
    """Returns the attribute that is the argument; ``base`` and ``other`` have its two values."""
    same = (base.op, base.inputs, set(base.attributes))
    if (other.op, other.inputs, set(other.attributes)) != same:
        raise ValueError(f"{name}.symbolic makes other nodes for other {key!r}")
    changed = [
        a for a, typed_value in base.attributes.items() if typed_value != other.attributes[a]
    ]
    for attribute in changed:
        suffix, value = base.attributes[attribute]
        if (value, other.attributes[attribute][1]) != values:
            raise ValueError(
                f"{name}.symbolic computes the attribute {attribute!r} from {key!r}; an attribute "
                "must be an argument as it is"
            )
        if kind not in _KINDS[suffix]:
            raise ValueError(
                f"{name}.symbolic gives the attribute {attribute!r} as _{suffix}, but the "
                f"argument {key!r} is {kind}: annotate it {_KINDS[suffix][0]}"
            )
    if len(changed) > 1:
        raise ValueError(
            f"{name}.symbolic gives {key!r} to the attributes {', '.join(changed)}; it must be one"
        )
    return changed[0] if changed else None


def _check_without(base: _Node, other: _Node, key: str, follower: str | None, name: str) -> None:
    """Checks the node where an optional argument is None: it has no such input or attribute."""
    inputs = [input_name for input_name in other.inputs if input_name != "None"]
    attributes = {
        a: typed_value for a, typed_value in other.attributes.items() if typed_value[1] is not None
    }
    expected = {a: typed_value for a, typed_value in base.attributes.items() if a != follower}
    remaining = [input_name for input_name in base.inputs if input_name != key]
    if (other.op, inputs, attributes) != (base.op, remaining, expected):
        raise ValueError(
            f"{name}.symbolic makes another node where {key!r} is None; it must be the same, "
            f"without {key!r}"
        )


@dataclass
class _Node:
    op: str
    inputs: list[str]
    outputs: list[_Value]
    attributes: dict[str, tuple[str, Any]]


class _Value:
    """A tensor, or the type of one, about which nothing is known."""

    def __init__(self, name: str, function: str) -> None:
        self._name, self._function = name, function

    def type(self) -> _Value:
        """Returns a type, which is often only changed and set on the result."""
        return _Value(f"{self._name}.type()", self._function)

    def setType(self, type: Any) -> _Value:  # noqa: N802  PyTorch's name.
        return self

    setTypeAs = setType

    def __getattr__(self, name: str) -> Any:
        if name.startswith("with_"):
            return lambda *args, **kwargs: self
        raise ValueError(
            f"{self._function}.symbolic asks for {self._name}.{name}: what it makes depends on "
            "more than the operator's arguments"
        )


def _guarded(value: Any, description: str) -> Any:
    """Returns a number or a string that refuses to be compared; others as they are."""

    def refuse(*_: Any) -> Any:
        raise ValueError(
            f"{description}: what it makes may depend on the value. Declare the node with "
            "register_op, and pass symbolic=False"
        )

    if isinstance(value, list):
        return [_guarded(item, description) for item in value]
    if value is None or isinstance(value, bool):
        return value
    kind = type(value)
    names = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__len__")
    guards = dict.fromkeys((*names, "__hash__"), refuse)
    return type(kind.__name__, (kind,), guards)(value)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    kinds = (kind for kind in (float, int, str) if isinstance(value, kind))
    return value if isinstance(value, bool) else next((kind(value) for kind in kinds), value)


class _Graph:
    """Records the nodes that are added to it."""

    def __init__(self, function: str) -> None:
        self._function = function
        self.nodes: list[_Node] = []

    def op(self, name: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Adds a node, as the graph of ``torch.onnx`` does."""
        typed_values = {}
        for key, value in attributes.items():
            attribute, _, suffix = key.rpartition("_")
            if suffix not in _KINDS or not attribute:
                raise ValueError(
                    f"{self._function}.symbolic gives the attribute {key!r}; only _f, _i and _s "
                    "have a counterpart among an operator's arguments"
                )
            typed_values[attribute] = (suffix, _plain(value))
        results = [_Value(f"output {index}", self._function) for index in range(outputs)]
        names = [getattr(value, "_name", repr(value)) for value in inputs]
        self.nodes.append(_Node(name, names, results, typed_values))
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
    """Returns the node that ``symbolic`` makes of the changed arguments."""
    graph = _Graph(name)
    inputs: list[Any] = []
    for argument in arguments:
        key = argument.name
        if key in changed and changed[key] is None:
            inputs.append(None)
        elif "Tensor" in str(argument.type):
            inputs.append(_Value(key, name))
        else:
            value = changed.get(key, _values(argument, name)[1][0])
            inputs.append(_guarded(value, f"{name}.symbolic compares {key!r}"))
    returned = symbolic(graph, *inputs)
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


def _values(argument: Any, name: str) -> tuple[str, tuple[Any, Any]]:
    """Returns the kind of an argument, and two values of it."""
    kind = str(argument.real_type).removeprefix("Optional[").rstrip("]")
    plain = kind.removeprefix("List[")
    if plain not in _VALUES:
        raise ValueError(
            f"{name}: the argument {argument.name!r} has a type that an attribute cannot have"
        )
    first, second = _VALUES[plain]
    return plain, ([first], [second]) if "List[" in kind else (first, second)
