"""What the plugin refuses of what an engine has stored, and what it says: never a crash."""

from __future__ import annotations

import os

import pytest

from plugin_host import RUNTIME, Field
from plugin_layers import small_case, the_error
from standin_gpu import StandinGpu

pytest_plugins = ("plugin_layers",)

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)

BAD_FIELDS = {
    "none": lambda bundle: {},
    "other name": lambda bundle: {"program": bundle},
    "short name": lambda bundle: {"programs_name": bundle[:103]},
    "long name": lambda bundle: {"programs_name": bundle[:105]},
    "two": lambda bundle: {"programs": bundle, "more": 1},
    "an attribute": lambda bundle: {"top_k": 2},
    "wrong type": lambda bundle: {"programs": Field(Field.CHAR, len(bundle), bundle)},
    "no data": lambda bundle: {"programs": Field(Field.UNKNOWN, 100, None)},
    "empty": lambda bundle: {"programs": Field(Field.UNKNOWN, 0, b"x")},
    "negative": lambda bundle: {"programs": Field(Field.UNKNOWN, -1, bundle)},
    "short": lambda bundle: {"programs": bundle[:-1]},
    "header": lambda bundle: {"programs": bundle[:100]},
    "one byte": lambda bundle: {"programs": bundle[:1]},
    "long": lambda bundle: {"programs": bundle + b"\0"},
    # As an earlier version stored it.
    "a program": lambda bundle: {"programs": bundle[64:]},
    **{
        f"byte {at}": lambda bundle, at=at: {
            "programs": bundle[:at] + bytes([bundle[at] ^ 1]) + bundle[at + 1 :]
        }
        for at in (0, 8, 12, 16, 24, 32, 40, 64, 100, 300, 1000)
    },
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", BAD_FIELDS)
def test_fields_of_an_engine(tensorrt_host, stored, name):
    assert tensorrt_host.create("DroplessMoE", BAD_FIELDS[name](stored), RUNTIME) is None
    error = the_error(tensorrt_host)
    assert "bundle" in error or "programs" in error
    if name == "an attribute":
        assert error == (
            "an engine's layer has one field, programs or programs_name; got 1 fields, the first "
            "top_k: was the engine built with another version of this library?"
        )


def test_the_other_operators_program(tensorrt_host, stored):
    assert tensorrt_host.create("DroplessMoEExperts", {"programs": stored}, RUNTIME) is None
    assert the_error(tensorrt_host) == "field programs is of DroplessMoE"


def test_programs_of_several_layers(driver, tensorrt_host, tmp_path):
    cases = [small_case(), small_case(activation="silu")]
    bundle = StandinGpu(driver).bundle(tmp_path / "model.moek", *cases)
    assert tensorrt_host.create("DroplessMoE", {"programs": bundle.read_bytes()}, RUNTIME) is None
    assert the_error(tensorrt_host) == (
        "bundle: its programs must be of one layer, program 1 is of another than program 0"
    )
