"""What all tests share: `gpu` tests are skipped where there is no GPU, with the reason in the
summary; files that import torch are left out where it is not installed, as the first lines say; and
processes that share the tests begin with the longest."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

# The suite compiles what it tests, each kernel and each module once for all processes. Kernels are
# not kept, modules are where the environment is one's own.
if "PYTEST_XDIST_WORKER" not in os.environ:
    kept = tempfile.mkdtemp(prefix="ladder-tests-")
    atexit.register(shutil.rmtree, kept, ignore_errors=True)
    os.environ["LADDER_CACHE"] = str(Path(kept, "kernels"))
    if sys.dont_write_bytecode:  # an import of Numba takes twice as long then, of torch thrice
        own = sys.prefix if sys.prefix != sys.base_prefix else kept
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path(own, "modules"))
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from steps.contract import why_no_gpu  # (brings steps.instructions, which must precede numba.cuda)
from tests.driver.fake_gpu import gpu, torch  # noqa: F401 - fixtures

os.environ["LADDER_PROCESSES"] = "1"  # each test compiles for itself

# `make test TORCH=1` runs these alone (NEED_TORCH in the Makefile).
collect_ignore = [] if find_spec("torch") else ["nn", "decoder", "results/test_on_torch.py"]

# Numba makes millions of objects and few circles: a compilation leaves 8 MB of them, and looking
# takes a tenth of its time. Where there is torch they are looked for: its models are larger.
gc.freeze()
gc.set_threshold(100_000 if find_spec("torch") else 20_000_000, 20, 20)


def pytest_configure(config: pytest.Config) -> None:
    # As many processes as cores share the tests. With more threads in each, torch and OpenBLAS
    # spend most of their time waiting for one another.
    if config.getoption("numprocesses", None):
        os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def pytest_report_header() -> str | None:
    left_out = ", ".join(f"tests/{one}" for one in collect_ignore)
    return f"without torch: {left_out} are left to `make test TORCH=1`" if left_out else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m alone`: of no file without such a test anything is imported."""
    if collection_path.suffix != ".py" or not config.option.markexpr.startswith("alone"):
        return None
    return "mark.alone" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (reason := why_no_gpu()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA GPU: {reason}"))
    if hasattr(config, "workerinput"):  # one of several processes: see `make test`
        items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    """Groups, which go to one process as a whole, then the steps, then the many short tests: none
    of the processes has much left when another is done."""
    if item.get_closest_marker("xdist_group"):
        return 0
    return 1 if item.path.parent.name == "steps" else 2
