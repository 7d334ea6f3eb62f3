"""What the ``symbolic`` of a ``torch.autograd.Function`` says of its node.

PyTorch's old exporter called it with a graph. Here it is called with a graph that only records, and
with values of which nothing is known; each argument that is no tensor takes several values, which
tell the attributes that follow it from those that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_moe.operators.schemas import PLUGIN_ATTRIBUTES

__all__ = ["declaration_of"]

# Kinds of attributes by the suffix of their keyword, and the arguments that they can hold.
_KINDS = {"f": ("float",), "i": ("int", "bool"), "s": ("str",)}
# The first two are equal to nothing that a symbolic compares with, the others to what it might.
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "int": (1000003, 1000033, 0, 1, -1, 2, 3, 4, 8, 2**31),
    "bool": (False, True),
    "float": (0.7853981, 1.0471975, 0.0, 1.0, -1.0, 0.25, 0.5, 2.0, 10.0, 1e-12, 1e-3, 1e12, -1e12),
    "str": ("first", "second", "", "none", "None"),
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
    arguments, results = schema.arguments, len(schema.returns)
    base = _record(symbolic, arguments, {}, results, name)
    _check_domain(base, name)
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
            kind, (first, second, *more) = _values(argument, name)
            other = _record(symbolic, arguments, {key: second}, results, name)
            _check_same_node(base, other, key, name)
            attribute = _follower(base, other, (key, kind, first, second), name)
            if attribute is not None:
                renamed[key] = attribute
            for value in more:
                if tried := _try_value(symbolic, arguments, {key: value}, results, name):
                    _check_same_node(base, tried, key, name)
                    _check_attributes(base, tried, (key, value, attribute), name)
        if str(argument.real_type).startswith("Optional[") and (
            tried := _try_value(symbolic, arguments, {key: None}, results, name)
        ):
            _check_without(base, tried, key, renamed.get(key), name)
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


def _follower(
    base: _Node, other: _Node, argument: tuple[str, str, Any, Any], name: str
) -> str | None:
    """Returns the attribute that is the argument, which took two values."""
    key, kind, first, second = argument
    found = [a for a, held in base.attributes.items() if held != other.attributes[a]]
    for attribute in found:
        suffix, value = base.attributes[attribute]
        if (value, other.attributes[attribute][1]) != (first, second):
            raise _computed(name, attribute, key)
        if kind not in _KINDS[suffix]:
            raise ValueError(
                f"{name}.symbolic gives the attribute {attribute!r} as _{suffix}, but the "
                f"argument {key!r} is {kind}: annotate it {_KINDS[suffix][0]}"
            )
    if len(found) > 1:
        raise ValueError(
            f"{name}.symbolic gives {key!r} to the attributes {', '.join(found)}; it must be one"
        )
    return found[0] if found else None


def _check_same_node(base: _Node, other: _Node, key: str, name: str) -> None:
    same = (base.op, base.inputs, set(base.attributes))
    if (other.op, other.inputs, set(other.attributes)) != same:
        raise ValueError(f"{name}.symbolic makes other nodes for other {key!r}")


def _check_attributes(
    base: _Node, other: _Node, argument: tuple[str, Any, str | None], name: str
) -> None:
    key, value, follower = argument
    for attribute, (suffix, held) in other.attributes.items():
        expected = (suffix, value) if attribute == follower else base.attributes[attribute]
        if (suffix, held) != expected:
            raise _computed(name, attribute, key)


def _check_without(base: _Node, other: _Node, key: str, follower: str | None, name: str) -> None:
    """Checks the node where an optional argument is None: it has no such input or attribute."""
    inputs = [given for given in other.inputs if given != "None"]
    attributes = {a: held for a, held in other.attributes.items() if held[1] is not None}
    expected = {a: held for a, held in base.attributes.items() if a != follower}
    if (other.op, inputs) != (base.op, [given for given in base.inputs if given != key]) or (
        attributes != expected
    ):
        raise ValueError(
            f"{name}.symbolic makes another node where {key!r} is None; it must be the same, "
            f"without {key!r}"
        )


def _computed(name: str, attribute: str, key: str) -> ValueError:
    return ValueError(
        f"{name}.symbolic computes the attribute {attribute!r} from {key!r}; an attribute must be "
        "an argument as it is"
    )


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

    def type(self) -> _Type:
        """What is often asked only to be set on the result."""
        return _Type(self._name, self._function)

    def setType(self, type: Any) -> _Value:  # noqa: N802  PyTorch's name.
        return self

    setTypeAs = setType

    def __getattr__(self, name: str) -> Any:
        raise _UnsupportedError(
            f"{self._function}.symbolic asks for {self._name}.{name}: what it makes depends on "
            "more than the operator's arguments"
        )


class _Type:
    """A type of which nothing is known; PyTorch's exporter finds those of the results itself."""

    def __init__(self, value: str, function: str) -> None:
        self._value, self._function = value, function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("with_"):
            return lambda *args, **kwargs: self
        raise _UnsupportedError(
            f"{self._function}.symbolic asks for {self._value}.type().{name}: what it makes "
            "depends on more than the operator's arguments"
        )


class _UnsupportedError(ValueError):
    """Raised while ``symbolic`` runs, of what it does; other errors are its own."""


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
                raise _UnsupportedError(
                    f"{self._function}.symbolic gives the attribute {key!r}; only _f, _i and _s "
                    "have a counterpart among an operator's arguments"
                )
            found[attribute] = (suffix, list(value) if isinstance(value, tuple) else value)
        results = [_Value(f"output {place}", self._function) for place in range(outputs)]
        names = [getattr(value, "_name", repr(value)) for value in inputs]
        self.nodes.append(_Node(name, names, results, found))
        return results[0] if outputs == 1 else tuple(results)

    def __getattr__(self, name: str) -> Any:
        raise _UnsupportedError(
            f"{self._function}.symbolic uses g.{name}; only g.op can be followed"
        )


def _record(
    symbolic: Callable[..., Any],
    arguments: Sequence[Any],
    changed: Mapping[str, Any],
    results: int,
    name: str,
) -> _Node:
    """Returns the node that ``symbolic`` makes of the changed arguments."""
    graph = _Graph(name)
    given = [
        changed[argument.name]
        if argument.name in changed
        else _Value(argument.name, name)
        if "Tensor" in str(argument.type)
        else _values(argument, name)[1][0]
        for argument in arguments
    ]
    returned = symbolic(graph, *given)
    if len(graph.nodes) != 1:
        ops = ", ".join(node.op for node in graph.nodes) or "none"
        raise _UnsupportedError(
            f"{name}.symbolic must make one node, it makes {len(graph.nodes)} ({ops}): write them "
            "as the body of register_op, and choose a domain and an op_type of your own"
        )
    (node,) = graph.nodes
    outputs = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if outputs != node.outputs or len(outputs) != results:
        raise _UnsupportedError(
            f"{name}.symbolic must return the {results} results of its node, in order; the node "
            f"has {len(node.outputs)}, and {len(outputs)} are returned"
        )
    return node


def _try_value(symbolic: Callable[..., Any], *args: Any) -> _Node | None:
    """Returns the node, or None if ``symbolic`` itself refuses the value."""
    try:
        return _record(symbolic, *args)
    except _UnsupportedError:
        raise
    except Exception:
        return None


def _values(argument: Any, name: str) -> tuple[str, Sequence[Any]]:
    """Returns the kind of an argument, and values of it."""
    kind = str(argument.real_type).removeprefix("Optional[").rstrip("]")
    plain = kind.removeprefix("List[")
    if plain not in _VALUES:
        raise ValueError(f"{name}: the argument {argument.name!r} has a type of no attribute")
    values = _VALUES[plain]
    if "List[" in str(argument.real_type):
        return plain, [*([value] for value in values), []]
    return plain, values


def _check_domain(node: _Node, name: str) -> None:
    domain = node.op.rpartition("::")[0]
    if domain in ("", "onnx", "aten", "prim"):
        raise ValueError(
            f"{name}.symbolic makes {node.op!r}, which is no operator of your own: name it "
            "'domain::Name'"
        )
