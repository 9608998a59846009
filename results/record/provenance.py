"""Which code a row was measured with: the hash of the import closure of its lesson or kernel.

A row goes stale with the code of that closure (`steps.compile.import_closure`), not with its prose,
not when a file moves, and not with how the host goes through memory when it quantizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

from results.record import ROOT
from steps.compile.import_closure import closure_hash
from steps.registry import kernels

API_MODULES: Final = {"gemm.plan": "steps.product.plan", "QuantLinear": "steps.nn.linear"}
"""What a row of `as_called` calls, by its `api`."""

OUTSIDE_OF_STEPS: Final = (
    *("qformats.format", "qformats.codec", "qformats.codebook", "qformats.kquants"),
    *("qformats.threads",),
)
"""How floats become blocks, and blocks floats, on the host: before a launch. What a kernel knows of
a format from there, such as its bits, is ggml's and held fast by tests/formats."""

OUTSIDE_OF_CALLS: Final = (
    *OUTSIDE_OF_STEPS,
    *("steps.product.choice", "steps.product.tuning_table", "qformats.gguf_file"),
    *("steps.compile.import_closure", "steps.compile.kernel_key", "steps.compile.kernel_cache"),
    *("steps.nn.shard", "steps.nn.all_reduce"),
)
"""What chooses a step, reads weights, keeps compiled kernels under a name, or joins several GPUs:
none of it runs in the calls that are timed, of one GPU, nor decides what the GPU runs. Which step
is chosen is compared by itself (`results.render.staleness`,
`results.measure.as_called`)."""


def step_module(step: int, root: Path = ROOT) -> str | None:
    """The module of a step, such as "steps.step04_dp4a_emulated"."""
    found = sorted((root / "steps").glob(f"step{step:02d}_*.py"))
    return f"steps.{found[0].stem}" if found else None


def kernel_module(step: int, root: Path = ROOT) -> str | None:
    """The module of what a caller gets of a step: the engineered kernel that it teaches, if any,
    such as "steps.kernels.prefill.wgmma_float16"."""
    own = (one.launch.__module__ for one in kernels() if one.number == step)
    return next(own, None) or step_module(step, root)


def source_hash(step: int, name: str = "", root: Path = ROOT) -> str | None:
    """The hash of the closure of a step, or of its engineered kernel, where a row has that one's
    name; None if the step has no file (any more)."""
    engineered = bool(name) and not name.startswith("step")
    module = (kernel_module if engineered else step_module)(step, root)
    return None if module is None else closure_hash([module], root, OUTSIDE_OF_STEPS)


def called_hash(api: str, step: int, root: Path = ROOT) -> str | None:
    """The hash of an API of `as_called` together with the step that it chose."""
    module = kernel_module(step, root)
    if module is None:
        return None
    return closure_hash([API_MODULES[api], module], root, OUTSIDE_OF_CALLS)


def remembered(of: Callable[..., str | None], root: Path = ROOT) -> Callable[..., str | None]:
    """`source_hash` or `called_hash` that reads the files once: for the length of one bench."""
    return lru_cache(maxsize=None)(lambda *asked: of(*asked, root=root))
