"""Tokens that are made by chains take turns on a GPU, whatever streams they are queued on.

A chain (`steps.kernels.decode.chain`) needs all SMs at once. Of two that begin at the same time
each could hold some of them and wait for the others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from steps.nn import operator as operator

torch = operator.torch


class Turns:
    """captured: how often a turn was wanted while a stream was captured. What replays such a graph
    takes the turn then."""

    def __init__(self) -> None:
        self._last: dict[int, Any] = {}  # of each GPU, the stream that had the last turn
        self._queueing = threading.Lock()
        self.captured = 0

    @contextmanager
    def taken(self, device: Any) -> Iterator[None]:
        """What is queued on the current stream of a device meanwhile begins when all is done that
        was queued on another stream, up to the end of its last turn."""
        if device.type != "cuda":
            yield
        elif torch.cuda.is_current_stream_capturing():
            self.captured += 1
            yield
        else:
            stream = torch.cuda.current_stream(device)
            with self._queueing:
                last = self._last.get(stream.device_index, stream)
                if last != stream:
                    stream.wait_stream(last)
                self._last[stream.device_index] = stream
                yield


TURNS: Final = Turns()
"""Of this process. Processes do not share a GPU's SMs, but under MPS: see
`steps.kernels.decode.chain.runs_here`."""
