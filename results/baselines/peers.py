"""The same product by others: who else multiplies these shapes, and how fast.

    cublas_fp16   cuBLAS through torch, where torch is installed: measured in the same run, by the
                  same protocol (rotated weights, CUDA graphs, the same sampling). Kernel only: both
                  operands are float16 already, so it reads 2 bytes a weight and quantizes nothing.
    ggml          llama.cpp's CUDA kernels, from float32 A to float32 C: measured in the same run
                  where a CUDA build of llama-cpp-python is installed (`results.baselines.llama_cpp`), else
                  from `results/peers/*.json`, another run by the protocol that the file states.

The first is a kernel time and the second a total; charts and tables say which they compare with,
and every figure whether it is of the same run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from results.baselines import llama_cpp
from results.measure.protocol import Budget, sample, slots_for
from results.record import ROOT
from results.record.schema import Peer, RecordError

GIVEN: Final = ROOT / "results" / "peers"
LABELS: Final = {"cublas_fp16": "cuBLAS fp16", "ggml": "llama.cpp"}
KIND: Final = {"cublas_fp16": "kernel", "ggml": "total"}


def given_peers(
    gpu: str | None,
    shapes: Iterable[tuple[int, int, int]] | None = None,
    formats: Iterable[str] | None = None,
    folder: Path = GIVEN,
) -> tuple[Peer, ...]:
    """Published figures for this very GPU (another GPU's say nothing here), in the file's order.

    `shapes` and `formats` keep only those; None keeps all.
    """
    wanted_shapes = None if shapes is None else set(shapes)
    wanted_formats = None if formats is None else set(formats)
    peers = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        try:
            if data["gpu"] != gpu:
                continue
            source = (
                f"{data['peer']}; {data['date']}; {data['protocol']} (results/peers/{path.name})"
            )
            peers += [
                Peer(
                    peer="ggml",
                    format=row["format"],
                    M=row["M"],
                    N=row["N"],
                    K=row["K"],
                    us=float(row["us"]),
                    same_run=False,
                    source=source,
                )
                for row in data["rows"]
            ]
        except KeyError as error:
            raise RecordError(f"{path} has no {error}: peers need their provenance") from None
    return tuple(
        peer
        for peer in peers
        if (wanted_shapes is None or peer.shape in wanted_shapes)
        and (wanted_formats is None or peer.format in wanted_formats)
    )


def ggml(
    gpu: str | None,
    shapes: Sequence[tuple[int, int, int]],
    formats: Sequence[str],
    l2_bytes: int,
    budget: Budget | None = None,
    folder: Path = GIVEN,
) -> tuple[tuple[Peer, ...], str | None]:
    """llama.cpp at each (M, N, K) in each format: measured here, or as given where that fails.

    Returns the figures and, where some were not measured, why not.
    """
    here, why = llama_cpp.measured(shapes, formats, l2_bytes=l2_bytes, gpu=gpu, budget=budget)
    done = {(peer.format, peer.shape) for peer in here}
    given = given_peers(gpu, shapes, formats, folder)
    return (*here, *(peer for peer in given if (peer.format, peer.shape) not in done)), why


def torch_version() -> str | None:
    """The version of a torch that sees a GPU, else None."""
    try:
        import torch

        return str(torch.__version__) if torch.cuda.is_available() else None
    except Exception:  # not installed, or broken: then there is no such peer
        return None


def cublas_fp16(
    shapes: Sequence[tuple[int, int, int]], budget: Budget | None = None
) -> tuple[Peer, ...]:
    """C[M,N] = A[M,K] @ W[N,K]^T in float16 by cuBLAS for each (M, N, K); empty without torch.

    Random normal data, A scaled by K^-1/2 so that C stays in range. Raises RuntimeError if an
    output is not finite: a peer's figure is only worth something if its result is.
    """
    version = torch_version()
    if version is None:
        return ()
    import torch

    budget = budget or Budget()
    stopwatch = TorchStopwatch()
    peers = []
    for m, n, k in shapes:
        slots = slots_for(2 * n * k, stopwatch.l2_bytes)
        a = torch.randn(m, k, device="cuda", dtype=torch.float16) * k**-0.5
        w = torch.randn(n, k, device="cuda", dtype=torch.float16)
        weights = [w, *(w.clone() for _ in range(slots - 1))]
        c = torch.empty(m, n, device="cuda", dtype=torch.float16)

        def product(slot: int, a: Any = a, weights: Any = weights, c: Any = c) -> tuple[Any]:
            return (lambda: torch.matmul(a, weights[slot % len(weights)].T, out=c),)

        product(0)[0]()  # cuBLAS picks its kernel and allocates its workspace before capture
        timing, _ = sample(stopwatch, product, slots, budget.kernel_seconds, budget)
        if not bool(torch.isfinite(c).all()):
            raise RuntimeError(f"cuBLAS gave a C that is not finite at M={m}, N={n}, K={k}")
        peers.append(
            Peer(
                peer="cublas_fp16",
                format="f16",
                M=m,
                N=n,
                K=k,
                us=timing.us,
                same_run=True,
                source=f"torch {version}, CUDA {torch.version.cuda}, kernel only, {timing.how}",
            )
        )
        del a, w, weights, c
    torch.cuda.empty_cache()
    return tuple(peers)


class TorchStopwatch:
    """Captures calls of torch; a launch is a function of no arguments."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.l2_bytes = int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20))

    def capture(self, launches: Sequence[Callable[[], Any]]) -> TorchReplay:
        self._torch.cuda.synchronize()
        return TorchReplay(self._torch, launches)


class TorchReplay:
    """Captured calls of torch; timed between two events like any other replay."""

    how = "graph"

    def __init__(self, torch: Any, launches: Sequence[Callable[[], Any]]) -> None:
        self.launches = len(launches)
        self._torch = torch
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for launch in launches:
                launch()
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        self._graph.replay()

    def seconds(self) -> float:
        self._begin.record()
        self.start()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) * 1e-3
