"""``dynamo-moe export`` and ``verify``: the commands that begin with a PyTorch model."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import nn

from custom_ops.packed_weights import ENCODINGS
from dynamo_moe.cli import model_steps
from dynamo_moe.cli.common import (
    Debug,
    Json,
    Quiet,
    app,
    failures,
    need_file,
    need_writable,
    need_writable_folder,
    print_report,
)
from dynamo_moe.cli.model_loading import (
    UsageError,
    check_example,
    is_checkpoint,
    parse_dynamic,
)
from dynamo_moe.cli.outcomes import Outcome, named_finally, unverified
from dynamo_moe.files.model_parts import PARTS
from dynamo_moe.moe_nodes.targets.names import DEFAULT_BODY, DEFAULT_TARGET, BodyName, TargetName

Dtype = Literal["float32", "float16", "bfloat16"]

# The panels of options that few need.
_CHECKPOINTS = "Of checkpoints of transformers"
_FILE = "Form of the file"
_WEIGHTS = "Its weights"
_FACTORY = (
    "[cyan]package.module:factory[/] or [cyan]file.py:factory[/]. The factory returns the model, "
    "or (model, args). Without [cyan]:factory[/] it is called model or build."
)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help=f"{_FACTORY} Or the folder of a checkpoint of transformers."
    ),
]


@app.command(
    epilog="Examples:\n\n"
    "[cyan]dynamo-moe export my_models.swin:build swin.onnx --shape 1,3,224,224 --verify[/]\n\n"
    "[cyan]dynamo-moe export mixtral.py m.onnx --shape 1,128:int64 --experts-dtype float16[/]\n\n"
    "[cyan]dynamo-moe export mixtral.py m.onnx --shape 1,128:int64 --dynamic ids:1=sequence[/]\n\n"
    "[cyan]dynamo-moe export Qwen3-30B-A3B qwen3.onnx --experts-dtype float16[/]\n\n"
    "[cyan]dynamo-moe export Qwen3-30B-A3B -o qwen3.onnx --quantize int4 --group 128[/]"
)
def export(
    model: Model,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT.onnx", help="The file to write.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT.onnx", help="The same, as an option."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZES",
            help="Shape of an example input, once for each input: [cyan]1,3,224,224[/] or "
            "[cyan]2,128:int64[/]. Default: the args of the factory.",
        ),
    ] = None,
    target: Annotated[
        TargetName | None,
        typer.Option(
            metavar="TARGET",
            help="[cyan]plugin[/]: one node per MoE layer, for the TensorRT plugin and ONNX "
            "Runtime. [cyan]dense[/]: standard operators only, every expert on every token. "
            "[cyan]onnxruntime[/]: com.microsoft::MoE. [cyan]tensorrt_moe[/]: TensorRT's own "
            "TRT_MoE, experimental.",
            show_default="plugin; onnxruntime with --format genai or --shared-cache; plugin with "
            "--library",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Then run the file in ONNX Runtime and compare. Until it agrees with the model it "
            "is called OUT.unverified.onnx.",
        ),
    ] = False,
    dynamic: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:DIM",
            help="Make a dimension of an input symbolic, besides the batch; may be repeated: "
            "[cyan]ids:1=sequence[/]. Without a label it is static: [cyan]scale:0=[/]",
        ),
    ] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Fix every dimension, the batch too.")
    ] = False,
    experts_dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="DTYPE",
            help="Cast the experts' weights: [cyan]float32[/], [cyan]float16[/] or "
            "[cyan]bfloat16[/].",
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Round the experts' weights to a packed format: "
            + ", ".join(f"[cyan]{name}[/]" for name in ENCODINGS)
            + ".",
        ),
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Of what is quantized: values of a row that share a scale, in int4 and int8.",
            show_default="32 in int4, a row in int8",
        ),
    ] = None,
    quantize_linear: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Round the other linear layers too: those of attention, dense MLPs and shared "
            "experts, but no routers.",
        ),
    ] = None,
    quantize_ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --quantize-linear: a layer that stays, by its path or the last parts of "
            "it, with [cyan]*[/]; may be repeated. [cyan]''[/]: none stays.",
            show_default="lm_head",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Fail, and write nothing, if a module that looks like a mixture of experts is not "
            "converted.",
        ),
    ] = False,
    task: Annotated[
        Literal[
            "text-generation-with-past",
            "text-generation",
            "feature-extraction",
            "image-text-to-text",
            "text2text-generation-with-past",
        ]
        | None,
        typer.Option(
            metavar="TASK",
            help="What the file does: [cyan]text-generation-with-past[/], "
            "[cyan]text-generation[/] or [cyan]feature-extraction[/]. With "
            "[cyan]image-text-to-text[/], for a model that sees pictures, and "
            "[cyan]text2text-generation-with-past[/], for one with an encoder, OUT is a folder of "
            "several files.",
            show_default="text-generation-with-past",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="DTYPE",
            help="Cast all weights. Default: as they are in the checkpoint.",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = None,
    link_weights: Annotated[
        bool,
        typer.Option(
            "--link-weights",
            help="Weights that need no change stay in the checkpoint's files, which OUT.onnx, "
            "beside them, refers to.",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = False,
    fallback: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="transformers' implementation of experts that no MoE operator can compute, such "
            "as [cyan]batched_mm[/].",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = None,
    hf: Annotated[
        bool,
        typer.Option(
            "--hf",
            help="MODEL is the folder of a checkpoint, config.json and safetensors, also where it "
            "is a package of Python. Its weights are streamed, never held.",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = False,
    body: Annotated[
        BodyName,
        typer.Option(
            metavar="BODY",
            help="With target plugin, what ONNX Runtime runs. [cyan]loop[/]: over the experts, "
            "whose weights stay in the file. [cyan]unrolled[/]: products for each expert, packed "
            "at load; faster for few rows per expert, but loads for seconds and holds a copy.",
            rich_help_panel=_FILE,
        ),
    ] = DEFAULT_BODY,
    opset: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Version of the standard operators, at least 18.",
            show_default="23 with onnxruntime, else 20, or what the model needs: 21 for packed "
            "linear layers, 22 for some operators of bfloat16, 24 for --cache-length",
            rich_help_panel=_FILE,
        ),
    ] = None,
    fuse: Annotated[
        bool,
        typer.Option(
            "--fuse/--no-fuse",
            help="From opset 23 on: norms, rotary embeddings and, with target onnxruntime, "
            "attention become one node each.",
            rich_help_panel=_FILE,
        ),
    ] = True,
    external_data: Annotated[
        bool | None,
        typer.Option(
            "--external-data/--no-external-data",
            help="Weights in a file beside OUT.onnx, or inside it. Default: beside it above 2 GB.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    layers_as_functions: Annotated[
        bool,
        typer.Option(
            "--layers-as-functions",
            help="Blocks that repeat are calls of one function: a small graph, which shows the "
            "architecture.",
            rich_help_panel=_FILE,
        ),
    ] = False,
    folder_format: Annotated[
        Literal["genai", "transformers"] | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="OUT is a folder that a runtime opens: [cyan]genai[/] for onnxruntime-genai, "
            "[cyan]transformers[/] for transformers.js and optimum.",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = None,
    library: Annotated[
        bool,
        typer.Option(
            "--library",
            help="With --format genai: the native library computes the MoE layers; a copy of it is "
            "in the folder.",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = False,
    shared_cache: Annotated[
        bool | None,
        typer.Option(
            "--shared-cache/--no-shared-cache",
            help="With target onnxruntime: attention writes into the cache's own buffers. "
            "Default: with --format genai.",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = None,
    bounded_windows: Annotated[
        bool,
        typer.Option(
            "--bounded-windows",
            help="Layers with a sliding window keep the tokens in it alone.",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = False,
    cache_length: Annotated[
        int | None,
        typer.Option(
            metavar="L",
            min=1,
            help="Keys and values have room for L tokens from the beginning, in buffers that are "
            "updated in place; with target plugin or dense. Otherwise they grow.",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = None,
    repeated_blocks: Annotated[
        Literal["auto", "off"],
        typer.Option(
            "--repeated-blocks",
            help="[cyan]auto[/]: of blocks that all run the same operators, three are traced; "
            "[cyan]off[/]: each of them.",
            rich_help_panel=_FILE,
        ),
    ] = "auto",
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Files for N devices, OUT.rank0.onnx and so on, each with a share of the experts: "
            "together they compute the model.",
            rich_help_panel=_FILE,
        ),
    ] = None,
    plan: Annotated[
        Literal["experts", "experts+heads"],
        typer.Option(
            metavar="PLAN",
            help="With --ranks, what is split: [cyan]experts[/] alone, or [cyan]experts+heads[/]: "
            "attention by heads, too, and dense layers by columns, as transformers' plan says.",
            rich_help_panel=_FILE,
        ),
    ] = "experts",
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Show the time of each phase, and write a profile: OUT.onnx.profile.html for a "
            "browser, and OUT.onnx.speedscope.json.",
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Export a PyTorch model with MoE layers to ONNX."""
    console = Console(file=sys.stderr, quiet=quiet)
    with failures(debug):
        _check_together(
            {"--static": static, "--dynamic": dynamic},
            {"--ranks": ranks, "--format": folder_format},
            {"--ranks": ranks, "--profile": profile},
        )
        rounding = _rounding(quantize, quantize_linear, group, quantize_ignore)
        out = _one_output(out, output)
        is_folder = folder_format is not None or task in PARTS
        out = out.resolve() if is_folder else out
        hf = hf or is_checkpoint(model)
        _check_source(
            hf,
            of_models={"--shape": shape, "--dynamic": dynamic, "--static": static},
            of_checkpoints={
                "--task": task,
                "--dtype": dtype,
                "--link-weights": link_weights,
                "--format": folder_format,
                "--library": library,
                "--shared-cache": shared_cache,
                "--bounded-windows": bounded_windows,
                "--cache-length": cache_length,
            },
        )
        _check_library(library, folder_format)
        for_runtime = (folder_format == "genai" or shared_cache) and not library
        target = target or ("onnxruntime" if for_runtime else DEFAULT_TARGET)
        options: dict[str, Any] = {
            "target": target,
            "body": body,
            "profile": profile,
            "fuse": fuse,
            "external_data": external_data,
            "layers_as_functions": layers_as_functions,
            "repeated_blocks": repeated_blocks,
            "ranks": ranks,
            "plan": _plan(plan, ranks),
        }
        if opset is not None:
            options["opset"] = _known_opset(opset)
        _check_body(body, target)
        (need_writable_folder if is_folder else need_writable)(out)
        if verify:
            model_steps.need_onnxruntime()
        conversion = {"experts_dtype": _torch_dtype(experts_dtype), "fallback": fallback}
        # A file gets its name only once it is verified.
        target_file = unverified(out, is_folder=is_folder) if verify else out
        outcome = Outcome()
        with outcome.printed(as_json=as_json, quiet=quiet):
            module: Any
            args: tuple[Any, ...] | None = None
            if hf:
                folder, weights_dtype = Path(model), _torch_dtype(dtype)
                module = model_steps.open_checkpoint(console, folder, weights_dtype)
                options |= {
                    "task": task or "text-generation-with-past",
                    "link_weights": link_weights,
                    "folder": folder_format,
                    "library": library,
                    "bounded_windows": bounded_windows,
                    "cache_length": cache_length,
                }
                if shared_cache is not None:
                    options["shared_cache"] = shared_cache
            else:
                if static or dynamic:
                    options["dynamic_shapes"] = parse_dynamic(dynamic) if dynamic else None
                module, args = model_steps.load(console, model, shape, needed=True)
                check_example(module, args or (), options.get("dynamic_shapes"))
            model_steps.convert(console, module, args, conversion, strict, outcome)
            outcome.quantization = model_steps.quantize(console, module, rounding)
            outcome.exported = exported = model_steps.export(
                console, module, args, target_file, options
            )
            if verify:
                with named_finally(outcome, exported, target_file, out):
                    if hf:
                        module = model_steps.load_checkpoint(
                            console, folder, weights_dtype, conversion
                        )
                        model_steps.quantize(console, module, rounding)
                    written = exported.path if folder_format or not is_folder else target_file
                    report = outcome.verification = model_steps.verify(
                        console, written, module, None, library=library
                    )
                    model_steps.check(report)


@app.command(
    epilog="Example: [cyan]dynamo-moe verify swin.onnx my_models.swin:build[/]\n\n"
    "The factory must give the weights that were exported: it loads them, or draws them "
    "(the random seed is the same)."
)
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE.onnx", help="An exported file or folder.")],
    model: Model,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZES",
            help="Shape to try, once for each input: [cyan]4,3,224,224[/]. "
            "Default: several batch sizes and lengths.",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="DTYPE",
            help="Of a checkpoint: as it was exported with --dtype.",
            show_default="that of the file's results",
        ),
    ] = None,
    ranks: Annotated[
        bool,
        typer.Option(
            "--ranks",
            help="Under torchrun: FILE.onnx is the name of files for several ranks, of which each "
            "process runs its own. Without it, one process runs all of them, given any one.",
        ),
    ] = False,
    library: Annotated[
        bool,
        typer.Option(
            "--library",
            help="The native library's operators compute the MoE nodes, not the functions beside "
            "them; says which nodes they did.",
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare an ONNX file, in ONNX Runtime, with the PyTorch model it came from.

    The model's experts are rounded or cast as the file's are, and its linear layers rounded.
    """
    console = Console(file=sys.stderr, quiet=quiet)
    with failures(debug):
        group, file = _own_rank(file) if ranks else (None, file)
        need_file(file)
        model_steps.need_onnxruntime()
        from dynamo_moe.files.file_form import form_of
        from dynamo_moe.language_models import model_in

        file = model_in(file)
        args: tuple[Any, ...] | None = None
        if is_checkpoint(model):
            if shape:
                raise UsageError("--shape does not go with a checkpoint")
            folder, form = Path(model), form_of(file)
            module: nn.Module = model_steps.load_as_in(form, console, folder, _torch_dtype(dtype))
        elif dtype:
            raise UsageError("--dtype needs a checkpoint: a folder with config.json")
        else:
            module, args = model_steps.load(console, model, shape)
            model_steps.round_as_in(form_of(file), console, module, args)
        inputs = [args] if shape and args else None
        report = model_steps.verify(console, file, module, inputs, group, library=library)
        if group is None or group.rank() == 0:
            print_report(report, as_json=as_json, quiet=quiet)
        model_steps.check(report)


def _own_rank(file: Path) -> tuple[dist.ProcessGroup, Path]:
    """Returns the group that torchrun has started, and the file of this process's rank."""
    from dynamo_moe.files.rank_files import rank_path

    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise UsageError("--ranks needs torchrun, which starts a process for each rank")
        dist.init_process_group("gloo")
    group = dist.group.WORLD
    if group is None:
        raise UsageError("--ranks needs a process group")
    return group, rank_path(file, group.rank())


def _plan(plan: str, ranks: int | None) -> str:
    if plan != "experts" and ranks is None:
        raise UsageError(f"--plan {plan} needs --ranks")
    return plan


def _check_together(*pairs: Mapping[str, Any]) -> None:
    for options in pairs:
        if all(options.values()):
            raise UsageError(f"{' and '.join(options)} contradict each other")


def _check_library(library: bool, folder_format: str | None) -> None:
    if library and folder_format != "genai":
        raise UsageError("--library needs --format genai")


def _check_source(
    hf: bool, of_models: Mapping[str, object], of_checkpoints: Mapping[str, object]
) -> None:
    """Checks that no option is given that goes with the other kind of source alone."""
    for name, value in (of_models if hf else of_checkpoints).items():
        if value and hf:
            raise UsageError(f"{name} does not go with a checkpoint")
        if value:
            raise UsageError(f"{name} needs a checkpoint: a folder with config.json")


def _one_output(argument: Path | None, option: Path | None) -> Path:
    if argument is not None and option is not None:
        raise UsageError(f"where to write to is said twice: {argument} and -o {option}")
    out = argument or option
    if out is None:
        raise UsageError("where to write to: name a file, or -o OUT.onnx")
    return out


def _torch_dtype(dtype: Dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    return getattr(torch, dtype)  # type: ignore[no-any-return]


def _rounding(
    experts: str | None, linear: str | None, group: int | None, ignore: list[str] | None
) -> dict[str, Any]:
    """Returns the options of ``quantize``; nothing where nothing is to be rounded."""
    if group is not None and not (experts or linear):
        raise UsageError("--group needs --quantize or --quantize-linear")
    if ignore is not None and not linear:
        raise UsageError("--quantize-ignore needs --quantize-linear")
    for option, name in (("--quantize", experts), ("--quantize-linear", linear)):
        if name is not None and name not in ENCODINGS:
            raise UsageError(f"{option} must be one of {', '.join(ENCODINGS)}; got {name!r}")
    if not (experts or linear):
        return {}
    options: dict[str, Any] = {"weight_format": experts, "linear": linear, "group": group}
    return options if ignore is None else options | {"ignore": [name for name in ignore if name]}


def _check_body(body: str, target: str) -> None:
    from dynamo_moe.moe_nodes.targets.registry import targets_with_body

    takers = targets_with_body(body)
    if target not in takers:
        raise UsageError(f"--body needs --target {' or '.join(takers)}: other targets have none")


def _known_opset(opset: int) -> int:
    import onnx

    from dynamo_moe.exporting import MIN_OPSET

    newest = onnx.defs.onnx_opset_version()
    if not MIN_OPSET <= opset <= newest:
        raise UsageError(f"--opset must be from {MIN_OPSET} to {newest}, got {opset}")
    return opset
