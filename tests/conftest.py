"""Leaves out the tests that this machine cannot run."""

from importlib.util import find_spec

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("tensorrt") and find_spec("tensorrt") is None:
        pytest.skip("needs the package tensorrt")
