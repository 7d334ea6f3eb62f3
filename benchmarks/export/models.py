"""The models whose export is measured.

PyTorch and transformers are imported late: processes that time sessions import this module and
would count them among their memory.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.onnx_files import open_session, relative_error
from benchmarks.export.cases import ONE_NODE, OURS, Row
from benchmarks.export.exporters import EXPORTERS, by_ours

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


def safetensors_header(
    shapes: Mapping[str, Sequence[int]], of_bytes: Collection[str] = ()
) -> tuple[bytes, int]:
    """Returns the start of a safetensors file of bfloat16 tensors, and the bytes that follow.

    Args:
        shapes: The tensors, by name.
        of_bytes: Those that are of bytes.
    """
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        dtype, size = ("U8", 1) if name in of_bytes else ("BF16", 2)
        begin, end = end, end + size * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text, end


@dataclass
class Subject:
    """A model in memory, with an example."""

    row: Row
    model: Any  # what dynamo_moe.convert and the peers' settings are for
    module: Any  # what is exported: from named inputs to one tensor
    inputs: Callable[[int, int, int], dict[str, Any]]  # random, for a batch, a length and a seed
    dynamic: Mapping[str, Mapping[int, str]]  # names of the symbolic dimensions by input
    has_experts: bool = False  # of transformers, which only some of the peers can export
    linked: Any = None  # the model without its weights, which are in a file

    def prepare(self, exporter: str, folder: Path) -> None:
        """Does what an exporter needs and what is not timed."""
        if self.row.linked:
            import dynamo_moe

            # Stacked, as the model holds them: a file of single experts could not be linked.
            self.model.save_pretrained(folder, save_original_format=False)
            self.linked = dynamo_moe.open_checkpoint(folder)
        if exporter == ONE_NODE:
            import dynamo_moe

            dynamo_moe.convert(self.model)
        elif exporter != OURS and self.has_experts:
            self.model.set_experts_implementation("batched_mm")

    def export(self, exporter: str, folder: Path) -> Any:
        """Writes ``model.onnx``; returns our report, if it is ours."""
        inputs = self.inputs(self.row.batch, self.row.length, 0)
        dynamic = self.dynamic if self.row.dynamic else None
        path = folder / "model.onnx"
        if self.linked is not None:
            module = _logits_of(self.linked)
            return by_ours(self.linked, module, inputs, dynamic, path, link_weights=True)
        return EXPORTERS[exporter](self.model, self.module, inputs, dynamic, path)

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


def _prompt(batch: int, length: int, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


_DYNAMIC_PROMPT = {name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask")}


def _logits_of(model: Any) -> Any:
    from torch import nn

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self, input_ids: Any, attention_mask: Any, decoder_input_ids: Any = None
        ) -> Any:
            decoder = {} if decoder_input_ids is None else {"decoder_input_ids": decoder_input_ids}
            return self.model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **decoder
            ).logits

    return Logits().eval()


def _t5(row: Row, tiny: bool) -> Subject:
    """T5-small with random weights."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    width: Any = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4} if tiny else {}
    config = T5Config(**width, num_layers=row.blocks, use_cache=False)
    model: Any = T5ForConditionalGeneration(config)

    def inputs(batch: int, length: int, seed: int) -> dict[str, Any]:
        # With different lengths, a file that takes only equal ones is found.
        target = length if seed == 0 or not row.dynamic else length + 2
        decoder = _prompt(batch, target, seed + 100)["input_ids"]
        return {**_prompt(batch, length, seed), "decoder_input_ids": decoder}

    dynamic = _DYNAMIC_PROMPT | {"decoder_input_ids": {0: "batch", 1: "decoder_length"}}
    return Subject(row, model.eval(), _logits_of(model), inputs, dynamic)


def _decoder(
    row: Row, tiny: bool, *, architecture: str, intermediate: int, **options: int
) -> Subject:
    """A language model of narrow blocks: their number of nodes is what takes time."""
    width = 32 if tiny else 256
    model = causal_lm(
        architecture,
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=64 if tiny else intermediate,
        num_hidden_layers=row.blocks,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=width // 8,
        **options,
    )
    return Subject(
        row,
        model,
        _logits_of(model),
        _prompt,
        _DYNAMIC_PROMPT,
        has_experts="num_experts_per_tok" in options,
    )


def _linear(row: Row, _: bool) -> Subject:
    """Hardly a model: the time is that of everything else."""
    import torch

    layer = torch.nn.Linear(4, 4).eval()

    def inputs(batch: int, _: int, seed: int) -> dict[str, Any]:
        return {"input": torch.randn(batch, 4, generator=torch.Generator().manual_seed(seed))}

    return Subject(row, layer, layer, inputs, {"input": {0: "batch"}})


def _swin(row: Row, tiny: bool) -> Subject:
    """Swin-T with MoE layers in its last two stages, or a narrow one with a deep stage."""
    import torch

    from dynamo_moe.models import SwinMoE, SwinMoEConfig

    torch.manual_seed(0)
    options: dict[str, Any] = {}
    if row.stage is not None:
        depths = [2, 2, 2, 2]
        depths[row.stage] = max(2, row.blocks)
        options = {"embed_dim": 24, "depths": tuple(depths)}
    if tiny:
        options = {"depths": (2, 2, 2, 2), **options}
        options |= {"embed_dim": 12, "mlp_ratio": 1, "num_experts": 4}
    model = SwinMoE(SwinMoEConfig(**options)).eval()

    def inputs(batch: int, _: int, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        size = model.config.image_size
        return {"images": torch.randn(batch, 3, size, size, generator=generator)}

    return Subject(row, model, model, inputs, {"images": {0: "batch"}})


@dataclass
class Checkpoint:
    """A checkpoint of Qwen3-MoE whose file is one hole, without weights; as large as 30B-A3B."""

    row: Row
    tiny: bool
    width: int = 2048
    heads: int = 32
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def prepare(self, _: str, folder: Path) -> None:
        """Writes the checkpoint; its weights take no room on file systems that have holes."""
        width = 64 if self.tiny else self.width
        heads = 32 if self.tiny else self.heads
        config = qwen3_config(
            hidden_size=width, moe_intermediate_size=width * 3 // 8, intermediate_size=width * 3,
            num_hidden_layers=self.row.blocks, num_attention_heads=heads, num_key_value_heads=4,
            head_dim=2 * width // heads, num_experts=8 if self.tiny else 128, num_experts_per_tok=8,
            vocab_size=VOCABULARY if self.tiny else 151936, tie_word_embeddings=False,
            norm_topk_prob=True,
        )  # fmt: skip
        config.save_pretrained(folder)
        header, self.bytes = safetensors_header(tensor_shapes(config))
        path = folder / "model.safetensors"
        path.write_bytes(header)
        os.truncate(path, len(header) + self.bytes)
        allocated = path.stat().st_blocks * 512
        if allocated > len(header) + 2**20:
            raise OSError(f"{folder}: the file system has no holes, {allocated} bytes are taken")

    def export(self, _: str, folder: Path) -> Any:
        """Writes ``model.onnx``; returns our report."""
        import dynamo_moe

        task: Any = "text-generation-with-past" if self.row.cache else "text-generation"
        started = time.perf_counter()
        model = dynamo_moe.open_checkpoint(folder)
        opened = time.perf_counter()
        dynamo_moe.convert(model)
        converted = time.perf_counter()
        written = dynamo_moe.export_language_model(
            model, folder / "model.onnx", task=task, external_data=True, link_weights=True
        )
        self.seconds = {
            "opening": opened - started,
            "converting": converted - opened,
            "exporting": time.perf_counter() - converted,
        }
        return written

    def check(self, path: Path) -> dict[str, Any]:
        """Checks the file, and finds which of its weights are the checkpoint's."""
        import onnx
        import onnx_ir as ir

        onnx.checker.check_model(path)
        linked = written = 0
        for value in ir.load(path).graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and tensor.location == "model.safetensors":
                linked += tensor.nbytes
            elif tensor is not None:
                written += tensor.nbytes
        return {
            "not run": "no weights",
            "weights bytes": self.bytes,
            "linked bytes": linked,
            "other weights bytes": written,
            "seconds of the parts": self.seconds,
        }


SUBJECTS: Mapping[str, Callable[[Row, bool], Subject | Checkpoint]] = {
    "linear": _linear,
    "t5": _t5,
    "llama": partial(_decoder, architecture="Llama", intermediate=688),
    "mixtral": partial(
        _decoder, architecture="Mixtral", intermediate=512, num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen3-moe": partial(
        _decoder, architecture="Qwen3Moe", intermediate=512, moe_intermediate_size=64,
        num_experts=16, num_experts_per_tok=4,
    ),
    "swin": _swin,
    "qwen3": Checkpoint,
    "qwen3-235b": partial(Checkpoint, width=4096, heads=64),
}  # fmt: skip
