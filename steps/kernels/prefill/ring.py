"""An mbarrier ring: a producer fills stages of shared memory, and consumers empty them.

Shared memory holds a few *stages*, which are used in turn. Each stage has two mbarriers (PTX ISA,
"mbarrier"; steps/instructions/bulk_copy.py):

    full[stage]     complete when the copies into the stage have arrived
    empty[stage]    complete when every consumer has finished with the stage

The producer waits for `empty` before it fills a stage, a consumer waits for `full` before it reads
one. They meet nowhere else, so the producer runs ahead by as many stages as there are. With four:

    step                           0  1  2  3  4  5  6  7  8  ...
    stage                          0  1  2  3  0  1  2  3  0
    parity                         0  0  0  0  1  1  1  1  0     of the round through the ring
    producer waits until step      -  -  -  -  0  1  2  3  4     has been read: `empty`
    a consumer waits until step    0  1  2  3  4  5  6  7  8     has arrived: `full`

A barrier completes once in each round through the ring. A wait names the round by its *parity*, 0
or 1: a thread is never more than one round from the barrier, so one bit tells them apart. The
producer fills a stage in round r after `empty` of round r - 1, which has the other parity. On a new
barrier the wait for parity 1 returns at once, so the first round needs no case of its own. A thread
keeps its (stage, parity) in two registers.

Step 13 teaches this; steps 14 and 15 use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda, int32

from steps.instructions import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
)

BARRIER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Ring:
    """Device functions of a ring. `memory` is the shared array that holds its barriers; stage and
    parity are int32 and begin at 0, 0.

    end: the first byte behind the barriers
    make(memory, consumers)
        by one thread, before a block-wide barrier: the barriers. consumers: how many warps release
        a stage; in steps 13 to 15 all of the consumer warpgroups
    next_stage(stage, parity) -> (stage, parity)
    wait_empty(memory, stage, parity)
        the producer: the stage may be filled
    expect(memory, stage, size)
        the producer, once a stage: its copies will bring `size` bytes
    full(stage) -> the byte of `memory` where the barrier is that copies report to
    wait_full(memory, stage, parity)
        a consumer: what was copied may be read
    release(memory, stage, speaks)
        every lane of a consumer warp: the warp has finished with the stage. One lane speaks for
        it; where none does, nothing is released. (A branch around the call would make ptxas wait
        at every wgmma.)
    """

    end: int
    make: Any
    next_stage: Any
    wait_empty: Any
    expect: Any
    full: Any
    wait_full: Any
    release: Any


@cache
def mbarrier_ring(stages: int, first_byte: int) -> Ring:
    """The functions of a ring whose barriers lie in dynamic shared memory from `first_byte` on, a
    multiple of 8: `full` of all stages, then `empty` of all."""
    empty_byte = first_byte + BARRIER_BYTES * stages

    @cuda.jit(device=True, forceinline=True)
    def make(memory, consumers):
        for stage in range(stages):
            mbarrier_init(memory, first_byte + BARRIER_BYTES * stage, 1)
            mbarrier_init(memory, empty_byte + BARRIER_BYTES * stage, consumers)
        fence_mbarrier_init()

    @cuda.jit(device=True, forceinline=True)
    def next_stage(stage, parity):
        if stage == stages - 1:
            return int32(0), int32(parity ^ 1)
        return int32(stage + 1), parity

    @cuda.jit(device=True, forceinline=True)
    def full(stage):
        return int32(first_byte + BARRIER_BYTES * stage)

    @cuda.jit(device=True, forceinline=True)
    def wait_empty(memory, stage, parity):
        mbarrier_wait(memory, empty_byte + BARRIER_BYTES * stage, parity ^ 1)

    @cuda.jit(device=True, forceinline=True)
    def expect(memory, stage, size):
        mbarrier_arrive_expect(memory, full(stage), size)

    @cuda.jit(device=True, forceinline=True)
    def wait_full(memory, stage, parity):
        mbarrier_wait(memory, full(stage), parity)

    @cuda.jit(device=True, forceinline=True)
    def release(memory, stage, speaks):
        cuda.syncwarp()  # all lanes have loaded what they need of the stage
        if speaks:
            mbarrier_arrive(memory, empty_byte + BARRIER_BYTES * stage)

    return Ring(
        end=empty_byte + BARRIER_BYTES * stages,
        make=make,
        next_stage=next_stage,
        wait_empty=wait_empty,
        expect=expect,
        full=full,
        wait_full=wait_full,
        release=release,
    )
