"""Names of operators that mean something already, to ONNX or to a runtime."""

from __future__ import annotations

import re

import onnx.defs

from dynamo_moe.private import OpOverload

__all__ = ["OWN_DOMAIN", "check_name", "is_own_domain"]

OWN_DOMAIN = "moe"
"""The domain of the project's own operators, in PyTorch and in ONNX."""

_DOMAIN = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_OP_TYPE = re.compile(r"[A-Za-z_]\w*", re.ASCII)

# Domains whose operators a standard or a runtime defines.
_RESERVED_DOMAINS = ("ai.onnx", "com.microsoft", "com.ms", "org.pytorch", "pkg")

# Plugins that come with TensorRT 10: the table of plugin/README.md in NVIDIA/TensorRT, and a few
# names that it leaves out.
_TENSORRT_PLUGINS = frozenset(
    {
        *("BatchedNMS_TRT", "BatchedNMSDynamic_TRT", "BatchTilePlugin_TRT", "Clip_TRT"),
        *("CoordConvAC", "CropAndResize", "CropAndResizeDynamic"),
        *("CustomEmbLayerNormPluginDynamic", "CustomFCPluginDynamic", "CustomGeluPluginDynamic"),
        *("CustomQKVToContextPluginDynamic", "CustomSkipLayerNormPluginDynamic"),
        *("DecodeBbox3DPlugin", "DetectionLayer_TRT", "DisentangledAttention_TRT"),
        *("EfficientNMS_Explicit_TF_TRT", "EfficientNMS_Implicit_TF_TRT", "EfficientNMS_ONNX_TRT"),
        *("EfficientNMS_TRT", "FlattenConcat_TRT", "GenerateDetection_TRT", "GridAnchor_TRT"),
        *("GridAnchorRect_TRT", "GroupNormalizationPlugin", "InstanceNormalization_TRT"),
        *("LReLU_TRT", "ModulatedDeformConv2d"),
        *("MultilevelCropAndResize_TRT", "MultilevelProposeROI_TRT"),
        *("MultiscaleDeformableAttnPlugin_TRT", "NMS_TRT", "NMSDynamic_TRT", "Normalize_TRT"),
        *("PillarScatterPlugin", "PriorBox_TRT", "Proposal", "ProposalDynamic"),
        *("ProposalLayer_TRT", "PyramidROIAlign_TRT", "Region_TRT", "Reorg_TRT"),
        *("ResizeNearest_TRT", "ROIAlign_TRT", "RPROI_TRT", "SingleStepLSTMPlugin"),
        *("SpecialSlice_TRT", "Split", "VoxelGeneratorPlugin"),
    }
)


def is_own_domain(domain: str) -> bool:
    """Whether a domain is the project's own: ``moe``, or ``moe.`` and a configuration's name."""
    return domain.split(".", maxsplit=1)[0] == OWN_DOMAIN


def check_name(torch_op: OpOverload, domain: str, op_type: str) -> None:
    """Checks that a node's name is free.

    Raises:
        ValueError: If it is none, or a standard or a runtime has given it a meaning.
    """
    if not _DOMAIN.fullmatch(domain):
        raise ValueError(
            f"domain must be letters, digits, '_', '-' and '.', and not empty; got {domain!r}"
        )
    if not _OP_TYPE.fullmatch(op_type):
        raise ValueError(f"op_type must be letters, digits and '_', got {op_type!r}")
    for reserved in _RESERVED_DOMAINS:
        if domain == reserved or domain.startswith(f"{reserved}."):
            raise ValueError(f"domain {domain!r} is not yours to extend: choose a name of your own")
    if is_own_domain(domain) and torch_op.namespace != OWN_DOMAIN:
        raise ValueError(f"domain {domain!r} is dynamo_moe's own: choose another name")
    if onnx.defs.has(op_type):
        raise ValueError(
            f"{op_type} is a standard ONNX operator, and TensorRT's parser ignores the domain: "
            f"choose another op_type than {domain}::{op_type}"
        )
    if op_type in _TENSORRT_PLUGINS:
        raise ValueError(
            f"{op_type} is a plugin of TensorRT's own: choose another op_type than "
            f"{domain}::{op_type}"
        )
