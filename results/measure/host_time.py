"""The host's time for one eager call: QuantLinear, a plan and gemm, beside torch's own.

    python -m results.measure.host_time [--json]      # --json: into results/<gpu>/

Ours and theirs take turns, batch by batch (`results.measure.loop.host_seconds`), in one process.
All calls are under no_grad:

    QuantLinear(x)              torch.nn.Linear(x) of the same shape and dtype, no bias
    plan(a, out)                torch.matmul(a, w.T, out=out)
    gemm(a, handle, out=out)    the same
    gemm(a, handle)             the same; C is a new tensor
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from qformats import quantize
from results.measure.command import main
from results.measure.loop import Timing, host_seconds, ratio
from results.record.schema import HostRow, HostRun, Size, mnk
from steps.contract import FLOATS

N: Final = 4096
K: Final = 4096
TOKENS: Final = (1, 512)
BATCH: Final = 20  # calls between two waits for the GPU
ROUNDS: Final = 25
WARM_UP: Final = 5  # calls, which compile, load and choose algorithms

Call = Callable[[], Any]


def rows_of(
    labels: Sequence[str],
    taken: Sequence[Sequence[Sequence[float]]],
    shape: Size,
    dtype: str,
    format_name: str,
) -> list[HostRow]:
    """A row for each label; labels, and what was taken, are of ours and theirs by turns."""
    found = []
    for api, ours, theirs in zip(labels, taken[::2], taken[1::2], strict=True):
        timing = Timing.of(np.concatenate(ours))
        found.append(
            HostRow(
                api=api,
                dtype=dtype,
                format=format_name,
                **mnk(shape),
                us=timing.us,
                p20_us=timing.p20_us,
                p80_us=timing.p80_us,
                torch_us=Timing.of(np.concatenate(theirs)).us,
                x_torch=ratio(np.median(ours, axis=1), np.median(theirs, axis=1)),
                calls=timing.rounds,
            )
        )
    return found


def measure(format_name: str = "q4_0", say: Callable[[str], None] = print) -> list[HostRow]:
    """All rows, on the current GPU."""
    import torch

    from steps import gemm, pack
    from steps.nn.linear import QuantLinear

    rng = np.random.default_rng(0)
    w = rng.standard_normal((N, K), dtype=np.float32) / np.float32(K**0.5)
    blocks = quantize(w, format_name)
    layer, handle = QuantLinear.from_blocks(blocks).to("cuda"), pack(blocks)
    found: list[HostRow] = []
    for dtype in FLOATS:
        kind = getattr(torch, dtype)
        linear = torch.nn.Linear(K, N, bias=False, device="cuda", dtype=kind)
        for m in TOKENS:
            a = torch.from_numpy(rng.standard_normal((m, K), dtype=np.float32)).to("cuda", kind)
            out, other = a.new_empty((m, N)), a.new_empty((m, N))
            plan = gemm.plan(m, handle, input=dtype, dtype=dtype)  # type: ignore[attr-defined]
            matmul = partial(torch.matmul, a, linear.weight.T, out=other)
            ours: dict[str, Call] = {
                "QuantLinear": partial(layer, a),
                "gemm.plan": partial(plan, a, out),
                "gemm, out": partial(gemm, a, handle, out=out, dtype=dtype),
                "gemm": partial(gemm, a, handle, dtype=dtype),
            }
            theirs = [partial(linear, a), matmul, matmul, matmul]
            calls = [one for pair in zip(ours.values(), theirs, strict=True) for one in pair]
            with torch.no_grad():
                taken = host_seconds(calls, torch.cuda.synchronize, BATCH, ROUNDS, WARM_UP)
            of_shape = rows_of(list(ours), taken, (m, N, K), dtype, format_name)
            for row in of_shape:
                say(
                    f"M={m} {dtype} {row.api}: {row.us:.1f} us, torch {row.torch_us:.1f} us, "
                    f"{row.x_torch:.2f}x"
                )
            found += of_shape
    return found


def _found(format_name: str) -> dict[str, Any]:
    import torch

    return {"torch": torch.__version__, "rows": tuple(measure(format_name))}


if __name__ == "__main__":
    sys.exit(main(HostRun, ("torch",), _found))
