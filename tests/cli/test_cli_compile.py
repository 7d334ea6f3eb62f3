"""``dynamo-moe compile``, the layers that it finds in an ONNX file, and ``inspect`` of a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from typer.testing import CliRunner

pytest.importorskip("triton")

import dynamo_moe
import trt_plugin
from custom_ops import ExpertOptions, RouterOptions
from custom_ops.kernels.layer import Layer
from custom_ops.layer_shape import LayerShape
from custom_ops.weight_formats import plain_format
from dynamo_moe.cli import app
from dynamo_moe.files.kernel_layers import kernel_layers
from dynamo_moe.models import DroplessMoEMlp
from onnx_files import HALF, dense_model, model, moe_model, save, value, weight
from small_bundles import SMALL
from trt_plugin import parse_spec

SIZES = {"num_experts": 4, "in_features": 32, "hidden_features": 48, "top_k": 2}
SPEC = "experts=4,top_k=2,width=32,hidden=48,dtype=fp16"


def node(
    inputs: str = "x router w1 w2",
    output: str = "y",
    op: str = "DroplessMoE",
    domain: str = "moe",
    **changes: Any,
) -> onnx.NodeProto:
    attributes = {**SIZES, **changes}
    return helper.make_node(
        op, inputs.split(" "), [output], f"layer_{output}", domain=domain, **attributes
    )


def one_layer(*nodes: onnx.NodeProto, dtype: type = np.float16, **more: Any) -> onnx.ModelProto:
    weights = [
        weight("router", 4, 32, dtype=dtype),
        weight("router_bias", 4, dtype=dtype),
        weight("w1", 4, 48, 32, dtype=dtype),
        weight("w2", 4, 32, 48, dtype=dtype),
        weight("b1", 4, 48, dtype=dtype),
        weight("b2", 4, 32, dtype=dtype),
    ]
    tokens = HALF if dtype == np.float16 else TensorProto.FLOAT
    return model(
        nodes or [node()],
        weights,
        inputs=[value("x", ["T", 32], tokens)],
        outputs=[value("y", ["T", 32], tokens)],
        **more,
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save(one_layer(), tmp_path / "m.onnx")


def found(proto: onnx.ModelProto, folder: Path) -> list[Layer]:
    return kernel_layers(save(proto, folder / "found.onnx"))


def refused(proto: onnx.ModelProto, folder: Path) -> str:
    with pytest.raises(ValueError, match=r".") as raised:
        found(proto, folder)
    return str(raised.value)


# --- Layers found in a file ---


def test_a_layer_is_found(file: Path) -> None:
    assert kernel_layers(file) == [parse_spec(SPEC)]


def test_an_exported_model_has_its_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mlp = DroplessMoEMlp(32, 48, num_experts=4, top_k=2)
    network = torch.nn.Sequential(torch.nn.LayerNorm(32), mlp, torch.nn.LayerNorm(32), mlp).eval()
    dynamo_moe.convert(network, experts_dtype=torch.bfloat16)
    dynamo_moe.export(network, torch.randn(5, 32), tmp_path / "m.onnx")
    layer = Layer(
        LayerShape(
            *(4, 32, 48, 2),
            tokens_dtype=torch.float32,
            weight_format=plain_format(torch.bfloat16),
            router=RouterOptions(2),
            routing_dtype=torch.float32,
            weights_dtype=torch.float32,
            b1=True,
            b2=True,
        )
    )
    assert kernel_layers(tmp_path / "m.onnx") == [layer, layer]


def test_options_and_optional_inputs_are_read(tmp_path: Path) -> None:
    proto = one_layer(
        node(
            "x router w1 w2 router_bias  b2",
            activation="clamped_swiglu",
            gated=1,
            interleaved=1,
            activation_alpha=1.5,
            activation_limit=6.0,
            pre_norm="rms",
            norm_eps=0.5,
            residual=1,
            scoring="sigmoid",
            renormalize=0,
            routed_scaling=2.5,
        )
    )
    (layer,) = found(proto, tmp_path)
    assert layer.shape.options == ExpertOptions(
        "clamped_swiglu", gated=True, interleaved=True, alpha=1.5, limit=6.0,
        pre_norm="rms", norm_eps=0.5, residual=True,
    )  # fmt: skip
    assert layer.shape.router == RouterOptions(2, "sigmoid", renormalize=False, routed_scaling=2.5)
    assert (layer.shape.weights_dtype, layer.shape.b1, layer.shape.b2) == (
        torch.float16,
        False,
        True,
    )


@pytest.mark.parametrize("weight", ["w1", "w2"])
def test_weights_that_lie_as_in_out_are_another_layer(tmp_path: Path, weight: str) -> None:
    flag = f"{weight}_transposed"
    proto = one_layer(node(**{flag: 1}))
    assert found(proto, tmp_path) == [parse_spec(f"{SPEC},{flag}")]
    assert parse_spec(f"{SPEC},{flag}").shape.is_transposed(weight)
    assert parse_spec(f"{SPEC},{flag}") != parse_spec(SPEC)
    assert found(one_layer(node(**{flag: 0})), tmp_path) == [parse_spec(SPEC)]


def test_a_spec_of_offloaded_experts() -> None:
    assert parse_spec(f"{SPEC},resident_experts=2").resident_experts == 2
    assert parse_spec(SPEC).resident_experts is None
    with pytest.raises(ValueError, match=r"resident_experts must be in 1\.\.\d+, the number of"):
        parse_spec(f"{SPEC},resident_experts=0")


def test_experts_with_a_router_outside_are_found(tmp_path: Path) -> None:
    proto = one_layer(
        node(
            "x ids weights w1 w2 b1", op="DroplessMoEExperts", domain="moe.silu", weight_on_input=1
        )
    )
    proto.graph.input.extend(
        [
            value("ids", ["T", 2], TensorProto.INT32),
            value("weights", ["T", 2], TensorProto.BFLOAT16),
        ]
    )
    (layer,) = found(proto, tmp_path)
    assert layer == parse_spec(
        f"{SPEC},op=experts,routing_dtype=int32,weights_dtype=bf16,weight_on_input,b1"
    )


def test_dtypes_that_are_not_written_down_are_inferred(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=HALF),
        helper.make_node("Transpose", ["w1"], ["turned"], perm=[0, 1, 2]),
        node("half router turned w2", "first"),
        node("first router w1 w2", "second"),
        helper.make_node("Cast", ["second"], ["y"], to=HALF),
    ]
    assert found(one_layer(*nodes), tmp_path) == [parse_spec(SPEC)] * 2


def test_layers_in_branches_are_found(tmp_path: Path) -> None:
    def branch(name: str, weights: str) -> onnx.GraphProto:
        own = weight("own", 4, 48, 32, dtype=np.float16)
        inner = [helper.make_node("Relu", ["x"], ["r"]), node(f"r router {weights} w2", name)]
        return helper.make_graph(inner, name, [], [value(name, None, HALF)], [own])

    choice = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("a", "own"), else_branch=branch("b", "w1")
    )
    proto = one_layer(choice)
    proto.graph.input.append(value("c", [], TensorProto.BOOL))
    assert found(proto, tmp_path) == [parse_spec(SPEC)] * 2


def test_layers_in_functions_are_found_with_the_types_of_their_calls(tmp_path: Path) -> None:
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("moe", 1)]
    block = helper.make_function(
        "blocks",
        "Block",
        ["tokens", "router", "w1", "w2"],
        ["out"],
        [
            helper.make_node("Relu", ["tokens"], ["r"]),
            node("r router w1 w2", "out"),
        ],
        imports,
    )
    body = helper.make_function(
        "moe",
        "DroplessMoE",
        ["x"],
        ["y"],
        [helper.make_node("Identity", ["x"], ["y"])],
        imports[:1],
    )
    call = helper.make_node("Block", ["x", "router", "w1", "w2"], ["y"], domain="blocks")
    proto = one_layer(call, functions=[block, body], opsets={"blocks": 1})
    assert found(proto, tmp_path) == [parse_spec(SPEC)]


def test_weights_outside_the_file_are_not_read(tmp_path: Path) -> None:
    path = save(one_layer(), tmp_path / "m.onnx", external=True)
    (tmp_path / "m.onnx.data").unlink()
    assert kernel_layers(path) == [parse_spec(SPEC)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_features": 36}, "the kernels need D, the model width, to be a multiple of 8, got 36"),
        ({"hidden_features": 4}, "need H, the hidden width, to be a multiple of 8, got 4"),
        ({"num_experts": 2000}, "the kernels need experts in 1..1024, got 2000"),
        ({"top_k": 5}, "top_k must be in 1..4 (the experts), got 5"),
        ({"activation": "swish"}, "activation must be one of gelu, "),
        ({"scoring": 3}, "its attribute scoring must be of type STRING, got INT"),
        ({"inputs": "x router w1 w2  b1"}, "b1 must have the dtype of w1"),
        ({"inputs": "x router w1"}, "it has no input w2"),
        ({"inputs": "x  w1 w2"}, "it has no input router_weight"),
        ({"inputs": "unknown router w1 w2"}, "the dtype of its input x, 'unknown', is not known"),
        (
            {"inputs": "x router bools w2"},
            "its input w1, 'bools', has the dtype bool, which the operators do not take",
        ),
    ],
)
def test_a_node_without_kernels_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    proto = one_layer(node(**changes))
    proto.graph.initializer.extend(
        [weight("bools", 4, dtype=np.bool_)]
        if "bools" in changes.get("inputs", "")
        else [weight("b1", 4, 48, dtype=np.float32)]
    )
    if "b1" in changes.get("inputs", ""):
        del proto.graph.initializer[4]
    reason = refused(proto, tmp_path)
    assert reason.startswith("node 'layer_y': ")
    assert message in reason


def test_float64_has_no_kernels(tmp_path: Path) -> None:
    proto = one_layer(dtype=np.float64)
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    assert "need weight_format to be one of float32" in refused(proto, tmp_path)


def test_a_node_without_its_sizes_is_named(tmp_path: Path) -> None:
    proto = one_layer()
    del proto.graph.node[0].attribute[:]
    assert refused(proto, tmp_path).startswith("node 'layer_y': it has no attribute ")


def test_a_file_without_moe_nodes_has_no_layers(tmp_path: Path) -> None:
    assert kernel_layers(save(dense_model(), tmp_path / "dense.onnx")) == []


# --- The command ---


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DYNAMO_MOE_CACHE_DIR", str(cache))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def error(*arguments: str, code: int) -> str:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    line, *others = result.stderr.splitlines()
    assert not others
    return str(line)


@pytest.mark.slow
def test_a_file_is_compiled_and_inspected(file: Path) -> None:
    result = run("compile", str(file), "--arch", "sm_80", "--max-tokens", "1")
    assert result.exit_code == 0, result.output
    assert "few_up_kernel" in result.stdout
    assert "Wrote" in result.stderr
    bundle = trt_plugin.read(file.with_suffix(".moek"))
    assert [program.layer.experts for program in bundle.programs] == [4]

    shown = run("inspect", str(file.with_suffix(".moek")))
    assert shown.stdout == result.stdout
    inspected = json.loads(run("inspect", str(file.with_suffix(".moek")), "--json").stdout)
    assert inspected["programs"] == bundle.to_dict()["programs"]

    # The same layer as text, with and without the file; the architecture as a bare number.
    arguments = ("--spec", SPEC, "--arch", "80", "--max-tokens", "1", "-q", "-o", "b.moek")
    for given in ((), (str(file),)):
        quiet = run("compile", *given, *arguments)
        assert (quiet.exit_code, quiet.output) == (0, "")
        assert Path("b.moek").read_bytes() == file.with_suffix(".moek").read_bytes()

    written = run("compile", *arguments[:-1], "c.moek", "--json")
    report = json.loads(written.stdout)
    assert report["path"] == "c.moek"
    assert report["seconds"] > 0
    assert report["programs"] == inspected["programs"]


@pytest.mark.slow
def test_products_may_be_of_tf32() -> None:
    spec = SPEC.replace("fp16", "fp32")
    limits = ("--max-tokens", "1", "--jobs", "1")
    arguments = ("--spec", spec, "--arch", "80", *limits, "-q", "-o", "t.moek")
    for given, expected in (((), False), (("--tf32",), True)):
        assert run("compile", *arguments, *given).exit_code == 0
        (program,) = trt_plugin.read("t.moek").programs
        assert program.layer.to_dict()["tf32"] is expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "what to compile for: name an ONNX file, or a layer with --spec"),
        (("m.onnx",), "name a GPU architecture with --arch: sm_75, sm_80, "),
        (("m.onnx", "--arch", "gfx90a"), "--arch: architecture must be one of sm_75"),
        (("n.onnx", "--arch", "sm_90"), "no such file: n.onnx"),
        (("--spec", SPEC, "--arch", "90"), "where to write to: name a file with -o OUT.moek"),
        (("m.onnx", "--arch", "90", "-o", "no/m.moek"), "no such folder: no"),
        (
            ("--spec", "experts=8", "--arch", "90", "-o", "o"),
            "--spec: spec 'experts=8': missing to",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    file: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in error("compile", *arguments, code=2)


def test_layers_are_compiled_with_their_slots(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[list[Layer]] = []

    def compile(layers: list[Layer], *_: Any, **__: Any) -> trt_plugin.Bundle:  # noqa: A001
        compiled.append(layers)
        return SMALL

    monkeypatch.setattr(trt_plugin, "compile", compile, raising=False)
    for options in (("--resident-experts", "3"), ("--resident-memory", "1TB"), ()):
        assert run("compile", str(file), "--arch", "80", *options).exit_code == 0
    given = run("compile", "--arch", "80", "-o", "o", "--spec", f"{SPEC},resident_experts=3")
    assert given.exit_code == 0
    slots = [[layer.resident_experts for layer in layers] for layers in compiled]
    assert slots == [[3], [4], [None], [3]]
    message = error("compile", "--arch", "80", "-o", "o", "--spec", SPEC, *options_of(3), code=2)
    assert "of a --spec, write resident_experts=R into it" in message


def options_of(resident_experts: int) -> tuple[str, str]:
    return "--resident-experts", str(resident_experts)


def test_a_file_without_layers_fails(tmp_path: Path) -> None:
    save(dense_model(), tmp_path / "d.onnx")
    assert "d.onnx has no MoE nodes of domain 'moe'" in error(
        "compile", "d.onnx", "--arch", "90", code=1
    )
    assert not (tmp_path / "d.moek").exists()


def test_triton_is_asked_for_where_it_is_missing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_moe.cli.common.find_spec", lambda name: None)
    message = error("compile", str(file), "--arch", "90", code=1)
    assert message == "error: compiling needs Triton: pip install 'dynamo-moe[kernels]'"


def test_a_compiler_error_is_one_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise trt_plugin.CompileError("up_kernel for sm_90 does not compile", "a\nptxas fatal : b")

    monkeypatch.setattr(trt_plugin, "compile", fails, raising=False)
    message = error("compile", str(file), "--arch", "90", code=1)
    assert message.startswith(
        "error: up_kernel for sm_90 does not compile: ptxas fatal : b (--debug"
    )


def test_a_damaged_bundle_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.moek").write_bytes(b"MOEK")
    message = error("inspect", "bad.moek", code=1)
    assert message == ("error: bad.moek: bundle: truncated: the header has 32 bytes, got 4")


def test_a_bundle_has_no_picture(tmp_path: Path) -> None:
    (tmp_path / "b.moek").touch()
    message = error("inspect", "b.moek", "--picture", "b.svg", code=2)
    assert message == "error: b.moek is not an ONNX file: there is no graph to draw"


def test_moe_layers_of_the_demo_file_need_wider_sizes(tmp_path: Path) -> None:
    save(moe_model(), tmp_path / "m.onnx")
    message = error("compile", "m.onnx", "--arch", "90", code=1)
    assert message.startswith("error: node 'b.0.mlp/DroplessMoE': the kernels need D")


# --- Layers as text ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown key ''; known are op, experts, top_k, "),
        ("expert=8", "unknown key 'expert'"),
        ("experts=8", "missing top_k, width, hidden"),
        ("experts=x", "experts must be an integer, got 'x'"),
        ("experts=8,experts=8", "experts is given twice"),
        (f"{SPEC},alpha=x", "alpha must be a number, got 'x'"),
        (f"{SPEC},gated=yes", "gated must be true or false, got 'yes'"),
        (
            f"{SPEC},routing_dtype=fp8",
            "routing_dtype must be one of fp32, fp16, bf16, int32, int64, int8;",
        ),
        (f"{SPEC},tokens_dtype=int32", "tokens_dtype must be one of float32"),
        (f"{SPEC},block_size=32", "block_size need weight_format"),
        (
            f"{SPEC},weight_format=int3",
            "weight_format must be one of int4, mxfp4, fp8, nvfp4, int8; got 'int3'",
        ),
        (f"{SPEC},weight_format=int4,block_rows=2", "block_rows must be 1 in int4, got 2"),
        (f"{SPEC},weight_format=int4,block_size=4294967296", "block_size must be below 2^31, got"),
        (f"{SPEC},weight_format=fp8,zero_points=scales", "fp8 has no zero points, got zero_points"),
        (f"{SPEC},weight_format=mxfp4,scales_dtype=fp16", "scales of mxfp4 must be one of int8;"),
        (f"{SPEC},weight_format=int4,experts_dtype=fp32", "packed weights have the tokens' dtype"),
        (f"{SPEC},op=both", "op must be one of dropless, experts; got 'both'"),
        (f"{SPEC},op=experts,scoring=sigmoid", "op=experts has no scoring"),
        (f"{SPEC},activation=swish", "activation must be one of gelu, "),
        ("experts=8,top_k=9,width=32,hidden=48", "top_k must be in 1..8 (the experts), got 9"),
    ],
)
def test_a_wrong_spec_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^spec '") as raised:
        parse_spec(text)
    assert message in str(raised.value)


def test_a_spec_says_all_that_a_layer_is() -> None:
    text = (
        "op=dropless, experts=8, top_k=2, width=64, hidden=128, dtype=bfloat16, tokens_dtype=fp32, "
        "routing_dtype=fp32, router_bias, activation=clamped_swiglu, gated=true, interleaved=1, "
        "alpha=1.5, limit=6, scoring=sigmoid, renormalize=false, routed_scaling=2.5, b1, b2=0"
    )
    assert parse_spec(text) == Layer(
        LayerShape(
            *(8, 64, 128, 2),
            tokens_dtype=torch.float32,
            weight_format=plain_format(torch.bfloat16),
            options=ExpertOptions(
                "clamped_swiglu", gated=True, interleaved=True, alpha=1.5, limit=6.0
            ),
            router=RouterOptions(2, "sigmoid", renormalize=False, routed_scaling=2.5),
            routing_dtype=torch.float32,
            weights_dtype=torch.float32,
            b1=True,
        )
    )
