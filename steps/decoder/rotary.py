"""Frequencies of the rotary embedding, and how files stretch them to longer contexts.

A pair i of the R rotated values of a head turns by position * base^(-2 i / R). A file may say more:

    rope_freqs.weight     divides the frequency of each pair (Llama 3.1)
    linear                divides all of them by one factor s
    yarn                  divides those of slow pairs by s, of fast pairs by 1 and of others by
                          something between, and multiplies cos and sin by 1 + 0.1 ln s

Formulas: B. Peng, J. Quesnelle, H. Fan, E. Shippole, YaRN: Efficient Context Window Extension of
Large Language Models, https://arxiv.org/abs/2309.00071, sections 3.2 to 3.4, with corners rounded
outwards as ggml does (`ggml_rope_yarn_corr_dims` in ggml.c, `rope_yarn` in ggml-cpu/ops.cpp).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np


@dataclass(frozen=True, slots=True)
class Scaling:
    """How frequencies are divided by `factor`: all alike, or, with `first_context`, as yarn does.

    first_context : positions that the model was first trained on; 0 for linear scaling.
    magnitude     : what cos and sin are multiplied by.
    fast, slow    : pairs that turn more often than `fast` times in `first_context` positions keep
                    their frequency; those that turn less often than `slow` times have it divided.
    """

    factor: float = 1.0
    first_context: int = 0
    magnitude: float = 1.0
    fast: float = 32.0
    slow: float = 1.0


UNSCALED: Final = Scaling()


def yarn_magnitude(factor: float) -> float:
    """1 + 0.1 ln s, the recommendation of the YaRN paper (its equation 22 has it as a temperature
    of the softmax)."""
    return 1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0


def frequencies(
    rotated: int,
    base: float,
    scaling: Scaling = UNSCALED,
    factors: np.ndarray | None = None,
) -> np.ndarray:
    """Radians per position for each pair of `rotated` values, float64 [rotated/2].

    factors: what a file's rope_freqs.weight divides them by, [rotated/2].
    """
    found = base ** (-np.arange(0, rotated, 2) / rotated)
    if factors is not None:
        found = found / factors
    return found * (1 - _divided(rotated, base, scaling) * (1 - 1 / scaling.factor))


def _divided(rotated: int, base: float, scaling: Scaling) -> np.ndarray:
    """Which pairs have their frequency divided by the factor: 1, or 0, or a share, [rotated/2]."""
    if not scaling.first_context:
        return np.ones(rotated // 2)

    def pair_that_turns(times: float) -> float:
        return (
            rotated * math.log(scaling.first_context / (times * 2 * math.pi)) / (2 * math.log(base))
        )

    low = max(math.floor(pair_that_turns(scaling.fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.slow)), rotated - 1)
    share: np.ndarray = (np.arange(rotated // 2) - low) / max(high - low, 1e-3)
    return share.clip(0, 1)
