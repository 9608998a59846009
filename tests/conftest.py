"""Skips `gpu` tests where there is no GPU, with the reason in the summary."""

import pytest

from steps.contract import why_no_gpu  # (brings steps.instructions, which must precede numba.cuda)
from tests.api.fake_gpu import gpu  # noqa: F401 - a fixture


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (reason := why_no_gpu()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA GPU: {reason}"))
