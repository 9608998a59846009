"""What a kernel needs whose blocks wait for each other, beside relaxed loads and stores
(`steps.instructions.memory`): bounded waits for copies, and accesses of 2 and 4 bytes.

Such a launch needs all of its blocks on the GPU at once. Where something keeps one of them out, the
others would wait for ever.
"""

import struct
from typing import Final

from numba.cuda.types import int32, uint16, uint32

from steps.instructions.define import GLOBAL, SHARED, ptx
from steps.simulator.scheduler import now

PATIENCE: Final = 20_000_000_000
"""Nanoseconds of a wait at most."""


@ptx(
    "{.reg .pred p; .reg .u64 begin, t; "
    "mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra done; "
    "mov.u64 begin, %globaltimer; "
    "again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra done; "
    "mov.u64 t, %globaltimer; sub.u64 t, t, begin; "
    f"setp.gt.u64 p, t, {PATIENCE}; @p trap; bra again; done: }}",
    takes=(SHARED, uint32),
    scope="lane",
    memory=True,
    min_cc=(9, 0),
)
def mbarrier_wait_bounded(lane, barrier, bi, parity):
    """`mbarrier_wait` for `PATIENCE` at most: then the launch ends with an error (`trap`)."""
    now().wait_for_phase(lane.block.memory.barrier(lane, barrier, bi), parity)


@ptx("mov.u32 $0, %tid.x;", returns=int32, scope="lane", memory=True)
def thread_index(lane):
    """`cuda.threadIdx.x`, read anew: the compiler keeps no register for it from one use to the
    next. S2R."""
    return lane.index


@ptx(
    "ld.relaxed.gpu.global.u32 $0, [$1];",
    returns=uint32,
    takes=(GLOBAL,),
    scope="lane",
    memory=True,
)
def load_u32_relaxed(lane, array, index):
    """4 bytes at array[index] as they are in the L2 now. LDG.E.STRONG.GPU."""
    return struct.unpack_from("<I", array.bytes, array.locate_relaxed(index, 4))[0]


@ptx("st.relaxed.gpu.global.u16 [$0], $1;", takes=(GLOBAL, uint16), scope="lane", memory=True)
def store_u16_relaxed(lane, array, index, value):
    """2 bytes to array[index], for relaxed loads of other blocks. STG.E.U16.STRONG.GPU."""
    array.store_relaxed(index, struct.pack("<H", value))
