"""What `make gpu-check` runs, in order: the stages of a few dozen minutes on a rented machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from trt_plugin.native import library_path

ROOT = Path(__file__).parents[2]
#: In a command, the seconds that it may take.
SECONDS = "{seconds}"
#: The layers that are tuned, and how many candidates of each product and height of tiles there is
#: time for.
TUNED, CANDIDATES = "qwen3,mixtral,gpt-oss,swin", 8
#: The layers that are measured with experts in host memory.
OFFLOADED = "qwen3,mixtral"

# Cores that tests and compilations take; each process of the tests holds a context on the GPU.
_MOST_WORKERS = 14
_SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
# Layers and numbers of tokens that are measured with dependent launch and without it.
_DEPENDENT = ("--shapes", "qwen3,mixtral,swin2", "--tokens", "1,16,1024")
_BREAKDOWNS = ("qwen3:16", "qwen3:1024", "mixtral:4096", "swin1:64")
# Between them they launch both products of both paths.
_PROFILED = ("qwen3:1", "qwen3:4096")
_PROFILED_KERNELS = "regex:^(few|expert)_(up|down)_kernel"

_DEVICE = """
import platform, shutil, torch, triton
print(platform.python_version(), torch.__version__, triton.__version__)
print(*filter(None, map(shutil.which, ("c++", "cmake", "ninja", "compute-sanitizer", "ncu"))))
print(torch.cuda.get_device_properties(0) if torch.cuda.is_available() else "no CUDA device")
assert torch.cuda.is_available() or {rehearsal}
"""


@dataclass(frozen=True)
class Stage:
    """Commands that run one after another, as long as they succeed."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    seconds: float  # the limit
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the process's
    missing: str = ""  # why it is skipped, if it is


@dataclass(frozen=True)
class Window:
    """Where the stages work."""

    build: Path  # what they build and unpack
    results: Path  # a folder for each stage that measures
    compiled: Path | None = None  # what `benchmarks.gpu.precompile` wrote, as one archive
    rehearsal: bool = False  # on a CPU, at tiny sizes

    def stages(self) -> Iterator[Stage]:
        """Yields the stages, those that later ones depend on first."""
        # Without a device everything else would be skipped, and would seem well.
        device = _DEVICE.format(rehearsal=self.rehearsal)
        yield Stage("device", ((sys.executable, "-c", device),), 30)
        yield self._cache()
        yield self._library()
        yield self._tests()
        accuracy = self._module("accuracy", "--json", self._json("shapes"))
        yield Stage("shapes", ((*accuracy, *self._sizes()),), 100)
        yield from self._sanitizers()
        pairs = self._module("dependent_launch", "--json", self._json("dependent"))
        yield Stage("dependent", ((*pairs, *self._sizes(*_DEPENDENT)),), 40)
        yield self._measure("baseline", 170)
        yield self._profile()
        yield self._tune()
        yield self._backward()
        package = self.build / "package" if self.rehearsal else ROOT / "custom_ops" / "kernels"
        yield self._measure("tuned", 150, ("cp", "-r", str(self._tables), str(package)))
        yield self._residency()

    def _module(self, name: str, *arguments: str, folder: str = "gpu") -> tuple[str, ...]:
        trial = ("--dry-run",) if self.rehearsal else ()
        return (sys.executable, "-m", f"benchmarks.{folder}.{name}", *arguments, *trial)

    def _json(self, name: str) -> str:
        return str(self.results / f"{name}.json")

    def _sizes(self, *asked: str) -> tuple[str, ...]:
        """The layers and numbers of tokens; in a rehearsal, few tokens of the tiny layer."""
        return ("--tokens", "5") if self.rehearsal else asked

    @property
    def _tables(self) -> Path:
        return self.results / "tuned"

    def _cache(self) -> Stage:
        command = self._module("probe_cache", str(self.compiled), "--budget", SECONDS)
        missing = "" if self.compiled else "no --compiled archive"
        return Stage("cache", (command,), 60, missing=missing)

    def _library(self) -> Stage:
        generator = ("-G", "Ninja") if shutil.which("ninja") else ()
        build = str(self.build / "cmake")
        prefix = str(self.build / "installed") if self.rehearsal else "."
        kind = "Debug" if self.rehearsal else "Release"
        commands = (
            ("cmake", *generator, f"-DCMAKE_BUILD_TYPE={kind}", "-S", ".", "-B", build),
            ("cmake", "--build", build, "--parallel", _workers()),
            ("cmake", "--install", build, "--prefix", prefix),
        )
        return Stage("library", commands, 60)

    def _tests(self) -> Stage:
        pytest = (sys.executable, "-m", "pytest", "-c", "tests/gpu.ini", "--rootdir", ".", "-v")
        # Outcomes are in the log as they come, also if the rest is killed.
        parallel = ("-n", _workers()) if find_spec("xdist") else ()
        tests = ("--durations", "5", "tests/ops/test_gpu.py", "tests/trt/test_gpu_launcher.py")
        rehearsed = ("-p", "gpu_rehearsal", "tests/ops/test_gpu.py")
        chosen = rehearsed if self.rehearsal else (*parallel, *tests)
        return Stage("tests", ((*pytest, *chosen),), 300)

    def _sanitizers(self) -> Iterator[Stage]:
        """Layers through the C++ launcher: under the tools, PyTorch would take minutes to start."""
        cases, program = self.build / "cases", self.build / "run_cases"
        # On a GPU's machine the stage `library` puts it there.
        library = library_path().parent if self.rehearsal else ROOT / "trt_plugin"
        script = ("standin_cases.py", "--write") if self.rehearsal else ("launcher_cases.py",)
        make = (sys.executable, f"tests/support/{script[0]}", *script[1:], str(cases))
        link = ("-o", str(program), f"-L{library}", "-ldynamo_moe", f"-Wl,-rpath,{library}", "-ldl")
        source = "tests/native/run_cases.cc"
        compile_ = ("c++", "-std=c++17", "-O1", "-g", "-Itrt_plugin/csrc", source, *link)
        run = (str(program), str(cases))
        # A rehearsal's kernels are not compiled: only the stand-in for a GPU runs them.
        first = () if self.rehearsal else (run,)
        yield Stage("cases", (make, compile_, *first), 90)
        sanitizer = shutil.which("compute-sanitizer")
        missing = "" if sanitizer else "no compute-sanitizer here"
        for tool in _SANITIZERS:
            # Poison would hide from initcheck what is read before it is written.
            fresh = ("--unpoisoned",) if tool == "initcheck" else ()
            command = (str(sanitizer), "--tool", tool, "--error-exitcode", "9", *run, *fresh)
            yield Stage(tool, (command,), 90, missing=missing)

    def _backward(self) -> Stage:
        """The backward pass's kernels, which PyTorch alone launches."""
        rehearsal = ("--dry-run",) if self.rehearsal else ()
        run = (sys.executable, "tests/support/backward_cases.py", *rehearsal)
        sanitizer = shutil.which("compute-sanitizer")
        tools = ("memcheck", "racecheck") if sanitizer else ()
        checks = ((str(sanitizer), "--tool", tool, "--error-exitcode", "9", *run) for tool in tools)
        # Out of bounds of an allocation is then out of bounds of a tensor.
        environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        # The first run compiles the kernels.
        return Stage("backward", (run, *checks), 120, environment)

    def _measure(self, name: str, seconds: float, *before: tuple[str, ...]) -> Stage:
        picture = str(self.results / f"{name}.png")
        command = self._module("speed", "--json", self._json(name), "--plot", picture)
        breakdowns = ("tiny:5",) if self.rehearsal else _BREAKDOWNS
        for cell in breakdowns:
            command += ("--breakdown", cell)
        measure = (*command, *self._sizes(), "--budget", SECONDS)
        return Stage(name, (*before, measure), seconds)

    def _profile(self) -> Stage:
        profiler = shutil.which("ncu")
        commands: list[tuple[str, ...]] = []
        for cell in ("tiny:5",) if self.rehearsal else _PROFILED:
            report = str(self.results / f"profile-{cell.replace(':', '-')}")
            chosen = ("--kernel-name", _PROFILED_KERNELS, "--set", "full")
            # The machine is not ours alone, so its clocks stay as they are.
            collect = ("--clock-control", "none", "--force-overwrite", "--export", report)
            forward = self._module("forward", cell)
            commands.append((str(profiler), *collect, *chosen, *forward))
            commands.append((str(profiler), "--import", f"{report}.ncu-rep", "--page", "details"))
        return Stage("profile", tuple(commands), 70, missing="" if profiler else "no ncu here")

    def _tune(self) -> Stage:
        asked = ("--shapes", TUNED, "--limit", str(CANDIDATES))
        sizes = ("--tokens", "5", "--limit", "1") if self.rehearsal else asked
        command = self._module("tune_kernels", "--output", str(self._tables), *sizes)
        return Stage("tune", ((*command, "--budget", SECONDS),), 250)

    def _residency(self) -> Stage:
        sizes = ("--steps", "2") if self.rehearsal else ("--shapes", OFFLOADED)
        options = ("--json", self._json("residency"), *sizes, "--budget", SECONDS)
        return Stage("residency", (self._module("measure", *options, folder="residency"),), 180)


def _workers() -> str:
    return str(min(_MOST_WORKERS, len(os.sched_getaffinity(0))))
