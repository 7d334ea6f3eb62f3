"""examples/run_engine upon stand-ins of TensorRT's and CUDA's runtimes: text, and measuring."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import dynamo_moe
from example_program import (
    EXAMPLE,
    Profile,
    Ran,
    compile_program,
    run_program,
    start_program,
    write_engine,
)
from moe_architectures import ARCHITECTURES
from nccl_standin import nccl_standin

PROMPTS = ("--prompt", "5,9,17,33", "--prompt", "40,7")
IDS, MASK = [[5, 9, 17, 33], [0, 0, 40, 7]], [[1, 1, 1, 1], [0, 0, 1, 1]]
STEPS = 12


BUILDING = runpy.run_path(str(EXAMPLE / "build_text_engine.py"))


def two(model: Path) -> list[Profile]:
    """Returns a profile for prompts of up to 16 tokens, and one for each further token."""
    profiles: list[Profile] = BUILDING["profiles"](str(model), batch=4, prompt=16, length=65)
    return profiles


def one(model: Path) -> list[Profile]:
    """Returns a profile for both."""
    tokens = {"sequence": (1, 1, 16), "past": (0, 32, 64), "total_sequence": (1, 33, 65)}
    return [BUILDING["shapes"](str(model), batch=(1, 2, 4), **tokens)]


@dataclass
class Program:
    """The program, with engines that it can run."""

    library: Path
    folder: Path

    def __call__(self, model: Path, profiles: Sequence[Profile], *arguments: str) -> Ran:
        engine = self.folder / f"{model.stem}.engine"
        write_engine(model, engine, profiles)
        return run_program(self.library, model, engine, *arguments)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    folder = tmp_path_factory.mktemp("program")
    compile_program(folder / "librun_engine.so")
    return Program(folder / "librun_engine.so", folder)


def exported(
    folder: Path,
    name: str,
    export: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    model: Any = ARCHITECTURES[name].build(**config).to(dtype)
    dynamo_moe.convert(model)
    dynamo_moe.export_language_model(model, folder / f"{name}.onnx", **export)
    return folder / f"{name}.onnx"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("mixtral"), "mixtral", {})


def expected(model: Path, **options: Any) -> list[list[int]]:
    text = dynamo_moe.generate(model, IDS, MASK, max_new_tokens=STEPS, **options)
    return [row[len(IDS[0]) :] for row in text.tolist()]


@pytest.mark.every
def test_text(program: Program, mixtral: Path) -> None:
    ran = program(mixtral, two(mixtral), *PROMPTS, "--steps", str(STEPS))
    assert ran.code == 0, ran.error
    assert ran.rows == expected(mixtral)
    # The last token's logits of each row, and nothing of the cache.
    assert ran.report["bytes_to_host"] == STEPS * 2 * 64 * 4
    assert (ran.report["profile_changes"], ran.report["allocations_left"]) == (2, 0)
    # One GPU alone.
    assert ran.report["ranks"] == 0
    assert f"({STEPS - 1} runs)" in ran.out


@pytest.mark.parametrize(
    ("name", "export", "config"),
    [
        # Two layers with states of convolutions, one with keys and values.
        ("lfm2_moe", {}, {}),
        # A layer that keeps the last five tokens alone.
        ("gpt_oss", {"bounded_windows": True}, {"sliding_window": 6}),
        # Keys, values and logits of two bytes.
        pytest.param("mixtral", {}, {"dtype": torch.float16}, marks=pytest.mark.every),
        # Buffers of a fixed length, which are updated in place, beside states, which are not.
        ("lfm2_moe", {"cache_length": 24}, {}),
        # Nothing is kept.
        pytest.param("mixtral", {"task": "text-generation"}, {}, marks=pytest.mark.every),
    ],
)
@pytest.mark.first(1)
def test_whatever_is_kept(
    program: Program,
    tmp_path: Path,
    name: str,
    export: dict[str, Any],
    config: dict[str, Any],
) -> None:
    model = exported(tmp_path, name, export, **config)
    ran = program(model, one(model), *PROMPTS, "--steps", str(STEPS))
    assert ran.code == 0, ran.error
    assert ran.rows == expected(model)
    assert (ran.report["profile_changes"], ran.report["allocations_left"]) == (1, 0)


def test_rows_end(program: Program, mixtral: Path) -> None:
    first, second = expected(mixtral)
    ends = (first[2], second[4])
    ran = program(mixtral, two(mixtral), *PROMPTS, "--end", str(ends[0]), "--end", str(ends[1]))
    until = [min(row.index(end) for end in ends if end in row) + 1 for row in (first, second)]
    assert ran.rows == [first[: until[0]], second[: until[1]]]
    assert f"({max(until) - 1} runs)" in ran.out


def test_one_token(program: Program, mixtral: Path) -> None:
    ran = program(mixtral, two(mixtral), *PROMPTS, "--steps", "1")
    assert ran.rows == [row[:1] for row in expected(mixtral)]
    assert "runs" not in ran.out


def test_a_text_that_is_too_long(program: Program, mixtral: Path) -> None:
    """It is refused before the first token is computed."""
    ran = program(mixtral, two(mixtral), *PROMPTS, "--steps", "70")
    assert (ran.code, ran.report["bytes_to_host"]) == (2, 0)
    assert ran.error.splitlines()[-1] == (
        "error: the engine was not built for this text: "
        "attention_mask [2, 73] is not in profile 0, [1, 1] to [4, 16]; "
        "attention_mask [2, 73] is not in profile 1, [1, 2] to [4, 65]"
    )


def test_a_text_beyond_the_room_of_its_cache(program: Program, tmp_path: Path) -> None:
    model = exported(tmp_path, "mixtral", {"cache_length": 24})
    ran = program(model, one(model), *PROMPTS, "--steps", "22")
    assert ran.code == 2
    assert "the engine's cache has room for 24 tokens, but the text may have 25" in ran.error


def test_a_step_that_no_profile_has(program: Program, mixtral: Path) -> None:
    ran = program(mixtral, two(mixtral)[:1], *PROMPTS, "--steps", "5")
    assert ran.code == 2
    assert "past_key_values.0.key [2, 2, 4, 8] is not in profile 0" in ran.error


def small(path: Path, inputs: dict[str, list[Any]], outputs: dict[str, list[Any]]) -> Path:
    """Writes a file whose outputs are the sum of its inputs."""
    nodes = [helper.make_node("Sum", list(inputs), [name]) for name in outputs]
    values = [
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in each.items()
        ]
        for each in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "small", *values)
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    return path


SHAPE = ["batch", 1, 3]


def rows(model: Path) -> list[Profile]:
    return [BUILDING["shapes"](str(model), batch=(1, 2, 4))]


@pytest.mark.parametrize(
    ("inputs", "outputs", "error"),
    [
        (["x"], ["logits"], "--prompt cannot run an engine with the input x"),
        (["input_ids"], ["logits", "y"], "--prompt cannot run an engine with the output y"),
        (["input_ids"], ["logits", "present.0.key"], "with the output present.0.key"),
        (["position_ids"], ["logits"], "needs an engine with the input input_ids"),
        (
            ["input_ids", "past_key_values.0.key"],
            ["logits"],
            "has the input past_key_values.0.key, but no output present.0.key of the same dtype",
        ),
        (["input_ids"], ["logits"], "ids and masks are int64 or int32, got float32"),
    ],
)
def test_engines_that_write_no_text(
    program: Program, tmp_path: Path, inputs: list[str], outputs: list[str], error: str
) -> None:
    model = small(tmp_path / "m.onnx", dict.fromkeys(inputs, SHAPE), dict.fromkeys(outputs, SHAPE))
    ran = program(model, rows(model), "--prompt", "1")
    assert ran.code != 0
    assert error in ran.error


def test_measuring(program: Program, tmp_path: Path) -> None:
    model = small(tmp_path / "m.onnx", {"x": SHAPE, "y": SHAPE}, {"z": SHAPE})
    x, z = tmp_path / "x", tmp_path / "z"
    np.array([1, 2, 3, 6, 5, 4], np.float32).tofile(x)
    np.array([10, 0, 0, 0, 0, 0], np.float32).tofile(tmp_path / "y")
    given = ("--input", f"x={x}", "--input", f"y={tmp_path / 'y'}", "--output", f"z={z}")
    ran = program(
        model,
        rows(model),
        *given,
        "--batch",
        "2",
        "--cuda-graph",
        "--iterations",
        "3",
        "--top-k",
        "2",
    )
    assert ran.code == 0, ran.error
    assert ran.out.splitlines()[:4] == [
        "input   x float32 [2, 1, 3]",
        "input   y float32 [2, 1, 3]",
        "output  z float32 [2, 1, 3]",
        "latency     mean 1.000 ms, median 1.000 ms, p99 1.000 ms (3 runs, CUDA graph)",
    ]
    assert ran.out.splitlines()[5:] == ["z row 0:  0 11  2 3", "z row 1:  0 6  1 5"]
    assert np.fromfile(z, np.float32).tolist() == [11, 2, 3, 6, 5, 4]
    assert ran.report["allocations_left"] == 0


def test_measuring_what_is_updated_in_place(program: Program, tmp_path: Path) -> None:
    model = exported(tmp_path, "mixtral", {"cache_length": 24})
    cache = tmp_path / "cache"
    given = ("--shape", "input_ids=2x1", "--batch", "2", "--output", f"present.0.key={cache}")
    ran = program(model, one(model), *given, "--iterations", "2")
    assert ran.code == 0, ran.error
    assert cache.stat().st_size == 2 * 2 * 24 * 8 * 4


def test_ranks(program: Program, tmp_path: Path) -> None:
    """Each has its own engine, GPU and communicator; rank 0 speaks for all of them."""
    model = small(tmp_path / "m.onnx", {"x": SHAPE}, {"z": SHAPE})
    (tmp_path / "meeting").mkdir()
    running = []
    for rank in range(2):
        write_engine(model, tmp_path / f"m.rank{rank}.engine", rows(model))
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        variables["NCCL_STANDIN_FOLDER"] = str(tmp_path / "meeting")
        variables["LD_LIBRARY_PATH"] = str(nccl_standin().parent)
        given = ("--nccl-id", str(tmp_path / "id"), "--output", f"z={tmp_path / 'z'}")
        engine = tmp_path / "m.engine"
        running.append(start_program(program.library, model, engine, *given, **variables))
    first, second = (end() for end in running)
    assert (first.code, second.code) == (0, 0), first.error + second.error
    assert "latency" in first.out
    assert second.out == ""
    assert (tmp_path / "z").stat().st_size == 2 * 3 * 4
    assert not (tmp_path / "id").exists()
    for rank, ran in enumerate((first, second)):
        places = [ran.report[name] for name in ("ranks", "rank", "device", "allocations_left")]
        assert places == [2, rank, rank, 0]


def test_a_rank_without_an_engine(program: Program, tmp_path: Path) -> None:
    model = small(tmp_path / "m.onnx", {"x": SHAPE}, {"z": SHAPE})
    given = ("--nccl-id", str(tmp_path / "id"))
    ran = run_program(
        program.library, model, tmp_path / "m.engine", *given, RANK="1", WORLD_SIZE="2"
    )
    assert (ran.code, ran.report["ranks"]) == (1, 0)
    assert f"error: rank 1: cannot read {tmp_path}/m.rank1.engine" in ran.error


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--shape a=2x1x3", "the engine has no input a"),
        ("--output x=file", "the engine has no output x"),
        ("--shape x=9x1x3", "the engine does not take the shape [9, 1, 3] of input x: the profile"),
        ("--profile 1", "the engine has 1 profiles, got --profile 1"),
        ("--plugin other.so", "TensorRT does not load other.so"),
    ],
)
def test_what_cannot_be_measured(program: Program, tmp_path: Path, option: str, error: str) -> None:
    model = small(tmp_path / "m.onnx", {"x": SHAPE}, {"z": SHAPE})
    ran = program(model, rows(model), *option.split())
    assert ran.code != 0
    assert error in ran.error
