"""Packs a plan and its compiled kernels as a program of a bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from struct import Struct

from custom_ops.dtypes import CODES
from custom_ops.kernels import expressions, spec
from custom_ops.kernels.layer import Layer
from custom_ops.options import SIZES, Flag
from custom_ops.weight_formats import FORMAT_NAMES, WeightFormat
from trt_plugin.bundle import (
    PARAMETER_BYTES,
    Argument,
    Buffer,
    Expression,
    Kernel,
    Launch,
    LayerRecord,
    Program,
    Range,
    TensorMap,
)
from trt_plugin.bundle.records import FLAGS_WITHOUT_OPTION, SYMBOLS, ZERO_POINT_KINDS
from trt_plugin.compiling.tasks import Compiled, CompileError, MapLayout, Task, task_for

_FLOAT32 = Struct("<f")
# By CUtensorMapDataType: name and bytes of an element.
_MAP_DTYPES = {6: ("float16", 2), 7: ("float32", 4), 9: ("bfloat16", 2)}
# Triton's kernels end with two pointers to scratch memory, which ours do not use.
_SCRATCH = (Argument("null"), Argument("null"))


def program_for(plan: spec.ForwardPlan, compiled: Mapping[str, Compiled]) -> Program:
    """Returns the program that launches a plan's kernels.

    Args:
        plan: The plan.
        compiled: Each kernel's result under its task's JSON.

    Raises:
        CompileError: If a kernel's parameters are not those that the launcher would pass.
    """
    packer = _Packer(plan, compiled)
    ranges = tuple(packer.range(token_range) for token_range in plan.ranges)
    # Tables are integers; what lies in the slots does not matter as long as they are empty.
    state = tuple(
        Buffer(
            buffer.name, stored_expression(buffer.size), zeroed=not buffer.dtype.is_floating_point
        )
        for buffer in plan.state
    )
    kernels = tuple(packer.kernels.values())
    capability = plan.architecture.capability
    return Program(layer_record(plan.layer), capability, ranges, kernels, state)


class _Packer:
    """Collects the kernels that a plan's launches need."""

    def __init__(self, plan: spec.ForwardPlan, compiled: Mapping[str, Compiled]) -> None:
        self.architecture = plan.architecture
        self.compiled = compiled
        self.state = [buffer.name for buffer in plan.state]
        self.kernels: dict[str, Kernel] = {}

    def range(self, token_range: spec.TokenRange) -> Range:
        """Returns a range of tokens as a bundle stores it."""
        names = [buffer.name for buffer in token_range.buffers]
        wave = (
            replace(
                self._launch(wave_launch.kernel, names),
                side=wave_launch.side,
                after=wave_launch.after,
            )
            for wave_launch in token_range.wave
        )
        return Range(
            token_range.first,
            token_range.last,
            tuple(
                Buffer(buffer.name, stored_expression(buffer.size))
                for buffer in token_range.buffers
            ),
            launches=tuple(self._launch(kernel, names) for kernel in token_range.launches),
            wave=tuple(wave),
            waves=stored_expression(token_range.waves) if token_range.wave else None,
            epilogue=tuple(self._launch(kernel, names) for kernel in token_range.epilogue),
        )

    def _launch(self, kernel: spec.KernelSpec, buffers: list[str]) -> Launch:
        task = task_for(kernel, self.architecture)
        key = task.to_json()
        result = self.compiled[key]
        self.kernels.setdefault(key, _kernel(task, result))
        arguments = (*_arguments(kernel, result.maps, buffers, self.state), *_SCRATCH)
        _check_parameters(task, arguments, result)
        x, y, z = (stored_expression(axis) for axis in kernel.grid)
        return Launch(list(self.kernels).index(key), arguments, (x, y, z))


def layer_record(layer: Layer) -> LayerRecord:
    """Returns a layer as a bundle stores it; options without an effect are 0."""
    layer = layer.canonical()
    shape = layer.shape
    present = {"b1": shape.b1, "b2": shape.b2, "tf32": layer.tf32}
    flags = sum(FLAGS_WITHOUT_OPTION[name] for name in present if present[name])
    words: dict[int, int | float] = {size.slot.index: getattr(shape, size.name) for size in SIZES}
    for record in filter(None, (shape.router, shape.options, shape.layout)):
        for row in record.rows:
            value = getattr(record, row.name)
            if not row.has_effect(record):
                continue
            if isinstance(row.slot, Flag):
                flags |= row.slot.bit if row.code(value) else 0
            else:
                words[row.slot.index] = _float32(value) if row.type is float else row.code(value)
    dtypes = (
        shape.tokens_dtype,
        shape.weight_format.bias_dtype,
        shape.routing_dtype,
        shape.weights_dtype,
    )
    further = {
        "selection_dtype": CODES.index(shape.selection_dtype),
        "resident_experts": layer.resident_experts or 0,
        **_storage(shape.weight_format),
    }
    words |= {LayerRecord._fields.index(name): word for name, word in further.items()}
    head = (int(shape.router is None), *map(CODES.index, dtypes), flags)
    indices = range(len(head), len(LayerRecord._fields))
    return LayerRecord(*head, *(words.get(index, 0) for index in indices))


def _storage(weight_format: WeightFormat) -> dict[str, int]:
    words = weight_format.to_dict()
    return {
        "weight_format": 1 + FORMAT_NAMES.index(weight_format.name),
        "block_rows": int(words.get("block_rows", 0)),
        "block_columns": int(words.get("block_columns", 0)),
        "scales_dtype": CODES.index(weight_format.scales_dtype),
        "zero_points": ZERO_POINT_KINDS.index(str(words.get("zero_points", "none"))),
    }


def _float32(value: float) -> float:
    rounded: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    return rounded


def _kernel(task: Task, result: Compiled) -> Kernel:
    return Kernel(
        name=result.info.name,
        description=task.description,
        image=result.cubin,
        num_warps=result.num_warps,
        shared_memory=result.shared_memory,
        dependent_launch=result.dependent_launch,
        registers=result.info.registers,
        local_memory=result.info.local_memory,
    )


def _arguments(
    kernel: spec.KernelSpec, layouts: tuple[MapLayout, ...], buffers: list[str], state: list[str]
) -> Iterator[Argument]:
    remaining = iter(layouts)
    for argument in kernel.parameters.values():
        match argument:
            case spec.TensorPointer(tensor):
                yield Argument("tensor", tensor)
            case spec.WorkspacePointer(buffer):
                yield Argument("workspace", buffers.index(buffer))
            case spec.StatePointer(buffer):
                yield Argument("state", state.index(buffer))
            case spec.Scalar(value):
                yield Argument("i32", stored_expression(value))
            case spec.TensorMap():
                yield Argument("tensor_map", _tensor_map(argument, next(remaining), state))
                # The kernel also takes shape and strides, outermost first, but does not use them.
                for size in argument.shape:
                    yield Argument("i32", stored_expression(expressions.Expression.of(size)))
                for stride in argument.strides:
                    yield Argument("i64", stored_expression(expressions.Expression.of(stride)))


def _tensor_map(argument: spec.TensorMap, layout: MapLayout, state: list[str]) -> TensorMap:
    name, element = _MAP_DTYPES[layout.dtype]
    if name != str(argument.dtype).removeprefix("torch."):
        raise ValueError(f"the tensor map of {argument.tensor} has {argument.dtype}, not {name}")
    inner, *outer = argument.strides[::-1]
    return TensorMap(
        tensor=state.index(argument.tensor) if argument.tensor in state else argument.tensor,
        dtype=layout.dtype,
        swizzle=layout.swizzle,
        sizes=argument.shape[::-1],
        strides=tuple(element * stride for stride in (inner, *outer)),
        box=layout.box[::-1],
    )


def stored_expression(value: expressions.Expression) -> Expression:
    """Returns an expression as a bundle stores it."""
    instructions = []
    for part in value.postfix():
        opcode = expressions.OPERATIONS.index(part.operation)
        symbol = part.operation == "symbol"
        operand = SYMBOLS.index(str(part.value)) if symbol else int(part.value)
        instructions.append((opcode, operand))
    return Expression(tuple(instructions), str(value))


def _check_parameters(task: Task, arguments: tuple[Argument, ...], result: Compiled) -> None:
    passed = [PARAMETER_BYTES[argument.kind] for argument in arguments]
    taken = [parameter.size for parameter in result.info.parameters]
    if passed != taken:
        raise CompileError(
            f"{task} cannot be launched",
            f"the launcher would pass parameters of {passed} bytes, the cubin has {taken}",
            task.values,
        )
