"""Models whose task takes several files, which run one after another: what each kind has to say.

Legend: B batch, S new tokens, P tokens in the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo_moe.files.model_parts import ModelPart, PartName
from dynamo_moe.tolerances import tolerance_for

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

T = TypeVar("T")

_LOCK = RLock()
_FOUND: ContextVar[dict[Hashable, Any] | None] = ContextVar("found", default=None)


@contextmanager
def turn() -> Iterator[None]:
    """Held while the parts of a model are exported or verified: it performs one after another.

    What :func:`once` has found stays known meanwhile, as the model stays the same.
    """
    with _LOCK:
        found = _FOUND.get()
        token = _FOUND.set({} if found is None else found)
        try:
            yield
        finally:
            _FOUND.reset(token)


def once(key: Hashable, find: Callable[[], T]) -> T:
    """Returns what a function finds; within a :func:`turn`, the same for the same key."""
    found = _FOUND.get()
    if found is None:
        return find()
    if key not in found:
        found[key] = find()
    value: T = found[key]
    return value


class Parts(ABC):
    """The parts of a model.

    Attributes:
        model: The model.
        role: The part that this one is about.
        unused: What this part has no use for, of whose experts an export does not warn.
    """

    model: PreTrainedModel
    role: PartName
    unused: nn.Module | None = None

    @abstractmethod
    def described(self) -> ModelPart:
        """Returns what the part's file says of itself."""

    @abstractmethod
    def cases(self) -> list[dict[str, Any]]:
        """Returns arguments of a part that has no cache; the first are an example."""

    @abstractmethod
    def decoder_case(self, case: dict[str, Any]) -> dict[str, Any]:
        """Returns arguments of the decoder, but for its cache, instead of those of a text model."""

    def with_values(self, case: dict[str, Any]) -> dict[str, Any]:
        """Returns a decoder's arguments as a model with values has them from its other parts."""
        return case

    @abstractmethod
    def dimensions(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the names of a case's symbolic dimensions."""

    @abstractmethod
    def names(self, case: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Returns the names of a case's tensors, and of the part's outputs, but for a cache."""

    @abstractmethod
    def performed(self) -> Callable[..., Any]:
        """Returns a forward of a part that has no cache."""

    def agree(self, got: Tensor, expected: Tensor) -> bool:
        """Whether two results are the same but for what the model's dtypes round."""
        bound = tolerance_for({x.dtype for x in self.model.parameters()}).rms
        rms = expected.float().square().mean().sqrt()
        return bool((got.float() - expected.float()).square().mean().sqrt() <= bound * rms)

    @abstractmethod
    def check(self) -> None:
        """Compares what the parts compute with what the whole model does.

        Raises:
            ValueError: If it differs.
        """
