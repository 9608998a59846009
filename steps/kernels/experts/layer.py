"""A layer with experts at one token, behind its attention, in one launch.

    h += o(a) | x = norm(h), router | choose S of E | gates, ups | h += downs | q, k, v of norm(h)

Row tiles of the residual are shared out, a thread block an SM, and all of them run at once: they
show each other what they have, each value with its flag beside it (`steps.kernels.parts.exchange`).
Attention, a launch of its own, is in it too: it polls for queries, keys and values beside the layer
that makes them, and the layer behind it has asked for its first weights when attention shows its
output.

    weights of o | a: o, h | all h: norm, router | all logits: choose | all gates: downs | ...
                   shown     shown                                      shown

Every block adds up the squares of all of h and has a share of the router's rows, so norm and router
are one exchange. Every block chooses by itself: ids and shares go nowhere. There is no ring. Each
packed tile that a block reads has a place of its own in shared memory. A *unit* is two of them and
the A of each: the first and the second half of K of a row tile, a gate and its up, or two experts.
Each of an mma's two row tiles needs one of its first two columns (`summed`). Weights of o come
before attention has ended, those of experts when they are chosen, and those of queries, keys and
values where gates and ups were.

All of that must fit into shared memory (`why_not`): of Qwen3 30B-A3B 4 bits do, 5 do not. All
blocks must be on the GPU at once: one that waits in vain for some 20 s ends the launch with an
error. Where all threads poll, what they ask for fills the way to the L2, and attention
and the streams of weights of others wait behind it: one lane of a warp polls first. So do weights:
what is polled waits behind all that the SM has asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from qformats import FORMATS
from qformats.repack import TILE_K, TILE_ROWS
from qformats.storage import storage_format
from steps.contract import Launch, ceil_div, multiprocessors, shared_memory
from steps.instructions import (
    as_bits,
    as_float,
    bulk_copy,
    fence_mbarrier_init,
    floats_to_halves,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32,
    load_f32x4,
    load_u32x4,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    shfl,
    shfl_xor,
    store_f32,
    store_u32x2,
    store_u32x4,
)
from steps.instructions.approximate import exp2, reciprocal, rsqrt
from steps.kernels.between.argmax import ordered
from steps.kernels.between.router import LOG2_E, LOWEST
from steps.kernels.between.values import put
from steps.kernels.decode.copies import PAD, ROW_BYTES
from steps.kernels.decode.product import PAIR, product_a16
from steps.kernels.experts.contract import GROUP_ROWS
from steps.kernels.parts.activations.gated import silu_times
from steps.kernels.parts.exchange import (
    HEAD,
    PATIENCE,
    first_shown,
    next_token,
    show,
    shown_eight,
    shown_four,
    shown_two,
    tag_of,
)
from steps.kernels.parts.weights.codes import tile_index
from steps.kernels.parts.weights.storage_formats import tile_format

WARP: Final = 32
WARPS: Final = 16
FOUR: Final = 4
"""Lanes that share an output, and values that a thread has side by side."""
SUMS: Final = 160
"""Bytes from the sums of a unit, 32 float32, to the next: the four lanes of an output in four
banks."""
H200_AHEAD: Final = 1
"""Units of an expert's weights that a warp has asked for at a time: what is polled waits behind all
that its SM has asked for."""
A_ROW: Final = ROW_BYTES + PAD
OF_UNIT: Final = PAIR * A_ROW
"""Bytes of the A of a unit."""
N_ACC: Final = 4 * PAIR


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a layer, and how a launch shares them.

    out, gate_up, down, qkv: names of storage formats of products.
    width  : of the residual. heads: values of attention's output. inner: gates of an expert.
    experts, chosen: how many there are, and how many a token has; normed: whether their shares add
             up to 1.
    features: of q, k and v.
    blocks, warps: thread blocks, and warps of each.
    """

    out: str
    gate_up: str
    down: str
    qkv: str
    width: int
    heads: int
    inner: int
    experts: int
    chosen: int
    normed: bool
    features: int
    blocks: int
    warps: int = WARPS

    @property
    def row_tiles(self) -> int:
        """Of the residual, of a thread block."""
        return self.width // TILE_ROWS // self.blocks

    @property
    def units(self) -> tuple[int, int, int, int]:
        """Of a thread block at most: of o, gates with ups, downs, and q, k and v."""
        of_row, half = self.width // TILE_K, PAIR * TILE_K
        items = ceil_div(self.chosen * (self.inner // TILE_ROWS), self.blocks)
        downs = self.chosen // PAIR * (self.inner // TILE_K)
        rows = ceil_div(self.features // TILE_ROWS, self.blocks)
        return (
            self.row_tiles * (self.heads // half), items * of_row, self.row_tiles * downs,
            rows * (self.width // half),
        )  # fmt: skip

    @property
    def places(self) -> tuple[int, int, int, int, int, int]:
        """Bytes of shared memory where these begin: weights of o and downs, of gates with ups and
        of q, k and v, A of o and downs, x, sums; mbarriers; the end."""
        of = [PAIR * tile_format(one).tile_bytes for one in (self.out, self.gate_up, self.down)]
        of.append(PAIR * tile_format(self.qkv).tile_bytes)
        sizes = [n * each for n, each in zip(self.units, of, strict=True)]
        o, gates, downs, n_qkv = self.units
        first = max(sizes[0], sizes[2])
        a_at = first + max(sizes[1], sizes[3])
        x_at = a_at + max(o, downs) * OF_UNIT
        sums_at = x_at + ceil_div(2 * self.width + PAD, 128) * 128
        bars_at = sums_at + max(o, gates + downs, n_qkv) * SUMS
        return first, a_at, x_at, sums_at, bars_at, bars_at + 8 * sum(self.units)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.places[-1]

    @property
    def shown(self) -> tuple[int, int, int, int, int, int]:
        """Words where these begin: attention's output, h behind o, logits, gates, h behind downs,
        and queries, keys and values. Two words are for a float32, or for two float16."""
        sizes = self.heads, 2 * self.width, 2 * self.experts, self.chosen * self.inner
        a, h, logits, gates, after = itertools.accumulate((HEAD, *sizes))
        return a, h, logits, gates, after, after + 2 * self.width

    @property
    def words(self) -> int:
        """uint32 that thread blocks show each other."""
        return self.shown[-1] + self.features


def blocks_of(width: int, multiprocessors: int) -> int:
    """Thread blocks that have as many row tiles each: as many as can be at once."""
    row_tiles = width // TILE_ROWS
    return next(one for one in range(multiprocessors, 0, -1) if row_tiles % one == 0)


def why_not(shape: LayerShape) -> str | None:
    """None, or one sentence saying what of these sizes there is no kernel for."""
    wholes = (
        ("width", shape.width, PAIR * TILE_K), ("heads", shape.heads, PAIR * TILE_K),
        ("inner", shape.inner, TILE_K), ("experts", shape.experts, 8),
        ("chosen", shape.chosen, PAIR), ("features", shape.features, TILE_ROWS),
    )  # fmt: skip
    for name, size, of in wholes:
        if size % of:
            return f"{name} is {size}: it must be a multiple of {of}"
    if not 0 < shape.chosen <= min(shape.experts, WARP):
        return f"a token has {shape.chosen} experts of {shape.experts}: {WARP} at most"
    if shape.chosen * (shape.inner // TILE_ROWS) < shape.blocks:
        return f"{shape.blocks} thread blocks have fewer gates than one row tile each"
    room = shared_memory() - 4 * (8 * shape.experts + 4 * shape.warps + 3 * WARP) - 1024
    if shape.shared > room:
        return f"a layer takes {shape.shared} bytes of shared memory, and there are {room}"
    return None


# --- the kernel -----------------------------------------------------------------------------------


@cache
def kernel(shape: LayerShape) -> Any:
    """The kernel for layers of these sizes."""
    width, heads, inner, experts, chosen = (
        shape.width, shape.heads, shape.inner, shape.experts, shape.chosen,
    )  # fmt: skip
    blocks, warps, normed, ahead = shape.blocks, shape.warps, shape.normed, H200_AHEAD
    threads, row_tiles = WARP * warps, shape.row_tiles
    n_out, n_gates, n_down, _ = shape.units
    second, a_at, x_at, sums_at, bars_at, _ = shape.places
    bars_of_gates, bars_of_downs = bars_at + 8 * n_out, bars_at + 8 * (n_out + n_gates)
    bars_of_qkv, n_bars = bars_of_downs + 8 * n_down, sum(shape.units)
    k_tiles, half_tiles, half_heads = width // TILE_K, width // TILE_K // 2, heads // TILE_K // 2
    inner_tiles, pairs, of_slots = inner // TILE_K, inner // TILE_ROWS, chosen // PAIR
    x_pitch = TILE_K * 2 * half_tiles + PAD  # from the first half of x to the second
    expert_rows = ceil_div(PAIR * inner, GROUP_ROWS) * GROUP_ROWS  # in packed gates and ups
    down_rows = ceil_div(width, GROUP_ROWS) * GROUP_ROWS
    chunks = ceil_div(width, FOUR * threads)  # of four values of a row, of a thread
    each = ceil_div(experts, blocks)  # rows of the router, of a thread block
    n_values, n_rows = FOUR * chunks, each * FOUR * chunks
    lots = ceil_div(FOUR * TILE_ROWS * row_tiles, threads)  # outputs of a lane, of a residual
    most_qkv = ceil_div(shape.features // TILE_ROWS, blocks)  # row tiles
    lots_qkv = max(1, ceil_div(FOUR * TILE_ROWS * most_qkv, threads))
    pair_lots = ceil_div(of_slots, FOUR)  # pairs of slots that a lane adds up
    n_factors = PAIR * pair_lots * lots
    # warps share out experts, 32 each, and then those that they are compared with
    groups = min(ceil_div(experts, WARP), warps)
    parts = warps // groups
    places = ceil_div(experts, FOUR * parts) * (FOUR * parts)
    n_ranks = parts * places
    attended_at, h_at, logits_at, gates_at, after_at, qkv_at = shape.shown
    qkv_tiles = shape.features // TILE_ROWS
    of_warps = each * warps
    mean_of = 1 / width

    def of(name: str) -> tuple[Any, int, float]:
        found = product_a16(name, "float16", PAIR)
        return found, tile_format(name).tile_bytes, found.scale

    (for_out, out_bytes, out_scale) = of(shape.out)
    (for_gates, gate_bytes, gate_scale) = of(shape.gate_up)
    (for_down, down_bytes, down_scale) = of(shape.down)
    (for_qkv, qkv_bytes, qkv_scale) = of(shape.qkv)
    multiply_out, multiply_gates = for_out.multiply, for_gates.multiply
    multiply_down, multiply_qkv = for_down.multiply, for_qkv.multiply
    places_out, places_gates = for_out.places, for_gates.places
    places_down, places_qkv = for_down.places, for_qkv.places

    @cuda.jit(device=True, forceinline=True)
    def copy_two(smem, to, bar, w, first, other, size):
        """One lane issues copies of two packed tiles of `size` bytes."""
        mbarrier_arrive_expect(smem, bar, int32(PAIR * size))
        bulk_copy(smem, to, w, int64(first) * size, size, smem, bar)
        bulk_copy(smem, to + size, w, int64(other) * size, size, smem, bar)

    @cuda.jit(device=True, forceinline=True)
    def clear(acc):
        for i in range(N_ACC):
            acc[i] = 0

    @cuda.jit(device=True, forceinline=True)
    def store_sum(smem, unit, acc, lane):
        """The sums of a unit whose row tiles are two halves of K."""
        if lane & 3 == 0:
            at = int32(sums_at + SUMS * unit + 4 * (lane >> 2))
            store_f32(smem, at, acc[0] + acc[5])
            store_f32(smem, at + 32, acc[2] + acc[7])

    @cuda.jit(device=True, forceinline=True)
    def store_both(smem, unit, acc, lane):
        """The sums of both row tiles of a unit."""
        if lane & 3 == 0:
            at = int32(sums_at + SUMS * unit + 4 * (lane >> 2))
            store_f32(smem, at, acc[0])
            store_f32(smem, at + 32, acc[2])
            store_f32(smem, at + 64, acc[5])
            store_f32(smem, at + 96, acc[7])

    @cuda.jit(device=True, forceinline=True)
    def sum_of(smem, first, count, row, quarter):
        """The sum of a row of `count` units, to all four lanes of it."""
        total, i = float32(0), quarter
        while i < count:
            total += load_f32(smem, sums_at + SUMS * (first + i) + 4 * row)
            i = int32(i + FOUR)
        total += shfl_xor(total, 1)
        return total + shfl_xor(total, 2)

    @cuda.jit(device=True, forceinline=True)
    def collect(v, words, at, tag, patience, t):
        """A thread's values of a row of the residual; returns the sum of their squares."""
        squares = float32(0)
        for c in range(chunks):
            k = int32(FOUR * (t + c * threads))
            for i in range(FOUR):
                v[FOUR * c + i] = 0
            first = min(int32(k & -128), int32(width - 2))
            first_shown(words, int32(at + 2 * first), tag, patience, int32(t & 31))
            if k < width:
                x0, x1, x2, x3 = shown_four(words, int32(at + 2 * k), tag, patience)
                put(v, FOUR * c, (as_float(x0), as_float(x1), as_float(x2), as_float(x3)))
            for i in range(FOUR * c, FOUR * (c + 1)):
                squares += v[i] * v[i]
        return squares

    @cuda.jit(device=True, forceinline=True)
    def put_x(smem, v, weight, by, t):
        """x = h * by * weight to shared memory, its second half `PAD` bytes further."""
        for c in range(chunks):
            k, i = int32(FOUR * (t + c * threads)), FOUR * c
            if k < width:
                low = floats_to_halves(v[i] * by * weight[i], v[i + 1] * by * weight[i + 1])
                high = floats_to_halves(
                    v[i + 2] * by * weight[i + 2], v[i + 3] * by * weight[i + 3]
                )
                to = int32(x_at + 2 * k + (PAD if k >= width // 2 else 0))
                store_u32x2(smem, to, low, high)

    @cuda.jit(device=True, forceinline=True)
    def row_of_gates(ids, item, output):
        """The row of an output's gate among those of all experts."""
        slot = int32(uint32(item) // uint32(pairs))
        row = int32(PAIR * TILE_ROWS * (item - slot * pairs) + (output & 15))
        return int32(row + ids[slot] * expert_rows)

    @cuda.jit(device=True, forceinline=True)
    def shares_of_warp(units, warp):
        """How many of so many units are a warp's own."""
        rest = int32(max(int32(units - warp), int32(0)) + (warps - 1))
        return int32(uint32(rest) // uint32(warps))

    @cuda.jit(device=True, forceinline=True)
    def issue(smem, w_gates, w_down, ids, item, step, own_gates, warp, lane, block):
        """A warp issues copies of unit number `step` of its own gates with ups, and then downs."""
        if step < own_gates:
            u = int32(warp + step * warps)
            i = int32(uint32(u) // uint32(k_tiles))
            k = int32(u - i * k_tiles)
            slot = int32(uint32(item + i) // uint32(pairs))
            pair = int32(item + i - slot * pairs)
            if lane == 0:
                tile = int64(ids[slot]) * (expert_rows // TILE_ROWS * k_tiles)
                tile += tile_index(int32(PAIR * pair), k, k_tiles)
                to, bar = int32(second + u * (PAIR * gate_bytes)), int32(bars_of_gates + 8 * u)
                copy_two(smem, to, bar, w_gates, tile, tile + 1, gate_bytes)
        else:
            u = int32(warp + (step - own_gates) * warps)
            r = int32(uint32(u) // uint32(of_slots * inner_tiles))
            j = int32(u - r * (of_slots * inner_tiles))
            k = int32(uint32(j) % uint32(inner_tiles))
            slot = int32(PAIR * (uint32(j) // uint32(inner_tiles)))
            if lane == 0 and u < n_down:
                tile = tile_index(int32(block * row_tiles + r), k, inner_tiles)
                of_expert = down_rows // TILE_ROWS * inner_tiles
                first = int64(ids[slot]) * of_expert + tile
                other = int64(ids[slot + 1]) * of_expert + tile
                to, bar = int32(u * (PAIR * down_bytes)), int32(bars_of_downs + 8 * u)
                copy_two(smem, to, bar, w_down, first, other, down_bytes)

    @cuda.jit(device=True, forceinline=True)
    def gates_of(u, lane):
        """The word of the eight gates that a lane has of the A of a unit of downs."""
        j = int32(uint32(u) % uint32(of_slots * inner_tiles))
        slot = int32(PAIR * (uint32(j) // uint32(inner_tiles)) + (lane >> 4))
        k = int32(TILE_K * (uint32(j) % uint32(inner_tiles)) + 8 * (lane & 15))
        return int32(gates_at + slot * inner + k)

    @cuda.jit(launch_bounds=(threads, 1))
    def layer(
        w_out, s_out, w_gates, s_gates, w_down, s_down, w_qkv, s_qkv, h, weight, after, router,
        words, epsilon, index, count, patience,
    ):  # fmt: skip
        """A layer behind its attention, see `launch`: packed weights and row scales of each
        product. Grid: (blocks,)."""
        griddepcontrol_launch_dependents()
        smem = cuda.shared.array(0, uint8, alignment=128)
        squares_of, products_of = (
            cuda.shared.array(warps, float32), cuda.shared.array(of_warps, float32),
        )  # fmt: skip
        values, best = cuda.shared.array(experts, float32), cuda.shared.array(chosen, float32)
        shares, ranks = cuda.shared.array(chosen, float32), cuda.shared.array(n_ranks, int32)
        keys, ids = cuda.shared.array(places, int32, alignment=16), cuda.shared.array(chosen, int32)
        acc, v = cuda.local.array(N_ACC, float32), cuda.local.array(n_values, float32)
        norm, router_of = cuda.local.array(n_values, float32), cuda.local.array(n_rows, float32)
        next_norm = cuda.local.array(n_values, float32)
        products, factors = cuda.local.array(each, float32), cuda.local.array(n_factors, float32)
        own, own_scale = cuda.local.array(lots, float32), cuda.local.array(lots, float32)
        scales = cuda.local.array(lots_qkv, float32)
        t, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        lane, warp = int32(t & 31), shfl(int32(t >> 5), 0)
        quarter, output = int32(t & 3), int32(t >> 2)
        first_row = int32(block * (row_tiles * TILE_ROWS))

        # --- weights of o, the router and norms: nothing that the launch before writes
        i = t
        while i < n_bars:
            mbarrier_init(smem, bars_at + 8 * i, 1)
            i = int32(i + threads)
        fence_mbarrier_init()
        cuda.syncthreads()
        u = warp
        while u < n_out:
            r = int32(uint32(u) // uint32(half_heads))
            j = int32(u - r * half_heads)
            tile = tile_index(int32(block * row_tiles + r), j, int32(2 * half_heads))
            if lane == 0:
                to, bar = int32(u * (PAIR * out_bytes)), int32(bars_at + 8 * u)
                other = tile_index(int32(block * row_tiles + r), j + half_heads, 2 * half_heads)
                copy_two(smem, to, bar, w_out, tile, other, out_bytes)
            u = int32(u + warps)
        first_qkv = int32(uint32(qkv_tiles * block) // uint32(blocks))
        rows_qkv = int32(int32(uint32(qkv_tiles * (block + 1)) // uint32(blocks)) - first_qkv)
        for c in range(chunks):
            k = int32(FOUR * (t + c * threads))
            for i in range(FOUR * c, FOUR * (c + 1)):
                norm[i], next_norm[i] = 0, 0
            if k < width:
                put(norm, FOUR * c, load_f32x4(weight, k))
                put(next_norm, FOUR * c, load_f32x4(after, k))
        for o in range(each):
            e = int32(block + o * blocks)
            for c in range(chunks):
                k, at = int32(FOUR * (t + c * threads)), o * n_values + FOUR * c
                for i in range(at, at + FOUR):
                    router_of[i] = 0
                if k < width and e < experts:
                    put(router_of, at, load_f32x4(router, int64(e) * width + k))
        for i in range(lots):
            row = int32(output + i * (threads // FOUR))
            own_scale[i] = 0
            if row < row_tiles * TILE_ROWS:
                own_scale[i] = load_f32(s_out, first_row + row) * float32(out_scale)
        for i in range(lots_qkv):
            row = int32(output + i * (threads // FOUR))
            scales[i] = 0
            if row < rows_qkv * TILE_ROWS:
                scales[i] = load_f32(s_qkv, first_qkv * TILE_ROWS + row)

        # --- o: its part of a for each warp, and the residual, the block's own rows of it
        tag = tag_of(words, index, count)
        if index == 0:
            griddepcontrol_wait()
        for i in range(lots):
            row = int32(output + i * (threads // FOUR))
            own[i] = 0
            if row < row_tiles * TILE_ROWS:
                n = int32(first_row + row)
                if index == 0:
                    own[i] = load_f32(h, n)
                else:
                    even, odd = shown_two(words, after_at + 2 * (n & -2), tag - 1, patience)
                    own[i] = as_float(odd if n & 1 else even)
        u = warp
        while u < n_out:
            j = int32(uint32(u) % uint32(half_heads))
            k = int32(TILE_K * (j + half_heads * (lane >> 4)) + 8 * (lane & 15))
            first_shown(words, attended_at + k, tag, patience, lane)
            x0, x1, x2, x3 = shown_four(words, attended_at + k, tag, patience)
            to = int32(a_at + OF_UNIT * u + A_ROW * (lane >> 4) + 16 * (lane & 15))
            store_u32x4(smem, to, x0, x1, x2, x3)
            u = int32(u + warps)
        cuda.syncwarp()
        offsets, u = places_out(lane, int32(PAIR), int32(A_ROW)), warp
        while u < n_out:
            clear(acc)
            mbarrier_wait(smem, bars_at + 8 * u, 0)
            at = int32(a_at + OF_UNIT * u)
            to = int32(u * (PAIR * out_bytes))
            multiply_out(acc, smem, to, at, 0, offsets, int32(PAIR), lane)
            store_sum(smem, u, acc, lane)
            u = int32(u + warps)
        cuda.syncthreads()
        for i in range(lots):
            row = int32(output + i * (threads // FOUR))
            if row < row_tiles * TILE_ROWS:
                of_row = int32(row >> 4) * half_heads
                own[i] += sum_of(smem, of_row, half_heads, row & 15, quarter) * own_scale[i]
                if quarter == 0:
                    show(words, int32(h_at + 2 * (first_row + row)), tag, as_bits(own[i]))

        # --- the norm, and the logits of this block's experts
        squares = collect(v, words, h_at, tag, patience, t)
        for o in range(each):
            products[o] = 0
            for i in range(n_values):
                products[o] += v[i] * norm[i] * router_of[o * n_values + i]
        for r in range(5):
            squares += shfl_xor(squares, 1 << r)
            for o in range(each):
                products[o] += shfl_xor(products[o], 1 << r)
        if lane == 0:
            squares_of[warp] = squares
            for o in range(each):
                products_of[o * warps + warp] = products[o]
        cuda.syncthreads()
        total = float32(0)
        for i in range(warps):
            total += squares_of[i]
        by = rsqrt(total * float32(mean_of) + epsilon)
        if t < each and block + t * blocks < experts:
            logit = float32(0)
            for i in range(warps):
                logit += products_of[t * warps + i]
            at = int32(logits_at + 2 * (block + t * blocks))
            show(words, at, tag, as_bits(logit * by))
        put_x(smem, v, norm, by, t)

        # --- the choice: a thread's expert has as many before it as its rank
        e = t
        while e < experts // FOUR:
            k0, k1, k2, k3 = shown_four(words, int32(logits_at + 8 * e), tag, patience)
            values[4 * e], values[4 * e + 1] = as_float(k0), as_float(k1)
            values[4 * e + 2], values[4 * e + 3] = as_float(k2), as_float(k3)
            keys[4 * e], keys[4 * e + 1] = ordered(as_float(k0)), ordered(as_float(k1))
            keys[4 * e + 2], keys[4 * e + 3] = ordered(as_float(k2)), ordered(as_float(k3))
            e = int32(e + threads)
        e = int32(experts + t)
        while e < places:
            keys[e] = LOWEST
            e = int32(e + threads)
        cuda.syncthreads()
        part = int32(uint32(warp) // uint32(groups))
        group = int32(warp - part * groups)
        e = int32(WARP * group + lane)
        while e < experts and part < parts:
            key, rank, i = int32(keys[e]), int32(0), int32(0)
            before = int32(e - lane)  # experts below it come before all of the warp's, if equal
            while i < places // parts:
                j = int32(part * (places // parts) + i)
                k0, k1, k2, k3 = load_u32x4(keys, j)
                if before <= j < before + WARP:
                    rank = int32(rank + (1 if int32(k0) > key - (1 if j < e else 0) else 0))
                    rank = int32(rank + (1 if int32(k1) > key - (1 if j + 1 < e else 0) else 0))
                    rank = int32(rank + (1 if int32(k2) > key - (1 if j + 2 < e else 0) else 0))
                    rank = int32(rank + (1 if int32(k3) > key - (1 if j + 3 < e else 0) else 0))
                else:
                    least = int32(key - (1 if j < before else 0))
                    rank = int32(rank + (1 if int32(k0) > least else 0))
                    rank = int32(rank + (1 if int32(k1) > least else 0))
                    rank = int32(rank + (1 if int32(k2) > least else 0))
                    rank = int32(rank + (1 if int32(k3) > least else 0))
                i = int32(i + FOUR)
            ranks[part * places + e] = rank
            e = int32(e + WARP * groups)
        cuda.syncthreads()
        e = t
        while e < experts:
            rank = int32(0)
            for i in range(parts):
                rank = int32(rank + ranks[i * places + e])
            if rank < chosen:
                best[rank], ids[rank] = values[e], e
            e = int32(e + threads)
        cuda.syncthreads()

        # --- this block's share of gates: the first weights, then scales of rows
        all_items = chosen * pairs
        item = int32(uint32(all_items * block) // uint32(blocks))
        items = int32(int32(uint32(all_items * (block + 1)) // uint32(blocks)) - item)
        own_gates = shares_of_warp(int32(items * k_tiles), warp)
        own_downs = shares_of_warp(int32(n_down), warp)
        for i in range(ahead):
            issue(smem, w_gates, w_down, ids, item, int32(i), own_gates, warp, lane, block)
        for i in range(lots):
            row = int32(output + i * (threads // FOUR))
            row = int32(first_row + min(row, int32(row_tiles * TILE_ROWS - 1)))
            for p in range(PAIR * pair_lots):
                slot = int32(PAIR * (quarter + FOUR * (p // PAIR)) + p % PAIR)
                at = int32(ids[min(slot, int32(chosen - 1))] * down_rows + row)
                factors[i * PAIR * pair_lots + p] = load_f32(s_down, at)
        gate_factor, up_factor, i = float32(0), float32(0), int32(t >> 6)
        if i < items:
            row = row_of_gates(ids, item + i, output)
            gate_factor, up_factor = load_f32(s_gates, row), load_f32(s_gates, row + TILE_ROWS)

        # --- shares
        own_share, whole = float32(0), float32(0)
        if lane < chosen:
            own_share = exp2((best[lane] - best[0]) * float32(LOG2_E))
        if normed:
            whole = own_share
        else:
            e = lane
            while e < experts:
                whole += exp2((values[e] - best[0]) * float32(LOG2_E))
                e = int32(e + WARP)
        for r in range(5):
            whole += shfl_xor(whole, 1 << r)
        if warp == 0 and lane < chosen:
            shares[lane] = own_share * reciprocal(whole) * float32(down_scale)

        # --- gates and ups
        gate_offsets, u = places_gates(lane, int32(PAIR), int32(0)), warp
        behind = int32(ahead)
        while u < items * k_tiles:
            clear(acc)
            k = int32(uint32(u) % uint32(k_tiles))
            at = int32(x_at + ROW_BYTES * k + (PAD if k >= half_tiles else 0))
            to = int32(second + u * (PAIR * gate_bytes))
            mbarrier_wait(smem, bars_of_gates + 8 * u, 0)
            issue(smem, w_gates, w_down, ids, item, behind, own_gates, warp, lane, block)
            behind = int32(behind + 1)
            multiply_gates(acc, smem, to, at, 0, gate_offsets, int32(PAIR), lane)
            store_both(smem, u, acc, lane)
            u = int32(u + warps)
        cuda.syncthreads()
        i = int32(t >> 6)
        while i < items:
            row = int32(output & 15)
            gate = sum_of(smem, i * k_tiles, int32(k_tiles), row, quarter)
            up = sum_of(smem, i * k_tiles, int32(k_tiles), row + TILE_ROWS, quarter)
            gate, up = gate * (gate_factor * float32(gate_scale)), up * up_factor
            made = silu_times(gate, up * float32(gate_scale))
            other = shfl_xor(made, FOUR)
            if quarter == 0 and row & 1 == 0:
                slot = int32(uint32(item + i) // uint32(pairs))
                at = int32(slot * inner + TILE_ROWS * (item + i - slot * pairs) + row)
                show(words, int32(gates_at + at), tag, floats_to_halves(made, other))
            i = int32(i + threads // 64)
            if i < items:
                row = row_of_gates(ids, item + i, output)
                gate_factor = load_f32(s_gates, row)
                up_factor = load_f32(s_gates, row + TILE_ROWS)

        # Launches before this one have ended long since, but this has to be known before it ends.
        griddepcontrol_wait()

        # --- where gates and ups were, the next weights
        if index < count - 1:
            u = warp
            while u < rows_qkv * half_tiles:
                r = int32(uint32(u) // uint32(half_tiles))
                j = int32(u - r * half_tiles)
                if lane == 0:
                    tile = tile_index(int32(first_qkv + r), j, k_tiles)
                    other = tile_index(int32(first_qkv + r), j + half_tiles, k_tiles)
                    to, bar = int32(second + u * (PAIR * qkv_bytes)), int32(bars_of_qkv + 8 * u)
                    copy_two(smem, to, bar, w_qkv, tile, other, qkv_bytes)
                u = int32(u + warps)

        # --- downs: each warp waits for the gates that it multiplies
        u = warp
        while behind < own_gates + own_downs:
            if u < n_down and behind - ahead >= own_gates:
                mbarrier_wait(smem, bars_of_downs + 8 * u, 0)
                u = int32(u + warps)
            issue(smem, w_gates, w_down, ids, item, behind, own_gates, warp, lane, block)
            behind = int32(behind + 1)
        landed = u  # units before it have been waited for
        down_offsets, u = places_down(lane, int32(PAIR), int32(A_ROW)), warp
        while u < n_down:
            other = int32(u + warps if u + warps < n_down else u)
            first_shown(words, gates_of(u, lane), tag, patience, lane)
            x = shown_eight(words, gates_of(u, lane), gates_of(other, lane), tag, patience)
            to = int32(a_at + A_ROW * (lane >> 4) + 16 * (lane & 15))
            store_u32x4(smem, to + OF_UNIT * u, x[0], x[1], x[2], x[3])
            store_u32x4(smem, to + OF_UNIT * other, x[4], x[5], x[6], x[7])
            u = int32(u + 2 * warps)
        cuda.syncwarp()
        u = warp
        while u < n_down:
            clear(acc)
            if u >= landed:
                mbarrier_wait(smem, bars_of_downs + 8 * u, 0)
            to, at = int32(u * (PAIR * down_bytes)), int32(a_at + OF_UNIT * u)
            multiply_down(acc, smem, to, at, 0, down_offsets, int32(PAIR), lane)
            store_both(smem, u + n_gates, acc, lane)  # sums of gates and ups may still be read
            u = int32(u + warps)
        cuda.syncthreads()
        for i in range(lots):
            row = int32(output + i * (threads // FOUR))
            if row < row_tiles * TILE_ROWS:
                total = float32(0)
                for p in range(PAIR * pair_lots):
                    j, of_pair = int32(quarter + FOUR * (p // PAIR)), float32(0)
                    if j < of_slots:
                        first = int32((row >> 4) * of_slots + j) * inner_tiles + n_gates
                        for k in range(inner_tiles):
                            at = SUMS * (first + k) + 4 * ((row & 15) + TILE_ROWS * (p % PAIR))
                            of_pair += load_f32(smem, sums_at + at)
                        factor = factors[i * PAIR * pair_lots + p]
                        total += of_pair * (factor * shares[PAIR * j + p % PAIR])
                total += shfl_xor(total, 1)
                own[i] += total + shfl_xor(total, 2)
                if quarter == 0 and index < count - 1:
                    at = int32(after_at + 2 * (first_row + row))
                    show(words, at, tag, as_bits(own[i]))
                elif quarter == 0:
                    store_f32(h, first_row + row, own[i])
        if index == count - 1:
            if block == 0 and t == 0:
                next_token(words, count, tag)
            return

        # --- the next norm, then queries, keys and values
        squares = collect(v, words, after_at, tag, patience, t)
        for r in range(5):
            squares += shfl_xor(squares, 1 << r)
        if lane == 0:
            squares_of[warp] = squares
        cuda.syncthreads()
        total = float32(0)
        for i in range(warps):
            total += squares_of[i]
        by = rsqrt(total * float32(mean_of) + epsilon)
        put_x(smem, v, next_norm, by, t)
        cuda.syncthreads()
        qkv_offsets, u = places_qkv(lane, int32(PAIR), int32(x_pitch)), warp
        while u < rows_qkv * half_tiles:
            clear(acc)
            j = int32(uint32(u) % uint32(half_tiles))
            to = int32(second + u * (PAIR * qkv_bytes))
            mbarrier_wait(smem, bars_of_qkv + 8 * u, 0)
            at = int32(x_at + ROW_BYTES * j)
            multiply_qkv(acc, smem, to, at, 0, qkv_offsets, int32(PAIR), lane)
            store_sum(smem, u, acc, lane)
            u = int32(u + warps)
        cuda.syncthreads()
        for i in range(lots_qkv):
            row = int32(output + i * (threads // FOUR))
            if row < rows_qkv * TILE_ROWS:
                of_row = int32((row >> 4) * half_tiles)
                total = sum_of(smem, of_row, int32(half_tiles), row & 15, quarter)
                total *= scales[i] * float32(qkv_scale)
                other = shfl_xor(total, FOUR)
                if quarter == 0 and row & 1 == 0:
                    at = int32(qkv_at + first_qkv * TILE_ROWS + row)
                    show(words, at, tag, floats_to_halves(total, other))

    return layer


def shape_of(
    formats: tuple[str, str, str, str], width: int, heads: int, inner: int, experts: int,
    chosen: int, normed: bool, features: int, blocks: int | None = None, warps: int = WARPS,
) -> LayerShape:  # fmt: skip
    """The sizes of a launch. formats: names of `qformats.FORMATS`, of o, gates with ups, downs, and
    q, k and v. blocks: by default as many as the GPU can have at once."""
    out, gate_up, down, qkv = (storage_format(FORMATS[one]).name for one in formats)
    sizes = width, heads, inner, experts, chosen, normed, features
    most = blocks or blocks_of(width, multiprocessors())
    return LayerShape(out, gate_up, down, qkv, *sizes, most, warps)


def launch(
    shape: LayerShape, products: Sequence[tuple[Any, Any]], h: Any, weight: Any, after: Any,
    router: Any, words: Any, epsilon: float, index: int, count: int, patience: int = PATIENCE,
) -> Launch:  # fmt: skip
    """Layer number `index` of `count`, from attention's output to the next queries, keys and
    values.

    shape   : of `shape_of`; `why_not` says None of it.
    products: (packed, row scales) of o, gates with ups, downs, and queries, keys and values, by
              `qformats.repack.tiles`; those of experts as `ExpertsRequest` says, gates and ups in
              turn (`steps.product.experts.gates_and_ups`).
    h       : float32 [1, width], the residual: read by the first layer, written by the last one.
    weight, after: float32 [width], of the norm before the experts and of the one behind them.
    router  : float32 [experts, width].
    words   : uint32 [`LayerShape.words`], zeros before the first token; of launches that follow
              each other alone. `steps.kernels.between.attention` shows its output there, and finds
              queries, keys and values, of which the last layer makes none.
    patience: polls before a block gives up, and the launch ends with an error.
    """
    weights = [one for pair in products for one in pair]
    numbers = np.float32(epsilon), np.int32(index), np.int32(count), np.int32(patience)
    args = (*weights, h, weight, after, router, words, *numbers)
    block = (WARP * shape.warps,)
    return Launch(
        kernel(shape), (shape.blocks,), block, args, shape.shared, overlap=True, together=True
    )
