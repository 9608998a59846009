"""Words that thread blocks of one launch show each other: relaxed loads and stores (PTX ISA 9.7.9).

A relaxed store goes to the L2, and a relaxed load reads there, past the L1 of its SM. Neither says
anything about other memory. So a word that is its own sign, zero until it is stored, can be polled
with no fence and no counter beside it.

In the simulator a relaxed load lets all other threads run first.
"""

import struct

from numba.cuda.types import uint32

from steps.instructions.define import GLOBAL, ptx
from steps.simulator.scheduler import now


@ptx(
    "ld.relaxed.gpu.global.v4.u32 {$0, $1, $2, $3}, [$4];",
    returns=(uint32, uint32, uint32, uint32),
    takes=(GLOBAL,),
    scope="lane",
    memory=True,
)
def load_u32x4_relaxed(lane, array, index):
    """Four words at array[index], each as it is in the L2 now. LDG.E.128.STRONG.GPU."""
    at = array.locate(index, 16)
    now().pause()
    return struct.unpack_from("<4I", array.bytes, at)


@ptx("st.relaxed.gpu.global.u32 [$0], $1;", takes=(GLOBAL, uint32), scope="lane", memory=True)
def store_u32_relaxed(lane, array, index, value):
    """A word to array[index], for relaxed loads of other thread blocks. STG.E.STRONG.GPU."""
    array.exchange(index, lambda _: value)
