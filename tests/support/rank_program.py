"""Ranks of groups, forked from one process: each compares sharded models with whole ones.

``python rank_program.py 2 families heads 4 training`` runs two cases on two ranks, and one on four.
Forked, they need not import PyTorch each, which takes longer than most cases.
"""

from __future__ import annotations

import copy
import ctypes
import io
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

import custom_ops
import dynamo_moe
from dynamo_moe import pytree
from dynamo_moe.cli import app
from dynamo_moe.language_models import example_case, performing
from dynamo_moe.local_experts import LocalExperts
from dynamo_moe.models import DroplessMoEMlp, swin_moe_digits
from dynamo_moe.modules import DroplessMoE
from moe_architectures import ARCHITECTURES, example_inputs
from small_models import mlp_model
from trt_plugin.engine import EngineError
from trt_plugin.engine.communicator import Communicator, before_joining

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "llama4", "deepseek_v3")


def families() -> None:
    """Every family's logits are the whole model's, on every rank."""
    for family in FAMILIES:
        model = ARCHITECTURES[family].build().eval()
        dynamo_moe.convert(model)
        inputs = example_inputs(ARCHITECTURES[family], 2, 5)
        with torch.no_grad():
            expected = model(**inputs).logits
            dynamo_moe.shard(model)
            torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)


def heads() -> None:
    """Attention by heads and dense layers by columns: logits and gradients are the whole model's.

    The families have grouped heads, norms of heads that the plan names or forgets, latent
    attention, sinks, shared experts and dense layers.
    """
    families = ("mixtral", "qwen3_moe", "qwen3_vl_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
    for family in families:
        whole: Any = ARCHITECTURES[family].build().eval()
        if family == "gpt_oss":  # It has no plan of its own.
            attention = "model.layers.*.self_attn"
            columns = ("q_proj", "k_proj", "v_proj", "sinks")
            whole.tp_plan = {f"{attention}.{name}": "colwise" for name in columns}
            whole.tp_plan[f"{attention}.o_proj"] = "rowwise"
        dynamo_moe.convert(whole)
        model = copy.deepcopy(whole)
        inputs = example_inputs(ARCHITECTURES[family], 2, 5)
        report = dynamo_moe.shard(model, plan="experts+heads")
        assert report.split, family
        results = [module(**inputs)[0] for module in (whole, model)]
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
        for result in results:
            result.square().mean().backward()
        expected = dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            if "local_experts" not in name and expected[name].grad is not None:
                gradient = share(expected[name].grad, parameter)
                torch.testing.assert_close(
                    parameter.grad, gradient, rtol=1e-4, atol=1e-6, msg=f"{family} {name}"
                )


def share(whole: Tensor, part: Tensor) -> Tensor:
    """Returns the rank's share of a tensor, which differs in one axis at most."""
    for axis, (size, local) in enumerate(zip(whole.shape, part.shape, strict=True)):
        if size != local:
            return whole.chunk(dist.get_world_size(), axis)[dist.get_rank()]
    return whole


def trained(experts: int = 5) -> nn.Module:
    torch.manual_seed(0)
    moe = DroplessMoEMlp(8, 12, num_experts=experts, top_k=min(2, experts))
    layer = DroplessMoE(moe.router, *(moe.w1, None, moe.w2, None), top_k=moe.top_k)
    return nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 3))


def training() -> None:
    """Three steps of an optimizer give the whole model's parameters."""
    whole = trained()
    model = copy.deepcopy(whole)
    dynamo_moe.shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, model)]
    for _ in range(3):
        x = torch.randn(6, 8)
        dist.broadcast(x, 0)
        for module, optimizer in zip((whole, model), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    for one, other in ((0, 0), (2, 2)):
        for expected, actual in zip(
            whole[one].parameters(), model[other].parameters(), strict=True
        ):
            torch.testing.assert_close(actual, expected)
    layer: Any = model[1]
    torch.testing.assert_close(layer.router.weight, whole[1].router.weight)
    local: LocalExperts = layer.local_experts
    for name, expected in (("w1", whole[1].w1.mT), ("w2", whole[1].w2.mT)):
        actual = getattr(local.part, name)
        torch.testing.assert_close(actual, expected[local.share.start : local.share.stop])


def split_tokens() -> None:
    """Each rank gets the whole model's results of its own tokens, and gradients.

    Those of replicated parameters are summed over ranks here, as data parallelism does.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for experts in (5, 1):  # With one, the other ranks have none.
        whole = trained(experts)
        model = copy.deepcopy(whole)
        dynamo_moe.shard(model, tokens="split")
        x = torch.randn(2 * ranks, 3, 8)
        own = x.chunk(ranks)[rank]
        expected, result = whole(x), model(own)
        torch.testing.assert_close(result, expected.chunk(ranks)[rank])
        for y in (expected, result):
            y.square().sum().backward()
        gradients = {name: each.grad for name, each in whole.named_parameters()}
        for name, parameter in model.named_parameters():
            if "local_experts" not in name:
                dist.all_reduce(parameter.grad)
                torch.testing.assert_close(parameter.grad, gradients[name], msg=name)
        layer: Any = model[1]
        local: LocalExperts = layer.local_experts
        if local.share:
            for name in ("w1", "w2"):
                gradient = gradients[f"1.{name}"].mT[local.share.start : local.share.stop]
                torch.testing.assert_close(getattr(local.part, name).grad, gradient)
        if ranks > 2:  # Compiled as for two, which takes each rank a second.
            continue
        model.eval()
        with torch.no_grad():
            for compiled in (
                torch.compile(model, backend="eager"),
                torch.export.export(model, (own,)).module(),
            ):
                torch.testing.assert_close(compiled(own), result)
    for least in (1, 6, 6):  # That some or all ranks have had as many before is no matter.
        with pytest.raises(ValueError, match=rf"ranks have \[{least}, .*\] tokens of their own"):
            model(torch.randn(least + rank, 8))
        model(torch.randn(7, 8))
    with pytest.raises(ValueError, match="tokens must be 'all'"):
        dynamo_moe.shard(trained(), plan="experts+heads", tokens="split")
    with pytest.raises(ValueError, match="export a model before it is sharded"):
        dynamo_moe.export(model, own, "nowhere.onnx")
    split_batches()


def opened() -> None:
    """A checkpoint of which each rank reads its share, and computes the whole model's logits."""
    model: Any = ARCHITECTURES["qwen3_moe"].build().eval()
    model.config._experts_implementation = None
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    inputs = example_inputs(ARCHITECTURES["qwen3_moe"], 2, 5)
    expected = model(**inputs).logits
    for plan in ("experts", "experts+heads"):
        shares: Any = dynamo_moe.open_checkpoint(folder[0])
        dynamo_moe.convert(shares)
        dynamo_moe.shard(shares, plan=plan)
        dynamo_moe.read_weights(shares)
        torch.testing.assert_close(shares(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def split_batches() -> None:
    """A vision model, and a language model of packed experts, of which each rank has some rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = example_inputs(ARCHITECTURES["qwen3_moe"], 2 * ranks, 5)
    cases: list[tuple[Any, dict[str, Tensor]]] = [
        (swin_moe_digits(), {"images": torch.rand(3 * ranks, 1, 8, 8)}),
        (ARCHITECTURES["qwen3_moe"].build(), tokens),
    ]
    for model, inputs in cases:
        dynamo_moe.convert(model.eval())
        if "images" not in inputs:
            dynamo_moe.quantize(model, "int8")
        own = {name: each.chunk(ranks)[rank] for name, each in inputs.items()}
        with torch.no_grad():
            expected = pytree.tree_leaves(model(**inputs))[0].chunk(ranks)[rank]
            dynamo_moe.shard(model, tokens="split")
            result = pytree.tree_leaves(model(**own))[0]
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def idle() -> None:
    """Gradients where the last ranks have no experts of some layers, and a skip connection."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(trained(experts) for experts in (6, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + torch.nn.functional.pad(layer(x), (0, 5))
            return x

    torch.manual_seed(0)
    whole = Model()
    model = copy.deepcopy(whole)
    dynamo_moe.shard(model)
    x = torch.randn(6, 8)
    for module in (whole, model):
        module(x).square().mean().backward()
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        if "local_experts" not in name:
            torch.testing.assert_close(parameter.grad, expected[name].grad, msg=name)


def compiled() -> None:
    """``torch.compile`` and ``torch.export`` take a sharded model."""
    model = trained().eval()
    x = torch.randn(6, 8)
    dist.broadcast(x, 0)
    with torch.no_grad():
        expected = model(x)
        dynamo_moe.shard(model)
        torch.testing.assert_close(torch.compile(model, backend="eager")(x), expected)
        program = torch.export.export(model, (x,))
        torch.testing.assert_close(program.module()(x), expected)
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.moe.sum_over_ranks.default) == 1


def grouped() -> None:
    """A model sums over the group that it was sharded over, among others, and no other one.

    A program of ``torch.export`` does, too, once it is loaded.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    x = torch.randn(6, 8)
    for group in pairs[rank // 2], dist.group.WORLD:
        model = trained().eval()
        with torch.no_grad():
            expected = model(x)
            dynamo_moe.shard(model, group)
            torch.testing.assert_close(model(x), expected)
            saved = io.BytesIO()
            torch.export.save(torch.export.export(model, (x,)), saved)
            loaded = torch.export.load(saved)
            torch.testing.assert_close(loaded.module()(x), expected)
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
            for gone in (model, loaded.module()):
                with pytest.raises(RuntimeError, match="has no group of this name"):
                    gone(x)
    with pytest.raises(RuntimeError, match=f"for 3 ranks .* this process has one of {ranks}"):
        custom_ops.sum_over_ranks(x, 3, dist.group.WORLD.group_name)


def verified() -> None:
    """Each process verifies its own file, with the whole model and with its share of it.

    Where one of them fails, all do.
    """
    rank, group = dist.get_rank(), dist.group.WORLD
    model: Any = ARCHITECTURES["mixtral"].build(num_hidden_layers=1).eval()
    dynamo_moe.convert(model)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / f"m.rank{rank}.onnx"
    plan: Any = "experts+heads"
    if rank == 0:
        whole = path.with_name("m.onnx")
        dynamo_moe.export_language_model(model, whole, ranks=dist.get_world_size(), plan=plan)
    dist.barrier()
    assert dynamo_moe.verify(path, model, cases(model), group=group).passed
    missing = path if rank == 0 else path.with_name("nowhere.onnx")
    with pytest.raises(ValueError, match="rank 1 of 2: no such file"):
        dynamo_moe.verify(missing, model, group=group)
    with pytest.raises(ValueError, match="must be for rank 1 of 2, and is for rank 0"):
        dynamo_moe.verify(path.with_name("m.rank0.onnx"), model, group=group)
    dynamo_moe.shard(model, plan=plan)
    assert dynamo_moe.verify(path, model, cases(model), group=group).passed
    proto = onnx.load(path)
    if rank == 1:
        # What it keeps is its own alone, and wrong.
        (weight,) = (
            each for each in proto.graph.initializer if each.name.endswith("k_proj.weight")
        )
        values = onnx.numpy_helper.to_array(weight)
        weight.CopyFrom(onnx.numpy_helper.from_array(-values, weight.name))
        onnx.save(proto, path)
    with pytest.raises(dynamo_moe.VerificationError):
        dynamo_moe.verify(path, model, cases(model), group=group)
    if rank == 1:
        proto.graph.node[-1].op_type = "Nowhere"
        onnx.save(proto, path)
    with pytest.raises(ValueError, match=r"rank 1 of 2: .*Nowhere"):
        dynamo_moe.verify(path, model, group=group)
    verified_by_the_command_line(path.with_name("mlp.onnx"))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


class Breaking(nn.Module):
    """Fails on rank 1 alone, after its first sum; for the others, it would go on to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp_model(layers=2)
        self.failure: Exception | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.failure is not None:
            raise self.failure
        return self.layers[1](x)


def broken() -> None:
    """Where a model fails on one rank alone, all ranks end with its reason, and can go on."""
    rank, group = dist.get_rank(), dist.group.WORLD
    model: Any = Breaking().eval()
    dynamo_moe.convert(model)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / f"m.rank{rank}.onnx"
    if rank == 0:
        dynamo_moe.export(model, torch.randn(3, 16), path.with_name("m.onnx"), ranks=2)
    dist.barrier()
    for is_shared in (False, True):
        if is_shared:
            dynamo_moe.shard(model)
        assert dynamo_moe.verify(path, model, group=group).passed
        model.failure = MemoryError("no memory is left") if rank == 1 else None
        for inputs in (None, [(torch.ones(2, 16),)]):
            with pytest.raises(ValueError, match=r"^rank 1 of 2: no memory is left$"):
                dynamo_moe.verify(path, model, inputs, group=group)
        model.failure = None
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setitem(sys.modules, "onnxruntime", None)
        with pytest.raises(ValueError, match=r"^rank 1 of 2: .*onnxruntime"):
            dynamo_moe.verify(path, model, group=group)
    with pytest.raises(ValueError, match=r"^rank 1 of 2: group needs the file of a rank"):
        dynamo_moe.verify(path if rank == 0 else path.parent, model, group=group)
    with pytest.raises(ValueError, match=r"the ranks have \[1, 2\] cases"):
        dynamo_moe.verify(path, model, [(torch.ones(2, 16),)] * (1 + rank), group=group)
    assert dynamo_moe.verify(path, model, group=group).passed
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def verified_by_the_command_line(file: Path) -> None:
    """Every process succeeds, and the first one prints."""
    if dist.get_rank() == 0:
        model = mlp_model()
        dynamo_moe.convert(model)
        dynamo_moe.export(model, torch.randn(3, 16), file, ranks=dist.get_world_size())
        file.with_name("made.py").write_text("from small_models import mlp_model as build\n")
    dist.barrier()
    command = ["verify", str(file), str(file.with_name("made.py")), "--ranks", "--json"]
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, "max_error" in done.stdout) == (0, dist.get_rank() == 0), done.output


def cases(model: Any) -> list[dict[str, Any]]:
    """Returns one case, with a cache, for a model or its share."""
    with performing(model, "text-generation-with-past"):
        return [example_case(model)]


def communicator() -> None:
    """Each rank's communicator has its own number, and the size of the group."""
    made = Communicator(dist.group.WORLD)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    fields = ctypes.cast(pointer(made.capsule, None), ctypes.POINTER(ctypes.c_int * 2))
    assert [*fields.contents] == [dist.get_world_size(), dist.get_rank()]


def unjoined() -> None:
    """A rank without its engine ends the others, which wait for its communicator."""
    rank = dist.get_rank()
    if rank == 1:
        with pytest.raises(FileNotFoundError), before_joining(dist.group.WORLD):
            Path("nowhere.engine").read_bytes()
    else:
        with pytest.raises(EngineError, match=r"rank 1 of 2: .* No such file .*nowhere\.engine"):
            Communicator(dist.group.WORLD)


def failing() -> None:
    """The last rank ends before the others' sum."""
    model = trained().eval()
    dynamo_moe.shard(model)
    if dist.get_rank() == dist.get_world_size() - 1:
        raise SystemExit("this rank fails")
    model(torch.randn(6, 8))


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        families,
        heads,
        training,
        split_tokens,
        opened,
        idle,
        compiled,
        grouped,
        verified,
        broken,
        communicator,
        unjoined,
        failing,
    )
}


def run(rank: int, ranks: int, store: str, names: list[str]) -> None:
    """Runs cases as a rank of a group, which meets in the file ``store``."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for name in names:
        torch.manual_seed(0)
        CASES[name]()
        if rank == 0:
            print("passed", name, "on", ranks, flush=True)  # noqa: T201  For the test.
    dist.destroy_process_group()


def groups(arguments: list[str]) -> list[tuple[int, list[str]]]:
    """Returns numbers of ranks, each with the cases behind it."""
    found: list[tuple[int, list[str]]] = []
    for each in arguments:
        if each.isdigit():
            found.append((int(each), []))
        else:
            found[-1][1].append(each)
    return found


def load() -> None:
    """Loads what each rank would load anew: the compiler, the exporter and transformers' models."""
    layer, x = nn.Linear(1, 1), torch.ones(1, 1)
    with torch.no_grad():
        torch.compile(layer, backend="eager")(x)
        torch.export.export(layer, (x,))
    for family in FAMILIES:
        ARCHITECTURES[family].build()


def main() -> None:
    """Run the cases that are named, on the numbers of ranks before them."""
    torch.set_num_threads(1)
    load()
    for ranks, cases in groups(sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            store = f"{folder}/store"
            mp.start_processes(run, (ranks, store, cases), nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    main()
