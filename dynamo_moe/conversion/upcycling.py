"""``upcycle``: a dense model's MLPs become MoE layers whose experts are copies of them.

Legend: B batch, L length, D model width, H hidden width, E experts.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dynamo_moe.conversion.activation import identify_activation
from dynamo_moe.conversion.comparison import compare
from dynamo_moe.conversion.observation import check_no_hooks, has_values, random_tokens
from dynamo_moe.conversion.reports import Unrecognised
from dynamo_moe.evaluation import evaluating
from dynamo_moe.json_values import json_values
from dynamo_moe.modules import DroplessMoE
from dynamo_moe.private.pytorch import shallow_copy

if TYPE_CHECKING:
    from rich.table import Table

_ROUTER_STD = 0.02


@dataclass(frozen=True)
class UpcyclingReport:
    """The result of :func:`upcycle`.

    Attributes:
        upcycled: The paths of the new :class:`dynamo_moe.modules.DroplessMoE` layers.
        left: The MLPs that were left as they are, each with the reason.
        num_experts: Experts per layer.
        top_k: Experts per token.
    """

    upcycled: tuple[str, ...]
    left: tuple[Unrecognised, ...]
    num_experts: int
    top_k: int

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain values, for JSON."""
        return json_values(self)

    def __rich__(self) -> Table:
        """Returns a table for the terminal."""
        from rich.markup import escape
        from rich.table import Table

        plural = "" if len(self.upcycled) == 1 else "s"
        title = f"{len(self.upcycled)} MLP{plural} upcycled"
        table = Table(title=title, title_justify="left")
        for column in ("module", "now"):
            table.add_column(column)
        for path in self.upcycled:
            table.add_row(path, f"{self.num_experts} experts, {self.top_k} per token")
        for left in self.left:
            table.add_row(left.module, f"[yellow]left: {escape(left.reason)}[/]")
        return table


def upcycle(
    model: nn.Module,
    num_experts: int,
    top_k: int,
    *,
    layers: Callable[[str], bool] | None = None,
    seed: int = 0,
) -> UpcyclingReport:
    """Turns a dense model's MLPs into MoE layers that compute the same, in place.

    This is sparse upcycling (Komatsuzaki et al. 2022, https://arxiv.org/abs/2212.05055): each
    expert begins as a copy of the MLP, behind a new router ``nn.Linear(D, E, bias=False)``. The
    weights of a token's experts sum to 1, so the model's results stay the same up to rounding,
    until training or noise makes the experts differ.

    MLPs are recognised by their structure:

    - ``linear1``, ``activation`` and ``linear2`` of ``nn.TransformerEncoderLayer`` and
      ``nn.TransformerDecoderLayer``, whose fast path, which has no MoE layers, is switched off;
    - ``intermediate`` and ``output`` of transformers' BERT and its relatives;
    - ``fc1``, an activation and ``fc2`` of one module, as in many of transformers' models.

    An MLP becomes an MoE layer only if its module then gives the same numbers on a few random
    tokens, in evaluation mode. In training there is no longer dropout between the two products:
    that of ``nn.Transformer*Layer`` and one called ``activation_dropout`` are removed; any other
    would act on the MoE layer's result.

    The experts have the MLP's dtype, device and ``requires_grad``; the routers, which are new, can
    always be trained. Optimizers made before hold the MLPs' parameters, so make them afterwards.

    Args:
        model: The dense model.
        num_experts: Experts per layer, E.
        top_k: Experts per token, in ``1..num_experts``. With 1, a token's only weight is always 1,
            and no gradient reaches the routers.
        layers: Whether to convert an MLP, given the path where the MoE layer will be, such as
            ``"encoder.layer.3.intermediate"``. None: all are converted.
        seed: Seed of the routers' weights, which are drawn from a normal distribution of standard
            deviation 0.02.

    Returns:
        The paths of the MoE layers, and which MLPs were left as they are.

    Raises:
        ValueError: If ``num_experts`` or ``top_k`` is out of range, or no MLP could be converted;
            the model is then as it was.

    Example:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> upcycle(layer, num_experts=4, top_k=2).upcycled
        ('linear1',)
    """
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be in 1..{num_experts}, got {top_k}")
    generator = torch.Generator().manual_seed(seed)
    # Not the modules of the model but those that hold an MLP: the rest can be freed on the way.
    mlps = [
        (f"{path}.{mlp.target}" if path else mlp.target, module, mlp)
        for path, module in model.named_modules()
        if (mlp := _find_mlp(module)) is not None
    ]
    holders, upcycled, left = set(), [], []
    for path, module, mlp in mlps:
        if layers is not None and not layers(path):
            continue
        try:
            layer = _moe_layer(module, mlp, num_experts, top_k, generator)
            if has_values(module):
                _check(module, mlp, layer)
        except ValueError as refusal:
            left.append(Unrecognised(path, type(module).__name__, str(refusal)))
            continue
        _put(module, mlp, layer)
        holders.add(module)
        upcycled.append(path)
    if not upcycled:
        # Most layers of a model are alike: one of each reason is enough.
        examples = {refused.reason: refused.module for refused in reversed(left)}
        reasons = "".join(f"; {module}: {reason}" for reason, module in examples.items())
        if layers and mlps and not left:
            reasons = f": layers selects none of the {len(mlps)} that there are"
        raise ValueError(f"no MLP to upcycle was found{reasons}")
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and holders & {*encoder.layers}:
            # The encoder reads linear1's weights, and nested tensors would reach the MoE layers.
            encoder.use_nested_tensor = False
    return UpcyclingReport(tuple(upcycled), tuple(left), num_experts, top_k)


@dataclass(frozen=True)
class _Mlp:
    """Where a module holds its MLP.

    Attributes:
        first: The path of the first ``nn.Linear(D, H)``.
        activation: The path of the activation that follows it.
        second: The path of ``nn.Linear(H, D)``.
        target: The path that the MoE layer gets.
        emptied: The paths of the modules that do nothing afterwards.
        run: Runs the module on tokens ``[B, L, D]``.
    """

    first: str
    activation: str
    second: str
    target: str
    emptied: tuple[str, ...]
    run: Callable[[Any, Tensor], Any]


def _run_intermediate_and_output(module: Any, x: Tensor) -> Any:
    hidden = module.intermediate(x)
    residuals = len(inspect.signature(module.output.forward).parameters) - 1
    return module.output(hidden, *[x] * residuals)


def _run_alone(module: nn.Module, x: Tensor) -> Any:
    """Runs a module on tokens, its first argument, without masks and the like."""
    parameters = list(inspect.signature(module.forward).parameters.values())[1:]
    required = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return module(x, *[None] * len(required))


_ENCODER_LAYER = _Mlp(
    "linear1", "activation", "linear2", "linear1", ("activation", "dropout", "linear2"), _run_alone
)
_DECODER_LAYER = replace(_ENCODER_LAYER, run=lambda module, x: module(x, x))
_BERT = _Mlp(
    "intermediate.dense", "intermediate.intermediate_act_fn", "output.dense",
    "intermediate", ("output.dense",), _run_intermediate_and_output,
)  # fmt: skip
_TWO_LINEARS = tuple(
    _Mlp("fc1", activation, "fc2", "fc1", (activation, "fc2"), _run_alone)
    for activation in ("activation_fn", "act", "act_fn", "activation")
)


def _find_mlp(module: nn.Module) -> _Mlp | None:
    """Returns where the module holds an MLP, or None."""
    if isinstance(module, nn.TransformerEncoderLayer):
        candidates: tuple[_Mlp, ...] = (_ENCODER_LAYER,)
    elif isinstance(module, nn.TransformerDecoderLayer):
        candidates = (_DECODER_LAYER,)
    else:
        candidates = (_BERT, *_TWO_LINEARS)
    for mlp in candidates:
        first, second = _get(module, mlp.first), _get(module, mlp.second)
        if (
            isinstance(first, nn.Linear)
            and isinstance(second, nn.Linear)
            and first.weight.shape == second.weight.shape[::-1]
            and callable(_get(module, mlp.activation))
        ):
            return mlp
    return None


def _get(module: nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _moe_layer(
    module: nn.Module, mlp: _Mlp, num_experts: int, top_k: int, generator: torch.Generator
) -> DroplessMoE:
    """Returns the layer whose experts are copies of the module's MLP, or raises ValueError."""
    first, second = _get(module, mlp.first), _get(module, mlp.second)
    for part in (_get(module, path) for path in (mlp.target, *mlp.emptied)):
        if isinstance(part, nn.Module):
            check_no_hooks(part)
    options = identify_activation(_get(module, mlp.activation))

    def copies(weight: Tensor) -> nn.Parameter:
        repeated = weight.detach().repeat(num_experts, *[1] * weight.ndim)
        return nn.Parameter(repeated, weight.requires_grad)

    # On the meta device it draws none of the global random numbers.
    router = nn.Linear(first.in_features, num_experts, bias=False, device="meta")
    drawn_ED = torch.randn(num_experts, first.in_features, generator=generator) * _ROUTER_STD
    router.weight = nn.Parameter(drawn_ED.to(first.weight.device, first.weight.dtype))
    b1, b2 = (None if linear.bias is None else copies(linear.bias) for linear in (first, second))
    layer = DroplessMoE(
        router, copies(first.weight.mT), b1, copies(second.weight.mT), b2, top_k,
        options.activation,
    )  # fmt: skip
    return layer.train(first.training)


def _put(module: nn.Module, mlp: _Mlp, layer: nn.Module) -> None:
    """Puts the MoE layer into its place, and empties the modules whose work it does."""
    values: dict[str, Any] = {mlp.target: layer}
    for path in mlp.emptied:
        values[path] = nn.Identity().train(layer.training)
    if isinstance(getattr(module, "activation_dropout", None), nn.Module):
        values["activation_dropout"] = nn.Identity().train(layer.training)
    elif hasattr(module, "activation_dropout"):
        values["activation_dropout"] = 0.0
    if isinstance(module, nn.TransformerEncoderLayer):
        # The fast path reads the weights of linear1; this is what it asks for first.
        values["activation_relu_or_gelu"] = 0
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, value)


def _check(module: nn.Module, mlp: _Mlp, layer: DroplessMoE) -> None:
    """Raises ValueError unless a twin that has the MoE layer gives the module's numbers."""
    if layer.w1.dtype.itemsize < 4:
        # Half precision would hide what differs, or differ itself.
        module, layer = copy.deepcopy(module).float(), copy.deepcopy(layer).float()
    candidate = shallow_copy(module)
    _put(candidate, mlp, layer)
    x_BLD = random_tokens(2, 5, layer.w1.shape[1], like=layer.w1)

    def tensors(module: nn.Module, x: Tensor) -> list[Tensor]:
        result = mlp.run(module, x)
        values = result if isinstance(result, (tuple, list)) else [result]
        return [value for value in values if isinstance(value, Tensor)]

    with evaluating(module, candidate):
        compare(partial(tensors, module), partial(tensors, candidate), [x_BLD], "an MLP")
