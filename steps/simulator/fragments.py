"""Fragment layouts (PTX ISA): where a warp's registers lie in the tiles of an mma, and what numbers
they hold."""

from typing import Any, Final

import numpy as np

from reference.bfloat16 import bfloat16_values

BFLOAT16: Final = "bfloat16"
"""An element type of which NumPy has no dtype."""

LANE = np.arange(32)
GROUP, THREAD = LANE // 4, LANE % 4
# Where lane l's registers lie when a tile is cut into 32-bit words, row by row.
A_ROW = np.stack([GROUP, GROUP + 8, GROUP, GROUP + 8], axis=1)
A_WORD = np.stack([THREAD, THREAD, THREAD + 4, THREAD + 4], axis=1)
B_WORD = np.stack([THREAD, THREAD + 4], axis=1)
C_ROW = np.stack([GROUP, GROUP, GROUP + 8, GROUP + 8], axis=1)
C_COLUMN = np.stack([2 * THREAD, 2 * THREAD + 1] * 2, axis=1)


def numbers(words: np.ndarray, element: Any) -> np.ndarray:
    """Registers [..., words] as the numbers of an element type, [..., numbers]."""
    if element == BFLOAT16:
        return bfloat16_values(words.view(np.uint16))
    return words.view(element)
