"""The records and codes of the bundle format, as docs/reference/bundle.md describes them.

The writer packs them. The native library reads them: csrc/bundle/format.h has the same records,
limits and kinds of arguments, written by hand; the names of tensors and symbols reach it through
csrc/bundle/layer_table.inc, which ``make tables`` writes. What only the compiler of bundles needs
lies in ``custom_ops`` and in :mod:`trt_plugin.compiling`.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from trt_plugin.native import call_for_json

VERSION = 6
# Images, and programs in a file, begin at multiples of this.
IMAGE_ALIGNMENT = 64

FILE_MAGIC = b"MOEK\r\n\x1a\n"
#: Magic, version, programs, size, checksum, reserved.
FILE_HEADER = Struct("<8sIIQII")
#: Offset, size.
DIRECTORY_ENTRY = Struct("<QQ")

PROGRAM_MAGIC = b"MOEP\r\n\x1a\n"
#: Magic, version, architecture, size, checksum, reserved. Layer and tables follow.
PROGRAM_HEADER = Struct("<8sIIQII")
#: Offset, number of records.
TABLE_ENTRY = Struct("<QQ")

LAYER = Struct("<12I4f10I8x")
#: First and last token; first launch, launches, those of a wave, those after the waves; first
#: buffer, buffers; waves; reserved.
RANGE = Struct("<2q8I")
#: Name's offset and length; size; flags.
BUFFER = Struct("<4I")
#: Kernel; first argument, arguments; grid's x, y, z; flags; a bit for each launch to wait for.
LAUNCH = Struct("<8I")
#: Kind, index.
ARGUMENT = Struct("<2I")
#: Index, dtype, rank, swizzle; sizes; strides; box; the index's kind; reserved.
TENSOR_MAP = Struct("<4I5Q5Q5II6I")
#: Name's and description's offset and length; image's offset and size; warps, shared memory, flags,
#: registers, local memory, reserved.
KERNEL = Struct("<4I2Q6I")
#: First instruction, instructions.
EXPRESSION = Struct("<2I")
#: Opcode, reserved, value.
INSTRUCTION = Struct("<2Iq")

#: Bytes of a table's record, in the tables' order.
TABLES = {
    "ranges": RANGE.size,
    "state": BUFFER.size,
    "buffers": BUFFER.size,
    "launches": LAUNCH.size,
    "arguments": ARGUMENT.size,
    "tensor maps": TENSOR_MAP.size,
    "kernels": KERNEL.size,
    "expressions": EXPRESSION.size,
    "instructions": INSTRUCTION.size,
    "strings": 1,
    "images": 1,
}
PROGRAM_HEADER_BYTES = PROGRAM_HEADER.size + LAYER.size + len(TABLES) * TABLE_ENTRY.size

# A code is the index of its name. The library has the names of the layer's codes.
#: The operators' tensors, in the order of the launcher's C interface.
TENSORS = (
    *("x", "router_weight", "router_bias", "selection_bias"),
    *("expert_ids", "expert_weights"),
    *("w1", "w1_scales", "w1_zero_points", "w1_global_scales", "b1"),
    *("w2", "w2_scales", "w2_zero_points", "w2_global_scales", "b2"),
    "y",
)
#: Bytes of a kernel's parameter by the argument's kind.
PARAMETER_BYTES = {
    "null": 8,
    "tensor": 8,
    "workspace": 8,
    "i32": 4,
    "i64": 8,
    "tensor_map": 128,
    "state": 8,
}
#: The number of tokens, a layer's sizes, and the index of a wave.
SYMBOLS = ("T", "E", "K", "D", "H", "wave")
#: The layer's word of flags, and the bits of the flags that are not options.
FLAGS_WORD = 5
FLAGS_WITHOUT_OPTION = {"b1": 1, "b2": 2, "tf32": 64}
#: What has a zero point of its own, by code.
ZERO_POINT_KINDS = ("none", "scales", "experts")
#: Bits of the flags of a kernel, of a part of the state and of a launch.
DEPENDENT_LAUNCH = 1
ZEROED = 1
ON_SIDE = 1


class LayerRecord(NamedTuple):
    """A layer as a bundle stores it; equal records are the same layer.

    It is a :class:`custom_ops.layer_shape.LayerShape` in words, for readers without PyTorch.

    Attributes:
        operator: 0 ``dropless``, 1 ``experts``.
        tokens_dtype: The dtype of x and y.
        experts_dtype: The dtype of b1 and b2, and of both products' operands.
        routing_dtype: The dtype of router_weight, or of expert_ids.
        weights_dtype: The dtype of router_bias (0: none), or of expert_weights.
        flags: Bits, see :data:`FLAGS_WITHOUT_OPTION` and the table of options.
        activation: A code.
        scoring: A code; 0 without a router.
        experts: E.
        top_k: K.
        width: D.
        hidden: H.
        routed_scaling: Factor on the routing weights.
        alpha: Factor of clamped_swiglu, or the gate's softcap in softcapped_silu.
        limit: Limit of clamped_swiglu and clamped_silu, or up's softcap in softcapped_silu.
        norm_eps: Epsilon of rms_norm.
        group_scoring: A code; 0 without groups.
        n_group: Groups of experts.
        topk_group: Groups that a token chooses.
        selection_dtype: The dtype of selection_bias (0: none).
        resident_experts: Slots of a layer whose experts are offloaded (0: all are resident).
        weight_format: How w1 and w2 are stored; a code.
        block_rows: Rows of an expert's matrix that share a scale (0: all, or there are no scales).
        block_columns: Its columns that do.
        scales_dtype: The dtype of the scales (0: there are none).
        zero_points: 1 one for each scale, 2 one for each expert (0: there are none).
    """

    operator: int
    tokens_dtype: int
    experts_dtype: int
    routing_dtype: int
    weights_dtype: int
    flags: int
    activation: int
    scoring: int
    experts: int
    top_k: int
    width: int
    hidden: int
    routed_scaling: float
    alpha: float
    limit: float
    norm_eps: float = 0.0
    group_scoring: int = 0
    n_group: int = 0
    topk_group: int = 0
    selection_dtype: int = 0
    resident_experts: int = 0
    weight_format: int = 0
    block_rows: int = 0
    block_columns: int = 0
    scales_dtype: int = 0
    zero_points: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """The values of the symbols E, K, D and H."""
        return {"E": self.experts, "K": self.top_k, "D": self.width, "H": self.hidden}

    def to_bytes(self) -> bytes:
        """The 112 bytes."""
        return LAYER.pack(*self)

    def to_dict(self) -> dict[str, int | float | bool | str]:
        """The layer in words, without the options that do not apply to it."""
        words: dict[str, int | float | bool | str] = call_for_json(
            "layer_describe", self.to_bytes()
        )
        return words
