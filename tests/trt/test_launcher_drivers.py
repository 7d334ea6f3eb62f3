"""The launcher and the driver: old ones, none, contexts that come and go, architectures."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from dataclasses import replace

import pytest

from small_bundles import LAYER, MAP, ONE, offloaded, program
from standin import LAUNCH_FAILED, ROOT, build
from trt_plugin import Bundle
from trt_plugin.bundle import Argument, Expression, Launch, Program, Range, TensorMap
from trt_plugin.launcher import LauncherError, OpenProgram, find_program

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)

INVALID_VALUE = 1
MEMORY = 1 << 40  # Nothing is read from where tensors are.
TENSORS = {"x": MEMORY, "w1": MEMORY, "y": MEMORY}


def launching(*arguments: Argument, architecture: int = 90) -> Program:
    """A program that launches one kernel."""
    only = Range(1, 99, (), (Launch(0, arguments, (ONE, ONE, ONE)),))
    whole = program(ranges=(only,), architecture=architecture)
    return replace(whole, kernels=whole.kernels[:1])


PLAIN = launching(Argument("tensor", "x"))
MAPPED = launching(Argument("tensor_map", MAP))
# Its two kernels have the one image.
OFFLOADED = offloaded(
    kernels=tuple(replace(each, image=PLAIN.kernels[0].image) for each in offloaded().kernels)
)


def use(driver, program: Program, architecture: int = 90) -> int:
    """Makes a new context of a new device current, which knows a program's images."""
    for kernel in program.kernels:
        driver.add_image(kernel.image)
    context = driver.create_context(driver.add_device(architecture))
    driver.set_context(context)
    return context


# --- Drivers ---

ELSEWHERE = """
import ctypes, sys
sys.path.insert(0, sys.argv[2])
from standin import Standin
from trt_plugin.launcher import LauncherError, OpenProgram

def load():
    driver = Standin(ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL))
    driver.add_image(IMAGE)
    driver.set_context(driver.create_context(driver.add_device(90)))
    return driver

def run(data):
    with OpenProgram(data) as opened:
        try:
            opened.enqueue(5, TENSORS, 0, 0)
        except LauncherError as error:
            return str(error)
    return "ok"

def prepare(data):
    with OpenProgram(data) as opened, opened.open_cache() as cache:
        try:
            cache.prepare()
        except LauncherError as error:
            return str(error)
    return "ok"
"""


def in_another_process(code: str, *flags: str) -> list[str]:
    """Runs code in a process whose driver is another stand-in; returns what it prints."""
    path = build(
        "libcuda.so.1",
        [ROOT / "tests" / "native" / "standin.cc"],
        *(*flags, "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"),
    )
    values = {
        "IMAGE": PLAIN.kernels[0].image,
        "TENSORS": TENSORS,
        "PLAIN": PLAIN.data,
        "MAPPED": MAPPED.data,
        "OFFLOADED": OFFLOADED.data,
    }
    given = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    done = subprocess.run(
        [sys.executable, "-c", f"{given}\n{ELSEWHERE}\n{code}", path, ROOT / "tests" / "support"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_driver_of_cuda_11_runs_what_needs_no_tensor_maps():
    code = "driver = load(); print(run(PLAIN), driver.live_modules); print(run(MAPPED))"
    plain, mapped = in_another_process(code, "-DSTANDIN_CUDA_11")
    assert plain == "ok 0"
    assert mapped == (
        "no driver: the CUDA driver is too old, it has no cuTensorMapEncodeTiled (525 or later has)"
    )


def test_an_older_driver_is_named():
    (message,) = in_another_process("load(); print(run(PLAIN))", "-DSTANDIN_CUDA_10")
    assert message.startswith("no driver: ")
    assert "libcuda.so.1 is too old, it has no cuLaunchKernelEx" in message


@pytest.mark.parametrize("missing", ["cuMemHostRegister_v2", "cuStreamIsCapturing"])
def test_only_offloaded_layers_need_what_they_alone_call(missing):
    code = "driver = load(); print(run(PLAIN)); print(prepare(OFFLOADED))"
    plain, offloaded = in_another_process(code, f"-D{missing}=cuAnother")
    assert plain == "ok"
    assert offloaded.startswith("no driver: ")
    assert offloaded.split(";")[0].endswith(f"libcuda.so.1 is too old, it has no {missing}")


def test_a_driver_that_comes_later_is_found():
    code = "print(run(PLAIN)); driver = load(); print(run(PLAIN))"
    before, after = in_another_process(code)
    assert before.startswith("no driver: ")
    assert after == "ok"


def test_a_driver_without_devices():
    code = "load().fail('cuInit', 100); print(run(PLAIN)); print(run(PLAIN))"
    first, second = in_another_process(code)
    assert "cuInit: " in first
    assert "code 100" in first
    assert first.startswith("no driver: ")
    assert second == "ok"


# --- Tensor maps ---


@pytest.mark.parametrize(
    ("version", "rows", "marked"),
    [(13010, 7, False), (13010, 8, True), (12080, 7, False), (13020, 7, True)],
)
def test_maps_below_128_kib_are_corrected_on_older_drivers(driver, version, rows, marked):
    tensor_map = TensorMap("w1", 6, 3, (64, 128, rows), (2, 128, 16384), (64, 32, 1))
    mapped = launching(Argument("tensor_map", tensor_map))
    use(driver, mapped)
    driver.set_version(version)
    seen = []
    driver.on_launch(lambda launch: seen.append(launch.tensor_map(0)))
    with OpenProgram(mapped.data) as opened:
        opened.enqueue(5, TENSORS, 0, 0)
    assert [each.marked for each in seen] == [marked]
    assert seen[0].base == MEMORY
    assert seen[0].sizes == tensor_map.sizes
    assert (2, *seen[0].strides) == tensor_map.strides
    assert seen[0].box == tensor_map.box


def test_a_map_that_the_driver_refuses(driver):
    use(driver, MAPPED)
    with OpenProgram(MAPPED.data) as opened:
        message = "tensor map of w1: cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE"
        for _ in range(2):
            driver.fail("cuTensorMapEncodeTiled", INVALID_VALUE)
            with pytest.raises(LauncherError, match=message):
                opened.enqueue(5, TENSORS, 0, 0)
        opened.enqueue(5, TENSORS, 0, 0)


# --- Contexts ---


def test_modules_of_a_context_that_is_gone_are_left_alone(driver):
    context = use(driver, PLAIN)
    with OpenProgram(PLAIN.data) as opened:
        opened.prepare()
        driver.destroy_context(context)
        # The allocator tends to give these the old context's address and the old module's.
        others = [driver.create_context() for _ in range(4)]
        for other in others:
            driver.set_context(other)
            opened.prepare()
        assert driver.live_modules == len(others)
    assert driver.live_modules == 0
    assert driver.calls("cuModuleUnload") == len(others)


def test_what_was_loaded_into_a_context_that_is_gone_is_dropped(driver):
    context = use(driver, PLAIN)
    with OpenProgram(PLAIN.data) as opened:
        for _ in range(3):
            driver.reset_context(context)
            opened.prepare()
            assert driver.live_modules == 1
        asked = driver.calls("cuCtxGetId")
    # Closing asks whether each context is still there.
    assert driver.calls("cuCtxGetId") == asked + 1


@pytest.mark.parametrize("stream_of", [0, 1])
def test_a_thread_without_a_context_has_that_of_its_stream(driver, stream_of):
    contexts = [use(driver, PLAIN), driver.create_context()]
    stream = driver.create_stream(contexts[stream_of])
    driver.set_context(None)
    seen = []
    driver.on_launch(lambda launch: seen.append(launch.context))
    with OpenProgram(PLAIN.data) as opened:
        opened.prepare()
        assert driver.live_modules == 0
        opened.enqueue(5, TENSORS, 0, 0, stream)
        assert driver.current_context is None
        driver.fail("cuLaunchKernelEx", LAUNCH_FAILED)
        with pytest.raises(LauncherError, match="cuLaunchKernelEx"):
            opened.enqueue(5, TENSORS, 0, 0, stream)
        assert driver.current_context is None
    assert seen == [contexts[stream_of]]


@pytest.mark.parametrize("function", ["cuStreamGetCtx", "cuCtxPushCurrent"])
def test_a_streams_context_that_cannot_be_had(driver, function):
    stream = driver.create_stream(use(driver, PLAIN))
    driver.set_context(None)
    with OpenProgram(PLAIN.data) as opened:
        driver.fail(function, LAUNCH_FAILED)
        with pytest.raises(LauncherError, match=f"{function}: CUDA_ERROR_LAUNCH_FAILED"):
            opened.enqueue(5, TENSORS, 0, 0, stream)
        assert driver.current_context is None


# --- Stream captures ---


def test_loading_leaves_the_captures_of_other_threads_alone(driver):
    use(driver, PLAIN)
    driver.set_capturing(True)
    with OpenProgram(PLAIN.data) as opened:
        opened.prepare()
        assert driver.capture_mode == 0
        assert driver.live_modules == 1
    assert driver.capture_mode == 0
    assert driver.live_modules == 0


def test_a_driver_that_keeps_its_capture_mode(driver):
    use(driver, PLAIN)
    driver.fail("cuThreadExchangeStreamCaptureMode", INVALID_VALUE)
    with OpenProgram(PLAIN.data) as opened:
        opened.prepare()
    assert driver.capture_mode == 0


def test_closing_leaves_the_current_context(driver):
    use(driver, PLAIN)
    with OpenProgram(PLAIN.data) as opened:
        opened.prepare()
        current = driver.create_context()
        driver.set_context(current)
    with OpenProgram(PLAIN.data) as opened:
        seen = []
        driver.on_launch(lambda launch: seen.append(launch.context))
        opened.enqueue(5, TENSORS, 0, 0)
    assert seen == [current]


# --- Architectures ---


@pytest.mark.parametrize(
    ("compiled", "runs_on"),
    [
        (75, {75}),
        (80, {80, 86, 89}),
        (86, {86, 89}),
        # A Tegra: NVIDIA promises binary compatibility for its other devices alone.
        (87, {87}),
        (89, {89}),
        (90, {90}),
        (100, {100}),
        (120, {120}),
    ],
)
def test_which_code_runs_where(driver, compiled, runs_on):
    changed = launching(Argument("tensor", "x"), architecture=compiled)
    bundle = Bundle((changed,)).data
    offset, size = struct.unpack_from("<QQ", bundle, 32)
    for device in (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121):
        use(driver, changed, device)
        with OpenProgram(changed.data) as opened:
            if device in runs_on:
                opened.prepare()
                assert find_program(bundle, LAYER, device) == bundle[offset : offset + size]
                continue
            message = f"the device is sm_{device}, the layer's kernels are for sm_{compiled}: "
            with pytest.raises(LauncherError, match=message):
                opened.prepare()
        with pytest.raises(LauncherError, match=f"the device is sm_{device}"):
            find_program(bundle, LAYER, device)


def test_the_nearest_code_is_chosen(driver):
    both = [launching(Argument("tensor", "x"), architecture=each) for each in (80, 86, 87)]
    bundle = Bundle(tuple(both)).data
    chosen = {80: both[0], 86: both[1], 87: both[2], 89: both[1]}
    for device, expected in chosen.items():
        assert find_program(bundle, LAYER, device) == expected.data


# --- Limits of a device ---


def test_shared_memory_that_a_device_lacks(driver):
    driver.add_image(PLAIN.kernels[0].image)
    device = driver.add_device(90, 49151)
    driver.set_context(driver.create_context(device))
    message = "kernel up needs 49152 bytes of shared memory, the device permits 49151"
    with OpenProgram(PLAIN.data) as opened, pytest.raises(LauncherError, match=message):
        opened.prepare()


@pytest.mark.parametrize(("shared_memory", "calls"), [(49152, 0), (49153, 1)])
def test_shared_memory_beyond_the_default_is_asked_for(driver, shared_memory, calls):
    # A hint, so its failure is none.
    driver.fail("cuFuncSetCacheConfig", INVALID_VALUE)
    kernel = replace(PLAIN.kernels[0], shared_memory=shared_memory)
    changed = replace(PLAIN, kernels=(kernel,))
    use(driver, changed)
    with OpenProgram(changed.data) as opened:
        opened.enqueue(5, TENSORS, 0, 0)
    assert driver.calls("cuFuncSetAttribute") == calls
    assert driver.calls("cuFuncSetCacheConfig") == calls


@pytest.mark.parametrize(
    ("axis", "blocks", "message"),
    [
        (0, 0, r"kernel up would have 0 blocks along x, permitted are 1\.\.2147483647"),
        (1, 65536, r"65536 blocks along y, permitted are 1\.\.65535, for 5 tokens"),
        (2, -1, r"-1 blocks along z, permitted are 1\.\.65535"),
    ],
)
def test_grids_that_no_device_takes(driver, axis, blocks, message):
    grid = [ONE, ONE, ONE]
    grid[axis] = Expression(((0, blocks),))
    (only,) = PLAIN.ranges
    launch = replace(only.launches[0], grid=tuple(grid))
    changed = replace(PLAIN, ranges=(replace(only, launches=(launch,)),))
    use(driver, changed)
    with OpenProgram(changed.data) as opened, pytest.raises(LauncherError, match=message):
        opened.enqueue(5, TENSORS, 0, 0)
    assert driver.calls("cuLaunchKernelEx") == 0


@pytest.mark.parametrize(
    ("integer", "fits"), [(2**31 - 1, True), (2**31, False), (-(2**31) - 1, False)]
)
def test_integers_that_a_kernel_cannot_take(driver, integer, fits):
    changed = launching(Argument("i32", Expression(((0, integer),))))
    use(driver, changed)
    with OpenProgram(changed.data) as opened:
        if fits:
            opened.enqueue(5, TENSORS, 0, 0)
        else:
            message = f"kernel up takes a 32-bit integer, which would be {integer} for 5 tokens"
            with pytest.raises(LauncherError, match=message):
                opened.enqueue(5, TENSORS, 0, 0)
    assert driver.calls("cuLaunchKernelEx") == fits


# --- Waves ---

WAVE_INDEX = Expression(((1, 5),))


def waved(waves: Expression, grid: Expression = ONE) -> Program:
    """A program whose wave has one launch on each stream, the first with a grid of its own."""
    (only,) = OFFLOADED.ranges
    plain = Argument("i32", WAVE_INDEX)
    side, main = (replace(each, arguments=(plain,)) for each in only.wave)
    side = replace(side, grid=(grid, ONE, ONE))
    changed = replace(only, buffers=(), launches=(), wave=(side, main), waves=waves, epilogue=())
    return replace(OFFLOADED, ranges=(changed,))


def launched(driver, program: Program) -> list[tuple[int, bool]]:
    """The wave of each launch, and whether it was on the second stream."""
    use(driver, program)
    seen = []
    driver.on_launch(lambda launch: seen.append((launch.i32(0), launch.stream != 0)))
    with OpenProgram(program.data) as opened, opened.open_cache() as cache:
        cache.enqueue(5, TENSORS, 0, 0)
    return seen


def test_the_launches_of_waves(driver):
    assert launched(driver, waved(Expression(((0, 2),)))) == [
        *((0, True), (0, False), (1, True), (1, False))
    ]
    assert launched(driver, waved(Expression(((0, 0),)))) == []


def test_a_launch_without_blocks_is_left_out_of_a_wave(driver):
    # Only wave 1 has a block.
    seen = launched(driver, waved(Expression(((0, 2),)), WAVE_INDEX))
    assert seen == [(0, False), (1, True), (1, False)]
    message = r"-1 blocks along x, permitted are 1\.\."
    with pytest.raises(LauncherError, match=message):
        launched(driver, waved(Expression(((0, 2),)), Expression(((0, -1),))))


@pytest.mark.parametrize("waves", [-1, 1025])
def test_numbers_of_waves(driver, waves):
    message = rf"there would be {waves} waves, permitted are 0\.\.1024, for 5 tokens"
    with pytest.raises(LauncherError, match=message):
        launched(driver, waved(Expression(((0, waves),))))


def test_a_state_that_has_no_size(driver):
    state = (replace(OFFLOADED.state[0], size=Expression(((0, -8),))), *OFFLOADED.state[1:])
    program = replace(waved(ONE), state=state)
    message = "the state's part expert_of_slot would have -8 bytes"
    with OpenProgram(program.data) as opened, pytest.raises(LauncherError, match=message):
        opened.state_size()
