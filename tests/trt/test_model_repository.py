"""Models of the Triton Inference Server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cli_models import error_of, run
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.plan import plan
from interpreted_gpu import uncompiled_program
from kernel_runs import layer_of
from moe_cases import make_case
from trt_plugin import write_triton_model
from trt_plugin.bundle import Bundle
from trt_plugin.native import library_path

pytest_plugins = ("cli_models",)

# The server's program, such as that of the package nvidia-pytriton, which needs no GPU.
SERVER = os.environ.get("TRITONSERVER")


@pytest.fixture
def engines(tmp_path: Path) -> list[Path]:
    """Files that stand for the engines of two ranks; the server reads none without its backend."""
    paths = [tmp_path / f"moe.rank{rank}.engine" for rank in range(2)]
    for path in paths:
        path.write_text(path.name)
    return paths


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def content(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_one_engine(engines: list[Path], repository: Path) -> None:
    files = write_triton_model(engines[:1], repository / "moe")
    assert files == [repository / "moe" / "config.pbtxt", repository / "moe/1/model.plan"]
    assert content(repository) == {
        "moe/config.pbtxt": 'platform: "tensorrt_plan"\nmax_batch_size: 0\n',
        "moe/1/model.plan": "moe.rank0.engine",
    }


def test_an_engine_for_each_rank(engines: list[Path], repository: Path) -> None:
    arguments = (str(engines[0].parent / "moe.engine"), str(repository / "moe"), "--ranks", "2")
    assert run("triton-model", *arguments).exit_code == 0
    found = content(repository / "moe")
    assert 'key: "multi_device_gpus" value: { string_value: "0,1" }' in found.pop("config.pbtxt")
    assert found == {
        "1/model.plan": "moe.rank0.engine",
        "1/model.plan.rank0": "moe.rank0.engine",
        "1/model.plan.rank1": "moe.rank1.engine",
    }
    assert (repository / "moe/1/model.plan").readlink() == Path("model.plan.rank0")
    assert [path.name for path in repository.iterdir()] == ["moe"]


@pytest.mark.parametrize("has_library", [False, True])
def test_the_library_that_the_server_needs(repository: Path, has_library: bool) -> None:
    program = uncompiled_program(
        plan(layer_of(make_case("dropless", (5,), width=16, hidden=24)), architecture("sm_89"))
    )
    engine = repository.parent / "moe.engine"
    library = library_path().read_bytes() if has_library else b""
    engine.write_bytes(b"a plan" + Bundle((program,)).data + library)
    result = run("triton-model", str(engine), str(repository / "moe"))
    assert result.exit_code == 0
    told = f"plugins={library_path(self_registering=True)}\n" in result.stderr
    assert told != has_library
    assert (repository / "moe/1/model.plan").read_bytes() == engine.read_bytes()


def test_gpus(engines: list[Path], repository: Path) -> None:
    write_triton_model(engines, repository / "moe", gpus=[3, 1])
    assert 'string_value: "3,1"' in (repository / "moe" / "config.pbtxt").read_text()
    for gpus in ([0], [1, 1], [0, -1]):
        with pytest.raises(ValueError, match="one for each of several ranks; got"):
            write_triton_model(engines, repository / "other", gpus=gpus)
    with pytest.raises(ValueError, match="holds none"):
        write_triton_model([], repository / "other")
    assert [path.name for path in repository.iterdir()] == ["moe"]


def test_nothing_is_lost_or_left(engines: list[Path], repository: Path) -> None:
    (repository / "moe").mkdir()
    (repository / "moe" / "mine").touch()
    with pytest.raises(FileExistsError, match="moe exists already"):
        write_triton_model(engines, repository / "moe")
    with pytest.raises(FileNotFoundError, match="missing"):
        write_triton_model([engines[0], repository / "missing"], repository / "other")
    assert content(repository) == {"moe/mine": ""}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("moe.engine", "models/moe"), "no such file: moe.engine"),
        (("moe.engine", "models/moe", "--ranks", "3"), "no such file: moe.rank2.engine"),
        (("moe.rank0.engine", "none/moe"), "no such folder: none"),
        (("moe.rank0.engine", "models"), "models exists already: name a new folder"),
        (("moe.rank0.engine", "models/moe", "--gpus", "0"), "--gpus needs a number for each of"),
        (("moe.engine", "models/moe", "--ranks", "2", "--gpus", "0,x"), "with commas between"),
    ],
)
def test_what_the_command_refuses(
    arguments: tuple[str, ...],
    message: str,
    engines: list[Path],
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(repository.parent)
    assert message in error_of("triton-model", *arguments, code=2)
    assert not any(repository.iterdir())


@pytest.mark.skipif(SERVER is None, reason="TRITONSERVER names no server's program")
def test_a_server_takes_the_config(engines: list[Path], repository: Path) -> None:
    """It comes as far as the backend for TensorRT, which is not there; else it names the error."""
    write_triton_model(engines, repository / "ranks")
    write_triton_model(engines[:1], repository / "one")
    write_triton_model(engines, repository / "wrong")
    wrong = repository / "wrong" / "config.pbtxt"
    wrong.write_text(wrong.read_text().replace("string_value", "text"))
    off = [f"--allow-{what}=false" for what in ("http", "grpc", "metrics")]
    backends = f"--backend-directory={repository.parent}"
    done = subprocess.run(
        [str(SERVER), f"--model-repository={repository}", backends, *off],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("| ")]
    status = {line.split("|")[1].strip(): line for line in lines}
    for model in ("one", "ranks"):
        assert "unable to find backend library for backend 'tensorrt'" in status[model]
    assert "wrong" not in status
