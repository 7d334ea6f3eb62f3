"""transformers models: converted, exported, and run in ONNX Runtime with the original's numbers.

TensorRT for RTX builds engines of the files. `make test` runs a few architectures, `make test-all`
every one that stacks its experts. Each run writes rows to build/tests/architectures;
tests/support/architecture_table.py turns them into the page.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import dynamo_moe
from architecture_table import PAGE, write_row
from custom_ops.options import ExpertOptions
from dynamo_moe.moe_nodes.targets import registry
from dynamo_moe.moe_nodes.targets.registry import TARGETS
from engine_checks import checked_engine
from moe_architectures import ARCHITECTURES, example_inputs

FEW = ("deepseek_v2", "gpt_oss", "mixtral", "qwen3_moe")
# What torch.ops.moe cannot compute, and the transformers implementation that replaces it.
FALLBACK = {"muse_spark": "batched_mm"}
# What PyTorch's exporter cannot export, outside the MoE layers.
UNEXPORTABLE = {
    "qwen4_exp": "the indexer of its attention loops over the results of nonzero()",
}
# What TensorRT for RTX does not build: a part of its reason, and the note in the table.
UNBUILDABLE = {
    "glm5_next": (
        "self_attn.indexer/NonZero' (NonZero)",
        "the indexer of its attention uses NonZero, which TensorRT for RTX does not have",
    )
}
# Whose attention stays written out without a cache: sinks need one, and scores that are read
# for something else must be there.
WITH_SINKS = {
    *("deepseek_v4", "flint", "gpt_oss", "hy_v4", "hy_v4_vl", "inkling2", "inkling2_loop"),
    "openai_privacy_filter",
}
WRITTEN_OUT = {*WITH_SINKS, "granitemoe_swa"}
# The last is longer than the chunks in which linear attention is computed.
SHAPES = ((1, 4), (3, 9), (2, 130))
# Models with routers that torch.ops.moe.dropless has.
PLAIN_ROUTERS = {
    *("afmoe", "aria", "axk1", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
    *(
        "bailing_hybrid",
        "deepseek_ocr2",
        "glm5_next",
        "glm_moe_dsa",
        "kimi_linear",
        "unlimited_ocr",
    ),
    *("dots1", "dots3_note", "ernie4_5_moe", "ernie4_5_vl_moe", "exaone_moe", "glm4_moe"),
    *("glm4_moe_lite", "glm4v_moe", "hy_v3", "hy_v4", "hy_v4_vl", "inkling2", "inkling2_loop"),
    *("laguna", "lara_mini", "mimo_v2_flash", "sarvam_mla", "sarvam_moe"),
    *("minimax_m2", "minimax_m3_vl", "mistral4", "mistral_large4", "nemotron_h", "solar_open"),
    *("flex_olmo", "flint", "gpt_oss", "granitemoe", "granitemoe_swa"),
    *("granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "jamba", "llama4", "mellum"),
    *("minimax", "mixtral", "olmoe", "openai_privacy_filter", "qwen2_moe", "qwen3_5_moe"),
    *("qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_talker", "qwen3_vl_moe"),
}


class Answer(nn.Module):
    """A model's logits, or its hidden states if it has no head."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": decoder_input_ids,
            "inputs_embeds": inputs_embeds,
        }
        outputs = self.model(**{name: value for name, value in given.items() if value is not None})
        return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state


def names() -> list[Any]:
    return [
        pytest.param(name, marks=() if name in FEW else pytest.mark.every) for name in ARCHITECTURES
    ]


def largest_error(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).abs().max() / expected.square().mean().sqrt())


@dataclass
class Converted:
    """A tiny model after its conversion, what it computed before, and its files.

    Attributes:
        name: The architecture's.
        model: The converted model.
        report: What was converted.
        inputs: Inputs other than the example.
        expected: The original's result for each.
        folder: Where the files are.
    """

    name: str
    model: nn.Module
    report: dynamo_moe.ConversionReport
    inputs: list[dict[str, Tensor]]
    expected: list[Tensor]
    folder: Path
    exports: dict[str, dynamo_moe.ExportReport] = field(default_factory=dict)

    def export(self, target: str = "plugin") -> dynamo_moe.ExportReport:
        """Exports the model with a symbolic batch and length, once for each target."""
        if target not in self.exports:
            example = example_inputs(ARCHITECTURES[self.name], 2, 5)
            # A mask of another length than the tokens' cannot be one of their attention.
            length = "length" if target == "fused" else "{}_length"
            self.exports[target] = dynamo_moe.export(
                self.model,
                (),
                self.folder / f"{target}.onnx",
                kwargs=example,
                dynamic_shapes={key: {1: length.format(key)} for key in example},
                target=target,
            )
        return self.exports[target]


@pytest.fixture(scope="module", params=names())
def converted(request, tmp_path_factory) -> Converted:
    name = request.param
    architecture = ARCHITECTURES[name]
    model = Answer(architecture.build())
    inputs = [example_inputs(architecture, *shape, seed=sum(shape)) for shape in SHAPES]
    with torch.no_grad():
        expected = [model(**case) for case in inputs]
    report = dynamo_moe.convert(model, fallback=FALLBACK.get(name))
    return Converted(name, model, report, inputs, expected, tmp_path_factory.mktemp(name))


@pytest.mark.first(2)
def test_architecture(converted: Converted) -> None:
    name, model, inputs = converted.name, converted.model, converted.inputs
    fallback = FALLBACK.get(name)
    if fallback is None:
        assert converted.report.replaced
        assert not converted.report.unrecognised
        assert all(replacement.compared for replacement in converted.report.replaced)
    else:
        assert not converted.report.replaced
        assert all(fallback in left.reason for left in converted.report.unrecognised)
    with torch.no_grad():
        errors = [
            largest_error(model(**case), y)
            for case, y in zip(inputs, converted.expected, strict=True)
        ]
    assert max(errors) < 1e-4

    row = {
        "model": name,
        "class": ARCHITECTURES[name].model,
        "operator": fallback or "experts",
        "pytorch": max(errors),
        "nodes": None,
        "onnxruntime": None,
        "note": UNEXPORTABLE.get(name, ""),
    }
    if name in UNEXPORTABLE:
        with pytest.raises(Exception):  # noqa: B017, PT011  PyTorch's, or ONNX Runtime's.
            dynamo_moe.verify(converted.export().path, model, inputs)
    else:
        exported = converted.export()
        verified = dynamo_moe.verify(exported.path, model, inputs)
        row["nodes"] = sum(exported.nodes.values())
        row["onnxruntime"] = max(case.max_error for case in verified.cases)
        plain = name in PLAIN_ROUTERS
        expected = {"DroplessMoE" if plain else "DroplessMoEExperts"} if fallback is None else set()
        assert set(exported.operators) == expected
        assert {node for node in exported.nodes if node.startswith("moe")} == {
            f"moe::{operator}" for operator in expected
        }
        if plain:
            row["operator"] = "dropless"
    write_row(name, row)


@pytest.mark.first(2)
def test_fused_operators(converted: Converted, monkeypatch) -> None:
    """A target that has the standard's attention, and takes every MoE layer."""
    if converted.name in UNEXPORTABLE:
        pytest.skip(UNEXPORTABLE[converted.name])
    fused = replace(TARGETS["plugin"], takes_attention=True, opset=23)
    monkeypatch.setattr(registry, "TARGETS", {**TARGETS, "fused": fused})
    exported = converted.export("fused")
    assert exported.nodes.get("RMSNormalization") or exported.nodes.get("LayerNormalization")
    assert exported.nodes.get("Attention") or converted.name in WRITTEN_OUT
    assert dynamo_moe.verify(exported.path, converted.model, converted.inputs).passed


@pytest.mark.parametrize("target", ["plugin", pytest.param("dense", marks=pytest.mark.every)])
@pytest.mark.first(2)
def test_engine(converted: Converted, target: str) -> None:
    """TensorRT for RTX builds the file, or refuses it as known."""
    name = converted.name
    if name in UNEXPORTABLE:
        pytest.skip(UNEXPORTABLE[name])
    result = checked_engine(converted.export(target).path)
    outcome = "builds" if result.built else "parses" if result.parsed else "refuses"
    part_of_reason, note = UNBUILDABLE.get(name, ("", ""))
    write_row(f"{name}.{target}", {"outcome": outcome, "note": note})
    assert result.built == (name not in UNBUILDABLE), result.reason()
    assert part_of_reason in result.reason()


@pytest.mark.parametrize("target", ["plugin", pytest.param("dense", marks=pytest.mark.every)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.first(1)
def test_engines_in_half_precision(dtype: torch.dtype, target: str, tmp_path: Path) -> None:
    model = ARCHITECTURES["mixtral"].build().to(dtype)
    dynamo_moe.convert(model)
    report = dynamo_moe.export_language_model(
        model, tmp_path / "model.onnx", task="text-generation", target=target
    )
    engine = checked_engine(report.path)
    assert engine.built, engine.reason()
    if target == "plugin":
        name = {torch.float16: "HALF", torch.bfloat16: "BF16"}[dtype]
        # Tokens, router, both weights and the result: Mixtral's router is in the node.
        assert [each[2] for each in engine.plugins] == [(name,) * 5] * 2


def test_the_page_has_the_operator_of_every_model() -> None:
    shown = re.findall(r"^\| `(\w+)` \| `\w+` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    expected = {
        name: f"fallback `{FALLBACK[name]}`"
        if name in FALLBACK
        else f"`moe.{'dropless' if name in PLAIN_ROUTERS else 'experts'}`"
        for name in ARCHITECTURES
    }
    assert dict(shown) == expected


def mixtral(**overrides: Any) -> nn.Module:
    return ARCHITECTURES["mixtral"].build(**overrides)


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "has_gate")]


def test_the_modules_stay_and_the_conversion_can_be_undone() -> None:
    model = mixtral()
    before = {name: (type(m), id(m)) for name, m in model.named_modules()}
    parameters = {name: id(p) for name, p in model.named_parameters()}
    dynamo_moe.convert(model)
    assert {name: (type(m), id(m)) for name, m in model.named_modules()} == before
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert model.config._experts_implementation == "dynamo_moe"
    assert "dynamo_moe" not in json.dumps(model.config.to_dict(), default=str)
    model.set_experts_implementation("eager")
    assert not dynamo_moe.conversion.convertible_modules(nn.Sequential())
    assert len(dynamo_moe.conversion.convertible_modules(model)) == 2
    assert len(dynamo_moe.convert(model).replaced) == 2


def test_gradients_reach_the_experts() -> None:
    model = mixtral()
    dynamo_moe.convert(model)
    model(**example_inputs(ARCHITECTURES["mixtral"], 2, 7)).logits.sum().backward()
    for experts in experts_of(model):
        assert experts.gate_up_proj.grad.abs().sum() > 0
        assert experts.down_proj.grad.abs().sum() > 0


def test_experts_in_half_precision() -> None:
    model = mixtral()
    router = model.model.layers[0].mlp.gate.weight
    dynamo_moe.convert(model, experts_dtype=torch.float16)
    for experts in experts_of(model):
        assert experts.gate_up_proj.dtype == experts.down_proj.dtype == torch.float16
    assert router.dtype == torch.float32
    assert model(**example_inputs(ARCHITECTURES["mixtral"], 2, 7)).logits.isfinite().all()


class Gated(nn.Module):
    """An object with the interface of transformers' experts, around any gating."""

    has_gate, has_bias, has_post_expert_norm = True, False, False
    is_transposed, is_concatenated = False, True

    def __init__(self, gate: Any, **attributes: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 32, 8))
        self.down_proj = nn.Parameter(torch.randn(3, 8, 16))
        self.config = transformers.PretrainedConfig()
        self._apply_gate = gate
        for name, value in attributes.items():
            setattr(self, name, value)


def silu_gate(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return nn.functional.silu(gate) * up


def deepseek_gate(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)


class Softcap(nn.Module):
    def __init__(self, softcap: float) -> None:
        super().__init__()
        self.softcap = softcap


class Inkling2Gate(nn.Module):
    """A gating whose numbers are those of its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_softcap, self.up_softcap = Softcap(4.0), Softcap(25.0)

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, -1)
        capped = 4.0 * torch.tanh(gate / 4.0) * 25.0 * torch.tanh(up / 25.0)
        return capped * torch.sigmoid(gate)


def gpt_oss_gate(rows: Tensor) -> Tensor:
    gate, up = rows[..., ::2].clamp(max=7.0), rows[..., 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Gated(silu_gate), ExpertOptions("silu", gated=True)),
        (
            Gated(lambda rows: silu_gate(rows.flip(-1)).flip(-1) * 0 + silu_gate(rows)),
            ExpertOptions("silu", gated=True),
        ),
        (
            Gated(deepseek_gate, swiglu_limit=10.0),
            ExpertOptions("clamped_silu", gated=True, alpha=1.0, limit=10.0),
        ),
        (
            Gated(gpt_oss_gate, is_concatenated=False, alpha=1.702, limit=7.0),
            ExpertOptions("clamped_swiglu", gated=True, interleaved=True),
        ),
        (
            Gated(Inkling2Gate()),
            ExpertOptions("softcapped_silu", gated=True, alpha=4.0, limit=25.0),
        ),
    ],
)
def test_a_gate_is_known_by_its_numbers(module: nn.Module, options: ExpertOptions) -> None:
    from dynamo_moe.conversion import transformers_experts

    assert transformers_experts.identify_options(module) == options


@pytest.mark.parametrize(
    ("gate", "interleaved", "numbers"),
    [(silu_gate, False, {}), (gpt_oss_gate, True, {"alpha": 1.702, "limit": 7.0})],
)
def test_experts_of_the_first_versions_with_an_interface_are_known(
    gate: Any, interleaved: bool, numbers: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 5.0 of transformers says neither whether there is a gate nor where its rows are."""
    from dynamo_moe.conversion import transformers_experts

    for name in ("has_gate", "has_post_expert_norm", "is_concatenated"):
        monkeypatch.delattr(Gated, name)
    module = Gated(gate, **numbers)
    assert transformers_experts.is_experts(module)
    options = transformers_experts.identify_options(module)
    assert (options.gated, options.interleaved) == (True, interleaved)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Gated(lambda rows: silu_gate(rows) * 1.001), "gating is none that torch.ops.moe computes"),
        (Gated(deepseek_gate), "gating is none"),
        (Gated(deepseek_gate, swiglu_limit=9.0), "gating is none"),
        (Gated(gpt_oss_gate, alpha=1.702, limit=7.0), "gating is none"),
        (Gated(lambda rows: rows @ torch.eye(3)), "gating fails on a row of numbers"),
        (Gated(silu_gate, has_post_expert_norm=True), "normalises each expert's result"),
        (Gated(silu_gate, _is_expert_parallel=True), "expert parallelism"),
    ],
)
def test_what_cannot_be_computed_exactly_is_refused(module: nn.Module, reason: str) -> None:
    model = nn.Sequential(module)
    (left,) = dynamo_moe.convert(model).unrecognised
    assert reason in left.reason
    assert module.config._experts_implementation != "dynamo_moe"


def test_a_refused_module_computes_as_before_beside_a_converted_one() -> None:
    model = mixtral()
    case = example_inputs(ARCHITECTURES["mixtral"], 2, 7)
    experts_of(model)[1].has_post_expert_norm = True
    with torch.no_grad():
        expected = model(**case).logits
        report = dynamo_moe.convert(model)
        assert [r.module for r in report.replaced] == ["model.layers.0.mlp.experts"]
        assert [u.module for u in report.unrecognised] == ["model.layers.1.mlp.experts"]
        torch.testing.assert_close(model(**case).logits, expected)


def test_experts_that_compute_more_than_their_flags_say_are_refused() -> None:
    model = mixtral()
    kind = type(experts_of(model)[0])

    def doubled(self, *inputs):
        return 2 * original(self, *inputs)

    original = kind.forward.__wrapped__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind.forward, "__wrapped__", doubled)
        report = dynamo_moe.convert(model)
    assert not report.replaced
    assert all("computes something else" in left.reason for left in report.unrecognised)


def test_an_unknown_fallback_is_named() -> None:
    model = ARCHITECTURES["muse_spark"].build()
    with pytest.raises(ValueError, match=r"fallback must be one of .*batched_mm.*; got 'dense'"):
        dynamo_moe.convert(model, fallback="dense")


def test_switch_keeps_its_capacity_unless_told_otherwise() -> None:
    architecture = ARCHITECTURES["switch_transformers"]
    case = example_inputs(architecture, 2, 12)
    results = {}
    for capacity in (1, 2**31):
        model = architecture.build()
        for module in model.modules():
            if hasattr(module, "expert_capacity"):
                module.expert_capacity = capacity
        with torch.no_grad():
            expected = model(**case).logits
            assert not dynamo_moe.convert(model).unrecognised
            results[capacity] = model(**case).logits
        torch.testing.assert_close(results[capacity], expected, rtol=1e-4, atol=1e-5)
        limits = [module.capacity for module in model.modules() if hasattr(module, "capacity")]
        assert set(limits) == {1 if capacity == 1 else None}
    assert (results[1] - results[2**31]).abs().max() > 1e-3
