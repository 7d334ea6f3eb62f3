"""Pictures: what is drawn and where, and that equal models give equal files."""

import os
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import onnx
import pytest
from onnx import helper

import dynamo_moe
from dynamo_moe.drawing import layout
from dynamo_moe.drawing.layout import Box, boxes_of, fold, ranks_of, spelled_out
from dynamo_moe.drawing.paint import Panel
from onnx_files import dense_model, dense_moe_nodes, model, moe_model, save, sizes, value, weight


def _texts(graph: onnx.GraphProto) -> Counter[str]:
    return Counter(" ".join(box.lines) for box in boxes_of(graph))


def _chain(count: int, op: str = "Relu") -> list[onnx.NodeProto]:
    return [helper.make_node(op, [f"v{i}"], [f"v{i + 1}"]) for i in range(count)]


def test_every_node_is_in_one_box() -> None:
    texts = _texts(moe_model().graph)
    assert texts == {
        "x": 1,
        "LayerNorm": 1,
        "DroplessMoE 3 experts, top-2 gelu, 174 params": 1,
        "Add": 2,
        "Softmax": 1,
        "TopK": 1,
        "DroplessMoEExperts 3 experts, top-2 silu, 216 params": 1,
        "y": 1,
    }


def test_shape_chains_and_biases_are_joined() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "bias"], ["b"]),
        helper.make_node("Reshape", ["b", "s"], ["c"]),
        helper.make_node("Transpose", ["c"], ["d"]),
        helper.make_node("Relu", ["d"], ["e"]),
        *(
            helper.make_node("Squeeze", [given], [result])
            for given, result in pairwise(["e", "f", "g", "y"])
        ),
    ]
    proto = model(
        nodes,
        [weight("w", 4, 4), weight("bias", 4), sizes("s", -1)],
        inputs=[value("x", [4])],
        outputs=[value("y", [4])],
    )
    flow = boxes_of(proto.graph)
    assert [" ".join(box.lines) for box in flow if box.operators] == [
        "MatMul + Add",
        "Reshape Transpose",
        "Relu",
        "3 shape ops",
    ]
    assert sum(len(box.operators) for box in flow) == len(nodes)


def test_a_residual_add_is_not_a_bias() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "x"], ["y"]),
    ]
    proto = model(nodes, [weight("w", 4, 4)], inputs=[value("x", [4])], outputs=[value("y", [4])])
    assert _texts(proto.graph) == {"x": 1, "MatMul": 1, "Add": 1, "y": 1}


def test_what_prepares_weights_and_sizes_is_not_drawn() -> None:
    nodes = [
        helper.make_node("Transpose", ["w"], ["wt"]),
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "i"], ["d"]),
        helper.make_node("MatMul", ["x", "wt"], ["a"]),
        helper.make_node("Reshape", ["a", "d"], ["b"]),
        # Positions are derived from a size, but they are data.
        helper.make_node("Range", ["i", "d", "i"], ["p"]),
        helper.make_node("Add", ["b", "p"], ["y"]),
    ]
    proto = model(
        nodes,
        [weight("w", 4, 4), sizes("i", 0)],
        inputs=[value("x", [4])],
        outputs=[value("y", [4])],
    )
    flow = boxes_of(proto.graph)
    assert Counter(op for box in flow for op in box.operators) == Counter(
        ["MatMul", "Reshape", "Range", "Add"]
    )
    assert sum(box.prepared for box in flow) == 3
    assert Panel("t", proto.graph).subtitle == "7 nodes; 3 that prepare weights or sizes not drawn"


def test_a_value_that_many_distant_boxes_read_is_named_there() -> None:
    nodes = _chain(60)
    nodes[20] = helper.make_node("Mul", ["v20", "mask"], ["v21"])
    for i in (25, 40, 55):
        nodes[i] = helper.make_node("Mul", [f"v{i}", "m"], [f"v{i + 1}"])
    nodes.insert(0, helper.make_node("Neg", ["mask"], ["m"]))
    proto = model(nodes, inputs=[value("v0", [4]), value("mask", [4])], outputs=[value("v60", [4])])
    assert _texts(proto.graph)["\N{UPWARDS ARROW} Neg"] == 3


def test_a_graph_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        boxes_of(model([], [weight("w", 2)], inputs=[value("x", [2])]).graph)


def test_a_dense_moe_layer_is_found() -> None:
    flow = boxes_of(dense_model().graph)
    [layer] = spelled_out(flow)
    inside = sorted(op for box in layer for op in box.operators)
    assert inside == [
        "MatMul", "MatMul", "MatMul", "Mul", "ReduceSum", "Reshape", "ScatterElements", "Softmax",
        "TopK",
    ]  # fmt: skip
    assert sum(len(box.operators) + box.prepared for box in layer) == len(dense_moe_nodes("x", "y"))


def test_a_topk_alone_is_no_moe_layer() -> None:
    assert spelled_out(boxes_of(moe_model().graph)) == []


def _placed(proto: onnx.ModelProto, height: float) -> list[layout.Column]:
    flow = boxes_of(proto.graph)
    layers = spelled_out(flow)
    ranks, _ = ranks_of(flow, layers)
    return fold(ranks, layers, height)


def _overlap(a: Box, b: Box) -> bool:
    return (
        abs(a.x - b.x) < (a.width + b.width) / 2 - 1e-6
        and abs(a.y - b.y) < (a.height + b.height) / 2 - 1e-6
    )


@pytest.mark.parametrize("height", [120.0, 1000.0])
@pytest.mark.parametrize("proto", [moe_model(), dense_model()], ids=["plugin", "dense"])
def test_boxes_do_not_overlap(proto: onnx.ModelProto, height: float) -> None:
    for column in _placed(proto, height):
        boxes = [box for box in column.boxes if box.kind]
        assert not any(_overlap(a, b) for a, b in combinations(boxes, 2))
        assert column.height <= height
        assert all(0 <= box.y <= column.height for box in boxes)
        right = column.left + column.width + 1e-6
        assert all(box.x + box.width / 2 <= right for box in boxes)


def test_a_residual_line_is_straight() -> None:
    flow = boxes_of(dense_model().graph)
    _, lines = ranks_of(flow, spelled_out(flow))
    [box] = [b for a, b in lines if a.lines == ("x",) and not b.kind]
    end = next(a for a, _ in lines if a.lines == ("Add",))
    for a, b in lines:
        if a is box:
            assert b.x == pytest.approx(end.x)
            box = b
    assert box is end


def test_columns_are_cut_where_one_value_crosses() -> None:
    nodes = []
    for i in range(6):
        for branch in "abc":
            names = [f"v{i}", f"{branch}{i}", f"{branch}{i}_2"]
            nodes += [helper.make_node("Relu", [x], [y]) for x, y in pairwise(names)]
        nodes.append(helper.make_node("Sum", [f"{branch}{i}_2" for branch in "abc"], [f"v{i + 1}"]))
    proto = model(nodes, inputs=[value("v0", [4])], outputs=[value("v6", [4])])
    for height in range(200, 360, 20):
        for column in _placed(proto, height)[:-1]:
            lowest = max(box.y for box in column.boxes)
            assert [box.lines for box in column.boxes if box.y == lowest] == [("Sum",)]


def test_pictures(tmp_path: Path) -> None:
    plugin, dense = save(moe_model(), tmp_path / "p.onnx"), save(dense_model(), tmp_path / "d.onnx")
    png = dynamo_moe.draw_comparison([("Dense", dense), ("Plugin", plugin)], tmp_path / "both.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    svg = dynamo_moe.draw(plugin, str(tmp_path / "p.SVG")).read_text()
    assert "<svg" in svg
    # matplotlib writes each text as a comment beside its glyphs.
    for text in ("p.onnx", "7 nodes", "DroplessMoE", "3 experts, top-2", "MoE layer"):
        assert f"<!-- {text} -->" in svg
    assert "Element-wise" in svg
    assert "Shape, layout" not in svg
    assert "#e8590c" in svg


def test_a_frame_names_the_nodes_of_a_dense_layer(tmp_path: Path) -> None:
    svg = dynamo_moe.draw(dense_model(), tmp_path / "d.svg", title="$a_b$").read_text()
    assert "<!-- MoE: 11 nodes -->" in svg
    assert "<!-- $a_b$ -->" in svg


def test_a_long_graph_becomes_a_page(tmp_path: Path) -> None:
    proto = model(_chain(400), inputs=[value("v0", [4])], outputs=[value("v400", [4])])
    svg = dynamo_moe.draw(proto, tmp_path / "long.svg").read_text()
    width, height = (
        float(re.search(rf'{name}="([\d.]+)pt"', svg)[1]) for name in ("width", "height")
    )
    assert 0.4 < width / height < 2


@pytest.mark.slow
@pytest.mark.every
def test_equal_models_give_equal_files(tmp_path: Path) -> None:
    """Whatever the seed of sets of strings: here, and in another process."""
    path = save(dense_model(), tmp_path / "d.onnx")
    here, there = (
        [tmp_path / f"{place}.{suffix}" for suffix in ("svg", "png")] for place in ("here", "there")
    )
    for destination in here:
        dynamo_moe.draw(path, destination)
    code = "import sys, dynamo_moe\nfor file in sys.argv[2:]: dynamo_moe.draw(sys.argv[1], file)"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    subprocess.run(
        [sys.executable, "-c", code, path, *there],
        check=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    assert [file.read_bytes() for file in here] == [file.read_bytes() for file in there]


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.svg or \.png.*'m\.pdf'"):
        dynamo_moe.draw(moe_model(), tmp_path / "m.pdf")
    with pytest.raises(ValueError, match="no models"):
        dynamo_moe.draw_comparison([], tmp_path / "m.svg")


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith("dynamo_moe.drawing"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fast_sugiyama", None)
    with pytest.raises(ImportError, match=r"fast_sugiyama: pip install 'dynamo-moe\[draw\]'"):
        dynamo_moe.draw(moe_model(), tmp_path / "m.svg")
