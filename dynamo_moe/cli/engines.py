"""``dynamo-moe engine``, ``bench-engine`` and ``plugin-path``: the way to TensorRT."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

import trt_plugin
from dynamo_moe.cli.common import (
    ENGINES,
    Debug,
    Json,
    Quiet,
    app,
    failures,
    known_architectures,
    name_architecture,
    need_file,
    need_triton,
    need_writable,
    print_json,
    print_report,
    show_bytes,
)
from dynamo_moe.cli.model_loading import UsageError
from dynamo_moe.cli.offloading import ResidentExperts, ResidentMemory, offloading

if TYPE_CHECKING:
    import onnx

    from custom_ops.kernels.layer import Layer
    from dynamo_moe.files.offload_report import OffloadReport

BuilderOption = Annotated[
    Literal["tensorrt", "rtx"] | None,
    typer.Option(
        metavar="NAME",
        help="[cyan]tensorrt[/], or [cyan]rtx[/]: TensorRT for RTX. Default: the one that is "
        "installed, TensorRT before TensorRT for RTX.",
    ),
]


@app.command(
    rich_help_panel=ENGINES,
    epilog="Examples:\n\n"
    "[cyan]dynamo-moe engine swin.onnx --shapes x=1x1x8x8:32x1x8x8:64x1x8x8 -o swin.engine[/]\n\n"
    "[cyan]dynamo-moe engine swin.onnx --builder rtx --arch sm_89 --arch sm_120 --shapes x=4x1x8x8"
    "[/]",
)
def engine(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.onnx", help="A file of target plugin or dense.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT.engine",
            help="The file to write. Default: FILE.engine beside FILE.onnx.",
        ),
    ] = None,
    ranks: Annotated[
        bool,
        typer.Option(
            "--ranks",
            help="FILE.onnx is the file of any rank, or the name that they were exported by: build "
            "the engines of all ranks, OUT.rank0.engine and so on. They get their names once all "
            "are built.",
        ),
    ] = False,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARCH",
            help="GPU architecture to build for, [cyan]sm_89[/] or [cyan]89[/]; may be repeated. "
            "TensorRT builds for this machine's GPU, and stores the MoE kernels for these. "
            "Default: the bundle's, or else this machine's GPU.",
        ),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MIN:USUAL:MAX",
            help="Shapes of an input, like [cyan]x=1x64:16x64:128x64[/]; may be repeated. An "
            "input's second ones belong to a second optimisation profile, and so on.",
        ),
    ] = None,
    kernels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.moek",
            help="The bundle of the layers' kernels. Default: FILE.moek if it is there and no "
            "layer is offloaded; else they are compiled now.",
        ),
    ] = None,
    resident_experts: ResidentExperts = None,
    resident_memory: ResidentMemory = None,
    share_expert_cache: Annotated[
        bool,
        typer.Option(
            "--share-expert-cache",
            help="Execution contexts of the engine take turns with one set of slots, without CUDA "
            "graphs; otherwise each has its own.",
        ),
    ] = False,
    builder: BuilderOption = None,
    timing_cache: Annotated[
        Path | None,
        typer.Option(
            metavar="CACHE",
            help="With TensorRT: file that measured tactics are read from and written to.",
        ),
    ] = None,
    share_kernels: Annotated[
        bool,
        typer.Option(
            "--share-kernels/--no-share-kernels",
            help="Whether equal layers store their kernels once; otherwise each layer is "
            "self-contained.",
        ),
    ] = True,
    with_library: Annotated[
        bool,
        typer.Option("--with-library", help="Store the plugin's library in the engine."),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Build an engine of TensorRT or TensorRT for RTX, whose MoE layers are the plugin."""
    console = Console(stderr=True, quiet=quiet)
    with failures(debug):
        sources = _Source.of_ranks(file) if ranks else []
        if not ranks:
            need_file(file)
        outputs = _outputs([source.file for source in sources] or [file], out, ranks=ranks)
        offload = offloading(resident_experts, resident_memory)
        if share_expert_cache and not offload:
            raise UsageError("--share-expert-cache needs --resident-experts or --resident-memory")
        for path in outputs:
            need_writable(path)
        if kernels:
            need_file(kernels)
        try:
            profiles = trt_plugin.join_profiles(
                [trt_plugin.parse_shapes(text) for text in shapes or ()]
            )
        except ValueError as error:
            raise UsageError(f"--shapes: {error}") from None
        architectures = known_architectures(arch or [])
        installed = trt_plugin.installed_tensorrt("building an engine", builder)
        if timing_cache and installed.is_rtx:
            raise UsageError("--timing-cache: TensorRT for RTX measures nothing when it builds")
        installed.check_targets(architectures)
        if offload and not kernels:
            need_triton()
            architectures = architectures or [_device()]
        building = _Building(
            installed,
            profiles,
            architectures,
            kernels,
            offload,
            share_expert_cache,
            timing_cache,
            share_kernels,
            with_library,
            console,
        )
        sources = sources or [_Source.read(file)]
        # What is missing is said before an engine is built, or experts' weights are copied.
        for source in sources:
            building.check(source)
        if ranks:
            _build_ranks(building, sources, outputs, as_json=as_json)
            return
        [path] = outputs
        report, offloaded = building.build(sources[0], path, path)
        beside = {"offload": offloaded.to_dict()} if offloaded else {}
        print_report(report, as_json=as_json, quiet=quiet, **beside)
        if offloaded and not (as_json or quiet):
            Console().print("", offloaded)
        _print_written(console, outputs, report.seconds)


@app.command(
    name="bench-engine",
    rich_help_panel=ENGINES,
    epilog="Example: [cyan]dynamo-moe bench-engine plugin.engine dense.engine --shape x=16x64[/]",
)
def bench_engine(
    engines: Annotated[
        list[Path],
        typer.Argument(metavar="ENGINE...", help="Engines with the same inputs."),
    ],
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SHAPE",
            help="Shape of an input, like [cyan]x=16x64[/]; may be repeated. Default: the usual "
            "shape of the first engine's first profile.",
        ),
    ] = None,
    warmup: Annotated[
        int, typer.Option(metavar="N", min=0, help="Runs of each engine that are not measured.")
    ] = 10,
    iterations: Annotated[
        int, typer.Option(metavar="N", min=1, help="Runs of each engine that are measured.")
    ] = 100,
    cuda_graph: Annotated[
        bool,
        typer.Option(
            "--cuda-graph/--no-cuda-graph", help="Whether to measure CUDA graphs of the runs, too."
        ),
    ] = True,
    builder: BuilderOption = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run engines on this machine's GPU, in turns on the same inputs, and compare their times.

    It also shows how far each engine's outputs are from those of the first.
    """
    with failures(debug):
        for file in engines:
            need_file(file)
        report = trt_plugin.bench_engines(
            engines,
            _shapes(shape or []),
            warmup=warmup,
            iterations=iterations,
            cuda_graph=cuda_graph,
            builder=builder,
        )
        print_report(report, as_json=as_json, quiet=quiet)


@app.command(rich_help_panel=ENGINES)
def plugin_path(
    self_registering: Annotated[
        bool,
        typer.Option(
            "--self-registering",
            help="For programs that only open a plugin's library: the Triton Inference Server, "
            "Polygraphy, trtexec --staticPlugins.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Print where the TensorRT plugin's library is, as for trtexec --dynamicPlugins."""
    with failures(debug):
        typer.echo(trt_plugin.library_path(self_registering=self_registering))


def _outputs(files: Sequence[Path], out: Path | None, *, ranks: bool) -> list[Path]:
    """Returns the engine's file for each ONNX file."""
    if out is None:
        return [file.with_suffix(".engine") for file in files]
    if not ranks:
        return [out]
    from dynamo_moe.files.rank_files import rank_path

    return [rank_path(out, rank) for rank in range(len(files))]


def _build_ranks(
    building: _Building, sources: Sequence[_Source], outputs: Sequence[Path], *, as_json: bool
) -> None:
    """Builds the engines of all ranks, which get their names once the last one is built."""
    console = building.console
    built: list[tuple[trt_plugin.EngineReport, OffloadReport | None]] = []
    try:
        for source, path in zip(sources, outputs, strict=True):
            console.print(f"Rank {len(built)} of {len(sources)}: {source.file}", soft_wrap=True)
            part = path.with_name(f".{path.name}")
            built.append(building.build(source, part, path))
    except BaseException:
        for report, offloaded in built:
            report.path.unlink()
            _remove_weights(offloaded)
        raise
    table = Table("Rank", "Engine", "Size", "Layers", "Plugins", "Time", box=None, pad_edge=False)
    named = []
    for rank, ((of_part, offloaded), path) in enumerate(zip(built, outputs, strict=True)):
        of_part.path.replace(path)
        contents = replace(of_part.contents, path=path)
        report = replace(of_part, path=path, contents=contents)
        named.append(report.to_dict() | ({"offload": offloaded.to_dict()} if offloaded else {}))
        counts = report.layers, len(report.plugin_layers)
        size, time = decimal(contents.bytes), f"{report.seconds:.1f} s"
        table.add_row(str(rank), Text(str(path)), size, *map(str, counts), time)
    if as_json:
        print_json({"ranks": named})
    elif not console.quiet:
        Console().print(table)
    _print_written(console, outputs, sum(report.seconds for report, _ in built))


def _print_written(console: Console, paths: Sequence[Path], seconds: float) -> None:
    names = f"{paths[0]} to {paths[-1].name}" if len(paths) > 1 else paths[0]
    text = Text.assemble(f"Wrote {names} ", (f"{seconds:.1f} s", "dim"))
    console.print(text, soft_wrap=True)


class _Source(NamedTuple):
    """The ONNX file of an engine, which is opened once, and its content without external data."""

    file: Path
    stored: onnx.ModelProto

    @classmethod
    def read(cls, file: Path) -> _Source:
        from dynamo_moe.files.model_files import load_graph

        return cls(file, load_graph(file))

    @classmethod
    def of_ranks(cls, file: Path) -> list[_Source]:
        """Returns the files of all ranks, given any of them or the name that they have in common.

        Raises:
            ValueError: If they are not all there, or do not fit each other.
        """
        from dynamo_moe.files.rank_files import files_of_ranks, rank_path

        of_first = rank_path(file, 0)
        any_file = of_first if of_first.exists() else file
        need_file(any_file if file.exists() else of_first)
        return [cls(path, stored) for path, stored in files_of_ranks(any_file)]

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the inputs; -1 for a symbolic size."""
        graph = self.stored.graph
        initializers = {tensor.name for tensor in graph.initializer}
        return {
            value.name: tuple(
                size.dim_value if size.HasField("dim_value") else -1
                for size in value.type.tensor_type.shape.dim
            )
            for value in graph.input
            if value.name not in initializers
        }

    def check_functions(self) -> None:
        """Raises a UsageError if MoE layers are inside of functions."""
        import onnx_ir as ir

        from dynamo_moe.files.block_functions import has_moe_in_blocks

        if has_moe_in_blocks(ir.from_proto(self.stored)):
            raise UsageError(
                f"{self.file} has its MoE layers inside of functions, where TensorRT's parser "
                "looks for no plugin: export it without --layers-as-functions"
            )

    def kernel_layers(self, offload: dict[str, Any] | None) -> list[Layer]:
        """Returns the layers to compile kernels for, with options of offloading or None."""
        from dynamo_moe.files.kernel_layers import kernel_layers_of
        from dynamo_moe.files.offloading import offloaded_kernel_layers

        if offload is None:
            return kernel_layers_of(self.stored)
        return offloaded_kernel_layers(self.file, stored=self.stored, **offload)


class _Building(NamedTuple):
    """How engines are built: what the ranks of a model have in common."""

    installed: Any
    profiles: Any
    architectures: list[str]
    kernels: Path | None
    offload: dict[str, Any] | None
    share_expert_cache: bool
    timing_cache: Path | None
    share_kernels: bool
    with_library: bool
    console: Console

    def check(self, source: _Source) -> None:
        """Checks what can be checked of a file before an engine is built."""
        trt_plugin.check_shapes(self.profiles, source.input_shapes())
        if not self.offload:  # Then the file is written anew.
            source.check_functions()
        elif self.kernels:
            _need_kernels(self.kernels, source, self.offload)

    def build(
        self, source: _Source, out: Path, name: Path
    ) -> tuple[trt_plugin.EngineReport, OffloadReport | None]:
        """Builds an engine; ``name`` is the one that it will have, and its weights' file has."""
        offload, progress = self.offload, not self.console.quiet
        with (
            _offloaded(source, name, offload, self.share_expert_cache, self.console) as copied,
            _kernels(source, offload, self.kernels, self.architectures, progress) as bundle,
        ):
            built_of, offloaded = copied
            named = self.architectures or None
            report = trt_plugin.build_engine(
                built_of,
                out,
                self.profiles,
                architectures=named if self.installed.is_rtx or bundle else None,
                builder=self.installed.name,
                kernels=bundle,
                timing_cache=self.timing_cache,
                share_kernels=self.share_kernels,
                with_library=self.with_library,
                progress=progress,
            )
        return report, offloaded


@contextmanager
def _offloaded(
    source: _Source, out: Path, options: dict[str, Any] | None, shared: bool, console: Console
) -> Iterator[tuple[Path, OffloadReport | None]]:
    """Yields the file that an engine is built of, and what it offloads, if anything."""
    file = source.file
    if options is None:
        yield file, None
        return
    from dynamo_moe.files.offloading import offload_graph

    with tempfile.TemporaryDirectory(prefix="dynamo-moe-") as folder:
        copy = Path(folder) / file.name
        weights = out.with_name(f"{out.name}.experts.safetensors")
        with show_bytes(console, f"Writing {weights.name}") as progress:
            report = offload_graph(
                source.stored,
                file,
                copy,
                weights=weights,
                shared_cache=shared,
                progress=progress,
                **options,
            )
        try:
            # The copy is gone when a user reads of it: reports and errors name the file.
            yield copy, replace(report, path=file)
        except BaseException as error:
            _remove_weights(report)
            if isinstance(error, trt_plugin.EngineError):
                text = str(error).replace(str(copy), str(file))
                raise trt_plugin.EngineError(text) from error
            raise


def _remove_weights(report: OffloadReport | None) -> None:
    """Removes the weights that were written for an engine that is not built."""
    if report is not None and report.weights_file and report.is_weights_file_new:
        report.weights_file.unlink()


def _need_kernels(bundle: Path, source: _Source, options: dict[str, Any]) -> None:
    """Raises an EngineError if a bundle has no layers of a file's layers' sizes and formats.

    The plugin compares all that a layer has, when the file is parsed.
    """
    names = ("experts", "top_k", "width", "hidden")

    formats = ("weight_format", "block_rows", "block_columns", "zero_points")
    known = []
    for program in trt_plugin.read(bundle).programs:
        words = program.layer.to_dict()
        values = {name: words[name] for name in names}
        values["resident_experts"] = program.layer.resident_experts
        known.append(values | {name: words[name] for name in formats if name in words})
    for layer in source.kernel_layers(options):
        wanted: dict[str, Any] = {name: getattr(layer.shape, name) for name in names}
        wanted["resident_experts"] = layer.resident_experts or 0
        wanted |= layer.canonical().shape.weight_format.to_dict()
        if wanted not in known:
            text = " ".join(f"{name}={value}" for name, value in wanted.items())
            raise trt_plugin.EngineError(
                f"{source.file}: {bundle} has no kernels of this layer: {text}; compile it with "
                "the same options of offloading"
            )


@contextmanager
def _kernels(
    source: _Source,
    offload: dict[str, Any] | None,
    bundle_path: Path | None,
    architectures: list[str],
    progress: bool,
) -> Iterator[Path | None]:
    """Yields the bundle of a file's layers, compiled now if there is none; None for no layers.

    The bundle beside the file is for layers that are not offloaded.
    """
    beside = source.file.with_suffix(".moek")
    if bundle_path or (offload is None and beside.is_file()):
        yield bundle_path or beside
        return
    layers = source.kernel_layers(offload)
    if not layers:
        yield None
        return
    need_triton()
    with tempfile.TemporaryDirectory(prefix="dynamo-moe-") as folder:
        bundle = Path(folder) / beside.name
        trt_plugin.compile(layers, architectures or [_device()], bundle, progress=progress)
        yield bundle


def _device() -> str:
    """This machine's GPU, as an architecture."""
    import torch

    from custom_ops.kernels.architectures import nearest_architecture

    if not torch.cuda.is_available():
        raise UsageError(
            "what to compile the MoE kernels for, as there is no GPU that PyTorch can use: "
            f"{name_architecture()}"
        )
    return nearest_architecture(*torch.cuda.get_device_capability()).name


def _shapes(texts: list[str]) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for text in texts:
        try:
            name, (smallest, _, largest) = trt_plugin.parse_shapes(text)
        except ValueError as error:
            raise UsageError(f"--shape: {error}") from None
        if smallest != largest:
            raise UsageError(f"--shape takes one shape of an input, got {text!r}")
        shapes[name] = tuple(largest)
    return shapes
