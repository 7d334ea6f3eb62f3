"""Training files in ONNX Runtime, and a step in PyTorch to compare with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from torch import nn

Arrays = dict[str, np.ndarray]


class File:
    """A training file in ONNX Runtime, fed with a model's parameters by their names."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(path), options)
        self.inputs = [value.name for value in self._session.get_inputs()]
        self.outputs = [value.name for value in self._session.get_outputs()]

    def __call__(self, given: Arrays, state: Arrays) -> Arrays:
        feeds = {name: {**given, **state}[name] for name in self.inputs}
        return dict(zip(self.outputs, self._session.run(None, feeds), strict=True))


def state_of(model: nn.Module) -> Arrays:
    """The values of parameters and buffers by name."""
    held = (*model.named_parameters(), *model.named_buffers())
    return {name: value.detach().clone().numpy() for name, value in held}


def check(actual: Arrays, expected: Arrays) -> None:
    """Compares results by name, relative to the largest element of each."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        scale = np.abs(value).max() + 1e-6
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=3e-5 * scale, err_msg=name)
