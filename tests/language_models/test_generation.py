"""``generate``: greedy text from files, whoever wrote them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import dynamo_moe
from moe_architectures import ARCHITECTURES

PROMPT = [[5, 9, 17, 33], [0, 0, 40, 7]]
MASK = [[1, 1, 1, 1], [0, 0, 1, 1]]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = ARCHITECTURES["mixtral"].build()
    dynamo_moe.convert(model)
    path = tmp_path_factory.mktemp("mixtral") / "model.onnx"
    dynamo_moe.export_language_model(model, path)
    return model, path


def test_a_file_without_a_cache(mixtral: tuple[Any, Path], tmp_path: Path) -> None:
    model, path = mixtral
    without = tmp_path / "without.onnx"
    dynamo_moe.export_language_model(model, without, task="text-generation")
    text = dynamo_moe.generate(without, PROMPT, MASK, max_new_tokens=6)
    np.testing.assert_array_equal(text, dynamo_moe.generate(path, PROMPT, MASK, max_new_tokens=6))


def test_a_row_ends(mixtral: tuple[Any, Path]) -> None:
    model, path = mixtral
    whole = dynamo_moe.generate(path, PROMPT, MASK, max_new_tokens=8)
    end = int(whole[0, 6])  # The third new token of one row.
    model.generation_config.eos_token_id = end
    expected = model.generate(
        torch.tensor(PROMPT),
        attention_mask=torch.tensor(MASK),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=3,
    )
    text = dynamo_moe.generate(
        path, PROMPT, MASK, max_new_tokens=8, eos_token_id=[end], pad_token_id=3
    )
    np.testing.assert_array_equal(text, expected)
    alone = dynamo_moe.generate(path, PROMPT[:1], max_new_tokens=8, eos_token_id=end)
    assert alone.shape[1] <= 7
    assert alone[0, -1] == end


def test_position_ids_are_given_to_files_that_take_them(
    mixtral: tuple[Any, Path], tmp_path: Path
) -> None:
    """As files of other exporters do."""
    _, path = mixtral
    file = onnx.load(path)
    positions = onnx.helper.make_tensor_value_info(
        "position_ids", onnx.TensorProto.INT64, ["batch", "sequence"]
    )
    file.graph.input.append(positions)
    onnx.save(file, tmp_path / "positions.onnx")
    text = dynamo_moe.generate(tmp_path / "positions.onnx", PROMPT, MASK, max_new_tokens=3)
    np.testing.assert_array_equal(text, dynamo_moe.generate(path, PROMPT, MASK, max_new_tokens=3))


@pytest.mark.parametrize(
    ("ids", "mask", "options", "reason"),
    [
        ([5, 9], None, {}, r"integers \[B, L\] of at least one token, got int64 \[2\]"),
        ([[0.5]], None, {}, "got float64"),
        (np.zeros((2, 0), np.int64), None, {}, r"at least one token, got int64 \[2, 0\]"),
        ([[5, 9]], [[1]], {}, r"shape \[1, 2\], got \[1, 1\]"),
        ([[5, 9], [5, 9]], [[1, 1], [1, 0]], {}, "on the left: row 1 of attention_mask has 0"),
        (
            [[5, 9]],
            None,
            {"max_new_tokens": 0},
            "max_new_tokens must be an integer of at least 1, got 0",
        ),
    ],
)
def test_prompts_are_checked(
    ids: Any, mask: Any, options: dict[str, int], reason: str, mixtral: tuple[Any, Path]
) -> None:
    with pytest.raises(ValueError, match=reason):
        dynamo_moe.generate(mixtral[1], ids, mask, **({"max_new_tokens": 1} | options))


def test_a_file_that_is_no_language_model(tmp_path: Path) -> None:
    path = tmp_path / "linear.onnx"
    dynamo_moe.export(torch.nn.Linear(4, 3), torch.randn(2, 4), path, input_names=["pixels"])
    with pytest.raises(ValueError, match=r"must have the inputs input_ids, .* it has pixels and"):
        dynamo_moe.generate(path, PROMPT, max_new_tokens=1)


def test_an_input_without_its_output(mixtral: tuple[Any, Path], tmp_path: Path) -> None:
    file = onnx.load(mixtral[1])
    del file.graph.output[-1]
    onnx.save(file, tmp_path / "short.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "short.onnx")
    with pytest.raises(ValueError, match=r"no output 'present\.1\.value'"):
        dynamo_moe.generate(session, PROMPT, max_new_tokens=1)


def test_it_needs_neither_onnx_nor_transformers(mixtral: tuple[Any, Path]) -> None:
    code = (
        "import sys; from dynamo_moe.generation import generate; "
        f"generate({str(mixtral[1])!r}, [[5]], max_new_tokens=2); "
        "assert not {'onnx', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
