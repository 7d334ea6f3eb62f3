"""The shapes that an engine is built for: its optimisation profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from trt_plugin.engine.installed import EngineError

#: Smallest, usual and largest shape of an input.
Profile = tuple[Sequence[int], Sequence[int], Sequence[int]]


def parse_shapes(text: str) -> tuple[str, Profile]:
    """Reads ``name=MIN:USUAL:MAX`` or ``name=SHAPE``, with shapes such as ``4x3x224x224``.

    Raises:
        ValueError: If it is neither.

    Example:
        >>> parse_shapes("x=1x8:4x8:16x8")
        ('x', ((1, 8), (4, 8), (16, 8)))
    """
    name, _, shapes = text.partition("=")
    parts = shapes.split(":")
    try:
        read = [tuple(int(size) for size in part.split("x")) for part in parts]
    except ValueError:
        read = []
    if not name or len(read) not in (1, 3) or len({len(shape) for shape in read}) != 1:
        raise ValueError(
            f"shapes must be NAME=SHAPE or NAME=MIN:USUAL:MAX, with SHAPE like 4x8; got {text!r}"
        )
    smallest, usual, largest = read if len(read) == 3 else read * 3
    for few, more in pairwise((smallest, usual, largest)):
        if any(low > high for low, high in zip(few, more, strict=True)):
            raise ValueError(f"shapes must grow from the smallest to the largest, got {text!r}")
    return name, (smallest, usual, largest)


def join_profiles(shapes: Sequence[tuple[str, Profile]]) -> list[dict[str, Profile]]:
    """Returns the profiles that inputs' shapes make: an input's second shapes are the second's.

    Args:
        shapes: Inputs and their shapes, as from :func:`parse_shapes`. An input that is named once
            has these shapes in every profile.

    Raises:
        ValueError: If two inputs are named several times, but not equally often.

    Example:
        >>> join_profiles([("ids", ((1, 1),) * 3), ("ids", ((1, 64),) * 3)])
        [{'ids': ((1, 1), (1, 1), (1, 1))}, {'ids': ((1, 64), (1, 64), (1, 64))}]
    """
    by_input: dict[str, list[Profile]] = {}
    for name, profile in shapes:
        by_input.setdefault(name, []).append(profile)
    counts = {name: len(profiles) for name, profiles in by_input.items() if len(profiles) > 1}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count} times" for name, count in counts.items())
        raise ValueError(f"inputs of several profiles must be named equally often, got {listed}")
    count = max(counts.values(), default=min(len(by_input), 1))
    return [
        {name: profiles[at if len(profiles) > 1 else 0] for name, profiles in by_input.items()}
        for at in range(count)
    ]


def add_profiles(
    builder: Any,
    network: Any,
    config: Any,
    profiles: Mapping[str, Profile] | Sequence[Mapping[str, Profile]],
) -> int:
    """Adds optimisation profiles to a configuration; returns how many.

    Raises:
        EngineError: If an input's shapes are missing, do not fit the file's, or TensorRT refuses
            them.
    """
    listed = [profiles] if isinstance(profiles, Mapping) else list(profiles)
    inputs = [network.get_input(at) for at in range(network.num_inputs)]
    check_shapes(listed, {tensor.name: tuple(tensor.shape) for tensor in inputs})
    added = [shapes for shapes in listed if shapes]
    for shapes in added:
        profile = builder.create_optimization_profile()
        for name, (smallest, usual, largest) in shapes.items():
            profile.set_shape(name, tuple(smallest), tuple(usual), tuple(largest))
        if config.add_optimization_profile(profile) < 0:
            raise EngineError(f"TensorRT refuses the shapes {dict(shapes)}")
    return len(added)


def check_shapes(
    profiles: Sequence[Mapping[str, Profile]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Compares profiles with the shapes of a file's inputs, in which -1 is a symbolic size.

    Raises:
        EngineError: If an input's shapes are missing, or do not fit the file's.
    """
    for profile in profiles or [{}]:
        _check(profile, shapes)


def _check(profile: Mapping[str, Profile], shapes: Mapping[str, tuple[int, ...]]) -> None:
    unknown = [name for name in profile if name not in shapes]
    if unknown:
        raise EngineError(f"the file has no input {unknown[0]}; its inputs: {', '.join(shapes)}")
    missing = [name for name, shape in shapes.items() if -1 in shape and name not in profile]
    if missing:
        listed = ", ".join(f"{name} {_text(shapes[name])}" for name in missing)
        raise EngineError(
            f"these inputs have symbolic sizes: {listed}; give the smallest, usual and largest "
            f"shape of each, as with --shapes {missing[0]}={_example(shapes[missing[0]])}"
        )
    for name, bounds in profile.items():
        for shape in bounds:
            sizes = shapes[name]
            if len(shape) != len(sizes) or any(
                size not in (-1, wanted) for size, wanted in zip(sizes, shape, strict=True)
            ):
                raise EngineError(
                    f"input {name} has the shape {_text(sizes)} in the file; {_text(shape)} does "
                    "not fit"
                )


def _text(shape: Sequence[int]) -> str:
    """``[?, 8]`` for ``(-1, 8)``."""
    return f"[{', '.join('?' if size < 0 else str(size) for size in shape)}]"


def _example(shape: Sequence[int]) -> str:
    """``1x8:4x8:16x8`` for ``(-1, 8)``."""
    return ":".join(
        "x".join(str(symbolic if size < 0 else size) for size in shape) for symbolic in (1, 4, 16)
    )
