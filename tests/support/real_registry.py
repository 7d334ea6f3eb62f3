"""A script that tests the plugin with a real TensorRT registry and prints its results as JSON.

It runs in a process of its own. Arguments: the native library, a layer's bundle, attributes as
JSON, TensorRT's module.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import trt_plugin.plugin

trt: Any = importlib.import_module(sys.argv[4])
library, bundle = map(Path, sys.argv[1:3])
attributes = json.loads(sys.argv[3]) | {"kernels": str(bundle)}


def library_path(*, self_registering: bool = False) -> Path:
    return library


trt_plugin.plugin.library_path = library_path
kept: list[Any] = []
messages: list[str] = []


class Logger(trt.ILogger):
    def log(self, severity, message):
        messages.append(f"{severity.name} {message}")


# A runtime needs a GPU, and there is no logger without it. A builder needs none.
builder = trt.Builder(Logger()) if hasattr(trt, "Builder") else None


def field(name, value):
    if isinstance(value, str):
        data, kind = np.frombuffer(value.encode(), np.int8), trt.PluginFieldType.CHAR
    elif isinstance(value, bytes):
        data, kind = np.frombuffer(value, np.int8), trt.PluginFieldType.UNKNOWN
    elif isinstance(value, float):
        data, kind = np.array([value], np.float32), trt.PluginFieldType.FLOAT32
    else:
        data, kind = np.array([value], np.int32), trt.PluginFieldType.INT32
    # A PluginField does not keep its array.
    kept.append(data)
    return trt.PluginField(name, data, kind)


def create(values, phase, creator):
    fields = trt.PluginFieldCollection([field(name, value) for name, value in values.items()])
    return creator.create_plugin("layers.3.mlp", fields, phase)


def refusal(call):
    try:
        call()
    except trt_plugin.plugin.PluginLoadError as error:
        return str(error)
    return None


registry = trt_plugin.plugin.load()
report = {"version": trt.__version__, "loaded twice": refusal(trt_plugin.plugin.load)}
creators = [
    registry.get_creator(name, version, "")
    for name in trt_plugin.plugin.PLUGINS
    for version in trt_plugin.plugin.VERSIONS
]
report["creators"] = [
    [each.name, each.plugin_version, each.plugin_namespace, type(each).__name__]
    for each in creators
]
report["fields"] = [[each.name for each in creator.field_names] for creator in creators]

built = create(attributes, trt.TensorRTPhase.BUILD, creators[0])
loaded = create({"programs": bundle.read_bytes()}, trt.TensorRTPhase.RUNTIME, creators[0])
report["plugins"] = []
for plugin in (built, loaded):
    kinds = trt.PluginCapabilityType
    core = plugin.get_capability_interface(kinds.CORE)
    build = plugin.get_capability_interface(kinds.BUILD)
    runtime = plugin.get_capability_interface(kinds.RUNTIME)
    report["plugins"].append(
        [core.plugin_name, core.plugin_version, core.plugin_namespace, build.num_outputs]
        + [type(each).__name__ for each in (plugin, core, build, runtime)]
    )
report["refused"] = [
    create(values, phase, creator) is None
    for values, phase, creator in (
        ({}, trt.TensorRTPhase.BUILD, creators[0]),
        (attributes | {"top_k": 0}, trt.TensorRTPhase.BUILD, creators[0]),
        (attributes | {"top_k": "2"}, trt.TensorRTPhase.BUILD, creators[0]),
        (attributes, trt.TensorRTPhase.BUILD, creators[1]),
        ({"programs": bundle.read_bytes()}, trt.TensorRTPhase.RUNTIME, creators[1]),
        ({"programs": bundle.read_bytes()[:-1]}, trt.TensorRTPhase.RUNTIME, creators[0]),
    )
]
report["messages"] = messages
sys.stdout.write(json.dumps(report))
