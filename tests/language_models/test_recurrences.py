"""Linear attention and state spaces: the loops of transformers at lengths beyond the example's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

import dynamo_moe
from dynamo_moe.private import tracer
from dynamo_moe.tracing.recurrences import _delta_rule, _lightning_attention, _selective_scan
from moe_architectures import ARCHITECTURES, example_inputs

HEADS, WIDTH, VALUES = 4, 8, 6


def inputs(length: int, key_heads: int, *, by_channel: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    decays = (HEADS, WIDTH) if by_channel else (HEADS,)
    sizes = {
        "query": (key_heads, WIDTH),
        "key": (key_heads, WIDTH),
        "value": (HEADS, VALUES),
        "beta": (HEADS,),
        "g": decays,
    }
    drawn = {
        name: torch.randn(2, length, *size, generator=generator) for name, size in sizes.items()
    }
    drawn["beta"] = drawn["beta"].sigmoid()
    drawn["g"] = -drawn["g"].exp()
    return drawn


@pytest.mark.parametrize("length", [1, 5, 64, 65, 130])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("rule", ["gated", "grouped", "kimi"])
def test_delta_rule(rule: str, with_state: bool, length: int) -> None:
    original = chunk_kimi_delta_attention if rule == "kimi" else torch_chunk_gated_delta_rule
    drawn = inputs(length, HEADS // 2 if rule == "grouped" else HEADS, by_channel=rule == "kimi")
    state = torch.randn(2, HEADS, WIDTH, VALUES) if with_state else None
    options = {"initial_state": state, "output_final_state": with_state}
    expected, last = original(**drawn, **options, use_qk_l2norm_in_kernel=True)
    result, own_last = _delta_rule(**drawn, **options, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    if with_state:
        torch.testing.assert_close(own_last, last, rtol=1e-4, atol=1e-5)
    else:
        assert own_last is None


def test_delta_rule_returns_the_queries_dtype() -> None:
    drawn = {name: t.bfloat16() for name, t in inputs(9, HEADS, by_channel=False).items()}
    expected, _ = torch_chunk_gated_delta_rule(**drawn)
    result, _ = _delta_rule(**drawn)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("length", [2, 9])
def test_a_selective_scan_goes_on_from_a_state(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    u, dt, z = torch.randn(3, 2, 6, length, generator=generator)
    B, C = torch.randn(2, 2, 4, length, generator=generator)
    arguments = {"A_CN": -torch.rand(6, 4, generator=generator), "D": torch.ones(6)}
    options = {"delta_softplus": True, "return_last_state": True}

    def scan(first: int, last: int, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        parts = {
            name: value[..., first:last]
            for name, value in {"u_BCL": u, "dt_BCL": dt, "B_BNL": B, "C_BNL": C, "z": z}.items()
        }
        y, h = _selective_scan(**parts, **arguments, **options, initial_state=state)
        return y, h

    expected, last = scan(0, length)
    begun, state = scan(0, 1)
    rest, own_last = scan(1, length, state)
    torch.testing.assert_close(torch.cat([begun, rest], -1), expected)
    torch.testing.assert_close(own_last, last)


@pytest.mark.parametrize("with_state", [False, True])
def test_lightning_attention(with_state: bool) -> None:
    """By its definition, a token at a time."""
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(2, 7, HEADS, 3 * WIDTH, generator=generator)
    slope = torch.rand(HEADS, 1, 1, generator=generator)
    state = torch.randn(2, HEADS, WIDTH, WIDTH, generator=generator) if with_state else None
    last = torch.zeros(2, HEADS, WIDTH, WIDTH) if state is None else state
    expected = []
    for q, k, v in (token.chunk(3, -1) for token in qkv.unbind(1)):
        last = torch.exp(-slope) * last + k[..., :, None] * v[..., None, :]
        expected.append(torch.einsum("bhk,bhkv->bhv", q, last))
    result, own_last = _lightning_attention(qkv, slope, state)
    torch.testing.assert_close(result, torch.stack(expected, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own_last, last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["jamba", "minimax", "qwen3_next"])
@pytest.mark.first(2)
def test_beyond_the_chunk_of_the_example(tmp_path: Path, name: str) -> None:
    model = ARCHITECTURES[name].build()
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(
        model, tmp_path / "model.onnx", task="text-generation"
    )
    dynamo_moe.verify(report.path, model, [example_inputs(ARCHITECTURES[name], 1, 65, seed=1)])
    assert max(case.max_error for case in dynamo_moe.verify(report.path, model).cases) < 1e-4


def test_a_loop_over_chunks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results fit no other length, so that sizes that fit each other show nothing."""
    monkeypatch.setattr(tracer, "scan", None)
    model = ARCHITECTURES["minimax"].build()
    dynamo_moe.convert(model)
    with pytest.raises(dynamo_moe.ExportError, match=r"range\(num_blocks\): was decided"):
        dynamo_moe.export_language_model(model, tmp_path / "model.onnx", task="text-generation")


def test_a_fixed_length_needs_no_recurrence(tmp_path: Path) -> None:
    """So the gradients of a model without a mask are exported too, as those of a Scan are not."""
    model = ARCHITECTURES["minimax"].build()
    dynamo_moe.convert(model)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
            return logits

    ids = example_inputs(ARCHITECTURES["minimax"], 2, 5, seed=0)["input_ids"]
    report = dynamo_moe.export(Logits(), (ids,), tmp_path / "model.onnx")
    assert "Scan" not in report.nodes
    dynamo_moe.verify(report.path, Logits())


def test_a_symbolic_batch_needs_no_symbolic_length(tmp_path: Path) -> None:
    """The graph of each loop but the first asserts what was decided by sizes before it."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = MambaForCausalLM(MambaConfig(**sizes, state_size=4))
    example = {"input_ids": torch.arange(14).reshape(2, 7), "use_cache": False}
    path = tmp_path / "m.onnx"
    dynamo_moe.export(model, (), path, kwargs=example)
    dynamo_moe.verify(path, model)
