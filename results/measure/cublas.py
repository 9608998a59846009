"""cuBLAS through torch: C[M, N] = A[M, K] @ W[N, K]^T in float16, a contestant of a loop.

Operands and result are float16 already, so it reads two bytes a weight and quantizes nothing: its
time is a kernel's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from reference import nmse
from reference.product import unquantized
from reference.sampling import sample
from results.measure.loop import Contestant
from results.measure.protocol import Budget, slots_for
from results.measure.torch_graphs import TorchCaptures, torch_version
from results.record.schema import Peer, mnk

NAME: Final = "cublas_fp16"
FORMAT: Final = "f16"

COMPARED: Final = 2**16  # outputs that are compared; NaN is sought in all
NMSE_LIMIT: Final = 1e-6
"""Against the float64 product of the float32 operands: rounding both and C to float16 comes to some
1e-7."""


class Cublas:
    """One product, and its contestant."""

    def __init__(self, shared: Any, budget: Budget) -> None:
        """shared: `results.measure.products.Shared` on a GPU; its A is rounded to float16 here."""
        import torch

        self._data, self.shape = shared.data, shared.shape
        m, n, _ = self.shape
        self._a = torch.from_numpy(np.array(self._data.a("float32")[:m])).cuda().half()
        self._c = torch.full((m, n), math.nan, device="cuda", dtype=torch.float16)
        self._weights = self._data.cublas_weights(shared.stopwatch.l2_bytes)
        self.source = (
            f"torch {torch.__version__}, CUDA {torch.version.cuda}, kernel only, float16 "
            "operands and result, graph"
        )
        captures = TorchCaptures(shared.stopwatch)
        # cuBLAS picks its kernel and allocates its workspace before a capture
        captures.warm_up(self._launches(0)[0])
        self.contestant = Contestant(captures, self._launches, len(self._weights), budget)

    def _launches(self, slot: int) -> Sequence[Any]:
        import torch

        return (lambda: torch.matmul(self._a, self._weights[slot].T, out=self._c),)

    def wrong(self) -> str | None:
        """What is wrong with its last result; C is NaN then."""
        import torch

        torch.cuda.synchronize()
        c = self._c.cpu().numpy()
        self._c.fill_(math.nan)
        torch.cuda.synchronize()
        if not np.isfinite(c).all():
            return f"cuBLAS left {np.count_nonzero(~np.isfinite(c))} outputs that are not finite"
        rows, columns = sample(c.shape[0], c.shape[1], COMPARED)
        meant = unquantized(self._data.a("float32")[rows], self._data.w[columns])
        error = nmse(c[np.ix_(rows, columns)].astype(np.float64), meant)
        if error <= NMSE_LIMIT:
            return None
        return f"cuBLAS is wrong: NMSE {error:.1e}, more than {NMSE_LIMIT:.0e}"

    def peer(self) -> Peer:
        """What was measured, beside rows of the same loop."""
        us = self.contestant.timing.us
        kind = {"peer": NAME, "format": FORMAT, **mnk(self.shape)}
        return Peer(**kind, us=us, same_run=True, source=self.source)


def copies(w: np.ndarray, l2_bytes: int) -> list[Any]:
    """Copies of float32 w[N, K] in float16 on the GPU, as many as fill the rotation."""
    import torch

    first = torch.from_numpy(np.array(w)).cuda().half()
    return [first, *(first.clone() for _ in range(slots_for(2 * w.size, l2_bytes) - 1))]


def why_not() -> str | None:
    """None where cuBLAS can be measured here, else why not."""
    return None if torch_version() else "there is no torch with a GPU, through which cuBLAS is run"
