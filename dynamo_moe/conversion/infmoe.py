"""``load_infmoe``: a layer of InfMoE's ``MoELayerPlugin``, made from its weight files.

The formulas are those of its documentation (https://github.com/Harry-Chen/InfMoE, README).

Legend: D model width, H hidden width, E experts, n one expert.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from custom_ops.expert_weights import ExpertWeights
from dynamo_moe import local_experts, packed_experts
from dynamo_moe.conversion.reports import few
from dynamo_moe.modules import ConvertedModule

Sublayer = Literal["T5_FF", "Identity"]
Variant = Literal["default", "cpm_2", "base_layer"]
Array = NDArray[np.floating]

_NORM_EPS = 1e-6
_WEIGHTS = ("layer_norm_weight", "wi_0_weight", "wi_1_weight", "wo_weight")
_NAME = re.compile(rf"(0|[1-9][0-9]*)/({'|'.join(_WEIGHTS)})")
_FLOAT_BYTES = (2, 4, 8)
_EXPERTS_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# What NumPy and zipfile raise for damaged files.
_UNREADABLE = (ValueError, OSError, EOFError, NotImplementedError, zipfile.BadZipFile)
# How many names a message lists.
_SHOWN = 5


class InfMoELayer(ConvertedModule):
    """InfMoE's layer ``T5_FF``: ``x + a * F(rms_norm(x))``, F one expert's gated GELU.

    Legend: D model width, H hidden width, E experts.

    Args:
        router_weight: ``[E, D]``; a token goes to the expert with the greatest product.
        w1: ``[E, 2H, D]``, gate rows (``wi_0``) before up rows (``wi_1``), times the norm's weight.
        w2: ``[E, D, H]``.
        mixes: Whether a is the sigmoid of the chosen expert's product (``base_layer``) or 1.
    """

    def __init__(
        self, router_weight: nn.Parameter, w1: nn.Parameter, w2: nn.Parameter, *, mixes: bool
    ) -> None:
        super().__init__()
        self.router_weight, self.w1, self.w2 = router_weight, w1, w2
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``[..., D]`` in x's dtype for tokens ``[..., D]``."""
        return packed_experts.dropless(
            self, self.experts_weights, x, self.router_weight, top_k=1,
            # The softmax over one logit is 1. Both choose by the product itself.
            scoring="sigmoid" if self.mixes else "topk_softmax", renormalize=False,
            activation="gelu_tanh", gated=True,
            pre_norm="rms", norm_eps=_NORM_EPS, residual=True,
        )  # fmt: skip

    def experts_parameters(self) -> dict[str, nn.Parameter]:
        """Returns ``w1`` and ``w2``."""
        return {"w1": self.w1, "w2": self.w2}

    def experts_weights(self) -> ExpertWeights:
        """Returns the weights."""
        return ExpertWeights(self.w1, None, self.w2, None)

    def extra_repr(self) -> str:
        """Sizes and options, for ``print(model)``."""
        if packed_experts.of(self) is not None or local_experts.of(self) is not None:
            return f"mixes={self.mixes}"
        experts, width, hidden = self.w2.shape
        return (
            f"experts={experts}, width={width}, hidden={hidden}, mixes={self.mixes}, "
            f"experts_dtype={self.w1.dtype}"
        )


def load_infmoe(
    npz_path: str | PathLike[str],
    centroids: Array | Tensor | str | PathLike[str],
    *,
    sublayer: Sublayer = "T5_FF",
    variant: Variant = "default",
    layernorm_weight: Array | Tensor | None = None,
    experts_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Loads one MoE layer of a model made for InfMoE's ``MoELayerPlugin``.

    With ``ln(x) = layer_norm_weight * x / sqrt(mean(x**2) + 1e-6)`` of the token's expert, whose
    score ``s`` is the greatest of ``x @ centroids`` (ties to the lower expert), the layer is

    - ``x + F(ln(x))`` in the variants ``default`` and ``cpm_2``, which takes its scores from
      ``layernorm_weight * x / sqrt(mean(x**2) + 1e-6)`` instead;
    - ``a * (x + F(ln(x))) + (1 - a) * x = x + a * F(ln(x))`` with ``a = sigmoid(s)`` in the
      variant ``base_layer``;

    where ``F(h) = (gelu_tanh(h @ wi_0.T) * (h @ wi_1.T)) @ wo.T``.

    Each ``layer_norm_weight`` is multiplied into the columns of its ``wi_0`` and ``wi_1``, in
    float32 or wider: a weight is rounded once, as the product of two numbers. The weight of
    ``cpm_2`` is multiplied into the centroids: dividing a token by its root mean square, which is
    positive, changes none of its comparisons.

    Experts are read one after another, so no more than one is in memory twice.

    Args:
        npz_path: File of ``numpy.savez`` with the arrays ``n/layer_norm_weight [D]``,
            ``n/wi_0_weight [H, D]``, ``n/wi_1_weight [H, D]`` and ``n/wo_weight [D, H]`` for each
            expert n = 0..E-1, in float16, float32 or float64. Not read for ``Identity``.
        centroids: ``[D, E]``: an array, a tensor, or the path of a ``.npy`` file.
        sublayer: ``T5_FF``, or ``Identity``, InfMoE's layer for tests: every variant of it returns
            the tokens.
        variant: ``default``, ``cpm_2`` or ``base_layer``.
        layernorm_weight: ``[D]``, for ``cpm_2`` only.
        experts_dtype: The experts' dtype: float32, float16, bfloat16 or float64. The router stays
            in float32.

    Returns:
        An :class:`InfMoELayer`, one ``torch.ops.moe.dropless``; or ``nn.Identity()``.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: If an array is not floating, or ``experts_dtype`` is none of the above.
        ValueError: If the file is not one of ``numpy.savez``, contains pickled objects, or an array
            is missing, unknown or has the wrong shape; if a weight is not finite in the dtype that
            it is stored in; or an option is unknown or does not fit.
    """
    for name, value, known in (("sublayer", sublayer, Sublayer), ("variant", variant, Variant)):
        if value not in get_args(known):
            raise ValueError(f"{name} must be one of {', '.join(get_args(known))}; got {value!r}")
    if experts_dtype not in _EXPERTS_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _EXPERTS_DTYPES)
        raise TypeError(f"experts_dtype must be one of {names}; got {experts_dtype}")
    if (variant == "cpm_2") != (layernorm_weight is not None):
        needs = "needs" if variant == "cpm_2" else "takes no"
        raise ValueError(f"variant {variant!r} {needs} layernorm_weight")
    if sublayer == "Identity":
        return nn.Identity()

    router_weight_ED = _router_weight(centroids, layernorm_weight)
    experts, width = router_weight_ED.shape
    w1, w2 = _experts(Path(npz_path), experts, width, experts_dtype)
    parameters = map(nn.Parameter, (router_weight_ED, w1, w2))
    return InfMoELayer(*parameters, mixes=variant == "base_layer")


def _router_weight(
    centroids: Array | Tensor | str | PathLike[str], norm: Array | Tensor | None
) -> Tensor:
    if isinstance(centroids, str | PathLike):
        centroids = _read_npy(Path(centroids))
    centroids_DE = _floating("centroids", centroids)
    if centroids_DE.ndim != 2 or 0 in centroids_DE.shape:
        raise ValueError(f"centroids must be [D, E], got {list(centroids_DE.shape)}")
    if norm is not None:
        norm_D = _floating("layernorm_weight", norm)
        if norm_D.shape != centroids_DE.shape[:1]:
            raise ValueError(
                f"layernorm_weight must be [D] = [{len(centroids_DE)}] as centroids [D, E], got "
                f"{list(norm_D.shape)}"
            )
        centroids_DE = centroids_DE * norm_D[:, None]
    # A copy, whatever the caller does with the array.
    router_ED = torch.tensor(np.ascontiguousarray(centroids_DE.T), dtype=torch.float32)
    name = "centroids" if norm is None else "centroids times layernorm_weight"
    _check_finite(name, router_ED)
    return router_ED


def _experts(path: Path, experts: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns w1 ``[E, 2H, D]`` and w2 ``[E, D, H]``."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    with _open(path) as archive:
        _check_names(path, archive.files, experts, width)

        def read(name: str, form: str, *shape: int) -> Array:
            with _reading(path, name):
                array = archive[name]
            array = _floating(f"{path}: {name}", array)
            wanted = shape or (*array.shape[:1], width)
            if array.shape != wanted:
                raise ValueError(
                    f"{path}: {name} must be {form} = {list(wanted)}, got {list(array.shape)}"
                )
            return array

        hidden = len(read("0/wi_0_weight", "[H, D]"))
        if not hidden:
            raise ValueError(f"{path}: H must be at least 1, got {hidden} rows of 0/wi_0_weight")
        w1_EFD = torch.empty(experts, 2 * hidden, width, dtype=dtype)
        w2_EDH = torch.empty(experts, width, hidden, dtype=dtype)
        for n in range(experts):
            norm_D = read(f"{n}/layer_norm_weight", "[D]", width)
            for half, name in enumerate(("wi_0_weight", "wi_1_weight")):
                wi_HD = read(f"{n}/{name}", "[H, D]", hidden, width)
                rows = slice(half * hidden, (half + 1) * hidden)
                w1_EFD[n, rows] = torch.from_numpy(wi_HD).mul_(torch.from_numpy(norm_D))
                _check_finite(f"{path}: {n}/{name} times {n}/layer_norm_weight", w1_EFD[n, rows])
            w2_EDH[n] = torch.from_numpy(read(f"{n}/wo_weight", "[D, H]", width, hidden))
            _check_finite(f"{path}: {n}/wo_weight", w2_EDH[n])
    return w1_EFD, w2_EDH


@contextlib.contextmanager
def _open(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    problem = f"{path} is not a file of numpy.savez"
    # NumPy takes a file with anything ahead of the archive for a pickle.
    with path.open("rb") as file:
        if file.read(2) != b"PK" or not zipfile.is_zipfile(file):
            raise ValueError(problem)
        file.seek(0)
        try:
            archive = np.load(file, allow_pickle=False)
        except _UNREADABLE as error:
            raise ValueError(f"{problem}: {error}") from error
        with archive:
            yield archive


def _check_finite(name: str, weight: Tensor) -> None:
    if not weight.isfinite().all():
        dtype = str(weight.dtype).removeprefix("torch.")
        limit = torch.finfo(weight.dtype).max
        bad = int(weight.isfinite().logical_not().sum())
        raise ValueError(
            f"{name} must be finite in {dtype}, whose greatest number is {limit:.5g}; {bad} of its "
            f"{weight.numel()} elements are not"
        )


def _check_names(path: Path, names: Iterable[str], experts: int, width: int) -> None:
    stored = set(names)
    wanted = [f"{n}/{weight}" for n in range(experts) for weight in _WEIGHTS]
    unknown = sorted(name for name in stored if not _NAME.fullmatch(name))
    if unknown:
        raise ValueError(
            f"{path}: unknown arrays {few(unknown, _SHOWN)}; a T5_FF layer has "
            f"{', '.join(_WEIGHTS)}, each named n/name for expert n"
        )
    rows_are_experts = len({name.split("/")[0] for name in stored}) == width != experts
    hint = "; they look like [E, D]: pass the transpose" if rows_are_experts else ""
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise ValueError(
            f"{path}: missing {few(missing, _SHOWN)}; centroids [D, E] have {experts} experts{hint}"
        )
    extra = sorted({int(name.split("/")[0]) for name in stored.difference(wanted)})
    if extra:
        raise ValueError(
            f"{path}: has weights of expert {few([*map(str, extra)], _SHOWN)}, but centroids "
            f"[D, E] have only the experts 0..{experts - 1}{hint}"
        )


def _read_npy(path: Path) -> Array:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    with _reading(path, "centroids"), path.open("rb") as file:
        array = np.load(file, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path}: centroids must be one array of numpy.save, not an archive")
    return array


@contextlib.contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except (*_UNREADABLE, zlib.error) as error:
        why = f"cannot be read: {error}"
        if "pickle" in str(error):
            why = "is not a plain array; pickled objects can run any code and are not loaded"
        raise ValueError(f"{path}: {name} {why}") from error


def _floating(name: str, values: Array | Tensor) -> Array:
    """Returns the array in float32, or in float64 if it has that."""
    if isinstance(values, Tensor):
        # NumPy has no bfloat16.
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    array = np.asarray(values)
    if array.dtype.kind != "f" or array.dtype.itemsize not in _FLOAT_BYTES:
        raise TypeError(f"{name} must be float16, float32 or float64, got {array.dtype}")
    wide = np.float64 if array.dtype.itemsize > np.float32().itemsize else np.float32
    return array.astype(wide, copy=False)
