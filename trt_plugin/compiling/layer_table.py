"""The vocabulary of layers as C++, from the tables of ``custom_ops`` and of the bundle's format.

``python -m trt_plugin.compiling.layer_table`` writes ``csrc/bundle/layer_table.inc``, which
``csrc/bundle/layer.h`` includes; a test holds that the file is up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from custom_ops.dtypes import CODES, KERNEL_FLOATS, dtype_name
from custom_ops.kernels.expressions import OPERATIONS
from custom_ops.kernels.layer import MAX_EXPERTS, MAX_TOP_K, SIZE_MULTIPLE
from custom_ops.options import (
    EXPERT_OPTIONS,
    GATINGS,
    LAYOUT_OPTIONS,
    ROUTER_OPTIONS,
    SIZES,
    SOFTCAP,
    Flag,
    Option,
)
from custom_ops.packed_weights import ENCODINGS
from custom_ops.weight_formats import FORMAT_NAMES
from trt_plugin.bundle.records import FLAGS_WITHOUT_OPTION, FLAGS_WORD, SYMBOLS, TENSORS

FILE = Path(__file__).parents[1] / "csrc" / "bundle" / "layer_table.inc"
_HEAD = """\
// Written from custom_ops by `make tables`, and not by hand: add an option in
// custom_ops/options.py. clang-format off
"""
_text = json.dumps
_LEAST = {
    "at least 1": "1.0F",
    "positive": "std::numeric_limits<float>::denorm_min()",
    "positive and a normal number of float32": "std::numeric_limits<float>::min()",
}


def layer_table(
    experts: tuple[Option, ...] = EXPERT_OPTIONS, router: tuple[Option, ...] = ROUTER_OPTIONS
) -> str:
    """Returns the file's text.

    Args:
        experts: The experts' options.
        router: The router's, which ``DroplessMoEExperts`` does not have.
    """
    return "\n".join([_HEAD, *_lines((*experts, *LAYOUT_OPTIONS, *router), router)]) + "\n"


def _lines(options: tuple[Option, ...], router: tuple[Option, ...]) -> Iterator[str]:
    flags = {f"has_{name}": bit for name, bit in FLAGS_WITHOUT_OPTION.items()}
    flags |= {option.flag: option.slot.bit for option in options if isinstance(option.slot, Flag)}
    yield "enum LayerFlag : std::uint32_t {"
    for name, bit in sorted(flags.items(), key=lambda item: item[1]):
        yield f"  {_constant(name)} = {bit},"
    yield f"  kLayerFlags = {sum(flags.values())},"
    yield "};"
    yield _names("kDataTypeNames", map(dtype_name, CODES))
    sizes = (0 if dtype is None else dtype.itemsize for dtype in CODES)
    yield f"inline constexpr std::uint32_t kDataTypeBytes[] = {{{', '.join(map(str, sizes))}}};"
    yield from _formats()
    yield _names("kTensorNames", TENSORS)
    yield _names("kSymbolNames", SYMBOLS)
    yield _names("kOpcodeNames", OPERATIONS)
    for option in options:
        if option.names:
            yield _names(f"{_constant(option.name)}Names", option.names)
    activation = next(option for option in options if option.name == "activation")
    mask = sum(1 << activation.code(name) for name in GATINGS)
    yield f"inline constexpr std::uint32_t kGatings = {mask};  // A bit for each activation's code."
    softcapped = activation.code("softcapped_silu")
    yield f"inline constexpr std::uint32_t kSoftcappedSilu = {softcapped};"
    yield "// What its softcaps must be."
    yield f"inline constexpr const char* kSoftcapRule = {_text(SOFTCAP.text)};"
    yield f"inline constexpr float kLeastSoftcap = {SOFTCAP.low!r}F;"
    yield f"inline constexpr float kMostSoftcap = {SOFTCAP.high!r}F;"
    yield ""
    yield f"inline constexpr std::uint32_t kFlagsWord = {FLAGS_WORD};"
    yield f"inline constexpr std::uint32_t kMaxExperts = {MAX_EXPERTS};"
    yield f"inline constexpr std::uint32_t kMaxTopK = {MAX_TOP_K};"
    yield f"inline constexpr std::uint32_t kSizeMultiple = {SIZE_MULTIPLE};"
    yield ""
    yield "inline constexpr Size kSizes[] = {"
    for size in SIZES:
        yield f"    {{{_text(size.name)}, {_text(size.attribute)}, {size.slot.index}}},"
    yield "};"
    yield ""
    yield "// The router's options come last."
    yield "inline constexpr Option kOptions[] = {"
    for option in options:
        yield f"    {{{', '.join(_fields(option, options, option in router))}}},"
    yield "};"


def _formats() -> Iterator[str]:
    """Yields the formats of weights; that of code 0 is none."""
    yield "// A format's place is its code."
    yield "inline constexpr WeightFormat kWeightFormats[] = {"
    yield '    {"none", 0, 1, 0, false, false},'
    for code, dtype in enumerate(KERNEL_FLOATS, 1):
        yield f"    {{{_text(FORMAT_NAMES[code - 1])}, {CODES.index(dtype)}, 1, 0, false, false}},"
    values = CODES.index(torch.int8)
    for encoding in ENCODINGS.values():
        scales = sum(1 << CODES.index(dtype) for dtype in encoding.scales_dtypes)
        beside = (encoding.has_zero_points, encoding.has_global_scales)
        others = ", ".join(str(has).lower() for has in beside)
        name = _text(encoding.name)
        yield f"    {{{name}, {values}, {encoding.per_byte}, {scales}, {others}}},"
    yield "};"


def _fields(option: Option, options: tuple[Option, ...], router: bool) -> Iterator[str]:
    yield _text(option.flag)
    yield _text(option.attribute)
    yield "true" if router else "false"
    yield "true" if option in LAYOUT_OPTIONS else "false"
    yield "true" if option.rare else "false"
    yield "Option::kName" if option.names else f"Option::{_constant(option.type.__name__)}"
    slot = option.slot
    yield from map(str, (FLAGS_WORD, slot.bit) if isinstance(slot, Flag) else (slot.index, 0))
    yield f"{_constant(option.name)}Names" if option.names else "nullptr"
    yield str(len(option.names))
    initial = option.default if option.type is float else option.code(option.default)
    yield f"{float(initial)!r}F"
    yield _text(option.bounds.text) if option.bounds else "nullptr"
    yield _LEAST[option.bounds.text] if option.bounds else "0.0F"
    if option.only_with is None:
        yield from ("-1", "0")
        return
    name, values = option.only_with
    partner = next(row for row in options if row.name == name)
    yield str(options.index(partner))
    yield str(sum(1 << partner.code(value) for value in values))


def _constant(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def _names(constant: str, names: Iterable[str]) -> str:
    return f"inline constexpr const char* {constant}[] = {{{', '.join(map(_text, names))}}};"


if __name__ == "__main__":
    FILE.write_text(layer_table())
