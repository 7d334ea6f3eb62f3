"""Layers whose experts lie in files, as nodes, and bundles of their kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from custom_ops.kernels.plan import plan
from interpreted_gpu import uncompiled_program
from kernel_runs import layer_of
from moe_cases import make_case
from plugin_host import NAMES, RUNTIME, attributes_of, describe, filled, inputs_of
from standin_gpu import StandinGpu
from trt_plugin.bundle import Bundle
from weights_files import save_experts

#: Of the plugin.
VERSION = "2"
EXPERTS = 6


def small_case(op: str = "experts", tokens: int = 5, seed: int = 0, **options):
    sizes = {"width": 16, "hidden": 24, "experts": EXPERTS}
    return filled(make_case(op, (tokens,), seed=seed, **sizes | options))


class Offloaded:
    """A case's layer with its experts in a file, and a bundle of its kernels."""

    def __init__(
        self, driver, folder: Path, case, resident: int = 2, multiple: int = 16, **attributes
    ) -> None:
        self.case = case
        self.gpu = StandinGpu(driver)
        self.file = folder / "model.safetensors"
        self.sources = save_experts(self.file, case, multiple=multiple)
        layer = replace(layer_of(case), resident_experts=resident)
        planned = plan(layer, self.gpu.architecture)
        program = uncompiled_program(planned)
        self.gpu.interpreted.register(planned, program)
        for kernel in program.kernels:
            driver.add_image(kernel.image)
        bundle = folder / "model.moek"
        bundle.write_bytes(Bundle((program,)).data)
        self.attributes = attributes_of(case) | {
            "kernels": str(bundle),
            "resident_experts": resident,
            "w1_source": self.sources[0],
            "w2_source": self.sources[1],
            **attributes,
        }

    def inputs(self, case=None) -> list[torch.Tensor]:
        """The node's inputs: placeholders stand for the weights."""
        case = case or self.case
        weights = {id(case.arguments[name]) for name in ("w1", "w2")}
        return [
            torch.zeros(1, dtype=each.dtype) if id(each) in weights else each
            for each in inputs_of(case)
        ]

    def engine_fields(self, tensorrt):
        """What an engine stores for the layer, and the workspace's size."""
        plugin = tensorrt.create(
            NAMES[self.case.op], self.attributes, layer="layer", version=VERSION
        )
        assert plugin is not None, tensorrt.messages()
        described = [describe(each) for each in self.inputs()]
        output = described[0]
        assert plugin.supports_all(described, output)
        assert plugin.configure(described, output) == 0, tensorrt.messages()
        size = plugin.workspace(described, output)
        fields = {
            name: replace(field, data=bytes(field.data))
            for name, field in plugin.serialize().items()
        }
        plugin.destroy()
        return fields, size

    def engine(self, tensorrt):
        """The layer in an engine, and the workspace's size."""
        fields, size = self.engine_fields(tensorrt)
        plugin = tensorrt.create(NAMES[self.case.op], fields, RUNTIME, "layer", VERSION)
        assert plugin is not None, tensorrt.messages()
        return plugin, size
