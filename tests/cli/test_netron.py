"""How Netron shows an exported file, in a real browser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import onnx
import pytest
import torch

import dynamo_moe
import netron_page
import netron_pictures
from dynamo_moe.models import DroplessMoEMlp, SwinMoEConfig
from dynamo_moe.models.swin_moe import SwinMoE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

REASON = netron_page.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

LAYERS = ["stages.0.block1.mlp", "stages.1.block1.mlp", "stages.1.block3.mlp"]


class Exported(NamedTuple):
    """A file, and the MoE layers of its model."""

    path: Path
    layers: dict[str, DroplessMoEMlp]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    config = SwinMoEConfig(
        image_size=8,
        patch_size=2,
        in_channels=1,
        num_classes=10,
        embed_dim=16,
        depths=(2, 4),
        num_heads=(2, 4),
        window_size=2,
        mlp_ratio=3,
        moe_stages=(0, 1),
        num_experts=6,
        top_k=3,
    )
    torch.manual_seed(0)
    model = SwinMoE(config).eval()
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, DroplessMoEMlp)
    }
    dynamo_moe.convert(model)
    path = tmp_path_factory.mktemp("netron") / "swin_moe.onnx"
    dynamo_moe.export(model, torch.randn(2, 1, 8, 8), path, target="plugin")
    return Exported(path, layers)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with netron_page.launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(browser: Browser, exported: Exported) -> Iterator[Page]:
    with netron_page.opened(browser, exported.path) as page:
        yield page


def test_graph_has_one_node_per_layer(exported: Exported, page: Page) -> None:
    shown = netron_page.nodes(page, "DroplessMoE").all()
    assert sorted(map(netron_page.name_of, shown)) == [f"{name}/DroplessMoE" for name in LAYERS]
    assert sorted(exported.layers) == LAYERS


def test_the_documentations_pictures_show_nodes_that_there_are(tmp_path: Path) -> None:
    file = netron_pictures.export(tmp_path)
    names = {node.name for node in onnx.load(file, load_external_data=False).graph.node}
    assert {f"{netron_pictures.BLOCK}{name}" for name in netron_pictures.NODES} <= names


def test_graph_is_the_files(exported: Exported, page: Page) -> None:
    graph = onnx.load(exported.path).graph
    assert Counter(netron_page.op_types(page)) == Counter(node.op_type for node in graph.node)


@pytest.mark.parametrize("name", LAYERS)
def test_sidebar_describes_the_layer(exported: Exported, page: Page, name: str) -> None:
    layer = exported.layers[name]
    experts, width, hidden = layer.w1.shape
    node = netron_page.node_named(page, f"{name}/DroplessMoE")
    shown = netron_page.properties(page, node)
    assert shown[""] == {"type": "DroplessMoE", "module": "moe", "name": f"{name}/DroplessMoE"}
    for name_of_real, value in {"activation_alpha": 1.702, "norm_eps": 1e-6}.items():
        assert float(shown["Attributes"].pop(name_of_real)) == pytest.approx(value)
    assert shown["Attributes"] == {
        "top_k": str(layer.top_k),
        "num_experts": str(experts),
        "in_features": str(width),
        "hidden_features": str(hidden),
        "activation": "gelu",
        "activation_limit": "7",
        "gated": "0",
        "interleaved": "0",
        "weight_on_input": "0",
        "pre_norm": "none",
        "residual": "0",
        "scoring": "softmax",
        "renormalize": "1",
        "routed_scaling": "1",
        "group_scoring": "none",
        "n_group": "1",
        "topk_group": "1",
        "w1_transposed": "0",
        "w2_transposed": "0",
        "plugin_version": "1",
        "plugin_namespace": "",
        "kernels": "",
    }
    inputs = shown["Inputs"]
    assert list(inputs) == ["x", "router_weight", "w1", "w2", "router_bias", "b1", "b2"]
    for formal, actual in {"router_weight": "router.weight", "w1": "w1", "w2": "w2",
                           "b1": "b1", "b2": "b2"}.items():  # fmt: skip
        assert inputs[formal] == f"name: {name}.{actual}"
    assert list(shown["Outputs"]) == ["y"]


def test_node_opens_its_body(browser: Browser, exported: Exported) -> None:
    (function,) = onnx.load(exported.path).functions
    with netron_page.opened(browser, exported.path) as page:
        netron_page.open_body(netron_page.nodes(page, "DroplessMoE").first)
        page.locator("#toolbar-path").get_by_text("DroplessMoE").wait_for()
        shown = Counter(netron_page.op_types(page))
    # Netron draws some constants as part of the nodes that read them.
    expected = Counter(node.op_type for node in function.node if node.op_type != "Constant")
    assert expected.items() <= shown.items()


def test_page_reaches_only_its_server(page: Page) -> None:
    """No name is resolved, not even this machine's, at which the same server would answer."""
    from playwright.sync_api import Error

    other = page.context.new_page()
    with pytest.raises(Error, match="ERR_NAME_NOT_RESOLVED"):
        other.goto(page.url.replace(netron_page.HOST, "localhost"))
    other.close()


def test_file_that_netron_cannot_open(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"not a model")
    with pytest.raises(RuntimeError, match=r"broken\.onnx: \w+"), netron_page.opened(browser, path):
        pass
