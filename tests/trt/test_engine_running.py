"""Running engines: on a TensorRT that only answers, and on a GPU where there is one."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import onnx
import pytest
import torch

import dynamo_moe
import fake_tensorrt
import trt_plugin
from dynamo_moe.models import swin_moe_digits
from fake_tensorrt import run
from trt_plugin.engine import installed

pytest_plugins = ("fake_tensorrt",)

without_tensorrt = pytest.mark.skipif(
    any(find_spec(name) for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")),
    reason="it is installed",
)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True

    def record_stream(self, stream) -> None:
        pass


class OnOtherGpu(OnGpu):
    device = torch.device("cuda", 1)


@pytest.fixture
def runner(tensorrt, tmp_path, monkeypatch):
    (tmp_path / "model.engine").write_bytes(b"an engine")
    entered = []
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: entered.append(device) or nullcontext()
    )
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=(7, device))
    )
    runner = trt_plugin.Runner(tmp_path / "model.engine")
    runner.entered = entered
    return runner


def aligned(*shape: int, offset: int = 0) -> torch.Tensor:
    """A tensor that begins ``offset`` bytes after a multiple of 256."""
    memory = torch.zeros(1024)
    begin = (-memory.data_ptr() % 256 + offset) // 4
    return memory[begin : begin + shape[0]].as_subclass(OnGpu)


def test_inputs_stay_where_they_are_if_they_are_aligned(runner):
    a, b = aligned(8), aligned(8, offset=64)
    result = runner(a=a, b=b)
    context = runner._context
    assert context.addresses["a"] == a.data_ptr()
    assert context.addresses["b"] != b.data_ptr()
    assert list(result) == ["y"]
    assert result["y"].shape == (8,)
    # On the inputs' device, and its stream.
    assert set(runner.entered) == {a.device}
    assert context.streams == [(7, a.device)]


def test_an_output_without_elements_is_somewhere(runner):
    result = runner(a=aligned(8), b=aligned(0))
    assert result["y"].shape == (0,)
    assert runner._context.addresses["y"] != 0


def test_what_an_engine_updates_in_place_is_the_input(runner, tmp_path, monkeypatch):
    monkeypatch.setattr(fake_tensorrt.Engine, "aliases", {"y": "b"})
    runner = trt_plugin.Runner(tmp_path / "model.engine")
    a, b = aligned(8), aligned(8)
    result = runner(a=a, b=b)
    addresses = runner._context.addresses
    assert addresses["y"] == addresses["b"] == b.data_ptr() == result["y"].data_ptr()
    # A copy is updated where the input had to be copied.
    apart = aligned(8, offset=64)
    result = runner(a=a, b=apart)
    assert addresses["y"] == addresses["b"] == result["y"].data_ptr() != apart.data_ptr()


def test_a_prepared_run_only_enqueues(runner):
    a, b = aligned(8), aligned(8)
    results, enqueue = runner.prepare(a=a, b=b)
    context = runner._context
    addresses = dict(context.addresses)
    assert (addresses["a"], addresses["y"]) == (a.data_ptr(), results["y"].data_ptr())
    assert context.streams == []
    for runs in (1, 2):
        enqueue()
        assert (context.streams, context.addresses) == ([(7, a.device)] * runs, addresses)
    context.execute_async_v3 = lambda stream: False
    with pytest.raises(trt_plugin.EngineError, match="does not run the engine"):
        enqueue()


def test_an_engine_that_is_refused_may_be_the_other_builders(tensorrt, tmp_path, monkeypatch):
    (tmp_path / "model.engine").touch()

    def refused(**options: str) -> str:
        with pytest.raises(trt_plugin.EngineError, match="does not load") as caught:
            trt_plugin.Runner(tmp_path / "model.engine", **options)
        return str(caught.value)

    monkeypatch.setattr(
        tensorrt,
        "Runtime",
        lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda plan: None),
    )
    hint = "builder='rtx'"
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "tensorrt_rtx", raising=False)
    assert hint not in refused()
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", tensorrt)
    assert refused().endswith(f". If the other TensorRT built it, name it: {hint}")
    assert hint not in refused(builder="tensorrt")


def test_the_profile_is_one_that_has_the_shapes(runner):
    context = runner._context
    for rows, selected in ((8, []), (16, [1]), (32, [1]), (4, [1, 0])):
        runner(a=aligned(rows), b=aligned(rows))
        assert context.profiles == selected
    assert runner.usual_shapes() == {"a": (4,), "b": (4,)}
    # No profile has it: TensorRT says why.
    context.set_input_shape = lambda name, shape: False
    with pytest.raises(trt_plugin.EngineError, match=r"does not take a of shape \(64,\)"):
        runner(a=aligned(64), b=aligned(64))


def test_a_runtime_cache_is_read_and_written(tensorrt, tmp_path, monkeypatch):
    engine, path = tmp_path / "model.engine", tmp_path / "cache"
    engine.touch()
    with pytest.raises(trt_plugin.EngineError, match=r"TensorRT 10\.9\.0 has no runtime cache"):
        trt_plugin.Runner(engine, runtime_cache=path)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", tensorrt)
    monkeypatch.setattr("trt_plugin.engine.running.load_plugin", lambda found: None)
    runner = trt_plugin.Runner(engine, builder="rtx", runtime_cache=path)
    assert tensorrt.engine.config.cache is tensorrt.engine
    runner.save_runtime_cache()
    assert path.read_bytes() == b" and more"
    with pytest.warns(
        UserWarning, match="cache is damaged, or of another device, driver or"
    ) as caught:
        trt_plugin.Runner(engine, builder="rtx", runtime_cache=path)
    assert caught[0].filename == __file__
    path.write_bytes(b"good")
    trt_plugin.Runner(engine, builder="rtx", runtime_cache=path).save_runtime_cache()
    assert path.read_bytes() == b"good and more"
    with pytest.raises(ValueError, match="make it with runtime_cache="):
        trt_plugin.Runner(engine, builder="rtx").save_runtime_cache()


def test_inputs_are_of_one_cuda_device(runner):
    a, other = aligned(8), torch.zeros(8).as_subclass(OnOtherGpu)
    with pytest.raises(TypeError, match="input b must be on a CUDA device, got cpu"):
        runner(a=a, b=torch.zeros(8))
    with pytest.raises(TypeError, match="inputs must be on one device, got cpu, cuda:1"):
        runner(a=a, b=other)
    with pytest.raises(TypeError, match=r"input a must be torch\.float32, got torch\.float64"):
        runner(a=a.double(), b=other)
    assert runner._context.addresses == {}


@pytest.mark.parametrize("allowed", [False, True])
def test_an_engine_that_holds_the_library(tensorrt, tmp_path, allowed):
    (tmp_path / "model.engine").touch()
    trt_plugin.Runner(tmp_path / "model.engine", allow_host_code=allowed)
    assert getattr(tensorrt.runtime, "engine_host_code_allowed", False) is allowed
    assert bool(tensorrt.loaded) is not allowed


@pytest.mark.gpu
@pytest.mark.tensorrt
def test_an_engine_gives_pytorchs_results(tmp_path):
    model = swin_moe_digits().eval()
    dynamo_moe.convert(model)
    path = tmp_path / "swin.onnx"
    dynamo_moe.export(model, torch.randn(4, 1, 8, 8), path)
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    bundle = tmp_path / "swin.moek"
    assert run("compile", str(path), "--arch", capability, "-o", str(bundle))[0] == 0
    name = onnx.load(path).graph.input[0].name
    profile = ((1, 1, 8, 8), (4, 1, 8, 8), (16, 1, 8, 8))
    engine = tmp_path / "swin.engine"
    trt_plugin.build_engine(path, engine, {name: profile}, kernels=bundle, progress=False)
    runner = trt_plugin.Runner(engine)
    for batch in (1, 4, 16):
        x = torch.randn(batch, 1, 8, 8)
        (result,) = runner(**{name: x.cuda()}).values()
        torch.testing.assert_close(result.cpu(), model(x), atol=1e-3, rtol=1e-3)
