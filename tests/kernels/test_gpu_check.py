"""`make gpu-check` without a GPU: its stages, what a kill leaves, kernels compiled beforehand."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from benchmarks.gpu import accuracy, dependent_launch, kernel_archive, precompile
from benchmarks.gpu.check import ARCHIVE, Check, resume
from benchmarks.gpu.compiling import PlanJob, kernel_key
from benchmarks.gpu.layers import SHAPES, parameters_of
from benchmarks.gpu.speed import Device
from benchmarks.gpu.stages import SECONDS, Stage, Window
from benchmarks.gpu.ties import TIE, choice_margins
from benchmarks.gpu.timing import HostTimer
from custom_ops import kernels, reference
from custom_ops.kernels import router
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.plan import plan

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
# What docs/how-to/check_on_a_gpu.md runs on a rented machine, one list a command.
COMMANDS = [
    each.split(",")
    for each in re.findall(
        r"make gpu-check ONLY=(\S+)", (ROOT / "docs/how-to/check_on_a_gpu.md").read_text()
    )
]
# What a machine that is fresh needs again.
BUILD = ("device", "cache", "library")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would run it instead")
interprets = pytest.mark.skipif(
    version("triton").startswith("3.6."),
    reason="Triton 3.6's interpreter fails unrepaired, as in a process of its own",
)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def names_in(archive: Path) -> set[str]:
    with tarfile.open(archive) as packed:
        return {name.removeprefix("gpu_check/") for name in packed.getnames()}


def is_running(process: int) -> bool:
    """Whether a process has not ended, be its exit code read or not."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def check(tmp_path) -> Check:
    window = Window(tmp_path / "work", tmp_path / "work" / "results")
    return Check(window, tmp_path / "out" / ARCHIVE, refresh=0.05)


# --- Running stages ---


def test_a_failing_stage_does_not_hide_the_next(check):
    stages = [
        Stage("a", (python("import sys; print('no'); sys.exit(3)"), python("print('never')")), 30),
        Stage("b", (python("import time; time.sleep(60)"),), 1),
        Stage("c", (python("import benchmarks, moe_cases; print('yes')"),), 30),
        Stage("d", (("no-such-program",),), 30),
        Stage("e", (), 30, missing="no such tool here"),
    ]
    lines = check.run(stages, time.monotonic() + 100)
    assert [line.split(" s  ")[1] for line in lines] == [
        "FAILED: exit code 3",
        "FAILED: not done after 1 s",
        "ok",
        "FAILED: no-such-program: No such file or directory",
        "skipped: no such tool here",
    ]
    assert (check.window.results / "a.log").read_text() == "no\n"
    assert {"a.log", "b.log", "c.log", "summary.txt"} <= names_in(check.archive)


def test_no_stage_begins_after_the_deadline(check):
    (line,) = check.run([Stage("a", (python("print('late')"),), 30)], time.monotonic() - 1)
    assert line.endswith("FAILED: no time is left")
    assert not (check.window.results / "a.log").exists()


def test_a_command_is_told_its_seconds(check):
    told = python("import sys; print(sys.argv[1])")
    check.run([Stage("a", ((*told, SECONDS),), 100)], time.monotonic() + 1000)
    assert 60 < float((check.window.results / "a.log").read_text()) < 75


def test_a_kill_leaves_what_was_written(tmp_path):
    results = tmp_path / "work" / "results"
    half = (
        "import os, pathlib, subprocess, time; print('begun', flush=True)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"file = pathlib.Path({str(results / 'half.json')!r})\n"
        "file.write_text(f'{os.getpid()} {child.pid}'); time.sleep(600)"
    )
    code = (
        "import sys, time; from pathlib import Path\n"
        "from benchmarks.gpu.check import Check; from benchmarks.gpu.stages import Stage, Window\n"
        f"window = Window(Path({str(tmp_path / 'work')!r}), Path({str(results)!r}))\n"
        f"check = Check(window, Path({str(tmp_path / ARCHIVE)!r}), refresh=0.05)\n"
        "first = Stage('first', ((sys.executable, '-c', 'print(1)'),), 60)\n"
        f"slow = Stage('slow', ((sys.executable, '-c', {half!r}),), 600)\n"
        "check.run([first, slow], time.monotonic() + 600)"
    )
    process = subprocess.Popen(python(code), cwd=ROOT)
    expected = {"first.log", "summary.txt", "half.json", "slow.log"}
    deadline = time.monotonic() + 60
    archive = tmp_path / ARCHIVE
    try:
        while not (archive.exists() and expected <= names_in(archive)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    stage = [int(each) for each in (results / "half.json").read_text().split()]
    try:
        while any(map(is_running, stage)):
            assert time.monotonic() < deadline, "the stage outlives gpu-check"
            time.sleep(0.05)
    finally:
        for each in filter(is_running, stage):
            os.kill(each, signal.SIGKILL)
    assert expected <= names_in(archive)
    with tarfile.open(archive) as packed:
        assert packed.extractfile("gpu_check/first.log").read() == b"1\n"


def test_an_archive_is_whole_although_a_file_vanishes(check, monkeypatch):
    check.run([Stage("a", (python("print(1)"),), 30)], time.monotonic() + 100)
    before = check.archive.read_bytes()

    def vanished(*_):
        raise FileNotFoundError

    monkeypatch.setattr(tarfile.TarFile, "add", vanished)
    check.save()
    assert check.archive.read_bytes() == before


def test_going_on_from_an_earlier_machine(check, tmp_path):
    (check.window.results / "tuned").mkdir(parents=True)
    (check.window.results / "tuned" / "sm_90.json").write_text("tables")
    check.run([Stage("a", (python("print(1)"),), 30)], time.monotonic() + 100)
    resume(check.archive, tmp_path / "other")
    results = tmp_path / "other" / "results"
    assert (results / "tuned" / "sm_90.json").read_text() == "tables"
    window = replace(check.window, build=tmp_path / "other", results=results)
    later = Check(window, tmp_path / "later" / ARCHIVE)
    later.run([Stage("b", (python("print(2)"),), 30)], time.monotonic() + 100)
    assert {"a.log", "b.log", "tuned/sm_90.json"} <= names_in(later.archive)


# --- The stages ---


def test_stages_fit_the_window(tmp_path):
    stages = list(Window(tmp_path, tmp_path / "results", tmp_path / "kernels").stages())
    assert [stage.name for stage in stages] == [
        *("device", "cache", "library", "tests", "shapes", "cases"),
        *("memcheck", "racecheck", "synccheck", "initcheck"),
        *("dependent", "baseline", "profile", "tune", "backward", "tuned", "residency"),
    ]
    # A machine is lent for 30 minutes in all, for a command ten: three commands, correctness first.
    limits = {stage.name: stage.seconds for stage in stages}
    for command in COMMANDS:
        assert sum(limits[name] for name in command) <= 580
    assert [name for command in COMMANDS for name in command if name not in BUILD] == [
        name for name in limits if name not in BUILD
    ]


def test_what_is_missing_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    stages = {stage.name: stage for stage in Window(tmp_path, tmp_path).stages()}
    assert stages["memcheck"].missing == "no compute-sanitizer here"
    assert stages["profile"].missing == "no ncu here"
    assert stages["cache"].missing == "no --compiled archive"
    assert "Ninja" not in stages["library"].commands[0]
    (tmp_path / "ninja").write_text("")
    (tmp_path / "ninja").chmod(0o755)
    stages = {stage.name: stage for stage in Window(tmp_path, tmp_path).stages()}
    assert "Ninja" in stages["library"].commands[0]


def test_an_unknown_stage_is_refused(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu.check", "--only", "tests,sleep"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "stages are device, cache, library" in found.stderr
    assert "got sleep" in found.stderr


def stand_in(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@no_gpu
@interprets
@pytest.mark.slow
def test_a_rehearsal(tmp_path, compiled):
    tools = tmp_path / "tools"
    # One of them runs the program; for the others it would be the same.
    runs = f'exec {sys.executable} {SUPPORT / "standin_cases.py"} "$@"'
    stand_in(tools, "compute-sanitizer", f'case "$2" in initcheck) {runs};; esac; test -x "$5"')
    # Runs what it would profile, which begins with the interpreter's path.
    stand_in(tools, "ncu", 'case "$*" in *--import*) exit;; esac; shift 9; exec "$@"')
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PATH"] = os.pathsep.join([str(tools), os.environ["PATH"]])
    command = [sys.executable, "-m", "benchmarks.gpu.check", "--rehearse"]
    command += ["--work", str(tmp_path / "work"), "--output", str(tmp_path)]
    found = subprocess.run(
        [*command, "--compiled", str(compiled)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr
    assert found.stdout.count("s  ok") == 2 * 17
    files = names_in(tmp_path / ARCHIVE)
    for stage in Window(tmp_path, tmp_path).stages():
        assert f"{stage.name}.log" in files
    measured = ("shapes", "dependent", "baseline", "tuned", "residency")
    assert {f"{name}.json" for name in measured} <= files
    logs = tmp_path / "work" / "results"
    assert re.search(r"\n=+ [3-9]\d passed, \d+ deselected", (logs / "tests.log").read_text())
    assert "jobs compiled 0 more" in (logs / "cache.log").read_text()
    assert "7 forward passes, 0 wrong" in (logs / "initcheck.log").read_text()


# --- Whole layers against the oracle, and with and without dependent launch ---


def test_a_layer_is_compared_with_the_oracle(monkeypatch):
    shape = SHAPES["tiny"]
    parameters = parameters_of(shape, torch.float32, "cpu")
    found = accuracy.compare(shape, parameters, 20, architecture("sm_80"))
    assert found["right"]
    assert found["tokens"] == 20
    assert 0 < found["rms"] < found["worst"] < 1e-5
    launch = accuracy.launch

    def one_element_off(planned, tensors, workspace):
        launch(planned, tensors, workspace)
        tensors["y"][7, 3] += 0.1

    monkeypatch.setattr(accuracy, "launch", one_element_off)
    assert not accuracy.compare(shape, parameters, 20, architecture("sm_80"))["right"]
    monkeypatch.setattr(accuracy, "launch", lambda *_: None)
    assert not accuracy.compare(shape, parameters, 20, architecture("sm_80"))["right"]


@pytest.mark.parametrize("name", ["tiny", "gpt-oss", "deepseek"])
def test_compared_tokens_have_no_ties(name):
    router = replace(SHAPES[name].router, top_k=2)
    if router.limits_groups:
        router = replace(router, n_group=3, topk_group=2)
    shape = replace(SHAPES[name], width=32, hidden=24, experts=6, top_k=2, router=router)
    parameters = parameters_of(shape, torch.bfloat16, "cpu")
    x = accuracy.without_ties(shape, parameters, 500)
    assert x.shape == (500, 32)
    weight, *biases = map(parameters.get, ("router_weight", "router_bias", "selection_bias"))
    # Rounding elsewhere changes no choice: a logit is off by much more than float32's rounding.
    ids, _ = reference.router(x, weight, biases[0], router, biases[1])
    noise = 1 + 2.0**-17 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    again, _ = reference.router(x, weight * noise, biases[0], router, biases[1])
    assert torch.equal(ids, again)
    margins = choice_margins(x, weight, biases[0], router, biases[1])
    assert bool((margins > TIE).all())


def test_the_oracle_in_blocks_of_rows(monkeypatch):
    shape = SHAPES["tiny"]
    parameters = parameters_of(shape, torch.float32, "cpu")
    x = accuracy.without_ties(shape, parameters, 40)
    whole = accuracy.oracle(shape, parameters, x)
    monkeypatch.setattr(accuracy, "_ROWS", 16)
    monkeypatch.setattr(accuracy, "_EXPERTS", 3)
    torch.testing.assert_close(accuracy.oracle(shape, parameters, x), whole)


def test_both_kinds_of_launch_are_measured(monkeypatch):
    seen = []
    launch = dependent_launch.launch

    def noting(planned, *more):
        seen.append({spec.dependent_launch for spec in planned.ranges[0].launches})
        launch(planned, *more)

    monkeypatch.setattr(dependent_launch, "launch", noting)
    device = Device("cpu", architecture("sm_90"), HostTimer())
    found = dependent_launch.measure(SHAPES["tiny"], 5, device, torch.float32)
    assert found["same"]
    assert set(found["us"]) == {"with", "without"}
    assert {True} in seen
    assert {False} in seen


# --- Kernels that are compiled beforehand ---


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Path:
    """The tiny layer's kernels for sm_90."""
    archive = tmp_path_factory.mktemp("compiled") / "sm_90.tar.xz"
    module("precompile", "--shapes", "tiny", "--limit", "0", "--output", str(archive))
    return archive


def module(name: str, *arguments: str, **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, "-m", f"benchmarks.gpu.{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "not compiled" not in found.stdout
    return found.stdout


@no_gpu
@pytest.mark.slow
def test_what_was_not_compiled_beforehand_is_compiled(compiled, tmp_path):
    cache, less = tmp_path / "cache", tmp_path / "less.tar.xz"
    kernel_archive.unpack(compiled, cache)
    found = list(cache.glob("*/few_up_kernel.json"))
    # The probe does not ask for those without dependent launch.
    dependent = [path for path in found if json.loads(path.read_text())["launch_pdl"]]
    shutil.rmtree(dependent[0].parent)
    kernel_archive.pack(cache, less)
    text = module("probe_cache", str(less), "--dry-run", TRITON_CACHE_DIR=str(tmp_path / "other"))
    assert int(re.match(r"(\d+) kernels unpacked", text)[1]) > 10
    assert "compiled 1 more" in text


def test_an_archive_has_what_a_launch_reads(tmp_path):
    entry = tmp_path / "cache" / "KEY"
    entry.mkdir(parents=True)
    for suffix in ("cubin", "ptx", "source", "json"):
        (entry / f"a_kernel.{suffix}").write_text(suffix)
    paths = {path.name: str(path) for path in entry.iterdir()}
    (entry / "__grp__a_kernel.json").write_text(json.dumps({"child_paths": paths}))
    assert kernel_archive.kernel_count(tmp_path / "cache") == 1
    kernel_archive.pack(tmp_path / "cache", tmp_path / "kernels.tar.xz")
    other = tmp_path / "other"
    kernel_archive.unpack(tmp_path / "kernels.tar.xz", other)
    assert sorted(path.name for path in (other / "KEY").iterdir()) == [
        *("__grp__a_kernel.json", "a_kernel.cubin", "a_kernel.json")
    ]
    group = json.loads((other / "KEY" / "__grp__a_kernel.json").read_text())["child_paths"]
    assert group["a_kernel.cubin"] == str(other / "KEY" / "a_kernel.cubin")


def wheel_with(path: Path, library: bytes, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("triton/_C/libtriton.so", library)
        for name, text in files.items():
            wheel.writestr(f"triton/{name}.py", text)
    return path


def test_the_key_of_another_wheel(tmp_path):
    from triton.runtime.cache import triton_key

    installed = Path(sys.modules["triton"].__file__).parent
    same = (installed / "errors.py").read_text()
    key = precompile.key_of_wheel(wheel_with(tmp_path / "a.whl", b"other", errors=same))
    assert hashlib.sha256(b"other").hexdigest() in key
    assert len(key) == len(triton_key())
    assert key != triton_key()
    with pytest.raises(ValueError, match=r"b\.whl has another triton/errors\.py"):
        precompile.key_of_wheel(wheel_with(tmp_path / "b.whl", b"other", errors="1"))


def global_constants(module: ModuleType) -> set[str]:
    """The names of a module's constants that Triton lets kernels use."""
    made = {name for name, value in vars(module).items() if isinstance(value, tl.constexpr)}
    annotated = inspect.get_annotations(module).items()
    return made | {name for name, kind in annotated if "constexpr" in str(kind)}


def test_a_modules_constants():
    module = ModuleType("module")
    vars(module).update(A=tl.constexpr(1), B=2, C=3, D=4)
    module.__annotations__ = {"B": tl.constexpr, "C": "tl.constexpr", "D": int}
    assert global_constants(module) == {"A", "B", "C"}


def test_a_kernels_key_is_the_same_in_every_process():
    # Triton 3.6 puts the global constants of a called function into a kernel's key only if that
    # function's own key is known by then, so kernels have none.
    names = (each.name for each in iter_modules(kernels.__path__, f"{kernels.__name__}."))
    modules = [importlib.import_module(name) for name in names]
    assert router in modules
    assert not {module.__name__: found for module in modules if (found := global_constants(module))}


def test_all_kernels_of_the_window_are_compiled_beforehand():
    on, shapes = architecture("sm_90"), [SHAPES["tiny"]]
    jobs = dict(precompile.window_jobs(shapes, shapes, shapes, on, 2))
    specs = [job.spec for job in jobs.values() if isinstance(job, PlanJob)]
    assert {spec.dependent_launch for spec in specs} == {True, False}
    measured = dict(precompile.window_jobs(shapes, shapes, shapes, on, 0))
    assert set(measured) < set(jobs)
    assert list(measured) == list(dict(precompile.window_jobs(shapes, [], shapes, on, 2)))
    layer = replace(shapes[0].layer(torch.bfloat16, router=False), resident_experts=1)
    in_waves = {kernel_key(spec) for spec in plan(layer, on).at(1).kernels()}
    assert in_waves <= set(measured)
    assert not in_waves <= set(dict(precompile.window_jobs(shapes, [], [], on, 0)))
