"""What a model calls of PyTorch while it is traced, watched where a first trace has failed."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from dynamo_moe.tracing.size_decisions import line_of_model


class DataDetached(TorchFunctionMode):
    """Gives ``.detach()`` where a tensor's ``.data`` is read, of which a trace has no values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs a function.

        Raises:
            ValueError: If the model assigns a tensor's data.
        """
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise ValueError(
                f"a tensor's .data is assigned at {line_of_model()}, which a trace does not "
                "follow: compute with a new tensor, or copy_ into this one"
            )
        return func(*args, **(kwargs or {}))


class CallsNoted(TorchFunctionMode):
    """Notes the lines of a model that call a function.

    Attributes:
        lines: The lines.
    """

    def __init__(self, function: Any) -> None:
        """Watches a function, such as ``torch.Tensor.unfold``."""
        super().__init__()
        self.lines: list[str] = []
        self._function = function

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs a function, and notes where."""
        if func == self._function:
            self.lines.append(line_of_model())
        return func(*args, **(kwargs or {}))
