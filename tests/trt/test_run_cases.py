"""The programs that compute-sanitizer runs on a GPU, here without one."""

from __future__ import annotations

import os
from inspect import getmodule

import pytest

pytest.importorskip("triton")
if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("a real driver is present", allow_module_level=True)

import backward_cases
import gpu_cases
import standin_cases
from custom_ops.kernels import backward, plan
from custom_ops.kernels.backward_plan import backward_plan
from custom_ops.kernels.spec import Constant
from kernel_runs import layer_of
from launcher_cases import make_cases


@pytest.fixture(scope="module")
def cases():
    return standin_cases.few_cases()[:2]


def test_right_results(driver, cases, tmp_path, capfd):
    standin_cases.write(tmp_path, cases)
    assert standin_cases.run(driver, cases, str(tmp_path)) == 0
    assert "2 forward passes, 0 wrong" in capfd.readouterr().out


def test_a_layer_whose_experts_are_offloaded(driver, tmp_path, capfd):
    every = make_cases(standin_cases.ON)
    offloaded = [each for each in every if each[0].layer.resident_experts is not None]
    standin_cases.write(tmp_path, offloaded[:1])
    assert standin_cases.run(driver, offloaded[:1], str(tmp_path)) == 0
    assert "1 forward passes, 0 wrong" in capfd.readouterr().out


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


def test_every_kernel_runs_in_some_case():
    """In every form: with either layout of the weights, by programs of one tile or of several."""
    cases = list(make_cases(standin_cases.ON))
    launched = [
        spec for planned, case in cases for spec in planned.at(len(case.arguments["x"])).kernels()
    ]
    steps = [getmodule(step) for name, step in vars(plan).items() if name.endswith("_step")]
    every = {name for module in steps for name in vars(module) if name.endswith("_kernel")}
    assert {spec.name for spec in launched} == every
    for name in every:
        constants = [
            {key: each.value for key, each in spec.arguments.items() if isinstance(each, Constant)}
            for spec in launched
            if spec.name == name
        ]
        for form in ("PERSISTENT", "W1_TRANSPOSED", "W2_TRANSPOSED"):
            if form in constants[0]:
                assert {each[form] for each in constants} == {True, False}, name


def test_every_kernel_of_the_backward_pass_runs_in_some_case():
    launched = {
        spec.name
        for case in backward_cases.make_cases()
        for spec in backward_plan(layer_of(case), standin_cases.ON, train_parameters=True).kernels()
    }
    every = {name for name in vars(backward) if name.endswith("_gradient_kernel")}
    assert every <= launched


def test_backward_cases(monkeypatch):
    case = next(backward_cases.make_cases())
    monkeypatch.setattr(gpu_cases, "DEVICE", "cpu")
    backward_cases.check(case, standin_cases.ON)
    monkeypatch.setattr(backward_cases, "launch", lambda *_: None)
    with pytest.raises(AssertionError):
        backward_cases.check(case, standin_cases.ON)
