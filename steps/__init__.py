"""Quantized GEMM over ggml's blocks: lessons of one idea each, and the kernels of `gemm`.

    from steps import gemm, pack
    c = gemm(a, w)            # a: float32[M, K], w: blocks[N, K/32]; the best kernel for this GPU
    c = gemm(a, w, step=4)    # one step in particular
    c = gemm(a, pack(w))      # weights repacked and uploaded once, for many products
    plan = gemm.plan(m, w)    # all that m tokens need, made once: plan(a, out) only launches
    c, choice = gemm(a, w, explain=True)    # print(choice): which kernel it was, and why
    c = experts(a, pack_experts(w), ids)    # w: blocks[E, N, K/32]: each token by its experts

`help(gemm)`, `help(pack)`, `help(gemm.plan)` and `help(experts)` say what they take. `ladder()`
finds the steps (every module `steps/stepNN_*.py`), so adding a step is adding one file;
`register(step)` makes one known that is in no file, such as a notebook's.

To follow a call from `gemm` to the launch, read `steps.product`, whose overview names the files in
their order, then `steps.driver.launcher`.

    contract.py     what a kernel, a step and a launch are
    registry.py     finds the steps and the engineered kernels
    instructions/   PTX, each instruction also as NumPy
    simulator/      runs kernels on any CPU, and finds what is wrong with them
    blocks/         how a block's bytes become numbers, for lessons
    kernels/        the engineered kernels, among which `gemm` chooses
    product/        a call: from a request to launches
    compile/        from a kernel to machine code
    driver/         where launches run: a GPU or the simulator
    nn/             layers for torch
    decoder/        a whole model of a GGUF file
    checks/         whether a step is right
    learn/          exercises, known bugs, traces
    cli/            `python -m steps`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steps.product.experts import experts, pack_experts
    from steps.product.gemm import gemm, pack
    from steps.product.plan import plan
    from steps.registry import find, ladder, register

__all__ = ["experts", "find", "gemm", "ladder", "pack", "pack_experts", "plan", "register"]


def __getattr__(name: str) -> Any:
    """What `__all__` names, imported where it is first asked for: `import steps` needs no Numba."""
    if name in ("find", "ladder", "register"):
        from steps import registry

        return getattr(registry, name)
    if name in ("experts", "pack_experts"):
        from steps.product import experts

        experts.experts.plan = experts.plan  # type: ignore[attr-defined]
        return getattr(experts, name)
    if name in __all__:
        from steps.product import gemm, plan

        gemm.gemm.plan = plan.plan  # type: ignore[attr-defined]
        return getattr(plan if name == "plan" else gemm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
