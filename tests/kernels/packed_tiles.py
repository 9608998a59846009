"""Weights as kernels read them of the packed tiles of `qformats.repack.tiles`: codes and floats in
registers, put where they are in the matrix."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from qformats import BLOCK, format_of
from qformats.repack import TILE_GROUP, TILE_K, TILE_ROWS, tiles
from qformats.storage import storage_format
from steps.instructions import store_u32x4
from steps.kernels.parts.weights.storage_formats import half_format, tile_format
from steps.simulator.launch import simulate
from tests.formats.test_file_formats import random_blocks


def by_row_tile(packed: np.ndarray, k_tiles: int, size: int) -> np.ndarray:
    """Flat packed tiles of `size` bytes, `k_tiles` along K -> [row tile, K tile, size]."""
    in_groups = packed.reshape(-1, k_tiles, TILE_GROUP, size)
    return np.ascontiguousarray(in_groups.transpose(0, 2, 1, 3)).reshape(-1, k_tiles, size)


def exact_weights(blocks: np.ndarray) -> np.ndarray:
    """code * scale + offset in float64 [N, K]."""
    fmt = format_of(blocks)
    codes = fmt.codes(blocks).reshape(*blocks.shape, BLOCK)
    scale, offset = fmt.scale(blocks).astype(np.float64), fmt.offset(blocks).astype(np.float64)
    return (codes * scale[..., None] + offset[..., None]).reshape(len(blocks), -1)


def blocks_with(name: str, n: int, blocks_k: int, d: Any, m: Any = 0.0) -> np.ndarray:
    """Blocks [n, blocks_k] of random codes with these scales and minima."""
    blocks = random_blocks(name, n * blocks_k, finite=True).reshape(n, blocks_k)
    blocks["d"] = d
    if "m" in blocks.dtype.names:
        blocks["m"] = m
    return blocks


@cache
def code_reader(stored: str) -> Any:
    """kernel(packed, out[tile, half, lane, 8]): one warp a packed tile."""
    form = tile_format(stored)
    load, fragments, size = form.load, form.fragments, form.tile_bytes

    @cuda.jit
    def read(packed, out):
        lane, i = cuda.threadIdx.x, cuda.blockIdx.x
        for half in range(2):
            w = fragments(load(packed, i * size, lane, half))
            at = ((2 * i + half) * 32 + lane) * 8
            store_u32x4(out, at, w[0], w[1], w[2], w[3])
            store_u32x4(out, at + 4, w[4], w[5], w[6], w[7])

    return read


@cache
def half_reader(stored: str) -> Any:
    """kernel(packed, out[tile, half, step, lane, register]): one warp a packed tile."""
    form = half_format(stored)
    words, scales, size = form.words, form.scales, form.tile_bytes
    multipliers, fragments = form.multipliers, form.fragments

    @cuda.jit(device=True, forceinline=True)
    def put(out, i, half, step, lane, f):
        store_u32x4(out, (((i * 2 + half) * 4 + step) * 32 + lane) * 4, f[0], f[1], f[2], f[3])

    @cuda.jit
    def read(packed, out):
        lane, i = cuda.threadIdx.x, cuda.blockIdx.x
        for half in range(2):
            w, s = words(packed, i * size, lane, half), scales(packed, i * size, lane, half)
            first, second = multipliers(s, 0), multipliers(s, 1)
            put(out, i, half, 0, lane, fragments(w, 0, first))
            put(out, i, half, 1, lane, fragments(w, 1, first))
            put(out, i, half, 2, lane, fragments(w, 2, second))
            put(out, i, half, 3, lane, fragments(w, 3, second))

    return read


def in_order(packed: np.ndarray, stored: str, n: int, k: int) -> tuple[np.ndarray, int, int]:
    """(the packed tiles of N rows by row and K, row tiles, K tiles)"""
    rows, k_tiles = -(-n // TILE_ROWS), -(-k // TILE_K)
    size = tile_format(stored).tile_bytes
    return by_row_tile(packed, k_tiles, size)[:rows].reshape(-1), rows, k_tiles


def codes_in_registers(packed: np.ndarray, stored: str, n: int, k: int) -> np.ndarray:
    """int64 [N, K]: byte i of register r is of row g + 8 (r & 1) and
    k = 16 (r >> 1) + 2t + (0, 8, 1, 9)[i] of a block."""
    packed, rows, k_tiles = in_order(packed, stored, n, k)
    out = np.zeros((rows * k_tiles, 2, 32, 8), np.uint32)
    simulate(code_reader(stored), len(out), 32, (packed, out))
    # row tile, K tile, half, g, t, block, 16 of it, row g or g + 8, byte: the next k, 8 further
    parts = out.view(np.int8 if tile_format(stored).signed else np.uint8)
    parts = parts.reshape(rows, k_tiles, 2, 8, 4, 2, 2, 2, 2, 2)
    parts = parts.transpose(0, 7, 3, 1, 2, 5, 6, 9, 4, 8).astype(np.int64)
    return parts.reshape(rows * TILE_ROWS, -1)[:n, :k]


def weights_in_registers(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(float64 [N, K] as float16, the factor of each row [N])"""
    fmt = format_of(blocks)
    n, k = len(blocks), blocks.shape[1] * fmt.elements
    stored = storage_format(fmt).name
    packed, factors = tiles(blocks)
    packed, rows, k_tiles = in_order(packed, stored, n, k)
    out = np.zeros((rows * k_tiles, 2, 4, 32, 4), np.uint32)
    simulate(half_reader(stored), len(out), 32, (packed, out))
    # row tile, K tile, half, step, g, t, eight, row g or g + 8, half of the register: of 16 K
    # 8 eight + 2 t + that half
    parts = out.view(np.float16).reshape(rows, k_tiles, 2, 4, 8, 4, 2, 2, 2)
    parts = parts.transpose(0, 7, 4, 1, 2, 3, 6, 5, 8)
    return parts.reshape(rows * TILE_ROWS, -1)[:n, :k].astype(np.float64), factors[:n]
