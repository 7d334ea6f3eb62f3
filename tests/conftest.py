"""Skips tests that this machine cannot run; without a GPU, kernels run in Triton's interpreter."""

import functools
import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pairs import mark_the_rest

if not torch.cuda.is_available():
    # Triton reads it when it is imported, which happens later.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Compiled kernels are kept between runs, but not in the user's cache.
KERNELS = Path(__file__).parents[1] / "build" / "kernel-cache"
os.environ.setdefault("DYNAMO_MOE_CACHE_DIR", str(KERNELS))

# The GPU's machine has no Hypothesis. By default it fails what is slow on a busy machine.
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "tests", settings.default, deadline=None, suppress_health_check=(HealthCheck.too_slow,)
    )
    settings.load_profile("tests")

# Imported by the tests whose plugin it is, before pytest comes to it.
pytest.register_assert_rewrite(
    "cli_models", "export_forms", "fake_tensorrt", "plugin_layers", "shared_exports"
)

# Helpers that tests import; they contain no tests.
collect_ignore = ["support"]
collect_ignore_glob = (
    [] if find_spec("triton") else ["kernels/test_interpreter.py", "kernels/test_kernel_*.py"]
)


@pytest.hookimpl(tryfirst=True)  # Before -m "not every" is read.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_the_rest(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("tensorrt") and find_spec("tensorrt") is None:
        pytest.skip("needs the package tensorrt")


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import interpreter

    with pytest.MonkeyPatch.context() as patch:
        interpreter.repair(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _translations_once() -> Iterator[None]:
    """PyTorch's exporter parses the sources of all its translations anew for each export."""
    from torch.onnx._internal.exporter._registration import onnxscript_apis

    with pytest.MonkeyPatch.context() as patch:
        parsed = functools.cache(onnxscript_apis.get_torchlib_ops)
        patch.setattr(onnxscript_apis, "get_torchlib_ops", parsed)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_core() -> Iterator[None]:
    """The others are for pytest's other workers: more compilers than one would start in vain."""
    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_XDIST_WORKER" in os.environ:
            patch.setattr(os, "sched_getaffinity", lambda _: {0})
        yield


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """A search for garbage looks at what the test makes alone; all else takes it a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def driver():
    """The stand-in for the driver; whatever a test loads, it must unload."""
    from standin import standin

    driver = standin()
    driver.reset()
    yield driver
    driver.reset()
    assert driver.live_modules == 0
