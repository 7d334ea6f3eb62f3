"""Private names of other packages are used in a few modules alone, which the docs list."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("custom_ops", "dynamo_moe", "trt_plugin")
PAGE = ROOT / "docs" / "explanation" / "architecture.md"

# What named tuples and ctypes call public.
PUBLIC = {"_asdict", "_fields", "_make", "_replace"}
# Operators of ATen; a trace consists of them, by these names.
OPERATORS = ("_aten.", "_prims.", "torch.ops.")
# Functions that take the name of an attribute.
BY_NAME = {"delattr", "getattr", "hasattr", "replaced", "setattr"}


class Use(NamedTuple):
    """A private name and where it stands."""

    module: str
    line: int
    name: str


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC | {"_"}


def has_private_part(path: str) -> bool:
    return any(map(is_private, path.split("."))) or ".experimental" in path


def defined(tree: ast.AST) -> set[str]:
    """The names of a module's own functions, classes, variables and attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in {"self", "cls"}
        ):
            names.add(node.attr)
    return names


def foreign_modules(tree: ast.AST) -> set[str]:
    """The names by which a module knows other packages' modules and objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                alias.asname or alias.name.partition(".")[0]
                for alias in node.names
                if alias.name.partition(".")[0] not in PACKAGES
            }
        elif isinstance(node, ast.ImportFrom) and not is_own(node):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def is_own(node: ast.ImportFrom) -> bool:
    return (node.module or "").partition(".")[0] in (*PACKAGES, "__future__")


def docstrings(tree: ast.AST) -> set[ast.AST]:
    bodies = (getattr(node, "body", None) for node in ast.walk(tree))
    return {
        statement.value
        for body in bodies
        if isinstance(body, list)
        for statement in body
        if isinstance(statement, ast.Expr)
    }


def private_uses(source: str, module: str = "") -> Iterator[Use]:
    """Yields the private names of other packages that a module's source uses."""
    tree = ast.parse(source)
    own, foreign, documentation = defined(tree), foreign_modules(tree), docstrings(tree)
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    modules = {alias.name for node in imports for alias in node.names}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.partition(".")[0] not in PACKAGES]
            names = [*filter(has_private_part, names)]
        elif isinstance(node, ast.ImportFrom) and not is_own(node):
            names = [*filter(has_private_part, (f"{node.module}.{a.name}" for a in node.names))]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            path = ast.unparse(node)
            root = re.match(r"\w*", path)[0]  # type: ignore[index]
            if root in foreign and not path.startswith(OPERATORS):
                names = [path if root in modules else node.attr]
            elif node.attr not in own and not path.startswith(OPERATORS):
                names = [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in BY_NAME:
                constants = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
                of_others = ast.unparse(node.args[0]).partition(".")[0] in foreign
                names = [n for n in constants if is_private(n) and (of_others or n not in own)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            in_module = re.findall(r"\b(?:torch|transformers|onnxscript)[\w.]*\._\w+", node.value)
            names = [] if node in documentation else in_module
            # There, names are passed by variables as well.
            in_door = "/private/" in module and node.value.isidentifier()
            if in_door and is_private(node.value) and node.value not in own:
                names.append(node.value)
        yield from (Use(module, node.lineno, name) for name in names)


def all_uses() -> dict[str, set[str]]:
    """Private names by module, of our packages."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            uses = {use.name for use in private_uses(path.read_text(), name)}
            if uses:
                found[name] = uses
    return found


def documented() -> dict[str, set[str]]:
    """Private names by module, as the docs list them."""
    text = PAGE.read_text().partition("## Private names")[2].partition("\n## ")[0]
    found = {}
    for part in re.split(r"^(?=`[\w/]+\.py`$)", text, flags=re.MULTILINE)[1:]:
        module, _, definition = part.partition("\n")
        names = re.findall(r"`([^`]+)`", definition.partition("Names:")[2])
        found[module.strip("`")] = set(names)
    return found


def test_the_docs_list_every_private_name() -> None:
    assert documented() == all_uses()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch.utils import _pytree as pytree", "torch.utils._pytree"),
        (
            "from torch.fx.experimental.proxy_tensor import make_fx",
            "torch.fx.experimental.proxy_tensor.make_fx",
        ),
        ("import torch\ntorch._C.parse_schema('f')", "torch._C"),
        ("import torch\ndef _check(): torch._check(True)", "torch._check"),
        ("import sys\nsys._getframe()", "sys._getframe"),
        ("def f(program): program._graph_module = None", "_graph_module"),
        ("def f(config): return config._experts_implementation", "_experts_implementation"),
        ("class A(B):\n    def f(self): return self._of_the_base()", "_of_the_base"),
        ("def f(module): return getattr(module, '_apply_gate')", "_apply_gate"),
        ("def f(x):\n    import logging\n    logging.getLogger('torch._dynamo')", "torch._dynamo"),
    ],
)
def test_a_private_name_is_found(source: str, name: str) -> None:
    assert name in {use.name for use in private_uses(source)}


@pytest.mark.parametrize(
    "source",
    [
        "from custom_ops import _grouped\n_grouped.f()",
        "class A:\n    def __init__(self): self._x = 1\n    def f(self, other): return other._x",
        "import torch\n_aten = torch.ops.aten\n_aten._to_copy.default",
        "from typing import NamedTuple\nclass A(NamedTuple): x: int\nA(1)._replace(x=2)",
        "import torch\ntorch.__version__",
    ],
)
def test_nothing_else_is(source: str) -> None:
    assert not [*private_uses(source)]
