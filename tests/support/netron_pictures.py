"""Creates the documentation's pictures of Netron: `make pictures`.

Netron writes shapes between the brackets U+3008 and U+3009. If the machine's fonts lack them, the
pictures show boxes instead (on Debian, fonts-wqy-microhei has them).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

import dynamo_moe
import netron_page
from dynamo_moe.models import swin_moe_digits

if TYPE_CHECKING:
    from playwright.sync_api import FloatRect, Locator

IMAGES = Path(__file__).parents[2] / "docs" / "images"

BLOCK = "stages.0.block1"
# The second half of the block: the end of the attention, and the MoE layer.
NODES = (
    ".attention.proj/Add",
    ".attention/Gather_5",
    "/Add",
    ".norm2/LayerNormalization",
    ".mlp/DroplessMoE",
    "/Add_2",
)
MARGIN = 40


def main() -> None:
    reason = netron_page.missing()
    if reason is not None:
        sys.exit(f"no pictures: {reason}")
    with TemporaryDirectory() as folder, netron_page.launched() as browser:
        path = export(Path(folder))
        with netron_page.opened(browser, path, width=880, height=1130, scale=1.25) as page:
            layer = netron_page.node_named(page, f"{BLOCK}.mlp/DroplessMoE")
            layer.scroll_into_view_if_needed()
            block = [netron_page.node_named(page, f"{BLOCK}{name}") for name in NODES]
            page.screenshot(path=IMAGES / "netron_block.png", clip=bounding_box(block))
            netron_page.properties(page, layer)
            sidebar = page.locator("#sidebar-title, #sidebar-content .sidebar-item").all()
            page.screenshot(
                path=IMAGES / "netron_attributes.png", clip=bounding_box(block + sidebar)
            )


def export(folder: Path) -> Path:
    """Exports the tutorial's model."""
    torch.manual_seed(0)
    model = swin_moe_digits().eval()
    dynamo_moe.convert(model)
    path = folder / "swin_moe.onnx"
    dynamo_moe.export(model, torch.randn(4, 1, 8, 8), path)
    return path


def bounding_box(shown: Iterable[Locator]) -> FloatRect:
    """Returns the rectangle around the given elements of the page, with a margin."""
    boxes = [box for one in shown if (box := one.bounding_box())]
    left, top = (min(box[side] for box in boxes) - MARGIN for side in ("x", "y"))
    right = max(box["x"] + box["width"] for box in boxes) + MARGIN
    bottom = max(box["y"] + box["height"] for box in boxes) + MARGIN
    return {"x": left, "y": top, "width": right - left, "height": bottom - top}


if __name__ == "__main__":
    main()
