"""Which logger the plugin's messages reach, and how long they are."""

from __future__ import annotations

import ctypes
import os

import pytest

from plugin_host import RTX_VERSION, VERSIONS, attributes_of, host
from plugin_layers import small_case
from trt_plugin.native import library_path

pytest_plugins = ("plugin_layers",)

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        *((version, ()) for version in (*VERSIONS, RTX_VERSION)),
        *((version, ("-DHOST_SECOND_BASE",)) for version in (VERSIONS[0], RTX_VERSION)),
        # Without run-time type information the version decides.
        *((version, ("-fno-rtti",)) for version in VERSIONS),
    ],
)
def test_the_logger_of_whoever_calls_comes_first(capfd, version, flags):
    tensorrt = host(version, *flags)
    for own, expected in ((True, "own"), (False, "global")):
        tensorrt.call.host_set_loggers(own, True)
        assert tensorrt.create("DroplessMoE", {}) is None
        (message,) = tensorrt.messages()
        assert message.startswith(f"{expected} 1 DroplessMoE layers.3.mlp: attribute num_exp")
    assert capfd.readouterr().err == ""


def test_loggers_of_an_unknown_kind_are_left_alone(capfd):
    # Nothing tells how this TensorRT for RTX lays them out.
    tensorrt = host(RTX_VERSION, "-fno-rtti")
    assert tensorrt.create("DroplessMoE", {}) is None
    assert tensorrt.messages() == []
    expected = "[dynamo-moe] DroplessMoE layers.3.mlp: attribute num_experts is missing\n"
    assert capfd.readouterr().err == expected


def test_without_a_logger_errors_go_to_stderr(tensorrt_host, capfd):
    expected = "[dynamo-moe] DroplessMoE layers.3.mlp: attribute num_experts is missing\n"
    tensorrt_host.call.host_set_loggers(False, False)
    assert tensorrt_host.create("DroplessMoE", {}) is None
    assert capfd.readouterr().err == expected
    tensorrt_host.call.host_set_loggers(True, True)
    # Nor where the finder is none, or of a library that is not TensorRT's.
    library = ctypes.CDLL(str(library_path()))
    table = (ctypes.c_void_p * 8)(*[ctypes.cast(library.getCreators, ctypes.c_void_p).value] * 8)
    stranger = ctypes.c_void_p(ctypes.addressof(table))
    for finder in (None, ctypes.byref(stranger)):
        library.setLoggerFinder(finder)
        assert tensorrt_host.create("DroplessMoE", {}) is None
        assert capfd.readouterr().err == expected


def test_long_messages_are_cut(tensorrt_host):
    attributes = attributes_of(small_case()) | {"kernels": "/none/" + "x" * 3000}
    assert tensorrt_host.create("DroplessMoE", attributes, layer="y" * 500) is None
    (message,) = tensorrt_host.messages()
    assert len(message) == len("own 1 ") + 1023
    assert "y" * 200 + "...: cannot read" in message
