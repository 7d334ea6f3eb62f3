"""Kernels compiled ahead of time: what comes out, the cache, errors, and equal bytes everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

import trt_plugin
from custom_ops.kernels.architectures import ARCHITECTURES, architecture
from custom_ops.kernels.layer import Layer
from custom_ops.kernels.plan import plan
from custom_ops.kernels.spec import ForwardPlan, TensorPointer
from toys import kernels as toy_kernels
from toys.kernels import on_x, scale, spec, tiles, toy_plan
from trt_plugin import Bundle, CompileError, parse_spec
from trt_plugin.bundle import PARAMETER_BYTES, Program
from trt_plugin.compiling import ahead_of_time, compile_plans, layer_record, limit_tokens
from trt_plugin.compiling.cache import KernelCache, default_folder
from trt_plugin.compiling.cubin import CubinInfo, inspect_cubin
from trt_plugin.compiling.tasks import Compiled, Task, task_for
from trt_plugin.compiling.workers import _environment, compile_tasks
from trt_plugin.launcher import OpenProgram

ROOT = Path(__file__).parents[2]
PLANS = (
    toy_plan(scale(2.0), scale(3.0), scale(2.0, biased=True)),
    toy_plan(tiles(), scale(2.0), device="sm_90"),
    toy_plan(scale(3.0)),
)
TOKENS = (1, 16, 17, 300, 1000)


class Counter:
    """Progress that counts."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def first(cache: Path) -> tuple[Bundle, Counter]:
    counter = Counter()
    return compile_plans(PLANS, progress=counter, cache=cache), counter


@pytest.fixture(scope="module")
def bundle(first: tuple[Bundle, Counter]) -> Bundle:
    return first[0]


# --- What comes out ---


def test_equal_kernels_are_compiled_once(first: tuple[Bundle, Counter]) -> None:
    bundle, counter = first
    # Three for sm_80, which the third plan shares; two for sm_90.
    assert counter.calls == [(done, 5) for done in range(6)]
    assert [len(program.kernels) for program in bundle.programs] == [3, 2, 1]
    assert [launch.kernel for launch in bundle.programs[0].ranges[1].launches] == [0, 1, 2]
    assert bundle.programs[2].kernels[0] == bundle.programs[0].kernels[1]


def test_a_bundle_is_read_as_it_was_made(bundle: Bundle) -> None:
    assert trt_plugin.read(bundle.data) == bundle


def check_program(program: Program, planned: ForwardPlan) -> None:
    """That a program is its plan, and that each cubin takes what is passed to it."""
    assert program.layer == layer_record(planned.layer)
    assert program.architecture == planned.architecture.capability
    assert [(each.first, each.last) for each in program.ranges] == planned.spans
    for each, span in zip(program.ranges, planned.ranges, strict=True):
        assert [buffer.name for buffer in each.buffers] == [buffer.name for buffer in span.buffers]
        for launch, kernel in zip(each.launches, span.launches, strict=True):
            compiled = program.kernels[launch.kernel]
            info = inspect_cubin(compiled.image)
            assert info.name == compiled.name == kernel.name
            assert [parameter.size for parameter in info.parameters] == [
                PARAMETER_BYTES[argument.kind] for argument in launch.arguments
            ]
            assert info.threads == 32 * compiled.num_warps
            assert info.registers == compiled.registers <= 255
            assert compiled.shared_memory <= planned.architecture.shared_memory
            assert compiled.dependent_launch == kernel.dependent_launch
            for tokens in (each.first, min(each.last, 100_000)):
                sizes = {**planned.layer.shape.sizes, "T": tokens}
                assert [axis.evaluate(sizes) for axis in launch.grid] == [
                    axis.evaluate(sizes) for axis in kernel.grid
                ]
    with OpenProgram(program.data) as opened:
        for tokens in {min(each, program.ranges[-1].last) for each in TOKENS}:
            assert opened.workspace_size(tokens) == planned.workspace_size(tokens)


@pytest.mark.parametrize("index", range(len(PLANS)))
def test_a_program_is_its_plan(bundle: Bundle, index: int) -> None:
    check_program(bundle.programs[index], PLANS[index])


def test_what_is_passed_is_named(bundle: Bundle) -> None:
    plain, _, biased = bundle.programs[0].ranges[1].launches
    assert [argument.kind for argument in plain.arguments] == [
        *("tensor", "workspace", "i32"),
        *("null", "null"),
    ]
    assert [argument.value for argument in biased.arguments[:3]] == ["x", 1, "b1"]
    assert str(biased.arguments[3].value) == "T * D"


def test_a_tensor_map_comes_with_shape_and_strides(bundle: Bundle) -> None:
    launch = bundle.programs[1].ranges[0].launches[0]
    kinds = [argument.kind for argument in launch.arguments]
    assert kinds == ["tensor_map", *["i32"] * 3, *["i64"] * 3, "tensor", "null", "null"]
    encoded: Any = launch.arguments[0].value
    assert (encoded.tensor, encoded.dtype, encoded.sizes) == ("w1", 6, (64, 128, 4))
    assert encoded.strides == (2, 128, 16384)
    # 32 float16 are 64 bytes, the widest swizzle that they fill.
    assert (encoded.box, encoded.swizzle) == ((32, 32, 1), 2)
    values = [str(argument.value) for argument in launch.arguments[1:7]]
    assert values == ["4", "128", "64", "8192", "64", "1"]


def test_kernels_describe_themselves(bundle: Bundle) -> None:
    kernels = bundle.to_dict()["programs"][0]["kernels"]
    assert [kernel["description"]["constants"] for kernel in kernels] == [
        {"bias_ptr": None, "FACTOR": 2.0, "BLOCK": 64},
        {"bias_ptr": None, "FACTOR": 3.0, "BLOCK": 64},
        {"FACTOR": 2.0, "BLOCK": 64},
    ]
    assert kernels[0]["description"]["module"] == "toys.kernels"


# --- Layers ---

NARROW = parse_spec("experts=4,top_k=2,width=32,hidden=48,dtype=fp16,b1")


@pytest.fixture(scope="module")
def narrow(cache: Path) -> Bundle:
    return trt_plugin.compile(NARROW, ["sm_80"], max_tokens=1, jobs=1, progress=False, cache=cache)


def test_a_layer_is_compiled_for_up_to_so_many_tokens(narrow: Bundle) -> None:
    (program,) = narrow.programs
    assert (program.ranges[0].first, program.ranges[-1].last) == (1, 1)
    check_program(program, limit_tokens(plan(NARROW, architecture("sm_80")), 1))


def test_layers_that_compute_the_same_share_a_program(
    cache: Path, narrow: Bundle, tmp_path: Path
) -> None:
    same = replace(
        NARROW,
        shape=replace(NARROW.shape, options=replace(NARROW.shape.options, alpha=3.0)),
        tf32=True,
    )
    out = tmp_path / "out.moek"
    again = trt_plugin.compile(
        [NARROW, same], ["80", 80], out, max_tokens=1, progress=False, cache=cache
    )
    assert again == narrow
    assert out.read_bytes() == narrow.data


@pytest.mark.parametrize(
    ("layers", "architectures", "options", "message"),
    [
        ([], ["sm_90"], {}, "compiling needs at least one layer"),
        ([NARROW], [], {}, "compiling needs at least one architecture"),
        ([NARROW], ["sm_91"], {}, "architecture must be one of sm_75, .*; got 'sm_91'"),
        ([NARROW], ["sm_90"], {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_compiled_is_named(
    layers: list[Layer], architectures: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trt_plugin.compile(layers, architectures, **options)


def test_a_limit_on_tokens_cuts_ranges() -> None:
    assert limit_tokens(PLANS[0], 16).spans == [(1, 16)]
    assert limit_tokens(PLANS[0], 17).spans == [(1, 16), (17, 17)]
    assert limit_tokens(PLANS[0], 5000).spans == PLANS[0].spans


SPECS = {
    "gated bf16": "experts=8,top_k=2,width=768,hidden=1536,dtype=bf16,activation=silu,gated",
    "narrow fp16": "experts=16,top_k=1,width=96,hidden=384,dtype=fp16,b1,b2,router_bias,"
    "weight_on_input",
    "wide fp32": "op=experts,experts=4,top_k=4,width=512,hidden=520,gated,activation=relu,b1,b2",
    "mixed": "experts=256,top_k=8,width=2048,hidden=768,tokens_dtype=fp32,routing_dtype=fp32,"
    "experts_dtype=bf16,activation=silu,gated,scoring=sigmoid,routed_scaling=2.5,router_bias",
    "gpt-oss": "op=experts,experts=32,top_k=4,width=2880,hidden=2880,dtype=bf16,weights_dtype=bf16,"
    "activation=clamped_swiglu,gated,interleaved,b1,b2",
    "inkling 2": "experts=128,top_k=8,width=2304,hidden=1152,dtype=bf16,activation=softcapped_silu,"
    "gated,alpha=4,limit=25,scoring=sigmoid",
    "llama 4": "op=experts,experts=16,top_k=1,width=5120,hidden=8192,dtype=bf16,activation=silu,"
    "gated,weight_on_input,weights_dtype=bf16",
    "T5": "experts=32,top_k=1,width=1024,hidden=2816,dtype=bf16,activation=gelu_tanh,gated,"
    "scoring=sigmoid,renormalize=false,pre_norm=rms,norm_eps=1e-6,residual",
    "narrow T5": "experts=8,top_k=1,width=96,hidden=256,pre_norm=rms,residual",
    "tf32": "experts=8,top_k=2,width=200,hidden=256,tf32,pre_norm=rms,residual",
}
# One layer for each family of instructions; together they have every kernel.
ONE_EACH = [
    ("tf32", "sm_80"),
    ("narrow fp16", "sm_75"),
    ("gpt-oss", "sm_90"),
    ("mixed", "sm_100"),
]
COMBINATIONS = {
    # Other sizes of shared memory.
    ("narrow T5", "sm_89"),
    ("llama 4", "sm_120"),
    *((name, device) for name in SPECS for device in ("sm_80", "sm_90")),
    *((name, each.name) for name in ("gated bf16", "T5") for each in ARCHITECTURES.values()),
}


def compile_and_check(planned: ForwardPlan, jobs: int) -> None:
    bundle = compile_plans([planned], jobs=jobs, progress=False, cache=False)
    check_program(bundle.programs[0], planned)


@pytest.mark.every
@pytest.mark.parametrize(("name", "device"), ONE_EACH)
def test_every_kernel_compiles_and_takes_what_is_passed(name: str, device: str) -> None:
    """Of a layer's ranges of tokens the last that has a kernel: its tiles are the largest."""
    planned = plan(parse_spec(SPECS[name]), architecture(device))
    last_with = {spec.name: each for each in planned.ranges for spec in each.launches}
    few, first = [], 1
    for each in planned.ranges:
        if each in last_with.values():
            few.append(replace(each, first=first))
            first = each.last + 1
    # A second compiler would take as long to start as to compile two kernels.
    compile_and_check(replace(planned, ranges=tuple(few)), jobs=1)


def compiled(spec: str, device: str, *kernels: str) -> dict[str, Compiled]:
    """Compiles the first of a layer's kernels of each name."""
    planned = plan(parse_spec(spec), architecture(device))
    specs = [spec for each in planned.ranges for spec in each.kernels()]
    first = [next(spec for spec in specs if spec.name == name) for name in kernels]
    code = {}
    tasks = [task_for(spec, planned.architecture) for spec in first]
    compile_tasks(tasks, 1, lambda task, result: code.update({task.function: result}))
    return code


def test_experts_in_bfloat16_of_tokens_in_float16() -> None:
    """An architecture without bfloat16 converts through float32."""
    sizes = "experts=8,top_k=2,width=256,hidden=256"
    spec = f"{sizes},tokens_dtype=fp16,experts_dtype=bf16,routing_dtype=fp16"
    compiled(spec, "sm_75", "few_up_kernel", "expert_up_kernel")


@pytest.mark.parametrize("device", ["sm_80", "sm_90"])
def test_drivers_of_cuda_12_load_what_is_for_hopper(device: str) -> None:
    """Cubins of CUDA 13 have another ABI, the eighth byte of an ELF file."""
    spec = "experts=8,top_k=2,width=256,hidden=256,dtype=fp16"
    [code] = compiled(spec, device, "expert_up_kernel").values()
    assert code.cubin[:4] == b"\x7fELF"
    assert code.cubin[7] == 51


@pytest.mark.every
@pytest.mark.parametrize(("name", "device"), sorted(COMBINATIONS | set(ONE_EACH)))
def test_every_range_of_a_layer_compiles_and_takes_what_is_passed(name: str, device: str) -> None:
    if device == "sm_110" and triton.__version__.startswith("3.6."):
        pytest.skip("Triton 3.6's assembler does not know sm_110")
    compile_and_check(plan(parse_spec(SPECS[name]), architecture(device)), jobs=2)


# --- The cache ---


def compiles_nothing(*arguments: Any) -> None:
    assert not arguments[0], "compiled again"


def test_the_second_run_compiles_nothing(
    bundle: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead_of_time, "compile_tasks", compiles_nothing)
    counter = Counter()
    again = compile_plans(PLANS, progress=counter, cache=cache)
    assert counter.calls == [(5, 5)]
    assert again.data == bundle.data


def test_damaged_entries_are_compiled_again(cache: Path, bundle: Bundle, tmp_path: Path) -> None:
    copy = shutil.copytree(cache, tmp_path / "cache")
    entries = sorted(path for path in copy.rglob("*") if path.is_file())
    for at, entry in enumerate(entries):
        content = entry.read_bytes()
        entry.write_bytes(
            (content[:-1], content[:-9] + b"?" + content[-8:], b"")[at % 3],
        )
    plans, counter = [PLANS[0]], Counter()
    again = compile_plans(plans, jobs=1, progress=counter, cache=copy)
    assert counter.calls == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert again.programs == bundle.programs[:1]
    counter = Counter()
    compile_plans(plans, progress=counter, cache=copy)
    assert counter.calls == [(3, 3)]


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    task = task_for(scale(1.0), architecture("sm_80"))
    cache = KernelCache(tmp_path / "a file", "triton", {"toys.kernels": ""})
    with pytest.warns(UserWarning, match="the kernel cache cannot keep"):
        cache.put(task, some_result())
    assert cache.get(task) is None


def test_kernels_of_another_compiler_or_other_sources_are_not_used(tmp_path: Path) -> None:
    task = task_for(scale(1.0), architecture("sm_80"))
    KernelCache(tmp_path, "triton 1", {task.module: "a"}).put(task, some_result())
    for compiler, source in (("triton 2", "a"), ("triton 1", "b")):
        assert KernelCache(tmp_path, compiler, {task.module: source}).get(task) is None


def test_the_cache_is_in_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAMO_MOE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_folder() == Path("/xdg/dynamo-moe")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_folder() == Path("/home/someone/.cache/dynamo-moe")
    monkeypatch.setenv("DYNAMO_MOE_CACHE_DIR", "/elsewhere")
    assert default_folder() == Path("/elsewhere")
    monkeypatch.setenv("DYNAMO_MOE_CACHE_DIR", "")
    assert default_folder() is None


# --- Errors ---


def failing(planned: ForwardPlan) -> str:
    with pytest.raises(CompileError) as raised:
        compile_plans([planned], jobs=1, progress=False, cache=False)
    return str(raised.value)


def test_a_kernel_that_does_not_compile_is_named() -> None:
    message = failing(toy_plan(on_x(toy_kernels.wrong_kernel, 16)))
    assert message.startswith("wrong_kernel for sm_80 does not compile: ")
    assert "this never compiles (with BLOCK=16, num_warps=4, num_stages=1, " in message


def test_a_kernel_of_too_much_shared_memory_is_named() -> None:
    task = task_for(scale(1.0), architecture("sm_89"))
    ahead_of_time.check_shared_memory(task, some_result(shared_memory=101376 - 16))
    with pytest.raises(CompileError) as raised:
        ahead_of_time.check_shared_memory(task, some_result(shared_memory=101377 - 16))
    message = str(raised.value)
    assert message.startswith(
        "scale_kernel for sm_89 cannot be launched: it needs 101377 bytes of shared memory, "
        "sm_89 has 101376 (with bias_ptr=None, FACTOR=1.0, BLOCK=64, "
    )


def some_result(shared_memory: int = 0) -> Compiled:
    info = CubinInfo("k", (), 128, 32, 0, static_shared_memory=16)
    return Compiled(b"", info, 4, shared_memory, False, (), {})


def test_a_kernel_that_needs_scratch_memory_is_named() -> None:
    made = spec(
        toy_kernels.scratch_kernel,
        w1_ptr=TensorPointer("w1", PLANS[0].layer.shape.weight_format.operand_dtype),
        y_ptr=TensorPointer("y", PLANS[0].layer.shape.tokens_dtype),
        BLOCK=on_x(toy_kernels.wrong_kernel, 32).arguments["BLOCK"],
    )
    message = failing(toy_plan(made, device="sm_90"))
    assert "scratch_kernel for sm_90" in message
    assert "global_scratch_size must be 0 for the launcher, Triton made it " in message


def test_tensor_maps_need_an_architecture_that_has_them() -> None:
    with pytest.raises(ValueError, match="map_kernel: w1 is a tensor map, which sm_80 lacks"):
        compile_plans([toy_plan(tiles())], progress=False)


def test_a_compiler_that_crashes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashes.py").write_text("import os\nprint('on fire')\nos._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = replace(task_for(scale(1.0), architecture("sm_80")), module="crashes")
    with pytest.raises(CompileError) as raised:
        compile_tasks([task], 1, lambda _, __: None)
    assert "does not compile: the compiler ended with code 3" in str(raised.value)


def test_the_first_failure_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = task_for(on_x(toy_kernels.wrong_kernel, 16), architecture("sm_80"))
    with pytest.raises(CompileError, match="this never compiles"):
        compile_tasks([task, replace(task, module="sleeps")], 2, lambda _, __: None)


def test_an_error_of_ptxas_is_named_by_its_own_line() -> None:
    said = "PTXASError: failed\n`ptxas` stderr:\nptxas fatal   : too much\nRepro command: ptxas -v"
    error = CompileError("a kernel does not compile", said)
    assert str(error) == "a kernel does not compile: ptxas fatal   : too much"
    assert said in error.__notes__


# --- Equal bytes everywhere ---


def test_the_callers_settings_of_triton_do_not_reach_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRITON_INTERPRET", "PTXAS_OPTIONS", "DISABLE_LLVM_OPT", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "1")
    environment = _environment(tmp_path)
    assert environment["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert not {"TRITON_INTERPRET", "PTXAS_OPTIONS", "DISABLE_LLVM_OPT"} & environment.keys()
    assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.every
def test_another_checkout_gives_the_same_bytes(narrow: Bundle, tmp_path: Path) -> None:
    for package in ("custom_ops", "trt_plugin"):
        shutil.copytree(ROOT / package, tmp_path / "elsewhere" / package)
    script = (
        "import trt_plugin\n"
        f"layer = trt_plugin.parse_spec('{SPEC_OF_NARROW}')\n"
        "assert 'elsewhere' in trt_plugin.__file__\n"
        "trt_plugin.compile(layer, ['sm_80'], 'out.moek', max_tokens=1, jobs=1, cache=False)\n"
    )
    triton_at = str(Path(triton.__file__).parents[1])
    path = [str(tmp_path / "elsewhere"), triton_at, sysconfig.get_path("purelib")]
    subprocess.run(
        # -S leaves out the hook of an editable install, which would find the real packages first.
        # The script has no `if __name__ == "__main__"`, and needs none.
        [sys.executable, "-S", "-c", script],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    assert (tmp_path / "out.moek").read_bytes() == narrow.data


SPEC_OF_NARROW = "experts=4,top_k=2,width=32,hidden=48,dtype=fp16,b1"


def test_a_task_is_all_that_a_result_depends_on() -> None:
    device = architecture("sm_80")
    lines = {
        task.to_json()
        for task in (
            task_for(scale(2.0), device),
            task_for(scale(3.0), device),
            task_for(scale(2.0, biased=True), device),
            task_for(replace(scale(2.0), num_warps=8), device),
            task_for(replace(scale(2.0), num_stages=2), device),
            task_for(replace(scale(2.0), dependent_launch=True), device),
            task_for(scale(2.0), architecture("sm_86")),
        )
    }
    assert len(lines) == 7
    assert task_for(scale(2.0), device) == task_for(scale(2.0), device)


def test_pointers_are_aligned_and_integers_are_not() -> None:
    task: Task = task_for(scale(2.0), architecture("sm_80"))
    assert task.signature == {
        "x_ptr": "*fp16",
        "y_ptr": "*fp32",
        "bias_ptr": "constexpr",
        "tokens": "i32",
        "FACTOR": "constexpr",
        "BLOCK": "constexpr",
    }
    assert task.aligned == (0, 1)
