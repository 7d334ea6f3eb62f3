"""Netron in a headless Chromium, for tests and for the documentation's pictures.

Netron does not let pages evaluate JavaScript, so everything here goes through locators.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HOST = "127.0.0.1"


def executable() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def missing() -> str | None:
    """Returns what this machine lacks to open Netron, or None if nothing is missing."""
    for package in ("netron", "playwright"):
        if find_spec(package) is None:
            return f"needs the package {package}"
    return None if executable() else f"needs a browser on the path: {', '.join(BROWSERS)}"


@contextmanager
def launched() -> Iterator[Browser]:
    """Starts a browser that can only reach servers on this machine.

    It resolves no host names, and Netron reports to hosts by name. Only one browser can run at a
    time.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable(),
            args=[f"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE {HOST}"],
        )
        with browser:
            yield browser


@contextmanager
def opened(
    browser: Browser, path: Path, *, width: int = 1200, height: int = 900, scale: float = 1
) -> Iterator[Page]:
    """Opens a file in Netron and yields the page once the graph is laid out.

    Args:
        browser: A browser from `launched`.
        path: The ONNX file.
        width: Width of the page, in CSS pixels.
        height: Height of the page, in CSS pixels.
        scale: Pixels of a screenshot per CSS pixel.

    Raises:
        RuntimeError: Netron cannot open the file; the message is Netron's.
    """
    context = browser.new_context(
        viewport={"width": width, "height": height},
        device_scale_factor=scale,
        color_scheme="light",
        reduced_motion="reduce",  # The sidebar does not slide in.
    )
    with _served(path) as url, context:
        # Without the cookie Netron asks for consent and, 180 days after its release, for an update.
        context.add_cookies([{"name": "consent", "value": "0", "url": url}])
        context.clock.set_fixed_time("2020-01-01")
        page = context.new_page()
        page.goto(url)
        page.locator("body.default, body.alert").wait_for()
        if page.locator("body.alert").count():
            raise RuntimeError(f"{path}: {page.locator('.message-text').inner_text()}")
        yield page


@contextmanager
def _served(path: Path) -> Iterator[str]:
    import netron

    # Netron configures the root logger if it has no handler.
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    address = netron.serve(str(path), address=(HOST, 0))
    root.removeHandler(handler)
    try:
        yield f"http://{address[0]}:{address[1]}"
    finally:
        netron.stop(address)


def nodes(page: Page, op_type: str | None = None) -> Locator:
    """Returns the graph's nodes, or those of one operator."""
    found = page.locator("#nodes > .graph-node")
    if op_type is None:
        return found
    return found.filter(has=page.locator(".node-item-type > text").get_by_text(op_type, exact=True))


def op_types(page: Page) -> list[str]:
    return _texts(nodes(page).locator(".node-item-type:first-child > text"))


def name_of(node: Locator) -> str:
    """Returns the node's name, which is its tooltip."""
    return _texts(node.locator(".node-item-type:first-child > title"))[0]


def node_named(page: Page, name: str) -> Locator:
    return nodes(page).filter(has=page.locator("title").get_by_text(name, exact=True))


def open_body(node: Locator) -> None:
    """Opens the function behind the node, in place of the graph."""
    node.locator(".node-item-type", has_text="ƒ").click()


def properties(page: Page, node: Locator) -> dict[str, dict[str, str]]:
    """Clicks a node and returns the sidebar's contents as section -> name -> value."""
    name = name_of(node)
    node.locator(".node-item-type").first.click()
    sidebar = page.locator("#sidebar-content")
    # The node's name, which comes first, is that of its result too.
    sidebar.locator(".sidebar-item-value-line").get_by_text(name, exact=True).first.wait_for()
    section: dict[str, str] = {}
    sections = {"": section}
    for row in sidebar.locator(".sidebar-object > *").all():
        if row.get_attribute("class") == "sidebar-section":
            section = sections[row.text_content() or ""] = {}
        else:
            values = _texts(row.locator(".sidebar-item-value-line"))
            section[row.locator("input").get_attribute("value") or ""] = " ".join(values).strip()
    return sections


def _texts(found: Locator) -> list[str]:
    return [one.text_content() or "" for one in found.all()]
