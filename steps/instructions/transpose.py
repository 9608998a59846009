"""The transpose of a small matrix that a warp holds in registers (PTX ISA 9.7.15.5.17)."""

import numpy as np
from numba.cuda.types import uint32

from steps.instructions.define import ptx
from steps.simulator.errors import SimulatorError
from steps.simulator.fragments import GROUP, THREAD


@ptx(
    "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
    returns=uint32,
    takes=(uint32,),
    scope="warp",
)
def movmatrix_trans(lanes):
    """(word) -> the word of the transposed matrix, 8 x 8 elements of 16 bits. Lane l has elements
    2t, 2t+1 of row g, and gets those of column g: g = l // 4, t = l % 4. MOVM.16.MT88."""
    if len(lanes) != 32:
        raise SimulatorError(f"movmatrix needs a full warp; this one has {len(lanes)} lanes")
    words = np.empty((8, 4), np.uint32)
    words[GROUP, THREAD] = [word for (word,) in lanes]
    columns = np.ascontiguousarray(words.view(np.uint16).T).view(np.uint32)
    return columns[GROUP, THREAD].tolist()
