"""The small model around an MoE module, its weights, and a case's description.

Legend: B batch, L length, D model width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# All different, so that a transposed layout is not mistaken for the other.
DIM, HIDDEN, EXPERTS, TOP_K = 32, 40, 6, 2
_CLASSES = 5
_BIASES = ("b1", "b2")


def tokens(batch: int = 2, length: int = 5, seed: int = 0) -> tuple[Tensor, ...]:
    """Returns the usual input ``[B, L, D]``."""
    return (torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(seed)),)


@dataclass(frozen=True, eq=False)
class Case:
    """One structure.

    Attributes:
        name: Short and unique.
        origin: Repository and file that write their MoE module in this way.
        make: Creates the model, with any weights; :meth:`build` sets them.
        moe_paths: Paths of the MoE modules, each of which should become one node.
        num_experts: Number of experts in each of them.
        convertible: Whether the modules should be converted.
        reason: Why they should be left as they are.
        exact: A token's result depends on other tokens, as with a capacity: a conversion must drop
            exactly the same ones.
        cuda_only: The module raises for tensors that are not on CUDA: run it under
            :class:`ClaimsCuda`.
        random: The module draws random numbers in evaluation: compare with the same seed.
        notes: What is special about it.
        args: Example inputs for a batch, a length and a seed.
        dynamic: Symbolic dimensions, by argument.
        expert_slices: Maps an MoE module to the tensors of each expert; None to find them by shape.
    """

    name: str
    origin: str
    make: Callable[[], nn.Module]
    moe_paths: tuple[str, ...]
    num_experts: int = EXPERTS
    convertible: bool = True
    reason: str = ""
    exact: bool = False
    cuda_only: bool = False
    random: bool = False
    notes: str = ""
    args: Callable[[int, int, int], tuple[Tensor, ...]] = tokens
    dynamic: Mapping[str, Mapping[int, str]] | None = None
    expert_slices: Callable[[nn.Module], list[list[Tensor]]] | None = None

    @property
    def layers(self) -> int:
        """How many MoE modules the model has."""
        return len(self.moe_paths)

    def build(self) -> nn.Module:
        """Returns the model in evaluation mode, with the same weights every time."""
        torch.manual_seed(0)
        model = self.make()
        randomise(model)
        return model.eval()


class ClaimsCuda(TorchFunctionMode):
    """Makes CPU tensors claim to be on CUDA; everything else is unchanged."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Each access creates a new wrapper of the getter, so they are equal but not identical.
        if func == torch.Tensor.is_cuda.__get__:
            return True
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Mixes the tokens of a sequence, then calls the MoE module as its own parent does.

    Args:
        moe: The module.
        name: The attribute for the module.
        call: Calls the module as its parent does, with ``[B, L, D]`` and returning ``[B, L, D]``.
    """

    def __init__(
        self, moe: nn.Module, name: str, call: Callable[[nn.Module, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.mix_norm = nn.LayerNorm(DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.moe_norm = nn.LayerNorm(DIM)
        self.add_module(name, moe)
        self._name, self._call = name, call

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.mix_norm(x).mean(1, keepdim=True))
        return x + self._call(getattr(self, self._name), self.moe_norm(x))


class Model(nn.Module):
    """Two blocks and a head.

    Args:
        make: Creates one MoE module.
        name: The attribute of a block that holds the module.
        call: Calls the module as a block does.
        layers: Number of blocks.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        name: str = "mlp",
        call: Callable[[nn.Module, Tensor], Tensor] = lambda moe, x: moe(x),
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Block(make(), name, call) for _ in range(layers))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def flat(moe: nn.Module, x: Tensor) -> Tensor:
    """Calls a module that takes tokens ``[T, D]``."""
    return moe(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def first(moe: nn.Module, x: Tensor) -> Tensor:
    """Calls a module that returns a tuple, and returns its first element."""
    return moe(x)[0]


def in_blocks(name: str, layers: int = 2) -> tuple[str, ...]:
    """Returns the paths of the MoE modules of a :class:`Model`."""
    return tuple(f"layers.{layer}.{name}" for layer in range(layers))


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Gives every parameter, and every correction bias, values that have a visible effect.

    Tokens of unit variance give logits and hidden values with a deviation of about 1.5, so that
    activations can be distinguished and routers decide. A layout is only known by its width.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(like: Tensor, scale: float) -> Tensor:
        return scale * torch.randn(like.shape, generator=generator)

    for module in model.modules():
        # What all tokens have in common must not determine the experts.
        bias = 0.05 if isinstance(module, nn.LayerNorm) else 0.3
        for name, parameter in module.named_parameters(recurse=False):
            if "correction_bias" in name:
                parameter.copy_(normal(parameter, 0.1))
            elif "bias" in name or name in _BIASES:
                parameter.copy_(normal(parameter, bias))
            elif parameter.ndim < 2:
                parameter.add_(normal(parameter, 0.1))
            else:
                parameter.copy_(normal(parameter, 1.5 * DIM**-0.5))
        for name, buffer in module.named_buffers(recurse=False):
            if "bias" in name:
                buffer.copy_(normal(buffer, 0.1))


def options(**values: Any) -> Any:
    """Returns an object with attributes, as modules keep their configurations."""
    from types import SimpleNamespace

    return SimpleNamespace(**values)
