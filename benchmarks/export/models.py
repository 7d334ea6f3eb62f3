"""The models of the export benchmark."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks._export_cases import DYNAMO, ONE_NODE, TORCHSCRIPT, TRANSFORMERS, Row
from benchmarks._export_peers import EXPORTERS

VOCABULARY = 1000


class Subject:
    """A model in memory, with an example.

    Attributes:
        model: The model; :func:`dynamo_moe.convert` and the peers' settings are for it.
        module: What is exported: from named inputs to one tensor.
        dynamic: Names of the symbolic dimensions by input.
    """

    model: Any
    module: Any
    dynamic: Mapping[str, Mapping[int, str]]

    def __init__(self, row: Row, tiny: bool) -> None:
        import torch

        torch.manual_seed(0)
        self.row = row
        self.build(tiny)

    def build(self, tiny: bool) -> None:
        """Sets the attributes."""
        raise NotImplementedError

    def inputs(self, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
        """Random inputs by name."""
        raise NotImplementedError

    def prepare(self, exporter: str) -> None:
        """What an exporter needs and what is not timed."""
        import dynamo_moe

        if exporter == ONE_NODE:
            dynamo_moe.convert(self.model)

    def export(self, exporter: str, folder: Path) -> None:
        """Writes ``model.onnx``."""
        inputs = self.inputs(self.row.batch, self.row.length)
        dynamic = self.dynamic if self.row.dynamic else None
        EXPORTERS[exporter](self, inputs, dynamic, folder / "model.onnx")

    def check(self, path: Path) -> dict[str, Any]:
        """Compares the file with PyTorch."""
        import onnxruntime
        import torch

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(path, options)
        names = [value.name for value in session.get_outputs()]
        output = "logits" if "logits" in names else names[0]
        wanted = {value.name for value in session.get_inputs()}
        sizes = [(3, 7), (1, 21)] if self.row.dynamic else [(self.row.batch, self.row.length)]
        errors = []
        for seed, (batch, length) in enumerate(sizes, start=1):
            inputs = self.inputs(batch, length, seed)
            with torch.no_grad():
                expected = self.module(**inputs).numpy()
            feeds = {name: value.numpy() for name, value in inputs.items() if name in wanted}
            errors.append(relative_error(session.run([output], feeds)[0], expected))
        return {"max relative error": max(errors)}


class T5(Subject):
    """T5-small with random weights."""

    dynamic = MappingProxyType(
        {
            "input_ids": {0: "batch", 1: "length"},
            "attention_mask": {0: "batch", 1: "length"},
            "decoder_input_ids": {0: "batch", 1: "decoder_length"},
        }
    )

    def build(self, tiny: bool) -> None:
        from torch import nn
        from transformers import T5Config, T5ForConditionalGeneration

        width = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4} if tiny else {}
        config = T5Config(**width, num_layers=self.row.blocks, use_cache=False)
        self.model = T5ForConditionalGeneration(config).eval()

        class Logits(nn.Module):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.model = model

            def forward(self, input_ids: Any, attention_mask: Any, decoder_input_ids: Any) -> Any:
                return self.model(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    decoder_input_ids=decoder_input_ids,
                    use_cache=False,
                ).logits

        self.module = Logits(self.model).eval()

    def inputs(self, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
        # The lengths differ where they may: a file that takes only equal ones is found out.
        target = length if seed == 0 or not self.row.dynamic else length + 2
        ids, others = _tokens(batch, length, seed), _tokens(batch, target, seed + 100)
        return {"input_ids": ids, "attention_mask": _mask(ids), "decoder_input_ids": others}


class Llama(Subject):
    """Narrow blocks: what is exported is their number of nodes."""

    dynamic = MappingProxyType(
        {"input_ids": {0: "batch", 1: "length"}, "attention_mask": {0: "batch", 1: "length"}}
    )
    architecture = "Llama"
    intermediate = 688
    options: Mapping[str, int] = MappingProxyType({})

    def build(self, tiny: bool) -> None:
        import transformers
        from torch import nn

        width = 32 if tiny else 256
        config = getattr(transformers, f"{self.architecture}Config")(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=64 if tiny else self.intermediate,
            num_hidden_layers=self.row.blocks,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=width // 8,
            use_cache=False,
            **self.options,
        )
        self.model = getattr(transformers, f"{self.architecture}ForCausalLM")(config).eval()

        class Logits(nn.Module):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.model = model

            def forward(self, input_ids: Any, attention_mask: Any) -> Any:
                return self.model(
                    input_ids=input_ids, attention_mask=attention_mask, use_cache=False
                ).logits

        self.module = Logits(self.model).eval()

    def inputs(self, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
        ids = _tokens(batch, length, seed)
        return {"input_ids": ids, "attention_mask": _mask(ids)}


class Mixtral(Llama):
    """The same blocks with 8 experts each, of which 2 are chosen."""

    architecture = "Mixtral"
    intermediate = 512
    options = MappingProxyType({"num_local_experts": 8, "num_experts_per_tok": 2})

    def prepare(self, exporter: str) -> None:
        super().prepare(exporter)
        if exporter in {DYNAMO, TORCHSCRIPT, TRANSFORMERS}:
            self.model.set_experts_implementation("batched_mm")


class Swin(Subject):
    """Swin-T with MoE layers in its last two stages."""

    dynamic = MappingProxyType({"images": {0: "batch"}})

    def build(self, tiny: bool) -> None:
        from dynamo_moe.models import SwinMoE, SwinMoEConfig

        narrow = {"embed_dim": 12, "depths": (2, 2, 2, 2), "mlp_ratio": 1, "num_experts": 4}
        config = SwinMoEConfig(**narrow) if tiny else SwinMoEConfig()
        self.model = self.module = SwinMoE(config).eval()

    def inputs(self, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
        import torch

        del length
        generator = torch.Generator().manual_seed(seed)
        size = self.model.config.image_size
        return {"images": torch.randn(batch, 3, size, size, generator=generator)}


class Checkpoint(Subject):
    """A checkpoint of the shape of Qwen3-30B-A3B whose file is one hole."""

    model = module = None
    dynamic = MappingProxyType({})

    def build(self, tiny: bool) -> None:
        from transformers import Qwen3MoeConfig

        width = 64 if tiny else 2048
        self.config = Qwen3MoeConfig(
            hidden_size=width, moe_intermediate_size=width * 3 // 8, intermediate_size=width * 3,
            num_hidden_layers=self.row.blocks, num_attention_heads=32, num_key_value_heads=4,
            head_dim=4 if tiny else 128, num_experts=8 if tiny else 128, num_experts_per_tok=8,
            vocab_size=VOCABULARY if tiny else 151936, tie_word_embeddings=False,
            norm_topk_prob=True, dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"],
        )  # fmt: skip
        self.bytes = 0
        self.seconds: dict[str, float] = {}

    def inputs(self, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
        raise NotImplementedError("the model cannot be run")

    def export(self, exporter: str, folder: Path) -> None:
        import dynamo_moe

        task = "text-generation-with-past" if self.row.cache else "text-generation"
        started = time.perf_counter()
        model = dynamo_moe.open_checkpoint(folder)
        opened = time.perf_counter()
        dynamo_moe.convert(model)
        converted = time.perf_counter()
        dynamo_moe.export_language_model(
            model, folder / "model.onnx", task=task, external_data=True, link_weights=True
        )
        self.seconds = {
            "opening": opened - started,
            "converting": converted - opened,
            "exporting": time.perf_counter() - converted,
        }

    def write(self, folder: Path) -> None:
        """Writes the checkpoint; its weights take no room on file systems that have holes."""
        import torch
        from transformers import Qwen3MoeForCausalLM

        self.config.save_pretrained(folder)
        with torch.device("meta"):
            parameters = dict(Qwen3MoeForCausalLM(self.config).named_parameters())
        header, end = safetensors_header({name: tuple(p.shape) for name, p in parameters.items()})
        path = folder / "model.safetensors"
        path.write_bytes(header)
        os.truncate(path, len(header) + end)
        self.bytes = end
        allocated = path.stat().st_blocks * 512
        if allocated > len(header) + 2**20:
            raise OSError(f"{folder}: the file system has no holes, {allocated} bytes are taken")

    def check(self, path: Path) -> dict[str, Any]:
        import onnx

        onnx.checker.check_model(path)
        model = onnx.load(path, load_external_data=False)
        linked = written = 0
        for tensor in model.graph.initializer:
            places = {entry.key: entry.value for entry in tensor.external_data}
            if places.get("location") == "model.safetensors":
                linked += int(places["length"])
            else:
                written += math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(
                    tensor.data_type
                ).itemsize  # fmt: skip
        return {
            "not run": "no weights",
            "weights bytes": self.bytes,
            "linked bytes": linked,
            "other weights bytes": written,
            "seconds of the parts": self.seconds,
        }


def safetensors_header(shapes: Mapping[str, Sequence[int]]) -> tuple[bytes, int]:
    """Returns the start of a safetensors file of bfloat16 tensors, and the bytes that follow."""
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text, end


SUBJECTS: Mapping[str, type[Subject]] = {
    "t5": T5,
    "llama": Llama,
    "mixtral": Mixtral,
    "swin": Swin,
    "qwen3": Checkpoint,
}


def _tokens(batch: int, length: int, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def _mask(ids: Any) -> Any:
    import torch

    return torch.ones_like(ids)


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, over the largest value."""
    if found.shape != wanted.shape:
        raise ValueError(f"the result is {found.shape}, not {wanted.shape}")
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())
