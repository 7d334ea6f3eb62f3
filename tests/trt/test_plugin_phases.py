"""The plugin through both of TensorRT's phases, on the stand-in driver: the oracle's numbers."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from custom_ops.kernels.plan import plan
from kernel_runs import layer_of
from moe_cases import assert_matches, in_steps, make_case
from plugin_host import (
    NAMES,
    RUNTIME,
    VERSIONS,
    Description,
    attributes_of,
    describe,
    filled,
    host,
    inputs_of,
    serialized,
    version_of,
)
from plugin_layers import checked_host, the_error
from standin_gpu import StandinGpu
from trt_plugin.bundle import Bundle
from trt_plugin.engine.kernels import giving_kernels
from trt_plugin.launcher import OpenProgram
from trt_plugin.native import LauncherError, call
from trt_plugin.plugin import sharing_kernels

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)

DTYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 7}


@pytest.fixture(params=VERSIONS)
def tensorrt(request):
    with checked_host(request.param) as tensorrt:
        yield tensorrt


def profile(case, most: int) -> tuple[list[Description], Description]:
    """The inputs and y of a network whose first size is dynamic, up to a largest."""
    inputs = []
    for name, tensor in zip(input_names(case), inputs_of(case), strict=True):
        shape = tuple(tensor.shape)
        if name in ("x", "expert_ids", "expert_weights"):
            inputs.append(Description((-1, *shape[1:]), tensor.dtype, (most, *shape[1:])))
        else:
            inputs.append(describe(tensor))
    return inputs, inputs[0]


def input_names(case) -> list[str]:
    names = {id(value): name for name, value in case.arguments.items()}
    return [names[id(tensor)] for tensor in inputs_of(case)]


def build_engine(tensorrt, case, bundle, most: int):
    """What TensorRT does from a node to an engine; returns the layer's field and its workspace."""
    plugin = tensorrt.create(
        NAMES[case.op],
        attributes_of(case) | {"kernels": str(bundle)},
        layer="layer",
        version=version_of(case),
    )
    inputs, output = profile(case, most)
    assert plugin.outputs() == 1
    assert plugin.output_type(inputs) == (0, DTYPE_NUMBERS[case.arguments["x"].dtype])
    rank = case.arguments["x"].ndim
    assert plugin.output_shape(inputs) == (0, [(0, axis) for axis in range(rank)])
    assert plugin.supports_all(inputs, output)
    timed = plugin.clone()
    plugin.destroy()
    assert timed.configure(inputs, output) == 0
    assert timed.tactics() == 0
    size = timed.workspace(inputs, output)
    fields = timed.serialize()
    stored = {name: replace(field, data=bytes(field.data)) for name, field in fields.items()}
    timed.destroy()
    return stored, size


def engine_layer(tensorrt, case, fields, layer: str = "layer"):
    plugin = tensorrt.create(NAMES[case.op], fields, RUNTIME, layer, version_of(case))
    assert plugin is not None, tensorrt.messages()
    return plugin


def small_case(op: str = "experts", shape: tuple[int, ...] = (5,), **options):
    return filled(make_case(op, shape, **{"width": 16, "hidden": 24} | options))


def check(context, case, size: int) -> None:
    result = context.run(inputs_of(case), size)
    assert_matches(result, case.oracle(), case.dtypes)


FORMS = {
    "plain": {},
    "gated": {"activation": "silu", "gated": True},
    "interleaved": {"activation": "gelu_tanh", "gated": True, "interleaved": True},
    "gpt-oss": {"activation": "clamped_swiglu", "gated": True, "alpha": 1.3, "limit": 1.0},
    "deepseek-v4": {"activation": "clamped_silu", "gated": True, "limit": 1.0},
    "inkling2": {"activation": "softcapped_silu", "gated": True, "alpha": 1.3, "limit": 1.0},
    "mish": {"activation": "mish", "gated": True},
    "on input": {"weight_on_input": True, "activation": "relu2"},
    "no biases": {"biases": False, "activation": "relu"},
    "norm": {"pre_norm": "rms", "norm_eps": 0.5, "weight_on_input": True},
    "norm and residual": {"pre_norm": "rms", "norm_eps": 0.5, "residual": True, "biases": False},
}
ROUTERS = {
    "softmax": {},
    "topk_softmax": {"scoring": "topk_softmax"},
    "sigmoid": {"scoring": "sigmoid", "renormalize": False, "routed_scaling": 2.5},
    "rounded": {"logits_dtype": "tokens", "routing_weights_dtype": "tokens"},
    "rounded weights": {"scoring": "sigmoid", "routing_weights_dtype": "tokens"},
}


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
def test_experts(driver, tensorrt, tmp_path, form):
    case = small_case("experts", **FORMS[form])
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    fields, size = build_engine(tensorrt, case, bundle, most=5)
    plugin = engine_layer(tensorrt, case, fields)
    check(plugin, case, size)
    plugin.destroy()


@pytest.mark.each_value
@pytest.mark.parametrize("router", ROUTERS)
def test_dropless(driver, tensorrt, tmp_path, router):
    case = small_case("dropless", dtype=torch.float16, activation="silu", **ROUTERS[router])
    case = case.changed(**in_steps(case.arguments))
    bundle = StandinGpu(driver, "sm_90").bundle(tmp_path / "model.moek", case)
    fields, size = build_engine(tensorrt, case, bundle, most=5)
    plugin = engine_layer(tensorrt, case, fields)
    check(plugin, case, size)
    plugin.destroy()


@pytest.mark.parametrize(
    ("x_dtype", "dtype"),
    [
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("op", ["dropless", "experts"])
def test_dtypes(driver, tmp_path, op, x_dtype, dtype):
    case = small_case(op, x_dtype=x_dtype, dtype=dtype)
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    tensorrt = host(VERSIONS[-1])
    fields, size = build_engine(tensorrt, case, bundle, most=5)
    plugin = engine_layer(tensorrt, case, fields)
    check(plugin, case, size)
    plugin.destroy()


PRESENT = [
    ("dropless", ()),
    ("dropless", ("router_bias",)),
    ("dropless", ("selection_bias",)),
    ("dropless", ("b1",)),
    ("dropless", ("b2",)),
    ("dropless", ("b1", "b2")),
    ("experts", ()),
    ("experts", ("b1",)),
    ("experts", ("b2",)),
]


@pytest.mark.each_value
@pytest.mark.parametrize(("op", "present"), PRESENT)
def test_optional_inputs(driver, tensorrt, tmp_path, op, present):
    case = make_case(op, (5,), width=16, hidden=24, selection_bias=True)
    absent = {"router_bias", "selection_bias", "b1", "b2"} & set(case.arguments) - set(present)
    case = filled(case.changed(**dict.fromkeys(absent)))
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    fields, size = build_engine(tensorrt, case, bundle, most=5)
    plugin = engine_layer(tensorrt, case, fields)
    check(plugin, case, size)
    plugin.destroy()


@pytest.mark.each_value
@pytest.mark.parametrize("scoring", ["sigmoid", "topk_softmax"])
def test_groups(driver, tensorrt, tmp_path, scoring):
    groups = {"group_scoring": "top2_sum", "n_group": 3, "topk_group": 2}
    case = make_case(
        "dropless", (7,), width=16, hidden=24, experts=6, biases=False, selection_bias=True,
        scoring=scoring, **groups,
    )  # fmt: skip
    case = filled(case)
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    fields, size = build_engine(tensorrt, case, bundle, most=7)
    plugin = engine_layer(tensorrt, case, fields)
    check(plugin, case, size)
    plugin.destroy()


@pytest.mark.parametrize("none", [Description((0,), torch.float32), Description(None, 0)])
def test_an_optional_input_without_elements_is_absent(driver, tensorrt, tmp_path, none):
    case = make_case("dropless", (5,), width=16, hidden=24).changed(router_bias=None)
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    plugin = tensorrt.create("DroplessMoE", attributes_of(case) | {"kernels": str(bundle)})
    inputs = inputs_of(case)
    described = [describe(tensor) for tensor in inputs]
    inputs.insert(4, None)
    described.insert(4, none)
    output = described[0]
    assert plugin.supports_all(described, output)
    assert plugin.configure(described, output) == 0
    size = plugin.workspace(described, output)
    result = plugin.run(inputs, size, described)
    assert_matches(result, case.oracle(), case.dtypes)
    plugin.destroy()


def test_tokens_in_several_dimensions(driver, tensorrt, tmp_path):
    case = small_case("dropless", (2, 3, 4))
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    fields, size = build_engine(tensorrt, case, bundle, most=2)
    plugin = engine_layer(tensorrt, case, fields)
    check(plugin, case, size)
    # One token, which has no dimension of its own.
    check(plugin, small_case("dropless", ()), size)
    plugin.destroy()


@pytest.mark.parametrize("op", ["dropless", "experts"])
def test_any_sequence_of_sizes(driver, tensorrt, tmp_path, op):
    case = small_case(op, (1,), experts=6)
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    fields, size = build_engine(tensorrt, case, bundle, most=60)
    plugin = engine_layer(tensorrt, case, fields)
    context = plugin.attach()
    plugin.destroy()
    for tokens in (3, 60, 0, 1, 17, 0, 2):
        check(context, small_case(op, (tokens,), experts=6, seed=tokens), size)
    context.destroy()


def test_contexts_in_threads(driver, tensorrt, tmp_path):
    case = small_case("dropless")
    gpu = StandinGpu(driver)
    fields, size = build_engine(tensorrt, case, gpu.bundle(tmp_path / "model.moek", case), most=40)
    # Two layers of equal kernels, two contexts of each.
    layers = [engine_layer(tensorrt, case, fields, f"layer {i}") for i in range(2)]
    contexts = [layer.attach() for layer in layers for _ in range(2)]
    start = threading.Barrier(len(contexts))
    failures = []

    def work(number: int) -> None:
        try:
            driver.set_context(gpu.context)
            start.wait()
            for tokens in (40, 3):
                check(contexts[number], small_case("dropless", (tokens,), seed=number), size)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(contexts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert driver.live_modules == len(gpu.program(case).kernels)
    for plugin in (*layers, *contexts):
        plugin.destroy()


def test_streams_are_passed_on(driver, tensorrt, tmp_path):
    case = small_case()
    gpu = StandinGpu(driver)
    fields, size = build_engine(tensorrt, case, gpu.bundle(tmp_path / "model.moek", case), most=5)
    plugin = engine_layer(tensorrt, case, fields)
    streams = set()
    driver.on_launch(lambda launch: streams.add(launch.stream))
    inputs = inputs_of(case)
    described = [describe(tensor) for tensor in inputs]
    assert plugin.shape_change(described, described[0]) == 0
    workspace = torch.empty(size, dtype=torch.uint8)
    y = torch.empty_like(inputs[0])
    for stream in (0, 4096):
        assert plugin.enqueue(inputs, y, workspace.data_ptr(), stream=stream) == 0
    assert streams == {0, 4096}
    plugin.destroy()


def test_a_thread_without_a_context_has_that_of_its_stream(driver, tensorrt, tmp_path):
    case = small_case()
    gpu = StandinGpu(driver)
    fields, size = build_engine(tensorrt, case, gpu.bundle(tmp_path / "model.moek", case), most=5)
    plugin = engine_layer(tensorrt, case, fields)
    stream = driver.create_stream(gpu.context)
    driver.set_context(None)
    result = plugin.run(inputs_of(case), size, stream=stream)
    assert_matches(result, case.oracle(), case.dtypes)
    assert driver.current_context is None
    # The thread's own comes first.
    other = driver.create_context(0)
    driver.set_context(other)
    contexts = set()
    driver.on_launch(lambda launch: contexts.add(launch.context))
    plugin.run(inputs_of(case), size, stream=stream)
    assert contexts == {other}
    plugin.destroy()


def test_enqueue_loads_nothing(driver, tensorrt, tmp_path):
    case = small_case()
    gpu = StandinGpu(driver)
    fields, size = build_engine(tensorrt, case, gpu.bundle(tmp_path / "model.moek", case), most=5)
    plugin = engine_layer(tensorrt, case, fields)
    described = [describe(tensor) for tensor in inputs_of(case)]
    assert driver.calls("cuModuleLoadData") == 0
    assert plugin.shape_change(described, described[0]) == 0
    loads = driver.calls("cuModuleLoadData")
    assert loads == len(gpu.program(case).kernels)
    check(plugin, case, size)
    assert driver.calls("cuModuleLoadData") == loads
    plugin.destroy()


def test_the_engine_needs_no_bundle(driver, tensorrt, tmp_path, monkeypatch):
    case = small_case()
    gpu = StandinGpu(driver)
    bundle = gpu.bundle(tmp_path / "model.moek", case)
    fields, size = build_engine(tensorrt, case, bundle, most=5)
    assert fields["programs"].data == bundle.read_bytes()
    bundle.unlink()
    monkeypatch.setenv("DYNAMO_MOE_KERNELS", "/none")
    plugin = engine_layer(tensorrt, case, fields)
    # An engine can be stored again.
    assert serialized(plugin) == fields["programs"].data
    copy = plugin.clone()
    plugin.destroy()
    check(copy, case, size)
    copy.destroy()


def test_layers_with_equal_kernels_keep_them_once(driver, tensorrt, tmp_path):
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    fields, _ = build_engine(tensorrt, case, bundle, most=5)
    layers = [engine_layer(tensorrt, case, fields, f"layer {i}") for i in range(2)]
    assert len({layer.serialized_at() for layer in layers}) == 1
    layers[0].destroy()
    assert serialized(layers[1]) == fields["programs"].data
    layers[1].destroy()


def test_a_bundle_of_the_environment(driver, tensorrt, tmp_path, monkeypatch):
    case = small_case()
    monkeypatch.setenv(
        "DYNAMO_MOE_KERNELS", str(StandinGpu(driver).bundle(tmp_path / "model.moek", case))
    )
    plugin = tensorrt.create(NAMES[case.op], attributes_of(case))
    assert plugin is not None
    plugin.destroy()


# --- A bundle that the parsing thread is given ---


@pytest.fixture
def elsewhere(monkeypatch) -> None:
    """The environment names a bundle that does not exist, and one architecture."""
    monkeypatch.setenv("DYNAMO_MOE_KERNELS", "/none")
    monkeypatch.setenv("DYNAMO_MOE_ARCHITECTURES", "sm_90")


@pytest.mark.usefixtures("elsewhere")
def test_the_given_bundle_counts_whatever_the_environment_names(driver, tensorrt, tmp_path):
    case = small_case()
    gpus, _ = several(driver, tmp_path, case, "sm_90", "sm_80")
    given = Bundle(tuple(gpu.program(case) for gpu in gpus))
    with giving_kernels(given, "mine"):
        plugin = tensorrt.create(NAMES[case.op], attributes_of(case), layer="layer")
    # It may be configured after the file is parsed.
    assert plugin.configure(*profile(case, most=5)) == 0
    assert serialized(plugin) == given.data
    plugin.destroy()
    assert tensorrt.create(NAMES[case.op], attributes_of(case)) is None
    assert the_error(tensorrt).startswith("cannot read the kernels' bundle /none: ")


@pytest.mark.usefixtures("elsewhere")
def test_a_nodes_own_bundle_comes_before_the_given_one(driver, tensorrt, tmp_path):
    case = small_case()
    gpus, bundle = several(driver, tmp_path, case, "sm_90", "sm_80")
    other = Bundle((gpus[0].program(small_case(activation="silu")),))
    with giving_kernels(other, "other"):
        plugin = configured(tensorrt, case, bundle, "layer")
        assert tensorrt.create(NAMES[case.op], attributes_of(case)) is None
    assert serialized(plugin) == Bundle((gpus[0].program(case),)).data
    plugin.destroy()
    assert the_error(tensorrt).startswith("other has no kernels of this layer: ")


@pytest.mark.usefixtures("elsewhere")
def test_another_thread_is_given_nothing(driver, tensorrt):
    case = small_case()
    given = Bundle((StandinGpu(driver).program(case),))
    created = []

    def parse() -> None:
        created.append(tensorrt.create(NAMES[case.op], attributes_of(case)))

    with giving_kernels(given, "mine"):
        other = threading.Thread(target=parse)
        other.start()
        other.join()
        parse()
    nothing, plugin = created
    assert nothing is None
    assert the_error(tensorrt).startswith("cannot read the kernels' bundle /none: ")
    plugin.destroy()


def test_what_is_given_must_be_a_bundle():
    with pytest.raises(LauncherError, match=r"^invalid bundle: mine: "):
        call("kernels_begin", b"mine", b"no bundle", 9)
    for name, data in ((None, b"x"), (b"mine", None)):
        with pytest.raises(LauncherError, match=r"^invalid argument: (name|data) must not be null"):
            call("kernels_begin", name, data, 1)


# --- Architectures ---


def several(driver, tmp_path, case, *devices: str) -> tuple[list[StandinGpu], Path]:
    """A device of each architecture, and a bundle with the case's programs for all of them."""
    gpus = [StandinGpu(driver, name) for name in devices]
    bundle = tmp_path / "model.moek"
    # Another layer's programs stay out of the engine.
    other = gpus[0].program(small_case(activation="silu"))
    bundle.write_bytes(Bundle((other, *(gpu.program(case) for gpu in gpus))).data)
    return gpus, bundle


def test_the_engine_has_the_kernels_of_all_architectures(driver, tensorrt, tmp_path):
    case = small_case()
    gpus, bundle = several(driver, tmp_path, case, "sm_90", "sm_80")
    expected = Bundle(tuple(gpu.program(case) for gpu in gpus)).data
    # The machine that builds does not count: not its device, nor that it has none.
    for context in (gpus[0].context, gpus[1].context, None):
        driver.set_context(context)
        fields, size = build_engine(tensorrt, case, bundle, most=5)
        assert fields["programs"].data == expected
    plans = [plan(layer_of(case), gpu.architecture) for gpu in gpus]
    assert size == max(each.workspace_size(5) for each in plans) + 255
    assert driver.calls("cuCtxGetCurrent") == 0


def test_the_environment_narrows_the_architectures(driver, tensorrt, tmp_path, monkeypatch):
    case = small_case()
    gpus, bundle = several(driver, tmp_path, case, "sm_120", "sm_90", "sm_80")
    for names, kept in (("sm_90", gpus[1:2]), ("80,sm_120", gpus[::2]), ("", gpus)):
        monkeypatch.setenv("DYNAMO_MOE_ARCHITECTURES", names)
        fields, _ = build_engine(tensorrt, case, bundle, most=5)
        assert fields["programs"].data == Bundle(tuple(gpu.program(case) for gpu in kept)).data


def test_the_device_decides_which_kernels_run(driver, tensorrt, tmp_path):
    case = small_case()
    gpus, bundle = several(driver, tmp_path, case, "sm_90", "sm_80", "sm_86")
    fields, size = build_engine(tensorrt, case, bundle, most=5)
    plugin = engine_layer(tensorrt, case, fields)
    # One layer on several devices in turn. sm_89 has the nearest that runs there.
    newer = StandinGpu(driver, "sm_89")
    runs = {gpu.context: gpu.program(case) for gpu in gpus} | {newer.context: gpus[2].program(case)}
    for context in (*runs, *runs):
        images: list[bytes] = []
        driver.on_launch(lambda launch, images=images: images.append(launch.image))
        driver.set_context(context)
        plugin.run(inputs_of(case), size)
        assert images
        assert set(images) <= {kernel.image for kernel in runs[context].kernels}
    # Asked for once for each device and once more when it is current again.
    asked = driver.calls("cuDeviceGetAttribute")
    plugin.run(inputs_of(case), size)
    assert driver.calls("cuDeviceGetAttribute") == asked
    plugin.destroy()


def test_numbers_on_each_architecture(driver, tensorrt, tmp_path):
    case = small_case("dropless")
    gpus, bundle = several(driver, tmp_path, case, "sm_90", "sm_80")
    fields, size = build_engine(tensorrt, case, bundle, most=5)
    plugin = engine_layer(tensorrt, case, fields)
    for gpu in gpus:
        driver.on_launch(gpu.interpreted)
        driver.set_context(gpu.context)
        check(plugin, case, size)
    plugin.destroy()


# --- Layers that share their kernels ---


def configured(tensorrt, case, bundle, layer: str):
    plugin = tensorrt.create(
        NAMES[case.op], attributes_of(case) | {"kernels": str(bundle)}, layer=layer
    )
    assert plugin.configure(*profile(case, most=5)) == 0
    return plugin


def test_an_engine_stores_equal_kernels_once(driver, tensorrt, tmp_path):
    case, other = small_case(), small_case(activation="silu")
    gpu = StandinGpu(driver)
    bundle = gpu.bundle(tmp_path / "model.moek", case, other)
    with sharing_kernels():
        layers = [configured(tensorrt, each, bundle, "layer") for each in (case, other, case, case)]
    # TensorRT asks each several times, clones too, in any order.
    asked = [layers[3], layers[1], layers[0], layers[3].clone(), layers[2], layers[1], layers[0]]
    stored = [plugin.serialize() for plugin in asked]
    whole = [fields["programs"].data if "programs" in fields else None for fields in stored]
    of_case, of_other = (Bundle((gpu.program(each),)).data for each in (case, other))
    assert whole == [of_case, of_other, None, of_case, None, of_other, None]
    names = [fields["programs_name"].data for fields in stored if "programs_name" in fields]
    assert len(set(names)) == 1
    assert len(names[0]) == 128
    for plugin in {*layers, asked[3]}:
        plugin.destroy()
    # A layer that is created later has no part in it.
    alone = configured(tensorrt, case, bundle, "layer")
    assert serialized(alone) == of_case
    alone.destroy()


def test_the_layer_that_stores_the_kernels_is_gone(driver, tensorrt, tmp_path):
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    with sharing_kernels():
        first, second = (configured(tensorrt, case, bundle, "layer") for _ in range(2))
    assert list(first.serialize()) == ["programs"]
    assert list(second.serialize()) == ["programs_name"]
    first.destroy()
    assert list(second.serialize()) == ["programs"]
    second.destroy()


def test_networks_that_are_parsed_at_once_share_nothing(driver, tensorrt, tmp_path):
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    layers = []

    def parse() -> None:
        with sharing_kernels():
            layers.append(configured(tensorrt, case, bundle, "layer"))

    with sharing_kernels():
        layers.append(configured(tensorrt, case, bundle, "layer"))
        other = threading.Thread(target=parse)
        other.start()
        other.join()
        layers.append(configured(tensorrt, case, bundle, "layer"))
    stored = [list(plugin.serialize()) for plugin in layers]
    assert stored == [["programs"], ["programs"], ["programs_name"]]
    for plugin in layers:
        plugin.destroy()


def shared_engine(tensorrt, case, bundle):
    """The fields of an engine's two layers with equal kernels, and the workspace."""
    with sharing_kernels():
        layers = [configured(tensorrt, case, bundle, "layer") for _ in range(2)]
    size = layers[0].workspace(*profile(case, most=5))
    fields = [
        {name: replace(field, data=bytes(field.data)) for name, field in plugin.serialize().items()}
        for plugin in layers
    ]
    for plugin in layers:
        plugin.destroy()
    return fields, size


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_layer_finds_the_kernels_that_another_stores(driver, tensorrt, tmp_path, order):
    case = small_case("dropless")
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    fields, size = shared_engine(tensorrt, case, bundle)
    # TensorRT makes the layers in any order, then contexts; engines are destroyed in any order.
    layers = {i: engine_layer(tensorrt, case, fields[i]) for i in order}
    contexts = [layers[i].attach() for i in order]
    # TensorRT may ask both at any time.
    for plugin in (*layers.values(), *contexts):
        assert plugin.workspace(*profile(case, most=5)) == size
    for context in contexts:
        check(context, case, size)
    assert layers[1].serialize() == fields[1]
    for plugin in (layers[0], contexts[order.index(0)], layers[1]):
        plugin.destroy()
    check(contexts[order.index(1)], case, size)
    contexts[order.index(1)].destroy()


def test_a_layer_whose_kernels_are_not_loaded(driver, tensorrt, tmp_path):
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    fields, size = shared_engine(tensorrt, case, bundle)
    plugin = engine_layer(tensorrt, case, fields[1])
    described = [describe(tensor) for tensor in inputs_of(case)]
    assert plugin.shape_change(described, described[0]) == 3
    (message,) = tensorrt.messages()
    assert message == (
        "own 1 DroplessMoEExperts layer: the kernels are stored with another layer of the engine, "
        "which is not loaded: build the engine anew with share_kernels=False of build_engine, or "
        "--no-share-kernels of dynamo-moe engine"
    )
    # Those of another engine serve as well, if they are the same.
    storing = engine_layer(tensorrt, case, fields[0])
    check(plugin, case, size)
    plugin.destroy()
    storing.destroy()


def test_a_layer_of_an_engine_answers_the_builder(driver, tensorrt, tmp_path):
    case = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", case)
    fields, size = shared_engine(tensorrt, case, bundle)
    inputs, output = profile(case, most=5)
    other, other_output = profile(small_case(x_dtype=torch.float16), most=5)
    named = engine_layer(tensorrt, case, fields[1])
    # Without its kernels it knows its dtypes and nothing more.
    assert named.supports_all(inputs, output)
    assert not named.supports_all(other, other_output)
    assert named.configure(inputs, output) == 3
    assert named.workspace(inputs, output) == 0
    for message in tensorrt.messages():
        assert "stored with another layer of the engine, which is not loaded" in message
    storing = engine_layer(tensorrt, case, fields[0])
    for plugin in (named, storing):
        assert plugin.supports_all(inputs, output)
        assert plugin.configure(inputs, output) == 0
        assert plugin.workspace(inputs, output) == size
        check(plugin, case, size)
        plugin.destroy()


def test_networks_with_free_dtypes_get_those_of_the_bundle(driver, tensorrt, tmp_path):
    half = small_case(dtype=torch.float16, x_dtype=torch.float16)
    full = small_case()
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", half)
    plugin = tensorrt.create(NAMES[full.op], attributes_of(full) | {"kernels": str(bundle)})
    offered, output = profile(full, most=5)
    assert not plugin.supports_all(offered, output)
    (warning,) = tensorrt.messages()
    assert warning.startswith("own 2 DroplessMoEExperts layers.3.mlp: no kernels with x float32; ")
    assert warning.endswith(
        "has this layer with x float16, expert_ids int64, expert_weights float32, w1 float16, "
        "w2 float16, b1 float16, b2 float16"
    )
    # Once for all clones.
    copy = plugin.clone()
    assert not copy.supports_all(offered, output)
    copy.destroy()
    assert plugin.supports_all(*profile(half, most=5))
    plugin.destroy()


def test_tf32_where_the_bundle_has_nothing_else(driver, tensorrt, tmp_path):
    case = small_case()
    gpu = StandinGpu(driver)
    fast, exact = gpu.program(case, tf32=True), gpu.program(case)
    for programs, chosen in (([fast], fast), ([fast, exact], exact)):
        bundle = tmp_path / f"{len(programs)}.moek"
        bundle.write_bytes(Bundle(tuple(programs)).data)
        fields, _ = build_engine(tensorrt, case, bundle, most=5)
        assert fields["programs"].data == Bundle((chosen,)).data


def test_workspace(driver, tensorrt, tmp_path):
    case = small_case()
    gpu = StandinGpu(driver)
    bundle = gpu.bundle(tmp_path / "model.moek", case)
    plugin = tensorrt.create(NAMES[case.op], attributes_of(case) | {"kernels": str(bundle)})
    plugin.configure(*profile(case, most=100))
    with OpenProgram(gpu.program(case).data) as opened:
        needed = {most: opened.workspace_size(most) for most in (0, 1, 100)}
    for most, size in needed.items():
        assert plugin.workspace(*profile(case, most)) == (size + 255 if size else 0)
    plugin.destroy()


def test_what_a_plugin_says_of_itself(driver, tensorrt, tmp_path):
    case = small_case("dropless", scoring="sigmoid")
    gpu = StandinGpu(driver)
    bundle = gpu.bundle(tmp_path / "model.moek", case)
    plugin = tensorrt.create(NAMES[case.op], attributes_of(case) | {"kernels": str(bundle)})
    assert plugin.describe() == (
        "DroplessMoE/1/: PLUGIN 1.0 0, PLUGIN_V3ONE_CORE 1.0 0, PLUGIN_V3ONE_BUILD 1.0 0, "
        "PLUGIN_V3ONE_RUNTIME 1.0 0"
    )
    assert [plugin.has_capability(kind) for kind in (0, 1, 2, 3)] == [True, True, True, False]
    assert plugin.metadata() == (
        "top_k=2 num_experts=5 in_features=16 hidden_features=24 activation=gelu gated=0 "
        "interleaved=0 weight_on_input=0 pre_norm=none residual=0 w1_transposed=0 w2_transposed=0 "
        "scoring=sigmoid renormalize=1 routed_scaling=1 group_scoring=none"
    )
    checksum = int.from_bytes(bundle.read_bytes()[24:28], "little")
    assert plugin.timing_id() == f"{plugin.metadata()} kernels={checksum:08x}"
    plugin.destroy()
