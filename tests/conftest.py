"""Skips `gpu` tests where there is no GPU, with the reason in the summary."""

import functools

import pytest

import steps.instructions  # noqa: F401 - before anything imports numba.cuda: see its _numpy_shim


@functools.cache
def why_no_gpu() -> str | None:
    """None where a CUDA GPU can be used, else the reason as a phrase."""
    from numba import cuda

    if cuda.is_available():
        return None
    error = cuda.cuda_error()
    return str(error).strip().splitlines()[0] if error else "no device found"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (reason := why_no_gpu()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA GPU: {reason}"))
