"""The folders of the C++ sources include only those that architecture.md has before them."""

from __future__ import annotations

import re

from standin import CSRC, ROOT

ARCHITECTURE = ROOT / "docs" / "explanation" / "architecture.md"
#: Beside each other, so neither includes the other.
RUNTIMES = ("onnxruntime", "plugin")


def test_folders_include_those_before_them():
    text = ARCHITECTURE.read_text()
    (passage,) = re.findall(
        r"The library is C\+\+17, in folders of (.*?)A test holds", text, re.DOTALL
    )
    order = [name for name in re.findall(r"`(\w+)`", passage) if (CSRC / name).is_dir()]
    assert sorted(order) == sorted(path.name for path in CSRC.iterdir() if path.is_dir())
    assert order[-2:] == list(RUNTIMES)
    wrong = [
        f"{source.relative_to(CSRC)} includes {included}"
        for source in (*CSRC.glob("*/*.h"), *CSRC.glob("*/*.cc"))
        for included in re.findall(r'#include "(\w+)/', source.read_text())
        if included != source.parent.name
        and (
            order.index(included) > order.index(source.parent.name)
            or {included, source.parent.name} == set(RUNTIMES)
        )
    ]
    assert not wrong
