"""Sizes that should be symbolic: correct at every size, or an error that names the line."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.private import tracer
from dynamo_moe.tracing import dynamic_shapes, fixed_sizes, program_runs
from dynamo_moe.tracing.capture import capture
from dynamo_moe.tracing.size_decisions import decisions_noted
from public_moe import CASES

TOKENS, EXPERTS, FACTOR = 6, 4, 1.25


class Model(nn.Module):
    def __init__(self, function: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        self.register_buffer("positions", torch.randn(64, 16))
        self.register_buffer("causal", torch.ones(64, 64).tril())
        self.mask = torch.ones(TOKENS, 1)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


# --- Symbolic in the file ---


def capacity(m: Model, x: Tensor) -> Tensor:
    return x[: int(math.ceil(x.shape[0] * FACTOR / EXPERTS))]  # noqa: RUF046  As people write it.


def capacity_with_a_minimum(m: Model, x: Tensor) -> Tensor:
    rows = max(int(math.ceil(x.shape[0] * FACTOR / EXPERTS)), 8)  # noqa: RUF046
    return F.pad(x, (0, 0, 0, rows))


def capacity_of_slots(m: Model, x: Tensor) -> Tensor:
    rows = int(x.shape[0] * 2 / EXPERTS * FACTOR)
    return x.new_zeros(EXPERTS, rows, 16) + x[:1]


def capacity_in_integers(m: Model, x: Tensor) -> Tensor:
    return x[: -(-x.shape[0] * 5 // 16)] + m.linear(x)[: (x.shape[0] + 3) // 4 * 0 + 1]


def sliced_buffers(m: Model, x: Tensor) -> Tensor:
    return m.causal[: x.shape[0], : len(x)] @ (x + m.positions[: int(x.shape[0])])


def integers(m: Model, x: Tensor) -> Tensor:
    return x.view(int(x.shape[0]), 4, 4) + torch.arange(int(x.shape[0]))[:, None, None]


def floats(m: Model, x: Tensor) -> Tensor:
    return x * float(x.shape[0]) ** -0.5 / math.sqrt(x.shape[0]) / len(x)


def item(m: Model, x: Tensor) -> Tensor:
    return x * torch.tensor(x.shape[0]).item()


def asserted(m: Model, x: Tensor) -> Tensor:
    assert x.shape[0] > 1
    if x.shape[0] >= 60:
        raise ValueError("too many tokens")
    return x * 2


def harmless(m: Model, x: Tensor) -> Tensor:
    if x.shape[0] == 1:  # Computes the same in a faster way.
        return m.linear(x[0])[None]
    return m.linear(x)


def padded(m: Model, x: Tensor) -> Tensor:
    missing = -x.shape[0] % 4
    if missing > 0:
        x = F.pad(x, (0, 0, 0, missing))
    return x.view(-1, 4, 16).mean(1)


def in_windows(m: Model, x: Tensor) -> Tensor:
    return x.view(-1, 2, 16).softmax(1).view(-1, 16)


def split_by_a_size(m: Model, x: Tensor) -> Tensor:
    first, last = x.split(x.shape[0] - 1)
    return torch.cat([last * 3, first * 2])


def averages_of_four_windows(m: Model, x: Tensor) -> Tensor:
    return F.adaptive_avg_pool1d(x.T[None], 4)


RIGHT = [
    averages_of_four_windows,
    split_by_a_size,
    capacity,
    capacity_with_a_minimum,
    capacity_of_slots,
    capacity_in_integers,
    sliced_buffers,
    integers,
    floats,
    item,
    asserted,
    harmless,
    padded,
    in_windows,
]


@pytest.mark.parametrize("function", RIGHT)
def test_symbolic_sizes_stay_so(tmp_path: Path, function) -> None:
    model, path = Model(function).eval(), tmp_path / "m.onnx"
    report = dynamo_moe.export(model, torch.randn(TOKENS, 16), path)
    assert not report.notes
    session = onnxruntime.InferenceSession(str(path))
    compared = 0
    for tokens in (1, 2, 3, 5, 6, 7, 8, 9, 16, 33, 58, 70):
        x = torch.randn(tokens, 16)
        try:
            expected = model(x)
        except (AssertionError, RuntimeError, ValueError):
            continue  # The model does not accept this number.
        (actual,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(
            torch.from_numpy(actual), expected.detach(), rtol=1e-4, atol=1e-4
        )
        compared += 1
    assert compared >= 5


# --- Errors ---


def branch(m: Model, x: Tensor) -> Tensor:
    if x.shape[0] > 8:
        return x * 2
    return x * 3


def branch_on_a_multiple(m: Model, x: Tensor) -> Tensor:
    return x if x.shape[0] % 4 == 0 else -x


def special_size(m: Model, x: Tensor) -> Tensor:
    return x[:, :4] if x.shape[0] == 5 else x


def loop(m: Model, x: Tensor) -> Tensor:
    total = torch.zeros(16)
    for row in range(x.shape[0]):
        total = total + x[row]
    return total


def list_of_rows(m: Model, x: Tensor) -> Tensor:
    return torch.stack([m.linear(row) for row in x])


def mask_of_the_example(m: Model, x: Tensor) -> Tensor:
    if m.mask.shape[0] != x.shape[0]:
        return x * torch.zeros(x.shape[0], 1)
    return x * m.mask


def numbers_in_python(m: Model, x: Tensor) -> Tensor:
    return x + torch.tensor([[float(row)] for row in range(len(x))])


REFUSED = [
    (branch, "if x.shape[0] > 8:", "x.shape[0] is 9"),
    (branch_on_a_multiple, "if x.shape[0] % 4 == 0 else", "x.shape[0] is 4"),
    (special_size, "if x.shape[0] == 5 else", "x.shape[0] is 5"),
    (loop, "for row in range(x.shape[0]):", "static shape of 6"),
    (list_of_rows, "for row in x", "static shape of 6"),
    (mask_of_the_example, "if m.mask.shape[0] != x.shape[0]:", "static shape of 6"),
    (numbers_in_python, "for row in range(len(x))", "static shape of 6"),
]


@pytest.mark.parametrize(("function", "line", "sizes"), REFUSED)
def test_fixed_sizes_are_refused(tmp_path: Path, function, line: str, sizes: str) -> None:
    model, x = Model(function).eval(), torch.randn(TOKENS, 16)
    with pytest.raises(dynamo_moe.ExportError, match="symbolic is fixed by the model") as raised:
        dynamo_moe.export(model, x, tmp_path / "m.onnx")
    message = str(raised.value)
    assert line in message
    assert sizes in message
    code = function.__code__
    place = int(message.split(f"{__file__}:")[1].split(":", maxsplit=1)[0])
    assert code.co_firstlineno < place <= max(line or 0 for *_, line in code.co_lines())
    assert not list(tmp_path.iterdir())
    dynamo_moe.export(model, x, tmp_path / "m.onnx", dynamic_shapes={"x": {0: None}})


def test_a_decision_by_the_product_of_two_sizes(tmp_path: Path) -> None:
    def by_tokens(m: Model, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 16)
        return tokens * 2 if len(tokens) > 64 else tokens

    with pytest.raises(dynamo_moe.ExportError, match=r"if len\(tokens\) > 64"):
        dynamo_moe.export(
            Model(by_tokens).eval(),
            torch.randn(2, 5, 16),
            tmp_path / "m.onnx",
            dynamic_shapes={"x": {1: "sequence"}},
        )


def test_sizes_that_must_fit_each_other_are_changed_together(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, past: Tensor, mask: Tensor) -> Tensor:
            whole = torch.cat([past, x], 1)
            if x.shape[1] > 1:  # A single token sees everything.
                whole = whole * mask[..., None]
            return whole if x.shape[1] > 1 else whole * mask[..., None]

    args = (torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.randn(2, 8))
    shapes = {"x": {1: "new"}, "past": {1: "past"}, "mask": {1: "total"}}
    dynamo_moe.export(Masked(), args, tmp_path / "m.onnx", dynamic_shapes=shapes)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_results_that_are_not_finite(number: float, tmp_path: Path) -> None:
    """They are compared by their places, and the others by their own size."""

    def positions(model: Model, x: Tensor) -> Tensor:
        return torch.where(x > 0.5, number, x) + torch.arange(40.0)[: x.shape[0], None]

    def counted(model: Model, x: Tensor) -> Tensor:
        return torch.where(x > 0.5, number, x) + sum(1 for _ in range(len(x)))

    x = torch.linspace(0, 1, TOKENS * 16).view(TOKENS, 16)
    dynamo_moe.export(Model(positions).eval(), x, tmp_path / "m.onnx")
    with pytest.raises(dynamo_moe.ExportError, match="symbolic is fixed by the model"):
        dynamo_moe.export(Model(counted).eval(), x, tmp_path / "fixed.onnx")


def test_what_cannot_be_compared_is_a_note(tmp_path: Path) -> None:
    calls = itertools.count()  # An export sets back what else counts.

    def noisy(m: Model, x: Tensor) -> Tensor:
        noise = next(calls)
        return x + noise if x.shape[0] < 9 else x - noise

    report = dynamo_moe.export(Model(noisy).eval(), torch.randn(TOKENS, 16), tmp_path / "m.onnx")
    (note,) = report.notes
    assert "if x.shape[0] < 9" in note
    assert __file__ in note


def test_a_rank_that_depends_on_a_size_is_a_note(tmp_path: Path) -> None:
    def squeezed(m: Model, x: Tensor) -> Tensor:
        return x if x.shape[0] > 1 else x[0]

    report = dynamo_moe.export(Model(squeezed).eval(), torch.randn(TOKENS, 16), tmp_path / "m.onnx")
    (note,) = report.notes
    assert "if x.shape[0] > 1" in note
    assert "another rank where x.shape[0] is 1" in note


def test_random_numbers_are_the_same_in_every_trial(tmp_path: Path) -> None:
    def noisy(m: Model, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) if x.shape[0] < 9 else x - torch.rand_like(x)

    model, x = Model(noisy).eval(), torch.ones(TOKENS, 16)
    state = torch.get_rng_state()
    with pytest.raises(dynamo_moe.ExportError, match=r"if x\.shape\[0\] < 9"):
        dynamo_moe.export(model, x, tmp_path / "m.onnx")
    assert torch.equal(torch.get_rng_state(), state)


def test_trials_leave_buffers_as_they_are(tmp_path: Path) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * 2 if x.shape[0] > 1 else x + x

    model = Counts()
    dynamo_moe.export(model, torch.randn(TOKENS, 16), tmp_path / "m.onnx")
    assert model.calls == 0


class AddsToState(nn.Module):
    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        y = x + state
        state.add_(1)
        return y * 2 if x.shape[0] > 8 else y


def test_trials_leave_inputs_as_they_are(tmp_path: Path) -> None:
    """Otherwise the model and its trace would not even agree near the example."""
    x, state = torch.randn(TOKENS, 16), torch.zeros(16)
    with pytest.raises(dynamo_moe.ExportError, match=r"if x\.shape\[0\] > 8.*x\.shape\[0\] is 9"):
        dynamo_moe.export(
            AddsToState(), (x, state), tmp_path / "m.onnx", dynamic_shapes=[{0: "n"}, {}]
        )
    assert torch.equal(state, torch.zeros(16))


def test_without_private_names_ranges_tell(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tracer, "KNOWN_VERSIONS", ((2, 0), (2, 1)))
    with pytest.raises(dynamo_moe.ExportError, match=r"x.shape\[0\] <= 8.*x.shape\[0\] is 9"):
        dynamo_moe.export(Model(branch).eval(), torch.randn(TOKENS, 16), tmp_path / "m.onnx")


def test_decisions_are_noted_in_their_thread_alone() -> None:
    def trace() -> None:
        model = Model(branch).eval()
        dynamic = {"x": {0: torch.export.Dim.DYNAMIC}}
        torch.export.export(model, (torch.randn(TOKENS, 16),), dynamic_shapes=dynamic)

    with decisions_noted() as noted:
        # A user's own trace, which waits for nobody.
        thread = threading.Thread(target=trace)
        thread.start()
        thread.join()
        assert not noted
        trace()
    assert any("if x.shape[0] > 8" in decision.line for decision in noted)


def test_models_without_decisions_are_not_run(tmp_path: Path, monkeypatch) -> None:
    def unwanted(*args: Any) -> None:
        raise AssertionError("run")

    monkeypatch.setattr(fixed_sizes._Trials, "_run", unwanted)
    model = Model(lambda m, x: m.linear(x) * m.scales).eval()
    model.register_buffer("scales", torch.rand(16), persistent=False)
    dynamo_moe.export(model, torch.randn(TOKENS, 16), tmp_path / "m.onnx")


class Record:
    """Numbers that an export does not take back, as it does a list's."""

    def __init__(self) -> None:
        self.added = mock.Mock()

    def add(self, *numbers: int) -> None:
        if all(type(number) is int for number in numbers):
            self.added(*numbers)

    def numbers(self) -> list[tuple[int, ...]]:
        return [call.args for call in self.added.call_args_list]


def test_trials_of_a_large_example_are_small(tmp_path: Path) -> None:
    seen = Record()

    def forward(m: Model, x: Tensor) -> Tensor:
        seen.add(x.shape[0])
        return m.linear(x) if x.shape[0] != 7 else m.linear(x) + 0

    dynamo_moe.export(Model(forward).eval(), torch.randn(4096, 16), tmp_path / "model.onnx")
    assert (7,) in seen.numbers()
    assert max(seen.numbers()) <= (16,)


@pytest.mark.parametrize(("columns", "threads"), [(16, 1), (2**15, 2)])
def test_trials_of_few_elements_have_one_thread(tmp_path: Path, columns: int, threads: int) -> None:
    seen = Record()

    def forward(m: Model, x: Tensor) -> Tensor:
        seen.add(x.shape[0], torch.get_num_threads())
        return x if x.shape[0] != 7 else x + 0

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = Model(forward).eval()
        dynamo_moe.export(model, torch.randn(TOKENS, columns), tmp_path / "m.onnx")
        assert (7, threads) in seen.numbers()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_trial_that_is_right_needs_none_near_the_example(tmp_path: Path) -> None:
    seen = Record()

    def forward(m: Model, x: Tensor) -> Tensor:
        seen.add(x.shape[0])
        return x if x.shape[0] != 7 else x + 0

    dynamo_moe.export(Model(forward).eval(), torch.randn(TOKENS, 16), tmp_path / "m.onnx")
    assert {*seen.numbers()} == {(7,)}


@pytest.mark.parametrize("rows", [199, 4, 16])
def test_decisions_that_are_the_same_at_all_small_sizes(tmp_path: Path, rows: int) -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[0] * x.shape[1] > 20000 else x + 1

    x = torch.zeros(rows, 19999 // rows)
    with pytest.raises(dynamo_moe.ExportError, match=r"20000 .* is wrong where"):
        dynamo_moe.export(Large(), x, tmp_path / "m.onnx", dynamic_shapes={"x": {1: "columns"}})


def test_a_model_that_refuses_small_sizes(tmp_path: Path) -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if isinstance(x.shape[0], int) and x.shape[0] < 100:
                raise ValueError("too few rows")
            return x * 2 if x.shape[0] % 2 == 0 else x + 1

    with pytest.raises(dynamo_moe.ExportError, match=r"is wrong where x.shape.0. is"):
        dynamo_moe.export(Picky(), torch.zeros(256, 16), tmp_path / "m.onnx")


@pytest.mark.parametrize("on_meta", [True, False])
def test_lazy_weights_have_shapes_alone(on_meta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If weights have no values, results are compared only by shape and dtype.

    Where meta tensors do not get to the end, fake ones do.
    """
    ended = Record()

    def run(self: program_runs._RunOnMeta, *inputs: Any) -> Any:
        if not on_meta:
            raise NotImplementedError("no kernel for meta")
        results = program_runs._Run.run(self, *inputs)
        ended.add(len(inputs))
        return results

    monkeypatch.setattr(program_runs._RunOnMeta, "run", run)
    example = dynamic_shapes.resolve(Model(branch), (torch.randn(TOKENS, 16),), {}, "batch")
    for function, reason in ((branch, None), (special_size, r"x.shape\[0\] == 5")):
        model = Model(function).eval()
        trials = fixed_sizes.SizeTrials(model, example, has_values=False)
        if reason is None:
            capture(model, example, trials)
        else:
            with pytest.raises(fixed_sizes.FixedSizeError, match=reason):
                capture(model, example, trials)
    assert bool([*ended.numbers()]) is on_meta


def test_lazy_weights_without_fake_tensors_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_sizes, "FakeTensorMode", None)
    example = dynamic_shapes.resolve(Model(branch), (torch.randn(TOKENS, 16),), {}, "batch")
    model = Model(special_size).eval()
    trials = fixed_sizes.SizeTrials(model, example, has_values=False)
    capture(model, example, trials)
    [note] = trials.notes
    assert "could not be compared at other sizes" in note


def beyond(threshold: int) -> Callable[[Model, Tensor], Tensor]:
    def function(m: Model, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > threshold else x

    return function


def many_elements(m: Model, x: Tensor) -> Tensor:
    return x * 2 if x.numel() > 30_000 else x


@pytest.mark.parametrize(("function", "size"), [(beyond(4096), 4097), (many_elements, 2048)])
def test_large_sizes_are_tried(tmp_path: Path, function: Any, size: int) -> None:
    with pytest.raises(dynamo_moe.ExportError, match=rf"wrong where x.shape\[0\] is {size}"):
        dynamo_moe.export(Model(function).eval(), torch.randn(TOKENS, 16), tmp_path / "m.onnx")


def test_sizes_too_large_to_be_tried_are_noted(tmp_path: Path) -> None:
    """As LongRoPE's, which is right below its switch."""
    path, model = tmp_path / "m.onnx", Model(beyond(131_072)).eval()
    [note] = dynamo_moe.export(model, torch.randn(TOKENS, 16), path).notes
    assert "return x * 2 if x.shape[0] > threshold else x was decided for the example" in note
    assert "could not be compared at sizes above 4097" in note
    length = torch.export.Dim("length", max=4000)
    shapes = {"x": {0: length}}
    x = torch.randn(TOKENS, 16)
    assert dynamo_moe.export(model, x, path, dynamic_shapes=shapes).notes == ()
    assert dynamo_moe.export(Model(beyond(2**62)).eval(), x, path).notes == ()


@pytest.mark.filterwarnings("ignore:.* MoE modules are not converted")
def test_a_size_that_went_into_a_tensor_made_in_the_forward(tmp_path: Path) -> None:
    """By DeepSpeed's capacity, a tensor, which is another above the least one."""
    case = next(case for case in CASES if case.name == "deepspeed-top1")
    shapes = {"x": {0: "batch", 1: "length"}}
    line = r"deepspeed.py:\d+: .* if capacity < minimum .* was decided for the example"
    with pytest.raises(dynamo_moe.ExportError, match=line):
        dynamo_moe.export(
            case.build(), case.args(2, 5, 0), tmp_path / "m.onnx", dynamic_shapes=shapes
        )


def test_an_operator_whose_decomposition_has_the_examples_size(tmp_path: Path) -> None:
    """The trace keeps it whole, and only what it decomposes into is for an odd number of rows."""

    def first_half(x: Tensor) -> Tensor:
        half = x.shape[0] // 2
        return x.narrow(0, 0, half + 1 if x.shape[0] % 2 else half) * 2

    def halved(m: Model, x: Tensor) -> Tensor:
        return torch.ops.fixed_sizes.first_half(x)

    library = torch.library.Library("fixed_sizes", "FRAGMENT")
    library.define("first_half(Tensor x) -> Tensor")
    library.impl("first_half", first_half, "CompositeImplicitAutograd")
    with pytest.raises(dynamo_moe.ExportError, match=r"half \+ 1 if .* was decided for"):
        dynamo_moe.export(Model(halved).eval(), torch.randn(3, 16), tmp_path / "m.onnx")
