"""The program that compute-sanitizer runs on a GPU, here on the stand-in for one."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)

import standin_cases


@pytest.fixture(scope="module")
def cases():
    return standin_cases.few_cases()[:2]


def test_right_results(driver, cases, tmp_path, capfd):
    standin_cases.write(tmp_path, cases)
    assert standin_cases.run(driver, cases, str(tmp_path)) == 0
    assert "2 forward passes, 0 wrong" in capfd.readouterr().out


def test_what_is_not_written_is_wrong(driver, cases, tmp_path, capfd):
    """The poison of the result stays."""
    standin_cases.write(tmp_path, cases)
    gpu = standin_cases.InterpretedGpu

    def launches_nothing(self, launch):
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "__call__", launches_nothing)
        assert standin_cases.run(driver, cases, str(tmp_path)) == 1
    assert "2 forward passes, 2 wrong" in capfd.readouterr().out


def test_a_wrong_element_is_found(driver, cases, tmp_path, capfd):
    standin_cases.write(tmp_path, cases)
    data = bytearray((tmp_path / "tensors").read_bytes())
    # The last element of the last tensor, y: the highest byte has sign and exponent.
    data[-1] ^= 0x40
    (tmp_path / "tensors").write_bytes(data)
    assert standin_cases.run(driver, cases, str(tmp_path), "--unpoisoned") == 1
    assert "2 forward passes, 1 wrong" in capfd.readouterr().out
