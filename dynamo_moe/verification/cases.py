"""One case: the file compared with the model, and what a difference may come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from dynamo_moe import pytree
from dynamo_moe.conversion.reports import few
from dynamo_moe.ties import TiesByIndex
from dynamo_moe.tolerances import Tolerance
from dynamo_moe.verification import rounding
from dynamo_moe.verification.errors import worst_errors
from dynamo_moe.verification.exchange import RankError
from dynamo_moe.verification.loaded_files import LoadedFile, LoadedRanks, to_numpy
from dynamo_moe.verification.models import Case, Models, Results
from dynamo_moe.verification.report import CaseResult
from dynamo_moe.verification.routing import ChoicesOfFile, agreement, other_choices

# How many inputs a message shows.
_SHOWN = 4


@dataclass(frozen=True)
class Trial:
    """A case, and what may come of it.

    Attributes:
        case: The inputs.
        is_drawn: Whether they are random, and not the user's.
        is_optional: Whether the model may refuse them.
        kept: Which tokens masks leave, ``[B, L]``, if that is known.
    """

    case: Case
    is_drawn: bool = False
    is_optional: bool = False
    kept: Tensor | None = None


def _feeds(names: Sequence[str], case: Case) -> dict[str, np.ndarray]:
    if isinstance(case, Mapping) and set(case) == set(names):
        return {name: to_numpy(value) for name, value in case.items()}
    leaves = [leaf for leaf in pytree.tree_leaves(case) if isinstance(leaf, Tensor)]
    if len(leaves) != len(names):
        raise ValueError(
            f"a case must hold one tensor per input of the file ({', '.join(names)}); "
            f"got {len(leaves)}"
        )
    return {name: to_numpy(leaf) for name, leaf in zip(names, leaves, strict=True)}


class RefusedSizesError(ValueError):
    """The model does not take inputs that were drawn."""


def verified(
    file: LoadedFile | LoadedRanks, models: Models, trial: Trial, bound: Tolerance
) -> CaseResult | None:
    """Returns a trial's result; None if the model refuses it, and may."""
    feeds = _feeds(file.inputs, trial.case)
    try:
        results = models.results_of_all(trial.case)
    except Exception as error:  # The model's own code runs.
        if trial.is_optional:
            return None
        refuses = trial.is_drawn or isinstance(error, IndexError)  # Ids beyond an embedding.
        if refuses and not isinstance(error, RankError):
            raise (RefusedSizesError if trial.is_drawn else ValueError)(
                f"the model does not take these inputs ({error}): pass inputs of your own, as in "
                f"{_call(feeds)}, or in its place a tuple of the arguments, which a model needs "
                "that takes objects or containers within containers"
            ) from error
        raise
    if trial.is_drawn and not _has_numbers(results.expected):
        if trial.is_optional:
            return None
        raise ValueError(
            "the model gives no finite number for the inputs that were drawn: pass inputs of your "
            f"own, as in {_call(feeds)}"
        )
    comparison = _Comparison(file, models, trial, bound, feeds, results)
    result = comparison.result()
    if result.passed:
        return result
    for excepted in (
        comparison.but_for_hidden_tokens,
        comparison.but_for_ties,
        comparison.but_for_close_choices,
        comparison.but_for_rounding,
    ):
        again = excepted()
        if again is not None and again.passed:
            return again
    return result


def _has_numbers(tensors: Sequence[Tensor]) -> bool:
    return any(not tensor.numel() or bool(tensor.isfinite().any()) for tensor in tensors)


def _call(feeds: Mapping[str, np.ndarray]) -> str:
    """Returns a call with inputs of these names, dtypes and shapes."""
    inputs = [f"{name!r}: <{feed.dtype} {list(feed.shape)}>" for name, feed in feeds.items()]
    return f"verify(path, model, inputs=[{{{few(inputs, _SHOWN)}}}])"


@dataclass(frozen=True)
class _Comparison:
    """A file and a model on the inputs of a trial, and what they may differ by."""

    file: LoadedFile | LoadedRanks
    models: Models
    trial: Trial
    bound: Tolerance
    feeds: Mapping[str, np.ndarray]
    results: Results

    def result(self) -> CaseResult:
        """Compares them as they are."""
        return self._compared(self.results, None)

    def but_for_hidden_tokens(self) -> CaseResult | None:
        """Compares the tokens that a mask leaves, if there is one."""
        if self.trial.kept is None:
            return None
        return replace(self._compared(self.results, self.trial.kept), excepted="hidden tokens")

    def but_for_ties(self) -> CaseResult | None:
        """Compares with the model where it takes the first of equal scores, if there are any."""
        with TiesByIndex() as ties:
            by_index = self.models.results(self.trial.case)
        if not any(self.file.greatest(ties.found)):
            return None
        others = other_choices(self.results.routed, by_index.routed)
        return replace(
            self._compared(by_index, self.trial.kept), excepted="ties", other_choices=others
        )

    def but_for_close_choices(self) -> CaseResult | None:
        """Compares with the model where it takes the file's experts, if scores are so close."""
        _, in_file = self.file.run(self.feeds, routing=bool(self.results.routed))
        with ChoicesOfFile(in_file, self.bound.max) as choices:
            chosen = self.models.results(self.trial.case)
        if not choices.taken:
            return None
        return replace(
            self._compared(chosen, self.trial.kept),
            excepted="close choices",
            other_choices=choices.taken,
        )

    def but_for_rounding(self) -> CaseResult | None:
        """Compares with the model in float32, if in half precision it is near to that itself."""
        precise = self.models.in_float32(self.trial.case)
        if precise is None:
            return None
        of_model, exact = (_visible(x, self.trial.kept) for x in (self.results.expected, precise))
        allowed = rounding.allowed(worst_errors("model", of_model, exact), self.bound)
        if allowed is None:
            return None
        in_float32 = self.results._replace(outputs=precise, expected=precise)
        again = self._compared(in_float32, self.trial.kept, allowed)
        return replace(again, excepted="rounding")

    def _compared(
        self, results: Results, kept: Tensor | None, bound: Tolerance | None = None
    ) -> CaseResult:
        """Compares the file with results; with ``kept``, these tokens ``[B, L]`` alone."""
        bound = bound or self.bound
        outputs, in_file = self.file.run(self.feeds, routing=bool(results.routed))
        outputs, of_model, expected = (
            _visible(tensors, kept) for tensors in (outputs, results.outputs, results.expected)
        )
        errors = worst_errors("file", outputs, expected * self.file.ranks)
        max_error, rms_error = self.file.greatest(*errors)
        has_reference = results.outputs is not results.expected
        return CaseResult(
            shapes={name: tuple(value.shape) for name, value in self.feeds.items()},
            max_error=max_error,
            rms_error=rms_error,
            routing_agreement=agreement(results.routed, in_file),
            passed=max_error <= bound.max and rms_error <= bound.rms,
            model_error=worst_errors("model", of_model, expected)[0] if has_reference else None,
        )


def _visible(tensors: Sequence[Tensor], kept: Tensor | None) -> list[Tensor]:
    """Returns what of each tensor belongs to tokens that are kept, where it has an axis of them."""

    def visible(tensor: Tensor) -> Tensor:
        if kept is not None and tensor.shape[:2] == kept.shape:
            return tensor[kept]
        if kept is not None and tensor.ndim == 4 and tensor.shape[::2] == kept.shape:
            return tensor.transpose(1, 2)[kept]  # Keys or values, by heads.
        return tensor

    return [*map(visible, tensors)]
