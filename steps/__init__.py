"""The ladder: numbered GEMM kernels over ggml's quantized blocks, one idea a file.

    from steps import gemm, pack
    c = gemm(a, w)            # a: float32[M, K], w: blocks[N, K/32]; the best step for this GPU
    c = gemm(a, w, step=4)    # one step in particular
    c = gemm(a, pack(w))      # weights repacked and uploaded once, for many products
    plan = gemm.plan(m, w)    # all that m tokens need, made once: plan(a, out) only launches

`ladder()` finds the steps (every module `steps/stepNN_*.py`), so adding a step is adding one file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steps.contract import Step

__all__ = ["find", "gemm", "ladder", "pack", "plan"]


def ladder() -> tuple[Step, ...]:
    """Every step, in the order of its number."""
    from steps.registry import ladder as discovered

    return discovered()


def find(number: int) -> Step:
    """The step of that number; ValueError names the numbers that exist."""
    from steps.registry import find as found

    return found(number)


def gemm(a: Any, w: Any, *, step: int | None = None, out: Any = None, **options: Any) -> Any:
    """C[M, N] = A[M, K] @ dequantize(W)[N, K]^T on the GPU. See `steps.api.gemm.gemm`."""
    from steps.api.gemm import gemm as checked_gemm

    return checked_gemm(a, w, step=step, out=out, **options)


def pack(w: Any, **options: Any) -> Any:
    """Weights repacked and uploaded once, for any number of products. See `steps.api.gemm.pack`."""
    from steps.api.gemm import pack as checked_pack

    return checked_pack(w, **options)


def plan(m: int, w: Any, **options: Any) -> Any:
    """A prepared product of m tokens, called with (a, out) on a GPU. See `steps.api.plan.plan`."""
    from steps.api.plan import plan as prepared_plan

    return prepared_plan(m, w, **options)


gemm.plan = plan  # type: ignore[attr-defined]
