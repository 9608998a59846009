"""Memory that launches of one stream share, kept for good, as CUDA graphs hold the addresses."""

from __future__ import annotations

from typing import Any, Protocol

from steps.nn import operator as operator

torch = operator.torch


class Template(Protocol):
    """A launch that is brought `zeroed` bytes of zeros, which it leaves zero, and `nbytes`."""

    zeroed: int
    nbytes: int


class Workspace:
    """Memory of launch templates, for one stream. Counters are zeroed once."""

    def __init__(self) -> None:
        self._memory: dict[Template, tuple[Any, Any]] = {}

    def of(self, made: Template, device: Any) -> tuple[int, int]:
        """The addresses of `zeroed` bytes of zeros and of `nbytes` others."""
        if (memory := self._memory.get(made)) is None:
            zeros = torch.zeros(made.zeroed, dtype=torch.uint8, device=device)
            memory = zeros, torch.empty(made.nbytes, dtype=torch.uint8, device=device)
            self._memory[made] = memory
        return memory[0].data_ptr(), memory[1].data_ptr()
