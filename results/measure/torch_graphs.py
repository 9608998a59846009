"""Calls of torch as contestants of a loop: captured into CUDA graphs, replayed on its stream.

torch is not a dependency of the project: only what measures beside cuBLAS imports it, here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from results.measure.protocol import GpuReplay, GpuStopwatch

Call = Callable[[], Any]


def torch_version() -> str | None:
    """The version of a torch that sees a GPU, else None."""
    try:
        import torch

        return str(torch.__version__) if torch.cuda.is_available() else None
    except Exception:  # not installed, or broken: then there is nothing of torch to measure
        return None


class TorchCaptures:
    """Captures calls of torch (functions of no arguments) for the rounds of a stopwatch."""

    def __init__(self, stopwatch: GpuStopwatch) -> None:
        import torch

        self.stopwatch = stopwatch
        self.stream = torch.cuda.ExternalStream(stopwatch.stream)
        self.side = _side_stream()

    def capture(self, calls: Sequence[Call]) -> GpuReplay:
        """A CUDA graph, in whose pool lies what the calls allocate."""
        import torch

        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        collects = gc.isenabled()
        gc.disable()  # what it frees on the GPU would be freed within the capture
        try:
            with torch.cuda.stream(self.side):
                graph.capture_begin(capture_error_mode="relaxed")
                try:
                    for call in calls:
                        call()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()

        def start() -> None:
            with torch.cuda.stream(self.stream):
                graph.replay()

        return GpuReplay(self.stopwatch, start, tuple(calls))

    def warm_up(self, call: Call, times: int = 3) -> Any:
        """Call it as torch asks for before a capture: on a side stream, where it loads kernels and
        allocates workspaces. The last result."""
        import torch

        torch.cuda.synchronize()
        with torch.cuda.stream(self.side):
            for _ in range(times):
                result = call()
        torch.cuda.synchronize()
        return result


@cache
def _side_stream() -> Any:
    """The stream that is captured: one, as cuBLAS keeps a workspace for each that it has seen."""
    import torch

    return torch.cuda.Stream()


def release() -> None:
    """Give back what torch keeps of memory that is no longer used."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
