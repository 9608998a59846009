"""What thread blocks show each other within a token, also those of launches that overlap.

A value of 32 bits goes to the L2 in one store of 64 with a tag beside it, so it is its own flag: no
fence, no counter. Who needs it polls until the tag is that of the launch which makes it. Taught by
`steps.kernels.decode.low_rank`.

Word 0 counts tokens. A launch is number `index` of `count` of its token: its tag, see `tag_of`, is
never that of the launch which wrote to the same place before.
"""

from __future__ import annotations

from typing import Final

from numba import cuda, int32, uint32, uint64

from steps.instructions import load_u64x2_relaxed, store_u64_relaxed, trap

HEAD: Final = 4
"""Words before the first that is shown."""
PATIENCE: Final = 1 << 26
"""Polls of a value at most, of some 0.3 us each: then the launch ends with an error."""


@cuda.jit(device=True, forceinline=True)
def tag_of(words, index, count):
    """The tag of a launch: of a token that is not over, so all of its launches read the same."""
    tokens = uint32(load_u64x2_relaxed(words, 0)[0])
    return uint32(uint32(tokens * uint32(count)) + uint32(index + 1))


@cuda.jit(device=True, forceinline=True)
def next_token(words, count, tag):
    """By one thread of a token's last launch, when all of its blocks have their tag."""
    store_u64_relaxed(words, 0, uint64(uint32(tag) // uint32(count)))


@cuda.jit(device=True, forceinline=True)
def show(words, at, tag, bits):
    """A value, to words `at` (even) and the next."""
    store_u64_relaxed(words, at, uint64(tag) << uint64(32) | uint64(bits))


@cuda.jit(device=True, forceinline=True)
def are_of(tag, two):
    """Whether both values have this tag."""
    return uint32(two[0] >> uint64(32)) == tag and uint32(two[1] >> uint64(32)) == tag


@cuda.jit(device=True, forceinline=True)
def four_of(a, b):
    return uint32(a[0]), uint32(a[1]), uint32(b[0]), uint32(b[1])


@cuda.jit(device=True, forceinline=True)
def one_more(polls, patience):
    """How often a value was asked for; once too often ends the launch."""
    if polls == patience:
        trap()
    return int32(polls + 1)


@cuda.jit(device=True, forceinline=True)
def shown_two(words, at, tag, patience):
    """Two neighbouring values from word `at`, a multiple of four, on, when both have come."""
    a, polls = load_u64x2_relaxed(words, at), int32(0)
    while not are_of(tag, a):
        polls = one_more(polls, patience)
        a = load_u64x2_relaxed(words, at)
    return uint32(a[0]), uint32(a[1])


@cuda.jit(device=True, forceinline=True)
def shown_four(words, at, tag, patience):
    """Four of them, likewise."""
    a, b = load_u64x2_relaxed(words, at), load_u64x2_relaxed(words, at + 4)
    polls = int32(0)
    while not (are_of(tag, a) and are_of(tag, b)):
        polls = one_more(polls, patience)
        a, b = load_u64x2_relaxed(words, at), load_u64x2_relaxed(words, at + 4)
    return four_of(a, b)


@cuda.jit(device=True, forceinline=True)
def shown_eight(words, at, other, tag, patience):
    """Four values from word `at` on and four from `other`, asked for together."""
    a, b = load_u64x2_relaxed(words, at), load_u64x2_relaxed(words, at + 4)
    c, d = load_u64x2_relaxed(words, other), load_u64x2_relaxed(words, other + 4)
    polls = int32(0)
    while not (are_of(tag, a) and are_of(tag, b) and are_of(tag, c) and are_of(tag, d)):
        polls = one_more(polls, patience)
        a, b = load_u64x2_relaxed(words, at), load_u64x2_relaxed(words, at + 4)
        c, d = load_u64x2_relaxed(words, other), load_u64x2_relaxed(words, other + 4)
    return four_of(a, b) + four_of(c, d)


@cuda.jit(device=True, forceinline=True)
def shown_twelve(words, at, other, third, tag, patience):
    """And four from a third place on."""
    a, b = load_u64x2_relaxed(words, at), load_u64x2_relaxed(words, at + 4)
    c, d = load_u64x2_relaxed(words, other), load_u64x2_relaxed(words, other + 4)
    e, f = load_u64x2_relaxed(words, third), load_u64x2_relaxed(words, third + 4)
    polls = int32(0)
    while polls < patience and not (
        are_of(tag, a)
        and are_of(tag, b)
        and are_of(tag, c)
        and are_of(tag, d)
        and are_of(tag, e)
        and are_of(tag, f)
    ):
        a, b = load_u64x2_relaxed(words, at), load_u64x2_relaxed(words, at + 4)
        c, d = load_u64x2_relaxed(words, other), load_u64x2_relaxed(words, other + 4)
        e, f = load_u64x2_relaxed(words, third), load_u64x2_relaxed(words, third + 4)
        polls = int32(polls + 1)
    if polls == patience:
        trap()
    return four_of(a, b) + four_of(c, d) + four_of(e, f)


@cuda.jit(device=True, forceinline=True)
def first_shown(words, at, tag, patience, lane):
    """A warp waits until two values from word `at` on have come, polled by one lane: those of all
    would fill the way to the L2."""
    if lane == 0:
        shown_two(words, at, tag, patience)
    cuda.syncwarp()
