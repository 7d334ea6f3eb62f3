"""The C++ launcher on the stand-in driver, whose kernels Triton's interpreter runs.

So the launcher computes real numbers: the oracle's, and to the bit those of the Python launcher.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from torch import Tensor

from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.plan import plan
from interpreted_gpu import InterpretedGpu, uncompiled_program
from kernel_runs import call_tensors, layer_of, run_kernels
from moe_cases import Case, assert_matches, make_case
from random_layers import bounded, cases
from standin import CSRC, LAUNCH_FAILED, OUT_OF_MEMORY, ROOT, SOURCES, build, sanitizing, standin
from trt_plugin.bundle import Bundle, Program
from trt_plugin.compiling import layer_record, limit_tokens
from trt_plugin.launcher import LauncherError, OpenProgram, find_program
from trt_plugin.native import library_path
from weights_files import save_experts

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)

ALIGNMENT = 256


class Gpu:
    """A device with a context and the programs of some cases."""

    def __init__(self, driver, device: str = "sm_80", shared_memory: int = 232448) -> None:
        self.driver = driver
        self.architecture = architecture(device)
        self.interpreted = InterpretedGpu()
        driver.on_launch(self.interpreted)
        self.context = driver.create_context(
            driver.add_device(self.architecture.capability, shared_memory)
        )
        driver.set_context(self.context)

    def program(self, case: Case) -> Program:
        planned = plan(layer_of(case), self.architecture)
        program = uncompiled_program(planned)
        self.interpreted.register(planned, program)
        for kernel in program.kernels:
            self.driver.add_image(kernel.image)
        return program

    def run(self, case: Case) -> Tensor:
        with OpenProgram(self.program(case).data) as opened:
            return enqueue(opened, case)


def enqueue(program: OpenProgram, case: Case, spare: int = 0, **changes: int) -> Tensor:
    """Runs a case on a workspace full of NaN, and checks what lies around it."""
    tensors = call_tensors(case)
    tokens = tensors["x"].shape[0]
    size = program.workspace_size(tokens)
    memory = torch.full((size + 3 * ALIGNMENT,), 0xFF, dtype=torch.uint8)
    begin = -memory.data_ptr() % ALIGNMENT + ALIGNMENT
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()} | changes
    if tokens == 0:
        # PyTorch gives no address to tensors without elements.
        addresses = dict.fromkeys(addresses, 0)
    program.enqueue(tokens, addresses, memory.data_ptr() + begin, size - spare)
    assert (memory[:begin] == 0xFF).all()
    assert (memory[begin + size :] == 0xFF).all()
    return tensors["y"]


def small_case(op: str = "experts", tokens: int = 5, **options) -> Case:
    return make_case(op, (tokens,), width=16, hidden=24, **options)


# --- Numbers ---


@pytest.mark.pairwise
@pytest.mark.parametrize("device", ["sm_80", "sm_90"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 70])
@pytest.mark.parametrize("op", ["dropless", "experts"])
def test_the_same_bits_as_the_python_launcher(driver, op, tokens, device):
    options = {"dtype": torch.float16, "activation": "silu", "gated": True}
    case = make_case(op, (tokens,), width=136, hidden=72, experts=6, **options)
    result = Gpu(driver, device).run(case)
    assert torch.equal(result, run_kernels(case, device))
    assert_matches(result, case.oracle(), case.dtypes)


@pytest.mark.parametrize(("value", "dependent"), [("0", False), ("1", True), ("", True)])
def test_dependent_launch_can_be_forbidden(driver, monkeypatch, value, dependent):
    monkeypatch.setenv("DYNAMO_MOE_DEPENDENT_LAUNCH", value)
    case, gpu = small_case(), Gpu(driver, "sm_90")
    launched = []

    def note(launch):
        launched.append(launch.pdl)
        gpu.interpreted(replace(launch, pdl=True))

    program = gpu.program(case)
    driver.on_launch(note)
    with OpenProgram(program.data) as opened:
        assert_matches(enqueue(opened, case), case.oracle(), case.dtypes)
    assert set(launched) == {dependent}


@pytest.mark.slow
@bounded
@given(case=cases())
@pytest.mark.every
def test_any_layer(case):
    driver = standin()
    driver.reset()
    result = Gpu(driver, "sm_90").run(case)
    assert_matches(result, case.oracle(), case.dtypes)
    driver.reset()


@pytest.mark.each_value
@pytest.mark.parametrize("device", ["sm_80", "sm_90"])
@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_norm_and_residual(driver, tokens, device):
    case = make_case(
        "dropless", (tokens,), width=136, hidden=72, dtype=torch.bfloat16, activation="gelu_tanh",
        gated=True, pre_norm="rms", norm_eps=0.5, residual=True,
    )  # fmt: skip
    result = Gpu(driver, device).run(case)
    assert torch.equal(result, run_kernels(case, device))
    assert_matches(result, case.oracle(), case.dtypes)


def test_any_sequence_of_sizes(driver):
    gpu = Gpu(driver)
    with OpenProgram(gpu.program(small_case()).data) as opened:
        for tokens in (3, 40, 0, 1, 200, 2, 39):
            case = small_case(tokens=tokens, seed=tokens)
            assert_matches(enqueue(opened, case), case.oracle(), case.dtypes)


def test_weights_at_another_address_are_encoded_again(driver):
    gpu = Gpu(driver, "sm_90")
    options = {"dtype": torch.float16, "width": 136, "hidden": 72}
    first = make_case("experts", (30,), seed=1, **options)
    second = make_case("experts", (30,), seed=2, **options)
    with OpenProgram(gpu.program(first).data) as opened:
        for case in (first, second, second, first):
            assert_matches(enqueue(opened, case), case.oracle(), case.dtypes)
    # Two maps, w1's and w2's, at each change.
    assert driver.calls("cuTensorMapEncodeTiled") == 6


# --- Calls of the driver ---


def test_no_tokens_launch_nothing(driver):
    Gpu(driver).run(small_case(tokens=0))
    assert driver.calls("cuLaunchKernelEx") == 0
    assert driver.calls("cuModuleLoadData") == 0


def test_kernels_are_loaded_once_for_each_context(driver):
    gpu = Gpu(driver)
    case = small_case()
    program = gpu.program(case)
    with OpenProgram(program.data) as first, OpenProgram(program.data) as second:
        for _ in range(2):
            enqueue(first, case)
            enqueue(second, case)
        assert driver.live_modules == len(program.kernels)
        other = driver.create_context(0)
        driver.set_context(other)
        enqueue(first, case)
        assert driver.live_modules == 2 * len(program.kernels)
    assert driver.live_modules == 0


def test_a_context_that_takes_another_ones_place_gets_its_own_kernels(driver):
    gpu = Gpu(driver)
    case = small_case()
    with OpenProgram(gpu.program(case).data) as opened:
        enqueue(opened, case)
        # The allocator tends to give the new context the old one's address.
        driver.destroy_context(gpu.context)
        driver.set_context(driver.create_context(0))
        enqueue(opened, case)
    assert driver.live_modules == 0


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"),
            *("fordblks", "keepcost"),
        )
    )


def allocated() -> int:
    """Bytes that malloc has given out in this process."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def test_a_bundle_is_in_memory_once(driver):
    program = Gpu(driver).program(small_case())
    # An ELF file may be longer than what it describes.
    padding = bytes(4 << 20)
    kernels = tuple(replace(each, image=each.image + padding) for each in program.kernels)
    data = Bundle((replace(program, kernels=kernels),)).data
    before = allocated()
    with OpenProgram(data), OpenProgram(data):
        # The heap reuses a few hundred bytes.
        assert 0.99 * len(data) < allocated() - before < 1.1 * len(data)
    assert allocated() - before < 0.1 * len(data)


def test_a_program_outlives_the_bundle_that_it_was_read_from(driver):
    case = small_case()
    gpus = Gpu(driver, "sm_90"), Gpu(driver, "sm_80")
    both = tuple(gpu.program(case) for gpu in gpus)
    with OpenProgram(Bundle(both).data):
        second = OpenProgram(Bundle(both[1:]).data)
    with second:
        assert_matches(enqueue(second, case), case.oracle(), case.dtypes)


def test_preparing_loads_everything(driver):
    gpu = Gpu(driver)
    case = small_case()
    program = gpu.program(case)
    with OpenProgram(program.data) as opened:
        opened.prepare()
        loads = driver.calls("cuModuleLoadData")
        assert loads == len(program.kernels)
        enqueue(opened, case)
        assert driver.calls("cuModuleLoadData") == loads


def test_several_threads_streams_and_devices(driver):
    gpus = [Gpu(driver), Gpu(driver)]
    launched = threading.Barrier(4)
    case = small_case("dropless", tokens=40)
    program = gpus[1].program(case)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            driver.set_context(gpus[number % 2].context)
            launched.wait()
            for tokens in (40, 3):
                mine = small_case("dropless", tokens=tokens, seed=number)
                assert_matches(enqueue(opened, mine), mine.oracle(), mine.dtypes)
        except BaseException as error:
            failures.append(error)

    with OpenProgram(program.data) as opened:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert driver.live_modules == 2 * len(program.kernels)


# --- What is refused ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w2": 0}, r"tensor w2 is null, kernel few_down_kernel needs it"),
        ({"x": 8}, r"tensor x must begin at a multiple of 16 bytes"),
        ({"spare": 1}, r"5 tokens need a workspace of \d+ bytes, it has \d+"),
    ],
)
def test_bad_calls(driver, changes, message):
    case = small_case(tokens=5, experts=64)
    with (
        OpenProgram(Gpu(driver).program(case).data) as opened,
        pytest.raises(LauncherError, match=message) as caught,
    ):
        enqueue(opened, case, **changes)
    assert caught.value.status == "invalid argument"


def test_a_workspace_must_be_aligned(driver):
    case = small_case()
    with OpenProgram(Gpu(driver).program(case).data) as opened:
        tensors = {name: t.data_ptr() for name, t in call_tensors(case).items()}
        for workspace in (0, 128):
            with pytest.raises(LauncherError, match="begin at a multiple of 256"):
                opened.enqueue(5, tensors, workspace, 2**40)


@pytest.mark.parametrize("tokens", [-1, 2**30, 2**62])
def test_numbers_of_tokens(driver, tokens):
    with OpenProgram(Gpu(driver).program(small_case()).data) as opened:
        with pytest.raises(LauncherError, match=rf"must be in 0\.\.1073725440, got {tokens}"):
            opened.workspace_size(tokens)
        with pytest.raises(LauncherError, match=rf"must be in 0\.\.1073725440, got {tokens}"):
            opened.enqueue(tokens, {}, 0, 0)


@pytest.mark.parametrize(
    ("compiled", "device", "runs"),
    [("sm_80", "sm_89", True), ("sm_80", "sm_90", False), ("sm_90", "sm_100", False)],
)
def test_architectures(driver, compiled, device, runs):
    case = small_case()
    program = Gpu(driver, compiled).program(case)
    driver.set_context(Gpu(driver, device).context)
    with OpenProgram(program.data) as opened:
        if runs:
            opened.prepare()
            return
        message = rf"the device is {device}, the layer's kernels are for {compiled}: compile them"
        with pytest.raises(LauncherError, match=message):
            opened.prepare()


def test_without_a_context(driver):
    case = small_case()
    with OpenProgram(Gpu(driver).program(case).data) as opened:
        driver.set_context(None)
        opened.prepare()
        assert driver.live_modules == 0
        with pytest.raises(LauncherError, match=r"no current CUDA context: .* such as cudaFree"):
            enqueue(opened, case)


def test_without_a_driver():
    code = """
import sys
from trt_plugin.launcher import LauncherError, OpenProgram
with OpenProgram(sys.stdin.buffer.read()) as opened:
    print(opened.workspace_size(100))
    try:
        opened.prepare()
    except LauncherError as error:
        print(error)
"""
    planned = plan(layer_of(small_case()), architecture("sm_80"))
    program = uncompiled_program(planned)
    done = subprocess.run(
        [sys.executable, "-c", code], input=program.data, capture_output=True, check=True
    )
    size, message = done.stdout.decode().splitlines()
    assert int(size) == planned.workspace_size(100)
    assert message.startswith("no driver: the CUDA driver is not available: libcuda.so.1")


# --- What fails ---


CALLED_TWICE = (
    *("cuCtxGetCurrent", "cuCtxGetDevice", "cuDeviceGetAttribute", "cuModuleLoadData"),
    *("cuModuleGetFunction", "cuTensorMapEncodeTiled", "cuDriverGetVersion", "cuLaunchKernelEx"),
)


@pytest.mark.parametrize(
    ("function", "calls_before"), [("cuCtxGetId", 0), *product(CALLED_TWICE, (0, 1))]
)
def test_a_failing_driver(driver, function, calls_before):
    gpu = Gpu(driver, "sm_90")
    options = {"dtype": torch.float16, "width": 136, "hidden": 72}
    case = make_case("experts", (30,), **options)
    with OpenProgram(gpu.program(case).data) as opened:
        driver.fail(function, LAUNCH_FAILED, calls_before)
        with pytest.raises(LauncherError, match=f"{function}: CUDA_ERROR_LAUNCH_FAILED") as caught:
            enqueue(opened, case)
        assert caught.value.status == "CUDA error"
        loaded = driver.live_modules
        assert loaded in (0, len(gpu.program(case).kernels))
        assert_matches(enqueue(opened, case), case.oracle(), case.dtypes)


def test_device_memory_that_is_exhausted(driver):
    gpu = Gpu(driver)
    case = small_case()
    with OpenProgram(gpu.program(case).data) as opened:
        driver.fail("cuModuleLoadData", OUT_OF_MEMORY, calls_before=2)
        with pytest.raises(LauncherError, match=r"kernel \w+: cuModuleLoadData") as caught:
            opened.prepare()
        assert caught.value.status == "out of memory"
        assert driver.live_modules == 0
        opened.prepare()


# --- Finding a program ---


def test_finding_a_program(driver):
    first, second = small_case(), small_case("dropless")
    programs = [
        uncompiled_program(plan(layer_of(case), architecture(device)))
        for case in (first, second)
        for device in ("sm_80", "sm_86", "sm_90")
    ]
    bundle = Bundle(tuple(programs)).data
    record = layer_record(layer_of(second))
    assert find_program(bundle, record, 90) == programs[5].data
    assert find_program(bundle, record, 89) == programs[4].data
    assert find_program(bundle, record, 80) == programs[3].data
    with pytest.raises(LauncherError, match=r"for sm_80, sm_86, sm_90, the device is sm_100"):
        find_program(bundle, record, 100)
    with pytest.raises(LauncherError, match=r"6 programs, none of this layer \(99 experts"):
        find_program(bundle, record._replace(experts=99), 90)


# --- The library ---


def test_the_library_shows_its_interface_and_nothing_else():
    done = subprocess.run(
        ["nm", "-D", "--defined-only", library_path()],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
    )
    names = [line.split()[-1] for line in done.stdout.splitlines()]
    header = (CSRC / "dynamo_moe.h").read_text()
    assert names
    # What TensorRT and ONNX Runtime look for.
    interface = f"{header} getCreators( setLoggerFinder( RegisterCustomOps("
    assert all(f"{name}(" in interface for name in names)
    needed = subprocess.run(
        ["readelf", "-d", library_path()],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "libcuda" not in needed
    assert "libstdc++" not in needed


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.first(1)
def test_under_sanitizers(tmp_path, sanitizer):
    flags = sanitizing(sanitizer)
    native = ROOT / "tests" / "native"
    beside = ("kernels", "node", "onnxruntime", "plugin")
    sources = [path for path in SOURCES if path.parent.name not in beside]
    soname = "-Wl,-soname,libcuda.so.1"
    cuda = build("libcuda.so.1", [native / "standin.cc"], *flags, "-fPIC", "-shared", soname)
    check = build("launcher_check", [*sources, native / "launcher_check.cc"], *flags, "-ldl")
    case = make_case("experts", (30,), width=136, hidden=72, dtype=torch.float16)
    both = tuple(
        uncompiled_program(limit_tokens(plan(layer_of(case), architecture(device)), 50))
        for device in ("sm_80", "sm_90")
    )
    layer = replace(layer_of(case), resident_experts=2)
    offloaded = uncompiled_program(limit_tokens(plan(layer, architecture("sm_80")), 50))
    paths = [tmp_path / f"{number}.moek" for number in range(4)]
    for path, programs in zip(paths, (both[:1], both[1:], both, (offloaded,)), strict=True):
        path.write_bytes(Bundle(programs).data)
    sources = save_experts(tmp_path / "model.safetensors", case)
    done = subprocess.run(
        [check, *paths, *sources],
        env={**os.environ, "LD_LIBRARY_PATH": str(cuda.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
