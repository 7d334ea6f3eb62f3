"""Builds an engine of a language model with the two profiles that ``run_engine --prompt`` wants."""

import argparse
import re
from pathlib import Path

import onnx

import trt_plugin

# An input's smallest, usual and largest shape.
Shapes = tuple[tuple[int, ...], ...]


def shapes(path: str, **sizes: tuple[int, int, int]) -> dict[str, Shapes]:
    """Returns the shapes of a file's inputs.

    Args:
        path: A file of ``export_language_model``.
        sizes: The smallest, usual and largest of each symbolic size. Layers with a bounded window
            have ``past`` as far as it reaches, and those with blocks of tokens the full ones of
            ``past``, and up to a token less than one behind them.
    """

    def size(dim: onnx.TensorShapeProto.Dimension, at: int) -> int:
        part = re.fullmatch(r"(last|blocks_of|rest_of)_(\d+)", dim.dim_param)
        if part:
            past, number = sizes["past"], int(part[2])
            # Any number of tokens may wait for a block, from none to one less than a block.
            waiting = 0, past[1] % number, min(past[2], number - 1)
            parts = {"last": min(number, past[at]), "blocks_of": past[at] // number}
            return parts.get(part[1], waiting[at])
        return sizes[dim.dim_param][at] if dim.dim_param else dim.dim_value

    inputs = onnx.load(path, load_external_data=False).graph.input
    dims = {value.name: value.type.tensor_type.shape.dim for value in inputs}
    return {
        name: tuple(tuple(size(dim, at) for dim in each) for at in range(3))
        for name, each in dims.items()
    }


def profiles(path: str, batch: int, prompt: int, length: int) -> list[dict[str, Shapes]]:
    """Returns a profile for prompts and one for each further token.

    Args:
        path: A file of ``export_language_model``.
        batch: The most prompts at once.
        prompt: The most tokens of a prompt.
        length: The most tokens of a text, the prompt included.
    """
    rows, past = (1, 1, batch), length - 1
    prompts = {"sequence": (1, prompt, prompt), "past": (0, 0, 0)}
    steps = {"sequence": (1, 1, 1), "past": (1, min(prompt, past), past)}
    return [
        shapes(path, batch=rows, total_sequence=_sums(**sizes), **sizes)
        for sizes in (prompts, steps)
    ]


def _sums(sequence: tuple[int, int, int], past: tuple[int, int, int]) -> tuple[int, int, int]:
    smallest, usual, largest = map(sum, zip(sequence, past, strict=True))
    return smallest, usual, largest


def main() -> None:
    """Builds the engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="file of export_language_model, target plugin or dense")
    parser.add_argument("engine", help="the file to write")
    parser.add_argument("--arch", action="append", help="such as sm_89; once for each")
    parser.add_argument("--kernels", help="a bundle; default: the model's .moek, if there")
    parser.add_argument("--batch", type=int, default=1, help="the most prompts at once")
    parser.add_argument("--prompt", type=int, default=512, help="the most tokens of a prompt")
    parser.add_argument("--length", type=int, default=2048, help="the most tokens of a text")
    given = parser.parse_args()
    if given.batch < 1 or not 1 <= given.prompt < given.length:
        parser.error("--batch must be at least 1, and --length more than --prompt")
    sizes = profiles(given.model, given.batch, given.prompt, given.length)
    beside = Path(given.model).with_suffix(".moek")
    report = trt_plugin.build_engine(
        given.model,
        given.engine,
        sizes,
        architectures=given.arch,
        kernels=given.kernels or (beside if beside.exists() else None),
    )
    print(f"{report.path}: {report.builder}, {report.profiles} profiles")


if __name__ == "__main__":
    main()
