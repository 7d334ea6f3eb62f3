"""A script that builds engines with TensorRT for RTX and prints what it sees as JSON.

It runs in a process of its own, without a GPU and a driver. Arguments: an ONNX file, the same with
a layer whose output nothing uses, their bundle of programs for sm_89 and sm_120.
"""

import json
import os
import sys
from contextlib import nullcontext
from typing import Any

import tensorrt_rtx_bindings as trt

import trt_plugin
from trt_plugin.plugin import sharing_kernels

model, unused, bundle = sys.argv[1:4]
programs = [program.data for program in trt_plugin.read(bundle).programs]
os.environ["DYNAMO_MOE_KERNELS"] = bundle
messages: list[str] = []


class Logger(trt.ILogger):
    def log(self, severity, message):
        if severity.value <= trt.ILogger.Severity.WARNING.value:
            messages.append(message)


logger = Logger()
trt_plugin.load()


def build(onnx=model, *, share=False, profiles=1, flags=(), with_library=False) -> tuple[Any, Any]:
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    with sharing_kernels() if share else nullcontext():
        assert parser.parse_from_file(onnx), messages
    config = builder.create_builder_config()
    config.num_compute_capabilities = 2
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    config.set_compute_capability(trt.ComputeCapability.SM120, 1)
    for number in range(profiles):
        profile = builder.create_optimization_profile()
        profile.set_shape(network.get_input(0).name, (1, 16), (4, 16), (16 << number, 16))
        config.add_optimization_profile(profile)
    for flag in flags:
        config.set_flag(getattr(trt.BuilderFlag, flag))
    if with_library:
        config.plugins_to_serialize = [str(trt_plugin.library_path())]
    plan = builder.build_serialized_network(network, config)
    assert plan is not None, messages
    return network, bytes(plan)


def counts(plan):
    """How often the engine holds each program, and names that stand for them."""
    return [*map(plan.count, programs), plan.count(b"programs_name")]


network, plan = build()
layers = [network.get_layer(i) for i in range(network.num_layers)]
plugins = [layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
report = {
    "layers": [
        [layer.name, layer.get_output(0).dtype.name, list(layer.get_output(0).shape)]
        + [layer.get_input(i).dtype.name for i in range(layer.num_inputs)]
        for layer in plugins
    ],
    "alone": counts(plan),
    "same bytes": build()[1] == plan,
    "shared": counts(build(share=True)[1]),
    "shared, 2 profiles": counts(build(share=True, profiles=2)[1]),
    "shared, one unused": counts(build(unused, share=True)[1]),
    "streaming": counts(build(flags=["WEIGHT_STREAMING"])[1]),
    "user allocation": counts(build(flags=["REQUIRE_USER_ALLOCATION"])[1]),
}
with_library = build(with_library=True)[1]
report["library"] = with_library.count(trt_plugin.library_path().read_bytes())
os.environ["DYNAMO_MOE_ARCHITECTURES"] = "sm_120"
report["narrowed"] = counts(build()[1])
report["messages"] = list(messages)
messages.clear()
os.environ["DYNAMO_MOE_ARCHITECTURES"] = "sm_90"
refused = trt.Builder(logger).create_network(0)
report["parsed"] = trt.OnnxParser(refused, logger).parse_from_file(model)
report["refused"] = messages
sys.stdout.write(json.dumps(report))
