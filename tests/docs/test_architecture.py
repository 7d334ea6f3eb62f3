"""Which package imports which, and how long imports take."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]

# Packages that are slow to import or belong to an extra.
LOADED_AT_FIRST_USE = {
    "fast_sugiyama",
    "matplotlib",
    "networkx",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "scipy",
    "sklearn",
    "transformers",
    "typer",
}


def _python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_operators_import_only_torch_and_triton() -> None:
    graph = grimp.build_graph("custom_ops", include_external_packages=True, cache_dir=None)
    imported = {
        name
        for name in graph.modules
        if graph.is_module_squashed(name) and graph.find_modules_that_directly_import(name)
    }
    assert imported - sys.stdlib_module_names <= {"torch", "triton"}


def test_the_map_has_the_layers_of_the_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["id"] == "layers"]
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    assert "\n".join(layer.replace(" | ", "   ") for layer in layers) in page


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with the same contracts and modules, which import only what they may."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("custom_ops", "dynamo_moe", "trt_plugin"):
        for module in (ROOT / package).rglob("*.py"):
            empty = tmp_path / module.relative_to(ROOT)
            empty.parent.mkdir(parents=True, exist_ok=True)
            empty.touch()
    (tmp_path / "dynamo_moe" / "cli" / "__init__.py").write_text("import trt_plugin\n")
    return tmp_path


def _lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    # -S leaves out the hook of an editable install, which would find the real packages first.
    run = "from importlinter.cli import lint_imports_command as run; run(['--no-cache'])"
    path = os.pathsep.join([str(tree), sysconfig.get_path("purelib")])
    return subprocess.run(
        [sys.executable, "-S", "-c", run],
        check=False,
        capture_output=True,
        text=True,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
    )


def test_contracts_allow_the_command_line_to_import_the_plugin(tree: Path) -> None:
    result = _lint_imports(tree)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("custom_ops", "dynamo_moe"),
        ("custom_ops", "onnx"),
        ("custom_ops", "onnx_ir"),
        ("custom_ops", "onnxruntime"),
        ("custom_ops", "onnxscript"),
        ("custom_ops", "tensorrt"),
        ("custom_ops", "trt_plugin"),
        ("dynamo_moe", "tensorrt"),
        ("dynamo_moe", "trt_plugin"),
        ("dynamo_moe.conversion", "trt_plugin"),
        ("trt_plugin", "dynamo_moe"),
        ("trt_plugin", "onnx"),
        ("trt_plugin", "onnx_ir"),
        ("trt_plugin", "onnxruntime"),
        ("trt_plugin", "onnxscript"),
    ],
)
def test_contracts_forbid(tree: Path, module: str, imported: str) -> None:
    (tree / Path(*module.split(".")) / "bad.py").write_text(
        f"def late() -> None:\n    import {imported}.part\n"
    )
    result = _lint_imports(tree)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{module}.bad -> {imported}" in result.stdout


def test_contracts_forbid_imports_of_a_folder_above(tree: Path) -> None:
    (tree / "dynamo_moe" / "weights" / "__init__.py").write_text("import dynamo_moe.graph\n")
    result = _lint_imports(tree)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "dynamo_moe.weights -> dynamo_moe.graph" in result.stdout


@pytest.mark.parametrize(
    ("folder", "below", "above"),
    [
        ("conversion", "layer_spec", "convert_layers"),
        ("moe_nodes", "nodes", "targets"),
    ],
)
def test_contracts_hold_the_order_inside_a_folder(
    tree: Path, folder: str, below: str, above: str
) -> None:
    module = tree / "dynamo_moe" / folder / f"{below}.py"
    module.write_text(f"import dynamo_moe.{folder}.{above}\n")
    result = _lint_imports(tree)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"dynamo_moe.{folder}.{below} -> dynamo_moe.{folder}.{above}" in result.stdout


@pytest.mark.parametrize("package", ["custom_ops", "dynamo_moe"])
def test_import_leaves_slow_and_optional_packages_alone(package: str) -> None:
    # Some builds of PyTorch import networkx by themselves.
    code = (
        f"import sys, torch; known = {{*sys.modules}}; import {package}; "
        "print(*sys.modules.keys() - known)"
    )
    added = set(_python(code).split())
    assert package in added
    assert added.isdisjoint(LOADED_AT_FIRST_USE)


@pytest.mark.slow
@pytest.mark.every
def test_import_takes_little_longer_than_torch() -> None:
    # Processor time, and the minimum of each: other work on the machine only adds to it.
    seconds = "print(time.process_time())"
    code = f"import time, torch; {seconds}; import dynamo_moe; {seconds}"
    pairs = [tuple(map(float, _python(code).split())) for _ in range(3)]
    torch_alone, with_ours = (min(times) for times in zip(*pairs, strict=True))
    assert with_ours < 1.5 * torch_alone, pairs


def test_another_custom_ops_is_named() -> None:
    # Set by hand, because an editable install finds ours before any path.
    code = (
        "import sys, types; other = sys.modules['custom_ops'] = types.ModuleType('custom_ops'); "
        "other.__file__ = 'elsewhere/custom_ops/__init__.py'; import dynamo_moe"
    )
    with pytest.raises(subprocess.CalledProcessError) as raised:
        _python(code)
    message = raised.value.stderr.splitlines()[-1]
    assert message.startswith("ImportError: dynamo_moe needs its own package custom_ops, but")
    assert "elsewhere/custom_ops" in message
