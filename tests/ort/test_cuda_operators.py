"""The library's operators for ONNX Runtime's CUDA provider, on the stand-in driver.

There is no such provider here: tests/native/onnxruntime plays the runtime.

Legend: T tokens, D model width, H hidden width, E experts, K = top_k.
"""

from __future__ import annotations

import os
import subprocess
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

import ort_runtime
import packed_nodes
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.plan import plan
from custom_ops.kernels.spec import (
    Constant,
    Scalar,
    StatePointer,
    TensorMap,
    TensorPointer,
    WorkspacePointer,
)
from interpreted_gpu import uncompiled_program
from kernel_runs import layer_of, run_kernels
from moe_cases import Case, assert_matches, make_case
from offloaded_layers import Offloaded
from offloaded_layers import small_case as offloaded_case
from ort_runtime import CPU, CUDA, FAIL, INVALID_ARGUMENT, OFFLOADED, Options, OrtError
from plugin_host import (
    NAMES,
    VERSIONS,
    attributes_of,
    describe,
    filled,
    host,
    inputs_of,
    version_of,
)
from standin import LAUNCH_FAILED, RESOURCES, ROOT, SOURCES, Launch, build, compiled, sanitizing
from standin_gpu import StandinGpu
from trt_plugin.bundle import Bundle
from trt_plugin.compiling import limit_tokens
from weights_files import save_experts

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)

NOTHING = dict.fromkeys(RESOURCES, 0)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt-oss": {"activation": "clamped_swiglu", "gated": True, "alpha": 1.3, "limit": 1.0},
    "on input": {"weight_on_input": True, "activation": "relu2"},
    "no biases": {"biases": False, "activation": "silu", "gated": True},
    "norm and residual": {"pre_norm": "rms", "norm_eps": 0.5, "residual": True, "biases": False},
}
#: Functions of the driver that wait, or allocate; a call of a resident layer needs none.
WAITS = ("cuStreamSynchronize", "cuCtxSynchronize", "cuMemAlloc", "cuMemFree", "cuModuleLoadData")


@pytest.fixture(autouse=True)
def _released():
    yield
    assert ort_runtime.messages() == []
    assert ort_runtime.live() == 0


def small_case(op: str = "dropless", shape: tuple[int, ...] = (5,), **options: Any) -> Case:
    return filled(make_case(op, shape, **{"width": 16, "hidden": 24} | options))


def check(kernel: ort_runtime.Kernel, case: Case, stream: int = 0) -> None:
    assert_matches(kernel.run(inputs_of(case), stream), case.oracle(), case.dtypes)


def made(options: Options, case: Case, **how: Any) -> ort_runtime.Kernel:
    return options.kernel(NAMES[case.op], attributes_of(case), inputs_of(case), **how)


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", NAMES)
def test_options(driver, tmp_path, op, form):
    case = small_case(op, **FORMS[form])
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    with made(Options(bundle), case) as kernel:
        check(kernel, case)


@pytest.mark.parametrize(
    ("x_dtype", "dtype"),
    [
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("op", NAMES)
def test_dtypes(driver, tmp_path, op, x_dtype, dtype):
    case = small_case(op, x_dtype=x_dtype, dtype=dtype)
    bundle = StandinGpu(driver, "sm_90").bundle(tmp_path / "model.moek", case)
    with made(Options(bundle), case) as kernel:
        check(kernel, case)


@pytest.mark.each_value
@pytest.mark.parametrize("form", packed_nodes.FORMS)
@pytest.mark.parametrize("op", packed_nodes.NAMES)
def test_packed_weights(driver, tmp_path, op, form):
    case = packed_nodes.small_case(form, op, activation="silu", gated=True)
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    attributes = packed_nodes.attributes(case, bundle)
    inputs = packed_nodes.inputs_of(case)
    with Options().kernel(packed_nodes.NAMES[op], attributes, inputs) as kernel:
        assert_matches(kernel.run(inputs), case.decoded().oracle(), case.plain.dtypes)


@pytest.mark.parametrize("present", [(), ("b2",), ("router_bias", "b1")])
@pytest.mark.parametrize("empty", [False, True], ids=["filled", "empty names"])
def test_optional_inputs(driver, tmp_path, present, empty):
    case = make_case("dropless", (5,), width=16, hidden=24)
    case = case.changed(**dict.fromkeys({"router_bias", "b1", "b2"} - set(present)))
    whole = filled(case)
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case if empty else whole)
    names = ("x", "router_weight", "w1", "w2", "router_bias", "b1", "b2")
    inputs = [case.arguments[name] for name in names] if empty else inputs_of(whole)
    attributes = attributes_of(case)
    with Options(bundle).kernel("DroplessMoE", attributes, inputs) as kernel:
        assert_matches(kernel.run(inputs), case.oracle(), case.dtypes)


@pytest.mark.parametrize("ranks", [True, False], ids=["ranks", "no ranks"])
@pytest.mark.parametrize("constants", [True, False], ids=["constants", "inputs"])
@pytest.mark.parametrize("op", NAMES)
def test_any_sequence_of_sizes(driver, tmp_path, op, constants, ranks):
    case = small_case(op, (1,), experts=6)
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    with made(Options(bundle), case, constants=constants, ranks=ranks) as kernel:
        for shape in ((3,), (40,), (0,), (1,), (2, 3), (2, 0, 3), ()):
            other = small_case(op, shape, experts=6)
            weights = {name: case.arguments[name] for name in ("w1", "w2", "b1", "b2")}
            if op == "dropless":
                weights |= {n: case.arguments[n] for n in ("router_weight", "router_bias")}
            check(kernel, other.changed(**weights))


def test_slots_without_an_expert(driver, tmp_path):
    case = small_case("experts")
    ids = case.arguments["expert_ids"].clone()
    ids[0, 0] = ids[1] = -1
    case = case.changed(expert_ids=ids)
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    with made(Options(bundle), case) as kernel:
        check(kernel, case)


# --- The same launches as TensorRT's plugin ---


class Recorder:
    """Records the launches, with names in place of addresses, and runs them.

    Attributes:
        memory: The first address and the bytes of each name.
    """

    def __init__(self, gpu: StandinGpu) -> None:
        self.gpu = gpu
        self.memory: dict[str, tuple[int, int]] = {}
        self.launches: list[tuple[Any, ...]] = []
        gpu.driver.on_launch(self)

    def __call__(self, launch: Launch) -> None:
        spec = self.gpu.interpreted.kernels[launch.image]
        arguments: list[object] = []
        index = 0
        for argument in spec.arguments.values():
            match argument:
                case Constant():
                    continue
                case Scalar():
                    arguments.append(launch.i32(index))
                case TensorPointer() | WorkspacePointer() | StatePointer():
                    arguments.append(self.named(launch.pointer(index)))
                case TensorMap():
                    made = launch.tensor_map(index)
                    arguments.append((self.named(made.base), made.sizes, made.strides, made.box))
                    index += 2 * len(argument.shape)
            index += 1
        shape = (launch.grid, launch.block, launch.shared_memory, launch.pdl)
        self.launches.append((launch.image, *shape, launch.stream, launch.context, *arguments))
        self.gpu.interpreted(launch)

    def named(self, address: int) -> tuple[str, int] | int:
        for name, (begin, size) in self.memory.items():
            if begin <= address < begin + max(size, 1):
                return name, address - begin
        # The workspace, which begins at the first address of it that is met.
        self.memory.setdefault("workspace", (address, 1 << 20))
        return self.named(address)

    def take(self) -> list[tuple[Any, ...]]:
        self.memory.pop("workspace", None)
        taken, self.launches = self.launches, []
        return taken


CASES: dict[str, tuple[str, tuple[str, dict[str, Any]]]] = {
    "dropless": ("sm_90", ("dropless", {"dtype": torch.float16, "width": 64, "hidden": 64})),
    "experts": ("sm_80", ("experts", {"activation": "silu", "gated": True})),
    "packed": ("sm_90", ("mxfp4", {"activation": "silu", "gated": True})),
}


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("name", CASES)
def test_the_launches_are_those_of_the_plugin(driver, tmp_path, name, tokens):
    device, (form, options) = CASES[name]
    gpu = StandinGpu(driver, device)
    if name == "packed":
        packed = packed_nodes.small_case(form, **options)
        packed = packed.changed(
            x=torch.randn(tokens, 64),
            expert_ids=torch.randint(0, 5, (tokens, 2)),
            expert_weights=torch.rand(tokens, 2),
        )
        bundle = gpu.bundle(tmp_path / "model.moek", packed)
        operator, version = packed_nodes.NAMES["experts"], "1"
        attributes, inputs = packed_nodes.attributes(packed, bundle), packed_nodes.inputs_of(packed)
    else:
        case = small_case(form, (tokens,), **options)
        bundle = gpu.bundle(tmp_path / "model.moek", case)
        operator, version = NAMES[case.op], version_of(case)
        attributes, inputs = attributes_of(case) | {"kernels": str(bundle)}, inputs_of(case)
    recorder = Recorder(gpu)
    y = torch.empty_like(inputs[0])
    for index, tensor in enumerate((*inputs, y)):
        recorder.memory[str(index)] = (tensor.data_ptr(), tensor.numel() * tensor.element_size())
    stream = driver.create_stream(gpu.context)

    tensorrt = host(VERSIONS[-1])
    plugin = tensorrt.create(operator, attributes, version=version)
    described = [describe(tensor) for tensor in inputs]
    assert plugin.supports_all(described, described[0])
    assert plugin.configure(described, described[0]) == 0
    workspace = torch.empty(plugin.workspace(described, described[0]), dtype=torch.uint8)
    assert plugin.shape_change(described, described[0]) == 0
    assert plugin.enqueue(inputs, y, workspace.data_ptr(), stream=stream) == 0
    plugin.destroy()
    wanted, result = recorder.take(), y.clone()

    y.fill_(float("nan"))
    with Options().kernel(operator, attributes, inputs) as kernel:
        kernel.enqueue(inputs, y, stream)
    assert recorder.take() == wanted
    assert len(wanted) > 1
    assert torch.equal(y, result)


# --- Streams, captures, memory ---


def test_a_call_waits_for_nothing_and_loads_nothing(driver, tmp_path):
    case = small_case()
    gpu = StandinGpu(driver)
    bundle = gpu.bundle(tmp_path / "model.moek", case)
    with made(Options(bundle), case) as kernel:
        loads = driver.calls("cuModuleLoadData")
        assert loads == len(gpu.program(case).kernels)
        before = {name: driver.calls(name) for name in WAITS}
        # Loading would break a capture that another thread runs.
        driver.set_capturing(True)
        check(kernel, case)
        driver.set_capturing(False)
        assert {name: driver.calls(name) for name in WAITS} == before
        assert driver.live() == NOTHING


def test_a_capture(driver, tmp_path):
    case = small_case("experts")
    gpu = StandinGpu(driver)
    bundle = gpu.bundle(tmp_path / "model.moek", case)
    stream = driver.create_stream(gpu.context)
    with made(Options(bundle), case) as kernel:
        capture = driver.begin_capture(stream)
        check(kernel, case, stream)
        driver.end_capture(capture)


def test_streams_and_threads(driver, tmp_path):
    case = small_case()
    gpu = StandinGpu(driver)
    bundle = gpu.bundle(tmp_path / "model.moek", case)
    streams = [driver.create_stream(gpu.context) for _ in range(4)]
    seen = set()

    def launched(launch: Launch) -> None:
        seen.add(launch.stream)
        gpu.interpreted(launch)

    driver.on_launch(launched)
    failures: list[BaseException] = []
    start = threading.Barrier(len(streams))
    with made(Options(bundle), case) as kernel:

        def work(number: int) -> None:
            try:
                # Half of the threads have no context but that of their stream.
                driver.set_context(gpu.context if number % 2 else None)
                start.wait()
                for tokens in (30, 3):
                    other = small_case(shape=(tokens,), seed=number)
                    weights = {
                        name: value
                        for name, value in case.arguments.items()
                        if isinstance(value, torch.Tensor) and name != "x"
                    }
                    check(kernel, other.changed(**weights), streams[number])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(streams))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert seen == set(streams)


def test_layers_share_their_kernels(driver, tmp_path):
    case = small_case()
    gpu = StandinGpu(driver)
    bundle = gpu.bundle(tmp_path / "model.moek", case)
    options = Options(bundle)
    with made(options, case) as first, made(options, case) as second:
        check(first, case)
        check(second, case)
        assert driver.live_modules == len(gpu.program(case).kernels)


@pytest.mark.parametrize(("how", "reason"), [(1, ": Available memory of 0 "), (2, "$")])
def test_no_memory(driver, tmp_path, how, reason):
    """Which is not the fault of what is given."""
    message = rf"there are no \d+ bytes of the device's memory{reason}"
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    with made(Options(bundle), case) as kernel:
        ort_runtime.fail_scratch(how)
        with pytest.raises(OrtError, match=message) as raised:
            kernel.run(inputs_of(case))
        assert raised.value.code == FAIL
        check(kernel, case)


def test_a_launch_that_fails(driver, tmp_path):
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    with made(Options(bundle), case) as kernel:
        driver.fail("cuLaunchKernelEx", LAUNCH_FAILED)
        with pytest.raises(OrtError, match=r"cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED"):
            kernel.run(inputs_of(case))
        check(kernel, case)


# --- Offloaded experts ---


@pytest.mark.parametrize("shared", [0, 1])
def test_offloaded_experts(driver, tmp_path, shared):
    case = offloaded_case("dropless", dtype=torch.float16, activation="silu", gated=True)
    offloaded = Offloaded(driver, tmp_path, case, expert_cache=shared)
    streams = [driver.create_stream(offloaded.gpu.context) for _ in range(2)]
    node = (NAMES["dropless"], offloaded.attributes, offloaded.inputs())
    with Options().kernel(*node, domain=OFFLOADED) as kernel:
        for stream in (*streams, streams[0]):
            assert torch.equal(kernel.run(offloaded.inputs(), stream), run_kernels(case, "sm_80"))
        # The streams have a cache each, or one together.
        assert driver.live()["memory"] == (1 if shared else 2)
        assert driver.live()["registrations"] == 2
    assert driver.live() == NOTHING
    said = ort_runtime.messages()
    assert len(said) == (1 if shared else 2)
    whose = "that all streams share" if shared else "for each stream"
    for message in said:
        assert message.startswith("1 DroplessMoE 'layers.3.mlp': 2 of 6 experts at a time are on ")
        assert message.endswith(f" bytes {whose}")


def test_offloaded_experts_in_a_capture(driver, tmp_path):
    case = offloaded_case()
    offloaded = Offloaded(driver, tmp_path, case)
    stream = driver.create_stream(offloaded.gpu.context)
    node = (NAMES["experts"], offloaded.attributes, offloaded.inputs())
    with Options().kernel(*node, domain=OFFLOADED) as kernel:
        kernel.run(offloaded.inputs(), stream)
        capture = driver.begin_capture(stream)
        result = kernel.run(offloaded.inputs(), stream)
        driver.end_capture(capture)
        assert torch.equal(result, run_kernels(case, "sm_80"))
    ort_runtime.messages()


def test_packed_offloaded_experts(driver, tmp_path):
    case = packed_nodes.small_case("int4 zero points", "dropless", activation="silu", gated=True)
    attributes, inputs = packed_nodes.offloaded_node(driver, case, tmp_path, slots=2)
    name = packed_nodes.NAMES["dropless"]
    with Options().kernel(name, attributes, inputs, domain=OFFLOADED) as kernel:
        assert_matches(kernel.run(inputs), case.decoded().oracle(), case.plain.dtypes)
    ort_runtime.messages()


def test_experts_whose_file_is_gone(driver, tmp_path):
    offloaded = Offloaded(driver, tmp_path, offloaded_case())
    offloaded.file.unlink()
    with pytest.raises(OrtError, match=r"DroplessMoEExperts 'layers.3.mlp': .*model\.safetensors"):
        Options().kernel(
            "DroplessMoEExperts", offloaded.attributes, offloaded.inputs(), domain=OFFLOADED
        )


# --- Which bundle, which operators ---


def test_which_bundle(driver, tmp_path, monkeypatch):
    """The node's attribute comes first, then the session's entry, then the environment."""
    case = small_case()
    bundle = str(StandinGpu(driver).bundle(tmp_path / "model.moek", case))
    for attribute, entry, variable in (
        (bundle, "/none.moek", "/none.moek"),
        ("", bundle, "/none.moek"),
        ("", None, bundle),
    ):
        monkeypatch.setenv("DYNAMO_MOE_KERNELS", variable)
        attributes = attributes_of(case) | {"kernels": attribute}
        with Options(entry).kernel("DroplessMoE", attributes, inputs_of(case)) as kernel:
            check(kernel, case)


def test_sessions_with_bundles_of_their_own(driver, tmp_path):
    one, other = small_case(), small_case(activation="silu")
    gpu = StandinGpu(driver)
    bundles = [gpu.bundle(tmp_path / f"{case.options}.moek", case) for case in (one, other)]
    first, second = map(Options, bundles)
    with made(first, one) as kernel, made(second, other) as another:
        check(kernel, one)
        check(another, other)
    with pytest.raises(OrtError, match=r"has no kernels of this layer: .* activation=silu "):
        made(first, other)


def test_older_runtimes_have_the_cpus_operators_alone():
    old, new = Options(version="1.17.3"), Options(version="1.18.0")
    for name in (*NAMES.values(), *packed_nodes.NAMES.values()):
        assert old.operator(name, provider=CPU)
        assert not old.operator(name, provider=CUDA)
        assert new.operator(name, provider=CPU)
        assert new.operator(name, provider=CUDA)
        assert new.operator(name, provider=CUDA, domain=OFFLOADED)
        assert not new.operator(name, provider=CPU, domain=OFFLOADED)


# --- Errors ---


def test_no_bundle(driver, tmp_path, monkeypatch):
    monkeypatch.delenv("DYNAMO_MOE_KERNELS", raising=False)
    StandinGpu(driver)
    case = small_case()
    message = (
        r"DroplessMoE 'layers\.3\.mlp': cannot read the kernels' bundle .*: No such file or "
        r"directory; name it by .*; make a bundle of this file with dynamo-moe compile, and name "
        r"it by the session's entry dynamo_moe\.kernels before the library is registered"
    )
    for options in (Options(), Options(tmp_path / "none.moek")):
        with pytest.raises(OrtError, match=message):
            made(options, case)


def test_a_bundle_that_is_none(driver, tmp_path):
    StandinGpu(driver)
    path = tmp_path / "model.moek"
    path.write_bytes(b"text")
    with pytest.raises(OrtError, match=r"model\.moek: "):
        made(Options(path), small_case())


def test_another_architecture(driver, tmp_path):
    case = small_case()
    bundle = StandinGpu(driver, "sm_90").bundle(tmp_path / "model.moek", case)
    StandinGpu(driver, "sm_80")
    with pytest.raises(OrtError, match=r"the device is sm_80, .* for sm_90: .* --arch sm_80"):
        made(Options(bundle), case)


def test_another_architecture_where_no_context_is_known_yet(driver, tmp_path):
    case = small_case()
    bundle = StandinGpu(driver, "sm_90").bundle(tmp_path / "model.moek", case)
    gpu = StandinGpu(driver, "sm_80")
    stream = driver.create_stream(gpu.context)
    driver.set_context(None)
    with (
        made(Options(bundle), case) as kernel,
        pytest.raises(OrtError, match=r"the device is sm_80, .* --arch sm_80"),
    ):
        kernel.run(inputs_of(case), stream)


def test_other_dtypes(driver, tmp_path):
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", small_case())
    message = (
        r"no kernels with x float16, .*; .*model\.moek has this layer with "
        "x float32, .*; make a bundle of this file"
    )
    with pytest.raises(OrtError, match=message):
        made(Options(bundle), small_case(dtype=torch.float16))


BAD_NODES: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"num_experts": 1025}, "attribute num_experts must be in 1..1024, got 1025"),
    "width": ({"in_features": 12}, "attribute in_features must be a multiple of 8, got 12"),
    "name": ({"activation": "swish"}, "attribute activation must be one of gelu, .*; got 'swish'"),
    "another": ({"top_k": 3}, "has no kernels of this layer: top_k=3 num_experts=5 "),
}


@pytest.mark.parametrize("name", BAD_NODES)
def test_attributes(driver, tmp_path, name):
    changes, message = BAD_NODES[name]
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    with pytest.raises(OrtError, match=rf"DroplessMoE 'layers\.3\.mlp': .*{message}"):
        Options(bundle).kernel("DroplessMoE", attributes_of(case) | changes, inputs_of(case))


BAD_INPUTS: dict[str, tuple[int, Any, str]] = {
    "w1": (2, lambda t: t[:, :-1], r"w1 must have shape \[5, 24, 16\], got \[5, 23, 16\]"),
    "dtype": (3, lambda t: t.half(), r"w2 must be float32, got float16 \(ONNX's type 10\)"),
    "router": (1, lambda t: t.double(), "router_weight must be one of .*; got ONNX's type 11"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
@pytest.mark.parametrize("constant", [True, False], ids=["constants", "inputs"])
def test_weights_that_are_not_the_layers(driver, tmp_path, name, constant):
    index, change, message = BAD_INPUTS[name]
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    inputs = inputs_of(case)
    inputs[index] = change(inputs[index]).contiguous()
    with pytest.raises(OrtError, match=f"DroplessMoE 'layers.3.mlp': {message}"):
        Options(bundle).kernel("DroplessMoE", attributes_of(case), inputs, constants=constant)


def test_calls_that_are_not_the_layers(driver, tmp_path):
    case = small_case("experts")
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    x, ids, *others = inputs_of(case)
    with made(Options(bundle), case) as kernel:
        for inputs, message in (
            ([x[:, :-1].contiguous(), ids], r"x must have shape \[..., 16\] .* got \[5, 15\]"),
            ([x, ids[:-1]], r"expert_ids must have shape \[..., 2\] with the tokens of x, \[5, 16"),
            ([x, ids.int()], "expert_ids must be int64, got int32"),
        ):
            with pytest.raises(OrtError, match=message) as raised:
                kernel.run([*inputs, *others])
            assert raised.value.code == INVALID_ARGUMENT
        check(kernel, case)


def test_too_few_inputs(driver, tmp_path):
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    with pytest.raises(OrtError, match=r"the layer has 4 to 8 inputs, .*; got 3 and 1"):
        Options(bundle).kernel("DroplessMoE", attributes_of(case), inputs_of(case)[:3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "sanitizer", ["address,undefined", pytest.param("thread", marks=pytest.mark.every)]
)
@pytest.mark.every
def test_under_sanitizers(tmp_path, sanitizer):
    flags = sanitizing(sanitizer)
    native = ROOT / "tests" / "native"
    library = [path for path in SOURCES if path.parent.name != "plugin"]
    # Not run here, and under sanitizers in test_ort_loops.py: they take longer than all the others.
    loops = [path for path in library if path.stem in ("activation", "few_rows", "packed_matrix")]
    checked = [path for path in library if path not in loops]
    soname = "-Wl,-soname,libcuda.so.1"
    cuda = build("libcuda.so.1", [native / "standin.cc"], *flags, "-fPIC", "-shared", soname)
    sources = [*checked, ort_runtime.SOURCE, native / "onnxruntime" / "check.cc"]
    objects = [compiled(path, "-Og") for path in loops]
    program = build("cuda_operators_check", [*sources, *objects], *flags, "-ldl")
    case = make_case("experts", (30,), width=136, hidden=72, dtype=torch.float16)
    layer = layer_of(case)
    bundles = []
    for number, each in enumerate((layer, replace(layer, resident_experts=2))):
        bundles.append(tmp_path / f"{number}.moek")
        planned = limit_tokens(plan(each, architecture("sm_80")), 50)
        bundles[-1].write_bytes(Bundle((uncompiled_program(planned),)).data)
    done = subprocess.run(
        [program, *bundles, *save_experts(tmp_path / "model.safetensors", case)],
        env={**os.environ, "LD_LIBRARY_PATH": str(cuda.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "ok\n"
