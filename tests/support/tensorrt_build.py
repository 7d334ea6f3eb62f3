"""A script that builds one engine with TensorRT for RTX and prints what it saw as JSON.

It runs in a process of its own, see ``tensorrt_builds``: TensorRT may end the process. Argument: a
request as JSON. Without an engine's path it only parses.
"""

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import tensorrt_rtx_bindings as trt

from trt_plugin.plugin import sharing_kernels

request = json.loads(sys.argv[1])
log: dict[str, list[str]] = {level: [] for level in trt.ILogger.Severity.__members__}


class Logger(trt.ILogger):
    def log(self, severity, message):
        log[severity.name].append(message)


def shapes_of(tensor):
    """Returns the smallest, usual and largest shape of an input, symbolic sizes as requested."""
    given = request["shapes"].get(tensor.name)
    if given:
        return given
    return [[size if known < 0 else known for known in tensor.shape] for size in request["sizes"]]


def build(parsed):
    if not parsed or request["engine"] is None:
        return None, []
    config = builder.create_builder_config()
    for name in request["flags"]:
        config.set_flag(getattr(trt.BuilderFlag, name))
    if request["serialized_plugins"]:
        config.plugins_to_serialize = request["serialized_plugins"]
    config.num_compute_capabilities = len(request["compute_capabilities"])
    for place, name in enumerate(request["compute_capabilities"]):
        config.set_compute_capability(getattr(trt.ComputeCapability, name), place)
    inputs = [network.get_input(place) for place in range(network.num_inputs)]
    symbolic = [tensor for tensor in inputs if -1 in tuple(tensor.shape)]
    profiles = []
    if symbolic:
        for _ in range(request["profiles"]):
            profile = builder.create_optimization_profile()
            for tensor in symbolic:
                profile.set_shape(tensor.name, *shapes_of(tensor))
            config.add_optimization_profile(profile)
            profiles.append(
                {
                    each.name: [list(shape) for shape in profile.get_shape(each.name)]
                    for each in symbolic
                }
            )
    return builder.build_serialized_network(network, config), profiles


logger = Logger()
if request["library"]:
    trt.get_plugin_registry().load_library(request["library"])
builder = trt.Builder(logger)
network = builder.create_network(0)
parser = trt.OnnxParser(network, logger)
started = time.perf_counter()
with sharing_kernels() if request["share_kernels"] else nullcontext():
    parsed = parser.parse_from_file(request["onnx"])
parse_errors = [parser.get_error(place) for place in range(parser.num_errors)]
parse_seconds = time.perf_counter() - started
started = time.perf_counter()
engine, profiles = build(parsed)
build_seconds = time.perf_counter() - started
if engine is not None:
    Path(request["engine"]).write_bytes(engine)
layers = [network.get_layer(place) for place in range(network.num_layers)]


def tensors(get, count):
    found = map(get, range(count))
    return {each.name: [each.dtype.name, list(each.shape)] for each in found}


def plugin(layer):
    result = layer.get_output(0)
    given = [layer.get_input(place).dtype.name for place in range(layer.num_inputs)]
    # TensorRT's Python shows a layer by its base class until told its own.
    name, layer.__class__ = layer.name, trt.IPluginV3Layer
    core = layer.plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
    return [name, core.plugin_name, [*given, result.dtype.name], list(result.shape)]


report = {
    "parsed": parsed,
    "parse_errors": [
        f"node {error.node_name()!r} ({error.node_operator()}): {error.desc()}"
        for error in parse_errors
    ],
    "layers": [[layer.name, layer.type.name] for layer in layers],
    "plugins": [plugin(layer) for layer in layers if layer.type == trt.LayerType.PLUGIN_V3],
    "inputs": tensors(network.get_input, network.num_inputs),
    "outputs": tensors(network.get_output, network.num_outputs),
    "profiles": profiles,
    "parse_seconds": parse_seconds,
    "build_seconds": build_seconds,
    "bytes": 0 if engine is None else engine.nbytes,
    "errors": log["ERROR"] + log["INTERNAL_ERROR"],
    "warnings": log["WARNING"],
}
sys.stdout.write("\n" + json.dumps(report))
