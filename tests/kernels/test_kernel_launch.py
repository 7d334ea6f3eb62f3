"""The Python launcher: what it works out once, and when it starts compiled kernels itself."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from custom_ops import RouterOptions, reference
from custom_ops.kernels import launch as launcher
from custom_ops.kernels.architectures import architecture
from custom_ops.kernels.expressions import Expression
from custom_ops.kernels.launch import launch, launch_kernel
from custom_ops.kernels.launch_waves import launch_in_waves
from custom_ops.kernels.plan import plan
from custom_ops.kernels.rms_norm import rms_norm_spec
from custom_ops.kernels.spec import ForwardPlan, Scalar, TensorMap
from kernel_runs import call_tensors, layer_of
from moe_cases import Case, assert_matches, make_case
from standin_jit import STREAM, StandinJit, with_standin_jit
from wave_runs import calls_of, new_state, plan_in_waves, run_resident

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _stream(monkeypatch):
    driver = SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=driver))


def case_of(tokens: int = 5, *, op: str = "dropless", width: int = 16, seed: int = 0) -> Case:
    return make_case(
        op, (tokens,), width=width, hidden=24, dtype=torch.float16, gated=True, seed=seed
    )


def planned(case: Case, device: str = "sm_90") -> tuple[ForwardPlan, list[StandinJit]]:
    return with_standin_jit(plan(layer_of(case), architecture(device)))


def run(planned: ForwardPlan, case: Case) -> Tensor:
    tensors = call_tensors(case)
    launch(planned, tensors)
    return tensors["y"]


def counts(kernels: list[StandinJit]) -> tuple[int, int]:
    return sum(k.jit_launches for k in kernels), sum(k.direct_launches for k in kernels)


# Vector products; both products in one kernel; grouped products with tensor maps.
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (5, 16), (40, 136)])
@pytest.mark.parametrize("op", ["dropless", "experts"])
def test_a_later_call_starts_the_compiled_kernels(op, tokens, width):
    first, second = (case_of(tokens, op=op, width=width, seed=seed) for seed in (0, 1))
    on, kernels = planned(first)
    assert_matches(run(on, first), first.oracle(), first.dtypes)
    launches = len(on.at(tokens).launches)
    assert counts(kernels) == (launches, 0)
    assert_matches(run(on, second), second.oracle(), second.dtypes)
    assert counts(kernels) == (launches, launches)


@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (5, 16), (40, 136)])
def test_waves_start_the_compiled_kernels(tokens, width):
    case = case_of(tokens, width=width)
    on, kernels = with_standin_jit(plan_in_waves(case, 1))
    state, expected = new_state(on), run_resident(case)
    for _ in range(2):
        tensors = call_tensors(case)
        launch_in_waves(on, tensors, state)
        assert torch.equal(tensors["y"], expected)
    calls = calls_of(on, case)
    distinct = len({each.spec for each in calls})
    assert distinct < len(calls)
    assert counts(kernels) == (distinct, 2 * len(calls) - distinct)


def test_another_number_of_tokens_starts_the_same_compiled_kernels():
    on, kernels = planned(case_of(5))
    for tokens in (5, 6, 9):
        case = case_of(tokens)
        assert_matches(run(on, case), case.oracle(), case.dtypes)
    launches = len(on.at(5).launches)
    assert counts(kernels) == (launches, 2 * launches)


def test_a_later_call_evaluates_no_expression(monkeypatch):
    case = case_of()
    on, _ = planned(case)
    run(on, case)
    monkeypatch.setattr(Expression, "evaluate", None)
    run(on, case)
    with pytest.raises(TypeError):
        run(on, case_of(6))


def test_each_device_has_its_own_compiled_kernels(monkeypatch):
    case = case_of()
    on, kernels = planned(case)
    launches = len(on.at(5).launches)
    for device, expected in ((0, (1, 0)), (1, (2, 0)), (0, (2, 1)), (1, (2, 2))):
        monkeypatch.setattr(Tensor, "get_device", lambda self, device=device: device)
        run(on, case)
        assert counts(kernels) == tuple(launches * each for each in expected)


def _unaligned(case: Case, kernels: list[StandinJit]) -> Case:
    x = case.arguments["x"]
    odd = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    assert odd.data_ptr() % 16
    return case.changed(x=odd)


def _hooked(case: Case, kernels: list[StandinJit]) -> Case:
    for kernel in kernels:
        kernel.pre_run_hooks.append(print)
    return case


def _specialized(case: Case, kernels: list[StandinJit]) -> Case:
    for kernel in kernels:
        for parameter in kernel.params:
            parameter.do_not_specialize = False
    return case


@pytest.mark.parametrize("change", [_unaligned, _hooked, _specialized])
def test_what_needs_the_jit_goes_through_it(change: Callable[[Case, list[StandinJit]], Case]):
    case = case_of()
    on, kernels = planned(case)
    changed = change(case, kernels)
    for _ in range(2):
        assert_matches(run(on, changed), case.oracle(), case.dtypes)
    with_scalar = [k for k in kernels if any(p.name == "tokens" for p in k.params)]
    of_the_jit = with_scalar if change is _specialized else kernels
    assert all(kernel.direct_launches == 0 for kernel in of_the_jit)


def test_a_call_on_unaligned_tensors_compiles_nothing_for_aligned_ones():
    case = case_of()
    on, kernels = planned(case)
    run(on, _unaligned(case, kernels))
    assert_matches(run(on, case), case.oracle(), case.dtypes)
    assert counts(kernels) == (2 * len(on.at(5).launches), 0)


def _add_to_a_chain(monkeypatch, name: str) -> None:
    chain = knobs.HookChain()
    chain.add(print)
    monkeypatch.setattr(knobs.runtime, name, chain)


def _replace_by_a_function(monkeypatch, name: str) -> None:
    monkeypatch.setattr(knobs.runtime, name, print)


def _remove(monkeypatch, name: str) -> None:
    monkeypatch.setattr(knobs.runtime, name, None)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize(
    ("hook", "hooked"), [(_add_to_a_chain, True), (_replace_by_a_function, True), (_remove, False)]
)
def test_hooks_of_launches_are_left_to_triton(name, hook, hooked, monkeypatch):
    case = case_of()
    on, kernels = planned(case)
    launches = len(on.at(5).launches)
    run(on, case)
    with monkeypatch.context() as patched:
        hook(patched, name)
        assert_matches(run(on, case), case.oracle(), case.dtypes)
    assert sum(each.hooked_launches for each in kernels) == (launches if hooked else 0)
    run(on, case)
    assert sum(each.hooked_launches for each in kernels) == (launches if hooked else 0)
    assert counts(kernels) == (launches, 2 * launches)


def test_no_kernel_is_compiled_for_a_number_of_tokens():
    """As the launcher needs it, and the bundle: Triton would compile others for 1 and 16 tokens."""
    for name in ("sm_75", "sm_90"):
        for case in (case_of(), case_of(op="experts", width=136).changed(pre_norm="rms")):
            for spec in plan(layer_of(case), architecture(name)).kernels():
                kept = set(spec.function.kwargs["do_not_specialize"] or ())
                scalars = {n for n, each in spec.parameters.items() if isinstance(each, Scalar)}
                assert scalars <= kept, spec.name


@pytest.mark.parametrize("call", [1, 2])
def test_a_tensor_takes_the_place_of_a_buffer(call):
    case = case_of()
    on, _ = planned(case)
    ids = torch.full((5, 2), -9, dtype=torch.int32)
    weights = torch.full((5, 2), float("nan"))
    for _ in range(call):
        tensors = call_tensors(case)
        launch(on, {**tensors, "expert_ids": ids, "expert_weights": weights})
    a = case.arguments
    weights_TK, ids_TK = reference.router(
        a["x"], a["router_weight"], a["router_bias"], RouterOptions(2)
    )[::-1]
    assert torch.equal(ids.long(), ids_TK)
    torch.testing.assert_close(weights, weights_TK.float())
    assert_matches(tensors["y"], case.oracle(), case.dtypes)


def test_a_descriptor_holds_no_tensor_and_serves_the_next_one_at_its_address():
    first, second = case_of(40, width=136), case_of(40, width=136, seed=1)
    on, kernels = planned(first)
    w2 = torch.empty_like(first.arguments["w2"])
    for case in (first, first, second):
        w2.copy_(case.arguments["w2"])
        y = run(on, case.changed(w2=w2))
    assert counts(kernels)[1]
    assert_matches(y, second.oracle(), second.dtypes)
    alive = weakref.ref(w2)
    del w2
    assert alive() is None


def test_triton_reads_of_a_descriptor_without_a_tensor_what_it_reads_of_one_with_it(monkeypatch):
    from triton.backends.nvidia import driver

    def encode(*fields: int | Sequence[int]) -> tuple[object, ...]:
        return tuple(field if isinstance(field, int) else tuple(field) for field in fields)

    utils = SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)
    monkeypatch.setattr(
        triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils))
    )
    others = [None] * (len(signature(driver.make_tensordesc_arg).parameters) - 2)
    specs = plan(layer_of(case_of(40, width=136)), architecture("sm_90")).kernels()
    maps = {
        each for spec in specs for each in spec.arguments.values() if isinstance(each, TensorMap)
    }
    assert len(maps) >= 2
    for each in maps:
        tensor = torch.empty(each.shape, dtype=each.dtype)
        assert tensor.stride() == each.strides
        layout = {
            "swizzle": 3,
            "elem_size": each.dtype.itemsize,
            "elem_type": next(iter(driver.TMA_DTYPE_DEVICE_TO_HOST)),
            "block_size": list(each.box),
            "fp4_padded": False,
        }
        expected, passed = (
            driver.make_tensordesc_arg(descriptor, layout, *others)
            for descriptor in (
                TensorDescriptor.from_tensor(tensor, list(each.box)),
                launcher._descriptor(each, tensor.data_ptr()),
            )
        )
        assert passed == expected
        assert passed[0][0] == tensor.data_ptr()


def test_a_kernel_alone():
    x, weight = torch.randn(6, 16), torch.randn(16)
    spec = rms_norm_spec(
        16, x.dtype, weight.dtype, 1e-6, weight_plus_one=False, round_before_weight=False
    )
    kernel = StandinJit(spec)
    for _ in range(2):
        y = torch.empty_like(x)
        launch_kernel(replace(spec, function=kernel), {"x": x, "weight": weight, "y": y})
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (16,), weight, 1e-6))
    assert counts([kernel]) == (1, 1)


def run_without_interpreter(script: str, **variables: str) -> str:
    """Runs a program of tests/support, and returns what it prints."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", **variables}
    program = ROOT / "tests" / "support" / script
    ran = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_what_is_launched_after_triton_s_own_jit_is_what_it_launches():
    assert run_without_interpreter("jit_launches.py") == "the same\n"


@pytest.mark.slow
@pytest.mark.every
def test_launches_compile_nothing_that_was_compiled_beforehand(tmp_path):
    found = run_without_interpreter("compiled_beforehand.py", TRITON_CACHE_DIR=str(tmp_path))
    assert found == "nothing more\n"


@pytest.mark.slow
def test_the_host_s_part_of_a_call_is_short():
    # About 2; 4 where each call is checked anew, 6 where it works out its launches, 7 its plan too.
    assert float(run_without_interpreter("host_cost_bound.py")) < 3.5
