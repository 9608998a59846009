"""Tokens that come to the host one by one, as they are generated: the likeliest, or drawn ones.

A step is `model.Greedy`, in a CUDA graph on a GPU. The first token is there before that graph is
captured. Keys and values stay in one cache from answer to answer; a prompt is always computed anew
from its first token, also where it only grew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from steps.decoder.model import Decoder, Greedy, torch

if TYPE_CHECKING:
    from torch import Tensor

COLDEST: Final = 1e-30
"""The temperature from which on the likeliest token is taken, as at 0."""
SHORTEST: Final = 512
"""Positions of a cache at first. One that is full gives way to one of the next power of two."""


class Sampling:
    """Draws tokens by their probability, those of a `temperature`, among the likeliest ones that
    together have the probability `top_p`. At temperature 0 `Stream` takes the likeliest token.

    Draws are those of a seed: numbers from 0 to 1 made on the host, so that a CUDA graph can hold
    all the rest. `draw` sets the next one.
    """

    def __init__(
        self, temperature: float, top_p: float = 1.0, seed: int = 0, device: Any = "cpu"
    ) -> None:
        """ValueError unless temperature >= 0 and 0 < top_p <= 1."""
        if not (0 <= temperature < float("inf") and 0 < top_p <= 1):
            raise ValueError(
                f"temperature is {temperature:g} and top-p {top_p:g}: the first must be at least "
                "0, the second above 0 and at most 1"
            )
        # logits / COLDEST stay finite, and any difference of theirs is a certainty.
        self.temperature, self.top_p = max(temperature, COLDEST), top_p
        self._numbers = np.random.default_rng(seed)
        self._drawn = torch.zeros((), device=device)

    def draw(self) -> None:
        self._drawn.fill_(float(self._numbers.random()))

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens [B] of logits [B, V]."""
        shares, tokens = (logits.float() / self.temperature).softmax(-1).sort(-1, descending=True)
        before = shares.cumsum(-1) - shares
        taken = torch.where(before < self.top_p, shares, 0).cumsum(-1)
        at = (taken <= self._drawn * taken[:, -1:]).sum(-1, keepdim=True)
        return tokens.gather(1, at.clamp(max=logits.shape[-1] - 1))[:, 0]


class Stream:
    """Generates tokens of one sequence.

    sampling: how they are drawn; the likeliest by default, and at temperature 0. prepare: is called
    once, with the number of tokens of the first prompt, before that is computed.
    """

    def __init__(
        self,
        model: Decoder,
        sampling: Sampling | None = None,
        prepare: Callable[[int], None] | None = None,
    ) -> None:
        if sampling is not None and sampling.temperature == COLDEST:
            sampling = None
        self.model, self.sampling, self._prepare = model, sampling, prepare
        self._choose: Callable[[Tensor], Tensor] = sampling or model.operations.argmax_of_rows
        self._steps: Greedy | None = None

    @torch.no_grad()
    def tokens(self, ids: Sequence[int], most: int) -> Iterator[int]:
        """At most `most` tokens after ids."""
        if self._prepare is not None:
            prepare, self._prepare = self._prepare, None
            prepare(len(ids))
        steps = self._with_room(len(ids) + 1)
        given = torch.tensor([list(ids)], device=self.model.device)
        logits = self.model.prefill(given, steps.cache)
        self._draw()
        steps.token.copy_(self._choose(logits))
        for position in range(len(ids), len(ids) + most):
            yield int(steps.token)
            if position + 1 < len(ids) + most:
                steps = self._with_room(position + 1)
                if self.model.device.type == "cuda" and not steps.captured:
                    steps.capture()
                self._draw()
                steps.run()

    def _with_room(self, positions: int) -> Greedy:
        """The steps, with a cache for so many positions: a longer one if need be, with what the
        shorter one holds."""
        before, length = self._steps, SHORTEST
        if before is not None and before.cache.length >= positions:
            return before
        while length < positions:
            length *= 2
        token = torch.zeros(1, dtype=torch.int64, device=self.model.device)
        made = Greedy(self.model, self.model.cache(1, length), token, self._choose)
        if before is not None:
            made.token.copy_(before.token)
            made.cache.position.copy_(before.cache.position)
            for new, old in zip(made.cache.layers, before.cache.layers, strict=True):
                new[:, :, : before.cache.length] = old
        self._steps = made
        return made

    def _draw(self) -> None:
        if self.sampling is not None:
            self.sampling.draw()
