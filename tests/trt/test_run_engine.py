"""examples/run_engine: what needs no GPU, and that all of it compiles where headers are given."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from example_program import COMPILER, EXAMPLE, ROOT
from nccl_standin import nccl_standin


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run_engine") / "test"
    sources = (ROOT / "tests/native/run_engine_test.cc", *map(EXAMPLE.joinpath, HOST_SOURCES))
    subprocess.run([*COMPILER, *map(str, sources), "-o", str(path)], check=True)
    return path


HOST_SOURCES = ("options.cc", "ranks.cc", "results.cc", "text.cc")


def said(program: Path, *arguments: str, **variables: str) -> dict:
    return start(program, *arguments, **variables)()


def start(program: Path, *arguments: str, **variables: str) -> Callable[[], dict]:
    """Starts the program; returns what waits for its end, and for what it says."""
    environment = {"LD_LIBRARY_PATH": str(nccl_standin().parent), **variables}
    started = subprocess.Popen(
        [program, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )

    def end() -> dict:
        out, _ = started.communicate()
        assert started.returncode == 0
        return json.loads(out)

    return end


def test_options(program):
    assert said(program, "m.engine") == {
        "engine": "m.engine",
        "plugin": "",
        "batch": -1,
        "runs": [0, 10, 100, 0, 0],
    }
    given = (
        *("--shape", "x=4x3x8", "--shape", "s=0", "--batch", "16", "--plugin", "lib.so"),
        *("--input", "x=a=b.bin", "--profile", "1", "--warmup", "0", "--iterations", "7"),
        *("m.engine", "--cuda-graph", "--top-k", "5"),
    )
    assert said(program, *given) == {
        "shape s": [0],
        "shape x": [4, 3, 8],
        "input x": "a=b.bin",
        "engine": "m.engine",
        "plugin": "lib.so",
        "batch": 16,
        "runs": [1, 0, 7, 1, 5],
    }


def test_prompts(program, tmp_path):
    file = tmp_path / "prompts"
    file.write_text("1 17, 42\n5\n")
    given = ("--prompt", "7,8", "--prompt-file", str(file), "--end", "2", "--end", "0")
    options = said(program, "m.engine", *given, "--steps", "9")
    assert [options[f"prompt {row}"] for row in range(3)] == [[7, 8], [1, 17, 42], [5]]
    assert (options["ends"], options["steps"]) == ([2, 0], [9])
    assert said(program, "m.engine", "--prompt", "7")["steps"] == [32]
    file.write_text("1 2\n\n3\n")
    options = said(program, "m.engine", *given)
    assert options["error"] == "--prompt-file needs at least one token id"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--cuda-graph", "name an engine"),
        ("a b", "one engine at a time, got a and b"),
        ("a --graph", "unknown option --graph"),
        ("a --batch", "--batch needs a value"),
        ("a --batch 0", "--batch needs a number of at least 1, got '0'"),
        ("a --iterations 1e3", "--iterations needs a number of at least 1, got '1e3'"),
        ("a --shape x", "--shape needs NAME=VALUE, got 'x'"),
        ("a --shape x=4x", "--shape needs a number of at least 0, got ''"),
        ("a --shape x=4x-1", "--shape needs a number of at least 0, got '-1'"),
        ("a --prompt 1,-2", "--prompt needs a number of at least 0, got '-2'"),
        ("a --prompt ,", "--prompt needs at least one token id"),
        ("a --prompt 1 --steps 0", "--steps needs a number of at least 1, got '0'"),
        ("a --prompt-file nowhere", "no prompt can be read from nowhere"),
        ("a --prompt 1 --cuda-graph", "--cuda-graph does not go with --prompt"),
        ("a --end 2", "--end needs --prompt"),
        ("a --nccl-wait 2", "--nccl-wait needs --nccl-id"),
        ("a --top-k 99999999999", "--top-k needs a number of at least 1, got '99999999999'"),
    ],
)
def test_options_that_make_no_sense(program, arguments, error):
    assert said(program, *arguments.split())["error"] == error


def ranks(program: Path, tmp_path: Path, names: tuple[str, ...], count: int) -> list[dict]:
    """Starts all ranks, the last ones first, and returns what they say, by rank."""
    (tmp_path / "meeting").mkdir()
    given = ("models/m.engine", "--nccl-id", str(tmp_path / "id"), "--nccl-wait", "600")
    running = [
        start(
            program,
            *given,
            **dict(zip(names, (str(rank), str(count), str(rank % 2)), strict=False)),
            NCCL_STANDIN_FOLDER=str(tmp_path / "meeting"),
        )
        for rank in reversed(range(count))
    ]
    return [end() for end in running][::-1]


LAUNCHERS = [
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("RANK", "WORLD_SIZE"),
]


@pytest.mark.parametrize("names", LAUNCHERS)
def test_ranks_find_each_other(program, tmp_path, names):
    # What killed runs have left: an id that NCCL does not know, and half of a meeting.
    (tmp_path / "id").write_bytes(bytes(128 + 2 * 16))
    (tmp_path / "id.rank1").write_bytes(bytes(32))
    (tmp_path / "id.rank2").write_bytes(b"")
    for rank, options in enumerate(ranks(program, tmp_path, names, 3)):
        assert options["place"] == [rank, 3, rank % 2 if len(names) == 3 else -1]
        assert options["communicator"] == [3, rank]
        assert options["file"] == f"models/m.rank{rank}.engine"
    assert [each.name for each in tmp_path.iterdir()] == ["meeting"]


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({}, "--nccl-id needs a launcher such as torchrun or mpirun: none of RANK, OMPI_COMM_"),
        ({"RANK": "x"}, "RANK must be a number of at least 0, got 'x'"),
        ({"RANK": "0"}, "RANK is 0, but WORLD_SIZE is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({**TORCHRUN, "LD_LIBRARY_PATH": ""}, "needs NCCL, and libnccl.so.2: cannot open shared"),
        ({**TORCHRUN, "NCCL_STANDIN_VERSION": "21805"}, "from 2.19 to below 3; libnccl.so.2 has"),
        ({**TORCHRUN, "NCCL_STANDIN_NO_ID": "1"}, "NCCL's ncclGetUniqueId failed: unhandled sys"),
        (
            {**TORCHRUN, "RANK": "1"},
            "rank 0 has left no id of NCCL for all ranks in nowhere within",
        ),
        (TORCHRUN, "rank 1 has not answered in nowhere.rank1 within 0 s"),
    ],
)
def test_ranks_that_cannot_begin(program, variables, error):
    given = ("m.engine", "--nccl-id", "nowhere", "--nccl-wait", "0")
    assert error in said(program, *given, **variables)["error"]
    assert not [*Path().glob("nowhere*")]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_an_earlier_run_has_left_is_not_taken(program, tmp_path, rank):
    """Alone, a rank ends in time: not with the id of another run, nor with NCCL."""
    (tmp_path / "id").write_bytes(bytes(128 + 16))
    (tmp_path / "id.rank1").write_bytes(bytes(32))
    given = ("m.engine", "--nccl-id", str(tmp_path / "id"), "--nccl-wait", "1")
    error = said(program, *given, **{**TORCHRUN, "RANK": rank})["error"]
    assert re.search("rank 1 has not answered|rank 0 has left no id", error)


def test_values_and_summaries(program):
    computed = said(program)
    assert computed["float16"] == [1.0, -2.0, 65504.0, 2.0**-14, 2.0**-24]
    assert computed["bfloat16"] == [1.0, -2.0, 3.140625]
    assert computed["encoded int64"] == [7, 2**40]
    assert computed["encoded int32"] == [7, 0]
    assert computed["int64"] == [-3, 2**40]
    assert computed["int8"] == [-3, 127]
    assert computed["bool"] == [0, 1]
    assert computed["special"] == [1, 1, 1]
    for dtype in ("float32", "float16", "bfloat16"):
        values = computed[f"example {dtype}"]
        assert len(values) == 64
        assert all(0.5 <= abs(value) < 1 for value in values)
        assert min(values) < 0 < max(values)
        assert len(set(values)) > 32
    assert computed["example int32"] == [0] * 64
    # Equal values in their order, NaN last.
    assert computed["largest"] == [2, 4, 0, 3, 1]
    assert computed["latency"] == [100.5, 100.5, 198]
    assert computed["single"] == [3, 3, 3]


def test_texts(program):
    computed = said(program)
    assert computed["text"] == [5, 9, 17, 0, 0, 40]
    assert computed["mask"] == [1, 1, 1, 0, 0, 0, 1, 0]
    assert computed["positions"] == [0, 1, 2, 0, 0, 0]
    # A row that has ended goes on with the first of the tokens that end one.
    assert computed["new"] == [9, 2]
    assert computed["new positions"] == [4, 2]
    assert computed["longer mask"] == [1, 1, 1, 1, 1, 0, 0, 1, 1, 1]
    assert computed["written 0"] == [8, 9]
    assert computed["written 1"] == [3]
    assert computed["ended"] == [0]
    assert computed["all ended"] == [1]


def test_cmake_has_every_source():
    target = re.search(
        r"add_executable\(run_engine ([^)]*)\)", (EXAMPLE / "CMakeLists.txt").read_text()
    )
    assert set(target[1].split()) == {source.name for source in EXAMPLE.glob("*.cc")}


def test_it_compiles_against_the_sdk(tmp_path):
    tensorrt, cuda = (os.environ.get(f"{name}_INCLUDE_DIR") for name in ("TENSORRT", "CUDA"))
    if not (tensorrt and cuda):
        pytest.skip("TENSORRT_INCLUDE_DIR and CUDA_INCLUDE_DIR name no folders with headers")
    for source in EXAMPLE.glob("*.cc"):
        flags = ("-isystem", tensorrt, "-isystem", cuda, "-c", "-o", str(tmp_path / "object"))
        subprocess.run([*COMPILER, *flags, str(source)], check=True)
