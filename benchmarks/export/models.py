"""The models whose export is measured.

PyTorch and transformers are imported late: the process that starts the others needs neither.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.common.onnx_files import open_session, relative_error
from benchmarks.export.cases import DYNAMO, ONE_NODE, TORCHSCRIPT, TRANSFORMERS, Row
from benchmarks.export.exporters import EXPORTERS

__all__ = [
    "SUBJECTS",
    "Subject",
    "causal_lm",
    "qwen3_config",
    "safetensors_header",
    "tensor_shapes",
]

VOCABULARY = 1000


def causal_lm(architecture: str, **sizes: Any) -> Any:
    """Returns a language model of transformers with random weights, the same every time."""
    import torch
    import transformers

    config = getattr(transformers, f"{architecture}Config")(use_cache=False, **sizes)
    torch.manual_seed(0)
    return getattr(transformers, f"{architecture}ForCausalLM")(config).eval()


def qwen3_config(**sizes: Any) -> Any:
    """Returns the configuration of a Qwen3-MoE model in bfloat16."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**sizes, dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"])


def tensor_shapes(config: Any) -> dict[str, list[int]]:
    """Returns the shapes of a Qwen3-MoE model's parameters, without making any."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def safetensors_header(shapes: Mapping[str, Sequence[int]]) -> tuple[bytes, int]:
    """Returns the start of a safetensors file of bfloat16 tensors, and the bytes that follow."""
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text, end


class Subject:
    """A model in memory, with an example.

    Attributes:
        model: The model; :func:`dynamo_moe.convert` and the peers' settings are for it.
        module: What is exported: from named inputs to one tensor.
        dynamic: Names of the symbolic dimensions by input.
    """

    model: Any = None
    module: Any = None
    dynamic: ClassVar[Mapping[str, Mapping[int, str]]] = {}

    def __init__(self, row: Row, tiny: bool) -> None:
        self.row = row
        self.build(tiny)

    def build(self, tiny: bool) -> None:
        """Sets the attributes."""
        raise NotImplementedError

    def inputs(self, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
        """Random inputs by name."""
        raise NotImplementedError

    def prepare(self, exporter: str, folder: Path) -> None:
        """Does what an exporter needs and what is not timed."""
        import dynamo_moe

        del folder
        if exporter == ONE_NODE:
            dynamo_moe.convert(self.model)

    def export(self, exporter: str, folder: Path) -> None:
        """Writes ``model.onnx``."""
        inputs = self.inputs(self.row.batch, self.row.length)
        dynamic = self.dynamic if self.row.dynamic else None
        EXPORTERS[exporter](self.model, self.module, inputs, dynamic, folder / "model.onnx")

    def check(self, path: Path) -> dict[str, Any]:
        """Compares the file with PyTorch."""
        import torch

        session = open_session(path)
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

    dynamic: ClassVar = {
        "input_ids": {0: "batch", 1: "length"},
        "attention_mask": {0: "batch", 1: "length"},
        "decoder_input_ids": {0: "batch", 1: "decoder_length"},
    }

    def build(self, tiny: bool) -> None:
        import torch
        from torch import nn
        from transformers import T5Config, T5ForConditionalGeneration

        torch.manual_seed(0)
        width: Any = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4} if tiny else {}
        config = T5Config(**width, num_layers=self.row.blocks, use_cache=False)
        model: Any = T5ForConditionalGeneration(config)
        self.model = model.eval()

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
        # Different lengths, where they may differ, find a file that takes only equal ones.
        target = length if seed == 0 or not self.row.dynamic else length + 2
        decoder = _prompt(batch, target, seed + 100)
        return {**_prompt(batch, length, seed), "decoder_input_ids": decoder["input_ids"]}


class Llama(Subject):
    """Narrow blocks: their number of nodes is what takes time."""

    dynamic: ClassVar = {
        name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask")
    }
    architecture = "Llama"
    intermediate = 688
    options: ClassVar[Mapping[str, int]] = {}

    def build(self, tiny: bool) -> None:
        from torch import nn

        width = 32 if tiny else 256
        self.model = causal_lm(
            self.architecture,
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=64 if tiny else self.intermediate,
            num_hidden_layers=self.row.blocks,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=width // 8,
            **self.options,
        )

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
        return _prompt(batch, length, seed)


class Mixtral(Llama):
    """The same blocks with 8 experts each, of which 2 are chosen."""

    architecture = "Mixtral"
    intermediate = 512
    options: ClassVar = {"num_local_experts": 8, "num_experts_per_tok": 2}

    def prepare(self, exporter: str, folder: Path) -> None:
        super().prepare(exporter, folder)
        if exporter in {DYNAMO, TORCHSCRIPT, TRANSFORMERS}:
            self.model.set_experts_implementation("batched_mm")


class Swin(Subject):
    """Swin-T with MoE layers in its last two stages."""

    dynamic: ClassVar = {"images": {0: "batch"}}

    def build(self, tiny: bool) -> None:
        import torch

        from dynamo_moe.models import SwinMoE, SwinMoEConfig

        torch.manual_seed(0)
        narrow: Any = {"embed_dim": 12, "depths": (2, 2, 2, 2), "mlp_ratio": 1, "num_experts": 4}
        config = SwinMoEConfig(**narrow) if tiny else SwinMoEConfig()
        self.model = self.module = SwinMoE(config).eval()

    def inputs(self, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
        import torch

        del length
        generator = torch.Generator().manual_seed(seed)
        size = self.model.config.image_size
        return {"images": torch.randn(batch, 3, size, size, generator=generator)}


class Checkpoint(Subject):
    """A checkpoint of the shape of Qwen3-30B-A3B whose file is one hole, without weights."""

    def build(self, tiny: bool) -> None:
        width = 64 if tiny else 2048
        self.config = qwen3_config(
            hidden_size=width, moe_intermediate_size=width * 3 // 8, intermediate_size=width * 3,
            num_hidden_layers=self.row.blocks, num_attention_heads=32, num_key_value_heads=4,
            head_dim=4 if tiny else 128, num_experts=8 if tiny else 128, num_experts_per_tok=8,
            vocab_size=VOCABULARY if tiny else 151936, tie_word_embeddings=False,
            norm_topk_prob=True,
        )  # fmt: skip
        self.bytes = 0
        self.seconds: dict[str, float] = {}

    def prepare(self, exporter: str, folder: Path) -> None:
        """Writes the checkpoint; its weights take no room on file systems that have holes."""
        self.config.save_pretrained(folder)
        header, self.bytes = safetensors_header(tensor_shapes(self.config))
        path = folder / "model.safetensors"
        path.write_bytes(header)
        os.truncate(path, len(header) + self.bytes)
        allocated = path.stat().st_blocks * 512
        if allocated > len(header) + 2**20:
            raise OSError(f"{folder}: the file system has no holes, {allocated} bytes are taken")

    def export(self, exporter: str, folder: Path) -> None:
        import dynamo_moe

        task: Any = "text-generation-with-past" if self.row.cache else "text-generation"
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

    def check(self, path: Path) -> dict[str, Any]:
        import onnx
        import onnx_ir as ir

        onnx.checker.check_model(path)
        linked = written = 0
        for tensor in ir.load(path).graph.initializers.values():
            if isinstance(tensor.const_value, ir.ExternalTensor) and (
                tensor.const_value.location == "model.safetensors"
            ):
                linked += tensor.const_value.nbytes
            elif tensor.const_value is not None:
                written += tensor.const_value.nbytes
        return {
            "not run": "no weights",
            "weights bytes": self.bytes,
            "linked bytes": linked,
            "other weights bytes": written,
            "seconds of the parts": self.seconds,
        }


SUBJECTS: Mapping[str, type[Subject]] = {
    "t5": T5,
    "llama": Llama,
    "mixtral": Mixtral,
    "swin": Swin,
    "qwen3": Checkpoint,
}


def _prompt(batch: int, length: int, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
