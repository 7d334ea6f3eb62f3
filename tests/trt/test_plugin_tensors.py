"""Shapes, dtypes and formats that the plugin refuses, and what it says: the next call works."""

from __future__ import annotations

import os

import pytest
import torch

from plugin_host import NAMES, RUNTIME, Description, attributes_of, describe, inputs_of
from plugin_layers import INVALID_ARGUMENT, NOT_FOUND, described, small_case, the_error
from standin_gpu import StandinGpu
from trt_plugin.bundle import Bundle

pytest_plugins = ("plugin_layers",)

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)


def changed(case, **changes) -> list[Description]:
    names = ("x", "router_weight", "w1", "w2", "router_bias", "b1", "b2")
    return [changes.get(name, each) for name, each in zip(names, described(case), strict=False)]


def shaped(*shape: int, dtype=torch.float32, **options) -> Description:
    return Description(shape, dtype, **options)


BAD_TENSORS = {
    "x": ({"x": shaped(5, 24)}, "x must have shape [..., 16] with the tokens of x, [5, 24]; got"),
    "w1": ({"w1": shaped(5, 16, 24)}, "w1 must have shape [5, 24, 16], got [5, 16, 24]"),
    "rank": ({"w2": shaped(5, 16)}, "w2 must have shape [5, 16, 24], got [5, 16]"),
    "scalar": ({"b1": shaped()}, "b1 must have shape [5, 24], got []"),
    "router": ({"router_weight": shaped(4, 16)}, "router_weight must have shape [5, 16], got [4"),
    "shifted": ({"router_bias": shaped(5, 24)}, "router_bias must have shape [5], got [5, 24]"),
    "dtype of w2": (
        {"w2": shaped(5, 16, 24, dtype=torch.float16)},
        "w2 must be float32, got float",
    ),
    "integers": (
        {"x": shaped(5, 16, dtype=torch.int32)},
        "x must be one of float32, float16, bfloat16; got TensorRT's type 3",
    ),
    "int8": (
        {"w1": shaped(5, 24, 16, dtype=torch.int8)},
        "w1 must be one of float32, float16, bfloat16; got TensorRT's type 2",
    ),
    "format": ({"w1": shaped(5, 24, 16, format=2)}, "w1 must be in linear format, got format 2"),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_at_configuration(tensorrt_host, layer, name):
    plugin, case = layer
    changes, message = BAD_TENSORS[name]
    inputs = changed(case, **changes)
    assert plugin.configure(inputs, inputs[0]) == INVALID_ARGUMENT
    assert message in the_error(tensorrt_host)


@pytest.fixture(params=["w1", "w2"])
def transposed(request, driver, tensorrt_host, tmp_path):
    """A plugin whose layer has a weight as (in, out), the weight's name, and the layer's case."""
    case = small_case()
    flag = f"{request.param}_transposed"
    program = StandinGpu(driver).program(case, **{flag: True})
    bundle = tmp_path / "model.moek"
    bundle.write_bytes(Bundle((program,)).data)
    attributes = attributes_of(case) | {"kernels": str(bundle)}
    assert tensorrt_host.create(NAMES[case.op], attributes) is None
    assert "has no kernels of this layer: " in the_error(tensorrt_host)
    plugin = tensorrt_host.create(NAMES[case.op], attributes | {flag: 1})
    assert plugin is not None
    yield plugin, request.param, case
    plugin.destroy()


def test_weights_that_lie_as_in_out(tensorrt_host, transposed):
    plugin, name, case = transposed
    experts, *sizes = case.arguments[name].shape
    inputs = changed(case, **{name: shaped(experts, *reversed(sizes))})
    assert plugin.configure(inputs, inputs[0]) == 0
    stored = tensorrt_host.create(NAMES[case.op], plugin.serialize(), RUNTIME)
    assert stored.shape_change(inputs, inputs[0]) == 0
    wrong = described(case)
    wanted, got = [experts, *reversed(sizes)], [experts, *sizes]
    for check in (plugin.configure, stored.shape_change):
        assert check(wrong, wrong[0]) == INVALID_ARGUMENT
        assert the_error(tensorrt_host) == f"{name} must have shape {wanted}, got {got}"
    stored.destroy()


def test_another_output(tensorrt_host, layer):
    plugin, case = layer
    for output in (shaped(4, 16), shaped(5, 16, dtype=torch.float16), shaped(5, 16, format=1)):
        assert plugin.configure(described(case), output) == INVALID_ARGUMENT
        assert the_error(tensorrt_host).startswith("y must ")


@pytest.mark.each_value
@pytest.mark.parametrize("name", [name for name in BAD_TENSORS if name != "integers"])
def test_tensors_at_run_time(tensorrt_host, stored, layer, name):
    case = layer[1]
    changes, message = BAD_TENSORS[name]
    plugin = tensorrt_host.create("DroplessMoE", {"programs": stored}, RUNTIME)
    inputs = changed(case, **changes)
    assert plugin.shape_change(inputs, inputs[0]) == INVALID_ARGUMENT
    error = the_error(tensorrt_host)
    assert message in error or "w1 must be float32, got int8 (TensorRT's type 2)" in error
    plugin.destroy()


@pytest.mark.parametrize("count", [0, 3, 9])
def test_numbers_of_inputs(tensorrt_host, layer, count):
    plugin, case = layer
    inputs = (described(case) * 2)[:count]
    output = describe(case.arguments["x"])
    calls = (
        lambda: plugin.configure(inputs, output),
        lambda: plugin.shape_change(inputs, output),
        lambda: plugin.output_shape(inputs)[0],
        lambda: plugin.output_type(inputs)[0],
    )
    for call in calls:
        assert call() == INVALID_ARGUMENT
        assert the_error(tensorrt_host) == (
            "the layer has 4 to 8 inputs, x, router_weight, w1, w2, router_bias (optional), "
            "b1 (optional), b2 (optional), selection_bias (optional), and 1 output; "
            f"got {count} and 1"
        )


def test_formats_and_types_that_are_not_supported(tensorrt_host, layer):
    plugin, case = layer
    inputs, output = described(case), describe(case.arguments["x"])
    assert plugin.supports_all(inputs, output)
    # A description is read once TensorRT has written it: Plugin.supports() has that right.
    for position in range(len(inputs)):
        other = list(inputs)
        other[position] = Description(inputs[position].shape, torch.float32, format=2)
        assert not plugin.supports(position, other, output)
    assert not plugin.supports(len(inputs), inputs, shaped(5, 16, dtype=torch.float16))
    (warning,) = tensorrt_host.messages()
    assert "no kernels with y float16; " in warning
    for position in (-1, len(inputs) + 1):
        assert not plugin.supports(position, inputs, output)
        assert the_error(tensorrt_host) == f"there is no position {position} among 7 inputs"


def test_too_many_dimensions(tensorrt_host, layer):
    plugin, case = layer
    inputs = described(case)

    class Nine(Description):
        def dynamic(self):
            made = super().dynamic()
            made.desc.dims.rank = 9
            return made

    inputs[0] = Nine((5, 16), torch.float32)
    assert plugin.configure(inputs, describe(case.arguments["x"])) == INVALID_ARGUMENT
    assert the_error(tensorrt_host) == "a tensor has 9 dimensions, at most 8 are permitted"


def test_before_the_kernels_are_chosen(tensorrt_host, layer):
    plugin, case = layer
    inputs, x = inputs_of(case), case.arguments["x"]
    message = "the layer has no kernels yet: configurePlugin() must come first, and succeed"
    assert plugin.serialize() == {}
    assert message in the_error(tensorrt_host)
    assert plugin.workspace(described(case), describe(x)) == 0
    assert message in the_error(tensorrt_host)
    assert plugin.shape_change(described(case), describe(x)) == INVALID_ARGUMENT
    assert message in the_error(tensorrt_host)
    assert plugin.enqueue(inputs, torch.empty_like(x), 256) == INVALID_ARGUMENT
    assert message in the_error(tensorrt_host)


def test_no_kernels_for_these_dtypes(tensorrt_host, layer):
    plugin, case = layer
    half = [
        Description(each.shape, torch.float16 if each.dtype == torch.float32 else each.dtype)
        for each in described(case)
    ]
    assert plugin.configure(half, half[0]) == NOT_FOUND
    error = the_error(tensorrt_host)
    assert error.startswith("no kernels with x float16, router_weight float16, ")
    assert "/model.moek has this layer with x float32, router_weight float32, " in error


def test_a_node_without_the_biases_of_its_kernels(tensorrt_host, layer):
    plugin, case = layer
    inputs, output = described(case)[:5], describe(case.arguments["x"])
    copy = plugin.clone()
    for each in (plugin, copy):
        assert not each.supports_all(inputs, output)
    # Once, whatever TensorRT asks for.
    error = the_error(tensorrt_host)
    assert error.startswith("the node has no input b1, b2; ")
    assert "/model.moek has this layer with x float32, router_weight float32, w1 float32" in error
    assert error.endswith(", b1 float32, b2 float32: compile the kernels for this file")
    assert plugin.configure(inputs, output) == NOT_FOUND
    assert the_error(tensorrt_host).startswith(
        "no kernels with x float32, router_weight float32, w1 "
    )
    copy.destroy()


def test_more_tokens_than_the_kernels_take(tensorrt_host, stored, layer):
    plugin, case = layer
    inputs, x = described(case), describe(case.arguments["x"])
    inputs[0] = shaped(-1, 16, most=(2**40, 16))
    assert plugin.configure(inputs, x) == INVALID_ARGUMENT
    assert "the number of tokens must be in 0.." in the_error(tensorrt_host)
    assert plugin.workspace(inputs, x) == 0
    assert the_error(tensorrt_host).endswith(f", got {2**40}")
    inputs[0] = shaped(2**40, 2**40, 16)
    assert (
        plugin.enqueue(inputs_of(case), case.arguments["x"], 256, descriptions=inputs)
        == INVALID_ARGUMENT
    )
    assert the_error(tensorrt_host).endswith(f", got {2**63 - 1}")
